"""Reads the C++ that Inductor generates: its two parts, the constants it names, and copies of regions.

Works on text only; functions raise LoweringError if the text is not of the known form, so that another
torch version is met with a message and not with a wrong answer.
"""

import re
from collections.abc import Iterable

from deepinfer.errors import LoweringError

_KERNEL_PRELUDE = "#include <torch/csrc/inductor/cpp_prefix.h>"
_CONSTANT_FIELD = re.compile(r'constants_info_\[(\d+)\]\.(name|original_fqn) = "([^"]*)";')
_CONSTANT_COUNT = re.compile(r"constants_info_\[(\d+)\]\.name =")
_INT_ARRAY = re.compile(r"static constexpr int64_t (int_array_\d+)\[\] = \{([^}]*)\};")
_ALLOCATION = re.compile(
    r"aoti_torch_empty_strided(?:_pinned)?\((\d+), (int_array_\d+), int_array_\d+, cached_torch_dtype_(\w+),"
)
_INPUT = re.compile(r"auto (\w+) = std::move\(inputs\[(\d+)\]\);")
_COPY_CALL = re.compile(
    r"aoti_torch_(?:clone|clone_preserve_strides|copy_|cpu_clone|cpu_copy|cpu_copy_)\(([^;]*)\);"
)
_THREADS = re.compile(r"#pragma omp|omp_get_")


_ALIGNED_COPY = re.compile(
    r"AOTI_TORCH_WARN\(\"Input (\d+) was compiled as \d+-bytes aligned[^;]*;\s*"
    r"AtenTensorHandle (\w+)_aligned;\s*"
    r"aoti_torch_clone_preserve_strides\(\2, &\2_aligned\);\s*"
    r"\2 = std::move\(RAIIAtenTensorHandle\(\2_aligned\)\);"
)


def refuse_unaligned(wrapper: str, name: str) -> str:
    """The wrapper with an error where it would copy an input that does not start at a multiple of 16 bytes.

    What is written to the copy of a cache region would be lost, and a copy in every call goes unnoticed.
    """
    text, count = _ALIGNED_COPY.subn(
        r'throw std::runtime_error("input \1 does not start at a multiple of 16 bytes");', wrapper
    )
    if "bytes aligned" in text or text.count("does not start at a multiple of 16") != count:
        raise LoweringError("the generated code treats unaligned inputs in an unknown form", where=name)
    return text


def split_generated(source: str, name: str) -> tuple[str, str]:
    """Wrapper and kernels of one generated file; the kernels part is empty if there are none."""
    if "AOTInductorModel::run_impl" not in source:
        raise LoweringError("the generated code is of an unknown form", where=name)
    start = source.find(_KERNEL_PRELUDE)
    return (source, "") if start < 0 else (source[:start], source[start:])


def constant_names(wrapper: str, name: str) -> tuple[tuple[str, str], ...]:
    """(name in the shared object, attribute it stands for) of every constant, in order."""
    fields: dict[int, dict[str, str]] = {}
    for index, field, value in _CONSTANT_FIELD.findall(wrapper):
        fields.setdefault(int(index), {})[field] = value
    if sorted(fields) != list(range(len(fields))) or any(len(entry) != 2 for entry in fields.values()):
        raise LoweringError("the generated code lists its constants in an unknown form", where=name)
    return tuple((fields[index]["name"], fields[index]["original_fqn"]) for index in range(len(fields)))


def check_no_threads(source: str, name: str) -> None:
    """Raise LoweringError if generated loops start threads: their sums would depend on how many."""
    if _THREADS.search(source):
        raise LoweringError("the generated code starts threads of its own", where=name)


def whole_region_buffers(
    wrapper: str, regions: Iterable[tuple[int, str, tuple[int, ...]]], name: str
) -> list[int]:
    """Positions of written inputs of which the wrapper copies the whole, or allocates the like of.

    `regions` lists them: position among the inputs, dtype name, shape. Raises LoweringError if the wrapper
    does not name its inputs in the known form.
    """
    sizes = {
        array: tuple(int(size.strip().rstrip("L")) for size in text.split(",") if size.strip())
        for array, text in _INT_ARRAY.findall(wrapper)
    }
    allocated = {(dtype, sizes.get(array)) for _, array, dtype in _ALLOCATION.findall(wrapper)}
    inputs = {int(index): variable for variable, index in _INPUT.findall(wrapper)}
    copied = " ".join(_COPY_CALL.findall(wrapper))
    found = []
    for position, dtype, shape in regions:
        if position not in inputs:
            raise LoweringError(f"the generated code does not take input {position}", where=name)
        if (dtype, shape) in allocated or re.search(rf"\b{inputs[position]}\b", copied):
            found.append(position)
    return found
