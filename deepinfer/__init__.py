"""deepinfer: ahead-of-time compiled inference for DeepSeek-V4.1-Flash-class models."""
