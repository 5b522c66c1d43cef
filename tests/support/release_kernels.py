"""The kernels that the released model starts, and their machine code, compiled once per process."""

import functools
import tempfile

import triton
from model_dirs import release_config

from deepinfer.gpu_kernels import model_calls
from deepinfer.graphs.config import parse_config
from deepinfer.kernels.signature import CallSignature
from deepinfer.kernels.triton.cuda_target import MachineCode, compile_launch, op_launches
from deepinfer.kernels.triton.launch import Launch
from deepinfer.settings import CompileConfig

CONTEXT = 65536
EVERY_FORM = {"pool_norm_kernel", "route_kernel", "sparse_attention_kernel"}


@functools.cache
def release_calls() -> tuple[CallSignature, ...]:
    """Every form of an operation in the steps of the released model and in sampling."""
    options = CompileConfig(target="cuda:sm_90", max_model_len=CONTEXT, max_num_seqs=4)
    return tuple(model_calls(parse_config(release_config()), options))


def launches() -> dict[str, list[Launch]]:
    """The kernels that they start, once per name or, of EVERY_FORM, per form, by operation."""
    found: dict[str, list[Launch]] = {}
    seen = set()
    for call in release_calls():
        for launch in op_launches(call):
            form = (launch.name, repr(launch.constants) if launch.name in EVERY_FORM else None)
            if form not in seen:
                seen.add(form)
                found.setdefault(call.op.name, []).append(launch)
    return found


@functools.cache
def machine_code(target: str) -> tuple[MachineCode, ...]:
    """Machine code of `launches()` for `target`, through a kernel cache of its own."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        return tuple(compile_launch(launch, target) for group in launches().values() for launch in group)
