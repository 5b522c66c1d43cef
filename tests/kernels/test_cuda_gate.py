"""The router in CUDA C++: its source run on the host lane by lane, its machine code, the rule for it."""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepinfer.errors import LoweringError, UsageError
from deepinfer.kernels import linear, moe_gate
from deepinfer.kernels.cuda import moe_gate as cuda_gate
from deepinfer.kernels.cuda import nvrtc
from deepinfer.kernels.cuda.choice import CHOICE_FILE, checked_in_choice, language_of
from deepinfer.kernels.cuda.launch import CudaLaunch, cuda_launches_given_to
from deepinfer.kernels.signature import CallSignature

EMULATION = Path(__file__).parents[1] / "support" / "moe_gate_emulation.cpp"
NAN, INF = float("nan"), float("inf")
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
compiles = pytest.mark.skipif(not nvrtc.is_available(), reason="needs nvidia-cuda-nvrtc")


def build(folder: Path, source: Path, name: str = "gate") -> ctypes.CDLL:
    """The kernels' source as a host library: no contraction, as on the card."""
    library = folder / f"{name}.so"
    command = ["g++", "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command += [f'-DKERNEL_SOURCE="{source}"', f"-I{EMULATION.parent}", str(EMULATION), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    """Runs the router of the source on host tensors."""
    library = build(tmp_path_factory.mktemp("gate"), cuda_gate.SOURCE)

    def start(launched: CudaLaunch) -> None:
        values = launched.argument_values()
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        library.emulate(launched.kernel.encode(), *launched.grid, launched.threads, pointers)

    def run(*arguments):
        with cuda_launches_given_to(start):
            return cuda_gate.moe_gate(*arguments)

    return run


def inputs(rows: int, experts: int = 24, size: int = 96, top_k: int = 6, seed: int = 0) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, generator=generator).bfloat16()
    weight = (torch.randn(experts, size, generator=generator) / size**0.5).bfloat16()
    bias = torch.randn(experts, generator=generator) / 4
    positions = torch.arange(rows)
    positions[2::7] = -1
    return x, weight, bias, positions, top_k, True, 1.5


@pytest.mark.parametrize(
    ("rows", "experts", "size", "top_k"),
    [(1, 24, 96, 6), (9, 384, 512, 6), (3, 1, 8, 1), (8, 512, 264, 32), (17, 33, 24, 5), (2, 31, 5120, 31)],
)
def test_the_source_agrees_with_the_reference(emulate, rows, experts, size, top_k):
    for seed, norm in ((0, True), (1, False)):
        arguments = (*inputs(rows, experts, size, top_k, seed)[:5], norm, 2.5)
        (logits, ids, weights), want = emulate(*arguments), moe_gate.reference(*arguments)
        torch.testing.assert_close(logits, want[0], **TOLERANCE)
        assert torch.equal(ids, want[1])
        torch.testing.assert_close(weights, want[2], **TOLERANCE)


def test_rows_do_not_know_each_other(emulate, same_bytes):
    x, weight, bias, positions, *rest = inputs(19, 40, 104)
    whole = emulate(x, weight, bias, positions, *rest)
    for chosen in ([0], [18], [7, 8], list(range(18, -1, -1))):
        part = emulate(x[chosen].contiguous(), weight, bias, positions[chosen], *rest)
        for got, want in zip(part, whole, strict=True):
            same_bytes(got, want[chosen])
    assert [part.shape[0] for part in emulate(x[:0], weight, bias, positions[:0], *rest)] == [0, 0, 0]


def test_equal_ranks_go_to_the_lower_id_and_odd_values_are_ordered_as_torch_sorts(emulate):
    values = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.0, 1.0, NAN, 0.0, INF, -INF]
    bias = torch.tensor(values * 3)
    experts = len(bias)
    x, weight = torch.zeros(2, 8).bfloat16(), torch.zeros(experts, 8).bfloat16()
    _, ids, weights = emulate(x, weight, bias, torch.arange(2), 32, True, 1.0)
    score = torch.nn.functional.softplus(torch.zeros(1)).sqrt()
    order = torch.sort(score + bias, descending=True, stable=True).indices[:32]
    assert ids.tolist() == [order.tolist()] * 2
    torch.testing.assert_close(weights, torch.full((2, 32), 1 / 32))


def test_nan_infinite_and_padding_rows(emulate, same_bytes):
    x, weight, bias, positions, *rest = inputs(8, 40, 16, 4, seed=3)
    positions[:] = torch.tensor([0, -1, 2, 3, 4, 5, -1, 7])
    clean = emulate(x, weight, bias, positions, *rest)
    x[1], x[3, 2], x[5, 0] = NAN, NAN, INF
    logits, ids, weights = emulate(x, weight, bias, positions, *rest)
    assert not logits[[1, 6]].any() and (ids[[1, 6]] == -1).all() and not weights[[1, 6]].any()
    assert weights[3].isnan().all() and ids[3].tolist() == [0, 1, 2, 3]
    assert not weights[5].isfinite().all() and len(set(ids[5].tolist())) == 4
    for got, want in zip((logits, ids, weights), clean, strict=True):
        others = [0, 1, 2, 4, 6, 7]
        same_bytes(got[others], want[others])
    masked = emulate(x, weight, bias, torch.full_like(positions, -1), *rest)
    assert not masked[0].any() and (masked[1] == -1).all() and not masked[2].any()


def test_the_emulation_finds_a_lane_that_leaves_the_others_waiting(tmp_path):
    """The check bites: with half a warp ended early, a shuffle has no partner."""
    text = cuda_gate.SOURCE.read_text()
    broken = tmp_path / "broken.cu"
    wrong = text.replace("if (expert >= experts) return;", "if (lane >= 16) return;")
    assert wrong != text
    broken.write_text(wrong)
    code = f"""
import ctypes, torch
library = ctypes.CDLL({str(Path(build(tmp_path, broken, "broken")._name))!r})
x, logits, positions = torch.zeros(1, 8).bfloat16(), torch.zeros(1, 4), torch.zeros(1).long()
values = [ctypes.c_void_p(t.data_ptr()) for t in (x, x.repeat(4, 1), positions, logits)]
values += [ctypes.c_int64(1), ctypes.c_int(8), ctypes.c_int(4)]
library.emulate(b"moe_gate_logits", 1, 1, 128, (ctypes.c_void_p * 7)(*map(ctypes.addressof, values)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "not at the shuffle" in done.stderr


@compiles
@pytest.mark.parametrize("target", nvrtc.TARGETS)
def test_the_source_becomes_machine_code_without_spills_and_the_same_each_time(target):
    code = nvrtc.compile_source(cuda_gate.SOURCE, target)
    assert code.cubin[:4] == b"\x7fELF" and f".target {target}a" in code.ptx
    assert set(code.resources) == {"moe_gate_logits", "moe_gate_route"}
    for registers, _, spilled in code.resources.values():
        assert 0 < registers <= 128 and spilled == 0
    assert re.search(r"ld\.global(\.nc)?\.v4\.[bu]32", code.ptx)  # eight values a load
    assert nvrtc.compile_source(cuda_gate.SOURCE, target) == code


@compiles
def test_a_source_that_is_wrong_and_a_target_that_is_unknown_are_refused(tmp_path):
    wrong = tmp_path / "wrong.cu"
    wrong.write_text("__global__ void f() { g(); }")
    with pytest.raises(LoweringError, match=r"wrong\.cu for compute_90a: the compiler failed"):
        nvrtc.compile_source(wrong, "sm_90")
    with pytest.raises(UsageError, match=r"unknown target 'sm_80' \(choose one of sm_90, sm_100\)"):
        nvrtc.compile_source(wrong, "sm_80")


def call_of(*arguments) -> CallSignature:
    return CallSignature.of(moe_gate, arguments)


def test_the_rule_picks_by_widths_and_dtypes_and_never_by_rows():
    words = {key for rule in json.loads(CHOICE_FILE.read_text())["rules"] for key in rule}
    assert not [word for word in words if "row" in word or "batch" in word]
    for target in ("sm_90", "sm_100"):
        for rows in (0, 1, 64, 4096):
            assert language_of(call_of(*inputs(rows)), target) == "cuda"
        assert language_of(call_of(*inputs(1, experts=512, top_k=32)), target) == "cuda"
        for other in ({"experts": 513}, {"experts": 64, "top_k": 33}, {"size": 100}):
            assert language_of(call_of(*inputs(1, **other)), target) == "triton"
        x, weight, *rest = inputs(1)
        assert language_of(call_of(x.float(), weight, *rest), target) == "triton"
        assert language_of(call_of(x, weight.float(), *rest), target) == "triton"
        assert language_of(CallSignature.of(linear, (x, weight, torch.float32)), target) == "triton"
    assert language_of(call_of(*inputs(1)), "sm_120") == "triton"
    assert all(rule.why for rule in checked_in_choice().rules)


def test_a_form_that_the_rule_gives_to_triton_and_tensors_of_the_host_are_refused():
    x, *rest = inputs(2)
    with pytest.raises(UsageError, match="moe_gate: cuda: no CUDA C.. kernel for this form"):
        cuda_gate.moe_gate(x.float(), *rest)
    with pytest.raises(UsageError, match="moe_gate_logits: the tensors are on cpu"):
        cuda_gate.moe_gate(x, *rest)
