"""The figures of a benchmark: rows with medians and targets, curves, and the table."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

#: A target is not met by more noise than this.
MOST_NOISE = 0.1


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


def noise(same: Sequence[float]) -> float:
    """Return how far the median of the ratios of two equal sides may be from 1.

    19 of 20 medians of the same number of rounds, drawn with replacement, are nearer.
    """
    draws = random.Random(1)
    medians = [statistics.median(draws.choices(same, k=len(same))) for _ in range(1000)]
    return quantile([abs(each - 1) for each in medians], 0.95)


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor time in seconds: of the processes that call, and of the server."""

    client: float = 0.0
    server: float = 0.0

    def __add__(self, other: Cpu) -> Cpu:
        return Cpu(self.client + other.client, self.server + other.server)

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(self.client - other.client, self.server - other.server)

    def each(self, messages: int) -> Cpu:
        """Return the time for one of several messages."""
        return Cpu(self.client / max(messages, 1), self.server / max(messages, 1))

    def __str__(self) -> str:
        return f"{1e6 * self.client:.0f} + {1e6 * self.server:.0f}"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit for a figure; ``sign`` is ">=" or "<="."""

    sign: str
    limit: float

    def met(self, value: float, noise: float = 0.0) -> bool:
        """Whether a value is on the right side of the limit, or nearer to it than the noise."""
        if self.sign == ">=":
            return value + noise >= self.limit
        return value - noise <= self.limit

    def __str__(self) -> str:
        return f"{self.sign} {self.limit:g}"


def at_least(limit: float) -> Target:
    return Target(">=", limit)


def at_most(limit: float) -> Target:
    return Target("<=", limit)


@dataclass(slots=True)
class Row:
    """A figure: one value for each round.

    Attributes:
        n: The number of operations.
        noise: How far the same figure of two equal sides may be from 1.
        cpu: The processor time of our side for each message.
    """

    name: str
    unit: str
    values: list[float]
    n: int
    target: Target | None = None
    note: str = ""
    noise: float | None = None
    cpu: Cpu | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quantile(self.values, 0.25), quantile(self.values, 0.75)

    @property
    def met(self) -> bool | None:
        """Whether the median meets the target; None without a target."""
        if self.target is None:
            return None
        return self.target.met(self.median, min(self.noise or 0.0, MOST_NOISE))

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


@dataclass(slots=True)
class Dots:
    """A plot of one row for each name, with a dot for each group, on a logarithmic scale."""

    name: str
    title: str
    x: str
    #: For each group, the value of each name.
    groups: dict[str, dict[str, float]] = field(default_factory=dict)

    def add(self, group: str, name: str, value: float) -> None:
        self.groups.setdefault(group, {})[name] = value


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
    for column in ("figure", "median", "quartiles", "unit", "n", "target", "", "CPU us", "note"):
        right = column in ("median", "n", "target", "CPU us")
        shown.add_column(column, justify="right" if right else "left")
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
            target if row.noise is None else f"{target} ±{row.noise:.2f}",
            met,
            "" if row.cpu is None else str(row.cpu),
            row.note,
        )
    return shown


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
