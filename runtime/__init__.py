"""Runs artifacts: loading, caches, scheduling, sampling. Needs no model code and no compiler."""
