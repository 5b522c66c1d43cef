"""tests/requirements.md and tests/known_faults.md: what they name exists, and every group is complete."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| ([A-Z]{3}-\d{2}) \| (.+?) \| (.+) \|$")
NODE_ID = re.compile(r"`(tests/[\w/]+\.py(?:::\w+)?)`")


def entries() -> dict[str, str]:
    """Tests or reason by requirement."""
    found: dict[str, str] = {}
    for line in (ROOT / "tests" / "requirements.md").read_text("utf-8").splitlines():
        if match := ROW.match(line):
            assert match[1] not in found, f"{match[1]} stands twice"
            found[match[1]] = match[3]
    return found


@cache
def functions_of(name: str) -> frozenset[str]:
    path = ROOT / name
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def missing(text: str) -> list[str]:
    """Tests that a text names and that do not exist."""
    named = (node_id.partition("::") for node_id in NODE_ID.findall(text))
    return [
        f"{name}::{test}"
        for name, _, test in named
        if not functions_of(name) or (test and test not in functions_of(name))
    ]


def faults() -> dict[str, str]:
    """Tests or reason by fault."""
    lines = (ROOT / "tests" / "known_faults.md").read_text("utf-8").splitlines()
    cells = [line.strip("| ").rsplit(" | ", 1) for line in lines if line.startswith("| ")]
    return {fault: text for fault, text in cells if fault != "the fault"}


def test_every_requirement_and_fault_names_tests_that_exist_or_a_reason() -> None:
    assert len(entries()) > 50 and len(faults()) > 20
    for name, text in (entries() | faults()).items():
        assert missing(text) == [], name
        if text.startswith("none: "):
            assert len(text.split()) >= 6, f"{name} gives no reason"
        else:
            assert NODE_ID.search(text), f"{name} names no test"


def test_every_group_is_numbered_without_gaps_under_its_heading() -> None:
    text = (ROOT / "tests" / "requirements.md").read_text("utf-8")
    for section in text.split("\n## ")[1:]:
        group = section[:3]
        numbers = [int(match[1][4:]) for line in section.splitlines() if (match := ROW.match(line))]
        assert numbers == list(range(1, len(numbers) + 1)), group
        assert all(match[1].startswith(group) for line in section.splitlines() if (match := ROW.match(line)))


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert missing("`tests/test_requirements.py::entries`") == []
    assert missing("`tests/test_requirements.py::absent`, `tests/absent.py`") == [
        "tests/test_requirements.py::absent",
        "tests/absent.py::",
    ]
