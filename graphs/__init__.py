"""The model: configuration, checkpoint, step functions and their capture as FX graphs."""
