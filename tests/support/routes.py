"""Ways to run an operation that the edge cases of its tests go through.

`TRITON_INTERPRET=1 pytest tests/kernels` (`make triton`) adds the Triton kernels, interpreted on the CPU.
"""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ROUTES = ("reference", "native", "triton") if INTERPRETED else ("reference", "native")
