"""Drawings of graphs: every line is a node, every edge has both its ends, hostile texts are refused."""

import re
from pathlib import Path

import pytest

from deepinfer.artifacts import dot as module
from deepinfer.artifacts import dot_text, parse_graph
from deepinfer.errors import ArtifactFormatError

GOLDEN = sorted((Path(__file__).parent.parent / "golden").rglob("graph.txt"))
TEXT = """\
%0 = input b_embed : bfloat16[8, 4]
%1 = input arguments_0! : uint8[3, 4] strides [8, 1]
%2 = aten.embedding.default(%0, [1, 2], "%9 (", 'it\\'s) %8') : bfloat16[2, 4]
%3 = deepinfer.mhc_mix.default(%2, %2, key=%0) : (float32[2], float32[2, 2])
%4 = getitem(%3, 0) : float32[2]
%5 = deepinfer.ring_write.default(%1, %4)
%6 = deepinfer.compress.default(%2, %1, -inf) : float32[2]
%7 = aten.clone.default(%1) : uint8[3, 4]
%8 = aten.add_.Tensor(%7, slice(None, 1, None)) : uint8[3, 4]
return [%6, (%4, %7)]
"""
NODE = re.compile(r'  (\w+) \[label="((?:[^"\\]|\\.)*)"(.*)\];')
EDGE = re.compile(r"  (\w+) -> (\w+)(?: \[([^\]]*)\])?;")


def read_dot(drawing: str) -> tuple[dict[str, tuple[str, str]], list[tuple[str, str, bool]]]:
    """Nodes by name as (label, look), and edges as (from, to, drawn as a write); all lines must be known."""
    lines = drawing.splitlines()
    assert lines[0].startswith('digraph "') and lines[0].endswith("{") and lines[-1] == "}"
    nodes: dict[str, tuple[str, str]] = {}
    edges = []
    for line in lines[1:-1]:
        if match := NODE.fullmatch(line):
            assert match[1] not in nodes
            nodes[match[1]] = (match[2], match[3])
        elif match := EDGE.fullmatch(line):
            edges.append((match[1], match[2], bool(match[3])))
        else:
            assert re.fullmatch(r'  (rankdir=TB;|label="[^"]*"; .*|node \[.*\];|edge \[.*\];)', line), line
    assert all(end in nodes for start, stop, _ in edges for end in (start, stop))
    assert len({edge[:2] for edge in edges}) == len(edges)
    return nodes, edges


def test_lines_become_nodes_with_what_they_take() -> None:
    nodes = parse_graph(TEXT, where="test")
    assert [(node.kind, node.identifier, node.uses) for node in nodes] == [
        ("input", "0", ()),
        ("cache", "1", ()),
        ("call", "2", ("0",)),
        ("call", "3", ("2", "0")),
        ("call", "4", ("3",)),
        ("call", "5", ("1", "4")),
        ("call", "6", ("2", "1")),
        ("call", "7", ("1",)),
        ("call", "8", ("7",)),
        ("return", "result", ("6", "4", "7")),
    ]
    assert [node.identifier for node in nodes if node.writes] == ["5", "6", "8"]
    assert nodes[1].name == "arguments_0" and nodes[1].value == "uint8[3, 4] strides [8, 1]"
    assert nodes[3].name == "deepinfer.mhc_mix.default"
    assert nodes[3].value == "(float32[2], float32[2, 2])"
    assert nodes[5].value == ""


def test_a_drawing_shows_results_kinds_and_writes() -> None:
    nodes, edges = read_dot(dot_text(parse_graph(TEXT, where="test"), "decode-1"))
    assert len(nodes) == 10
    assert nodes["n2"][0] == r"%2 aten.embedding.default\nbfloat16[2, 4]"
    assert nodes["n5"][0] == "%5 deepinfer.ring_write.default"
    shapes = {name: re.findall(r"shape=(\w+)", look) for name, (_, look) in nodes.items()}
    assert shapes["n0"] == ["ellipse"] and shapes["n1"] == ["cylinder"] and shapes["n2"] == []
    assert shapes["result"] == ["doubleoctagon"]
    assert [edge[:2] for edge in edges if edge[2]] == [("n1", "n5"), ("n1", "n6")]
    assert ("n1", "n7", False) in edges and ("n4", "result", False) in edges


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.parent.name)
def test_every_node_of_a_real_graph_is_drawn(path: Path) -> None:
    text = path.read_text()
    nodes, edges = read_dot(dot_text(parse_graph(text, where=str(path)), "real"))
    assert len(nodes) == text.count("\n")
    used = {
        (use, line) for line, row in enumerate(text.splitlines()) for use in re.findall(r"[(\[ ]%(\d+)", row)
    }
    assert len(edges) == len(used)
    caches = {name for name, (_, look) in nodes.items() if "cylinder" in look}
    assert {
        start for start, _, written in edges if written
    } == caches  # what the graph writes, someone writes


def test_a_hostile_text_stays_inside_its_label() -> None:
    text = '%0 = input x"];\\evil\x1b[2J\u202e : "}\\n\n%1 = f"g(%0) : y\n'
    with pytest.raises(ArtifactFormatError):
        parse_graph(text, where="test")
    drawing = dot_text(parse_graph(text.split("\n")[0], where="test"), 'a"b\n}')
    nodes, edges = read_dot("\n".join(['digraph "x" {', *drawing.splitlines()[1:]]).replace('\\"b', "b"))
    assert list(nodes) == ["n0"] and edges == []
    assert all(char.isprintable() or char == "\n" for char in drawing)
    assert drawing.startswith('digraph "a\\"b\\n}" {\n')


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("graph():\n", "line 1 is no node"),
        ("\n", "line 1 is no node"),
        ("%0 = input x : a\n%0 = input y : a\n", "line 2 is no node"),
        ("return [%0]\n", "line 1 uses a value"),
        ("%0 = f(%1) : a\n%1 = input x : a\n", "line 1 uses a value"),
        ("%0 = f(%0) : a\n", "line 1 uses a value"),
        ("%0 = f(1, (2) : a\n", "line 1 is no node"),
        ("%0 = f(1) trailing\n", "line 1 is no node"),
        ("%0 = f('open) : a\n", "line 1 is no node"),
        ("%0 = f() : a\nreturn []\nreturn []\n", "line 3 is no node"),
        ("%٣ = input x : a\n", "line 1 is no node"),
        ("%0 = f(" + "(" * 300_000 + ")\n", "line 1 is no node"),
    ],
)
def test_a_text_that_is_no_graph_is_refused(text: str, fault: str) -> None:
    with pytest.raises(ArtifactFormatError, match=fault):
        parse_graph(text, where="test")


def test_a_long_hostile_line_is_refused_and_not_searched_again_from_every_place() -> None:
    """What takes the square of its length would not come to an end here."""
    for piece in ("(", "'\\", "\\'", '"', "%1 ", "%0"):
        line = "%1 = f(" + piece * (250_000 // len(piece))
        with pytest.raises(ArtifactFormatError):
            parse_graph(f"%0 = input x : a\n{line}\n", where="test")


def test_more_than_can_be_drawn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PARTS", 10)
    with pytest.raises(ArtifactFormatError, match="too much to draw"):
        parse_graph(TEXT, where="test")
