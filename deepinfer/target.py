"""What code is built for: the names that `--target` and `compile.target` take, and what each stands for.

Knows nothing about how code for a target is made, nor which machine this is.
"""

from dataclasses import dataclass
from typing import Literal

from deepinfer.errors import SettingsError

TargetName = Literal["cpu", "cuda:sm_90", "cuda:sm_100"]


@dataclass(frozen=True)
class Target:
    """A kind of device and, for graphics cards, the architecture whose machine code is made.

    `arch` is None for the CPU, whose instruction set is a setting of its own (`isa`).
    """

    kind: Literal["cpu", "cuda"]
    arch: str | None = None

    @property
    def name(self) -> str:
        """As a setting writes it: `cpu`, `cuda:sm_90`."""
        return self.kind if self.arch is None else f"{self.kind}:{self.arch}"


TARGETS: dict[str, Target] = {
    target.name: target for target in (Target("cpu"), Target("cuda", "sm_90"), Target("cuda", "sm_100"))
}


def parse_target(name: str) -> Target:
    """The target called `name`. Raises SettingsError, with the allowed names, for another one."""
    if name not in TARGETS:
        raise SettingsError(
            f"must be one of {', '.join(TARGETS)}, given {name[:60]!r}", where="compile.target"
        )
    return TARGETS[name]


def require_cpu(name: str) -> None:
    """Raise SettingsError unless `name` is the target whose layouts a plan describes."""
    if parse_target(name).kind != "cpu":
        raise SettingsError(
            f"a plan is of the CPU's layouts, not of {name}", where="compile.target", action="use cpu"
        )
