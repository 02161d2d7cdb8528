"""Charts as SVG, drawn on the server. Colors come from the style sheet, by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from pyqueue.telemetry.values import QueueStats
from pyqueue.web.shapes import length, rate

#: The size of a sparkline and of a chart, in pixels, and the room below the lines of a chart.
_SPARK: Final = (120, 24)
_CHART: Final = (640, 170)
_BELOW: Final = 20
#: The width of lanes, the room for names and for times, and the height of a lane.
_LANES: Final = (640, 130, 80)
_LANE: Final = 26
#: The lines of a chart, keyed by class, and the counts that each line adds up.
LINES: Final[Mapping[str, Sequence[str]]] = {
    "in": ("pushed",),
    "done": ("finished", "moved"),
    "retried": ("retried",),
    "dead": ("dead",),
}


class Lane(NamedTuple):
    """A queue that a message passed through, or is in."""

    queue: str
    start: datetime
    end: datetime
    #: The class of its bar: "past", "now" or "dead".
    look: str


def per_minute(stats: QueueStats | None, names: Sequence[str], minutes: int = 60) -> list[int]:
    """Return the sums of the counts with these names, one for each of the last minutes."""
    if stats is None:
        return [0] * minutes
    last = stats.until.replace(second=0, microsecond=0)
    starts = [last - timedelta(minutes=back) for back in range(minutes - 1, -1, -1)]
    return [sum(stats.points.get(each, {}).get(name, 0) for name in names) for each in starts]


def line(values: Sequence[float], size: tuple[int, int] = _SPARK, high: float = 1) -> str:
    """Return the points of a line. Its top is ``high`` or the highest value."""
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


def throughput(stats: QueueStats) -> Markup:
    """Return the chart of messages per second."""
    days = stats.until - stats.since > timedelta(hours=25)
    step_s = 3600 if days else 60
    number = int(stats.seconds // step_s) + 1
    starts = [stats.since + timedelta(seconds=step_s * place) for place in range(number)]
    points = [stats.points.get(each, {}) for each in starts]
    series = {
        name: [sum(each.get(count, 0) for count in some) / step_s for each in points]
        for name, some in LINES.items()
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
    parts.append(Markup('<text class="tick" x="0" y="14">{} /s</text>').format(f"{high:.3g}"))
    for share, anchor in ((0, "start"), (0.5, "middle"), (1, "end")):
        instant = stats.since + (stats.until - stats.since) * share
        text = f"{instant:%b %d}" if days else f"{instant:%H:%M} UTC"
        parts.append(
            Markup('<text class="tick" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                width * share, height - 4, anchor, text
            )
        )
    return _svg(_CHART, "Messages per second", parts)


def legend(stats: QueueStats) -> list[dict[str, str]]:
    """Return the lines of a chart, each with its average per second."""
    return [
        {"look": name, "value": rate(sum(map(stats.rate, some)))} for name, some in LINES.items()
    ]


def lanes(some: Sequence[Lane]) -> Markup:
    """Return a drawing of a message's way: a lane for each queue, on one scale of time."""
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
