"""The on-disk artifact format: schema, writer, reader, trust, certificates. Imports no torch.

An artifact is a plain directory:

    manifest.json                       identity: canonical JSON; its SHA-256 is the artifact id
    graphs/<phase>-<bucket>/            model.so, [model.json], signature.json, graph.txt, passes.json
    native/                             libdeepinfer_ops.so (GPU machine code: kernels.json, *.cubin, texts)
    weights/*.safetensors               one store for all graphs
    tokenizer/                          *.json, *.txt, *.jinja
    reports/                            sidecars outside the identity: <kind>-<first 16 digits of the id>.json

Writing (`writer.py`, `build_cache.py`)
    ArtifactWriter(target, force=False)     context manager: the target appears complete or not at all
      .add_file(path, data)                   write a file from memory
      .add_file_from(path, source)            copy a file in
      .create_file(path)                      context manager with `.write(data)`, for large files
      .finish(manifest, reports) -> artifact_id   fill in `files`, add sidecars, put the artifact in place
    BuildCache(root, max_bytes=4 GiB)       `.get(key)`, `.put(key, files)`: build results by SHA-256 key
    canonical_bytes(value) -> bytes         bytes of a struct: for signature.json, passes.json
    graph_name(phase, bucket)               the directory below graphs/

Reading (`reader.py`, `inspect.py`)
    open_artifact(directory, verify=True)   an OpenedArtifact: everything checked, nothing executed
      .manifest .artifact_id .signatures .pass_reports .tensors .paths
      .read_file(path) -> bytes               verified bytes
      .open_file(path) -> descriptor          verified file, for a memory map or /proc/self/fd
    TensorEntry                             where a weight lies: path, dtype, shape, offset, size_bytes
    check_compatible(manifest, ...)         refuse another torch version, device, architecture or ISA
    describe(directory) -> dict             what is inside; `render(facts)` makes text of it

Looking at graphs (`graph_view.py`, `pass_texts.py`, `dot.py`)
    view_graph(directory, graph, after)     a graph's text as it was compiled, or after one of its passes
    pack_texts(texts) -> bytes              what a build keeps of the texts, in a sidecar of the kind
                                            `pass_texts_kind(graph)`
    parse_graph(text), dot_text(nodes)      a graph's text as a drawing for Graphviz

Trust and proof (`trust.py`, `certificate.py`)
    TrustStore(directory=None)              `.record_built(id)`, `.trust(id)`, `.forget(id)`,
                                            `.is_trusted(id)`, `.origin(id)`, `.require(id, directory)`
    write_certificate, read_certificate, list_certificates      compiled against eager, per graph
    write_report, read_report               any other measurement

Records (`schema.py`): Manifest with ModelInfo, WeightsInfo, Toolchain, Target, PassInfo, CacheLayout of
CacheRegion, Limits, GraphEntry, FileEntry; GraphSignature of InputSpec, OutputSpec, ConstantSpec; PassReport
of PassResult; Certificate of GraphResult; Report.
"""

from deepinfer.artifacts.build_cache import BuildCache
from deepinfer.artifacts.canonical import artifact_id_of, canonical_bytes
from deepinfer.artifacts.certificate import (
    list_certificates,
    read_certificate,
    read_report,
    write_certificate,
    write_report,
)
from deepinfer.artifacts.dot import dot_text, parse_graph
from deepinfer.artifacts.graph_view import GraphView, view_graph
from deepinfer.artifacts.inspect import describe, render
from deepinfer.artifacts.pass_texts import pack_texts, pass_texts_kind
from deepinfer.artifacts.reader import OpenedArtifact, check_compatible, open_artifact
from deepinfer.artifacts.safetensors_index import TensorEntry
from deepinfer.artifacts.schema import (
    KERNEL_TABLE,
    CacheLayout,
    CacheRegion,
    Certificate,
    ConstantSpec,
    FileEntry,
    GraphEntry,
    GraphResult,
    GraphSignature,
    InputSpec,
    KernelEntry,
    KernelTable,
    Limits,
    Manifest,
    ModelInfo,
    OutputSpec,
    PassInfo,
    PassReport,
    PassResult,
    Report,
    Target,
    Toolchain,
    WeightsInfo,
)
from deepinfer.artifacts.trust import TrustStore, default_trust_directory
from deepinfer.artifacts.validation import graph_name
from deepinfer.artifacts.writer import ArtifactWriter

__all__ = [
    "ArtifactWriter",
    "BuildCache",
    "CacheLayout",
    "CacheRegion",
    "Certificate",
    "ConstantSpec",
    "FileEntry",
    "GraphEntry",
    "GraphResult",
    "GraphSignature",
    "GraphView",
    "InputSpec",
    "KERNEL_TABLE",
    "KernelEntry",
    "KernelTable",
    "Limits",
    "Manifest",
    "ModelInfo",
    "OpenedArtifact",
    "OutputSpec",
    "PassInfo",
    "PassReport",
    "PassResult",
    "Report",
    "Target",
    "TensorEntry",
    "Toolchain",
    "TrustStore",
    "WeightsInfo",
    "artifact_id_of",
    "canonical_bytes",
    "check_compatible",
    "default_trust_directory",
    "describe",
    "dot_text",
    "graph_name",
    "list_certificates",
    "open_artifact",
    "pack_texts",
    "parse_graph",
    "pass_texts_kind",
    "read_certificate",
    "read_report",
    "render",
    "view_graph",
    "write_certificate",
    "write_report",
]
