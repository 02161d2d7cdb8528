"""A run as a chart: messages per second over time, and below it a row for each kind of fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.support.svg import COLOURS, Drawing, Scale

WIDTH, LEFT, RIGHT, TOP = 1100, 220, 20, 40
#: The heights of the curves, of the labels below them, and of a row of faults.
CURVES, LABELS, ROW = 260, 40, 14
FAULT_COLOUR = "#d1495b"
MAX_POINTS = 240


def per_second(
    done: Sequence[tuple[float, float, int]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Return how many messages per second were done, over the seconds since the beginning.

    Args:
        done: When each call began and ended, and its number of messages.
        begin: When the run began.
        end: When the run ended.
    """
    width = max(1.0, (end - begin) / MAX_POINTS)
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
    """Return the chart as an SVG document. The pointer shows the details of a fault.

    Args:
        lines: Messages per second, by name.
        events: The faults, as in the result of a run.
        title: The title of the chart.
    """
    kinds = sorted({each["kind"] for each in events})
    bottom, rows = TOP + CURVES, TOP + CURVES + LABELS
    points = [point for line in lines.values() for point in line]
    x = Scale([each[0] for each in points], LEFT, WIDTH - RIGHT, log=False)
    y = Scale([each[1] for each in points], bottom, TOP, log=False)
    drawing = Drawing(WIDTH, rows + ROW * len(kinds) + 10, font_size=11)
    drawing.text(LEFT, 22, f"{title}; messages per second over seconds", anchor="start")
    drawing.axes(x, y)
    for row, kind in enumerate(kinds):
        drawing.text(LEFT - 6, rows + ROW * row + 10, kind, anchor="end")
    for each in events:
        left, top = x(each["at"]), rows + ROW * kinds.index(each["kind"])
        width = max(1.5, x(each["at"] + each["seconds"]) - left)
        when = f"at {each['at']:.0f} s, {each['seconds']:.1f} s long"
        tooltip = f"{each['kind']}, {when}: {each['what']}"
        drawing.rectangle(left, TOP, width, CURVES, FAULT_COLOUR, opacity=0.15, title=tooltip)
        drawing.rectangle(left, top, width, ROW - 3, FAULT_COLOUR, title=tooltip)
    for index, (name, line) in enumerate(lines.items()):
        colour = COLOURS[2 * index]
        drawing.curve([(x(a), y(b)) for a, b in line], colour, width=1.5, dots=False)
        drawing.text(WIDTH - RIGHT - 100 * (len(lines) - index), 22, name, colour=colour)
    return str(drawing)
