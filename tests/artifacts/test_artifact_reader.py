"""Reading: one case per way to be wrong, made by editing a good artifact; nothing is used unchecked."""

import hashlib
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import artifact_factory
import msgspec
import pytest

from deepinfer.artifacts import canonical_bytes, check_compatible, open_artifact
from deepinfer.errors import ArtifactCorruptError, ArtifactFormatError, ArtifactMismatchError

LIBRARY = "native/libdeepinfer_ops.so"


def reseal(directory: Path, edit: Callable[[dict], None] = lambda manifest: None) -> None:
    """Rewrite the manifest to fit the files that lie there now, after `edit`: what an attacker would do."""
    manifest = json.loads((directory / "manifest.json").read_bytes())
    for entry in manifest["files"]:
        path = directory / entry["path"]
        if path.is_file():
            data = path.read_bytes()
            entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    edit(manifest)
    (directory / "manifest.json").write_bytes(canonical_bytes(manifest))


def test_a_good_artifact_opens_whole(good_artifact: Path) -> None:
    with open_artifact(good_artifact) as artifact:
        assert (
            artifact.artifact_id == hashlib.sha256((good_artifact / "manifest.json").read_bytes()).hexdigest()
        )
        assert artifact.signatures["decode-2"] == artifact_factory.make_signature(2)
        assert artifact.pass_reports["decode-1"].passes[0].rewrites == 3
        assert artifact.tensors["norm.weight"].shape == (2,)
        assert [graph.name for graph in artifact.manifest.graphs] == ["decode-1", "decode-2", "prefill-8"]
        for path in artifact.paths:
            assert artifact.read_file(path) == (good_artifact / path).read_bytes()
        entry = artifact.tensors["embed.weight"]
        assert artifact.read_file(entry.path)[entry.offset :][: entry.size_bytes] == bytes(range(32))


def test_it_opens_through_a_link_to_its_root(good_artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(good_artifact)
    open_artifact(tmp_path / "latest").close()


@pytest.mark.parametrize("name", ["absent", "file", "empty", "with\0nul"])
def test_what_is_no_artifact_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactFormatError, match="DI401"):
        open_artifact(tmp_path / name)


EDITS: dict[str, tuple[Callable[[Path], object], str]] = {
    "file missing": (lambda d: (d / LIBRARY).unlink(), "missing"),
    "file truncated": (lambda d: os.truncate(d / LIBRARY, 50), "50 bytes, the manifest says 104"),
    "file emptied": (lambda d: (d / LIBRARY).write_bytes(b""), "0 bytes"),
    "file longer": (lambda d: (d / LIBRARY).open("ab").write(b"1"), "105 bytes"),
    "file changed": (lambda d: (d / LIBRARY).write_bytes(bytes(104)), "not those that the manifest names"),
    "shard missing": (
        lambda d: (d / "weights/model.safetensors").unlink(),
        r"weights/model\.safetensors: missing",
    ),
    "shard cut off": (lambda d: os.truncate(d / "weights/model.safetensors", 190), "190 bytes"),
    "extra file": (lambda d: (d / "native/evil.so").write_bytes(b""), "not named by the manifest"),
    "extra file at the root": (lambda d: (d / "sitecustomize.py").write_text(""), "not named by"),
    "hidden file": (lambda d: (d / ".hidden").write_text(""), "may not hold"),
    "extra directory": (lambda d: (d / "native/more").mkdir(), "an empty directory"),
    "deep directory": (lambda d: (d / "a/b/c/d/e").mkdir(parents=True), "nested too deeply"),
    "strange name": (lambda d: (d / "native/a b.so").write_text(""), "may not hold"),
    "name that is not text": (lambda d: open(os.fsencode(d) + b"/\xff", "w").close(), "may not hold"),  # noqa: PTH123
    "case clash": (lambda d: (d / "native/LIBdeepinfer_ops.so").write_text(""), "only in case"),
    "directory case clash": (
        lambda d: shutil.copytree(d / "native", d / "Native"),
        "only in case",
    ),
    "file is a directory": (
        lambda d: ((d / LIBRARY).unlink(), (d / LIBRARY).mkdir(), (d / LIBRARY / "x").write_text("")),
        "not named by the manifest",
    ),
    "file is a link": (
        lambda d: (shutil.move(d / LIBRARY, d.parent / "lib"), (d / LIBRARY).symlink_to(d.parent / "lib")),
        "symbolic link",
    ),
    "file is a broken link": (
        lambda d: ((d / LIBRARY).unlink(), (d / LIBRARY).symlink_to("nowhere")),
        "symbolic link",
    ),
    "parent is a link": (
        lambda d: (
            shutil.move(d / "native", d.parent / "native"),
            (d / "native").symlink_to(d.parent / "native"),
        ),
        "not named by the manifest",
    ),
    "hard link": (lambda d: os.link(d / LIBRARY, d.parent / "lib"), "2 hard links"),
    "fifo": (lambda d: ((d / LIBRARY).unlink(), os.mkfifo(d / LIBRARY)), "not a regular file"),
    "socket": (
        lambda d: ((d / LIBRARY).unlink(), _bind_socket(d / LIBRARY)),
        "not a regular file",
    ),
    "manifest missing": (lambda d: (d / "manifest.json").unlink(), "has no manifest.json"),
    "manifest empty": (lambda d: (d / "manifest.json").write_bytes(b""), "not valid JSON"),
    "manifest is a link": (
        lambda d: (
            shutil.move(d / "manifest.json", d.parent / "m"),
            (d / "manifest.json").symlink_to("../m"),
        ),
        "symbolic link",
    ),
    "manifest is a fifo": (
        lambda d: ((d / "manifest.json").unlink(), os.mkfifo(d / "manifest.json")),
        "not a regular file",
    ),
    "manifest too large": (
        lambda d: os.truncate(d / "manifest.json", 17 * 1024 * 1024),
        "larger than the limit",
    ),
    "manifest with a newline": (lambda d: (d / "manifest.json").open("ab").write(b"\n"), "canonical form"),
    "report of a strange type": (
        lambda d: ((d / "reports").mkdir(), (d / "reports/a.so").write_text("")),
        "not the name of a report",
    ),
    "report is a link": (
        lambda d: ((d / "reports").mkdir(), (d / "reports/a.json").symlink_to("../manifest.json")),
        "not a plain file",
    ),
    "report is a hard link": (
        lambda d: (
            (d / "reports").mkdir(),
            (d.parent / "r").write_text(""),
            os.link(d.parent / "r", d / "reports/a.json"),
        ),
        "not a plain file",
    ),
    "report is a directory": (lambda d: (d / "reports/a.json").mkdir(parents=True), "not a plain file"),
    "reports is a file": (lambda d: (d / "reports").write_text(""), "not a directory"),
    "reports is a link": (
        lambda d: ((d.parent / "r").mkdir(), (d / "reports").symlink_to("../r")),
        "not a directory",
    ),
}


def _bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        directory = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{directory}/{path.name}")  # the full path may be too long for a socket
        os.close(directory)


@pytest.mark.parametrize("edit", EDITS)
def test_a_changed_directory_is_refused_with_the_reason(good_artifact: Path, edit: str) -> None:
    change, reason = EDITS[edit]
    change(good_artifact)
    for verify in (True, False):
        with pytest.raises((ArtifactCorruptError, ArtifactFormatError), match=reason) as caught:
            open_artifact(good_artifact, verify=verify)
    assert caught.value.where or edit == "manifest missing"


def test_a_device_is_refused_unopened(good_artifact: Path) -> None:
    (good_artifact / LIBRARY).unlink()
    try:
        os.mknod(good_artifact / LIBRARY, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("devices can be made by root only")
    with pytest.raises(ArtifactCorruptError, match="not a regular file"):
        open_artifact(good_artifact)


def test_weights_are_hashed_only_when_asked_but_always_before_use(good_artifact: Path) -> None:
    path = good_artifact / "weights/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactCorruptError, match=r"model\.safetensors"):
        open_artifact(good_artifact)
    with open_artifact(good_artifact, verify=False) as artifact:
        with pytest.raises(ArtifactCorruptError, match=r"model\.safetensors"):
            artifact.open_file("weights/model.safetensors")
        with pytest.raises(ArtifactCorruptError, match=r"model\.safetensors"):
            artifact.read_file("weights/model.safetensors")


HOSTILE_PATHS = [
    "../lib.so", "native/../../x.so", "/etc/passwd", "native\\x.so", "native/x\0.so", "", ".", "native/",
    "native/./x.so", "native//x.so", ".native/x.so", "native/.x.so", "NATIVE/libdeepinfer_ops.so",
    "native/LIBDEEPINFER_OPS.so", "native/x.py", "code/x.so", "x.so", "manifest.json", "reports/a.json",
    "graphs/decode-9/model.so", "graphs/decode-1/evil.so", "graphs/decode-1/x/model.so", "weights/model.bin",
    "native/" + "x" * 200 + ".so", "native/é.so", "native/x.so\n", "tokenizer/code.py",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=ascii)
def test_a_hostile_path_in_a_manifest_is_refused(good_artifact: Path, path: str) -> None:
    def edit(manifest: dict) -> None:
        manifest["files"].append({"path": path, "bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()})
        manifest["files"].sort(key=lambda entry: entry["path"])

    reseal(good_artifact, edit)
    with pytest.raises(ArtifactFormatError, match="DI401"):
        open_artifact(good_artifact)


def _set(*keys: object, value: object) -> Callable[[dict], None]:
    def edit(manifest: dict) -> None:
        holder = manifest
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = value

    return edit


MANIFEST_EDITS = {
    "newer version": (_set("format_version", value=2), "format version 2, this deepinfer reads version 1"),
    "version as text": (_set("format_version", value="1"), "format version '1'"),
    "version as truth": (_set("format_version", value=True), "format version True"),
    "another kind": (_set("kind", value="onnx"), "not the manifest of an artifact"),
    "unknown field": (_set("comment", value="hi"), "unknown field `comment`"),
    "unknown inner field": (_set("model", "auto_map", value={}), "unknown field `auto_map`"),
    "missing field": (lambda manifest: manifest.pop("precision"), "missing required field `precision`"),
    "field at its default left out": (lambda manifest: manifest["graphs"][0].pop("taps"), "canonical form"),
    "wrong type": (_set("limits", "max_num_seqs", value="2"), "max_num_seqs"),
    "truth as number": (_set("limits", "max_num_seqs", value=True), "max_num_seqs"),
    "negative number": (_set("cache", "num_blocks", value=-1), "num_blocks"),
    "whole number as float": (_set("cache", "num_blocks", value=5.5), "num_blocks"),
    "bad digest": (_set("weights", "sha256", value="A" * 64), "sha256"),
    "digest with newline": (_set("weights", "sha256", value="a" * 64 + "\n"), "sha256"),
    "unknown precision": (_set("precision", value="fp16"), "precision"),
    "unknown device": (_set("target", "device", value="tpu"), "device"),
    "unsorted graphs": (lambda manifest: manifest["graphs"].reverse(), "not sorted"),
    "repeated graph": (lambda m: m["graphs"].insert(0, m["graphs"][0]), "occurs twice"),
    "graph of another name": (_set("graphs", 0, "name", value="decode-7"), "must be named decode-1"),
    "bucket of zero": (_set("graphs", 0, "bucket", value=0), "bucket"),
    "unsorted files": (lambda manifest: manifest["files"].reverse(), "not sorted"),
    "repeated file": (lambda m: m["files"].insert(0, m["files"][0]), "occurs twice"),
    "graph file left out": (lambda m: m["files"].pop(0), r"decode-1 has no graph\.txt"),
    "graph without files": (
        lambda m: m["graphs"].append(m["graphs"][2] | {"name": "prefill-9", "bucket": 9}),
        "prefill-9 has no",
    ),
    "no weights": (
        lambda m: m.update(files=[e for e in m["files"] if "weights" not in e["path"]]),
        "no file below weights",
    ),
    "no tokenizer": (
        lambda m: m.update(files=[e for e in m["files"] if "tokenizer" not in e["path"]]),
        r"tokenizer\.json is not among",
    ),
    "repeated pass": (lambda m: m["passes"].append(m["passes"][0]), "occurs twice"),
    "negative tolerance": (_set("tolerances", "mean_kl", value=-0.5), "negative"),
    "region overlaps": (_set("cache", "regions", 1, "offset_bytes", value=124), "overlaps layers.0.window"),
    "region outside": (_set("cache", "regions", 1, "entries", value=9), "ends at byte 272 of 256"),
    "region unaligned": (_set("cache", "regions", 1, "offset_bytes", value=130), "not aligned"),
    "region repeated": (_set("cache", "regions", 1, "name", value="layers.0.window"), "occurs twice"),
    "region of another block": (_set("cache", "regions", 2, "entries", value=3), "do not make a block"),
    "region beyond all bounds": (_set("cache", "regions", 1, "entries", value=2**62), "ends at byte"),
    "arena beyond all bounds": (_set("cache", "num_slots", value=2**60), "larger than 2"),
    "blocks too few for a request": (_set("cache", "max_blocks_per_request", value=3), "cannot hold"),
}  # fmt: skip


@pytest.mark.parametrize("name", MANIFEST_EDITS)
def test_a_manifest_that_breaks_a_rule_is_refused_with_the_reason(good_artifact: Path, name: str) -> None:
    edit, reason = MANIFEST_EDITS[name]
    reseal(good_artifact, edit)
    with pytest.raises((ArtifactFormatError, ArtifactCorruptError), match=reason):
        open_artifact(good_artifact)


SIGNATURE_EDITS = {
    "not JSON": (lambda _: b"{", "brackets"),
    "unknown field": (lambda s: s | {"x": 1}, "unknown field"),
    "unknown dtype": (lambda s: _with_input(s, dtype="complex64"), "dtype"),
    "strides missing": (lambda s: _with_input(s, strides=[]), "1 sizes, 0 strides"),
    "negative size": (lambda s: _with_input(s, shape=[-1]), "shape"),
    "huge tensor": (lambda s: _with_input(s, shape=[2**61]), "larger than"),
    "huge stride": (lambda s: _with_input(s, shape=[2], strides=[2**62]), "reaches beyond"),
    "repeated input": (lambda s: s | {"inputs": s["inputs"] * 2}, "occurs twice"),
    "repeated output": (lambda s: s | {"outputs": s["outputs"] * 2}, "occurs twice"),
    "repeated constant": (lambda s: s | {"constants": s["constants"] * 2}, "occurs twice"),
    "unknown weight": (
        lambda s: s | {"constants": [{"name": "a", "weight": "no.such"}]},
        r"needs the weight 'no\.such'",
    ),
}


def _with_input(signature: dict, **changes: object) -> dict:
    return signature | {"inputs": [signature["inputs"][0] | changes]}


@pytest.mark.parametrize("name", SIGNATURE_EDITS)
def test_a_signature_that_breaks_a_rule_is_refused_although_its_hash_fits(
    good_artifact: Path, name: str
) -> None:
    edit, reason = SIGNATURE_EDITS[name]
    path = good_artifact / "graphs/decode-2/signature.json"
    changed = edit(json.loads(path.read_bytes()))
    path.write_bytes(changed if isinstance(changed, bytes) else canonical_bytes(changed))
    reseal(good_artifact)
    with pytest.raises((ArtifactFormatError, ArtifactCorruptError), match=reason) as caught:
        open_artifact(good_artifact)
    assert "graphs/decode-2/signature.json" in str(caught.value)


def test_a_pass_report_that_breaks_a_rule_is_refused(good_artifact: Path) -> None:
    (good_artifact / "graphs/decode-1/passes.json").write_bytes(b'{"passes":[{"name":"x"}]}')
    reseal(good_artifact)
    with pytest.raises(ArtifactFormatError, match=r"graphs/decode-1/passes\.json"):
        open_artifact(good_artifact)


def test_a_weight_in_two_files_is_refused(good_artifact: Path) -> None:
    shutil.copy(good_artifact / "weights/model.safetensors", good_artifact / "weights/other.safetensors")
    reseal(
        good_artifact,
        lambda manifest: manifest["files"].append(
            manifest["files"][-1] | {"path": "weights/other.safetensors"}
        ),
    )
    with pytest.raises(ArtifactFormatError, match=r"is also in weights/model\.safetensors"):
        open_artifact(good_artifact)


HERE = {"torch_version": "2.13.0", "device": "cpu", "arch": "x86_64", "isa_supported": {"avx2", "sse4"}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"torch_version": "2.13.1"}, r"built with torch 2\.13\.0, this is torch 2\.13\.1"),
        ({"device": "cuda", "arch": "sm_90"}, "built for cpu x86_64, this is cuda sm_90"),
        ({"arch": "aarch64"}, "built for cpu x86_64, this is cpu aarch64"),
        ({"isa_supported": {"sse4"}}, "instruction set avx2, this machine has sse4"),
        ({"isa_supported": ()}, "this machine has none"),
    ],
)
def test_another_machine_is_refused_with_the_command_that_rebuilds(change: dict, reason: str) -> None:
    manifest = artifact_factory.make_manifest()
    check_compatible(manifest, **HERE)
    with pytest.raises(ArtifactMismatchError, match=reason) as caught:
        check_compatible(manifest, **(HERE | change), directory="dir/x.di")
    assert "deepinfer-compile MODEL_DIR -o dir/x.di --force" in str(caught.value)


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        artifact_factory.make_manifest().precision = "float32"
    assert msgspec.structs.replace(artifact_factory.make_manifest(), precision="float32")
