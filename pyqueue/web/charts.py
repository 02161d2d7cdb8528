"""Charts as SVG, drawn on the server. Colors come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from math import ceil, log10
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from pyqueue.telemetry.reading import CAME
from pyqueue.telemetry.values import Latency, QueueStats
from pyqueue.web.shapes import length, rate

#: The size of a sparkline and of a chart, in pixels, and the room below the lines of a chart.
_SPARK: Final = (120, 24)
_CHART: Final = (640, 170)
_BELOW: Final = 20
#: A chart of times: the room for the numbers and above the lines, the lowest time in seconds, and
#: the least number of powers of ten that it shows.
_LEFT: Final = 52
_TOP: Final = 8
_LEAST_S: Final = 0.001
_LEAST_DECADES: Final = 3
#: The lines of a chart of times: the time, and the share of messages that took less.
TIME_LINES: Final = (("waiting", "p50"), ("waiting", "p95"), ("working", "p50"), ("working", "p95"))
#: The width of lanes, the room for names and for times, and the height of a lane.
_LANES: Final = (640, 130, 80)
_LANE: Final = 26
#: The lines of a chart, keyed by class, and the counts that each line adds up.
LINES: Final[Mapping[str, Sequence[str]]] = {
    "in": ("pushed", CAME),
    "done": ("finished", "moved"),
    "retried": ("retried",),
    "dead": ("dead",),
}
#: The lines of the chart of a consumer group.
GROUP_LINES: Final[Mapping[str, Sequence[str]]] = {
    **LINES,
    "in": ("received",),
    "done": ("finished",),
}
_GROUP_WORDS: Final = {"in": "delivered", "done": "committed"}
#: The maximum number of charts of consumer groups on a page.
_MAX_CHARTS: Final = 20


class Lane(NamedTuple):
    """A queue that a message passed through, or is in."""

    queue: str
    start: datetime
    end: datetime
    #: The class of its bar: "past", "now" or "dead".
    look: str


def per_minute(stats: QueueStats | None, names: Sequence[str], minutes: int = 60) -> list[int]:
    """Return the sum of the counts with these names for each of the last ``minutes`` minutes."""
    if stats is None:
        return [0] * minutes
    last = stats.until.replace(second=0, microsecond=0)
    starts = [last - timedelta(minutes=back) for back in range(minutes - 1, -1, -1)]
    return [sum(stats.points.get(each, {}).get(name, 0) for name in names) for each in starts]


def line(values: Sequence[float], size: tuple[int, int] = _SPARK, high: float = 1) -> str:
    """Return the points of a line. The top stands for ``high`` or, if higher, the highest value."""
    (width, height), high = size, max(*values, high)
    step = width / max(1, len(values) - 1)
    return " ".join(
        f"{place * step:.1f},{height - 2 - (height - 4) * value / high:.1f}"
        for place, value in enumerate(values)
    )


def sparkline(values: Sequence[float], key: str, label: str) -> Markup:
    """Return a small chart. The script of the page finds its line by ``key``."""
    return Markup(
        '<svg class="spark" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}"><polyline data-line="{}" points="{}"/></svg>'
    ).format(*_SPARK, label, key, line(values))


def throughput(stats: QueueStats, lines: Mapping[str, Sequence[str]] = LINES) -> Markup:
    """Return the chart of messages per second."""
    starts, step_s = _starts(stats)
    points = [stats.points.get(each, {}) for each in starts]
    series = {
        name: [sum(each.get(count, 0) for count in some) / step_s for each in points]
        for name, some in lines.items()
    }
    high = max([max(values) for values in series.values()]) or 1.0
    width, height = _CHART
    room = (width, height - _BELOW)
    parts = [
        Markup('<line class="grid" x1="0" y1="{0}" x2="{1}" y2="{0}"/>').format(y, width)
        for y in (2, room[1] // 2, room[1] - 2)
    ]
    parts += [
        Markup('<polyline class="line {}" points="{}"/>').format(name, line(values, room, high))
        for name, values in series.items()
    ]
    parts.append(Markup('<text class="tick" x="0" y="14">{}</text>').format(rate(high)))
    return _svg(_CHART, "Messages per second", [*parts, *_instants(stats)])


def times(stats: QueueStats, took: Mapping[datetime, Mapping[str, Latency]]) -> Markup | None:
    """Return the chart of how long messages waited and were worked on, or None without values.

    Its scale is logarithmic: each line of the grid is ten times the line below it.

    Args:
        stats: The figures of the queue.
        took: How long messages waited and were worked on, keyed by the instants in ``stats``.
    """
    starts, _ = _starts(stats)
    series: dict[str, list[float | None]] = {
        f"{name} {share}": [getattr(took[at][name], share) if at in took else None for at in starts]
        for name, share in TIME_LINES
    }
    known = [each for values in series.values() for each in values if each is not None]
    if not known:
        return None
    width, bottom = _CHART[0], _CHART[1] - _BELOW - 2
    decades = max(_LEAST_DECADES, ceil(log10(max(*known, _LEAST_S) / _LEAST_S)))
    step = (width - _LEFT) / max(1, len(starts) - 1)

    def height(value: float) -> float:
        return bottom - (bottom - _TOP) * log10(max(value, _LEAST_S) / _LEAST_S) / decades

    grid = (
        '<line class="grid" x1="{left}" y1="{y:.1f}" x2="{width}" y2="{y:.1f}"/>'
        '<text class="tick" x="{end}" y="{base:.1f}" text-anchor="end">{text}</text>'
    )
    parts: list[Any] = []
    for power in range(decades + 1):
        value = _LEAST_S * 10**power
        place = {"left": _LEFT, "width": width, "end": _LEFT - 6, "y": height(value)}
        parts.append(Markup(grid).format(**place, base=height(value) + 4, text=length(value)))
    for name, values in series.items():
        places = [
            None if each is None else (_LEFT + place * step, height(each))
            for place, each in enumerate(values)
        ]
        parts += _pieces(name, places)
    parts += _instants(stats, _LEFT)
    return _svg(_CHART, "How long messages waited and were worked on", parts)


def _pieces(look: str, places: Sequence[tuple[float, float] | None]) -> Iterator[Markup]:
    """Yield the pieces of a line, which ends where a place is missing. A lone place is a dot."""
    for there, some in groupby(places, key=lambda each: each is not None):
        piece = [each for each in some if each is not None]
        if there and len(piece) == 1:
            dot = '<circle class="dot {}" cx="{:.1f}" cy="{:.1f}" r="2"/>'
            yield Markup(dot).format(look, *piece[0])
        elif there:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in piece)
            yield Markup('<polyline class="line {}" points="{}"/>').format(look, points)


def _starts(stats: QueueStats) -> tuple[list[datetime], int]:
    """Return when each minute or hour of the figures begins, and how many seconds it lasts.

    The figures are by the hour if they cover more than a day.
    """
    step_s = 3600 if _has_days(stats) else 60
    number = int(stats.seconds // step_s) + 1
    return [stats.since + timedelta(seconds=step_s * place) for place in range(number)], step_s


def _has_days(stats: QueueStats) -> bool:
    return stats.until - stats.since > timedelta(hours=25)


def _instants(stats: QueueStats, left: int = 0) -> Iterator[Markup]:
    """Yield the times below a chart."""
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        instant = stats.since + (stats.until - stats.since) * share
        text = f"{instant:%b %d}" if _has_days(stats) else f"{instant:%H:%M} UTC"
        yield Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
            left + (_CHART[0] - left) * share, _CHART[1] - 4, anchor, text
        )


def legend(stats: QueueStats, lines: Mapping[str, Sequence[str]] = LINES) -> list[dict[str, str]]:
    """Return the legend of a chart: the name of each line, and its average per second."""
    known = {name: stats.rate(name) for name in stats.counts}
    return [
        {"look": name, "value": rate(sum(known.get(each, 0.0) for each in some))}
        for name, some in lines.items()
    ]


def groups(some: Mapping[str, QueueStats]) -> Markup:
    """Return a chart for each consumer group of a stream, of the first ``_MAX_CHARTS`` groups."""
    item = Markup('<li class="{}">{} <strong>{}</strong></li>')
    part = Markup('<section class="panel"><h2>{}</h2>{}<ul class="legend">{}</ul></section>')
    return Markup("").join(
        part.format(
            f"Group {name}, last hour",
            throughput(stats, GROUP_LINES),
            Markup("").join(
                item.format(
                    each["look"], _GROUP_WORDS.get(each["look"], each["look"]), each["value"]
                )
                for each in legend(stats, GROUP_LINES)
            ),
        )
        for name, stats in list(some.items())[:_MAX_CHARTS]
    )


def lanes(some: Sequence[Lane]) -> Markup:
    """Return a drawing of a message's way, with a lane for each queue, on one scale of time."""
    width, left, right = _LANES
    start, end = some[0].start, max(each.end for each in some)
    total_s, across = max((end - start).total_seconds(), 0.001), width - left - right
    parts: list[Any] = []
    for place, each in enumerate(some):
        long_s = max(0.0, (each.end - each.start).total_seconds())
        values: dict[str, Any] = {
            "name": each.queue if len(each.queue) <= 18 else f"{each.queue[:17]}…",
            "look": each.look,
            "y": place * _LANE + 6,
            "base": place * _LANE + 17,
            "left": left,
            "across": across,
            "x": left + min(across - 3, across * (each.start - start).total_seconds() / total_s),
            "long": max(3.0, across * long_s / total_s),
            "width": width,
            "time": length(long_s),
        }
        text = (
            '<text class="lane-name" x="0" y="{base}">{name}</text>'
            '<rect class="lane" x="{left}" y="{y}" width="{across}" height="14" rx="3"/>'
            '<rect class="bar {look}" x="{x:.1f}" y="{y}" width="{long:.1f}" height="14" rx="3"/>'
            '<text class="tick" x="{width}" y="{base}" text-anchor="end">{time}</text>'
        )
        parts.append(Markup(text).format(**values))
    names = ", ".join(each.queue for each in some)
    return _svg((width, _LANE * len(some) + 4), f"Its way: {names}", parts)


def _svg(size: tuple[int, int], label: str, parts: Sequence[Any]) -> Markup:
    head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">')
    return head.format(*size, label) + Markup("").join(parts) + Markup("</svg>")
