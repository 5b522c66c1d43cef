"""Deliberately wrong graphs: one constant or one operation of a captured program changed, in place.

A mutation finds its place by the weights that are read there. It asserts that it found what it expects as
often as it expects it, so a change of the model that hides the place fails the test that uses it.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from deepinfer.passes.dead_code import remove_dead_code
from deepinfer.passes.text import graph_text

aten, ops = torch.ops.aten, torch.ops.deepinfer
LAYERS = 8  # of the golden model


class Place:
    """One layer of a captured graph: its calls, by part, in order."""

    def __init__(self, graph: fx.Graph, layer: int) -> None:
        self.graph, self.layer = graph, layer
        calls = [node for node in graph.nodes if node.op == "call_function"]
        mixes = [index for index, node in enumerate(calls) if node.target == ops.mhc_mix.default]
        assert len(mixes) == 2 * LAYERS
        mixes.append(len(calls))
        self.attention = calls[mixes[2 * layer] : mixes[2 * layer + 1]]
        self.ffn = calls[mixes[2 * layer + 1] : mixes[2 * layer + 2]]
        self.mixes = (self.attention[0], self.ffn[0])
        # what is written in place: the cache regions
        self.regions = {node.args[0] for node in calls if node.target == aten.index_put_.default}

    def weight(self, name: str) -> fx.Node:
        """The input of one weight of the layer."""
        wanted = f"b_layers__{self.layer}__" + name.replace(".", "__")
        return only([node for node in self.graph.find_nodes(op="placeholder") if node.name == wanted])

    def insert(self, after: fx.Node, target: Callable, *arguments: object, **kwargs: object) -> fx.Node:
        """A new call behind a node."""
        with self.graph.inserting_after(after):
            return self.graph.call_function(target, arguments, kwargs)


def only(nodes: list[fx.Node]) -> fx.Node:
    """The one node of a list."""
    assert len(nodes) == 1, f"{len(nodes)} places where one was expected: {nodes}"
    return nodes[0]


def calls(nodes: list[fx.Node], target: Callable, *tail: object) -> list[fx.Node]:
    """The calls of a target whose last arguments are `tail`."""
    found = [node for node in nodes if node.target == target]
    return [node for node in found if not tail or node.args[-len(tail) :] == tail]


def user(node: fx.Node, target: Callable) -> fx.Node:
    """The one call of a target that uses a node."""
    return only([use for use in node.users if use.target == target])


def change(node: fx.Node, position: int, old: object, new: object) -> None:
    """Replace one argument of a call, after checking what it was."""
    arguments = list(node.args)
    assert arguments[position] == old, f"{node} has {arguments[position]}, not {old}"
    arguments[position] = new
    node.args = tuple(arguments)


def replace(node: fx.Node, value: fx.Node, *others: fx.Node) -> None:
    """Let every user of a node use another value, except that value itself and `others` it is made from."""
    keep = (value, *others)
    assert node.replace_all_uses_with(value, delete_user_cb=lambda use: use not in keep)


def no_inverse_rope(place: Place) -> None:
    grouped = user(place.weight("attn.wo_a.weight"), ops.linear_fp8.default).args[0]
    flat = grouped.args[0]  # type: ignore[union-attr]
    rotated = flat.args[0]  # type: ignore[union-attr]
    assert rotated.target == aten.cat.default
    change(flat, 0, rotated, rotated.args[0][0].args[0])  # type: ignore[union-attr, index, arg-type]


def _sink(place: Place) -> tuple[fx.Node, fx.Node]:
    view = only(list(place.weight("attn.attn_sink").users))
    return view, user(user(view, aten.sub.Tensor), aten.exp.default)


def no_sink(place: Place) -> None:
    total = user(_sink(place)[1], aten.add.Tensor)
    replace(total, total.args[0])  # type: ignore[arg-type]


def sink_scaled_like_a_score(place: Place) -> None:
    view, _ = _sink(place)
    replace(view, place.insert(view, aten.mul.Tensor, view, 64**-0.5))


def window_one_shorter(place: Place) -> None:
    offsets = only(calls(place.attention, aten.arange.start_step, 15, -1, -1))
    real = user(user(offsets, aten.sub.Tensor), aten.ge.Scalar)
    inside = place.insert(real, aten.lt.Scalar, offsets, 15)
    replace(real, place.insert(inside, aten.bitwise_and.Tensor, real, inside))


def router_without_scale(place: Place) -> None:
    change(only(calls(place.ffn, aten.mul.Tensor, 1.5)), 1, 1.5, 1.0)


def router_sigmoid(place: Place) -> None:
    softplus = only(calls(place.ffn, aten.softplus.default))
    root = user(softplus, aten.sqrt.default)
    replace(root, place.insert(root, aten.sigmoid.default, softplus.args[0]))


def router_bias_in_weights(place: Place) -> None:
    biased = user(place.weight("ffn.gate.bias"), aten.add.Tensor)
    gather = only([node for node in calls(place.ffn, aten.gather.default) if node.args[0] is biased.args[0]])
    change(gather, 0, biased.args[0], biased)


def index_without_relu(place: Place) -> None:
    relu = only(calls(place.attention, aten.relu.default))
    replace(relu, relu.args[0])  # type: ignore[arg-type]


def one_pick_fewer(place: Place) -> None:
    slices = [node for node in calls(place.attention, aten.slice.Tensor, 1, 0, 8)]
    assert len(slices) == 2  # of the sorted scores and of their indices
    scores = only([node for node in slices if any(use.target == aten.gt.Scalar for use in node.users)])
    found = user(scores, aten.gt.Scalar)
    numbers = place.insert(found, aten.arange.default, 8)
    inside = place.insert(numbers, aten.lt.Scalar, numbers, 7)
    replace(found, place.insert(inside, aten.bitwise_and.Tensor, found, inside))


def _clamps(place: Place, *bounds: object) -> list[fx.Node]:
    found = calls(place.ffn, aten.clamp.default, *bounds)
    assert len(found) == 2  # of the routed experts and of the shared one
    return found


def swiglu_unclamped(place: Place) -> None:
    for node in _clamps(place, None, 1.0) + _clamps(place, -1.0, 1.0):
        replace(node, node.args[0])  # type: ignore[arg-type]


def swiglu_gate_clamped_below(place: Place) -> None:
    for node in _clamps(place, None, 1.0):
        change(node, 1, None, -1.0)


def swiglu_up_not_clamped(place: Place) -> None:
    for node in _clamps(place, -1.0, 1.0):
        replace(node, node.args[0])  # type: ignore[arg-type]


def one_sinkhorn_iteration_fewer(place: Place) -> None:
    for mix in place.mixes:
        change(mix, 4, 20, 19)


def _coefficients(place: Place, position: int) -> list[fx.Node]:
    return [only(calls(list(mix.users), operator.getitem, position)) for mix in place.mixes]


def sinkhorn_extra_row_pass(place: Place) -> None:
    for comb in _coefficients(place, 2):
        total = place.insert(comb, aten.sum.dim_IntList, comb, [-1], True)
        divided = place.insert(total, aten.div.Tensor, comb, total)
        replace(comb, divided, total)


def comb_transposed(place: Place) -> None:
    for comb in _coefficients(place, 2):
        replace(comb, place.insert(comb, aten.transpose.int, comb, 1, 2))


def post_without_factor(place: Place) -> None:
    for post in _coefficients(place, 1):
        replace(post, place.insert(post, aten.mul.Tensor, post, 0.5))


def engram_plain_sigmoid(place: Place) -> None:
    nodes = place.graph.nodes
    reads = [node for node in nodes if node.target == aten.copysign.Tensor]
    signed = reads[{1: 0, 3: 1}[place.layer]]
    assert len(reads) == 2
    gate = user(signed, aten.sigmoid.default)
    change(gate, 0, signed, signed.args[1])


def newest_block_not_pinned(place: Place) -> None:
    choices = calls(place.attention, aten.where.ScalarSelf)
    pinned = only([node for node in choices if node.args[1] == float("inf")])
    replace(pinned, pinned.args[2])  # type: ignore[arg-type]


def compressed_position_of_last_token(place: Place) -> None:
    record = user(place.weight("attn.compressor.norm"), ops.rms_norm.default)
    doubled = calls(place.attention, aten.mul.Tensor, 2)
    assert record in place.attention and len(doubled) == 2  # of the entry and of its index key
    rotation = doubled[0]
    replace(rotation, place.insert(rotation, aten.add.Tensor, rotation, 1))


def latent_visible_early(place: Place) -> None:
    below = only([node for node in calls(place.attention, aten.lt.Tensor) if _is_entry_range(node)])
    visible = below.args[1].args[0]  # type: ignore[union-attr]
    replace(visible, place.insert(visible, aten.add.Tensor, visible, 1))  # type: ignore[arg-type]


def _is_entry_range(node: fx.Node) -> bool:
    return getattr(node.args[0], "target", None) == aten.arange.default


def pool_mean(place: Place) -> None:
    # the softmax over a group is the first division of the attention part
    shares = calls(place.attention, aten.div.Tensor)[0]
    assert shares.args[0].target == aten.exp.default and len(shares.args[1].args) == 2  # type: ignore[union-attr]
    replace(shares, place.insert(shares, aten.full_like.default, shares, 0.5))


def index_query_not_quantized(place: Place) -> None:
    """Native precision: index queries skip the FP4 round trip of their keys."""
    query, keys = user_matmul(place)
    assert query.target == ops.dequantize_fp4.default and keys.target == aten.transpose.int
    rotated = query.args[0].args[0]  # type: ignore[union-attr]
    replace(query, place.insert(query, aten.to.dtype, rotated, torch.float32))


def user_matmul(place: Place) -> tuple[fx.Node, fx.Node]:
    """The operands of the product of index queries and keys."""
    relu = only(calls(place.attention, aten.relu.default))
    query, keys = relu.args[0].args  # type: ignore[union-attr]
    return query, keys  # type: ignore[return-value]


def open_group_parked_wrong(place: Place) -> None:
    """What a later step reads of an open group is a little off; this step itself is right."""
    (region,) = [
        node
        for node in place.graph.find_nodes(op="placeholder")
        if node in place.regions and tuple(node.meta["val"].shape[1:]) == (7, 128)
    ][{1: slice(0, 1), 3: slice(1, 2)}[place.layer]]
    write = user(region, aten.index_put_.default)
    change(write, 2, write.args[2], place.insert(write.args[2], aten.mul.Tensor, write.args[2], 1.01))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Mistake:
    """A mutation, the layers it is made in, and the first layer whose window record it reaches.

    A window record is made of what enters its layer, so most mistakes show in the layer behind them. Engram
    acts before the layer's window, and candidates only mask later index sources.
    """

    name: str
    mutate: Callable[[Place], None]
    layers: tuple[int, ...]
    first_differing: int | None  # None: no window record lies behind it

    def apply(self, module: fx.GraphModule) -> None:
        """Make the mistake."""
        before = graph_text(module)
        for layer in self.layers:
            self.mutate(Place(module.graph, layer))
        remove_dead_code(module)
        module.graph.lint()
        assert graph_text(module) != before, f"{self.name} changed nothing"
        module.recompile()


EVERYWHERE = tuple(range(LAYERS))

MISTAKES = (
    Mistake("no inverse rope", no_inverse_rope, (2,), 3),
    Mistake("no sink", no_sink, (0,), 1),
    Mistake("sink scaled by the softmax scale", sink_scaled_like_a_score, (6,), 7),
    Mistake("window one shorter", window_one_shorter, (5,), 6),
    Mistake("router without its scale", router_without_scale, (3,), 4),
    Mistake("router sigmoid", router_sigmoid, (1,), 2),
    Mistake("router bias in the weights", router_bias_in_weights, (7,), None),
    Mistake("index without relu", index_without_relu, (3,), 4),
    Mistake("index_topk - 1", one_pick_fewer, (6,), 7),
    Mistake("swiglu unclamped", swiglu_unclamped, (4,), 5),
    Mistake("swiglu gate clamped below too", swiglu_gate_clamped_below, (2,), 3),
    Mistake("swiglu up not clamped", swiglu_up_not_clamped, (7,), None),
    Mistake("Sinkhorn one iteration fewer", one_sinkhorn_iteration_fewer, EVERYWHERE, 1),
    Mistake("Sinkhorn extra row pass", sinkhorn_extra_row_pass, (4,), 5),
    Mistake("comb transposed", comb_transposed, (0,), 1),
    Mistake("post without factor 2", post_without_factor, (5,), 6),
    Mistake("engram plain sigmoid", engram_plain_sigmoid, (3,), 3),
    Mistake("candidate newest block not pinned", newest_block_not_pinned, (4,), 7),
    Mistake("compressed rope position at the last token", compressed_position_of_last_token, (1,), 2),
    Mistake("latent visible one entry early", latent_visible_early, (1,), 2),
    Mistake("pool mean instead of softmax", pool_mean, (3,), 4),
)

# in native precision every part is compared on equal inputs, so the layer is the one of the mistake
NATIVE_MISTAKES = {
    "attn": Mistake("index query not quantised", index_query_not_quantized, (6,), 6),
    "ffn": Mistake("Sinkhorn extra row pass", sinkhorn_extra_row_pass, (4,), 4),
    "engram": Mistake("engram plain sigmoid", engram_plain_sigmoid, (1,), 1),
    "open group": Mistake("open group parked wrong", open_group_parked_wrong, (3,), 3),
}
