"""Rules of the code base, read from the sources: who imports whom, what is banned, what must exist.

Nothing here imports the packages it checks, so a broken module is still reported by name.
"""

import ast
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent

# Folder -> what its modules may import of the project, beside themselves and deepinfer.errors.
MAY_IMPORT = {
    "graphs": {"kernels"},
    "passes": {"kernels"},
    "kernels": set(),
    "artifacts": set(),
    "runtime": {"artifacts", "kernels"},
    "deepinfer": {"graphs", "passes", "kernels", "artifacts", "runtime"},
}

# Modules that may import inside functions, with the reason. Elsewhere a hidden import hides a cycle.
MAY_IMPORT_LAZILY = {
    "deepinfer.cli.compile": "the compiler loads only once the arguments are known to be good",
    "deepinfer.cli.diff": "as for compile",
    "deepinfer.cli.chat": "as for generate",
    "deepinfer.cli.sampling_flags": "as for generate",
    "deepinfer.cli.generate": "torch and the runtime load only once the arguments are known to be good",
    "deepinfer.cli.evaluate": "torch and the runtime load only once the arguments are known to be good",
    "deepinfer.cli.bench": "torch and the runtime load only once the arguments are known to be good",
    "deepinfer.benchmark_report": "matplotlib is an extra, and slow to import",
    "deepinfer.cli.main": "inspect and trust must not load the runtime",
    "deepinfer.passes.cuda_graph": "Triton is there only where code for a graphics card is made",
    "deepinfer.passes.cuda_target": "as for cuda_graph, and Inductor as for inductor",
    "deepinfer.passes.inductor": "Inductor takes seconds to import and only the workers of a build need it",
}

# Folders in which importing one of these packages is an error, with the reason.
FOREIGN_BANS = {
    "artifacts": ({"torch", "triton"}, "reading an artifact executes and loads nothing"),
    "runtime": (
        {"triton", "torch._inductor", "torch._dynamo", "torch.export", "torch.fx"},
        "a serving process compiles and traces nothing",
    ),
}
# These modules plan or define; they are tested by the hundred thousand steps and need no tensors.
WITHOUT_TORCH = {
    "deepinfer.runtime.scheduler",
    "deepinfer.runtime.block_pool",
    "deepinfer.runtime.sampler_interface",
    "deepinfer.runtime.sampler_reference",
    "deepinfer.runtime.token_bytes",
    "deepinfer.runtime.detokenizer",
    "deepinfer.runtime.stop_strings",
    "deepinfer.runtime.text_stream",
    "deepinfer.runtime.finish",
}

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "tarfile",
    "zipfile",
}
BANNED_NAMES = {"eval", "exec", "compile", "__import__", "breakpoint"}
BANNED_CALLS = {
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "torch.export.load",
    "torch.export.save",
    "torch.jit.load",
    "torch.package",
    "torch.hub.load",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "tempfile.mktemp",
}
BANNED_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120
LONG_FILES: dict[str, str] = {}  # path -> why it may be longer

# Modules of kernels/ that serve the operations; every other one defines one and has a test of its name.
KERNEL_HELPERS = {"__init__", "checks", "formats", "native", "philox", "registry", "sampling"}

ALLOWED_HOSTS = {"www.w3.org", "www.apache.org", "json-schema.org"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|tmp/venv|tmp/team)(?:/|\b)")
URL_HOST = re.compile(r"\b(?:https?|git|ssh)://([A-Za-z0-9.-]+)")
TEXT_SUFFIXES = {
    "",
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".json",
    ".jsonl",
    ".cpp",
    ".h",
    ".svg",
    ".cfg",
}


class Module(NamedTuple):
    """One source file of a package."""

    name: str  # as imported
    folder: str  # at the repository's root
    path: Path
    tree: ast.Module


class Import(NamedTuple):
    """One imported module, and how it is imported."""

    target: str
    line: int
    lazy: bool  # inside a function
    typing_only: bool  # below `if TYPE_CHECKING`


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for folder in MAY_IMPORT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            dotted = parts if folder == "deepinfer" else ("deepinfer", *parts)
            name = ".".join(dotted[:-1] if dotted[-1] == "__init__" else dotted)
            found.append(Module(name, folder, path, ast.parse(path.read_text("utf-8"), str(path))))
    return tuple(found)


@cache
def imports(module: Module) -> tuple[Import, ...]:
    return tuple(_imports(module.tree, lazy=False, typing_only=False))


def _imports(node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy, typing_only)
        elif isinstance(child, ast.ImportFrom):
            yield from _from_imports(child, lazy, typing_only)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guarded = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            yield from _imports(child, lazy=lazy or inside, typing_only=typing_only or guarded)


def _from_imports(node: ast.ImportFrom, lazy: bool, typing_only: bool) -> Iterator[Import]:
    """`from a import b` imports module a.b if there is one, else module a."""
    assert node.level == 0, f"line {node.lineno}: relative imports hide where a name comes from"
    base = node.module or ""
    known = {module.name for module in modules()} if base.startswith("deepinfer") else set()
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield Import(full if full in known else base, node.lineno, lazy, typing_only)


def folder_of(target: str) -> str:
    second = target.split(".")[1] if "." in target else ""
    return second if second in MAY_IMPORT else "deepinfer"


def report(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_every_folder_imports_only_what_its_place_allows() -> None:
    faults = []
    for module in modules():
        for item in imports(module):
            if item.target.split(".")[0] != "deepinfer" or item.target == "deepinfer.errors":
                continue
            folder = folder_of(item.target)
            if folder not in MAY_IMPORT[module.folder] | {module.folder}:
                faults.append(f"{module.path.relative_to(ROOT)}:{item.line} may not import {item.target}")
    report(faults)


def test_no_module_is_part_of_an_import_cycle() -> None:
    graph = {
        module.name: {
            item.target
            for item in imports(module)
            if item.target.startswith("deepinfer") and not item.typing_only and item.target != module.name
        }
        for module in modules()
    }
    report([" -> ".join(cycle) for cycle in find_cycles(graph)])


def find_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One cycle for every module that can reach itself first through it; empty when there is none."""
    done: set[str] = set()
    cycles = []

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            cycles.append([*path[path.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            visit(target, [*path, name])
        done.add(name)

    for name in sorted(graph):
        visit(name, [])
    return cycles


def test_the_search_for_cycles_finds_one() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c", "b"]]
    assert find_cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_inside_functions_stand_only_where_they_are_listed() -> None:
    lazy = [(module.name, item) for module in modules() for item in imports(module) if item.lazy]
    report(
        [
            f"{name}:{item.line} imports {item.target} inside a function"
            for name, item in lazy
            if name not in MAY_IMPORT_LAZILY
        ]
    )
    assert set(MAY_IMPORT_LAZILY) <= {name for name, _ in lazy}, "the list names a module that needs none"


def test_folders_keep_away_from_packages_they_must_work_without() -> None:
    faults = []
    for module in modules():
        banned, reason = FOREIGN_BANS.get(module.folder, (set(), ""))
        if module.name in WITHOUT_TORCH:
            banned, reason = banned | {"torch"}, "it plans without tensors"
        faults += [
            f"{module.name}:{item.line} imports {item.target}: {reason}"
            for item in imports(module)
            if any(f"{item.target}.".startswith(f"{package}.") for package in banned) and not item.typing_only
        ]
    report(faults)


def banned_uses(tree: ast.AST) -> list[str]:
    """What of security's list a source uses: modules that execute data, unsafe loaders, shells."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [
                f"{node.lineno}: {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES
            ]
        elif isinstance(node, ast.ImportFrom):
            names = {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
            found += [
                f"{node.lineno}: {name}"
                for name in names
                if name.split(".")[0] in BANNED_MODULES or name in BANNED_CALLS
            ]
        elif isinstance(node, ast.Name) and node.id in BANNED_NAMES and isinstance(node.ctx, ast.Load):
            found.append(f"{node.lineno}: {node.id}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in BANNED_CALLS:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.keyword) and node.arg in BANNED_KEYWORDS:
            found.append(f"{node.value.lineno}: {node.arg}=")
    return found


def test_nothing_in_the_package_executes_data() -> None:
    report(
        [f"{module.path.relative_to(ROOT)}:{use}" for module in modules() for use in banned_uses(module.tree)]
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "run = exec",
        "torch.load(path)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "yaml.load(text, loader)",
        "import tarfile",
    ],
)
def test_the_search_for_banned_calls_finds_them(source: str) -> None:
    assert banned_uses(ast.parse(source))


def test_the_search_for_banned_calls_leaves_namesakes_alone() -> None:
    assert not banned_uses(ast.parse("model.eval(); re.compile('x'); json.load(file); torch.compile(f)"))


def test_only_the_command_line_reads_this_project_s_environment_variables() -> None:
    faults = [
        f"{module.name}:{node.lineno} {node.value}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"DEEPINFER_\w+", node.value)
        and module.name not in {"deepinfer.cli.common", "deepinfer.settings_map"}
    ]
    report(faults)


def test_every_operation_has_a_test_file_of_its_name() -> None:
    operations = {path.stem for path in (ROOT / "kernels").glob("*.py")} - KERNEL_HELPERS
    report(
        [
            f"kernels/{name}.py needs tests/kernels/test_{name}.py"
            for name in sorted(operations)
            if not (ROOT / "tests" / "kernels" / f"test_{name}.py").exists()
        ]
    )


def test_files_and_functions_stay_short_enough_to_read() -> None:
    faults = []
    for module in modules():
        path = str(module.path.relative_to(ROOT))
        lines = len(module.path.read_text("utf-8").splitlines())
        if lines > MAX_FILE_LINES and path not in LONG_FILES:
            faults.append(f"{path} has {lines} lines, more than {MAX_FILE_LINES}")
        limit = MAX_KERNEL_LINES if module.folder == "kernels" else MAX_FUNCTION_LINES
        faults += [
            f"{path}:{node.lineno} {node.name} has {length} lines, more than {limit}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > limit
        ]
    report(faults)


def test_every_module_says_what_it_owns() -> None:
    report([f"{module.name} has no docstring" for module in modules() if not ast.get_docstring(module.tree)])


def test_nothing_is_left_unfinished() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    report(
        [
            f"{module.path.relative_to(ROOT)}:{number}: {line.strip()}"
            for module in modules()
            for number, line in enumerate(module.path.read_text("utf-8").splitlines(), start=1)
            if words.search(line)
        ]
    )


def test_the_package_says_that_it_is_typed_and_ships_what_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert (ROOT / "deepinfer" / "py.typed").exists()
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["deepinfer"]
    packages = set(project["tool"]["setuptools"]["packages"])
    assert packages == {module.name for module in modules() if module.path.name == "__init__.py"}


def test_core_dependencies_stay_few_and_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [re.split(r"[<>=!~\[; ]", line)[0] for line in project["dependencies"]]
    assert len(names) <= 8
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert [name for name in names if f"| `{name}` |" not in text] == []


def tracked_files() -> list[Path]:
    """Files under version control; every file of the tree where git or its folder is missing."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        return [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    folders = [*MAY_IMPORT, "tests", "docs", "examples", "benchmarks", ".ci"]
    return [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]


def machine_traces(text: str) -> list[str]:
    """Absolute paths of a particular machine and hosts that the project does not stand for."""
    hosts = [host for host in URL_HOST.findall(text) if host not in ALLOWED_HOSTS]
    return [match.group() for match in MACHINE_PATH.finditer(text)] + hosts


def test_tracked_files_name_no_machine_and_no_host() -> None:
    faults = []
    for path in tracked_files():
        if path == Path(__file__) or path.suffix not in TEXT_SUFFIXES or not path.is_file():
            continue
        traces = machine_traces(path.read_bytes().decode("utf-8", errors="ignore"))
        faults += [f"{path.relative_to(ROOT)}: {trace}" for trace in sorted(set(traces))]
    report(faults)


def test_the_search_for_machine_traces_finds_them() -> None:
    assert machine_traces("see /home/me/x") and machine_traces("https://example.test/simple")
    assert not machine_traces("a/root/b, ~/.cache, ./work/x, http://www.w3.org/2000/svg, framework/")
