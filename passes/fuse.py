"""Fusion: where a graph holds the definition of an op, call the op instead.

Pattern   the trace of the op's reference for every form in which the model calls it (`patterns.py`).
Numerics  those of the op, whose native kernel is tested against the same reference.
Leaves    everything that differs from the definition in a single call, number or layout.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from deepinfer.kernels import (
    compress,
    compress_biased,
    engram_gate,
    engram_gather,
    engram_ids,
    index_key,
    index_topk,
    mhc_collapse,
    mhc_expand,
    moe_experts,
    moe_gate,
    moe_hash_gate,
    ring_write,
    rope,
    shared_expert,
    sparse_attention,
    window_record,
)
from deepinfer.kernels.registry import Op
from deepinfer.kernels.signature import CallSignature
from deepinfer.passes import patterns
from deepinfer.passes.manager import Pass
from deepinfer.passes.patterns import Miss, find_matches, replace_matches, trace_pattern

PREFIX = "fuse_"

# Larger ones first: `compress`, say, contains a rotation, which `rope` alone would take out of it.
FUSED_OPS: tuple[Op, ...] = (
    compress,
    compress_biased,
    index_topk,
    index_key,
    sparse_attention,
    window_record,
    moe_experts,
    shared_expert,
    moe_gate,
    moe_hash_gate,
    engram_ids,
    engram_gate,
    engram_gather,
    ring_write,
    mhc_expand,
    mhc_collapse,
    rope,
)

Counts = Mapping[str, int]  # calls by name of the op


def fusion_passes(signatures: Iterable[CallSignature]) -> tuple[Pass, ...]:
    """One pass per op that is made of others, in order, for the forms given.

    The facts that the manager is run with are the number of calls by op name; an op that they do not name
    must not occur. Facts None: any number.
    """
    forms: dict[str, list[CallSignature]] = {op.name: [] for op in FUSED_OPS}
    for signature in dict.fromkeys(signatures):
        if signature.op.composite:
            forms[signature.op.name].append(signature)
    return tuple(_fusion(op, forms[op.name]) for op in FUSED_OPS)


def _fusion(op: Op, signatures: list[CallSignature]) -> Pass:
    def fuse(graph_module: fx.GraphModule) -> int:
        """Replace every match of every form; returns their number."""
        rewrites = 0
        for signature in signatures:
            matches = find_matches(graph_module.graph, trace_pattern(signature))
            replace_matches(graph_module.graph, matches)
            rewrites += len(matches)
        return rewrites

    def nearest_miss(graph_module: fx.GraphModule) -> str | None:
        misses = []
        for signature in signatures:
            miss = Miss()
            find_matches(graph_module.graph, trace_pattern(signature), miss)
            misses.append(miss)
        best = max(misses, key=lambda miss: miss.matched, default=None)
        return str(best) if best is not None and best.matched > 0 else None

    return Pass(
        name=PREFIX + op.name,
        function=fuse,
        expected=_expected(op.name),
        nearest_miss=nearest_miss,
        modules=(patterns,),
    )


def _expected(name: str) -> Callable[[Any], int | None]:
    def expected(counts: Counts | None) -> int | None:
        return None if counts is None else counts.get(name, 0)

    return expected
