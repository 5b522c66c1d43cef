"""Equal graphs are lowered once, whatever changed around them; other graphs never share a result."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import tiny_build

from deepinfer import build_worker
from deepinfer.artifacts import GraphSignature
from deepinfer.kernels.native import load_host_library


class Lowering:
    """Stands for the compiler: counts what it is asked to lower."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self, program: object, *, name: str, work_dir: Path, isa: str, arch: str | None, unaligned: tuple
    ) -> SimpleNamespace:
        assert arch is None and unaligned == ()
        self.count += 1
        (work_dir / "lowered").write_bytes(f"{name} {isa} {self.count}".encode())
        return SimpleNamespace(shared_object=work_dir / "lowered", extern_json=None)


@pytest.fixture
def lowering(monkeypatch: pytest.MonkeyPatch) -> Lowering:
    stand_in = Lowering()
    monkeypatch.setattr(build_worker, "lower_graph", stand_in)
    monkeypatch.setattr(
        build_worker, "signature_of", lambda lowered: GraphSignature(inputs=(), outputs=(), constants=())
    )
    return stand_in


@pytest.fixture
def job(tiny_model: Path, tmp_path: Path) -> build_worker.Job:
    logits = tiny_build.jobs_of(tiny_model)["logits-1"]
    return msgspec.structs.replace(logits, cache_dir=str(tmp_path / "cache"), work_dir=str(tmp_path))


def test_an_equal_graph_is_lowered_once(job: build_worker.Job, lowering: Lowering) -> None:
    load_host_library()
    first = build_worker.captured_program(job)
    files = build_worker.lowered_files(job, first, "text")
    assert files["model.so"].endswith(b" 1")
    assert build_worker.lowered_files(job, build_worker.captured_program(job), "text") == files
    assert lowering.count == 1


def test_another_graph_or_instruction_set_is_lowered_anew(
    job: build_worker.Job, lowering: Lowering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text after all passes, the node names, the graph's name, and the instruction set all count."""
    load_host_library()
    program = build_worker.captured_program(job)
    seen = [build_worker.lowered_files(job, program, "text")["model.so"]]
    seen.append(build_worker.lowered_files(job, program, "other text")["model.so"])
    other_isa = msgspec.structs.replace(job, isa="avx512" if job.isa == "avx2" else "avx2")
    seen.append(build_worker.lowered_files(other_isa, program, "text")["model.so"])
    other_name = msgspec.structs.replace(job, bucket=job.bucket + 1)
    seen.append(build_worker.lowered_files(other_name, program, "text")["model.so"])
    next(iter(program.graph.find_nodes(op="output"))).name = "renamed"
    seen.append(build_worker.lowered_files(job, program, "text")["model.so"])
    assert len(set(seen)) == len(seen) == lowering.count
