"""Patterns of operations: what the reference of an op looks like in a graph, and where a graph holds it.

A pattern is the trace of the op's reference for one form of its arguments, in the same canonical form as the
graphs: definition and pattern cannot drift apart. A match is exact. Every call of the pattern has its call in
the graph, with the same target, the same numbers and the same layouts of what comes in. What a match covers
may be used from outside through its results only, and nothing between its first and its last call may touch
memory that it writes, or write memory that it reads.
"""

import operator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deepinfer.errors import PassError
from deepinfer.kernels.registry import captured_ops
from deepinfer.kernels.signature import CallSignature, TensorLayout
from deepinfer.passes.canonicalize import canonicalize
from deepinfer.passes.dead_code import remove_dead_code
from deepinfer.passes.effects import base_of, written_nodes
from deepinfer.passes.text import call_text, target_text
from deepinfer.passes.verify import output_node


@dataclass(frozen=True, eq=False)
class Pattern:
    """The calls that make up one op.

    `inputs` are placeholders in the order of the signature's tensors; `outputs` are the results in order.
    `anchors` are the calls that no other call of the pattern uses, those with most ancestors first; a search
    starts at those of them that stand for at least half of the pattern.
    """

    signature: CallSignature
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    anchors: tuple[fx.Node, ...]
    starts: tuple[fx.Node, ...]
    size: int


class _Reference(nn.Module):
    """The reference with everything but tensors filled in."""

    def __init__(self, signature: CallSignature) -> None:
        super().__init__()
        self._signature = signature

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args = [next(given) if isinstance(arg, TensorLayout) else arg for arg in self._signature.args]
        return self._signature.op.reference(*args)


@cache
def trace_pattern(signature: CallSignature) -> Pattern:
    """Trace the reference of a composite op. Raises PassError if it makes a literal tensor."""
    where = f"pattern of {signature.op.name}"
    with FakeTensorMode(), captured_ops(fused=False), torch.no_grad():
        tensors = tuple(arg for arg in signature.example_args() if isinstance(arg, torch.Tensor))
        program = torch.export.export(_Reference(signature), tensors, strict=False)
    graph_module = program.graph_module
    canonicalize(graph_module)
    remove_dead_code(graph_module)
    graph = graph_module.graph
    inputs = tuple(graph.find_nodes(op="placeholder"))
    if len(inputs) != len(tensors):
        raise PassError(
            "the reference makes a literal tensor, which no graph can be compared with", where=where
        )
    calls = [node for node in graph.nodes if node.op == "call_function"]
    results = output_node(graph).args[0]
    assert isinstance(results, (tuple, list)), where
    outputs = tuple(node for node in results if isinstance(node, fx.Node))
    anchors = [node for node in calls if all(user.op == "output" for user in node.users)]
    sizes = {node: len(_ancestors(node)) for node in anchors}
    anchors.sort(key=lambda node: -sizes[node])
    starts = tuple(node for node in anchors if 2 * sizes[node] >= len(calls))
    return Pattern(signature, inputs, outputs, tuple(anchors), starts or tuple(anchors[:1]), len(calls))


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, pending = set(), [node]
    while pending:
        current = pending.pop()
        if current not in found and current.op == "call_function":
            found.add(current)
            pending += current.all_input_nodes
    return found


@dataclass(frozen=True, eq=False)
class Match:
    """Where a pattern was found: the graph's node for every node of the pattern that it has.

    Results that nothing uses may be missing, with the calls that only they need.
    """

    pattern: Pattern
    nodes: dict[fx.Node, fx.Node]

    @property
    def calls(self) -> set[fx.Node]:
        """The graph's calls that the match covers."""
        return {node for mine, node in self.nodes.items() if mine.op == "call_function"}


@dataclass
class Miss:
    """The attempt that came closest without success."""

    matched: int = -1
    of: int = 0
    reason: str = ""

    def consider(self, matched: int, of: int, reason: str) -> None:
        """Keep the attempt if it got further than the one at hand."""
        if matched > self.matched:
            self.matched, self.of, self.reason = matched, of, reason

    def __str__(self) -> str:
        return f"{self.matched} of {self.of} calls are there; {self.reason}" if self.matched > 0 else "none"


@dataclass
class GraphIndex:
    """Calls of a graph by target, and their order."""

    graph: fx.Graph
    by_target: dict[Any, list[fx.Node]] = field(default_factory=dict)
    order: dict[fx.Node, int] = field(default_factory=dict)
    writes: list[tuple[int, fx.Node]] = field(default_factory=list)  # place, call

    def __post_init__(self) -> None:
        for place, node in enumerate(self.graph.nodes):
            self.order[node] = place
            if node.op == "call_function":
                self.by_target.setdefault(node.target, []).append(node)
                if written_nodes(node):
                    self.writes.append((place, node))


def find_matches(graph: fx.Graph, pattern: Pattern, miss: Miss | None = None) -> list[Match]:
    """Every place where the graph holds the pattern, in program order, without overlap."""
    index, miss = GraphIndex(graph), miss if miss is not None else Miss()
    taken: set[fx.Node] = set()
    matches = []
    for anchor in pattern.starts:
        for start in index.by_target.get(anchor.target, ()):
            match = _match_at(index, pattern, (anchor, start), taken, miss) if start not in taken else None
            if match is not None:
                matches.append(match)
                taken |= match.calls
    return sorted(matches, key=lambda match: min(map(index.order.__getitem__, match.calls)))


def _match_at(
    index: GraphIndex, pattern: Pattern, start: tuple[fx.Node, fx.Node], taken: set[fx.Node], miss: Miss
) -> Match | None:
    nodes: dict[fx.Node, fx.Node] = {}
    reason = _extend(nodes, *start)
    for anchor in pattern.anchors:
        if reason:
            break
        reason = _match_anchor(index, nodes, anchor, taken)
    if not reason:
        match = Match(pattern, nodes)
        reason = "it overlaps another match" if match.calls & taken else _obstacle(index, match)
        if not reason:
            return match
    calls = sum(mine.op == "call_function" for mine in nodes)
    miss.consider(calls, pattern.size, reason)
    return None


def _match_anchor(
    index: GraphIndex, nodes: dict[fx.Node, fx.Node], anchor: fx.Node, taken: set[fx.Node]
) -> str:
    """Add a further result to a match; empty if that went well or the result is one that nobody misses."""
    if anchor in nodes:
        return ""
    reason, furthest = f"there is no {target_text(anchor.target)} for its inputs", len(nodes)
    for candidate in index.by_target.get(anchor.target, ()):
        if candidate in taken:
            continue
        trial = dict(nodes)
        why = _extend(trial, anchor, candidate)
        if not why:
            nodes.update(trial)
            return ""
        if len(trial) > furthest:
            reason, furthest = why, len(trial)
    return reason if written_nodes(anchor) else ""


def _extend(nodes: dict[fx.Node, fx.Node], mine: fx.Node, theirs: fx.Node) -> str:
    """Walk from a result to the inputs, noting pairs in `nodes`; returns what differs, or nothing."""
    pending = [(mine, theirs)]
    while pending:
        mine, theirs = pending.pop()
        if mine in nodes:
            if nodes[mine] is not theirs:
                return f"{theirs.name} stands where {nodes[mine].name} was expected"
            continue
        if mine.op == "placeholder":
            value = theirs.meta.get("val")
            wanted = TensorLayout.of(mine.meta["val"])
            if not isinstance(value, torch.Tensor) or TensorLayout.of(value) != wanted:
                return f"{theirs.name} has another layout than the input {mine.name}"
            nodes[mine] = theirs
            continue
        if theirs.op != "call_function" or theirs.target is not mine.target:
            return f"{_name(theirs)} stands where {target_text(mine.target)} was expected"
        pairs: list[tuple[fx.Node, fx.Node]] = []
        same = len(mine.args) == len(theirs.args) and mine.kwargs.keys() == theirs.kwargs.keys()
        if not same or not all(
            _same(a, b, pairs)
            for a, b in [
                *zip(mine.args, theirs.args, strict=True),
                *((mine.kwargs[key], theirs.kwargs[key]) for key in mine.kwargs),
            ]
        ):
            expected, found = (call_text(node, lambda other: "*") for node in (mine, theirs))
            return f"{theirs.name} is {found} where {expected} was expected"
        nodes[mine] = theirs
        pending += pairs
    return ""


def _name(node: fx.Node) -> str:
    return target_text(node.target) if node.op == "call_function" else f"the input {node.name}"


def _same(mine: object, theirs: object, pairs: list[tuple[fx.Node, fx.Node]]) -> bool:
    """Whether two arguments agree, up to nodes, whose pairs are collected."""
    if isinstance(mine, fx.Node):
        if isinstance(theirs, fx.Node):
            pairs.append((mine, theirs))
            return True
        return False
    if isinstance(mine, (list, tuple)):
        return (
            isinstance(theirs, (list, tuple))
            and len(mine) == len(theirs)
            and all(_same(a, b, pairs) for a, b in zip(mine, theirs, strict=True))
        )
    if isinstance(mine, float) and mine != mine:
        return isinstance(theirs, float) and theirs != theirs
    return type(mine) is type(theirs) and bool(mine == theirs)


def _obstacle(index: GraphIndex, match: Match) -> str:
    """Why the calls of a match cannot become one call in the place of the last; empty if they can."""
    calls = match.calls
    results = {match.nodes[node] for node in match.pattern.outputs if node in match.nodes}
    places = [index.order[node] for node in calls]
    first, last = min(places), max(places)
    for node in calls:
        if node in results or written_nodes(node):
            early = [user for user in node.users if user not in calls and index.order[user] < last]
            if early:
                return f"{early[0].name} uses {node.name} before the last call of the match"
        if node not in results:
            outside = [user for user in node.users if user not in calls]
            if outside:
                return f"{outside[0].name} uses the inner value {node.name}"
    return _disturbance(index, match, calls, first, last)


def _disturbance(index: GraphIndex, match: Match, calls: set[fx.Node], first: int, last: int) -> str:
    """What else touches the memory of a match between its first and last call."""
    inputs = {base_of(node) for mine, node in match.nodes.items() if mine.op == "placeholder"}
    written = {base_of(node) for call in calls for node in written_nodes(call)}
    for place, node in index.writes:
        if first < place < last and node not in calls:
            touched = {base_of(other) for other in written_nodes(node)} & (inputs | written)
            if touched:
                return f"{node.name} writes {next(iter(touched)).name} in between"
    for node, place in index.order.items() if written else ():
        between = first < place < last and node not in calls
        if between and any(base_of(other) in written for other in node.all_input_nodes):
            return f"{node.name} reads what the match writes in between"
    return ""


def replace_matches(graph: fx.Graph, matches: list[Match]) -> None:
    """Put one call of the op in the place of every match's last call. The matches come from one search."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    renamed: dict[fx.Node, fx.Node] = {}  # a match may take what an earlier one gave
    for match in matches:
        _replace(graph, match, order, renamed)


def _replace(
    graph: fx.Graph, match: Match, order: dict[fx.Node, int], renamed: dict[fx.Node, fx.Node]
) -> None:
    pattern, overload = match.pattern, match.pattern.signature.op.overload()
    last = max(match.calls, key=order.__getitem__)
    with graph.inserting_before(last):
        inputs = iter([match.nodes.get(node) or _stand_in(graph, match, node) for node in pattern.inputs])
    args: list[Any] = [
        renamed.get(node := next(inputs), node) if isinstance(arg, TensorLayout) else arg
        for arg in pattern.signature.args
    ]
    with graph.inserting_after(last):
        call = graph.call_function(overload, tuple(args))
    found = [
        (number, match.nodes[node]) for number, node in enumerate(pattern.outputs) if node in match.nodes
    ]
    values = tuple(_value(match, node) for node in pattern.outputs)
    returns = len(overload._schema.returns)
    call.meta["val"] = values if returns > 1 else values[0] if returns else None
    place = call
    for number, node in found:
        value = call
        if returns > 1:
            with graph.inserting_after(place):
                place = value = graph.call_function(operator.getitem, (call, number))
            value.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(value)
        renamed[node] = value
    for node in sorted(match.calls, key=order.__getitem__, reverse=True):
        graph.erase_node(node)


def _stand_in(graph: fx.Graph, match: Match, unread: fx.Node) -> fx.Node:
    """A value for an input that the definition does not read: any of its layout, zeros if there is none."""
    layout = TensorLayout.of(unread.meta["val"])
    known = [match.nodes[node] for node in match.pattern.inputs if node in match.nodes]
    for node in (*known, *graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and TensorLayout.of(value) == layout:
            return node
    value = _value(match, unread)
    zeros = graph.call_function(
        torch.ops.aten.zeros.default, (list(layout.shape),), {"dtype": layout.dtype, "pin_memory": False}
    )
    zeros.meta["val"] = value
    return zeros


def _value(match: Match, node: fx.Node) -> torch.Tensor:
    """What the graph's node for a node of the pattern stands for, made up where the graph has none."""
    if node in match.nodes:
        found: torch.Tensor = match.nodes[node].meta["val"]
        return found
    known = next(match.nodes[other] for other in match.pattern.inputs if other in match.nodes)
    with known.meta["val"].fake_mode:
        return TensorLayout.of(node.meta["val"]).empty()
