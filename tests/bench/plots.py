"""Curves of the benchmark as SVG: axes, a line with dots for each name, and a legend."""

from __future__ import annotations

from itertools import cycle

from tests.bench.figures import Curve
from tests.support.svg import COLOURS, Drawing, Scale

__all__ = ["svg"]

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 80, 200, 50, 60


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
