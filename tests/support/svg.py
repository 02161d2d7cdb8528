"""A small writer for charts as SVG. They are readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

#: Colours of lines, visible on white and on black.
COLOURS = ("#3b8eea", "#d1495b", "#3fa34d", "#d99a1c", "#9467bd", "#8c8c8c", "#00a6a6", "#b5703c")

_STYLE = """<style>
.page { fill: #ffffff } .label { fill: #24292f } .grid { stroke: #d8dee4 }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117 } .label { fill: #e6edf3 } .grid { stroke: #30363d }
}
</style>"""


class Scale:
    """A map from values to pixels.

    Args:
        values: The values to show. A linear scale also shows 0.
        start: The pixel of the lowest value.
        end: The pixel of the highest value.
        log: Whether the scale is logarithmic, from one power of ten to another.
    """

    def __init__(self, values: Iterable[float], start: float, end: float, *, log: bool) -> None:
        usable = [value for value in values if value > 0 or not log]
        low, high = min(usable, default=1.0), max(usable, default=1.0)
        if log:
            low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        else:
            low = min(low, 0.0)
        self._low, self._high = low, high if high > low else low + (9 * low if log else 1)
        self.start, self.end, self._log = start, end, log

    def __call__(self, value: float) -> float:
        if self._log:
            value = max(value, self._low)
            share = math.log(value / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return powers of ten, or about five steps of 1, 2 or 5 times a power of ten."""
        if self._log:
            first, last = round(math.log10(self._low)), round(math.log10(self._high))
            return [10.0**power for power in range(first, last + 1)]
        span = self._high - self._low
        unit = 10.0 ** math.floor(math.log10(span / 5))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 6 >= span)
        return [self._low + step * index for index in range(int(span / step) + 1)]


class Drawing:
    """An SVG document of this size; ``str()`` returns its text."""

    def __init__(self, width: int, height: int, *, font_size: int = 12) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="{font_size}">',
            _STYLE,
            f'<rect width="{width}" height="{height}" class="page"/>',
        ]

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>", ""])

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "middle",
        colour: str = "",
        size: int = 0,
        vertical: bool = False,
        bold: bool = False,
    ) -> None:
        """Write a text, in the colour of the page or in another one."""
        look = f'fill="{colour}"' if colour else 'class="label"'
        look += f' font-size="{size}"' if size else ""
        look += ' font-weight="bold"' if bold else ""
        look += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if vertical else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {look}>{escape(text)}</text>'
        )

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        colour: str,
        *,
        opacity: float = 1.0,
        title: str = "",
    ) -> None:
        """Draw a filled rectangle. The pointer shows its title."""
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{colour}" opacity="{opacity:g}">{tooltip}</rect>'
        )

    def circle(self, x: float, y: float, radius: float, colour: str, *, title: str = "") -> None:
        """Draw a dot. The pointer shows its title."""
        tooltip = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}" '
            f'opacity="0.85">{tooltip}</circle>'
        )

    def columns(self, x: Scale, top: float, bottom: float) -> None:
        """Draw the ticks of a horizontal scale and their labels."""
        for tick in x.ticks():
            self.line(x(tick), top, x(tick), bottom)
            self.text(x(tick), bottom + 18, f"{tick:g}")

    def axes(self, x: Scale, y: Scale) -> None:
        """Draw a grid with the ticks of both scales and their labels."""
        for tick in x.ticks():
            self.line(x(tick), y.end, x(tick), y.start)
            self.text(x(tick), y.start + 18, f"{tick:g}")
        for tick in y.ticks():
            self.line(x.start, y(tick), x.end, y(tick))
            self.text(x.start - 8, y(tick) + 4, f"{tick:g}", anchor="end")

    def line(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw a line of the grid."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'
        )

    def curve(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float, dots: bool
    ) -> None:
        """Draw a line through points, with a dot at each of them if asked for."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="{width:g}"/>'
        )
        self._parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points if dots
        ]
