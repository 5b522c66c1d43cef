"""Which language serves a call on a graphics card: Triton, or CUDA C++ where `choice.json` says so.

The two add in different orders, so a rule may name dtypes and widths and never a number of rows: a row's bits
must not depend on its company. The file is part of the sources, so a build never chooses by a race.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from deepinfer.kernels.signature import CallSignature, TensorLayout

CHOICE_FILE = Path(__file__).parent / "choice.json"


@dataclass(frozen=True)
class GateRule:
    """Calls of the router that its CUDA C++ serves; widths of its registers and of its loads."""

    op: str
    language: str
    targets: list[str]
    x: str
    weight: str
    experts_at_most: int
    top_k_at_most: int
    inputs_multiple_of: int
    why: str

    def serves(self, call: CallSignature, target: str) -> bool:
        """Whether the call is one of these."""
        if call.op.name != self.op or target not in self.targets:
            return False
        x, weight, _, _, top_k, _, _ = call.args
        assert isinstance(x, TensorLayout) and isinstance(weight, TensorLayout) and isinstance(top_k, int)
        return (
            x.dtype == getattr(torch, self.x)
            and weight.dtype == getattr(torch, self.weight)
            and len(weight.shape) == 2  # not packed for the CPU
            and weight.shape[0] <= self.experts_at_most
            and top_k <= self.top_k_at_most
            and x.shape[1] % self.inputs_multiple_of == 0
        )


@dataclass(frozen=True)
class Choice:
    """The whole file; the first rule that serves a call decides."""

    default: str
    rules: tuple[GateRule, ...]


@functools.cache
def checked_in_choice() -> Choice:
    """The rules of this version; a field too many or too few is a TypeError."""
    content = json.loads(CHOICE_FILE.read_text())
    content["rules"] = tuple(GateRule(**rule) for rule in content["rules"])
    return Choice(**content)


def language_of(call: CallSignature, target: str) -> str:
    """`cuda` or `triton`: what serves a call of this form on `target` (`sm_90`)."""
    choice = checked_in_choice()
    return next((rule.language for rule in choice.rules if rule.serves(call, target)), choice.default)
