"""The run as a drawing: messages a second over the time, and where the faults were. SVG, by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["draw", "per_second"]

WIDTH, HEIGHT = 1000, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 20, 40, 120
COLOURS = {"pushed": "#1b6ca8", "settled": "#3a7d44"}
FAULT = "#d1495b"
POINTS = 240  # of a line, at most


def per_second(done: Sequence[tuple[float, float, int]], begin: float, end: float) -> list[tuple[float, float]]:
    """How many messages a second were done, over the time since the beginning."""
    width = max(1.0, (end - begin) / POINTS)
    sums = [0] * (int((end - begin) / width) + 1)
    for _, at, count in done:
        if begin <= at <= end:
            sums[int((at - begin) / width)] += count
    return [(index * width, count / width) for index, count in enumerate(sums)]


def draw(lines: Mapping[str, Sequence[tuple[float, float]]], events: Sequence[Mapping[str, Any]], title: str) -> str:
    """The lines, with a stripe for each fault, as one SVG document. Pointed at, a stripe says what it was."""
    last = max((x for line in lines.values() for x, _ in line), default=1.0) or 1.0
    highest = max((y for line in lines.values() for _, y in line), default=1.0) or 1.0
    bottom = HEIGHT - BOTTOM

    def x(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return bottom - value / highest * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    for step in range(5):
        value, time = highest * step / 4, last * step / 4
        parts.append(
            f'<line x1="{LEFT}" y1="{y(value):.1f}" x2="{WIDTH - RIGHT}" y2="{y(value):.1f}" stroke="#dddddd"/>'
        )
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.0f}</text>')
        parts.append(f'<text x="{x(time):.1f}" y="{bottom + 16}" text-anchor="middle">{time:.0f} s</text>')
    rows = {kind: index for index, kind in enumerate(dict.fromkeys(each["kind"] for each in events))}
    height = (BOTTOM - 30) / max(1, len(rows))
    for each in events:
        where, width = x(each["at"]), max(1.5, x(each["at"] + each["seconds"]) - x(each["at"]))
        what = f"<title>{escape(each['kind'])}: {escape(each['what'])}</title>"
        row = bottom + 24 + rows[each["kind"]] * height
        parts.append(
            f'<rect x="{where:.1f}" y="{TOP}" width="{width:.1f}" height="{bottom - TOP}" fill="{FAULT}" opacity="0.15">{what}</rect>'
            f'<rect x="{where:.1f}" y="{row:.1f}" width="{width:.1f}" height="{height - 1:.1f}" fill="{FAULT}">{what}</rect>'
        )
    for index, (name, line) in enumerate(lines.items()):
        places = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in line)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{WIDTH - RIGHT - 200 + 110 * index}" y="22" fill="{COLOURS[name]}">{escape(name)}/s</text>'
        )
    return "\n".join([*parts, "</svg>", ""])
