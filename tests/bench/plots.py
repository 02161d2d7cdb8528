"""Plots of the benchmark as SVG, from a JSON report: curves, and dots for a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.bench.figures import Curve, Dots, number
from tests.support.svg import COLOURS, Drawing, Scale

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 200, 50, 60
#: The height of the row of one name, of one group in it, and the room for the names.
ROW, GAP, NAMES = 36, 7, 210


def write(report: Mapping[str, Any], folder: Path, *, only: str | None = None) -> None:
    """Write the plots of a report into a folder; with ``only``, those that this page shows."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {each["name"]: svg(Curve(**each)) for each in report["curves"]}
    drawn |= {each["name"]: comparison(Dots(**each)) for each in report["dots"]}
    for name, text in drawn.items():
        if only is None or f"({name}.svg)" in only:
            (folder / f"{name}.svg").write_text(text)


def svg(curve: Curve) -> str:
    """Return a curve as an SVG document."""
    points = [point for line in curve.lines.values() for point in line]
    x = Scale([point[0] for point in points], LEFT, WIDTH - RIGHT, log=curve.log_x)
    y = Scale([point[1] for point in points], HEIGHT - BOTTOM, TOP, log=curve.log_y)
    drawing = Drawing(WIDTH, HEIGHT)
    middle = (x.start + x.end) / 2
    drawing.text(middle, 25, curve.title, size=15)
    drawing.text(middle, HEIGHT - 15, curve.x)
    drawing.text(20, (y.start + y.end) / 2, curve.y, vertical=True)
    drawing.axes(x, y)
    legend = TOP + 10
    for (name, line), colour in zip(curve.lines.items(), cycle(COLOURS), strict=False):
        drawing.curve([(x(a), y(b)) for a, b in line], colour, width=2, dots=True)
        drawing.rectangle(WIDTH - RIGHT + 15, legend - 9, 10, 10, colour)
        drawing.text(WIDTH - RIGHT + 32, legend, name, anchor="start")
        legend += 20
    return str(drawing)


def comparison(dots: Dots) -> str:
    """Return a comparison as an SVG document: a row for each name, a colour for each group."""
    names = list(dict.fromkeys(name for values in dots.groups.values() for name in values))
    everything = [value for values in dots.groups.values() for value in values.values()]
    bottom = TOP + 24 + ROW * len(names)
    drawing = Drawing(WIDTH, bottom + 50)
    x = Scale(everything, NAMES, WIDTH - 40, log=True)
    drawing.text(WIDTH / 2, 24, dots.title, size=15)
    drawing.text((x.start + x.end) / 2, bottom + 40, dots.x)
    drawing.columns(x, TOP + 18, bottom)
    place = 60.0
    for group, colour in zip(dots.groups, cycle(COLOURS), strict=False):
        drawing.circle(place, TOP - 4, 5, colour)
        drawing.text(place + 10, TOP, group, anchor="start")
        place += 45 + 6.5 * len(group)
    for index, name in enumerate(names):
        middle = TOP + 24 + ROW * (index + 0.5)
        bold = name.startswith("pyqueue")
        drawing.text(NAMES - 14, middle + 4, name, anchor="end", bold=bold)
        drawing.line(x.start, middle, x.end, middle)
        # One below the other, so that equal values stay visible.
        height = middle - GAP * (len(dots.groups) - 1) / 2
        for (group, values), colour in zip(dots.groups.items(), cycle(COLOURS), strict=False):
            if name in values:
                title = f"{name}, {group}: {number(values[name])}"
                drawing.circle(x(values[name]), height, 4.5, colour, title=title)
            height += GAP
    return str(drawing)
