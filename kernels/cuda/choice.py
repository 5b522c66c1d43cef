"""Which language serves a call on a graphics card: Triton, or CUDA C++ where `choice.json` says so.

The two add in different orders, so a rule may name dtypes and widths and never a number of rows: a row's bits
must not depend on its company. The file is part of the sources, so a build never chooses by a race.
"""

import functools
from pathlib import Path
from typing import Literal

import msgspec
import torch

from deepinfer.kernels.signature import CallSignature, TensorLayout

CHOICE_FILE = Path(__file__).parent / "choice.json"


class GateRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Calls of the router that its CUDA C++ serves; widths of its registers and of its loads."""

    op: Literal["moe_gate"]
    language: Literal["cuda"]
    targets: tuple[Literal["sm_90", "sm_100"], ...]
    x: Literal["bfloat16"]
    weight: Literal["bfloat16"]
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


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file; the first rule that serves a call decides."""

    default: Literal["triton"]
    rules: tuple[GateRule, ...]


@functools.cache
def checked_in_choice() -> Choice:
    """The rules of this version."""
    return msgspec.json.decode(CHOICE_FILE.read_bytes(), type=Choice)


def language_of(call: CallSignature, target: str) -> str:
    """`cuda` or `triton`: what serves a call of this form on `target` (`sm_90`)."""
    choice = checked_in_choice()
    return next((rule.language for rule in choice.rules if rule.serves(call, target)), choice.default)
