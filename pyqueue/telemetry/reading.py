"""Read the stored figures of a queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue import arguments
from pyqueue.aside import aside
from pyqueue.errors import ConfigurationError
from pyqueue.limits import shown
from pyqueue.messages import Duration
from pyqueue.requests import Document, Find, Plan, ServerTime
from pyqueue.telemetry.figures import BOUNDS_S, COUNTS, TIMES, quantile
from pyqueue.telemetry.storing import HOUR, METRICS, MINUTE, TOTAL, Span, escaped, unescaped
from pyqueue.telemetry.values import Latency, QueueStats

#: The count of the messages that moved to a queue, in figures with moves.
CAME: Final = "came"
#: How many queues are read from which messages moved to a queue.
_MAX_SOURCES: Final = 10


def stats(queue: str, since: Duration | datetime) -> Plan[QueueStats]:
    """Return the figures of a queue, or of a consumer group, since a time.

    Args:
        queue: The name of the queue, or for a consumer group, the stream, "~" and the group.
        since: The beginning: an instant, or how many seconds ago.

    Raises:
        ConfigurationError: ``since`` is not allowed.
    """
    start, end, found = yield from _documents(queue, since)
    return stats_of(queue, start, end, found)


def stats_over_time(
    queue: str, since: Duration | datetime
) -> Plan[tuple[QueueStats, dict[datetime, dict[str, Latency]]]]:
    """Return the figures of a queue since a time, and its latencies in each minute or hour.

    The arguments are those of ``stats``.
    """
    start, end, found = yield from _documents(queue, since)
    took = {each["at"]: {name: latency([each], name) for name in TIMES} for each in found}
    return stats_of(queue, start, end, found), took


def with_moves(stats: QueueStats, since: Duration | datetime) -> Plan[QueueStats]:
    """Return the figures of a queue, and as the count ``CAME``, how many messages moved to it.

    The stored totals tell from which queues messages moved here. Up to 10 of these queues are
    read.
    """
    moves = f"to.{escaped(stats.queue)}"
    match = {"_id": {"$gte": TOTAL.id(stats.since, ""), "$lt": "t!"}, moves: {"$exists": True}}
    sources = yield from aside(
        METRICS, Find(match, {"q": 1}, sort=(("_id", 1),), limit=_MAX_SOURCES)
    )
    came: Counter[datetime] = Counter()
    for source in sources:
        *_, found = yield from _documents(str(source.get("q")), since)
        for each in found:
            came[each["at"]] += moved_of([each]).get(stats.queue, 0)
    known = {at for at, number in came.items() if number and at >= stats.since}
    points = {at: {**stats.points.get(at, {})} for at in sorted({*stats.points, *known})}
    for at in known:
        points[at][CAME] = came[at]
    counts = {**stats.counts, CAME: sum(came[at] for at in known)}
    return replace(stats, counts=counts, points=points)


def _documents(
    queue: str, since: Duration | datetime
) -> Plan[tuple[datetime, datetime, list[Document]]]:
    """Return the beginning and the end of a period, and the queue's documents in that period."""
    now = yield from ServerTime()
    start = _start(since, now)
    span = MINUTE if now - start <= MINUTE.kept else HOUR
    starts = list(_starts(span, start, now))
    ids = [span.id(each, queue) for each in starts]
    found = yield from aside(METRICS, Find({"_id": {"$in": ids}}, sort=(("_id", 1),)))
    return starts[0], now, [each for each in found if each.get("q") == queue]


def stats_of(
    queue: str, since: datetime, until: datetime, documents: Sequence[Document]
) -> QueueStats:
    """Return the figures of a queue from its documents, which are in chronological order."""
    return QueueStats(
        queue=queue,
        since=since,
        until=until,
        counts=_sums(documents),
        moved=moved_of(documents),
        points={each["at"]: counts_of(each) for each in documents},
        **{name: latency(documents, name) for name in TIMES},
    )


def _start(since: Duration | datetime, now: datetime) -> datetime:
    if not isinstance(since, datetime):
        length = timedelta(seconds=arguments.duration("since", since, positive=True))
        return now - min(length, HOUR.kept)
    instant = arguments.instant("since", since)
    if instant > now:
        raise ConfigurationError(
            f"since: {shown(since)} is in the future; use an instant in the past, or how many "
            "seconds ago"
        )
    return max(instant, now - HOUR.kept)


def _starts(span: Span, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the beginning of each minute, or of each hour, between two instants."""
    each = span.start(start)
    while each <= end:
        yield each
        each += span.length


def counts_of(document: Document) -> dict[str, int]:
    """Return the nonzero counts in a document."""
    return {name: document[name] for name in COUNTS if name in document}


def _sums(documents: Sequence[Document]) -> dict[str, int]:
    return {name: sum(each.get(name, 0) for each in documents) for name in COUNTS}


def moved_of(documents: Sequence[Document]) -> dict[str, int]:
    """Return how many messages moved to each queue."""
    moved: dict[str, int] = {}
    for each in documents:
        for name, number in each.get("to", {}).items():
            moved[unescaped(name)] = moved.get(unescaped(name), 0) + number
    return moved


def histogram_of(documents: Sequence[Document], name: str) -> tuple[list[int], float]:
    """Add up the histograms with this name. Return the bucket sums and the total seconds."""
    stored: list[dict[str, Any]] = [each[name] for each in documents if name in each]
    numbers = [
        sum(each.get(str(place), 0) for each in stored) for place in range(len(BOUNDS_S) + 1)
    ]
    return numbers, sum(each.get("sum", 0.0) for each in stored)


def latency(documents: Sequence[Document], name: str) -> Latency:
    """Return the latency that the histograms with this name show."""
    numbers, seconds = histogram_of(documents, name)
    if not (count := sum(numbers)):
        return Latency()
    p50, p95, p99 = (quantile(numbers, share) for share in (0.5, 0.95, 0.99))
    return Latency(count, seconds / count, p50, p95, p99)
