"""The commands on a real artifact: what they print, how they end, what they leave.

Most run in this process; what concerns a process (pipes, signals, imports) runs the installed command.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from end_to_end import IMAGE_TOKEN, make_prompt, tree_state

from deepinfer.artifacts import open_artifact
from deepinfer.cli import main as main_command
from deepinfer.runtime.llm import LLM
from deepinfer.runtime.sampling_params import SamplingParams

FIELDS = ["index", "prompt_token_ids", "token_ids", "text", "finish_reason", "timing_seconds"]
COMMAND = Path(sys.executable).with_name("deepinfer")
WORD, WORD_ID = "w12", 24


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def llm(float32_artifact: Path) -> LLM:
    return LLM(float32_artifact, num_threads=1)


def generate(artifact: Path, *flags: str, expected: int = 0) -> None:
    flags = ("generate", str(artifact), "--num-threads", "1", *flags)
    assert main_command.main(list(flags)) == expected


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def command(*arguments: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [COMMAND, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300, **options
    )


def test_several_answers_and_the_prompt_are_scored_in_json(
    float32_artifact: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = make_prompt(5)
    flags = ["--prompt-token-ids", ",".join(map(str, prompt)), "--max-tokens", "3", "--temperature", "1"]
    generate(float32_artifact, *flags, "--seed", "4", "--n", "3", "--prompt-logprobs", "1", "--json")
    lines = json_lines(capsys.readouterr().out)
    params = SamplingParams(max_tokens=3, seed=4, n=3, prompt_logprobs=1)
    (output,) = llm.generate([prompt], params)
    assert [line["choice"] for line in lines] == [0, 1, 2]
    assert [line["token_ids"] for line in lines] == [list(answer.token_ids) for answer in output.outputs]
    assert lines[0]["prompt_logprobs"][0] is None and len(lines[0]["prompt_logprobs"]) == 5
    generate(float32_artifact, *flags, "--seed", "4", "--n", "2")
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["[0] ", "[1] "]


def test_token_ids_in_json_out(float32_artifact: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = make_prompt(5)
    flags = ["--prompt-token-ids", ",".join(map(str, prompt)), "--max-tokens", "7", "--json"]
    generate(float32_artifact, *flags)
    captured = capsys.readouterr()
    (line,) = json_lines(captured.out)
    assert list(line) == FIELDS
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=7, temperature=0))
    assert (line["index"], line["prompt_token_ids"]) == (0, prompt)
    assert line["token_ids"] == list(output.outputs[0].token_ids)
    assert line["text"] == output.outputs[0].text and line["text"].count(" ") == 7
    assert line["finish_reason"] == "length"
    assert set(line["timing_seconds"]) == {"queue", "first_token", "decode", "total"}
    assert all(seconds >= 0 for seconds in line["timing_seconds"].values())
    assert captured.err == "7 tokens for 1 request\n"


def test_text_in_text_out(float32_artifact: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    generate(float32_artifact, "--prompt", WORD, "--max-tokens", "4", "-q")
    captured = capsys.readouterr()
    (output,) = llm.generate([[WORD_ID]], SamplingParams(max_tokens=4, temperature=0))
    assert captured.out == f"{output.outputs[0].text}\n" and captured.err == ""


def test_prompts_file_mixes_ids_and_text_and_keeps_the_order(
    float32_artifact: Path, tmp_path: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [make_prompt(40), [WORD_ID], make_prompt(3), [WORD_ID], make_prompt(17)]
    lines = [
        {"prompt": WORD} if prompt == [WORD_ID] and index == 1 else {"prompt_token_ids": prompt}
        for index, prompt in enumerate(prompts)
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    generate(float32_artifact, "--prompts-file", str(file), "--max-tokens", "6", "--json", "-q")
    found = json_lines(capsys.readouterr().out)
    assert [line["index"] for line in found] == list(range(5))
    assert [line["prompt_token_ids"] for line in found] == prompts
    outputs = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0))
    assert [tuple(line["token_ids"]) for line in found] == [o.outputs[0].token_ids for o in outputs]
    assert all(list(line) == FIELDS for line in found)
    generate(float32_artifact, "--prompts-file", str(file), "--max-tokens", "6", "-q")
    texts = [f"[{index}] {output.outputs[0].text}" for index, output in enumerate(outputs)]
    assert capsys.readouterr().out.splitlines() == texts


def test_seed_and_temperature_reach_the_sampler(
    float32_artifact: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = make_prompt(4)

    def drawn(*flags: str) -> tuple[int, ...]:
        ids = ",".join(map(str, prompt))
        generate(float32_artifact, "--prompt-token-ids", ids, "--max-tokens", "12", "--json", "-q", *flags)
        return tuple(json_lines(capsys.readouterr().out)[0]["token_ids"])

    seeded = [drawn("--temperature", "0.7", "--seed", seed) for seed in ("11", "11", "12")]
    params = SamplingParams(max_tokens=12, temperature=0.7, seed=11)
    assert seeded[0] == seeded[1] == llm.generate([prompt], params)[0].outputs[0].token_ids
    assert seeded[2] != seeded[0]
    greedy = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0))[0].outputs[0].token_ids
    assert drawn("--seed", "11") == greedy != seeded[0]
    assert drawn("--temperature", "5", "--seed", "11") != seeded[0]


def test_settings_file_is_read_and_a_flag_beats_it(
    float32_artifact: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deepinfer.runtime import llm as llm_module

    seen: list[tuple[int | None, int]] = []

    def spy(self: LLM, *_: Any, **__: Any) -> list[Any]:
        seen.append((self.num_threads, self.limits.num_slots - 1))
        return []

    monkeypatch.setattr(llm_module.LLM, "generate", spy)
    settings = tmp_path / "serve.yaml"
    settings.write_text("serve:\n  num_threads: 2\n  max_num_seqs: 3\n")
    flags = ["generate", str(float32_artifact), "--prompt", WORD, "--config", str(settings), "-q"]
    try:
        assert main_command.main(flags) == 0
        assert main_command.main([*flags, "--num-threads", "1"]) == 0
        assert seen == [(2, 3), (1, 3)]
        settings.write_text("serve:\n  max_num_seqs: 9\n")
        assert main_command.main(flags) == 2
        assert "max_num_seqs: 9 is not possible (the artifact allows 1 to 8)" in capsys.readouterr().err
    finally:
        LLM(float32_artifact, num_threads=1)  # the number of threads is the process's


def test_wrong_requests_have_exit_code_2_and_an_object_for_machines(
    float32_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt_token_ids": [5]}}\n{{"prompt_token_ids": [5, {IMAGE_TOKEN}]}}\n')
    generate(float32_artifact, "--prompts-file", str(file), "--json", "-q", expected=2)
    captured = capsys.readouterr()
    (line,) = json_lines(captured.out)  # the good request gave nothing either: all or none
    assert line["error"]["code"] == "DI120" and line["error"]["exit_code"] == 2
    assert f"token id {IMAGE_TOKEN}" in line["error"]["what"]
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_real_command_generates_and_touches_nothing(float32_artifact: Path, llm: LLM, tmp_path: Path) -> None:
    before = tree_state(float32_artifact)
    prompt = make_prompt(9)
    ids = ",".join(map(str, prompt))
    (tmp_path / "home").mkdir()
    done = command(
        "generate",
        float32_artifact,
        "--prompt-token-ids",
        ids,
        "--json",
        cwd=tmp_path,
        env={
            "PATH": "",
            "HOME": str(tmp_path / "home"),
            "XDG_CONFIG_HOME": os.environ["XDG_CONFIG_HOME"],
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stderr
    (line,) = json_lines(done.stdout)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=16, temperature=0))
    assert line["token_ids"] == list(output.outputs[0].token_ids)
    assert done.stderr == "16 tokens for 1 request\n"
    assert tree_state(float32_artifact) == before
    assert list(tmp_path.rglob("*")) == [tmp_path / "home"], "files are left"


def test_closed_pipe_ends_the_command_quietly(float32_artifact: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [COMMAND, "generate", float32_artifact, "--prompt", WORD, "-q"],
            stdout=write_end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_interrupt_while_generating_ends_with_130_and_one_line(
    float32_artifact: Path, tmp_path: Path
) -> None:
    """Interrupts in a row, sent when the artifact is loaded and thousands of steps are ahead.

    The later ones come while the process ends, and change nothing.
    """
    file = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt_token_ids": make_prompt(4)})
    file.write_text(f"{line}\n" * 400)
    child = subprocess.Popen(
        [COMMAND, "generate", float32_artifact, "--prompts-file", file, "--max-tokens", "1000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "DEEPINFER_LOG": "info"},
    )
    assert child.stderr is not None
    heard = [child.stderr.readline()]
    assert heard[0].startswith("INFO: loaded")
    while not heard[-1].startswith("child_processes_seen"):
        heard.append(child.stderr.readline())
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    while True:
        try:
            out, err = child.communicate(timeout=0.001)
            break
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
    assert child.returncode == 130 and out == ""
    assert err == "interrupted\n"


INTERRUPTED_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

from deepinfer.cli.main import main
sys.meta_path.insert(0, Interrupt())
sys.exit(main())
"""


@pytest.mark.parametrize("name", ["numpy", "torch.nn", "deepinfer.runtime.loader"])
def test_interrupt_while_starting_ends_with_130(float32_artifact: Path, name: str) -> None:
    code = INTERRUPTED_IMPORT.format(name=name)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "generate", str(float32_artifact), "--prompt", WORD],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_inspect_shows_what_is_inside_and_needs_no_torch(float32_artifact: Path) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from deepinfer.cli.main import main\n"
        "sys.exit(main())\n"
    )
    with open_artifact(float32_artifact) as artifact:
        artifact_id, paths = artifact.artifact_id, artifact.paths
    before = tree_state(float32_artifact)
    shown = {}
    for flag in ("--quiet", "--json"):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, "inspect", str(float32_artifact), flag],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, "")
        shown[flag] = done.stdout
    assert tree_state(float32_artifact) == before
    text = shown["--quiet"]
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert artifact_id in lines["artifact"] and "built" in lines["trust"] and "certificate" in lines
    for phase, bucket in (("prefill", 16), ("decode", 4), ("logits", 4)):
        assert f"graphs      {phase:<8} {bucket}\n" in text
    assert all(path in text for path in paths)
    facts = json.loads(shown["--json"])
    assert facts["artifact_id"] == artifact_id and facts["trust"] == "built"
    assert facts["buckets"] == {"decode": [4], "logits": [4], "prefill": [16]}
    assert [entry["path"] for entry in facts["files"]] == list(paths)
    assert facts["precision"] == "float32" and facts["options"]["decode_rows"] == [4]


@pytest.mark.parametrize("flags", [(), ("--after", "captured"), ("--dot", "-")])
def test_inspect_shows_a_graph_and_needs_no_torch(float32_artifact: Path, flags: tuple[str, ...]) -> None:
    code = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from deepinfer.cli.main import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "inspect", str(float32_artifact), "--graph", "decode-4", *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    compiled = (float32_artifact / "graphs/decode-4/graph.txt").read_text()
    if "--dot" in flags:
        assert done.stdout.startswith('digraph "decode-4" {\n') and done.stdout.endswith("\n}\n")
        assert done.stdout.count(" [label=") == compiled.count("\n")
    elif flags:
        assert done.stdout.count("\n") > compiled.count("\n") and done.stdout.startswith("%0 = input ")
    else:
        assert done.stdout == compiled


def test_trust_of_what_was_built_here_changes_nothing(
    float32_artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_command.main(["trust", str(float32_artifact), "--json"]) == 0
    (line,) = json_lines(capsys.readouterr().out)
    with open_artifact(float32_artifact) as artifact:
        assert line == {"artifact_id": artifact.artifact_id, "origin": "built"}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (["--max-tokenz", "3"], "--max-tokenz 3, did you mean --max-tokens?"),
        (["--seeed=3"], "--seeed=3, did you mean --seed?"),
        (["--max-tokens 3"], "--max-tokens 3, give --max-tokens and its value as two arguments"),
        (["--nothing-like-it"], "--nothing-like-it (see"),
        (["-z"], "-z (see"),
        ([" "], "unrecognized arguments:"),
        (["stray"], "stray (see"),
    ],
)
def test_argument_left_over_is_named_with_what_may_have_been_meant(
    capsys: pytest.CaptureFixture[str], given: list[str], hint: str
) -> None:
    assert main_command.main(["generate", "OUT", "--prompt", WORD, *given]) == 2
    captured = capsys.readouterr()
    assert hint in captured.err and captured.err.count("\n") == 1 and captured.out == ""
