"""The harness on a clock of its own: no test waits, and none depends on the machine's speed."""

import gc

import harness
import pytest
from harness import Line, Spread, compare


class Clock:
    """Time that passes only when a contender says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def task(self, name: str, *seconds: float):
        """A call that takes the given times in turn, the last one for ever after."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.log.append(name)

        return call


def test_the_ratio_is_that_of_the_times() -> None:
    clock = Clock()
    result = compare(
        {"eager": clock.task("eager", 3e-3), "ours": clock.task("ours", 1e-3)}, rounds=5, clock=clock
    )
    assert result.ratio("ours", "eager").median == pytest.approx(3.0)
    assert result.ratio("eager", "ours").median == pytest.approx(1 / 3)
    assert result.seconds("ours").median == pytest.approx(1e-3)


def test_short_calls_are_batched_and_long_ones_run_once_a_round() -> None:
    clock = Clock()
    compare({"short": clock.task("short", 1e-6), "long": clock.task("long", 1.0)}, rounds=3, clock=clock)
    assert clock.log.count("long") == 2 + 3  # warm-up, calibration, three rounds
    assert clock.log.count("short") > 3 * 2000


def test_calls_that_take_no_time_at_all_end() -> None:
    calls = 0

    def nothing() -> None:
        nonlocal calls
        calls += 1

    ticks = iter(range(10**9))
    compare({"nothing": nothing}, rounds=1, min_seconds=1000.0, clock=lambda: float(next(ticks)))
    assert calls >= 1


def test_contenders_take_turns_and_the_order_alternates() -> None:
    clock = Clock()
    compare({"a": clock.task("a", 1.0), "b": clock.task("b", 1.0)}, rounds=3, clock=clock)
    assert "".join(clock.log) == "aabb" + "ab" + "ba" + "ab"


def test_a_slow_first_call_does_not_count() -> None:
    clock = Clock()
    result = compare({"cold": clock.task("cold", 100.0, 1.0)}, rounds=3, clock=clock)
    assert result.rounds["cold"] == [1.0, 1.0, 1.0]


def test_a_slow_round_hits_both_and_leaves_the_ratio_alone() -> None:
    clock = Clock()
    noise = [1.0, 1.0, 1.0, 7.0, 1.0]
    result = compare(
        {
            "slow": clock.task("slow", *(2 * n for n in noise)),
            "fast": clock.task("fast", *noise),
        },
        rounds=3,
        clock=clock,
    )
    assert max(result.rounds["fast"]) == 7.0
    spread = result.ratio("fast", "slow")
    assert (spread.low, spread.median, spread.high) == (2.0, 2.0, 2.0)


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([2.5]) == Spread(2.5, 2.5, 2.5)


def test_a_line_misses_its_floor_by_its_median() -> None:
    assert Line("x", 1.9, 1.8, 2.2, floor=2.0).missed
    assert not Line("x", 2.0, 1.8, 2.2, floor=2.0).missed
    assert not Line("x", 0.1, 0.1, 0.1).missed
    assert Line("x", float("nan"), 0.0, 0.0, floor=2.0).missed


def test_table_marks_what_fell_short() -> None:
    text = harness.table(
        [Line("a", 1.0, 0.9, 1.1, floor=2.0), Line("b", 3.0, 2.9, 3.1, floor=2.0), Line("c", 1.0, 1.0, 1.0)],
        2,
    )
    rows = text.splitlines()
    assert "MISSED" in rows[1] and "ok" in rows[2] and "MISSED" not in rows[3]
    assert rows[1].split()[:3] == ["2", "a", "1.00x"]


def test_times_have_units() -> None:
    assert [harness.in_units(s) for s in (2.0, 1.5e-3, 1.234e-5, 5e-8)] == [
        "2 s",
        "1.5 ms",
        "12.3 us",
        "50 ns",
    ]


def test_garbage_collection_comes_back_after_a_failure() -> None:
    assert gc.isenabled()
    calls = iter(range(4))

    def failing() -> None:
        if next(calls) == 3:
            raise ValueError("on purpose")

    ticks = iter(range(100))
    with pytest.raises(ValueError, match="on purpose"):
        compare({"failing": failing}, rounds=9, clock=lambda: float(next(ticks)))
    assert gc.isenabled()


def test_a_floor_is_missed_only_if_the_shortest_times_miss_it_too() -> None:
    assert Line("a", 0.9, 0.8, 1.0, floor=1.0).missed
    assert Line("a", 0.9, 0.8, 1.0, floor=1.0, best=0.95).missed
    assert not Line("a", 0.9, 0.8, 1.0, floor=1.0, best=1.0).missed
    assert not Line("a", 1.0, 0.8, 1.0, floor=1.0, best=0.9).missed
    assert Line("a", float("nan"), 0.8, 1.0, floor=1.0).missed


def test_the_shortest_times_are_those_of_any_round() -> None:
    rounds = {"ours": [2.0, 1.0, 4.0], "theirs": [9.0, 8.0, 4.0]}
    line = harness.Comparison(rounds).line("a", "ours", "theirs", floor=4.0)
    assert (line.ratio, line.best, line.missed) == (4.5, 4.0, False)
