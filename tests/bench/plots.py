"""Curves as SVG, by hand: axes with labels, linear or logarithmic, a line with points for each name, and a legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from tests.bench.harness import Curve

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 200, 50, 60
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#edae49", "#6a4c93", "#555555", "#00a6a6", "#a05a2c")


class Scale:
    """From values to a stretch of pixels."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, log: bool) -> None:
        usable = [value for value in values if value > 0] if log else list(values)
        low, high = min(usable, default=1.0), max(usable, default=1.0)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        else:
            low = min(low, 0.0)
        self.low, self.high = low, high if high > low else low + (9 * low if log else 1)
        self._start, self._end, self._log = start, end, log

    def __call__(self, value: float) -> float:
        if self._log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """Powers of ten; or five steps of 1, 2 or 5 times one."""
        if self._log:
            first, last = round(math.log10(self.low)), round(math.log10(self.high))
            return [10.0**power for power in range(first, last + 1)]
        unit = 10.0 ** math.floor(math.log10((self.high - self.low) / 5))
        step = next(
            unit * factor for factor in (1, 2, 5, 10) if unit * factor * 6 >= self.high - self.low
        )
        return [self.low + step * index for index in range(int((self.high - self.low) / step) + 1)]


def svg(curve: Curve) -> str:
    """A curve as one SVG document."""
    points = [point for line in curve.lines.values() for point in line]
    x = Scale([point[0] for point in points], LEFT, WIDTH - RIGHT, log=curve.log_x)
    y = Scale([point[1] for point in points], HEIGHT - BOTTOM, TOP, log=curve.log_y)
    middle, bottom = (LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(middle, 25, curve.title, size=15),
        _text(middle, HEIGHT - 15, curve.x),
        _text(20, (TOP + bottom) / 2, curve.y, turn=True),
    ]
    for tick in x.ticks():
        parts += [_line(x(tick), TOP, x(tick), bottom), _text(x(tick), bottom + 18, f"{tick:g}")]
    for tick in y.ticks():
        parts += [
            _line(LEFT, y(tick), WIDTH - RIGHT, y(tick)),
            _text(LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"),
        ]
    for index, (name, line) in enumerate(curve.lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        places = [f"{x(a):.1f},{y(b):.1f}" for a, b in line]
        parts.append(
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="3" fill="{colour}"/>' for a, b in line
        ]
        place = TOP + 10 + 20 * index
        parts.append(
            f'<rect x="{WIDTH - RIGHT + 15}" y="{place - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(_text(WIDTH - RIGHT + 32, place, name, anchor="start"))
    return "\n".join([*parts, "</svg>", ""])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12, turn: bool = False
) -> str:
    turned = f' transform="rotate(-90 {x:g} {y:g})"' if turn else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{turned}>{escape(text)}</text>'
