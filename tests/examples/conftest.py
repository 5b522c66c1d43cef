"""The scripts of examples/tiny are imported by name, as they import one another."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny"))
