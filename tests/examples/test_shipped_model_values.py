"""The shipped model's perplexity through its artifact, compared exactly with what is on record.

Sums of floats depend on the width of the vectors they are made with, so there is one record per instruction
set. After an intended change: `python tests/examples/refresh_values.py`, which prints what moved.
"""

import json
from pathlib import Path

import pytest
from refresh_values import RECORD, measure

from deepinfer.kernels.native import host_isa


@pytest.mark.slow
def test_values_are_those_on_record(tmp_path: Path) -> None:
    isa = host_isa()
    record = json.loads(RECORD.read_text())
    assert measure(tmp_path, isa) == record[isa]
