"""Measure the shipped model again and write the values on record, printing what moved.

python tests/examples/refresh_values.py [avx2 | avx512]
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from deepinfer import CompileConfig, compile_model
from deepinfer.evaluation import evaluate_text
from deepinfer.kernels.native import host_isa, supports_isa
from deepinfer.runtime.llm import LLM

FOLDER = Path(__file__).parent
RECORD = FOLDER / "shipped_values.json"
TEXT = FOLDER / "text.txt"
CHECKPOINT = FOLDER.parents[1] / "examples" / "tiny" / "checkpoint"
_DIGITS = 9


def measure(folder: Path, isa: str) -> dict[str, float]:
    """Build the shipped model for one instruction set, below `folder`, and evaluate the text."""
    options = CompileConfig(decode_rows=(1,), prefill_tokens=(64,), logits_rows=(64,), isa=isa)  # type: ignore[arg-type]
    compile_model(CHECKPOINT, folder / isa, options)
    found = evaluate_text(LLM(folder / isa, num_threads=1), TEXT.read_text("utf-8"))
    return {name: round(value, _DIGITS) for name, value in dataclasses.asdict(found).items()}


def main() -> int:
    """Refresh the record of one instruction set, this machine's best by default; the others stay."""
    isa = sys.argv[1] if len(sys.argv) > 1 else host_isa()
    if not supports_isa(isa):
        print(f"this machine does not run {isa}", file=sys.stderr)
        return 2
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), isa)
    for name, value in found.items():
        before = record.get(isa, {}).get(name)
        print(f"{isa} {name}: {before} -> {value}" if before != value else f"{isa} {name}: {value}")
    RECORD.write_text(json.dumps(record | {isa: found}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
