"""Runs artifacts: loading, caches, scheduling, sampling. Needs no model code and no compiler.

Importing this package asks the OpenMP library, which reads its settings once, when torch first loads it, to
let idle worker threads sleep instead of spin (see `threads.py`).
"""

from deepinfer.runtime.threads import prefer_passive_waiting

prefer_passive_waiting()
