"""The format's records: what `manifest.json`, a graph's JSON files and the sidecars may say, field by field.

All structs are frozen and closed: an unknown or missing field is an error, never ignored. Anything that can
change a result is a field of `Manifest`; nothing else is (no times, no paths of the build machine).
Rules between fields are in `validation.py`; bytes are in `canonical.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

FORMAT_VERSION = 1
ARTIFACT_KIND = "deepinfer-artifact"
MANIFEST_NAME = "manifest.json"
REPORTS_DIRECTORY = "reports"
KERNEL_TABLE = "native/kernels.json"

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}\Z")]
ReportKind = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}\Z")]
Text = Annotated[str, Meta(min_length=1, max_length=1000)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Phase = Literal["prefill", "decode", "logits", "sample", "draft"]
DType = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2",
]  # fmt: skip


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every record: immutable and closed; built by keyword, which is not inherited."""


class ModelInfo(Record, frozen=True, kw_only=True):
    """Which model this is, and the few facts the runtime needs without its config."""

    model_type: Name
    architecture: Text
    vocab_size: Positive
    num_hidden_layers: Positive
    bos_token_id: Count | None
    eos_token_id: Count | tuple[Count, ...] | None
    pad_token_id: Count | None
    image_token_id: Count | None
    config_sha256: Sha256


class WeightsInfo(Record, frozen=True, kw_only=True):
    """Identity of the checkpoint: SHA-256 over names, dtypes, shapes and bytes of its tensors."""

    sha256: Sha256
    tensor_count: Count
    total_bytes: Count


class Toolchain(Record, frozen=True, kw_only=True):
    """What made the native code; another version may round differently."""

    deepinfer: Text
    torch: Text
    python: Text
    compiler: Text
    op_library_sha256: Sha256


class Target(Record, frozen=True, kw_only=True):
    """The machine the native code runs on: device, architecture (`x86_64`, `sm_90`), ISA (`avx2`)."""

    device: Literal["cpu", "cuda"]
    arch: Name
    isa: Name


class PassInfo(Record, frozen=True, kw_only=True):
    """One pass of the pipeline, in order; `exact` passes keep every bit of the eager result."""

    name: Name
    sha256: Sha256
    exact: bool = True


class CacheRegion(Record, frozen=True, kw_only=True):
    """One record array inside every block (`paged`) or every slot (`state`); offsets in bytes."""

    name: Name
    kind: Literal["state", "paged"]
    offset_bytes: Count
    entries: Positive
    record_shape: tuple[Positive, ...]
    dtype: Literal["uint8", "int32", "float32", "bfloat16"]
    tokens_per_entry: Positive = 1


class CacheLayout(Record, frozen=True, kw_only=True):
    """Two arenas of bytes, blocks and slots, with their regions; index 0 of each is nobody's."""

    block_tokens: Positive
    block_bytes: Count
    num_blocks: Positive
    slot_bytes: Count
    num_slots: Positive
    max_blocks_per_request: Positive
    regions: tuple[CacheRegion, ...]


class Limits(Record, frozen=True, kw_only=True):
    """The largest request and the most requests at a time."""

    max_model_len: Positive
    max_num_seqs: Positive


class GraphEntry(Record, frozen=True, kw_only=True):
    """One compiled graph; `request_rows` is the size of its request table (R).

    With `taps` it returns, after its result, the residual streams after every part of every layer.
    """

    name: Name
    phase: Phase
    bucket: Positive
    request_rows: Count
    taps: bool = False


class FileEntry(Record, frozen=True, kw_only=True):
    """One file of the artifact, by its path below the root."""

    path: Annotated[str, Meta(max_length=500)]
    bytes: Count
    sha256: Sha256


class Manifest(Record, frozen=True, kw_only=True):
    """The whole identity of an artifact."""

    format_version: Literal[1] = 1
    kind: Literal["deepinfer-artifact"] = "deepinfer-artifact"
    model: ModelInfo
    weights: WeightsInfo
    tokenizer_sha256: Sha256 | None
    toolchain: Toolchain
    target: Target
    precision: Literal["native", "float32"]
    passes: tuple[PassInfo, ...]
    disabled_passes: tuple[Name, ...] = ()
    options: dict[str, Any]
    cache: CacheLayout
    limits: Limits
    tolerances: dict[str, float]
    graphs: tuple[GraphEntry, ...]
    files: tuple[FileEntry, ...] = ()


class InputSpec(Record, frozen=True, kw_only=True):
    """One input of a graph, in call order; strides in elements."""

    name: Text
    dtype: DType
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]


class OutputSpec(Record, frozen=True, kw_only=True):
    """One output of a graph, in order."""

    name: Text
    dtype: DType
    shape: tuple[Count, ...]


class ConstantSpec(Record, frozen=True, kw_only=True):
    """A weight that a graph needs: its `name` in the shared object, its `weight` name in the store."""

    name: Text
    weight: Text


class GraphSignature(Record, frozen=True, kw_only=True):
    """`graphs/<name>/signature.json`: how to call the shared object."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    constants: tuple[ConstantSpec, ...]


class PassResult(Record, frozen=True, kw_only=True):
    """What one pass did to one graph; no timings, since these bytes are part of the identity."""

    name: Name
    rewrites: Count
    nodes_before: Count
    nodes_after: Count


class PassReport(Record, frozen=True, kw_only=True):
    """`graphs/<name>/passes.json`."""

    passes: tuple[PassResult, ...]


class GraphResult(Record, frozen=True, kw_only=True):
    """Compiled against eager for one graph. An error that was not finite is null, and never passes."""

    graph: Name
    rows_compared: Count
    max_abs_error: Annotated[float, Meta(ge=0.0)] | None
    mean_kl: float | None = None
    top1_agreement: Share | None = None
    excluded_share: Share = 0.0
    verdict: Literal["pass", "fail"]
    tolerances: dict[str, float]
    first_differing_layer: Text | None = None


class KernelEntry(Record, frozen=True, kw_only=True):
    """One kernel for a graphics card; its files below `native/` begin with `files`.

    Registers and spilled bytes are those of a thread. `chosen`: what serves the operation where there are two
    languages. `form` are its compile-time parameters and the types of the others.
    """

    op: Name
    kernel: Name
    language: Literal["triton", "cuda"]
    chosen: bool
    files: Name
    threads: Positive
    registers: Count
    shared_bytes: Count
    spill_bytes: Count
    form: dict[str, str]


class KernelTable(Record, frozen=True, kw_only=True):
    """`native/kernels.json`: the operations at the model's shapes as machine code, and what made it."""

    compilers: dict[str, str]
    kernels: tuple[KernelEntry, ...]


class Certificate(Record, frozen=True, kw_only=True):
    """Sidecar: the record of one comparison, tied to one artifact by its id."""

    format_version: Literal[1] = 1
    artifact_id: Sha256
    kind: ReportKind
    created_by: Text
    environment: dict[str, str] = {}
    graphs: tuple[GraphResult, ...]

    @property
    def passed(self) -> bool:
        """True when at least one graph was compared and every comparison passed."""
        return bool(self.graphs) and all(result.verdict == "pass" for result in self.graphs)


class Report(Record, frozen=True, kw_only=True):
    """Sidecar: any other measurement (cost curves, kernel timings), tied to one artifact by its id."""

    format_version: Literal[1] = 1
    artifact_id: Sha256
    kind: ReportKind
    content: dict[str, Any]
