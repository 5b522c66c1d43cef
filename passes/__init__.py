"""Compiler passes over captured graphs, their manager, and the lowering of the result.

The level of the graphs. A graph is what `torch.export.export` returns, not decomposed further: ATen and
`deepinfer` calls in program order, weights and inputs as placeholders, cache regions mutated in place by
`aten.index_put_` or by an op whose schema says so. `ExportedProgram.run_decompositions` must not be called:
it turns a cache write into a functional copy, and the lowered graph then clones the whole cache.

What every pass keeps (`verify.py` checks it after each one):

1. Placeholders: their number, order, names, dtypes, shapes and strides. A weight without users stays.
2. Outputs: their number, dtypes and shapes; no output shares memory with an input.
3. Effects: exactly the declared inputs are written, in program order. No read of a region moves across a
   write to it.
4. Metadata: every node carries `meta["val"]`, a fake tensor that a re-run of the node's op reproduces.
5. Purity: a pass reads no weight value, no clock, no environment; the same graph gives the same graph.
6. Exactness: a pass marked exact changes no bit of any output or of any cache region.

A pass is one file and one function `graph_module -> number of rewrites`; it changes the graph in place, and
running it again rewrites nothing. `pipeline.py` lists the passes in order.

Knows nothing about models, phases or files of an artifact.
"""

from deepinfer.passes.capture_safety import check_captured
from deepinfer.passes.frozen_values import check_same_trace
from deepinfer.passes.lower import ConstantSpec, LoweredGraph, TensorSpec, lower_graph
from deepinfer.passes.manager import Pass, PassManager, PassReport
from deepinfer.passes.pipeline import PASSES_EXACT
from deepinfer.passes.text import graph_text

__all__ = [
    "PASSES_EXACT",
    "ConstantSpec",
    "LoweredGraph",
    "Pass",
    "PassManager",
    "PassReport",
    "TensorSpec",
    "check_captured",
    "check_same_trace",
    "graph_text",
    "lower_graph",
]
