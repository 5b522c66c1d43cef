"""Access to the golden tensors of v41-tiny and the comparisons that their tests share."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


class Golden:
    """The reference results beside a golden checkpoint, loaded on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cases: dict[str, dict] = json.loads((directory / "tokens.json").read_text())
        self._files: dict[str, dict[str, Tensor]] = {}

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        if name not in self._files:
            self._files[name] = load_file(self.directory / f"golden_{name}.safetensors")
        return self._files[name]

    def tokens(self, case: str) -> list[int]:
        entry = self.cases[case]
        return entry["tokens"] if entry["kind"] == "prefill" else entry["prompt"] + entry["forced"]


def rms_ratio(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of that of the expected values."""
    expected = expected.float()
    return float((actual.float() - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())


TEXT_CASES = ["n1", "n2", "n3", "n9", "n15", "n16", "n17", "n27", "n40", "n64", "n97", "n200"]
DECODE_CASES = ["d40", "d15", "d1"]
