"""Reading generated C++: constants, parts, and signs of copied regions; and failures of the compiler."""

import pytest

from deepinfer.errors import LoweringError
from deepinfer.passes import generated_code, toolchain

WRAPPER = """
    constants_info_[0].name = "w_0";
    constants_info_[0].shape = {4};
    constants_info_[0].original_fqn = "w.0";
    constants_info_[1].name = "b";
    constants_info_[1].original_fqn = "b";
void AOTInductorModel::run_impl(
    auto arg0_1 = std::move(inputs[0]);
    auto arg1_1 = std::move(inputs[1]);
    static constexpr int64_t int_array_0[] = {5L, 8L, 66L};
    static constexpr int64_t int_array_1[] = {528L, 66L, 1L};
    EMPTY
"""
EMPTY = "aoti_torch_empty_strided(3, int_array_0, int_array_1, cached_torch_dtype_uint8, cpu, 0, &buf0);"
REGION = [(1, "uint8", (5, 8, 66))]


def test_constants_are_read_in_order():
    assert generated_code.constant_names(WRAPPER, "g") == (("w_0", "w.0"), ("b", "b"))
    with pytest.raises(LoweringError, match="unknown form"):
        generated_code.constant_names(WRAPPER.replace('[1].original_fqn = "b"', "[1].x = 1"), "g")


def test_wrapper_and_kernels_are_told_apart():
    kernels = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void k() {}\n'
    assert generated_code.split_generated(WRAPPER + kernels, "g") == (WRAPPER, kernels)
    assert generated_code.split_generated(WRAPPER, "g") == (WRAPPER, "")
    with pytest.raises(LoweringError, match="unknown form"):
        generated_code.split_generated("int main() {}", "g")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ("", []),
        (EMPTY, [1]),
        (EMPTY.replace("uint8", "float32"), []),
        ("aoti_torch_clone(arg1_1, &buf0);", [1]),
        ("aoti_torch_copy_(arg1_1, buf7, 0);", [1]),
        ("aoti_torch_clone(arg11_1, &buf0);", []),
    ],
)
def test_buffers_and_copies_of_whole_regions_are_found(call, found):
    assert generated_code.whole_region_buffers(WRAPPER.replace("EMPTY", call), REGION, "g") == found


def test_a_region_that_is_not_an_input_is_an_error():
    with pytest.raises(LoweringError, match="does not take input 4"):
        generated_code.whole_region_buffers(WRAPPER, [(4, "uint8", (5,))], "g")


def test_threads_in_generated_loops_are_refused():
    generated_code.check_no_threads("for (;;) {}", "g")
    with pytest.raises(LoweringError, match="threads of its own"):
        generated_code.check_no_threads("#pragma omp parallel for", "g")


ALIGNED = """
    if ((reinterpret_cast<std::uintptr_t>(arg1_1.data_ptr()) & (16 -1)) != 0) {
        AOTI_TORCH_WARN("Input 1 was compiled as 16-bytes aligned, but it is not.");
        AtenTensorHandle arg1_1_aligned;
        aoti_torch_clone_preserve_strides(arg1_1, &arg1_1_aligned);
        arg1_1 = std::move(RAIIAtenTensorHandle(arg1_1_aligned));
    }
"""


def test_an_unaligned_input_becomes_an_error_instead_of_a_copy():
    source = WRAPPER.replace("EMPTY", ALIGNED)
    assert generated_code.whole_region_buffers(source, REGION, "g") == [1]
    refusing = generated_code.refuse_unaligned(source, "g")
    assert 'throw std::runtime_error("input 1 does not start at a multiple of 16 bytes");' in refusing
    assert generated_code.whole_region_buffers(refusing, REGION, "g") == []
    assert generated_code.refuse_unaligned(WRAPPER, "g") == WRAPPER


def test_another_form_of_that_copy_is_refused():
    source = WRAPPER.replace("EMPTY", ALIGNED.replace("AtenTensorHandle arg1_1_aligned;", ""))
    with pytest.raises(LoweringError, match="unaligned inputs in an unknown form"):
        generated_code.refuse_unaligned(source, "g")


def test_missing_packages_of_cuda_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "TORCH_DIR", tmp_path / "torch")
    with pytest.raises(LoweringError, match="lack include/cuda.h .*constraints-cuda.txt"):
        toolchain.build_shared_object([], [], toolchain.isa_level("avx2"), tmp_path, "x.so", cuda=True)


def test_a_compiler_error_is_shown_without_paths_of_torch(tmp_path):
    (tmp_path / "bad.cpp").write_text(
        "#include <torch/csrc/inductor/aoti_torch/c/shim.h>\nint f() { return nowhere; }\n"
    )
    with pytest.raises(LoweringError, match="error: .*nowhere") as caught:
        toolchain.build_shared_object([("bad.cpp", "-O0")], [], toolchain.isa_level("avx2"), tmp_path, "x.so")
    assert caught.value.where == "bad.cpp" and str(toolchain.TORCH_DIR) not in str(caught.value)


def test_the_toolchain_has_an_identity_without_paths():
    identities = {isa: toolchain.toolchain_identity(isa) for isa in toolchain.ISA_LEVELS}
    assert identities["avx2"] != identities["avx512"]
    assert "x86-64-v3" in identities["avx2"]["flags"] and "-ffp-contract=off" in identities["avx2"]["flags"]
    assert all("/" not in text for identity in identities.values() for text in identity.values())
