"""A real artifact directory around the fake graphs: all but the shared objects is what it claims to be."""

import json
import platform
import struct
from collections.abc import Mapping
from pathlib import Path

import fake_graphs
import msgspec
import numpy as np
import torch
from torch import Tensor

from deepinfer.artifacts import (
    ArtifactWriter,
    ConstantSpec,
    GraphEntry,
    GraphSignature,
    InputSpec,
    Limits,
    Manifest,
    ModelInfo,
    OutputSpec,
    PassReport,
    Target,
    Toolchain,
    WeightsInfo,
    canonical_bytes,
)
from deepinfer.kernels import native
from deepinfer.runtime import loader

WEIGHTS = {
    "embed": np.arange(12, dtype=np.float32).reshape(3, 4),
    "scale": np.array([1, 2, 3], dtype=np.uint8),
    "bias": np.array([-1.5], dtype=np.float32),
}
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [
            {
                "id": fake_graphs.EOS,
                "content": "<end>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"<end>" if i == fake_graphs.EOS else f"w{i}": i for i in range(fake_graphs.VOCAB)},
            "unk_token": "w0",
        },
    }
)


def write_artifact(
    directory: Path,
    *,
    tokenizer: str | None = TOKENIZER,
    chat_template: str | None = None,
    changes: Mapping[str, object] | None = None,
    signature_changes: Mapping[str, dict] | None = None,
    without_phase: str | None = None,
) -> str:
    """Write an artifact and return its id; `changes` go to the manifest, the others to signatures by name."""
    runner = fake_graphs.fake_runner()
    entries, signatures = [], {}
    for name, graph in runner._graphs.items():
        phase, bucket = name.split("-")
        rows = {"prefill": runner.limits.prefill_table_size, "decode": int(bucket), "logits": 0}[phase]
        entries.append(GraphEntry(name=name, phase=phase, bucket=int(bucket), request_rows=rows))
        inputs = (
            [torch.empty(int(bucket), fake_graphs.HIDDEN)]
            if phase == "logits"
            else runner.inputs(phase, graph.bucket)
        )
        width = fake_graphs.VOCAB if phase == "logits" else fake_graphs.HIDDEN
        signature = GraphSignature(
            inputs=tuple(_input(f"input_{index}", tensor) for index, tensor in enumerate(inputs)),
            outputs=(OutputSpec(name="output", dtype="float32", shape=(int(bucket), width)),),
            constants=(ConstantSpec(name="c0", weight="embed"), ConstantSpec(name="c1", weight="scale")),
        )
        signatures[name] = msgspec.structs.replace(signature, **(signature_changes or {}).get(name, {}))
    with ArtifactWriter(directory) as writer:
        for name, signature in signatures.items():
            if name.split("-")[0] == without_phase:
                continue
            writer.add_file(f"graphs/{name}/model.so", f"stands for {name}".encode())
            writer.add_file(f"graphs/{name}/graph.txt", b"")
            writer.add_file(f"graphs/{name}/signature.json", canonical_bytes(signature))
            writer.add_file(f"graphs/{name}/passes.json", canonical_bytes(PassReport(passes=())))
        writer.add_file("weights/model.safetensors", _safetensors(WEIGHTS))
        if tokenizer is not None:
            writer.add_file("tokenizer/tokenizer.json", tokenizer.encode())
        if chat_template is not None:
            writer.add_file("tokenizer/chat_template.jinja", chat_template.encode())
        manifest = _manifest(tuple(entries), runner.limits, tokenizer is not None)
        return writer.finish(msgspec.structs.replace(manifest, **(changes or {})))


class OpenedFakes:
    """Stands for `CompiledGraph.open`: gives the fake graph that the bytes name, and keeps what was bound."""

    def __init__(self) -> None:
        self.bound: dict[str, dict[str, Tensor]] = {}
        self.checked: list[str] = []

    def open(
        self, shared_object: bytes, extern_json: bytes | None = None, *, name: str, device: str
    ) -> object:
        assert device == "cpu"
        assert shared_object == f"stands for {name}".encode() and extern_json is None
        graph = fake_graphs.fake_runner()._graphs[name]
        graph.bind = lambda constants, *_: self.bound.__setitem__(name, dict(constants))  # type: ignore[union-attr]

        def check(inputs: list[Tensor], expected: list) -> None:
            loader.CompiledGraph.check(graph, inputs, expected)  # type: ignore[arg-type]
            self.checked.append(name)

        graph.name, graph.check = name, check  # type: ignore[union-attr]
        return graph


def _input(name: str, tensor: Tensor) -> InputSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputSpec(name=name, dtype=dtype, shape=tuple(tensor.shape), strides=tuple(tensor.stride()))


def _manifest(entries: tuple[GraphEntry, ...], limits: object, has_tokenizer: bool) -> Manifest:
    digest = "0" * 64
    return Manifest(
        model=ModelInfo(
            model_type="fake",
            architecture="Fake",
            vocab_size=fake_graphs.VOCAB,
            num_hidden_layers=1,
            bos_token_id=0,
            eos_token_id=fake_graphs.EOS,
            pad_token_id=None,
            image_token_id=fake_graphs.IMAGE,
            config_sha256=digest,
        ),
        weights=WeightsInfo(sha256=digest, tensor_count=len(WEIGHTS), total_bytes=55),
        tokenizer_sha256=digest if has_tokenizer else None,
        toolchain=Toolchain(
            deepinfer="0", torch=str(torch.__version__), python="3", compiler="none", op_library_sha256=digest
        ),
        target=Target(device="cpu", arch=platform.machine(), isa=native.host_isa()),
        precision="native",
        passes=(),
        options={},
        cache=fake_graphs.fake_cache_layout(limits),
        limits=Limits(max_model_len=limits.max_model_len, max_num_seqs=limits.num_slots - 1),
        tolerances={},
        graphs=entries,
    )


def _safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        end = len(data) + array.nbytes
        dtype = {"float32": "F32", "uint8": "U8"}[array.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), end]}
        data += array.tobytes()
    text = msgspec.json.encode(header)
    return struct.pack("<Q", len(text)) + text + data
