"""The figures of a benchmark: rows with medians and targets, curves, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

__all__ = [
    "Curve",
    "Row",
    "Target",
    "at_least",
    "at_most",
    "histogram",
    "number",
    "quantile",
    "ratios",
    "table",
]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies, interpolated."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Return the ratio of the two values of each round."""
    return [a / b for a, b in zip(over, under, strict=True)]


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a figure; ``sign`` is ">=" or "<="."""

    sign: str
    limit: float

    def met(self, value: float) -> bool:
        return value >= self.limit if self.sign == ">=" else value <= self.limit

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


def at_least(limit: float) -> Target:
    return Target(">=", limit)


def at_most(limit: float) -> Target:
    return Target("<=", limit)


@dataclass(slots=True)
class Row:
    """A figure: one value for each round. ``n`` is the number of operations."""

    name: str
    unit: str
    values: list[float]
    n: int
    target: Target | None = None
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quantile(self.values, 0.25), quantile(self.values, 0.75)

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without a target."""
        return None if self.target is None else self.target.met(self.median)

    @property
    def wrong(self) -> bool:
        """Whether messages were lost or received twice. A missed speed is not wrong."""
        return self.unit == "count" and self.met is False

    def shown(self) -> dict[str, Any]:
        """Return the row for the JSON report."""
        low, high = self.quartiles
        rest = {
            "median": self.median,
            "quartiles": [low, high],
            "target": self.target and str(self.target),
        }
        return asdict(self) | rest | {"met": self.met}


@dataclass(slots=True)
class Curve:
    """A plot: lines of points, by name."""

    name: str
    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    log_x: bool = True
    log_y: bool = True

    def add(self, line: str, x: float, y: float) -> None:
        self.lines.setdefault(line, []).append((x, y))


def histogram(curve: Curve, line: str, values: Sequence[float], per_decade: int = 8) -> None:
    """Add the percentage of values around each of several points on a logarithmic scale."""
    step = 10 ** (1 / per_decade)
    edge = 10.0**-2
    while edge < 1e5:
        inside = sum(edge <= value < edge * step for value in values)
        if inside or line in curve.lines:
            curve.add(line, edge * step**0.5, 100 * inside / len(values))
        edge *= step
        if edge > max(values):
            break


def table(section: str, rows: Sequence[Row]) -> Table:
    """Return the rows of a section as a table for a terminal."""
    shown = Table(title=section, title_justify="left", title_style="bold")
    for column in ("figure", "median", "quartiles", "unit", "n", "target", "", "note"):
        shown.add_column(column, justify="right" if column in ("median", "n", "target") else "left")
    for row in rows:
        low, high = (number(each) for each in row.quartiles)
        met = {True: "[green]met[/]", False: "[bold red]missed[/]", None: ""}[row.met]
        target = "" if row.target is None else str(row.target)
        shown.add_row(
            row.name,
            number(row.median),
            f"{low} - {high}",
            row.unit,
            str(row.n),
            target,
            met,
            row.note,
        )
    return shown


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
