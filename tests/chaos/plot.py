"""The run as a drawing: messages a second over the time, and below, on the same time, a row of each kind of fault. SVG, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["draw", "per_second"]

WIDTH, LEFT, RIGHT, TOP = 1100, 220, 20, 40
CURVES, AXIS, ROW = (
    260,
    30,
    14,
)  # the heights of the curves, of what is written below them, and of a kind of fault
COLOURS = {"pushed": "#1b6ca8", "settled": "#3a7d44"}
FAULT = "#d1495b"
POINTS = 240  # of a line, at most


def per_second(
    done: Sequence[tuple[float, float, int]], begin: float, end: float
) -> list[tuple[float, float]]:
    """How many messages a second were done, over the time since the beginning."""
    width = max(1.0, (end - begin) / POINTS)
    sums = [0] * (int((end - begin) / width) + 1)
    for _, at, count in done:
        if begin <= at <= end:
            sums[int((at - begin) / width)] += count
    return [(index * width, count / width) for index, count in enumerate(sums)]


def draw(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    events: Sequence[Mapping[str, Any]],
    title: str,
) -> str:
    """The lines, and a mark for each fault, as one SVG document. Pointed at, a mark says what it was."""
    last = max((x for line in lines.values() for x, _ in line), default=1.0) or 1.0
    highest = max((y for line in lines.values() for _, y in line), default=1.0) or 1.0
    kinds = sorted({each["kind"] for each in events})
    bottom = TOP + CURVES
    height = bottom + AXIS + ROW * len(kinds) + 10

    def x(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return bottom - value / highest * CURVES

    def text(
        left: float, top: float, what: str, anchor: str = "start", colour: str = "black"
    ) -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(what)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        text(LEFT, 22, title),
    ]
    for step in range(5):
        value, time = highest * step / 4, last * step / 4
        parts += [
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}" stroke="#dddddd"/>',
            text(LEFT - 6, y(value) + 4, f"{value:.0f}/s", "end"),
            text(x(time), bottom + 16, f"{time:.0f} s", "middle"),
        ]
    for row, kind in enumerate(kinds):
        parts.append(text(LEFT - 6, bottom + AXIS + ROW * row + 10, kind, "end"))
    for each in events:
        where, top = x(each["at"]), bottom + AXIS + ROW * kinds.index(each["kind"])
        width = max(1.5, x(each["at"] + each["seconds"]) - where)
        what = f"<title>{escape(each['kind'])}, at {each['at']:.0f} s, {each['seconds']:.1f} s: {escape(each['what'])}</title>"
        parts += [
            f'<rect x="{where:.1f}" y="{TOP}" width="{width:.1f}" height="{CURVES}" fill="{FAULT}" opacity="0.12">{what}</rect>',
            f'<rect x="{where:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 3}" fill="{FAULT}">{what}</rect>',
        ]
    for index, (name, line) in enumerate(lines.items()):
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts += [
            f'<polyline points="{places}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>',
            text(WIDTH - RIGHT - 100 * (len(lines) - index), 22, name, colour=COLOURS[name]),
        ]
    return "\n".join([*parts, "</svg>", ""])
