"""Stands for a worker process in tests of what surrounds it: copies a graph that was built before.

Its first argument is a JSON object: `graphs` (folder with a folder per graph), `log` (a line per start goes
there) and optionally `hang` (names of graphs upon which it starts a child and waits forever), `fail` (message
on stderr by graph) and `seconds` (how long it takes).
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    """Do as the arguments say."""
    behaviour, job = json.loads(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    name = f"{job['phase']}-{job['bucket']}"
    with Path(behaviour["log"]).open("a") as log:
        log.write(f"{name}\n")
    if name in behaviour.get("hang", ()):
        subprocess.run(["sleep", "1000"], check=False)
    if name in behaviour.get("fail", {}):
        print(behaviour["fail"][name], file=sys.stderr)
        return 3
    time.sleep(behaviour.get("seconds", 0))
    source = Path(behaviour["graphs"]) / name
    if not source.exists():  # a bucket of the same phase will do
        source = next(Path(behaviour["graphs"]).glob(f"{job['phase']}-*"))
    for file in sorted(source.iterdir(), key=lambda file: file.name == "result.json"):
        shutil.copyfile(file, Path(job["work_dir"]) / file.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
