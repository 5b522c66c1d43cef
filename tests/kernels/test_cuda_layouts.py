"""What the compiler made of the kernels that matter: operands of products, and how wide memory is read."""

import functools
import re

import pytest
from routes import INTERPRETED
from torch.testing import FileCheck

pytest.importorskip("triton")

from release_kernels import machine_code

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(INTERPRETED, reason="an interpreted process compiles nothing"),
]
TARGETS = ["sm_90", "sm_100"]
# products whose 64 rows fill a group of warps
GROUPS = ["linear_kernel", "linear_fp8_kernel", "linear_fp4_kernel", "sparse_attention_kernel"]
# kernels that are bound by memory: what they read, and what they write, sixteen bytes a lane at a time
WIDE_READS = [
    "rms_norm_kernel",
    "mhc_collapse_kernel",
    "mhc_expand_kernel",
    "through_fp8_kernel",
    "clamped_swiglu_kernel",
    "sum_picks_kernel",
    "select_kernel",
    "sparse_attention_kernel",
]
WIDE_WRITES = [
    "rms_norm_kernel",
    "mhc_collapse_kernel",
    "mhc_expand_kernel",
    "linear_kernel",
    "linear_fp8_kernel",
]
# the streams of weights bypass registers on their way to shared memory
ASYNCHRONOUS = ["linear_kernel", "linear_fp8_kernel", "linear_fp4_kernel"]


@functools.cache
def texts(target: str) -> dict:
    return {code.kernel: code for code in machine_code(target)}


@pytest.mark.parametrize("kernel", GROUPS)
def test_operands_of_group_products_lie_swizzled_in_shared_memory(kernel):
    hopper = FileCheck().check("#ttg.nvidia_mma<{versionMajor = 3").check("#ttg.nvmma_shared<{swizzling")
    hopper.check("swizzlingByteWidth = 128").check("ttng.warp_group_dot").run(texts("sm_90")[kernel].ttgir)
    blackwell = FileCheck().check("#ttg.nvmma_shared<{swizzling").check("#ttng.tensor_memory_encoding")
    blackwell.check("ttng.tc_gen5_mma").run(texts("sm_100")[kernel].ttgir)
    for target in TARGETS:
        assert "tt.dot " not in texts(target)[kernel].ttgir  # none is left to the ordinary units


@pytest.mark.parametrize("target", TARGETS)
def test_products_of_few_heads_use_the_small_tensor_instruction(target):
    text = texts(target)["index_scores_kernel"].ttgir
    FileCheck().check("#ttg.nvidia_mma<{versionMajor = 2").check("#ttg.dot_op<{opIdx = 0").run(text)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", WIDE_READS)
def test_memory_is_read_sixteen_bytes_at_a_time(kernel, target):
    assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", texts(target)[kernel].ptx)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", WIDE_WRITES)
def test_memory_is_written_sixteen_bytes_at_a_time(kernel, target):
    assert re.search(r"st\.global\.v4\.b32|st\.global\.v2\.b64", texts(target)[kernel].ptx)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ASYNCHRONOUS)
def test_weights_stream_to_shared_memory_in_sixteen_bytes(kernel, target):
    text = texts(target)[kernel]
    FileCheck().check("ttg.async_copy_global_to_local").run(text.ttgir)
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", text.ptx)
