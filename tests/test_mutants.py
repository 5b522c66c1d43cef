"""The mutants fit the sources as they are: `make mutants` runs them, this keeps them from rotting."""

import ast
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@cache
def runner() -> ModuleType:
    path = ROOT / "tests" / "mutants" / "run.py"
    spec = importlib.util.spec_from_file_location("mutants_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def exists(node_id: str) -> bool:
    """Whether a file, or a test in it, is there; parameters are not looked at."""
    name, _, test = node_id.partition("::")
    path = ROOT / name
    return path.is_file() and (not test or test.split("::")[-1].partition("[")[0] in functions_of(path))


def test_every_mutant_fits_in_exactly_one_place_and_names_tests_that_exist() -> None:
    mutants = runner().load_mutants()
    assert len({each.id for each in mutants}) == len(mutants) > 0
    for each in mutants:
        text = runner().mutated(each, (ROOT / each.file).read_text("utf-8"))
        if each.file.endswith(".py"):
            ast.parse(text)
        assert each.tests and each.why, each.id
        assert [test for test in each.tests if not exists(test)] == [], each.id


def test_a_mutant_that_fits_nowhere_or_twice_or_changes_nothing_is_refused() -> None:
    for old, new in (("c", "d"), ("a", "d"), ("b", "b")):
        with pytest.raises(ValueError, match="M"):
            runner().mutated(runner().Mutant("M", "g", "why", "f", old, new, ()), "a b a")
    assert runner().mutated(runner().Mutant("M", "g", "why", "f", "b", "d", ()), "a b a") == "a d a"


def test_the_look_up_of_tests_finds_what_is_there_alone() -> None:
    assert exists("tests/test_mutants.py") and exists("tests/test_mutants.py::exists[x-1]")
    assert not exists("tests/test_mutants.py::absent") and not exists("tests/absent.py")
