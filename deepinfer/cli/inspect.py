"""`deepinfer inspect`: what an artifact holds, or one of its graphs as text or drawing. Executes nothing."""

import argparse
from pathlib import Path
from typing import Any

from deepinfer.artifacts import inspect
from deepinfer.artifacts.dot import dot_text, parse_graph
from deepinfer.artifacts.graph_view import GraphView, view_graph
from deepinfer.cli.common import StrictParser, add_output_flags, to_json, writable_report, write_report
from deepinfer.errors import UsageError

_STDOUT = "-"
_SUMMARY = "show what an artifact holds, executing nothing"


def add_parser(commands: "argparse._SubParsersAction[StrictParser]") -> None:
    """The flags of `deepinfer inspect`."""
    parser = commands.add_parser("inspect", help=_SUMMARY, description=_SUMMARY)
    parser.add_argument("artifact", metavar="OUT", type=Path, help="artifact")
    parser.add_argument("--graph", metavar="NAME", help="print a graph, such as decode-4, as it was compiled")
    parser.add_argument("--after", metavar="PASS", help="print it as it was after a pass, or `captured`")
    parser.add_argument("--dot", metavar="FILE", help="draw it for Graphviz instead (-: on stdout)")
    add_output_flags(parser, "print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Print what was asked for. Raises DeepInferError."""
    if options.graph is not None:
        return _show_graph(options)
    for flag in ("after", "dot"):
        if getattr(options, flag) is not None:
            raise UsageError("needs --graph", where=f"--{flag}", action="name the graph to show")
    facts = inspect.describe(options.artifact)
    print(to_json(facts) if options.json else inspect.render(facts).rstrip("\n"))
    return 0


def _show_graph(options: argparse.Namespace) -> int:
    if options.dot == _STDOUT and options.json:
        raise UsageError("both go to stdout", where="--dot - --json", action="name a file for the drawing")
    if options.dot not in (None, _STDOUT):
        writable_report(Path(options.dot), options.artifact)
    view = view_graph(options.artifact, options.graph, options.after)
    facts: dict[str, Any] = {
        "artifact_id": view.artifact_id,
        "graph": view.graph,
        "after": view.after,
        "text": view.text,
    }
    if options.dot is None:
        output = "\n".join(inspect.printable(line) for line in view.text.rstrip("\n").split("\n"))
    else:
        drawing, nodes, edges = _drawing(view)
        output = drawing.rstrip("\n")
        if options.dot != _STDOUT:
            write_report(Path(options.dot), drawing)
            facts |= {"dot": options.dot, "nodes": nodes, "edges": edges}
            output = f"wrote       {options.dot}: {nodes:,} nodes, {edges:,} edges"
    print(to_json(facts) if options.json else output)
    return 0


def _drawing(view: GraphView) -> tuple[str, int, int]:
    """The drawing of a graph, and how many nodes and edges it has."""
    title = view.graph if view.after is None else f"{view.graph} after {view.after}"
    nodes = parse_graph(view.text, where=title)
    return dot_text(nodes, title), len(nodes), sum(len(node.uses) for node in nodes)
