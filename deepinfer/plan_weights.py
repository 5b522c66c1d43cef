"""What the weight store of a build holds: bytes by purpose and format, and parameters, from shapes alone."""

import math
from dataclasses import dataclass

import torch

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.store import Specs

# the first fragment that a tensor's name contains tells what it is for
_PURPOSES = (
    (".ffn.experts.", "routed experts"),
    (".ffn.shared_experts.", "shared experts"),
    (".ffn.gate.", "router"),
    (".attn.indexer.", "indexer"),
    (".attn.compressor.", "compression"),
    (".attn.", "attention"),
    (".engram.embed", "engram tables"),
    ("engram.", "engram"),
    (".hc_", "hyper-connections"),
    ("rope.", "rotation tables"),
    ("norm", "norms"),
    ("embed", "embedding"),
    ("head", "head"),
)
_EXPERTS, _TABLES, _EMBEDDING, _ROTATION = "routed experts", "engram tables", "embedding", "rotation tables"
_FORMATS = {torch.bfloat16: "bf16", torch.float32: "float32", torch.int64: "int64"}


@dataclass(frozen=True)
class WeightGroup:
    """Tensors of one purpose and one format; `packed` are matrices in the layout of the native products."""

    purpose: str
    format: str
    packed: bool
    tensors: int
    bytes: int


@dataclass(frozen=True)
class ParameterPlan:
    """Numbers that were trained, of the store; scales and constants derived from the config are none.

    `per_token` are those that one token uses: its experts and its rows of the embedding and of the tables.
    """

    total: int
    engram_tables: int
    per_token: int
    by_purpose: dict[str, int]


def purpose_of(name: str) -> str:
    """What the tensor `name` of the store is for."""
    return next(purpose for fragment, purpose in _PURPOSES if fragment in name)


def format_of(name: str, dtype: torch.dtype) -> str:
    """How the numbers of the tensor `name` are stored."""
    if dtype != torch.uint8:
        return _FORMATS[dtype]
    if name.endswith(".scale"):
        return "e8m0 scales"
    if purpose_of(name) == _TABLES:
        return "fp8 records"
    return "fp4" if purpose_of(name) == _EXPERTS else "fp8"


def weight_groups(plain: Specs, packed: Specs) -> tuple[WeightGroup, ...]:
    """Group the tensors of the packed store; `plain` tells which of them changed their layout."""
    groups: dict[tuple[str, str, bool], list[int]] = {}
    for name, (shape, dtype) in packed.items():
        key = (purpose_of(name), format_of(name, dtype), shape != plain[name][0])
        groups.setdefault(key, []).append(math.prod(shape) * dtype.itemsize)
    found = [WeightGroup(*key, tensors=len(sizes), bytes=sum(sizes)) for key, sizes in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.bytes, group.purpose, group.format)))


def count_parameters(config: ModelConfig, plain: Specs) -> ParameterPlan:
    """Count the parameters of the model from the shapes of the plain store."""
    by_purpose: dict[str, int] = {}
    for name, (shape, dtype) in plain.items():
        count = _parameters(config, name, math.prod(shape), format_of(name, dtype))
        if count:
            by_purpose[purpose_of(name)] = by_purpose.get(purpose_of(name), 0) + count
    total, tables = sum(by_purpose.values()), by_purpose.get(_TABLES, 0)
    used = dict(by_purpose)
    used[_EXPERTS] = used[_EXPERTS] // config.n_routed_experts * config.num_experts_per_tok
    used[_EMBEDDING] = config.hidden_size
    if tables:
        used[_TABLES] = len(config.engram_layer_ids) * config.engram_columns * config.engram_head_dim
    return ParameterPlan(total, tables, sum(used.values()), dict(sorted(by_purpose.items())))


def _parameters(config: ModelConfig, name: str, items: int, form: str) -> int:
    if form in ("e8m0 scales", "int64") or purpose_of(name) == _ROTATION:
        return 0
    if form == "fp8 records":
        return config.engram_rows(int(name.split(".")[1])) * config.engram_head_dim
    return 2 * items if form == "fp4" else items
