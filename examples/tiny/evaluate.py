"""Measures the small model on the held-out text, through deepinfer itself.

    python examples/tiny/evaluate.py --data DATA [--precision native] [--documents 10] [--json]

Every document is read in windows of the trained context that overlap by half, so that each scored token has
half a window of context where the document has it. All tokens but the first of a document count, and bits per
byte divide by the bytes of the text, as in kneser_ney.py.
"""

import argparse
import functools
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from deepinfer.evaluation import windows as overlapping_windows
from deepinfer.graphs.eager import EagerModel, single_request_inputs
from deepinfer.kernels.native import load_host_library

CHECKPOINT = Path(__file__).parent / "checkpoint"
LENGTH = 1024


windows = functools.partial(overlapping_windows, length=LENGTH)


def document_loss(model: EagerModel, tokens: list[int]) -> float:
    """Return the summed negative log-likelihood, in nats, of all tokens but the first."""
    block_table = torch.arange(1, model.layout.max_blocks_per_request + 1)
    total = 0.0
    for start, end, scored in windows(len(tokens)):
        inputs = single_request_inputs(tokens[start:end], 0, block_table, slot=1)
        logits = model.logits(model.step("prefill", inputs))
        first = scored - start
        targets = torch.tensor(tokens[scored + 1 : end])
        total += F.cross_entropy(logits[first : end - start - 1], targets, reduction="sum").item()
    return total


def evaluate(
    model_dir: Path, data: Path, precision: str, documents: int | None, *, native_ops: bool = True
) -> dict[str, float]:
    """Return tokens, bits per token, bits per byte and perplexity of the held-out documents.

    With `native_ops` the operations run in the op library; without, as their references, 20 times slower.
    """
    if native_ops:
        load_host_library()
    description = json.loads((data / "tokens.json").read_text())["splits"]["heldout"]["documents"]
    stream = np.fromfile(data / "heldout.bin", dtype=np.uint16)
    model = EagerModel.load(model_dir, precision, max_model_len=LENGTH, native_ops=native_ops)  # type: ignore[arg-type]
    loss, count, num_bytes = 0.0, 0, 0
    chosen = description if documents is None else description[:: max(1, len(description) // documents)]
    for entry in chosen:
        first = entry["first_token"]
        tokens = stream[first : first + entry["tokens"]].astype(int).tolist()
        loss += document_loss(model, tokens)
        count += len(tokens) - 1
        num_bytes += entry["bytes"]
    bits = loss / math.log(2)
    return {
        "documents": len(chosen),
        "tokens": count,
        "bits_per_token": bits / count,
        "bits_per_byte": bits / num_bytes,
        "perplexity": math.exp(loss / count),
    }


def main() -> None:
    """Print the measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--precision", choices=("native", "float32"), default="native")
    parser.add_argument("--documents", type=int, help="only so many, spread over the text")
    parser.add_argument("--reference", action="store_true", help="run the definitions, not the op library")
    options = parser.parse_args()
    measures = evaluate(
        options.model,
        options.data,
        options.precision,
        options.documents,
        native_ops=not options.reference,
    )
    print(json.dumps(measures, indent=1))


if __name__ == "__main__":
    main()
