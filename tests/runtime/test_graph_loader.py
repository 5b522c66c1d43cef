"""The graph loader: what it loads, what it refuses, and what it never does."""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
import toy_graph

from deepinfer.errors import ArtifactCorruptError, ArtifactMismatchError, DeepInferError
from deepinfer.runtime import graph_loader
from deepinfer.runtime.graph_loader import CompiledGraph, ExpectedTensor

RUNNER_SOURCE = Path(__file__).parents[2] / "kernels" / "cpu" / "graph_runner.cpp"


@pytest.fixture(scope="module")
def lowered():
    return toy_graph.lowered_toy()


@pytest.fixture(scope="module")
def files(lowered):
    return lowered.shared_object.read_bytes(), lowered.extern_json.read_bytes()


@pytest.fixture
def graph(files):
    return CompiledGraph.open(*files, name="decode-4")


def constants_of(lowered, seed=0):
    weights = toy_graph.toy_weights(seed)
    return {constant.name: weights[constant.weight] for constant in lowered.constants}


def expected(specs):
    return [ExpectedTensor(spec.name, spec.dtype, spec.shape, spec.stride) for spec in specs]


def inputs(arena):
    return [*toy_graph.step_inputs(), *toy_graph.regions_of(arena)]


def eager(seed, arena):
    with torch.no_grad():
        return toy_graph.ToyStep(toy_graph.toy_weights(seed))(*inputs(arena))


def test_results_equal_eager_and_regions_are_written_in_one_arena(graph, lowered):
    graph.bind(constants_of(lowered), expected(lowered.constants))
    found_arena, wanted_arena = toy_graph.new_arena(5), toy_graph.new_arena(5)
    for a, b in zip(graph.run(inputs(found_arena)), eager(0, wanted_arena), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found_arena, wanted_arena)


def test_weights_are_used_where_they_are(graph, lowered):
    constants = constants_of(lowered)
    graph.bind(constants)
    first = graph.run(inputs(toy_graph.new_arena(1)))[0].clone()
    constants["embedding"].mul_(2)
    assert not torch.equal(graph.run(inputs(toy_graph.new_arena(1)))[0], first)


def test_weights_stay_alive_and_can_be_bound_anew(graph, lowered):
    graph.bind(constants_of(lowered, seed=0))
    graph.run(inputs(toy_graph.new_arena(1)))
    graph.bind(constants_of(lowered, seed=1))
    for a, b in zip(graph.run(inputs(toy_graph.new_arena(2))), eager(1, toy_graph.new_arena(2)), strict=True):
        assert torch.equal(a, b)


def test_two_graphs_share_one_set_of_weights(files, lowered):
    constants = constants_of(lowered)
    graphs = [CompiledGraph.open(*files, name=name) for name in ("decode-4", "decode-8")]
    for graph in graphs:
        graph.bind(constants)
    first, second = (graph.run(inputs(toy_graph.new_arena(3))) for graph in graphs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_path_is_read_and_the_file_may_go(lowered, files, tmp_path):
    path = tmp_path / "graph.so"
    path.write_bytes(files[0])
    graph = CompiledGraph.open(path, files[1])
    path.unlink()
    graph.bind(constants_of(lowered))
    assert len(graph.run(inputs(toy_graph.new_arena(1)))) == 4


def test_nothing_is_left_behind_and_the_folder_was_private(files, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    original = graph_loader._new_runner

    def look(path, device):
        folder = Path(path).parent
        seen.append((folder.stat().st_mode & 0o777, sorted(item.name for item in folder.iterdir())))
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        assert digest == hashlib.sha256(files[0]).hexdigest()
        return original(path, device)

    monkeypatch.setattr(graph_loader, "_new_runner", look)
    CompiledGraph.open(*files)
    assert seen == [(0o700, ["model.json", "model.so"])]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000, 100_000, -1])
def test_truncated_files_are_refused_and_do_not_kill_the_process(files, size):
    with pytest.raises(ArtifactCorruptError, match="decode-4: not a complete x86-64 shared object"):
        CompiledGraph.open(files[0][:size], files[1], name="decode-4")


def test_another_machine_and_other_files_are_refused(files):
    arm = bytearray(files[0])
    arm[18] = 183  # e_machine: AArch64
    for content in (bytes(arm), b"#!/bin/sh\n" * 100):
        with pytest.raises(ArtifactCorruptError):
            CompiledGraph.open(content, files[1])


def test_a_shared_object_that_is_no_graph_is_refused():
    with pytest.raises(ArtifactCorruptError, match="cannot be loaded"):
        CompiledGraph.open(Path(importlib.util.find_spec("_bisect").origin), None)


def test_a_missing_operation_is_named(files):
    renamed = files[1].replace(b"deepinfer::toy_scale", b"deepinfer::toy_scaly")
    with pytest.raises(ArtifactMismatchError, match="not registered: .*toy_scaly.*op library"):
        CompiledGraph.open(files[0], renamed)


def test_running_without_weights_is_refused(graph):
    with pytest.raises(DeepInferError, match="decode-4: has no weights yet"):
        graph.run(inputs(toy_graph.new_arena(0)))


def test_missing_and_wrong_weights_are_named(graph, lowered):
    constants, specs = constants_of(lowered), expected(lowered.constants)
    with pytest.raises(ArtifactCorruptError, match="weight norm is missing"):
        graph.bind({name: value for name, value in constants.items() if name != "norm"}, specs)
    for wrong in (constants["projection"].float(), constants["projection"][:3], constants["projection"].t()):
        with pytest.raises(ArtifactCorruptError, match="weight projection must be bfloat16"):
            graph.bind({**constants, "projection": wrong}, specs)


def test_wrong_inputs_are_named_by_check(graph, lowered):
    specs = expected(lowered.inputs)
    good = inputs(toy_graph.new_arena(0))
    graph.check(good, specs)
    with pytest.raises(ArtifactMismatchError, match="takes 5 inputs, got 4"):
        graph.check(good[:4], specs)
    with pytest.raises(ArtifactMismatchError, match="input token_ids must be int64"):
        graph.check([good[0].int(), *good[1:]], specs)
    with pytest.raises(ArtifactMismatchError, match="input keys must be uint8.* with strides"):
        graph.check([*good[:3], good[3].contiguous(), good[4]], specs)


def test_a_failing_run_is_an_error_of_one_line_and_the_graph_goes_on(graph, lowered):
    graph.bind(constants_of(lowered))
    good = inputs(toy_graph.new_arena(0))
    with pytest.raises(DeepInferError, match="decode-4: the graph failed: index out of bounds") as caught:
        graph.run([torch.tensor([3, 7, 100_000, 0]), *good[1:]])
    assert "\n" not in str(caught.value)
    wanted = eager(0, toy_graph.new_arena(4))
    assert torch.equal(graph.run(inputs(toy_graph.new_arena(4)))[0], wanted[0])


PROBE = textwrap.dedent(
    """
    import ctypes, json, os, sys, threading
    from pathlib import Path
    import torch

    started = []
    names = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
    sys.addaudithook(lambda event, _: started.append(event) if event in names else None)
    os.environ["PATH"] = ""

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.startswith(("torch._inductor", "torch._dynamo", "deepinfer.passes", "deepinfer.graphs")):
                raise ImportError(f"{name} must not be needed")

    sys.meta_path.insert(0, Refuse())
    sys.path.insert(0, sys.argv[4])
    import toy_graph
    from deepinfer.runtime.graph_loader import CompiledGraph

    toy, folder, runner = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.ops.load_library(str(toy))
    torch.classes.load_library(runner)
    graph = CompiledGraph.open(folder / "model.so", (folder / "model.json").read_bytes(), name="decode-4")
    weights = toy_graph.toy_weights(0)
    graph.bind({name: weights[name] for name in graph.constant_names})
    inputs = [*toy_graph.step_inputs(), *toy_graph.regions_of(toy_graph.new_arena(4))]

    gate = ctypes.PyDLL(str(toy)).toy_gate_set
    gate(1, 0)
    waiting, results = threading.Event(), []

    def call():
        waiting.set()
        results.append(graph.run(inputs))

    thread = threading.Thread(target=call)
    thread.start()
    waiting.wait()
    progress = 0
    for _ in range(20):  # runs only while the call has let go of the interpreter lock
        threading.Event().wait(0.01)
        progress += thread.is_alive()
    gate(1, 1)
    thread.join()
    outputs = results[0]
    loaded = [name for name in sys.modules if name.startswith(("torch._inductor", "torch._dynamo"))]
    print(json.dumps({
        "runner": type(graph._runner).__name__,
        "started": started,
        "loaded": loaded,
        "progress": progress,
        "gate_was_open": not outputs[0].isnan().any().item(),
        "sums": [outputs[1].tolist(), outputs[2].tolist()],
    }))
    """
)


def test_in_a_bare_process_the_native_runner_needs_no_compiler_and_no_lock(lowered, tmp_path):
    """No Inductor, no child process, empty PATH; and other threads run during a call."""
    runner = toy_graph.compile_library([RUNNER_SOURCE], tmp_path / "librunner.so")
    arguments = [
        toy_graph.toy_library(),
        lowered.shared_object.parent,
        runner,
        Path(toy_graph.__file__).parent,
    ]
    command = [sys.executable, "-c", PROBE, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["started"] == [] and report["loaded"] == []
    assert report["runner"] != "_TorchRunner"
    assert report["gate_was_open"] and report["progress"] > 0
    wanted = eager(0, toy_graph.new_arena(4))
    assert report["sums"] == [wanted[1].tolist(), wanted[2].tolist()]
