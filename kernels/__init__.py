"""One op per file: reference, registration and native kernels."""
