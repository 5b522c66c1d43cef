"""The shipped model's perplexity through its artifact, compared exactly with what is on record.

Sums of floats may depend on the width of the vectors they are made with: there is one record per instruction
set. After an intended change: `python tests/examples/refresh_values.py`, which prints what moved.
"""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import refresh_values
from refresh_values import RECORD, measure, moved

from deepinfer.kernels.native import host_isa


def test_values_are_those_on_record(tmp_path: Path, build_cache_dir: Path | None) -> None:
    assert (
        moved(json.loads(RECORD.read_text())[host_isa()], measure(tmp_path, host_isa(), build_cache_dir))
        == []
    )


@pytest.mark.slow
@pytest.mark.skipif(host_isa() == "avx2", reason="is what the other test builds")
def test_values_of_the_other_instruction_set() -> None:
    """In a process of its own: one holds one op library."""
    command = [sys.executable, "-P", refresh_values.__file__, "avx2", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "avx2: nothing moved\n"), done.stderr


def test_the_last_bit_of_a_value_counts() -> None:
    record = json.loads(RECORD.read_text())[host_isa()]
    changed = record | {"perplexity": math.nextafter(record["perplexity"], 0)}
    (line,) = moved(record, changed)
    assert line == f"perplexity: {record['perplexity']!r} -> {changed['perplexity']!r}"
    assert moved(record, {name: value for name, value in record.items() if name != "tokens"})


def test_the_tool_prints_what_moved_and_keeps_other_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"avx2": {"perplexity": 2.0}, "avx512": {"perplexity": 3.0}}))
    monkeypatch.setattr(refresh_values, "RECORD", path)
    monkeypatch.setattr(refresh_values, "measure", lambda *_: {"perplexity": 2.5})
    assert refresh_values.main(["avx2", "--check"]) == 1
    assert json.loads(path.read_text())["avx2"] == {"perplexity": 2.0}
    assert refresh_values.main(["avx2"]) == 0
    assert capsys.readouterr().out == "avx2: perplexity: 2.0 -> 2.5\n" * 2
    assert json.loads(path.read_text()) == {"avx2": {"perplexity": 2.5}, "avx512": {"perplexity": 3.0}}
    assert refresh_values.main(["avx2", "--check"]) == 0
    assert capsys.readouterr().out == "avx2: nothing moved\n"
