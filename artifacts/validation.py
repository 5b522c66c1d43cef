"""Rules between the fields of the format: what a well-typed manifest or signature must also satisfy.

Every check raises ArtifactFormatError naming the field. The writer applies them before anything appears at
the target, the reader before anything is used. This file opens no files.
"""

import math
from collections.abc import Iterable

from deepinfer.artifacts.canonical import MAX_INTEGER, canonical_bytes, convert_struct, parse_json
from deepinfer.artifacts.files import split_path
from deepinfer.artifacts.schema import (
    ARTIFACT_KIND,
    FORMAT_VERSION,
    MANIFEST_NAME,
    CacheLayout,
    CacheRegion,
    Certificate,
    GraphEntry,
    GraphSignature,
    InputSpec,
    Manifest,
    OutputSpec,
)
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError

REQUIRED_GRAPH_FILES = ("graph.txt", "model.so", "passes.json", "signature.json")
OPTIONAL_GRAPH_FILES = ("model.json",)
_DIRECTORY_SUFFIXES = {
    "native": (".so", ".cubin", ".json", ".ptx", ".ttgir", ".ttir"),
    "weights": (".safetensors",),
    "tokenizer": (".json", ".txt", ".jinja"),
}
_ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "int32": 4, "float32": 4}
_DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
    "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip


def decode_manifest(data: bytes) -> Manifest:
    """Parse and check the bytes of `manifest.json`.

    Raises ArtifactCorruptError when they are not canonical JSON, ArtifactFormatError when they are JSON but
    not a manifest that this version reads.
    """
    value = parse_json(data, where=MANIFEST_NAME)
    if not isinstance(value, dict) or value.get("kind") != ARTIFACT_KIND:
        raise ArtifactFormatError("not the manifest of an artifact", where=MANIFEST_NAME)
    version = value.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise ArtifactFormatError(
            f"format version {version!r:.40}, this deepinfer reads version {FORMAT_VERSION}",
            where=MANIFEST_NAME,
            action="rebuild the artifact, or use the deepinfer version that built it",
        )
    manifest = convert_struct(value, Manifest, where=MANIFEST_NAME)
    if canonical_bytes(manifest) != data:
        raise ArtifactCorruptError(
            "not in canonical form, so it was edited after it was written",
            where=MANIFEST_NAME,
            action="copy the artifact again or rebuild it",
        )
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Check every rule between the manifest's fields."""
    _check_graphs(manifest.graphs)
    check_cache(manifest.cache)
    cache, limits = manifest.cache, manifest.limits
    if cache.max_blocks_per_request * cache.block_tokens < limits.max_model_len:
        raise _bad(
            f"{cache.max_blocks_per_request} blocks of {cache.block_tokens} tokens cannot hold "
            f"max_model_len {limits.max_model_len}",
            "cache.max_blocks_per_request",
        )
    for name, tolerance in manifest.tolerances.items():
        if tolerance < 0:
            raise _bad(f"{name!r:.100} is negative", "tolerances")
    _require_unique((info.name for info in manifest.passes), "passes")
    _check_files(manifest)


def graph_name(phase: str, bucket: int) -> str:
    """The name of a graph, which is also its directory below `graphs/`: `decode-4`."""
    return f"{phase}-{bucket}"


def graph_order(graph: GraphEntry) -> tuple[str, int]:
    """Sort key of the manifest's graph list: phase, then bucket."""
    return graph.phase, graph.bucket


def _check_graphs(graphs: tuple[GraphEntry, ...]) -> None:
    if list(graphs) != sorted(graphs, key=graph_order):
        raise _bad("not sorted by phase and bucket", "graphs")
    _require_unique((graph.name for graph in graphs), "graphs")
    for graph in graphs:
        if graph.name != graph_name(graph.phase, graph.bucket):
            raise _bad(f"{graph.name} must be named {graph_name(graph.phase, graph.bucket)}", "graphs")


def check_cache(cache: CacheLayout) -> None:
    """Every region lies inside its arena, aligned, overlapping no other of the same arena."""
    _require_unique((region.name for region in cache.regions), "cache.regions")
    for kind, record_bytes in (("paged", cache.block_bytes), ("state", cache.slot_bytes)):
        end, previous = 0, ""
        regions = sorted((r for r in cache.regions if r.kind == kind), key=lambda r: r.offset_bytes)
        for region in regions:
            where = f"cache.regions {region.name}"
            item_bytes = _ITEM_BYTES[region.dtype]
            if region.offset_bytes % item_bytes or record_bytes % item_bytes:
                raise _bad(f"not aligned to the {item_bytes} bytes of {region.dtype}", where)
            if region.offset_bytes < end:
                raise _bad(f"overlaps {previous}", where)
            end, previous = region.offset_bytes + region_bytes(region), region.name
            if end > record_bytes:
                raise _bad(f"ends at byte {end} of {record_bytes}", where)
            if kind == "paged" and region.entries * region.tokens_per_entry != cache.block_tokens:
                raise _bad(
                    f"{region.entries} entries of {region.tokens_per_entry} tokens do not make a block of "
                    f"{cache.block_tokens}",
                    where,
                )
    for arena, number, size in (
        ("blocks", cache.num_blocks, cache.block_bytes),
        ("slots", cache.num_slots, cache.slot_bytes),
    ):
        if number * size > MAX_INTEGER:
            raise _bad(f"the arena of {arena} is larger than 2^63 bytes", "cache")


def region_bytes(region: CacheRegion) -> int:
    """Bytes that one region takes in one block or slot."""
    return region.entries * math.prod(region.record_shape) * _ITEM_BYTES[region.dtype]


def check_signature(signature: GraphSignature, *, where: str) -> None:
    """Unique names, one stride per dimension, sizes and reach of every tensor within 63 bits."""
    _require_unique((spec.name for spec in signature.inputs), f"{where} inputs")
    _require_unique((spec.name for spec in signature.outputs), f"{where} outputs")
    _require_unique((spec.name for spec in signature.constants), f"{where} constants")
    tensors: tuple[InputSpec | OutputSpec, ...] = (*signature.inputs, *signature.outputs)
    for spec in tensors:
        if math.prod(spec.shape) * _DTYPE_BYTES[spec.dtype] > MAX_INTEGER:
            raise _bad(f"{spec.name!r:.100} is larger than 2^63 bytes", where)
    for tensor in signature.inputs:
        if len(tensor.strides) != len(tensor.shape):
            raise _bad(
                f"{tensor.name!r:.100} has {len(tensor.shape)} sizes, {len(tensor.strides)} strides", where
            )
        reach = sum(
            max(size - 1, 0) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        if (reach + 1) * _DTYPE_BYTES[tensor.dtype] > MAX_INTEGER:
            raise _bad(f"{tensor.name!r:.100} reaches beyond 2^63 bytes", where)


def check_certificate(certificate: Certificate, *, where: str) -> None:
    """A comparison may pass only if it compared something and its error was finite."""
    _require_unique((result.graph for result in certificate.graphs), f"{where} graphs")
    for result in certificate.graphs:
        if result.verdict == "pass" and (result.max_abs_error is None or not result.rows_compared):
            raise _bad(f"{result.graph} passed without a finite error over at least one row", where)


def check_case_clash(paths: Iterable[str]) -> None:
    """Refuse paths, or directories on the way, that a case-insensitive file system would merge."""
    spelled: dict[str, str] = {}
    for path in paths:
        components = path.split("/")
        for depth in range(1, len(components) + 1):
            prefix = "/".join(components[:depth])
            if spelled.setdefault(prefix.casefold(), prefix) != prefix:
                raise _bad(f"differs only in case from {spelled[prefix.casefold()]}", prefix)


def _check_files(manifest: Manifest) -> None:
    paths = [entry.path for entry in manifest.files]
    if paths != sorted(paths):
        raise _bad("not sorted by path", "files")
    _require_unique(paths, "files")
    graphs = {graph.name for graph in manifest.graphs}
    for path in paths:
        _check_place(path, graphs)
    check_case_clash(paths)
    present = set(paths)
    for name in sorted(graphs):
        for file_name in REQUIRED_GRAPH_FILES:
            if f"graphs/{name}/{file_name}" not in present:
                raise _bad(f"the graph {name} has no {file_name}", "files")
    if manifest.weights.tensor_count and not any(path.startswith("weights/") for path in paths):
        raise _bad(f"{manifest.weights.tensor_count} tensors, but no file below weights/", "files")
    if manifest.tokenizer_sha256 is not None and "tokenizer/tokenizer.json" not in present:
        raise _bad("a tokenizer is named, but tokenizer/tokenizer.json is not among the files", "files")


def _check_place(path: str, graphs: set[str]) -> None:
    """Only the kinds of files that the format lists may be in an artifact."""
    components = split_path(path)
    folder, name = components[0], components[-1]
    if folder == "graphs" and len(components) == 3:
        fits = components[1] in graphs and name in REQUIRED_GRAPH_FILES + OPTIONAL_GRAPH_FILES
    else:
        fits = len(components) == 2 and name.endswith(_DIRECTORY_SUFFIXES.get(folder, ()))
    if not fits:
        raise _bad("not a kind of file that an artifact holds, at this place", path)


def _require_unique(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _bad(f"{name!r:.100} occurs twice", where)
        seen.add(name)


def _bad(what: str, where: str) -> ArtifactFormatError:
    return ArtifactFormatError(what, where=where, action="rebuild the artifact")
