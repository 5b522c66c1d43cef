"""Applies small mistakes to the sources, one at a time, and demands that named tests notice each of them.

    python tests/mutants/run.py [NAME ...] [--list]

NAME is the id of a mutant or a group, the stem of a data file beside this one; without any, all run. A group
is a TOML file with one `[[mutant]]` per mistake:

    id      unique among all groups
    why     what the mistake is
    file    the source, from the repository's root
    old     text that occurs exactly once there
    new     what stands there instead
    tests   files or node ids of pytest, of which at least one test must fail

The sources are edited in a copy of the package. First the tests must pass on the copy as it is. Exit code 1:
a mutant survived or could not be run; 2: the tests fail without any.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
TIMEOUT_SECONDS = 300  # a mutant that hangs is noticed too
NOTICED, PASSED = 1, 0  # exit codes of pytest


class Mutant(NamedTuple):
    """One mistake, as its data file says."""

    id: str
    group: str
    why: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def load_mutants(folder: Path = HERE) -> list[Mutant]:
    """All groups in order of their names. Raises ValueError for an entry that is not one."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text("utf-8"))["mutant"]:
            if set(entry) != set(Mutant._fields) - {"group"}:
                raise ValueError(f"{path.name}: {entry.get('id', '?')} has the keys {sorted(entry)}")
            found.append(Mutant(**{**entry, "group": path.stem, "tests": tuple(entry["tests"])}))
    return found


def mutated(mutant: Mutant, text: str) -> str:
    """The source with the mistake in it. Raises ValueError unless it fits in exactly one place."""
    count = text.count(mutant.old)
    if count != 1 or mutant.old == mutant.new:
        raise ValueError(f"{mutant.id}: its text occurs {count} times in {mutant.file}")
    return text.replace(mutant.old, mutant.new)


class Copy:
    """The package under its import name, in a folder of its own, together with a home directory."""

    def __init__(self, folder: Path) -> None:
        self.site, self.home, self.log = folder / "site", folder / "home", folder / "log"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
        self._folders = project["tool"]["setuptools"]["package-dir"]
        for name, source in sorted(self._folders.items()):  # the outer package comes first
            ignore = shutil.ignore_patterns("__pycache__")
            target = self.site / name.replace(".", "/")
            shutil.copytree(ROOT / source, target, ignore=ignore, dirs_exist_ok=True)
        # compiled libraries: a mutant of a C++ source leaves its own here
        kept = Path.home() / ".cache" / "deepinfer"
        self.home.mkdir(mode=0o700)
        if kept.exists():
            shutil.copytree(kept, self.home / ".cache" / "deepinfer")

    @contextlib.contextmanager
    def with_mutant(self, mutant: Mutant) -> Iterator[None]:
        """The mistake is in the copy within the block."""
        folder, _, name = mutant.file.partition("/")
        package = next(package for package, source in self._folders.items() if source == folder)
        path = self.site / package.replace(".", "/") / name
        text = path.read_text("utf-8")
        path.write_text(mutated(mutant, text), "utf-8")
        try:
            yield
        finally:
            path.write_text(text, "utf-8")

    def run_tests(self, tests: Sequence[str]) -> int | None:
        """Exit code of pytest over the copy, in a process of its own; None if it took too long."""
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            with self.log.open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            os._exit(self._pytest(tests))
        end = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _pytest(self, tests: Sequence[str]) -> int:
        import pytest
        from hypothesis import Phase, settings

        settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate))  # nothing is shrunk
        settings.load_profile("mutants")
        os.chdir(ROOT)
        sys.path.insert(0, str(self.site))
        os.environ |= {
            "PYTHONPATH": str(self.site),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": str(self.home),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.home / "hypothesis"),
        }
        options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--tb=line"]
        try:
            return int(pytest.main([*options, *tests]))
        except BaseException:  # whatever the mistake raised while pytest started
            return 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="ids of mutants, or groups; default: all")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    given = parser.parse_args(arguments)
    mutants = [each for each in load_mutants() if not given.names or {each.id, each.group} & {*given.names}]
    if unknown := set(given.names) - {name for each in mutants for name in (each.id, each.group)}:
        parser.error(f"no such mutant or group: {', '.join(sorted(unknown))}")
    if given.list:
        for each in mutants:
            print(f"{each.id:<15} {each.group:<13} {each.why}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _run_all(mutants, Copy(Path(folder)))


def _run_all(mutants: Sequence[Mutant], copy: Copy) -> int:
    _import_what_is_slow()
    every_test = list(dict.fromkeys(test for each in mutants for test in each.tests))
    if copy.run_tests(every_test) != PASSED:
        print(f"the tests fail without a mutant:\n{copy.log.read_text('utf-8')}")
        return 2
    bad = []
    for each in mutants:
        start = time.monotonic()
        with copy.with_mutant(each):
            code = copy.run_tests(each.tests)
        word = {NOTICED: "killed", None: "killed: hangs", PASSED: "SURVIVED"}.get(code, f"BROKEN ({code})")
        print(
            f"{word:<14} {each.id:<15} {each.group:<13} {time.monotonic() - start:5.1f} s  {each.why}",
            flush=True,
        )
        if code not in (NOTICED, None):
            bad.append(each.id)
            if code != PASSED:
                print(copy.log.read_text("utf-8")[-2000:])
    print(f"{len(mutants) - len(bad)} of {len(mutants)} killed" + (f"; not: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def _import_what_is_slow() -> None:
    """Once, before the forks; nothing of the project, which every fork reads from the copy anew."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.dont_write_bytecode = True  # an edit within a second could be taken for the file before
    import hypothesis.strategies
    import numpy
    import torch
    import xdist

    assert all((hypothesis.strategies, numpy, torch, xdist))
    assert "deepinfer" not in sys.modules


if __name__ == "__main__":
    sys.exit(main())
