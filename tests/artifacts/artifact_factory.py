"""A small, complete and valid artifact for the tests of this folder: no torch, no compiler, a few kB."""

import hashlib
import json
import struct
from pathlib import Path

from deepinfer.artifacts import (
    ArtifactWriter,
    CacheLayout,
    CacheRegion,
    ConstantSpec,
    GraphEntry,
    GraphSignature,
    InputSpec,
    Limits,
    Manifest,
    ModelInfo,
    OutputSpec,
    PassInfo,
    PassReport,
    PassResult,
    Target,
    Toolchain,
    WeightsInfo,
    canonical_bytes,
)

DIGEST = hashlib.sha256(b"anything").hexdigest()
GRAPHS = (("prefill", 8), ("decode", 2), ("decode", 1))


def safetensors_bytes(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """The bytes of a safetensors file from name -> (dtype, shape, data)."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


WEIGHTS = safetensors_bytes(
    {"embed.weight": ("F32", (4, 2), bytes(range(32))), "norm.weight": ("BF16", (2,), b"\x80\x3f\x80\x3f")}
)


def make_signature(bucket: int) -> GraphSignature:
    """Signature of a graph of `bucket` rows over one cache region."""
    return GraphSignature(
        inputs=(
            InputSpec(name="token_ids", dtype="int64", shape=(bucket,), strides=(1,)),
            InputSpec(name="layers.0.window", dtype="uint8", shape=(3, 8, 16), strides=(256, 16, 1)),
        ),
        outputs=(OutputSpec(name="hidden", dtype="bfloat16", shape=(bucket, 2)),),
        constants=(ConstantSpec(name="embed_weight", weight="embed.weight"),),
    )


def make_manifest(**changes: object) -> Manifest:
    """A manifest that fits the files of `add_files`."""
    fields: dict = {
        "model": ModelInfo(
            model_type="deepseek_v41",
            architecture="DeepseekV41ForCausalLM",
            vocab_size=4,
            num_hidden_layers=1,
            bos_token_id=0,
            eos_token_id=(1, 2),
            pad_token_id=None,
            image_token_id=None,
            config_sha256=DIGEST,
        ),
        "weights": WeightsInfo(sha256=DIGEST, tensor_count=2, total_bytes=36),
        "tokenizer_sha256": DIGEST,
        "toolchain": Toolchain(
            deepinfer="0.1.0", torch="2.13.0", python="3.11", compiler="g++ 12", op_library_sha256=DIGEST
        ),
        "target": Target(device="cpu", arch="x86_64", isa="avx2"),
        "precision": "native",
        "passes": (
            PassInfo(name="fuse_norm", sha256=DIGEST),
            PassInfo(name="fast_math", sha256=DIGEST, exact=False),
        ),
        "disabled_passes": ("fuse_gate",),
        "options": {"buckets": {"decode": [1, 2]}, "ratio": 0.5, "name": "naïve", "nothing": None},
        "cache": CacheLayout(
            block_tokens=8,
            block_bytes=128,
            num_blocks=5,
            slot_bytes=256,
            num_slots=3,
            max_blocks_per_request=4,
            regions=(
                CacheRegion(
                    name="layers.0.window",
                    kind="state",
                    offset_bytes=0,
                    entries=8,
                    record_shape=(16,),
                    dtype="uint8",
                ),
                CacheRegion(
                    name="layers.0.open_group",
                    kind="state",
                    offset_bytes=128,
                    entries=1,
                    record_shape=(4,),
                    dtype="float32",
                ),
                CacheRegion(
                    name="layers.0.compressed_kv",
                    kind="paged",
                    offset_bytes=0,
                    entries=4,
                    record_shape=(20,),
                    dtype="uint8",
                    tokens_per_entry=2,
                ),
            ),
        ),
        "limits": Limits(max_model_len=32, max_num_seqs=2),
        "tolerances": {"max_abs_error": 0.001, "mean_kl": 1e-05},
        "graphs": tuple(
            GraphEntry(name=f"{phase}-{bucket}", phase=phase, bucket=bucket, request_rows=2)
            for phase, bucket in GRAPHS
        ),
    }
    return Manifest(**(fields | changes))


def add_files(writer: ArtifactWriter, graph_text: str = "graph():\n    return hidden\n") -> None:
    """Every file that the manifest's graphs need."""
    report = PassReport(passes=(PassResult(name="fuse_norm", rewrites=3, nodes_before=20, nodes_after=14),))
    for phase, bucket in GRAPHS:
        folder = f"graphs/{phase}-{bucket}"
        writer.add_file(f"{folder}/model.so", b"\x7fELF" + bytes([bucket]) * 60)
        writer.add_file(f"{folder}/signature.json", canonical_bytes(make_signature(bucket)))
        writer.add_file(f"{folder}/passes.json", canonical_bytes(report))
        writer.add_file(f"{folder}/graph.txt", graph_text.encode())
    writer.add_file("native/libdeepinfer_ops.so", b"\x7fELF" + b"\1" * 100)
    writer.add_file("weights/model.safetensors", WEIGHTS)
    writer.add_file("tokenizer/tokenizer.json", b'{"model":{}}')


def build_smallest(target: Path, *, force: bool = False, **changes: object) -> str:
    """As `build`, with one graph: for tests that build hundreds of times."""
    graph = GraphEntry(name="decode-1", phase="decode", bucket=1, request_rows=1)
    with ArtifactWriter(target, force=force) as writer:
        writer.add_file("graphs/decode-1/model.so", b"\x7fELF")
        writer.add_file("graphs/decode-1/signature.json", canonical_bytes(make_signature(1)))
        writer.add_file("graphs/decode-1/passes.json", b'{"passes":[]}')
        writer.add_file("graphs/decode-1/graph.txt", b"graph()\n")
        writer.add_file("weights/model.safetensors", WEIGHTS)
        return writer.finish(make_manifest(tokenizer_sha256=None, graphs=(graph,), **changes))


def build(target: Path, *, force: bool = False, **changes: object) -> str:
    """Write the small artifact to `target` and return its id."""
    with ArtifactWriter(target, force=force) as writer:
        add_files(writer)
        return writer.finish(make_manifest(**changes))
