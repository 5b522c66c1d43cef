"""Draws the loss curve of a training run.

    python examples/tiny/plot_losses.py --log RUN/log.jsonl [--reference 3.641] --to examples/tiny/losses.png

`--reference` draws a line, in nats per token: the n-gram model's loss on the held-out text.
"""

import argparse
import json
from pathlib import Path

import numpy as np

SMOOTHING_STEPS = 40
TOKENS_PER_STEP = 2048


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--reference", type=float)
    parser.add_argument("--heldout", type=float, help="the trained model's held-out loss, nats per token")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # a run that was stopped and resumed repeats steps; the later record counts
    records = {record["step"]: record for record in map(json.loads, options.log.read_text().splitlines())}
    steps = np.array(sorted(records))
    losses = np.array([records[step]["loss"] for step in steps])
    width = min(SMOOTHING_STEPS, len(losses))
    smooth = np.convolve(losses, np.ones(width) / width, mode="valid")
    tokens = steps * TOKENS_PER_STEP / 1e6
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    axes.plot(tokens, losses, color="#b8c7dc", linewidth=0.6, label="training loss, one step")
    axes.plot(tokens[width - 1 :], smooth, color="#1f4e8c", label=f"mean of {width} steps")
    if options.reference is not None:
        axes.axhline(options.reference, color="#b5502f", linestyle="--", label="Kneser-Ney 5-gram, held out")
    if options.heldout is not None:
        axes.plot(tokens[-1:], [options.heldout], "o", color="#2f7d4f", label="trained model, held out")
    axes.set_xlabel("million tokens")
    axes.set_ylabel("nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.to, metadata={"Software": None})


if __name__ == "__main__":
    main()
