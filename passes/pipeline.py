"""The passes, in the order in which they run. Adding a pass is one line here."""

from collections.abc import Iterable

from deepinfer.kernels.signature import CallSignature
from deepinfer.passes.canonicalize import canonicalize
from deepinfer.passes.check_invariance import check_invariance
from deepinfer.passes.dead_code import remove_dead_code
from deepinfer.passes.fuse import fusion_passes
from deepinfer.passes.manager import Pass
from deepinfer.passes.merge_duplicates import merge_duplicates


# Exact passes only: a target or precision that allows approximate ones gets a tuple of its own.
def exact_passes(forms: Iterable[CallSignature]) -> tuple[Pass, ...]:
    """The pipeline for a graph whose model calls the ops in these forms."""
    return (
        Pass("canonicalize", canonicalize),
        Pass("remove_dead_code", remove_dead_code),
        *fusion_passes(forms),
        Pass("merge_duplicates", merge_duplicates),
        Pass("check_invariance", check_invariance),
    )


# for looking at names and sources: it knows no forms, so its fusions find nothing
PASSES_EXACT: tuple[Pass, ...] = exact_passes(())
