"""The trainable parameters of the small model: initial values, rounding on the way to the model, export.

A parameter is a float32 master of a tensor of the weight store. In every forward pass it is rounded to the
values that its on-disk format can hold, straight through, so that the exported checkpoint is the model that
was trained.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from deepinfer.graphs.config import ModelConfig
from deepinfer.graphs.engram_tables import build_engram_tables
from deepinfer.graphs.rope import rope_tables
from deepinfer.graphs.weights import weight_specs
from deepinfer.kernels import quantize_fp4, quantize_fp8
from deepinfer.kernels.differentiable import round_bf16, round_fp4, round_fp8, round_tiles, tile_scales

# gains of the initial projections, in units of fan_in ** -0.5
GAINS = {"wq_a": 1.4, "wq_b": 1.0, "wkv": 1.4, "wo_a": 1.0, "wo_b": 0.5, "w13": 1.0, "w2": 0.5, "gate": 1.0}
SHARD_BYTES = 6 << 20
CONSTANTS = ("token_map", "multipliers", "primes", "offsets")


def master_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and unpacked shape of every master; the router's bias is trained without gradient."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (shape, _) in weight_specs(config).items():
        if name.endswith((".scale", "gate.bias", *CONSTANTS)):
            continue
        if name.endswith("engram.qk_weight"):
            stem = name.removesuffix("qk_weight")
            shapes[stem + "q_weight"] = shapes[stem + "k_weight"] = shape
        elif format_of(name) == "fp4":
            shapes[name] = (*shape[:-1], 2 * shape[-1])
        elif format_of(name) == "fp8_rows":
            shapes[name] = (shape[0], config.engram_head_dim)
        else:
            shapes[name] = shape
    return shapes


def format_of(name: str) -> str:
    """Return how a master is stored: `fp8` tiles, `fp4` rows, `fp8_rows`, `bf16` or `f32`."""
    if ".ffn.experts." in name:
        return "fp4"
    if name.endswith("engram.embed"):
        return "fp8_rows"
    if ".hc_" in name or name.endswith("attn_sink"):
        return "f32"
    return "fp8" if name.endswith(".weight") and "gate" not in name else "bf16"


def initial_masters(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the masters before training, a function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    masters = {}
    for name, shape in master_shapes(config).items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        value = torch.randn(shape, generator=generator)
        if leaf in ("embed", "head"):
            value *= 0.5 if "engram" in name else (1.0 if leaf == "embed" else shape[-1] ** -0.5)
        elif leaf.endswith("norm"):
            value = torch.ones(shape)
        elif leaf in ("q_weight", "k_weight"):
            value = 1 + 0.1 * value
        elif leaf.endswith("_scale"):
            value = torch.tensor([0.5, 0.5, 1.0])
        elif leaf.endswith("_base"):
            value = _initial_mix(config, value)
        elif leaf == "attn_sink":
            value = torch.zeros(shape)
        else:
            value *= GAINS.get(leaf, 1.0) * shape[-1] ** -0.5 * (0.1 if "hc_" in leaf else 1.0)
        masters[name] = value.requires_grad_()
    return masters


def _initial_mix(config: ModelConfig, noise: Tensor) -> Tensor:
    """Start every sublayer as a residual: read the mean of the streams, write to all, keep each stream."""
    streams = config.hc_mult
    pre = torch.full((streams,), -1.1)  # sigmoid: about 1 / 4
    post = torch.zeros(streams)  # 2 * sigmoid: 1
    comb = 3.0 * torch.eye(streams).flatten()
    return torch.cat((pre, post, comb)) + 0.05 * noise


def constants(config: ModelConfig, model_dir: Path, length: int) -> dict[str, Tensor]:
    """Return what the store holds besides parameters: hash tables and rotations."""
    tables = build_engram_tables(model_dir, config)
    assert tables is not None
    values: dict[str, Tensor] = {"engram.token_map": torch.from_numpy(tables.token_map).long()}
    for index, layer in enumerate(config.engram_layer_ids):
        for kind in ("multipliers", "primes", "offsets"):
            values[f"layers.{layer}.engram.{kind}"] = torch.from_numpy(getattr(tables, kind)[index]).long()
    return values | rope_tables(config, length)


def rounded(name: str, master: Tensor) -> Tensor:
    """Round a master to the values of its format, straight through."""
    kind = format_of(name)
    if kind == "fp8":
        return round_tiles(master)
    if kind == "fp4":
        return round_fp4(master, "e8m0")
    if kind == "fp8_rows":
        return round_fp8(master)
    return round_bf16(master) if kind == "bf16" else master


def model_weights(
    config: ModelConfig, masters: dict[str, Tensor], biases: dict[int, Tensor], fixed: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the weights of a forward pass under the names of the store."""
    weights = dict(fixed)
    unused = torch.zeros(0)
    for name, master in masters.items():
        weights[name] = rounded(name, master)
        if name.endswith(".weight"):
            weights[name.removesuffix("weight") + "scale"] = unused
    for layer in config.engram_layer_ids:
        stem = f"layers.{layer}.engram."
        weights[stem + "qk_weight"] = weights[stem + "q_weight"] * weights[stem + "k_weight"]
    for layer, bias in biases.items():
        weights[f"layers.{layer}.ffn.gate.bias"] = bias
    return weights


def export(
    config: ModelConfig,
    masters: dict[str, Tensor],
    biases: dict[int, Tensor],
    model_dir: Path,
    *,
    plain: bool = False,
) -> None:
    """Write sharded safetensors with their index; `plain` writes float32 values instead of packed formats."""
    tensors: dict[str, Tensor] = {}
    for name, master in masters.items():
        for target, part in _checkpoint_parts(name, master.detach()):
            tensors.update(_packed(target, part, "f32" if plain else format_of(name), format_of(name)))
    for layer, bias in biases.items():
        tensors[f"layers.{layer}.ffn.gate.bias"] = bias.clone()
        tensors[f"layers.{layer}.ffn.gate.bias_vl"] = bias.clone()
    _write_shards(tensors, model_dir)


def _checkpoint_parts(name: str, master: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a master into tensors of the checkpoint, under their names."""
    stem = name.removesuffix(".weight")
    if stem.endswith("experts.w13"):
        prefix = stem.removesuffix("w13")
        for expert, matrix in enumerate(master):
            place = f"{prefix}{expert}." if ".ffn.experts." in name else prefix
            half = matrix.shape[0] // 2
            yield f"{place}w1.weight", matrix[:half]
            yield f"{place}w3.weight", matrix[half:]
    elif stem.endswith(".ffn.experts.w2"):
        for expert, matrix in enumerate(master):
            yield f"{stem.removesuffix('w2')}{expert}.w2.weight", matrix
    elif master.dim() == 3:
        yield f"{stem}.weight", master.flatten(0, 1)
    elif ".hc_" in name or stem.endswith(("attn_sink", "q_weight", "k_weight")):
        yield stem, master
    else:
        yield f"{stem}.weight", master


def _packed(name: str, value: Tensor, kind: str, source: str) -> dict[str, Tensor]:
    scale_name = name.removesuffix("weight") + "scale"
    if kind == "f32":
        return {name: rounded_value(value, source)}
    if kind == "bf16":
        return {name: value.bfloat16()}
    if kind == "fp8":
        scale = tile_scales(value)
        spread = scale.repeat_interleave(32, -2).repeat_interleave(32, -1)
        codes = (value / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        exponent = (torch.log2(scale) + 127).round().to(torch.uint8)
        return {name: codes, scale_name: exponent.view(torch.float8_e8m0fnu)}
    if kind == "fp4":
        record, split = quantize_fp4(value, "e8m0"), value.shape[-1] // 2
        return {
            name: record[..., :split].contiguous().view(torch.int8),
            scale_name: record[..., split:].contiguous().view(torch.float8_e8m0fnu),
        }
    record, split = quantize_fp8(value), value.shape[-1]
    return {
        name: record[..., :split].contiguous().view(torch.float8_e4m3fn),
        scale_name: record[..., split:].contiguous().view(torch.float8_e8m0fnu),
    }


def rounded_value(value: Tensor, kind: str) -> Tensor:
    """Return the float32 values that a format stores for `value`."""
    steps = {
        "fp8": round_tiles,
        "fp4": lambda matrix: round_fp4(matrix, "e8m0"),
        "fp8_rows": round_fp8,
        "bf16": round_bf16,
        "f32": lambda matrix: matrix,
    }
    return steps[kind](value).clone()


def _write_shards(tensors: dict[str, Tensor], model_dir: Path) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        if size + num_bytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += num_bytes
    index: dict[str, str] = {}
    model_dir.mkdir(parents=True, exist_ok=True)
    for stale in model_dir.glob("model-*.safetensors"):
        stale.unlink()
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, model_dir / file_name)
        index.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(content, indent=1) + "\n")
