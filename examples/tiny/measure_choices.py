"""Measures what the small model's discrete choices do on held-out text: experts, candidates, picked entries.

    python examples/tiny/measure_choices.py --data DATA [--documents 8]

Prints, as JSON: per layer the share of the busiest and of the least used expert, in units of the mean; per
index source the share of visible entries that the candidate blocks and the top-k leave out, by position.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.eager import EagerModel, single_request_inputs
from deepinfer.kernels.native import load_host_library

CHECKPOINT = Path(__file__).parent / "checkpoint"
LENGTH = 1024
EDGES = (0, 128, 256, 512, 1024)  # ranges of positions


class ChoiceCounter:
    """A tap that counts choices; `start` is the position of the step's first row."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.loads = {
            layer: torch.zeros(config.n_routed_experts) for layer in range(config.num_hidden_layers)
        }
        # left out, visible; by index source, kind and range of positions
        self.left_out: dict[tuple[int, str], Tensor] = {}

    def __call__(self, layer: int, name: str, value: Tensor) -> Tensor:
        config = self.config
        if name == "router_picks":
            rows = value[value[:, 0] >= 0]
            self.loads[layer] += torch.bincount(rows.flatten(), minlength=config.n_routed_experts)
        elif name == "candidates":
            kept = (value >= 0).sum(1) * config.candidate_block_size
            self._count(layer, "candidates", kept)
        elif name == "topk":
            self._count(layer, "picks", (value >= 0).sum(1))
        return value

    def _count(self, layer: int, kind: str, kept: Tensor) -> None:
        visible = (torch.arange(len(kept)) + 1) // self.config.ratio(layer)
        counts = self.left_out.setdefault((layer, kind), torch.zeros(len(EDGES) - 1, 2))
        for index, (first, last) in enumerate(zip(EDGES, EDGES[1:], strict=False)):
            left_out = (visible - kept).clamp(min=0)[first:last].sum()
            counts[index] += torch.tensor([float(left_out), float(visible[first:last].sum())])


def measure(model_dir: Path, data: Path, documents: int) -> dict[str, object]:
    """Return the figures over the first context of `documents` held-out documents."""
    load_host_library()
    model = EagerModel.load(model_dir, "native", max_model_len=LENGTH, native_ops=True)
    counter = ChoiceCounter(model.config)
    stream = np.fromfile(data / "heldout.bin", dtype=np.uint16)
    entries = json.loads((data / "tokens.json").read_text())["splits"]["heldout"]["documents"]
    entries = [entry for entry in entries if entry["tokens"] >= LENGTH][:documents]
    block_table = torch.arange(1, model.layout.max_blocks_per_request + 1)
    for entry in entries:
        tokens = stream[entry["first_token"] :][:LENGTH].astype(int).tolist()
        model.step("prefill", single_request_inputs(tokens, 0, block_table, slot=1), counter)
    shares = {layer: load / load.mean() for layer, load in counter.loads.items()}
    ranges = [f"{first}-{last - 1}" for first, last in zip(EDGES, EDGES[1:], strict=False)]
    return {
        "documents": len(entries),
        "experts": {
            layer: {"busiest": round(float(share.max()), 3), "least": round(float(share.min()), 3)}
            for layer, share in shares.items()
        },
        "left_out": {
            f"layer {layer} {kind}": {
                positions: round(float(left_out / max(1.0, float(visible))), 3)
                for positions, (left_out, visible) in zip(ranges, counts, strict=True)
            }
            for (layer, kind), counts in sorted(counter.left_out.items())
        },
    }


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--documents", type=int, default=8)
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.data, options.documents), indent=1))


if __name__ == "__main__":
    main()
