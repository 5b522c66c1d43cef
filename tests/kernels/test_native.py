"""Building and loading the op library: cache, reproducible bytes, failures, one library per process."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepinfer.errors import ArtifactCorruptError, ArtifactMismatchError, LoweringError, ResourceError
from deepinfer.kernels import OPS, native

AVX2 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
AVX512 = AVX2 + " avx512f avx512bw avx512cd avx512dq avx512vl"


@pytest.fixture
def fake_compiler(tmp_path: Path) -> Path:
    """Stands in for g++: slow, counts its runs, writes the sources' names instead of a library."""
    script = tmp_path / "fake-g++"
    script.write_text(
        f"""#!/bin/sh
case "$1" in
  --version) echo "fake 1.0"; exit 0;;
  -dumpmachine) echo "x86_64-test"; exit 0;;
esac
case "$*" in *-shared*) echo run >> {tmp_path}/runs;; esac
while [ $# -gt 0 ]; do
  [ "$1" = -o ] && output=$2
  shift
done
echo partial > "$output"
sleep 0.1
[ -e {tmp_path}/fail ] && echo "ops.cpp:1: error: a made-up mistake" && exit 1
echo library > "$output"
"""
    )
    script.chmod(0o700)
    return script


@pytest.mark.parametrize(
    ("flags", "host"), [(AVX512, "avx512"), (AVX2, "avx2"), (AVX2 + " avx512f", "avx2"), ("fpu sse2", None)]
)
def test_level_of_a_machine(flags, host, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t: x\n")
    if host is None:
        with pytest.raises(LoweringError, match="none of the levels avx512, avx2"):
            native.host_isa(cpuinfo)
    else:
        assert native.host_isa(cpuinfo) == host
    assert native.supports_isa("avx2", cpuinfo) == (host is not None)
    assert native.supports_isa("avx512", cpuinfo) == (host == "avx512")
    assert not native.supports_isa("avx10", cpuinfo)
    assert not native.supports_isa("avx2", tmp_path / "absent")


def test_same_sources_in_another_folder_give_the_same_bytes(tmp_path):
    """A few of the sources: compiling all of them twice takes minutes."""
    built = []
    for place in ("here", "there"):
        sources = tmp_path / place / "sources"
        sources.mkdir(parents=True)
        for path in (
            *native.SOURCE_DIR.glob("*.h"),
            native.SOURCE_DIR / "rope.cpp",
            native.SOURCE_DIR / "ops.cpp",
        ):
            shutil.copy(path, sources)
        built.append(
            native.build_op_library(native.host_isa(), tmp_path / place / "cache", source_dir=sources)
        )
    first, second = built
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert str(tmp_path).encode() not in first.read_bytes()
    assert first.parent.stat().st_mode & 0o777 == 0o700


def test_all_sources_in_another_folder_have_the_key_of_the_library(op_library, tmp_path):
    sources = shutil.copytree(native.SOURCE_DIR, tmp_path / "elsewhere" / "sources")
    assert op_library.name.startswith(native.library_key(native.host_isa(), source_dir=sources)[:32])


def test_everything_that_matters_is_in_the_key(fake_compiler, tmp_path):
    sources = shutil.copytree(native.SOURCE_DIR, tmp_path / "sources")
    keys = {native.library_key(isa, compiler=str(fake_compiler)) for isa in native.ISA_LEVELS}
    keys.add(native.library_key("avx2"))
    (sources / "simd.h").write_text((sources / "simd.h").read_text() + "\n")
    keys.add(native.library_key("avx2", source_dir=sources))
    assert len(keys) == 4


def test_two_builders_at_once_compile_once(fake_compiler, tmp_path):
    found: list[Path] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(
                native.build_op_library("avx2", tmp_path / "cache", compiler=str(fake_compiler))
            )
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 3
    assert (tmp_path / "runs").read_text().count("run") == 1
    assert found[0].read_text() == "library\n"


def test_a_failing_compiler_is_quoted_and_leaves_nothing(fake_compiler, tmp_path):
    (tmp_path / "fail").touch()
    with pytest.raises(LoweringError, match="a made-up mistake"):
        native.build_op_library("avx2", tmp_path / "cache", compiler=str(fake_compiler))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_a_missing_compiler_and_an_unknown_level_are_named(tmp_path):
    with pytest.raises(LoweringError, match=r"no C\+\+ compiler: no-such-g\+\+ was not found"):
        native.build_op_library("avx2", tmp_path / "cache", compiler="no-such-g++")
    with pytest.raises(LoweringError, match="unknown level 'sse9'"):
        native.build_op_library("sse9", tmp_path / "cache")


def test_a_cache_that_others_can_write_is_refused(fake_compiler, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(ResourceError, match="writable by nobody else"):
        native.build_op_library("avx2", cache, compiler=str(fake_compiler))
    assert not (tmp_path / "runs").exists()


def test_equal_bytes_load_again_and_other_bytes_do_not(op_library, tmp_path):
    native.load_op_library(op_library)
    copy = tmp_path / "copy.so"
    shutil.copy(op_library, copy)
    native.load_op_library(copy)
    copy.write_bytes(copy.read_bytes() + b"\0")
    with pytest.raises(ArtifactMismatchError, match="open it in a new process"):
        native.load_op_library(copy)
    with pytest.raises(ArtifactCorruptError, match="cannot be read"):
        native.load_op_library(tmp_path / "absent.so")


def test_every_operation_has_the_schema_of_its_record():
    for op in OPS:
        assert str(op.overload()._schema) == f"deepinfer::{op.schema}"


def test_without_a_library_nothing_is_captured_and_rubbish_is_not_loaded(tmp_path):
    rubbish = tmp_path / "rubbish.so"
    rubbish.write_bytes(b"not a shared object")
    script = f"""
import torch
from pathlib import Path
from deepinfer.errors import ArtifactMismatchError, CaptureError
from deepinfer.kernels import captured_ops, native, rms_norm
inputs = rms_norm.make_inputs(2, torch.float32, 0)
rms_norm(*inputs)
try:
    with captured_ops():
        rms_norm(*inputs)
    raise SystemExit("captured without a library")
except CaptureError as error:
    assert "load_op_library" in str(error), error
try:
    native.load_op_library(Path({str(rubbish)!r}))
except ArtifactMismatchError as error:
    assert "cannot be loaded" in str(error), error
else:
    raise SystemExit("rubbish was loaded")
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not native.supports_isa("avx512"), reason="compares two levels")
def test_both_levels_give_the_same_bits(tmp_path):
    script = """
import hashlib, sys, torch
from deepinfer.kernels import OPS, native
native.load_op_library(native.build_op_library(sys.argv[1]))
for op in OPS:
    for dtype in (torch.bfloat16, torch.float32):
        result = op.native(*op.make_inputs(37, dtype, 1))
        for part in result if isinstance(result, tuple) else (result,):
            print(op.name, hashlib.sha256(part.contiguous().view(torch.uint8).numpy()).hexdigest())
"""
    texts = [
        subprocess.run(
            [sys.executable, "-P", "-c", script, isa], capture_output=True, text=True, timeout=600, check=True
        ).stdout
        for isa in native.ISA_LEVELS
    ]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 2 * (len(OPS) + 2)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ResourceError, match="DEEPINFER_CACHE"):
        native.user_cache_dir()
