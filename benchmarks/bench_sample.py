"""Sampling from the released vocabulary against the eager forms people use: top-k first, or a full sort."""

import torch
from harness import Line, compare

from deepinfer.kernels import sample
from deepinfer.kernels.sample import make_arguments
from deepinfer.kernels.sampling import Arguments

VOCAB = 129_280
FORCED = 4096
TOP_P = 0.95


def eager_top_k(logits: torch.Tensor) -> torch.Tensor:
    """The forced top-k by torch.topk, then temperature, top-p and a draw over its columns."""
    values, ids = logits.topk(FORCED, dim=-1)
    probabilities = (values / 0.8).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= TOP_P, 0.0)
    return ids.gather(-1, torch.multinomial(probabilities, 1))


def eager_sort(logits: torch.Tensor) -> torch.Tensor:
    """Top-k and top-p as engines write them without a kernel: sort all, mask, undo the sort, draw."""
    values, ids = (logits / 0.8).sort(dim=-1, descending=False)
    edge = values.gather(-1, torch.full((len(values), 1), values.shape[-1] - FORCED))
    values = values.masked_fill(values < edge, -float("inf"))
    running = values.softmax(-1).cumsum(-1)
    values = values.masked_fill(running <= 1 - TOP_P, -float("inf"))
    probabilities = values.scatter(-1, ids, values).softmax(-1)
    noise = torch.empty_like(probabilities).exponential_()
    return probabilities.div_(noise).argmax(-1)


def arguments(rows: int, **changes: object) -> Arguments:
    """Rows shaped like a language model's: a wide bell with a few leaders."""
    a = make_arguments(rows, VOCAB, 0)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, ::1000] += 6 * torch.rand(rows, 130, generator=torch.Generator().manual_seed(1))
    plain = {
        "logits": logits,
        "temperatures": torch.full((rows,), 0.8, dtype=torch.float64),
        "top_k": torch.zeros(0, dtype=torch.int64),
        "top_p": torch.full((rows,), TOP_P, dtype=torch.float64),
        "min_p": torch.zeros(0, dtype=torch.float64),
        "mask_index": torch.zeros(0, dtype=torch.int64),
        "num_logprobs": -1,
    }
    return a._replace(**{**plain, **changes})


def run(threads: int) -> list[Line]:
    """Ratios to the eager forms, and what the options cost."""
    lines = []
    for rows in (1, 16):
        a = arguments(rows)
        result = compare(
            {
                "op": lambda a=a: sample.native(*a),
                "top-k form": lambda a=a: eager_top_k(a.logits),
                "sort form": lambda a=a: eager_sort(a.logits),
            },
            rounds=9 if rows == 1 else 3,
        )
        floors = (2.0, 50.0) if rows == 1 else (None, None)  # aims: 4 and 200
        for form, floor in zip(("top-k form", "sort form"), floors, strict=True):
            lines.append(result.line(f"sample, {rows} rows, against the eager {form}", "op", form, floor))
    plain = arguments(1)
    variants = {
        "greedy": arguments(1, temperatures=torch.zeros(1, dtype=torch.float64)),
        "top-k 50": arguments(1, top_k=torch.tensor([50])),
        "no top-p": arguments(1, top_p=torch.zeros(0, dtype=torch.float64)),
        "a mask": arguments(1, mask_index=torch.tensor([0])),
        "20 logprobs": arguments(1, num_logprobs=20),
        "20 raw logprobs": arguments(1, num_logprobs=20, raw_logprobs=True),
    }
    calls = {name: lambda a=a: sample.native(*a) for name, a in {"top-p": plain, **variants}.items()}
    result = compare(calls, rounds=5)
    lines += [result.line(f"sample, 1 row, {name}, against top-p", name, "top-p") for name in variants]
    return lines
