"""Lowering: same bytes for the same graph, no weights inside, caches in place, failures with names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import toy_graph
from torch import nn

from deepinfer.errors import LoweringError
from deepinfer.passes import lower_graph
from deepinfer.runtime.graph_loader import CompiledGraph


@pytest.fixture(scope="module")
def lowered():
    return toy_graph.lowered_toy()


@pytest.fixture(scope="module")
def lowered_elsewhere(tmp_path_factory):
    """The same step lowered by another process: other folder, other threads, other weight values."""
    folder = tmp_path_factory.mktemp("elsewhere") / "a folder"
    command = [sys.executable, toy_graph.__file__, str(toy_graph.toy_library()), str(folder), "7", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "5"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Path(path) for path in json.loads(done.stdout.splitlines()[-1])]


def open_with(lowered, weights):
    graph = CompiledGraph.open(lowered.shared_object, lowered.extern_json.read_bytes(), name="decode-4")
    graph.bind({constant.name: weights[constant.weight] for constant in lowered.constants})
    return graph


def test_same_bytes_whatever_the_folder_process_threads_and_weight_values(lowered, lowered_elsewhere):
    shared_object, extern_json = lowered_elsewhere
    assert shared_object.read_bytes() == lowered.shared_object.read_bytes()
    assert extern_json.read_bytes() == lowered.extern_json.read_bytes()


def test_no_path_of_the_builder_is_in_the_files(lowered):
    content = lowered.shared_object.read_bytes() + lowered.extern_json.read_bytes()
    for path in (toy_graph.scratch(), toy_graph.TORCH_DIR, Path.cwd(), Path.home()):
        assert str(path).encode() not in content


def test_the_work_dir_holds_the_two_files_and_nothing_else(lowered):
    assert sorted(path.name for path in lowered.shared_object.parent.iterdir()) == ["model.json", "model.so"]


def test_used_weights_are_listed_and_unused_are_not(lowered):
    weights = toy_graph.toy_weights(0)
    assert sorted(constant.weight for constant in lowered.constants) == sorted(set(weights) - {"unused"})
    for constant in lowered.constants:
        weight = weights[constant.weight]
        assert (constant.shape, constant.stride) == (tuple(weight.shape), weight.stride())
        assert f"torch.{constant.dtype}" == str(weight.dtype)


def test_signature_names_what_is_written(lowered):
    assert [(spec.name, spec.mutated) for spec in lowered.inputs] == [
        ("token_ids", False),
        ("positions", False),
        ("block_table", False),
        ("keys", True),
        ("values", True),
    ]
    assert lowered.inputs[3].stride == (toy_graph.BLOCK_BYTES, toy_graph.RECORD, 1)
    assert [(spec.dtype, spec.shape) for spec in lowered.outputs] == [
        ("bfloat16", (4, 64)),
        ("int64", (4, 2)),
        ("int64", (4, 2)),
        ("bfloat16", (4, 66)),
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_results_and_arena_equal_eager_by_bytes_for_any_weights(lowered, seed):
    weights = toy_graph.toy_weights(seed)
    graph = open_with(lowered, weights)
    arena, expected_arena = toy_graph.new_arena(seed), toy_graph.new_arena(seed)
    found = graph.run([*toy_graph.step_inputs(), *toy_graph.regions_of(arena)])
    with torch.no_grad():
        step = toy_graph.ToyStep(weights)
        expected = step(*toy_graph.step_inputs(), *toy_graph.regions_of(expected_arena))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(arena, expected_arena)
    assert not torch.equal(arena, toy_graph.new_arena(seed))


def test_small_weights_are_not_inlined(lowered):
    weights = toy_graph.toy_weights(0)
    graph = open_with(lowered, weights)
    inputs = [*toy_graph.step_inputs(), *toy_graph.regions_of(toy_graph.new_arena(0))]
    before = graph.run(inputs)[0].clone()
    for name in ("four", "scalar"):
        weights[name].add_(5.0)
        after = graph.run(inputs)[0].clone()
        assert not torch.equal(before, after), name
        before = after


class TwoHalves(nn.Module):
    """Writes one record in two parts, which cannot stay in place."""

    def forward(self, index, record, region):
        region[index, :3] = record[:, :3]
        region[index, 3:] = record[:, 3:]
        return (record + 1,)


class WritesThenReturnsOld(nn.Module):
    """Needs the whole region as it was before the write."""

    def forward(self, index, record, region):
        old = region * 2
        region.index_put_((index,), record)
        return (old + region,)


def test_a_region_that_would_be_copied_is_refused(tmp_path):
    regions = torch.zeros(50, 7, dtype=torch.uint8)
    program = toy_graph.capture(
        TwoHalves(), torch.tensor([1, 2]), torch.zeros(2, 7, dtype=torch.uint8), regions
    )
    with pytest.raises(LoweringError, match="is copied whole in every call"):
        lower_graph(program, name="halves", work_dir=tmp_path / "w")
    assert list((tmp_path / "w").iterdir()) == []


def test_functional_programs_are_refused(tmp_path):
    """Decomposing makes cache writes functional; lowering such a program would copy every cache."""
    program = toy_graph.capture_toy().run_decompositions({})
    with pytest.raises(LoweringError):
        lower_graph(program, name="functional", work_dir=tmp_path)


def test_an_unknown_level_is_refused(tmp_path):
    with pytest.raises(LoweringError, match="unknown instruction set 'sse9'.*avx2, avx512"):
        lower_graph(toy_graph.capture_toy(), name="decode-4", work_dir=tmp_path, isa="sse9")


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(LoweringError, match="no C\\+\\+ compiler 'no-such-compiler'"):
        lower_graph(toy_graph.capture_toy(), name="decode-4", work_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_and_inductor_are_left_as_they_were(tmp_path, lowered, monkeypatch):
    from torch._inductor import cpu_vec_isa

    monkeypatch.setenv("CXX", "no-such-compiler")
    before = dict(os.environ), cpu_vec_isa.valid_vec_isa_list
    with pytest.raises(LoweringError):
        lower_graph(toy_graph.capture_toy(), name="decode-4", work_dir=tmp_path)
    assert (dict(os.environ), cpu_vec_isa.valid_vec_isa_list) == before
