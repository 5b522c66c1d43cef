"""Refuses what would make a row's result depend on its company.

Why       a result is a function of the request and the weights alone. Our ops promise that; of other calls
          it holds if they move values, or compute each element by itself with one rounding.
Refuses   products of matrices, sums along an axis, softmax, exponentials and the like on floating-point
          values: stock kernels add in another order, or end with other code, at other sizes.
Rewrites  nothing. Disable it to build a graph with fusions switched off.
"""

import operator

import torch
from torch import fx

from deepinfer.errors import PassError
from deepinfer.kernels.registry import NAMESPACE
from deepinfer.passes.effects import schema_of
from deepinfer.passes.text import target_text

# element by element with one rounding, or no arithmetic at all
_NAMES = """
    _assert_tensor_metadata _to_copy _unsafe_view chunk movedim roll tensor_split unsafe_chunk unsafe_split
    abs add alias amax amin arange argmax argmin as_strided broadcast_to cat clamp
    clamp_max clamp_min clone constant_pad_nd contiguous copy detach div empty empty_like empty_strided
    eq expand expand_as fill flatten flip full full_like gather ge gt index index_put index_select
    isfinite isinf isnan le lift_fresh lift_fresh_copy logical_and logical_not logical_or lt masked_fill
    max maximum min minimum mul narrow ne neg new_empty new_full new_ones new_zeros ones ones_like pad
    permute reciprocal relu repeat reshape resolve_conj round rsub scalar_tensor scatter select slice
    slice_scatter split split_with_sizes sqrt squeeze stack sub t to transpose type_as unbind unflatten
    unfold unsqueeze view where zeros zeros_like
"""
_FINE = frozenset(_NAMES.split())


def check_invariance(graph_module: fx.GraphModule) -> int:
    """Return 0, or raise PassError that names the first call whose rows may depend on each other."""
    for node in graph_module.graph.nodes:
        op = schema_of(node)
        if op is None or node.target is operator.getitem or op.namespace == NAMESPACE:
            continue
        name = op._schema.name.rpartition("::")[2].removesuffix("_")
        if name not in _FINE and _floating(node):
            raise PassError(
                f"{node.name}: a row of {target_text(op)} may depend on the number of rows",
                where="check_invariance",
                action="let an op of deepinfer.kernels do it, or disable the pass check_invariance",
            )
    return 0


def _floating(node: fx.Node) -> bool:
    values = [node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes)]
    return any(isinstance(value, torch.Tensor) and value.dtype.is_floating_point for value in values)
