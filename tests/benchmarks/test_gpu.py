"""What `make gpu` runs, as far as no card is needed: its data, its checks, the script on small shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_checks
import gpu_steps
import pytest
import torch
from gpu_backend import Interpreter
from gpu_calls import CALLS_FILE, encoded, filled, released_calls
from gpu_release import release_decode_calls

from deepinfer.kernels import linear, moe_gate, ring_write, rms_norm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
FLOAT32 = torch.float32


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as a machine with nothing installed runs it: from the tree alone."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_file_of_calls_is_what_the_released_model_calls():
    calls = release_decode_calls()
    assert released_calls() == calls
    assert [json.loads(json.dumps(encoded(call))) for call in calls] == json.loads(CALLS_FILE.read_text())


def test_tensors_for_a_call_have_its_layout_and_point_nowhere_else():
    for call in released_calls():
        if call.op.name in ("rope", "window_record", "ring_write", "engram_ids"):
            arguments = filled(call, torch.device("cpu"))
            call.op.reference(*arguments)  # which refuses an index that is out of range
            again = type(call).of(call.op, arguments)
            assert again == call


def test_the_checks_pass_what_is_right():
    backend = Interpreter()
    for op in (rms_norm, moe_gate, ring_write):
        assert gpu_checks.agrees(backend, op, op.reference, FLOAT32, 6) is None
        assert gpu_checks.replays(backend, op, op.reference, FLOAT32, 4) is None
    assert gpu_checks.rows_alone(backend, moe_gate, moe_gate.reference, FLOAT32, 9) is None


def test_the_checks_find_what_is_wrong():
    backend = Interpreter()

    def off(*arguments):
        return rms_norm.reference(*arguments) * 1.001

    def mixes_rows(x, *others):
        return linear.reference(x, *others) + x.sum()

    assert "Mismatched elements" in gpu_checks.agrees(backend, rms_norm, off, FLOAT32, 3)
    wrong = gpu_checks.rows_alone(backend, linear, mixes_rows, FLOAT32, 5)
    assert wrong.startswith("rows [0]:") and "values, first at" in wrong
    turns = iter(range(100))
    drifts = gpu_checks.replays(
        backend, rms_norm, lambda *a: rms_norm.reference(*a) + next(turns), FLOAT32, 2
    )
    assert "values, first at" in drifts


def test_every_operation_has_its_checks():
    found = list(gpu_checks.kernel_checks(Interpreter(), {"moe_gate", "verify_drafts"}, quick=True))
    assert {(kind, subject.split()[0]) for kind, subject, _ in found} == {
        ("reference", "moe_gate"), ("rows", "moe_gate"), ("replay", "moe_gate"),
        ("reference", "verify_drafts"), ("replay", "verify_drafts"),
    }  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_the_script_says_so_and_what_to_do():
    done = run_script()
    assert done.returncode == 2 and "--dry-run" in done.stderr and done.stdout == ""


def test_an_operation_that_does_not_exist_is_named():
    done = run_script("--dry-run", "--only", "rms_norms")
    assert done.returncode == 2 and "no such operation: rms_norms" in done.stderr


def test_the_whole_script_runs_without_a_card(tmp_path):
    pytest.importorskip("triton")
    done = run_script("--dry-run", "--only", "rms_norm,hadamard", "--json", str(tmp_path / "gpu.json"))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["dry_run"] is True and "no card" in report["environment"]["device"]
    kinds = [check["kind"] for check in report["checks"]]
    assert kinds.count("reference") == 4 and kinds.count("replay") == 4 and kinds.count("steps") == 2
    assert not [check for check in report["checks"] if check["wrong"]]
    assert [line["op"] for line in report["times"]] == ["rms_norm", "hadamard"]
    assert set(report["host"]) == {f"decode-{bucket}" for bucket in gpu_steps.limits().decode_buckets}
    assert "0 of 14 checks failed" in done.stdout
