"""Remove calls whose results nobody uses.

Why       tracing leaves unused results behind; every one of them costs lowering time.
Numerics  unchanged: a removed call has no effect on an output or on a cache region.
Keeps     writes to inputs, and writes to a temporary as long as the temporary, or a view of it, is used.
"""

from torch import fx

from deepinfer.passes.effects import base_of, written_nodes


def _live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output or an input's final content depends on."""
    writers: dict[fx.Node, list[fx.Node]] = {}  # owner of memory -> calls that write it
    for node in graph.nodes:
        for written in written_nodes(node):
            writers.setdefault(base_of(written), []).append(node)
    pending = [node for node in graph.nodes if node.op in ("placeholder", "output")]
    for owner, calls in writers.items():
        if owner.op in ("placeholder", "get_attr"):
            pending += calls
    live: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in live:
            continue
        live.add(node)
        pending += node.all_input_nodes
        owner = base_of(node)
        if owner.op == "call_function":
            pending += writers.get(owner, [])  # what was written into a used temporary is used as well
    return live


def remove_dead_code(graph_module: fx.GraphModule) -> int:
    """Erase dead calls in place and return how many there were. Placeholders always stay."""
    graph = graph_module.graph
    live = _live_nodes(graph)
    rewrites = 0
    for node in reversed(list(graph.nodes)):
        if node not in live:
            graph.erase_node(node)
            rewrites += 1
    return rewrites
