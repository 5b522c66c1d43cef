"""Makes the golden tree anew and prints what moved: `python tests/golden/refresh.py`. See golden_tree.py."""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
TARGET = HERE / "v41-tiny"
MODEL = HERE.parent / "golden_data" / "v41-tiny"


def main() -> int:
    """Replace the tree; returns 0."""
    sys.path.insert(0, str(HERE.parent / "support"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from golden_tree import differences, golden_tree

    found = golden_tree(MODEL)
    paths = (path for path in TARGET.rglob("*") if path.is_file())
    recorded = {path.relative_to(TARGET).as_posix(): path.read_bytes() for path in paths}
    moved = differences(recorded, found)
    shutil.rmtree(TARGET, ignore_errors=True)
    for name, data in found.items():
        (TARGET / name).parent.mkdir(parents=True, exist_ok=True)
        (TARGET / name).write_bytes(data)
    print("\n".join(moved) if moved else "nothing moved")
    return 0


if __name__ == "__main__":
    sys.exit(main())
