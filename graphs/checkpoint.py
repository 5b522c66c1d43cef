"""A model directory's weights: which files, which tensors, and that the config asks for exactly these.

Owns the index, the paths of shards and the comparison with the expected table. Tensors are views of mapped
files; nothing in the directory is ever imported or run. Knows nothing about what the tensors are used for.
"""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from deepinfer.errors import CheckpointError
from deepinfer.graphs.checkpoint_names import (
    MARK,
    Place,
    transformers_place,
    uses_transformers_names,
    vendor_place,
)
from deepinfer.graphs.checkpoint_tensors import TensorSpec, is_skipped, iter_expected_tensors
from deepinfer.graphs.config_schema import ModelConfig
from deepinfer.graphs.generations import V4
from deepinfer.graphs.safetensors_file import SafetensorsFile
from deepinfer.graphs.strict_json import printable, read_json_object

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 64 << 20  # the release's index of 96,085 tensors is about 8 MB
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".pkl", ".onnx")
_CONVERT = (
    "convert the weights to safetensors on a machine you trust: "
    "transformers' save_pretrained(DIR, safe_serialization=True)"
)


def _fail(where: str, what: str, action: str = "download the checkpoint again") -> NoReturn:
    raise CheckpointError(what, where=where, action=action)


class Checkpoint:
    """The weights of `model_dir`, checked against `config` when opened; bytes are read when asked for.

    Raises CheckpointError for formats other than safetensors, unsafe or missing shards, truncated or
    malformed files, and tensors that are missing, superfluous, listed twice, misshapen or of another dtype.
    """

    def __init__(self, model_dir: str | Path, config: ModelConfig) -> None:
        self.model_dir, self.config = Path(model_dir), config
        self._expected: dict[str, TensorSpec] = {}
        self._places: dict[str, Place] = {}
        self._files: dict[str, SafetensorsFile] = {}
        self._file_of: dict[str, SafetensorsFile] = {}
        self._digest: str | None = None
        if not self.model_dir.is_dir():
            _fail(str(self.model_dir), "the model directory does not exist", "check the path")
        index = self._read_index()
        self._open_files(sorted(set(index.values())) if index is not None else [SINGLE_NAME])
        self._locate_tensors(index)
        place_of = self._naming()
        for name, spec in iter_expected_tensors(config):  # stops at the first that is missing
            self._places[name] = place_of(name, spec)
            self._check_tensor(self._places[name], spec)
            self._expected[name] = spec
        self._stored = {place.name for place in self._places.values()}
        self._refuse_superfluous()

    # ---- opening ------------------------------------------------------------------------------------------

    def _read_index(self) -> dict[str, str] | None:
        """Tensor name -> shard name, or None when there is one unsharded file."""
        has_index = (self.model_dir / INDEX_NAME).is_file()
        has_single = (self.model_dir / SINGLE_NAME).is_file()
        if has_index and has_single:
            _fail(INDEX_NAME, f"both {INDEX_NAME} and {SINGLE_NAME} are present", "remove the stale one")
        if has_single:
            return None
        if not has_index:
            self._fail_without_safetensors()
        content = read_json_object(self.model_dir / INDEX_NAME, MAX_INDEX_BYTES, CheckpointError)
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            _fail(INDEX_NAME, "weight_map must be an object that names a shard for every tensor")
        for tensor, shard in weight_map.items():
            self._check_shard_name(tensor, shard)
        return weight_map

    def _fail_without_safetensors(self) -> NoReturn:
        others = sorted(p.name for p in self.model_dir.iterdir() if p.suffix.lower() in _OTHER_FORMATS)
        if others:
            _fail(others[0], "only safetensors weights are read, other formats can run code", _CONVERT)
        _fail(str(self.model_dir), f"neither {INDEX_NAME} nor {SINGLE_NAME} is there", "download the weights")

    def _check_shard_name(self, tensor: str, shard: object) -> None:
        where = f"{INDEX_NAME} tensor {printable(tensor)}"
        if not isinstance(shard, str):
            _fail(where, "the shard must be a file name")
        if shard.lower().endswith(_OTHER_FORMATS):
            _fail(where, f"only safetensors weights are read, not {shard[:100]!r}", _CONVERT)
        if not _SHARD_NAME.fullmatch(shard) or not shard.endswith(".safetensors"):
            _fail(
                where,
                f"{shard[:100]!r} is not a plain file name ending in .safetensors",
                "do not use this index",
            )

    def _open_files(self, names: list[str]) -> None:
        for name in names:
            path = self.model_dir / name
            if not path.exists():
                _fail(name, "the shard is missing", "download the missing file")
            resolved = path.resolve()
            if resolved.parent not in self._allowed_parents():
                _fail(name, "the file is a link that leaves the model directory", "put the file itself there")
            self._files[name] = SafetensorsFile(resolved, name)

    def _allowed_parents(self) -> list[Path]:
        """The directory itself; for a snapshot of a hub cache also the cache's own blob store."""
        root = self.model_dir.resolve()
        if root.parent.name == "snapshots":
            return [root, root.parent.parent / "blobs"]
        return [root]

    # ---- what is in the files -----------------------------------------------------------------------------

    def _locate_tensors(self, index: dict[str, str] | None) -> None:
        for file_name, file in self._files.items():
            for name in file.tensors:
                where = f"{file_name} tensor {printable(name)}"
                if name in self._file_of:
                    _fail(where, f"the tensor is also in {self._file_of[name].name}")
                if index is not None and index.get(name) != file_name:
                    listed = index.get(name)
                    _fail(
                        where, f"the index lists it in {listed}" if listed else "the index does not list it"
                    )
                self._file_of[name] = file
        for name, file_name in (index or {}).items():
            if name not in self._file_of:
                _fail(
                    f"{file_name} tensor {printable(name)}",
                    "the index lists the tensor here, the file lacks it",
                )

    def _naming(self) -> Callable[[str, TensorSpec], Place]:
        """How the checkpoint names its tensors: as the vendor does, or as transformers does."""
        if not uses_transformers_names(self._file_of):
            return vendor_place
        if self.config.generation is not V4 or self.config.quantized_weights:
            _fail(
                f"tensor {MARK}",
                "names of transformers are known for unquantised checkpoints of deepseek_v4 only",
                "use the weights as their vendor names them",
            )
        return partial(transformers_place, self.config)

    def _refuse_superfluous(self) -> None:
        for name, file in self._file_of.items():
            if name not in self._stored and not is_skipped(name):
                where = f"{file.name} tensor {printable(name)}"
                _fail(where, "the model that config.json describes has no such tensor", "check config.json")

    def _check_tensor(self, place: Place, spec: TensorSpec) -> None:
        name, shape = place.name, place.shape
        file = self._file_of.get(name)
        if file is None:
            listing = INDEX_NAME if SINGLE_NAME not in self._files else SINGLE_NAME
            _fail(
                f"{listing} tensor {name}", "the tensor is missing", "check config.json, download all shards"
            )
        stored, where = file.tensors[name], f"{file.name} tensor {name}"
        if stored.shape != shape:
            _fail(
                where,
                f"shape {list(stored.shape)}, config.json asks for {list(shape)}",
                "check config.json",
            )
        if stored.dtype not in spec.dtypes:
            _fail(
                where,
                f"dtype {stored.dtype}, expected {' or '.join(spec.dtypes)}",
                "use the released weights",
            )

    # ---- reading ------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors the model uses, those of the vendor, in the order of the model."""
        return tuple(self._expected)

    @property
    def skipped(self) -> tuple[str, ...]:
        """Names of tensors that are present and knowingly not read (drafter, vision)."""
        return tuple(sorted(name for name in self._file_of if name not in self._stored))

    def get(self, name: str) -> torch.Tensor:
        """A tensor as a read-only view of its file; FP8, scales and packed FP4 come as uint8."""
        assert name in self._expected, name
        place = self._places[name]
        tensor = self._file_of[place.name].get(place.name)
        return tensor[place.part] if place.part else tensor

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes and bytes of the tensors the model uses; computed once.

        Independent of sharding, file order and skipped tensors.
        """
        if self._digest is None:
            total = hashlib.sha256()
            for name in sorted(self._stored):
                stored = self._file_of[name].tensors[name]
                shape = ",".join(map(str, stored.shape))
                total.update(f"{name}\0{stored.dtype}\0{shape}\0{stored.end - stored.begin}\0".encode())
                with self._file_of[name].raw(name) as data:
                    total.update(data)
            self._digest = total.hexdigest()
        return self._digest
