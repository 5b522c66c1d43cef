"""The passes, in the order in which they run. Adding a pass is one line here."""

from deepinfer.passes.canonicalize import canonicalize
from deepinfer.passes.dead_code import remove_dead_code
from deepinfer.passes.manager import Pass

# Exact passes only: a target or precision that allows approximate ones gets a tuple of its own.
PASSES_EXACT: tuple[Pass, ...] = (
    Pass("canonicalize", canonicalize),
    Pass("remove_dead_code", remove_dead_code),
)
