"""Trains the small model on the encoded corpus. Seeded and resumable: a stopped run goes on where it was.

    python examples/tiny/train.py --data DATA --run RUN [--tokens 5000000] [--threads 1]

DATA holds train.bin and heldout.bin (uint16 token ids, see make_tokenizer.py). RUN gets the state, a log of
losses (`log.jsonl`) and, at the end or with --export-only, the checkpoint in examples/tiny/checkpoint.
The model is the step functions of deepinfer.graphs in their dense form; no second implementation.
"""

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from muon import Muon
from parameters import constants, export, format_of, initial_masters, model_weights
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer.graphs.config import ModelConfig, load_config
from deepinfer.graphs.dense import StraightThrough, forward_dense
from deepinfer.kernels.differentiable import use_native_rounding
from deepinfer.kernels.native import load_host_library
from deepinfer.kernels.training_library import load_training_library

HERE = Path(__file__).parent
CHECKPOINT = HERE / "checkpoint"
SEED = 41
LENGTH = 1024  # tokens per sequence: the trained context
SEQUENCES = 2  # per step
LEARNING_RATE, MATRIX_RATE, WARMUP_STEPS = 4e-3, 0.02, 60
WEIGHT_DECAY, CLIP = 0.1, 1.0
MOMENTS = ("momentum", "exp_avg", "exp_avg_sq")
BIAS_STEP = 2e-3  # how fast the router's bias evens the load
INDEX_LOSS, EXPLORATION = 0.05, 0.5  # weight of the indexer's loss; noise on its scores, fading to 0
SAVE_SECONDS = 600.0


@dataclass
class StepObserver:
    """A tap that collects what the losses beside cross entropy need."""

    config: ModelConfig
    noise: float
    generator: torch.Generator
    loads: dict[int, Tensor] = field(default_factory=dict)  # tokens per expert
    scores: dict[int, Tensor] = field(default_factory=dict)
    picks: dict[int, Tensor] = field(default_factory=dict)
    index_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __call__(self, layer: int, name: str, value: Tensor) -> Tensor:
        if name == "router_picks":
            self.loads[layer] = torch.bincount(value.flatten(), minlength=self.config.n_routed_experts)
        elif name == "index_score":
            self.scores[layer] = value
            if self.noise:
                uniform = torch.rand(value.shape, generator=self.generator).clamp(1e-6, 1 - 1e-6)
                return (value - self.noise * torch.log(-torch.log(uniform))).detach()
        elif name == "topk":
            self.picks[layer] = value
        elif name == "attn_mass" and layer in self.picks:
            self._compare_mass(layer, value)
        return value

    def _compare_mass(self, layer: int, mass: Tensor) -> None:
        """The indexer's scores of picked entries should rank them as the layer's attention weighs them."""
        picks = self.picks[layer]
        valid = picks >= 0
        rows = valid.sum(1) > 1
        target = torch.where(valid, mass[:, -picks.shape[1] :].detach(), 0)
        target = target / target.sum(1, keepdim=True).clamp(min=1e-9)
        scores = self.scores[layer].gather(1, picks.clamp(min=0))
        log_shares = torch.log_softmax(torch.where(valid, scores, -torch.inf)[rows], dim=1)
        divergence = F.kl_div(
            log_shares.masked_fill(~valid[rows], 0.0), target[rows], reduction="none"
        ).masked_fill(~valid[rows], 0.0)
        self.index_loss = self.index_loss + divergence.sum(1).mean()


class Run:
    """Everything that one training run carries from step to step."""

    def __init__(self, data: Path, directory: Path, total_tokens: int) -> None:
        self.directory = directory
        self.config = load_config(CHECKPOINT)
        self.tokens = np.fromfile(data / "train.bin", dtype=np.uint16)
        self.total_steps = total_tokens // (LENGTH * SEQUENCES)
        self.fixed = constants(self.config, CHECKPOINT, LENGTH)
        self.masters = initial_masters(self.config, SEED)
        self.biases = {
            layer: torch.zeros(self.config.n_routed_experts) for layer in range(self.config.num_hidden_layers)
        }
        matrices = [master for name, master in self.masters.items() if is_matrix(name)]
        others = [master for name, master in self.masters.items() if not is_matrix(name)]
        self.optimizers = (
            Muon(matrices, MATRIX_RATE, weight_decay=WEIGHT_DECAY),
            torch.optim.AdamW(
                others, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, foreach=True
            ),
        )
        self.step_number = 0
        if (directory / "state.safetensors").exists():
            self._load()

    def batch(self) -> Tensor:
        """Return the step's sequences `[SEQUENCES, LENGTH + 1]`; every epoch has an order of its own."""
        count = (len(self.tokens) - 1) // LENGTH
        first = self.step_number * SEQUENCES
        rows = []
        for number in range(first, first + SEQUENCES):
            epoch, place = divmod(number, count)
            rng = np.random.default_rng((SEED, epoch))
            offset = int(rng.integers(0, LENGTH)) if epoch else 0
            start = min(int(rng.permutation(count)[place]) * LENGTH + offset, len(self.tokens) - LENGTH - 1)
            rows.append(self.tokens[start : start + LENGTH + 1].astype(np.int64))
        return torch.from_numpy(np.stack(rows))

    def step(self) -> dict[str, float]:
        """Take one optimisation step and return its losses."""
        progress = self.step_number / self.total_steps
        share = learning_share(self.step_number, progress)
        for optimizer, rate in zip(self.optimizers, (MATRIX_RATE, LEARNING_RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + self.step_number)
        observer = StepObserver(self.config, EXPLORATION * max(0.0, 1 - 1.5 * progress), generator)
        tokens = self.batch()
        weights = model_weights(self.config, self.masters, self.biases, self.fixed)
        logits = forward_dense(self.config, StraightThrough("native"), weights, tokens[:, :-1], observer)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + INDEX_LOSS * observer.index_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for layer, load in observer.loads.items():
            self.biases[layer] += BIAS_STEP * torch.sign(load.float().mean() - load.float())
        self.step_number += 1
        busiest = max(float(load.max() / load.float().mean()) for load in observer.loads.values())
        return {
            "step": self.step_number,
            "loss": loss.item(),
            "index_loss": observer.index_loss.item(),
            "gradient_norm": float(norm),
            "busiest_expert": busiest,
            "learning_rate": LEARNING_RATE * share,
        }

    def save(self) -> None:
        """Write the state; a kill leaves the old or the new one."""
        state = {f"master.{name}": value.detach() for name, value in self.masters.items()}
        state |= {f"bias.{layer}": bias for layer, bias in self.biases.items()}
        for name, master in self.masters.items():
            for optimizer in self.optimizers:
                for key, moment in optimizer.state.get(master, {}).items():
                    if key in MOMENTS:
                        state[f"{key}.{name}"] = moment
        state["step"] = torch.tensor([self.step_number])
        self.directory.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in state.items()}, self.directory / "state.new")
        (self.directory / "state.new").rename(self.directory / "state.safetensors")

    def _load(self) -> None:
        state = load_file(self.directory / "state.safetensors")
        self.step_number = int(state["step"])
        for layer in self.biases:
            self.biases[layer] = state[f"bias.{layer}"]
        for name, master in self.masters.items():
            with torch.no_grad():
                master.copy_(state[f"master.{name}"])
            moments = {key: state[f"{key}.{name}"] for key in MOMENTS if f"{key}.{name}" in state}
            if "exp_avg" in moments:
                moments["step"] = torch.tensor(float(self.step_number))
            self.optimizers[0 if is_matrix(name) else 1].state[master] = moments


def is_matrix(name: str) -> bool:
    """Whether a master is trained by Muon."""
    return format_of(name) in ("fp8", "fp4")


def learning_share(step: int, progress: float) -> float:
    """Return the share of the learning rate at a step: warm-up, then constant, then linear to nearly zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return warm * min(1.0, max(0.02, (1 - progress) / 0.6))


def main() -> None:
    """Train, or export what is trained so far."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=5_000_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--export-only", action="store_true")
    parser.add_argument("--export-to", type=Path, default=CHECKPOINT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load_host_library()
    load_training_library()
    use_native_rounding(True)
    run = Run(options.data, options.run, options.tokens)
    if not options.export_only:
        train(run)
    export(run.config, run.masters, run.biases, options.export_to)


def train(run: Run) -> None:
    """Step until the planned number of tokens, saving from time to time."""
    options_saved = time.monotonic()
    while run.step_number < run.total_steps:
        started = time.monotonic()
        record = run.step()
        record["tokens_per_second"] = LENGTH * SEQUENCES / (time.monotonic() - started)
        run.directory.mkdir(parents=True, exist_ok=True)
        with (run.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        if run.step_number % 20 == 0:
            print(record, flush=True)
        if time.monotonic() - options_saved > SAVE_SECONDS:
            run.save()
            options_saved = time.monotonic()
    run.save()


if __name__ == "__main__":
    main()
