"""Runs passes over a captured program: in order, counted, timed, checked, and dumped on request.

Knows nothing about single passes, models or artifacts. Times are handed to the caller for display and are
not part of the report, which is the same for the same program and pass sources.
"""

import hashlib
import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import fx
from torch.export import ExportedProgram

from deepinfer.errors import PassError, SettingsError
from deepinfer.passes.text import graph_text
from deepinfer.passes.verify import (
    Contract,
    calls_of,
    check_changed,
    check_metadata,
    check_structure,
    contract_of,
)


@dataclass(frozen=True)
class Pass:
    """One rewrite of a graph.

    `function(graph_module)` changes the graph in place and returns the number of rewrites. An `exact` pass
    changes no bit of a result. `expected(facts)` says how often it must fire, from facts about the model;
    None means any number, and so does an answer of None. `nearest_miss(graph_module)` describes what almost
    matched, or gives None. `modules` hold code that the pass uses besides its own file.
    """

    name: str
    function: Callable[[fx.GraphModule], int]
    exact: bool = True
    expected: Callable[[Any], int | None] | None = None
    nearest_miss: Callable[[fx.GraphModule], str | None] | None = None
    modules: tuple[ModuleType, ...] = ()

    @property
    def source_sha256(self) -> str:
        """Digest of the files that hold the pass: part of an artifact's identity."""
        digest = hashlib.sha256()
        parts: tuple[Any, ...] = (self.function, *self.modules)
        for part in parts:
            source = inspect.getsourcefile(part)
            assert source is not None, f"pass {self.name} has no source file"
            digest.update(Path(source).read_bytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class PassResult:
    """What one pass did. `rewrites` is None for a pass that was switched off."""

    name: str
    exact: bool
    rewrites: int | None
    expected: int | None
    source_sha256: str
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True)
class PassReport:
    """What all passes did, in order."""

    results: tuple[PassResult, ...]

    @property
    def approximate(self) -> tuple[str, ...]:
        """Names of the passes that ran and may change results."""
        return tuple(result.name for result in self.results if not result.exact and result.rewrites)

    @property
    def disabled(self) -> tuple[str, ...]:
        """Names of the passes that were switched off."""
        return tuple(result.name for result in self.results if result.rewrites is None)

    def to_records(self) -> list[dict[str, Any]]:
        """Plain data for the artifact's pass report."""
        return [
            {
                "name": result.name,
                "exact": result.exact,
                "rewrites": result.rewrites,
                "expected": result.expected,
                "source_sha256": result.source_sha256,
            }
            for result in self.results
        ]


Progress = Callable[[str, int, float], None]  # pass name, rewrites, seconds
Record = Callable[[str, str], None]  # pass name (`captured` before the first), text of the graph after it


class PassManager:
    """An ordered list of passes, some of them switched off by name."""

    def __init__(
        self, passes: Sequence[Pass], disabled: Collection[str] = (), dump_dir: Path | None = None
    ) -> None:
        """Raises SettingsError for a disabled name that no pass has."""
        self._passes = tuple(passes)
        self._disabled = frozenset(disabled)
        self._dump_dir = dump_dir
        names = [step.name for step in self._passes]
        assert len(set(names)) == len(names), f"pass names are not unique: {names}"
        unknown = sorted(self._disabled - set(names))
        if unknown:
            raise SettingsError(
                f"there is no pass {', '.join(unknown)}",
                where="disabled passes",
                action=f"the passes are {', '.join(names)}",
            )

    def run(
        self,
        program: ExportedProgram,
        facts: Any = None,
        *,
        name: str = "graph",
        progress: Progress | None = None,
        record: Record | None = None,
    ) -> PassReport:
        """Run the pipeline on the program's graph, in place, and report; `record` is given every text.

        Raises PassError when a pass breaks a rule of the package, misreports, or fires another number of
        times than it states for `facts`.
        """
        graph_module = program.graph_module
        contract = contract_of(graph_module)
        check_structure(graph_module, contract, f"{name} before passes")
        check_metadata(graph_module, f"{name} before passes")
        text = graph_text(graph_module)
        self._keep_text(name, 0, "captured", text, record)
        results = []
        for index, step in enumerate(self._passes, start=1):
            expected = step.expected(facts) if step.expected is not None else None
            rewrites, nodes_before = None, len(graph_module.graph.nodes)
            if step.name not in self._disabled:
                where = f"{name}, pass {step.name}"
                rewrites, text = self._run_one(step, graph_module, text, contract, where, progress)
                self._keep_text(name, index, step.name, text, record)
                if expected is not None and rewrites != expected:
                    raise _wrong_count(step, graph_module, rewrites, expected, name)
            nodes = (nodes_before, len(graph_module.graph.nodes))
            results.append(PassResult(step.name, step.exact, rewrites, expected, step.source_sha256, *nodes))
        check_metadata(graph_module, f"{name} after passes")
        graph_module.recompile()
        return PassReport(tuple(results))

    def _run_one(
        self,
        step: Pass,
        graph_module: fx.GraphModule,
        before: str,
        contract: Contract,
        where: str,
        progress: Progress | None,
    ) -> tuple[int, str]:
        """Run a pass on a graph whose text is `before`; returns the rewrites and the text after it."""
        calls = calls_of(graph_module.graph)
        started = time.perf_counter()
        rewrites = step.function(graph_module)
        seconds = time.perf_counter() - started
        check_structure(graph_module, contract, where)
        after = graph_text(graph_module)
        if rewrites:
            check_changed(graph_module, calls, where)
        elif after != before:
            raise PassError("the pass changed the graph and reports no rewrite", where=where)
        if progress is not None:
            progress(step.name, rewrites, seconds)
        return rewrites, after

    def _keep_text(self, name: str, index: int, step: str, text: str, record: Record | None) -> None:
        if self._dump_dir is not None:
            folder = self._dump_dir / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{index:02d}-{step}.txt").write_text(text, encoding="utf-8")
        if record is not None:
            record(step, text)


def _wrong_count(
    step: Pass, graph_module: fx.GraphModule, rewrites: int, expected: int, name: str
) -> PassError:
    miss = step.nearest_miss(graph_module) if step.nearest_miss is not None else None
    what = f"pass {step.name} fired {rewrites} times where the model asks for {expected}"
    if miss:
        what += f"; nearest miss: {miss}"
    return PassError(what, where=name, action=f"build with the pass {step.name} disabled to go on without it")
