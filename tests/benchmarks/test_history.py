"""The history of measurements: what is kept, and what is said to have moved."""

from pathlib import Path

import history


def figures(**ratios: float) -> list[dict]:
    return [{"name": name, "threads": 1, "ratio": ratio} for name, ratio in ratios.items()]


def run(machine: str = "a", **ratios: float) -> dict:
    return history.entry(figures(**ratios), machine, 0.3, "abc")


def test_runs_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert history.read(path) == []
    runs = [run(gate=2.0), run(gate=3.0)]
    for each in runs:
        history.append(each, path)
    assert history.read(path) == runs


def test_only_what_moved_on_this_machine_is_said() -> None:
    before = [run(gate=2.0, head=1.0), run("b", gate=9.0), run(head=1.2)]
    found = history.changes(run(gate=2.2, head=1.21, new=5.0), before)
    assert found == ["gate, 1 thread: 2.00x -> 2.20x (+10%)"]


def test_a_loss_is_said_with_its_sign() -> None:
    assert history.changes(run(gate=1.5), [run(gate=2.0)]) == ["gate, 1 thread: 2.00x -> 1.50x (-25%)"]
