"""Measure the shipped model again and write the values on record, printing what moved.

python tests/examples/refresh_values.py [avx2 | avx512] [--check]
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from deepinfer import CompileConfig, compile_model
from deepinfer.evaluation import evaluate_text
from deepinfer.kernels.native import ISA_LEVELS, host_isa, supports_isa
from deepinfer.runtime.llm import LLM

FOLDER = Path(__file__).parent
RECORD = FOLDER / "shipped_values.json"
TEXT = FOLDER / "text.txt"
CHECKPOINT = FOLDER.parents[1] / "examples" / "tiny" / "checkpoint"


def measure(folder: Path, isa: str, cache_dir: Path | None = None) -> dict[str, float]:
    """Build the shipped model for one instruction set, below `folder`, and evaluate the text."""
    options = CompileConfig(
        decode_rows=(1,),
        prefill_tokens=(64,),
        logits_rows=(64,),
        isa=isa,  # type: ignore[arg-type]
        taps="off",
    )
    compile_model(CHECKPOINT, folder / isa, options, cache_dir=cache_dir, certify=False)
    return dataclasses.asdict(evaluate_text(LLM(folder / isa, num_threads=1), TEXT.read_text("utf-8")))


def moved(before: Mapping[str, float], found: Mapping[str, float]) -> list[str]:
    """A line for every value that is not exactly the one before."""
    names = dict.fromkeys([*before, *found])
    changed = [name for name in names if before.get(name) != found.get(name)]
    return [f"{name}: {before.get(name)} -> {found.get(name)}" for name in changed]


def main(arguments: list[str] | None = None) -> int:
    """Refresh the record of one instruction set; the others stay. With --check nothing is written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("isa", nargs="?", default=host_isa(), choices=ISA_LEVELS)
    parser.add_argument("--check", action="store_true", help="exit 1 if a value moved, and write nothing")
    options = parser.parse_args(arguments)
    if not supports_isa(options.isa):
        parser.error(f"this machine does not run {options.isa}")
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.isa)
    changed = moved(record.get(options.isa, {}), found)
    print(f"{options.isa}: " + ("\n      ".join(changed) or "nothing moved"))
    if options.check:
        return 1 if changed else 0
    RECORD.write_text(json.dumps(record | {options.isa: found}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
