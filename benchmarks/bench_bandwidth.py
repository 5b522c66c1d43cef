"""A decode step of one request against what memory allows: the bytes it must read over the time it takes.

A random DeepSeek-V4 model in float32 whose weights no cache holds and whose every expert works on every
token. Read are all weights but the embedding, and the cache of the request; the bound is a mere sum over as
many bytes, by torch, with the same threads. A ratio of 1 is memory speed.
"""

import json
import tempfile
from pathlib import Path

import torch
from bench_engine import Steps
from bench_transformers import FOLDER, MAX_MODEL_LEN, TransformersModel
from harness import Line, compare

from deepinfer.compile import compile_model
from deepinfer.runtime.loader import LoadedArtifact, load_artifact
from deepinfer.settings import CompileConfig

FLOORS = {1: 0.70, 2: 0.50}
_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 8,
    "head_dim": 64,
    "q_lora_rank": 256,
    "o_lora_rank": 128,
    "n_routed_experts": 3,
    "num_experts_per_tok": 3,
}


def run(threads: int) -> list[Line]:
    """The lines of this area."""
    config = json.loads((FOLDER / "tests/golden_data/v4-tiny/config.json").read_text()) | _SIZES
    with tempfile.TemporaryDirectory(prefix="deepinfer-bench-") as name:
        folder = Path(name)
        checkpoint = TransformersModel.random(config, seed=1).save(folder / "checkpoint", config)
        options = CompileConfig(
            precision="float32",
            decode_rows=(1,),
            prefill_tokens=(64,),
            max_num_seqs=1,
            max_model_len=MAX_MODEL_LEN,
            taps="off",
        )
        compile_model(checkpoint, folder / "artifact", options, certify=False)
        loaded = load_artifact(folder / "artifact")
        torch.set_num_threads(threads)  # loading sets its own
        return [_decode(loaded, threads)]


def _decode(loaded: LoadedArtifact, threads: int) -> Line:
    weights = sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in loaded.weights.tensors.items()
        if not name.startswith("embed")
    )
    cache = loaded.manifest.cache.block_bytes + loaded.manifest.cache.slot_bytes
    memory = torch.ones((weights + cache) // 4)
    result = compare({"step": Steps(loaded, 1), "read": memory.sum}, rounds=15)
    ratio = result.ratio("step", "read")
    size, times = weights + cache, {name: result.seconds(name).median for name in ("step", "read")}
    detail = (
        f"{size / 2**20:.0f} MiB in {times['step'] * 1e3:.1f} ms: {size / times['step'] / 1e9:.1f} GB/s, "
        f"a read {size / times['read'] / 1e9:.1f}"
    )
    name = "decode step of one request, float32: to a read of its bytes"
    return Line(name, ratio.median, ratio.low, ratio.high, FLOORS.get(threads), detail)
