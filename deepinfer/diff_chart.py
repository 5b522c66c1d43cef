"""The chart of a comparison report: error by token position as inline SVG, on a logarithmic scale.

Knows only numbers. Colours come from the page, so the chart follows its light or dark scheme.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 400, 200  # small, so that labels stay readable on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 14, 34
_FLOOR = 1e-10  # what an exact zero is drawn at
_MAX_POINTS = 300  # more positions than this are drawn as the largest error of each group


def error_chart(name: str, positions: Sequence[Mapping[str, Any]], limit: float | None) -> str:
    """An SVG element: one dot per position (or group of positions), a dashed line at the limit.

    A position whose error is not a finite number sits at the top edge in the colour of a failure.
    """
    points = _thin([(entry["position"], _drawn(entry["max_abs_error"])) for entry in positions])
    finite = [error for _, error in points if error < math.inf] or [_FLOOR]
    low = math.floor(math.log10(min(*finite, limit or finite[0])))
    high = math.ceil(math.log10(max(*finite, limit or _FLOOR, 10.0 ** (low + 1))))
    first, last = min(entry["position"] for entry in positions), max(entry["position"] for entry in positions)

    def x_of(position: int) -> float:
        share = (position - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(error: float) -> float:
        share = (math.log10(error) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(low, high, y_of), *_position_labels(first, last, x_of)]
    if limit:
        parts.append(_rule(y_of(limit), 'stroke="var(--bad)" stroke-dasharray="6 4"'))
    for position, error in points:
        y = y_of(error) if error < math.inf else _TOP
        colour = "bad" if error > (limit or sys.float_info.max) else "good"
        parts.append(f'<circle cx="{x_of(position):.1f}" cy="{y:.1f}" r="3" fill="var(--{colour})"/>')
    label = escape(f"Largest absolute error by position, {name}", quote=True)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}" font-size="12"'
        f' fill="currentColor">\n' + "\n".join(parts) + "\n</svg>"
    )


def _drawn(error: float | None) -> float:
    """What an error is drawn and ranked as: the floor for an exact zero, infinity for what is no number."""
    return math.inf if error is None or math.isnan(error) else max(error, _FLOOR)


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most `_MAX_POINTS` points, in order of position, each the worst of its group."""
    points = sorted(points)
    step = -(-len(points) // _MAX_POINTS)
    groups = [points[start : start + step] for start in range(0, len(points), step)]
    return [max(group, key=lambda point: point[1]) for group in groups]


def _grid(low: int, high: int, y_of: Callable[[float], float]) -> str:
    every = max(1, (high - low) // 5)
    return "\n".join(
        _rule(y_of(10.0**power), 'stroke="var(--line)"')
        + f'<text x="{_LEFT - 6}" y="{y_of(10.0**power) + 4:.1f}" text-anchor="end">1e{power}</text>'
        for power in range(low, high + 1, every)
    )


def _position_labels(first: int, last: int, x_of: Callable[[int], float]) -> list[str]:
    baseline = _HEIGHT - _BOTTOM + 18
    labels = [f'<text x="{x_of(first):.1f}" y="{baseline}" text-anchor="middle">{first}</text>']
    if last > first:
        labels.append(f'<text x="{x_of(last):.1f}" y="{baseline}" text-anchor="end">{last}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*labels, f'<text x="{middle:.0f}" y="{_HEIGHT - 2}" text-anchor="middle">position</text>']


def _rule(y: float, style: str) -> str:
    return f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {style}/>'
