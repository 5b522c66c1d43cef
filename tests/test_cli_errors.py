"""What a user meets when something is wrong: one line, the right exit code, never a traceback."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deepinfer.cli import compile as compile_command
from deepinfer.cli import diff as diff_command
from deepinfer.cli import main as main_command
from deepinfer.cli.common import join_lists, read_environment, to_json
from deepinfer.cli.prompts import MAX_LINE_BYTES, read_prompts
from deepinfer.errors import (
    ArtifactUntrustedError,
    BuildError,
    CheckpointError,
    DeepInferError,
    RequestError,
    ResourceError,
    SettingsError,
    UsageError,
)
from deepinfer.runtime.sampling_params import SamplingParams

Stub = Callable[[str, str, object], None]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """Put a stand-in in place of a module's attribute, without importing the real module."""

    def put(module: str, attribute: str, value: object) -> None:
        stand_in = ModuleType(module)
        setattr(stand_in, attribute, value)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put


def _raise(error: BaseException) -> Callable[..., object]:
    def act(*_: object, **__: object) -> object:
        raise error

    return act


def _one_line(text: str) -> str:
    assert text.count("\n") == 1 and text.endswith("\n") and "Traceback" not in text, text
    return text.strip()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "required: MODEL, -o/--output"),
        (["DIR"], "required: -o/--output"),
        (["DIR", "-o", "x", "--decode-rows", "a"], "integers separated by commas"),
        (["DIR", "-o", "x", "--decode-rows", "4,,8"], "integers separated by commas"),
        (["DIR", "-o", "x", "--decode-rows", "0"], "compile.decode_rows: expected int >= 1"),
        (["DIR", "-o", "x", "--decode-rows", "-4"], "compile.decode_rows"),
        (["DIR", "-o", "x", "--jobs", "0"], "compile.jobs"),
        (["DIR", "-o", "x", "--jobs", "two"], "--jobs"),
        (["DIR", "-o", "x", "--precision", "bf16"], "invalid choice"),
        (["DIR", "-o", "x", "--target", "cuda:sm_80"], "cuda:sm_90"),
        (["DIR", "-o", "x", "--max-model-len", "1"], "compile.max_model_len"),
        (["DIR", "-o", "x", "--no-such-flag"], "--no-such-flag"),
        (["DIR", "-o", "x", "--config", "/no/such.yaml"], "/no/such.yaml: cannot be read"),
        (["/no/such/model", "-o", "x"], "MODEL /no/such/model: does not exist"),
        ([__file__, "-o", "x"], "is not a folder"),
    ],
)
def test_bad_use_of_compile(
    arguments: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path) if argument == "DIR" else argument for argument in arguments]
    assert compile_command.main(given) == 2
    assert fault in _one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["generate", "DIR"], "one of the arguments --prompt --prompt-token-ids --prompts-file is required"),
        (["generate", "DIR", "--prompt", "a", "--prompt-token-ids", "1"], "not allowed with"),
        (["generate", "DIR", "--prompt", ""], "--prompt: the prompt is empty"),
        (["generate", "DIR", "--prompt", "\udcff"], "not valid Unicode"),
        (["generate", "DIR", "--prompt-token-ids", ""], "integers separated by commas"),
        (["generate", "DIR", "--prompt-token-ids", "1,x"], "integers separated by commas"),
        (["generate", "DIR", "--prompt-token-ids=-1"], "token id -1 is out of range"),
        (["generate", "DIR", "--prompt-token-ids", "99999999999"], "out of range"),
        (["generate", "DIR", "--prompt", "a", "--num-threads", "0"], "serve.num_threads"),
        (["generate", "DIR", "--prompt", "a", "--seed", "x"], "--seed"),
        (["generate", "/no/such", "--prompt", "a"], "OUT /no/such: does not exist"),
        (["generate", "DIR", "--prompts-file", "/no/such"], "/no/such: cannot be read"),
        (["inspect", "/no/such"], "does not exist"),
        (["trust", "/no/such"], "does not exist"),
        (["fly"], "invalid choice"),
        ([], "COMMAND"),
    ],
)
def test_bad_use_of_an_artifact(
    arguments: list[str], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path) if argument == "DIR" else argument for argument in arguments]
    assert main_command.main(given) == 2
    assert fault in _one_line(capsys.readouterr().err)


def test_bad_use_of_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given, fault in (
        ([str(tmp_path)], "required: --model"),
        (["/no/such", "--model", str(tmp_path)], "OUT /no/such: does not exist"),
        ([str(tmp_path), "--model", "/no/such"], "MODEL /no/such: does not exist"),
    ):
        assert diff_command.main(given) == 2
        assert fault in _one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("DEEPINFER_CAHCE", "/x", "unknown environment variable (known are DEEPINFER_CACHE"),
        ("DEEPINFER_BATCH_INVARIANT", "1", "always on"),
        ("DEEPINFER_ENABLE_MTP_VARLEN", "1", "not available yet: serve.variable_draft_length"),
        ("DEEPINFER_LOG", "loud", "must be debug, info or warning"),
        ("DEEPINFER_CACHE", "relative", "must be an absolute path"),
        ("DEEPINFER_DUMP", "", "must be an absolute path"),
    ],
)
def test_a_wrong_environment_variable_stops_every_command(
    name: str,
    value: str,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    for command in (main_command, compile_command, diff_command):
        assert command.main([str(tmp_path)]) == 2
        line = _one_line(capsys.readouterr().err)
        assert line.startswith("[DI110]") and name in line and fault in line


def test_the_three_variables_are_read() -> None:
    assert read_environment({"PATH": "x"}).cache_dir is None
    environment = read_environment(
        {"DEEPINFER_CACHE": "/c", "DEEPINFER_LOG": "debug", "DEEPINFER_DUMP": "/d"}
    )
    assert (environment.cache_dir, environment.log, environment.dump_dir) == (Path("/c"), "debug", Path("/d"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingsError("x"), 2),
        (CheckpointError("truncated", where="model.safetensors", action="copy it again"), 3),
        (BuildError("x"), 3),
        (ArtifactUntrustedError("x"), 4),
        (ResourceError("x"), 5),
        (MemoryError(), 5),
        (OSError(28, "No space left on device", "out.di"), 5),
        (KeyboardInterrupt(), 130),
        (BrokenPipeError(), 141),
        (DeepInferError("x"), 70),
        (RuntimeError("boom\nsecond line"), 70),
    ],
)
def test_each_kind_of_failure_has_its_exit_code(
    error: BaseException, code: int, tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.compile", "compile_model", _raise(error))
    assert compile_command.main([str(tmp_path), "-o", str(tmp_path / "out"), "-q"]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    if code != 141:
        _one_line(printed.err)


def test_a_dump_goes_where_the_flag_says_else_where_the_variable_says(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = []

    def compile_model(*_: object, dump_dir: Path | None, **__: object) -> object:
        places.append(dump_dir)
        raise BuildError("x")

    stub("deepinfer.compile", "compile_model", compile_model)
    arguments = [str(tmp_path), "-o", "out", "-q"]
    assert compile_command.main(arguments) == 3
    monkeypatch.setenv("DEEPINFER_DUMP", str(tmp_path / "by-variable"))
    assert compile_command.main(arguments) == 3
    flag = tmp_path / "by" / "flag"
    assert compile_command.main([*arguments, "--dump", str(flag)]) == 3
    assert places == [None, tmp_path / "by-variable", flag] and flag.is_dir()
    capsys.readouterr()
    (tmp_path / "file").write_text("mine")
    for dump in ("file", "file/below"):
        assert compile_command.main([*arguments, "--dump", str(tmp_path / dump)]) == 2
        assert str(tmp_path / dump) in _one_line(capsys.readouterr().err)
    assert len(places) == 3


def test_a_failure_is_an_object_on_stdout_for_machines(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    error = CheckpointError("truncated", where="a.safetensors", action="copy it again")
    stub("deepinfer.compile", "compile_model", _raise(error))
    assert compile_command.main([str(tmp_path), "-o", "out", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {
        "error": {
            "code": "DI210",
            "what": "truncated",
            "where": "a.safetensors",
            "action": "copy it again",
            "exit_code": 3,
        }
    }
    assert compile_command.main(["--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "DI100"


def test_a_traceback_appears_only_when_debugging(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.compile", "compile_model", _raise(RuntimeError("boom")))
    arguments = [str(tmp_path), "-o", "out"]
    assert compile_command.main(arguments) == 70
    assert "report it" in _one_line(capsys.readouterr().err)
    monkeypatch.setenv("DEEPINFER_LOG", "debug")
    assert compile_command.main(arguments) == 70
    assert "Traceback" in capsys.readouterr().err


def test_compile_hands_over_the_settings_and_prints_the_result(
    tmp_path: Path, stub: Stub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []
    monkeypatch.setenv("DEEPINFER_CACHE", "/c")

    def compile_model(model: Path, out: Path, config: object, *, force: bool, **places: object) -> object:
        calls.append((model, out, config, force))
        assert (places["cache_dir"], places["dump_dir"]) == (Path("/c"), None)
        graph = {"name": "decode-4", "nodes": 1200, "rewrites": 7, "seconds": 1.5}
        return SimpleNamespace(
            artifact_id="ab",
            out_dir=out,
            graphs=[graph],
            weights_bytes=2_000_000,
            seconds=2.0,
            certified=True,
            explanation="equal",
        )

    stub("deepinfer.compile", "compile_model", compile_model)
    settings = tmp_path / "x.yaml"
    settings.write_text("compile: {precision: float32, jobs: 3, isa: avx2}")
    arguments = f"{tmp_path} -o {tmp_path}/out --config {settings} --decode-rows 8 4 --jobs 2 --force --json"
    assert compile_command.main(arguments.split()) == 0
    ((model, out, config, force),) = calls
    assert (model, out, force) == (tmp_path, tmp_path / "out", True)
    assert (config.precision, config.decode_rows, config.jobs, config.isa) == ("float32", (4, 8), 2, "avx2")
    assert json.loads(capsys.readouterr().out)["graphs"][0]["nodes"] == 1200


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_diff_ends_with_its_verdict_and_writes_both_reports(
    passed: bool, code: int, tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {
        "artifact_id": "ab",
        "model": "m",
        "precision": "float32",
        "passed": passed,
        "tolerances": {"max_abs_error": 1e-4},
        "graphs": [],
        "sublayers": [],
        "first_differing_layer": None,
        "explanation": "",
    }
    report = SimpleNamespace(passed=passed, to_dict=lambda: content, to_text=lambda: "the verdict")
    stub("deepinfer.diff", "diff_artifact", lambda *_, **__: report)
    html, xml = tmp_path / "r.html", tmp_path / "r.xml"
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    given = [str(artifact), "--model", str(tmp_path), "--report", str(html), "--junit", str(xml)]
    assert diff_command.main(given) == code
    assert capsys.readouterr().out == "the verdict\n"
    assert "</html>" in html.read_text() and "</testsuites>" in xml.read_text()
    assert diff_command.main([*given, "--json"]) == code
    assert json.loads(capsys.readouterr().out) == content
    assert diff_command.main([*given[:3], "--report", str(tmp_path / "no" / "r.html")]) == 2
    assert "cannot be written" in _one_line(capsys.readouterr().err)


class StubLLM:
    """Echoes every prompt; ids from 512 on are refused, as a vocabulary of 512 would."""

    params: object = None  # of the last call

    def __init__(self, artifact: Path, *, num_threads: int | None, max_num_seqs: int | None) -> None:
        self.finish_reason = "length" if num_threads != 3 else "error"

    def generate(self, prompts: list, params: Any, use_tqdm: bool) -> list:
        ids = [[7] if isinstance(prompt, str) else prompt for prompt in prompts]
        if any(token >= 512 for prompt in ids for token in prompt):
            raise RequestError("token id 512 is not below 512", where="prompt")
        text = None if isinstance(prompts[0], list) else "héllo"
        logprobs = None
        if params.logprobs is not None:
            logprobs = (
                {1: SimpleNamespace(logprob=-0.5, rank=2)},
                {2: SimpleNamespace(logprob=-0.25, rank=1)},
            )
        completion = SimpleNamespace(
            index=0,
            token_ids=(1, 2),
            text=text,
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            logprobs_mode="processed",
        )
        StubLLM.params = params
        timing = {"total": 0.5}
        return [
            SimpleNamespace(
                prompt_token_ids=tuple(p),
                outputs=(completion,),
                timing_seconds=timing,
                prompt_logprobs=None,
                seed=0,
            )
            for p in ids
        ]


def test_generate_prints_one_object_per_request(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.runtime.llm", "LLM", StubLLM)
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt_token_ids": [3, 4]}\n{"prompt_token_ids": [5]}\n')
    assert main_command.main(["generate", str(tmp_path), "--prompts-file", str(prompts), "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line) for line in printed.out.splitlines()] == [
        {
            "index": index,
            "prompt_token_ids": ids,
            "token_ids": [1, 2],
            "text": None,
            "finish_reason": "length",
            "timing_seconds": {"total": 0.5},
        }
        for index, ids in enumerate([[3, 4], [5]])
    ]
    assert printed.err == "4 tokens for 2 requests\n"


def test_sampling_flags_reach_the_parameters_and_logprobs_are_printed(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.runtime.llm", "LLM", StubLLM)
    flags = "--top-k=5 --top-p=0.5 --min-p=0.25 --min-tokens=3 --logprobs=1 --presence-penalty=0.5 \
--frequency-penalty=-1 --repetition-penalty=2 --json -q"
    given = ["generate", str(tmp_path), "--prompt-token-ids", "1", *flags.split()]
    assert main_command.main(given) == 0
    assert StubLLM.params == SamplingParams(
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        min_tokens=3,
        logprobs=1,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=2,
    )
    line = json.loads(capsys.readouterr().out)
    assert line["logprobs_mode"] == "processed"
    assert line["logprobs"] == [
        [{"token_id": 1, "logprob": -0.5, "rank": 2}],
        [{"token_id": 2, "logprob": -0.25, "rank": 1}],
    ]


def test_generate_prints_text_or_ids_for_people(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.runtime.llm", "LLM", StubLLM)
    assert main_command.main(["generate", str(tmp_path), "--prompt", "x", "-q"]) == 0
    assert main_command.main(["generate", str(tmp_path), "--prompt-token-ids", "1,2", "-q"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("héllo\n1,2\n", "")


def test_generate_refuses_what_the_model_or_the_sampler_cannot_take(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.runtime.llm", "LLM", StubLLM)
    given = ["generate", str(tmp_path), "--prompt-token-ids", "1"]
    assert main_command.main([*given[:3], "512"]) == 2
    assert "token id 512" in _one_line(capsys.readouterr().err)
    for flag, value in (
        ("--max-tokens", "0"),
        ("--temperature", "nan"),
        ("--temperature", "-1"),
        ("--seed", "-1"),
        ("--top-k", "-2"),
        ("--top-p", "0"),
        ("--min-p", "1.5"),
        ("--min-tokens", "17"),
        ("--logprobs", "21"),
        ("--presence-penalty", "3"),
        ("--frequency-penalty", "-3"),
        ("--repetition-penalty", "0"),
    ):
        assert main_command.main([*given, f"{flag}={value}"]) == 2
        assert "[DI120]" in _one_line(capsys.readouterr().err)


def test_a_request_whose_logits_are_no_numbers_is_printed_and_ends_with_its_own_code(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.runtime.llm", "LLM", StubLLM)
    given = ["generate", str(tmp_path), "--prompt-token-ids", "1", "--num-threads", "3", "-q"]
    assert main_command.main(given) == 5
    printed = capsys.readouterr()
    assert printed.out == "1,2\n" and "DI510" in _one_line(printed.err)


class StubArtifact:
    """An opened artifact that has an id, and a tokenizer if one is given."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        self.artifact_id = "ab" * 32
        self.tokenizer = tokenizer
        self.paths = ("tokenizer/tokenizer.json",) if tokenizer else ()
        self.manifest = SimpleNamespace(limits=SimpleNamespace(max_model_len=64))

    def __enter__(self) -> "StubArtifact":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read_file(self, _: str) -> bytes:
        assert self.tokenizer is not None
        return self.tokenizer.read_bytes()


def test_text_prompts_of_a_comparison_become_ids_by_the_artifact_s_tokenizer(
    tmp_path: Path,
    golden_dir: Path,
    stub: Stub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "w7"}\n{"prompt_token_ids": [3, 4]}\n')
    given = [str(tmp_path), "--model", str(tmp_path), "--prompts-file", str(prompts)]
    seen = []

    def diff_artifact(*arguments: object, progress: object) -> object:
        seen.append(arguments[2])
        return SimpleNamespace(passed=True, to_dict=dict, to_text=str)

    stub("deepinfer.diff", "diff_artifact", diff_artifact)
    monkeypatch.setattr("deepinfer.artifacts.reader.open_artifact", lambda *_, **__: StubArtifact())
    assert diff_command.main(given) == 2
    assert "has no tokenizer" in _one_line(capsys.readouterr().err)
    tokenizer = golden_dir / "tokenizer.json"
    monkeypatch.setattr("deepinfer.artifacts.reader.open_artifact", lambda *_, **__: StubArtifact(tokenizer))
    assert diff_command.main(given) == 0
    assert seen == [[[14], [3, 4]]]


def test_trust_records_the_id_of_a_sound_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("deepinfer.artifacts.reader.open_artifact", lambda *_: StubArtifact())
    assert main_command.main(["trust", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"artifact_id": "ab" * 32, "origin": "trusted"}
    monkeypatch.setattr("deepinfer.artifacts.reader.open_artifact", _raise(ArtifactUntrustedError("x")))
    assert main_command.main(["trust", str(tmp_path)]) == 4


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b"", "is blank"),
        (b" \r", "is blank"),
        (b"hello", "is not a JSON object"),
        (b"[1, 2]", "object"),
        (b"{}", "exactly one of"),
        (b'{"prompt": null}', "exactly one of"),
        (b'{"prompt": "a", "prompt_token_ids": [1]}', "exactly one of"),
        (b'{"prompt": "a", "prompt": "b"}', "a key appears twice"),
        (b'{"prompt": "a", "temperature": 1}', "temperature"),
        (b'{"prompt": 5}', "expected str"),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": "\\ud800"}', "not valid Unicode"),
        (b'{"prompt_token_ids": []}', "the prompt is empty"),
        (b'{"prompt_token_ids": [true]}', "expected int"),
        (b'{"prompt_token_ids": [1.5]}', "expected int"),
        (b'{"prompt_token_ids": [-1]}', "out of range"),
        (b'{"prompt_token_ids": [' + b"9" * 5000 + b"]}", "line 2"),
        (b'{"prompt": "\xff"}', "is not a JSON object"),
        (b"[" * 200_000, "nested too deeply"),
        (b'"' + b"a" * MAX_LINE_BYTES, "is longer than"),
    ],
)
def test_a_wrong_line_of_a_prompts_file_is_named(line: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n' + line + b"\n")
    with pytest.raises(RequestError) as raised:
        read_prompts(path)
    assert "line 2" in str(raised.value) and fault.lower() in str(raised.value).lower()


def test_a_good_prompts_file_is_read_in_order_and_an_empty_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "h\\u00e9"}\r\n{"prompt_token_ids": [0, 511]}')
    assert read_prompts(path) == ["hé", [0, 511]]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # as some editors begin a file
    assert read_prompts(path) == ["hé", [0, 511]]
    path.write_text("\n")
    with pytest.raises(UsageError, match="holds no prompts"):
        read_prompts(path)


def test_numbers_after_a_list_flag_are_one_list() -> None:
    given = ["m", "-o", "3", "--decode-rows", "4", "8,16", "--jobs", "2", "--prefill-tokens", "16", "32"]
    flags = ("--decode-rows", "--prefill-tokens")
    expected = ["m", "-o", "3", "--decode-rows", "4,8,16", "--jobs", "2", "--prefill-tokens", "16,32"]
    assert join_lists(given, flags) == expected
    assert join_lists(["--decode-rows", "model", "4"], flags) == ["--decode-rows", "model", "4"]


def test_json_output_has_no_number_that_json_lacks() -> None:
    text = to_json({"a": float("nan"), "b": [float("inf"), 1.5], "c": Path("x"), "d": "é"})
    assert json.loads(text) == {"a": None, "b": [None, 1.5], "c": "x", "d": "é"} and "é" in text


def test_a_closed_pipe_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("deepinfer.artifacts.inspect.describe", lambda _: {})
    monkeypatch.setattr("deepinfer.artifacts.inspect.render", str)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert main_command.main(["inspect", str(tmp_path)]) == 141
    assert capsys.readouterr().err == ""


def _run_in_shell(redirection: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from deepinfer.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "bash", *command], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "redirection", [">&-", "2>&-", ">&- 2>&-", "> /dev/full", "> /dev/full 2> /dev/full"]
)
def test_an_output_that_takes_nothing_changes_no_exit_code(redirection: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    result = _run_in_shell(redirection, "inspect", missing, "--json")
    assert result.returncode == 2, result
    assert "Traceback" not in result.stdout + result.stderr


def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    stub("deepinfer.diff", "diff_artifact", _raise(AssertionError("the comparison was started")))
    for report in (tmp_path / "missing" / "x.html", tmp_path):
        arguments = [str(tmp_path), "--model", str(tmp_path), "--report", str(report)]
        assert diff_command.main(arguments) == 2
        assert str(report) in _one_line(capsys.readouterr().err)


def test_the_source_tree_can_be_used_from_its_root(tmp_path: Path) -> None:
    """An interpreter that is started there finds the folder before the installed package."""
    root = Path(__file__).parent.parent
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    code = "import deepinfer, deepinfer.runtime.limits as module; print(deepinfer.LLM, module.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert str(root / "runtime") in result.stdout


@pytest.mark.parametrize("place", ["manifest.json", "graphs/new.dot", "../artifact/manifest.json"])
def test_a_drawing_may_not_replace_a_file_of_the_artifact(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tmp_path / "artifact"
    (artifact / "graphs").mkdir(parents=True)
    (artifact / "manifest.json").write_text("whole")
    drawing = str(artifact / place)
    assert main_command.main(["inspect", str(artifact), "--graph", "decode-4", "--dot", drawing]) == 2
    assert "lies in the artifact itself" in capsys.readouterr().err
    assert (artifact / "manifest.json").read_text() == "whole"
    assert not (artifact / "graphs" / "new.dot").exists()
