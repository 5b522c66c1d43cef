"""`make bench`: floors are judged on a quiet machine only, and the exit code says what came of it."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import quiet
import run
from harness import Line


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs one area that gives `lines` while `idle` of the machine is free; its code and its history."""
    path = tmp_path / "history.jsonl"

    def call(idle: float, *lines: Line) -> tuple[int, list[dict]]:
        area = ModuleType("bench_made_up")
        area.run = lambda threads: list(lines)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "bench_made_up", area)
        monkeypatch.setattr(run, "areas", lambda: ["made_up"])
        monkeypatch.setattr(run.quiet, "idle_share", lambda: idle)
        monkeypatch.setattr(run.native, "load_host_library", lambda: None)
        options = ["--history", str(path), "--threads", "1", "--markdown", str(tmp_path / "figures.md")]
        return run.main(options), run.history.read(path)

    return call


GOOD, BAD = Line("good", 2.0, 1.9, 2.1, 1.5), Line("bad", 1.0, 0.9, 1.1, 1.5)
PLAIN = Line("plain", 1.0, 1.0, 1.0)


def test_a_missed_floor_fails_on_a_quiet_machine(bench, capsys, tmp_path) -> None:
    code, kept = bench(0.9, GOOD, BAD)
    assert code == 1 and "1 of 2 floors missed, 0 not judged" in capsys.readouterr().out
    assert [set(entry["ratios"]) for entry in kept] == [{"good, 1 thread", "bad, 1 thread"}]
    assert "| bad | **1.00 (0.90 - 1.10), missed** |" in (tmp_path / "figures.md").read_text()


def test_a_floor_that_only_the_shortest_times_reach_is_kept_and_shown(bench, tmp_path) -> None:
    assert bench(1.0, Line("near", 1.4, 1.3, 1.6, 1.5, "", 1.55))[0] == 0
    assert "| near | 1.40 (1.30 - 1.60), shortest 1.55 |" in (tmp_path / "figures.md").read_text()


def test_floors_that_hold_are_a_success(bench) -> None:
    assert bench(1.0, GOOD, PLAIN)[0] == 0


def test_a_busy_machine_judges_and_keeps_nothing(bench, capsys, tmp_path) -> None:
    code, kept = bench(0.5, GOOD, BAD)
    printed = capsys.readouterr().out
    assert code == 3 and kept == []
    assert "50% of the processors idle" in printed and "MISSED" not in printed
    assert "0 of 2 floors missed, 2 not judged" in printed and "not kept in history.jsonl: 2" in printed
    assert "| bad | 1.00 (0.90 - 1.10), not judged |" in (tmp_path / "figures.md").read_text()


def test_without_floors_there_is_nothing_to_judge(bench) -> None:
    assert bench(0.1, PLAIN)[0] == 0


def test_the_idle_share_is_that_of_the_time_slept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 0 0\n")
    busier = "cpu  120 5 60 850 60 0 0 5 20 0\n"  # 100 ticks more, of which 60 idle; guests are users too
    monkeypatch.setattr(quiet.time, "sleep", lambda _: stat.write_text(busier))
    assert quiet.idle_share(1.0, stat) == pytest.approx(0.6)
