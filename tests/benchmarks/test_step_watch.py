"""The watch over steps sees what it is there to see, and an engine's steps show none of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import step_watch
import torch
from step_watch import clone_watch, compiler_watch

REGIONS = {"window": torch.zeros(3, 1001), "blocks": torch.zeros(7, 5003, dtype=torch.uint8)}
NOTHING = {"compiles": 0, "guard evaluations": 0, "Inductor imports": 0, "child processes": 0}


@pytest.fixture
def compiled() -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    function: Callable[[torch.Tensor], torch.Tensor] = torch.compile(lambda x: x + 1, backend="eager")
    return function


def test_a_compile_is_counted_and_then_its_guards(compiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with compiler_watch() as counts:
        compiled(torch.ones(3))
    assert counts["compiles"] == 1
    with compiler_watch() as counts:
        for _ in range(5):
            compiled(torch.ones(3))
    assert (counts["compiles"], counts["guard evaluations"]) == (0, 5)


def test_guards_are_counted_within_the_block_only(compiled: Callable[[torch.Tensor], torch.Tensor]) -> None:
    compiled(torch.ones(3))
    with compiler_watch() as counts:
        pass
    compiled(torch.ones(3))
    assert counts == NOTHING


def test_an_import_of_inductor_and_a_child_process_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiler_watch() as counts:
        monkeypatch.setitem(sys.modules, "torch._inductor.made_up", sys)
        subprocess.run([sys.executable, "-c", ""], check=True)
    assert counts == NOTHING | {"Inductor imports": 1, "child processes": 1}


@pytest.mark.parametrize(
    ("work", "clones"),
    [
        (lambda: REGIONS["window"].clone(), 1),
        (lambda: [REGIONS["blocks"].clone() for _ in range(3)], 3),
        (lambda: torch.empty(3 * 1001 * 4 + 7 * 5003, dtype=torch.uint8), 1),  # all of them at once
        (lambda: REGIONS["window"].add_(1), 0),
        (lambda: torch.empty(3 * 1001 * 4 - 1, dtype=torch.uint8), 0),
        (lambda: REGIONS["window"][:2].clone(), 0),
    ],
)
def test_clones_of_a_cache_are_counted(work: Callable[[], object], clones: int) -> None:
    with clone_watch(REGIONS) as counts:
        work()
    assert counts == {"cache-sized clones": clones}


@pytest.mark.slow
def test_a_clone_inside_a_compiled_graph_is_counted(tmp_path: Path) -> None:
    """Code of a graph allocates without a call that Python could see."""
    module = torch.nn.Module()
    module.forward = lambda cache: cache.clone().sort(dim=1).values  # type: ignore[method-assign]
    program = torch.export.export(module, (REGIONS["window"],))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "graph.pt2"))
    graph = torch._inductor.aoti_load_package(package)
    graph(REGIONS["window"])
    with clone_watch(REGIONS) as counts:
        graph(REGIONS["window"])
    assert counts["cache-sized clones"] >= 1


def test_an_engines_steps_do_none_of_it(float32_artifact: Path) -> None:
    command = [sys.executable, "-P", step_watch.__file__, str(float32_artifact), "1", "60"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == NOTHING | {"cache-sized clones": 0}
