"""A graph's text as a drawing for Graphviz: operations as boxes, inputs round, caches as drums.

Works from the text alone, so it needs neither torch nor the operations. An edge that a call writes through
points both ways and is red. The text may be hostile: it is parsed line by line, without recursion, and a line
that is none of a graph's is refused.
"""

import re
from dataclasses import dataclass

from deepinfer.errors import ArtifactFormatError

# these return a result and write caches as well, which no text says; all other writers return nothing
WRITERS_WITH_RESULT = frozenset({"deepinfer.compress.default", "deepinfer.compress_biased.default"})

_INPUT = re.compile(r"%([0-9]+) = input (\S+?)(!?) : ?(.*)")
_CALL = re.compile(r"%([0-9]+) = ([^\s('\"]+)\(")
# what matters inside a call: values, brackets, and quoted texts as a whole, which hold neither
_TOKEN = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|%([0-9]+)|[()'"]""")
_RETURN = re.compile(r"return\b")
_RETURN_ID = "result"
_MAX_LINE_CHARS = 256 * 1024
_MAX_PARTS = 1_000_000  # nodes and edges; the released model's graphs have some thousands


@dataclass(frozen=True)
class TextNode:
    """One line of a graph's text. `kind` is input, cache (an input that is written), call or return.

    `uses` are the identifiers of the values that it takes, in order and once each; `writes` says that the
    call changes the caches among them.
    """

    kind: str
    identifier: str
    name: str
    value: str
    uses: tuple[str, ...] = ()
    writes: bool = False


def parse_graph(text: str, *, where: str) -> list[TextNode]:
    """The nodes of a graph's text. Raises ArtifactFormatError for a line that is not one of a graph's."""
    nodes: dict[str, TextNode] = {}
    parts = 0
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        node = _parse_line(line) if len(line) <= _MAX_LINE_CHARS else None
        if node is None or node.identifier in nodes:
            raise _refused("is no node of a graph", where, number)
        if any(use not in nodes for use in node.uses):
            raise _refused("uses a value that no line above it makes", where, number)
        parts += 1 + len(node.uses)
        if parts > _MAX_PARTS:
            raise _refused(f"is beyond {_MAX_PARTS:,} nodes and edges, too much to draw", where, number)
        nodes[node.identifier] = node
    return list(nodes.values())


def _parse_line(line: str) -> TextNode | None:
    if match := _INPUT.fullmatch(line):
        number, name, mark, value = match.groups()
        return TextNode("cache" if mark else "input", number, name, value)
    if _RETURN.match(line):
        return TextNode("return", _RETURN_ID, "return", "", _uses(f"({line})", 0)[0])
    if match := _CALL.match(line):
        number, name = match.groups()
        uses, end = _uses(line, match.end() - 1)
        mark, value = line[end : end + 3], line[end + 3 :]
        if end < 0 or mark not in ("", " : "):
            return None
        operation = name.rpartition(".")[0] or name  # without the overload
        writes = not value or operation.endswith("_") or name in WRITERS_WITH_RESULT
        return TextNode("call", number, name, value, uses, writes)
    return None


def _uses(line: str, start: int) -> tuple[tuple[str, ...], int]:
    """The values in a line from `start` on, and the place after the bracket that closes the first (or -1)."""
    uses: dict[str, None] = {}
    depth = 0
    for match in _TOKEN.finditer(line, start):
        if match.group(1) is not None:
            uses[match.group(1)] = None
        elif match.group() == "(":
            depth += 1
        elif match.group() == ")":
            depth -= 1
            if depth == 0:
                return tuple(uses), match.end()
        elif match.group() in ("'", '"'):  # a quote that nothing closes
            break
    return tuple(uses), -1


def dot_text(nodes: list[TextNode], title: str) -> str:
    """The drawing, in the DOT language."""
    caches = {node.identifier for node in nodes if node.kind == "cache"}
    lines = [
        f"digraph {_quoted(title)} {{",
        "  rankdir=TB;",
        f'  label={_quoted(title)}; labelloc=t; fontname="sans-serif";',
        '  node [shape=box, style=filled, fillcolor="#f4f6fa", fontname="monospace", fontsize=10];',
        '  edge [color="#56616f", arrowsize=0.7];',
    ]
    for node in nodes:
        written = node.kind == "call" and node.writes
        lines.append(
            f"  {_identifier(node.identifier)} [label={_quoted(_label(node))}{_look(node.kind, written)}];"
        )
    for node in nodes:
        for use in node.uses:
            mark = ' [dir=both, color="#c0392b", penwidth=2]' if node.writes and use in caches else ""
            lines.append(f"  {_identifier(use)} -> {_identifier(node.identifier)}{mark};")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _label(node: TextNode) -> str:
    first = node.name if node.kind == "return" else f"%{node.identifier} {node.name}"
    return f"{first}\n{node.value}" if node.value else first


def _look(kind: str, writes: bool) -> str:
    if writes:
        return ', fillcolor="#f6c9c4", color="#c0392b"'
    return {
        "input": ', shape=ellipse, fillcolor="#e3f0df"',
        "cache": ', shape=cylinder, fillcolor="#fbe3b5"',
        "return": ', shape=doubleoctagon, fillcolor="#ffffff"',
    }.get(kind, "")


def _identifier(identifier: str) -> str:
    return identifier if identifier == _RETURN_ID else f"n{identifier}"


def _quoted(text: str) -> str:
    """A string of the DOT language; a line break stays one, all else that is not printable is spelt out."""
    lines = (
        "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
        for line in text.split("\n")
    )
    escaped = (line.replace("\\", "\\\\").replace('"', '\\"') for line in lines)
    return '"' + "\\n".join(escaped) + '"'


def _refused(what: str, where: str, number: int) -> ArtifactFormatError:
    return ArtifactFormatError(
        f"line {number} {what}",
        where=where,
        action="look at the text without --dot, or build the artifact again",
    )
