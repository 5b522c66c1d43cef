"""What the benchmark of growth calls a surprise."""

import pytest
from bench_curves import draw, growth
from harness import Comparison

SIZES = (1, 2, 8)
STEP, PROMPT = "decode step by rows", "prompt by length"


def curve(name: str, power: float, fixed: float = 0.0):
    return name, SIZES, Comparison({str(size): [fixed + size**power] * 3 for size in SIZES})


@pytest.mark.parametrize(
    ("name", "power", "fixed", "missed"),
    [
        (STEP, 1.0, 0.0, [False, False]),
        (STEP, 1.0, 5.0, [False, False]),
        (STEP, 0.0, 0.0, [False, False]),
        (STEP, 1.5, 0.0, [True, True]),
        (STEP, 3.0, 20.0, [False, True]),  # what a fixed part hides shows at the long end
        (PROMPT, 1.1, 0.0, [False, False]),
        (PROMPT, 2.0, 0.0, [True, True]),
    ],
)
def test_growth_beyond_linear_misses_its_floor(name, power, fixed, missed) -> None:
    lines = growth([curve(name, power, fixed)])
    assert [line.missed for line in lines] == missed
    assert lines[0].name.startswith(f"{name}, 1 to 2")


def test_the_ratio_is_growth_of_size_over_growth_of_time() -> None:
    (first, second) = growth([curve(STEP, 2.0)])
    assert (first.ratio, second.ratio) == (pytest.approx(1 / 2), pytest.approx(1 / 4))


def test_curves_are_drawn(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    draw([curve(STEP, 1.0, 1.0), curve(PROMPT, 1.2)], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
