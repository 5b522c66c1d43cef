"""Threads: cores from affinity, siblings and quota; sleeping workers only where they can still be had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.errors import UsageError
from deepinfer.runtime.threads import checked_num_threads, physical_cores


def machine(tmp_path: Path, siblings: dict[int, str], limit: str | None) -> tuple[Path, Path]:
    for cpu, text in siblings.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    return tmp_path, tmp_path / "cpu.max"


HYPERTHREADED = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


@pytest.mark.parametrize(
    ("allowed", "limit", "cores"),
    [
        (set(range(8)), None, 4),
        ({0, 4}, None, 1),
        ({0, 1, 4}, None, 2),
        (set(range(8)), "max 100000", 4),
        (set(range(8)), "250000 100000", 2),
        (set(range(8)), "50000 100000", 1),
        (set(range(8)), "nonsense", 4),
        (set(range(8)), "100000 0", 4),
        ({90, 91, 92}, None, 3),
    ],
)
def test_cores_this_process_may_use(tmp_path: Path, allowed: set, limit: str | None, cores: int) -> None:
    assert physical_cores(*machine(tmp_path, HYPERTHREADED, limit), allowed) == cores


def test_default_is_at_least_one_thread_and_within_the_affinity() -> None:
    assert 1 <= checked_num_threads(None) <= len(os.sched_getaffinity(0))
    assert checked_num_threads(3) == 3


@pytest.mark.parametrize("value", [0, -1, 1025, 1.0, "2", True])
def test_impossible_number_of_threads_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="num_threads"):
        checked_num_threads(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "imports", "policy", "passive"),
    [
        ({}, "deepinfer.runtime", "PASSIVE", True),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "deepinfer.runtime", "ACTIVE", False),
        ({"OMP_WAIT_POLICY": "passive"}, "torch, deepinfer.runtime", "passive", True),
        ({}, "torch, deepinfer.runtime", None, False),
        ({}, "deepinfer; deepinfer.eager_logits; import deepinfer.runtime", "PASSIVE", True),
    ],
)
def test_workers_sleep_unless_the_user_or_an_earlier_import_decided(
    before: dict, imports: str, policy: str | None, passive: bool
) -> None:
    code = (
        f"import os; import {imports}\n"
        "from deepinfer.runtime.threads import waits_passively\n"
        "print(os.environ.get('OMP_WAIT_POLICY'), waits_passively())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | before
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(policy), str(passive)]
