"""Machine code without a device: every kernel at the released model's shapes, for both targets."""

import pytest
import torch
from routes import INTERPRETED

from deepinfer.errors import LoweringError, UsageError
from deepinfer.kernels import OPS, linear, rms_norm, verify_drafts
from deepinfer.kernels.signature import CallSignature

pytest.importorskip("triton")

import triton
from release_kernels import machine_code, release_calls

from deepinfer.kernels.triton import cuda_target
from deepinfer.kernels.triton.cuda_target import compile_launch, op_launches, resource_table

compiles = pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing")
# operations that the model's steps reach inside others alone
PARTS_OF_OTHERS = {"dequantize_fp4", "dequantize_fp8", "linear_fp4", "quantize_fp4", "quantize_fp8"}
# operations of deepseek_v4 alone
OF_OTHER_STEPS = {
    "compress_biased",
    "dequantize_tail",
    "hadamard",
    "moe_hash_gate",
    "quantize_tail",
}
# what multiplies matrices, and the instruction that must do it, by target
TENSOR_CORES = {"sm_90": "warp_group_dot", "sm_100": "tc_gen5_mma"}
ON_TENSOR_CORES = {
    "linear_kernel": TENSOR_CORES,
    "linear_fp8_kernel": TENSOR_CORES,
    "linear_fp4_kernel": TENSOR_CORES,
    "sparse_attention_kernel": TENSOR_CORES,
    "index_scores_kernel": dict.fromkeys(TENSOR_CORES, "nvidia_mma"),  # 32 heads are too few for a group
}


@pytest.fixture(scope="module", autouse=True)
def own_kernel_cache(tmp_path_factory):
    """Triton's cache on disk, for these tests alone."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path_factory.mktemp("triton"))
        yield


def test_the_released_model_starts_kernels_of_every_operation_it_calls():
    called = {call.op.name for call in release_calls()}
    assert called == {call.op.name for call in release_calls() if op_launches(call)}
    assert {op.name for op in OPS} - called == PARTS_OF_OTHERS | OF_OTHER_STEPS


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_every_kernel_becomes_machine_code_at_full_size(target):
    for code in machine_code(target):
        assert code.cubin[:4] == b"\x7fELF"
        assert f".target {target}a" in code.ptx
        assert "tt.func" in code.ttir and "ttg.num-warps" in code.ttgir
        assert 0 < code.resources.registers <= 255
        assert code.resources.shared_bytes <= 232448, code.kernel  # what an SM of either target has for one
        assert code.resources.spill_bytes == 0, code.kernel
    print(resource_table(machine_code(target)))


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_products_run_on_tensor_cores(target):
    codes = {code.kernel: code for code in machine_code(target)}
    for kernel, instructions in ON_TENSOR_CORES.items():
        assert instructions[target] in codes[kernel].ttgir, kernel


@compiles
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_a_small_kernel_becomes_machine_code(target):
    call = CallSignature.of(rms_norm, rms_norm.make_inputs(4, torch.bfloat16, 0))
    (launch,) = op_launches(call)
    code = compile_launch(launch, target)
    assert code.kernel == "rms_norm_kernel" and code.target == target
    assert code.cubin[:4] == b"\x7fELF"
    assert code.resources.threads == 128 and code.resources.spill_bytes == 0
    assert f"| rms_norm_kernel | {target} | 128 |" in resource_table([code])
    # one program holds the whole row, so the sum has one order
    assert "tt.reduce" in code.ttgir and "scf.for" not in code.ttgir


@compiles
def test_a_loop_that_ends_at_a_loaded_value_becomes_machine_code():
    """What the interpreter takes, such as an annotated local, the compiler may refuse."""
    *_, launch = op_launches(CallSignature.of(verify_drafts, verify_drafts.make_inputs(4, torch.float32, 0)))
    code = compile_launch(launch, "sm_90")
    assert code.kernel == "settle_kernel" and code.resources.spill_bytes == 0


@compiles
def test_equal_sources_give_equal_bytes(tmp_path):
    call = CallSignature.of(linear, linear.make_inputs(4, torch.bfloat16, 0))
    (launch,) = op_launches(call)
    first = compile_launch(launch, "sm_90")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(tmp_path)
        assert compile_launch(launch, "sm_90").cubin == first.cubin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tiles_and_constants_do_not_depend_on_the_number_of_rows(op, dtype):
    """Grids grow with rows; what a program does never changes."""
    forms = []
    for rows in (1, 5, 64):
        call = CallSignature.of(op, op.make_inputs(rows, dtype, 1))
        forms.append([(each.name, each.constants, each.warps, each.stages) for each in op_launches(call)])
    assert forms[0] == forms[1] == forms[2]
    assert forms[0]


@compiles
def test_an_unknown_target_is_refused_with_the_known_ones():
    (launch,) = op_launches(CallSignature.of(rms_norm, rms_norm.make_inputs(1, torch.float32, 0)))
    with pytest.raises(UsageError, match=r"unknown target 'sm_80' \(choose one of sm_90, sm_100\)"):
        compile_launch(launch, "sm_80")


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_an_interpreted_process_refuses_to_compile():
    (launch,) = op_launches(CallSignature.of(rms_norm, rms_norm.make_inputs(1, torch.float32, 0)))
    with pytest.raises(UsageError, match="compile in a process without TRITON_INTERPRET"):
        compile_launch(launch, "sm_90")


@compiles
def test_a_kernel_that_the_compiler_refuses_is_named():
    (launch,) = op_launches(CallSignature.of(rms_norm, rms_norm.make_inputs(1, torch.float32, 0)))
    broken = cuda_target.Launch(
        launch.kernel, launch.grid, launch.arguments, {**launch.constants, "BLOCK": 100}, 4, 1
    )
    with pytest.raises(LoweringError, match="rms_norm_kernel for sm_90: the compiler failed"):
        compile_launch(broken, "sm_90")
