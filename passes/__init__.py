"""Compiler passes over FX graphs, their manager, and the lowering of the result."""
