"""Operations of the model: one file per op with its definition, and native kernels behind the same names.

`OPS` is the complete list. Each entry is called like a function; see `registry.py` for what the call does.
"""

from deepinfer.kernels.compress import compress
from deepinfer.kernels.compress_biased import compress_biased
from deepinfer.kernels.engram_gate import engram_gate
from deepinfer.kernels.engram_gather import engram_gather
from deepinfer.kernels.engram_ids import engram_ids
from deepinfer.kernels.hadamard import hadamard
from deepinfer.kernels.index_key import index_key
from deepinfer.kernels.index_topk import index_topk
from deepinfer.kernels.linear import linear
from deepinfer.kernels.linear_fp4 import linear_fp4
from deepinfer.kernels.linear_fp8 import linear_fp8
from deepinfer.kernels.mhc_collapse import mhc_collapse
from deepinfer.kernels.mhc_expand import mhc_expand
from deepinfer.kernels.mhc_mix import mhc_mix
from deepinfer.kernels.moe_experts import moe_experts
from deepinfer.kernels.moe_gate import moe_gate
from deepinfer.kernels.moe_hash_gate import moe_hash_gate
from deepinfer.kernels.quantize_fp4 import dequantize_fp4, quantize_fp4
from deepinfer.kernels.quantize_fp8 import dequantize_fp8, quantize_fp8
from deepinfer.kernels.quantize_tail import dequantize_tail, quantize_tail
from deepinfer.kernels.registry import NAMESPACE, Op, captured_ops
from deepinfer.kernels.ring_write import ring_write
from deepinfer.kernels.rms_norm import rms_norm
from deepinfer.kernels.rope import rope
from deepinfer.kernels.sample import sample
from deepinfer.kernels.shared_expert import shared_expert
from deepinfer.kernels.sparse_attention import sparse_attention
from deepinfer.kernels.verify_drafts import verify_drafts
from deepinfer.kernels.window_record import window_record

OPS: tuple[Op, ...] = (
    rms_norm,
    linear,
    linear_fp8,
    linear_fp4,
    mhc_mix,
    mhc_collapse,
    mhc_expand,
    rope,
    moe_gate,
    moe_hash_gate,
    moe_experts,
    shared_expert,
    engram_gate,
    engram_gather,
    engram_ids,
    ring_write,
    sparse_attention,
    window_record,
    quantize_fp8,
    dequantize_fp8,
    quantize_fp4,
    dequantize_fp4,
    quantize_tail,
    dequantize_tail,
    hadamard,
    compress,
    compress_biased,
    index_key,
    index_topk,
    sample,
    verify_drafts,
)

_BY_QUALIFIED_NAME = {f"{NAMESPACE}::{op.name}": op for op in OPS}


def op_of(target: object) -> Op | None:
    """The operation that a graph's call target stands for; None if it is not one of ours."""
    schema = getattr(target, "_schema", None)
    return _BY_QUALIFIED_NAME.get(schema.name) if schema is not None else None


__all__ = [
    "OPS",
    "Op",
    "captured_ops",
    "compress",
    "compress_biased",
    "dequantize_fp4",
    "dequantize_fp8",
    "dequantize_tail",
    "engram_gate",
    "engram_gather",
    "engram_ids",
    "hadamard",
    "index_key",
    "index_topk",
    "linear",
    "linear_fp4",
    "linear_fp8",
    "mhc_collapse",
    "mhc_expand",
    "mhc_mix",
    "moe_experts",
    "moe_gate",
    "moe_hash_gate",
    "op_of",
    "quantize_fp4",
    "quantize_fp8",
    "quantize_tail",
    "ring_write",
    "rms_norm",
    "rope",
    "sample",
    "shared_expert",
    "sparse_attention",
    "verify_drafts",
    "window_record",
]
