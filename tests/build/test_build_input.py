"""Input that cannot be built: the error names the file and the field, and nothing is left on the disk."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_dirs
import pytest
import tiny_build
from tiny_checkpoint import INDEX, SHARDS, write_tiny_checkpoint

from deepinfer.build_process import WorkerProcesses, python_command
from deepinfer.cli import compile as command
from deepinfer.kernels import native

Caches = Callable[..., Path]
Spoil = Callable[[Path], object]
FIRST, SECOND = SHARDS


def _change_header(change: Callable[[dict[str, Any]], object], shard: str = FIRST) -> Spoil:
    def spoil(model: Path) -> None:
        header, data = model_dirs.read_shard(model / shard)
        change(header)
        model_dirs.write_shard(model / shard, header, data)

    return spoil


def _reshape(header: dict[str, Any]) -> None:
    header["embed.weight"]["shape"] = header["embed.weight"]["shape"][::-1] + [1]


def _other_dtype(header: dict[str, Any]) -> None:
    header["layers.0.attn.wq_a.weight"]["dtype"] = "U8"


def _change_index(change: Callable[[dict[str, str]], object]) -> Spoil:
    def spoil(model: Path) -> None:
        content = json.loads((model / INDEX).read_text())
        change(content["weight_map"])
        (model / INDEX).write_text(json.dumps(content))

    return spoil


def _extra_tensor(model: Path) -> None:
    header, data = model_dirs.read_shard(model / FIRST)
    header["surplus"] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    model_dirs.write_shard(model / FIRST, header, data + bytes(4))
    _change_index(lambda index: index.update(surplus=FIRST))(model)


def _missing_tensor(model: Path) -> None:
    """Not in the index and not in the shard: its bytes go, those after it move up."""
    header, data = model_dirs.read_shard(model / FIRST)
    begin, end = header.pop("head.weight")["data_offsets"]
    for entry in header.values():
        entry["data_offsets"] = [at - (end - begin) * (at >= end) for at in entry["data_offsets"]]
    model_dirs.write_shard(model / FIRST, header, data[:begin] + data[end:])
    _change_index(lambda index: index.pop("head.weight"))(model)


def _truncate(model: Path) -> None:
    content = (model / SECOND).read_bytes()
    (model / SECOND).write_bytes(content[:-1])


def _config(**changes: Any) -> Spoil:
    return lambda model: model_dirs.edit_json(model / "config.json", **changes)


def _text_config(**changes: Any) -> Spoil:
    def spoil(model: Path) -> None:
        content = json.loads((model / "config.json").read_text())
        content["text_config"].update(changes)
        (model / "config.json").write_text(json.dumps(content))

    return spoil


def _text_file(name: str, content: str) -> Spoil:
    return lambda model: (model / name).write_text(content)


WITH_ENGRAM = {
    "num_hidden_layers": 2,
    "compress_ratios": [0, 1],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "engram_layer_ids": [0],
    "engram_num_embeddings": [300],
    "engram_vocab_size": 50,
    "engram_max_ngram_size": 2,
    "engram_n_heads": 1,
    "engram_head_dim": 32,
    "engram_compressed_vocab_size": 32,
}
CASES: dict[str, tuple[Spoil, str, list[str]]] = {
    "truncated_shard": (_truncate, "DI210", [SECOND]),
    "missing_shard": (lambda m: (m / SECOND).unlink(), "DI210", [SECOND, "missing"]),
    "index_of_a_missing_shard": (
        _change_index(lambda index: index.update({"head.weight": "model-9.safetensors"})),
        "DI210",
        ["model-9.safetensors", "missing"],
    ),
    "index_missing": (lambda m: (m / INDEX).unlink(), "DI210", [INDEX]),
    "wrong_shape": (_change_header(_reshape), "DI210", [FIRST, "embed.weight", "shape"]),
    "wrong_dtype": (_change_header(_other_dtype), "DI210", [FIRST, "layers.0.attn.wq_a.weight", "dtype"]),
    "missing_tensor": (_missing_tensor, "DI210", ["head.weight", "missing"]),
    "extra_tensor": (_extra_tensor, "DI210", [FIRST, "surplus"]),
    "config_missing": (lambda m: (m / "config.json").unlink(), "DI201", ["config.json", "missing"]),
    "config_broken": (_text_file("config.json", "{"), "DI201", ["config.json"]),
    "model_type": (_config(model_type="llama"), "DI202", ["model_type", "llama"]),
    "near_model_type": (_config(model_type="deepseek_v41x"), "DI202", ["model_type"]),
    "unknown_maths_field": (_text_config(attn_logit_softcap=30.0), "DI202", ["attn_logit_softcap"]),
    "activation": (_text_config(hidden_act="gelu"), "DI202", ["hidden_act", "gelu"]),
    "field_missing": (_text_config(num_hidden_layers=None), "DI201", ["num_hidden_layers"]),
    "tokenizer_broken": (_text_file("tokenizer.json", "{}"), "DI220", ["tokenizer.json"]),
    "tokenizer_no_json": (_text_file("tokenizer.json", "{,"), "DI220", ["tokenizer.json"]),
    "generation_config_broken": (
        _text_file("generation_config.json", "[]"),
        "DI220",
        ["generation_config.json"],
    ),
    "eos_out_of_range": (
        _text_file("generation_config.json", '{"eos_token_id": [1, 64]}'),
        "DI220",
        ["generation_config.json", "eos_token_id 64"],
    ),
    "other_weight_format": (
        lambda m: [(m / n).unlink() for n in (*SHARDS, INDEX)] + [(m / "pytorch_model.bin").touch()],
        "DI210",
        ["pytorch_model.bin", "safetensors"],
    ),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A good checkpoint that may be spoilt."""
    return write_tiny_checkpoint(tmp_path / "model", window_only=True)


@pytest.fixture
def no_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that stays empty, since every case must be refused before compiling anything."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(native, "build_op_library", work)
    monkeypatch.setattr("deepinfer.compile.build_graphs", work)
    cache = tmp_path / "cache"
    monkeypatch.setenv("DEEPINFER_CACHE", str(cache))
    return cache


def _refused(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the one line of explanation; `--json` must say the same."""
    code = command.main([*map(str, arguments), "-q"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    assert command.main([*map(str, arguments), "-q", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == code
    return code, printed.err


@pytest.mark.parametrize("case", CASES)
def test_a_bad_checkpoint_is_named_before_any_work(
    case: str, model: Path, parent: Path, no_work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, error_code, words = CASES[case]
    spoil(model)
    code, message = _refused([model, "-o", parent / "out", *tiny_build.FLAGS], capsys)
    assert code == 3
    assert message.startswith(f"[{error_code}]")
    for word in words:
        assert word in message
    assert list(parent.iterdir()) == []
    assert not no_work.exists()


def test_engram_without_a_tokenizer_is_named_before_any_work(
    golden_dir: Path, tmp_path: Path, parent: Path, no_work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_dirs.copy_checkpoint(golden_dir, tmp_path / "engram")
    (model / "tokenizer.json").unlink()
    code, message = _refused([model, "-o", parent / "out"], capsys)
    assert code == 3 and message.startswith("[DI220]") and "tokenizer.json" in message
    assert list(parent.iterdir()) == [] and not no_work.exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len=257"], ["max_model_len", "257", "256"]),
        (["--jobs=0"], ["jobs"]),
        (["--decode-rows=0"], ["decode_rows"]),
        (["--config=absent.yaml"], ["absent.yaml"]),
        (["--max-num-seq=1"], ["--max-num-seq"]),
    ],
)
def test_an_option_that_does_not_suit_is_named(
    flags: list[str],
    words: list[str],
    model: Path,
    parent: Path,
    no_work: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, message = _refused([model, "-o", parent / "out", *flags], capsys)
    assert code == 2
    for word in words:
        assert word in message
    assert list(parent.iterdir()) == []


def test_a_pass_that_does_not_exist_cannot_be_switched_off(
    model: Path, parent: Path, tmp_path: Path, no_work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("compile:\n  disabled_passes: [constant_folding]\n")
    code, message = _refused([model, "-o", parent / "out", f"--config={settings}"], capsys)
    assert code == 2 and "constant_folding" in message and "dead_code" in message
    assert list(parent.iterdir()) == []


def test_code_that_comes_with_a_model_is_reported_and_never_run(
    model: Path,
    parent: Path,
    make_cache: Caches,
    stub_workers: Callable[..., object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model_dirs.edit_json(model / "config.json", auto_map={"AutoConfig": "hostile.Config"})
    (model / "hostile.py").write_text(f"open({str(parent / 'was-run')!r}, 'w').close()")
    monkeypatch.setenv("DEEPINFER_CACHE", str(make_cache()))
    monkeypatch.chdir(model)
    stub_workers()
    assert command.main([".", "-o", str(parent / "out"), *tiny_build.FLAGS]) == 0
    assert "auto_map is ignored" in capsys.readouterr().err
    assert [path.name for path in parent.iterdir()] == ["out"]


def test_a_worker_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build may be started inside a folder that somebody else filled."""
    hostile, work_dir = tmp_path / "hostile", tmp_path / "work"
    hostile.mkdir()
    work_dir.mkdir()
    for name in ("deepinfer", "torch", "json", "msgspec"):
        (hostile / f"{name}.py").write_text(f"open({str(tmp_path / 'was-run')!r}, 'w').close()")
    monkeypatch.chdir(hostile)
    with WorkerProcesses() as running:
        code, output = running.run(python_command("deepinfer.build_worker", "absent.json"), work_dir)
    assert code == 1 and "FileNotFoundError" in output and "absent.json" in output
    assert not (tmp_path / "was-run").exists()
