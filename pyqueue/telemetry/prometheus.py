"""Metrics of a namespace as text for Prometheus.

The text has the numbers of messages of up to 500 queues and 500 consumer groups, and the sums that
telemetry has stored. The cost is bounded: messages are counted up to a cap, and counting stops
after 5 seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, overload

from pyqueue.aside import aside
from pyqueue.backends import all_queues
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.streams import consumers
from pyqueue.errors import NotPermitted
from pyqueue.messages import QueueInfo
from pyqueue.requests import Document, Find, MonotonicTime, Plan, ServerTime
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection, runner_of
from pyqueue.telemetry.figures import BOUNDS_S, COUNTS, OTHER, TIMES
from pyqueue.telemetry.reading import histogram_of, moved_of
from pyqueue.telemetry.storing import METRICS, TOTAL, WORKERS

#: The content type of the text.
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: How many queues, and how many consumer groups, have separate lines.
MAX_QUEUES: Final = 500
MAX_GROUPS: Final = 500
#: The name under which all other queues and groups are summed.
REST: Final = "_other"
#: The states of the messages of a consumer group.
GROUP_STATES: Final = ("ready", "scheduled", "reserved", "skipped")
#: The number at which the count of one state of a queue stops.
CAP: Final = 10_001
#: How many queues are counted by one command, and the seconds after which no more are counted.
_PORTION: Final = 50
COUNTING_S: Final = 5.0
#: The maximum number of documents of a kind that are read.
_MAX_READ: Final = 5000
#: A worker that has missed this many beats is silent.
_MISSED: Final = 3

Labels = Mapping[str, str]


@overload
def metrics_text(client: Connected[Connection]) -> str: ...
@overload
def metrics_text(client: Connected[AsyncConnection]) -> Awaitable[str]: ...
def metrics_text(client: Connected[Any]) -> str | Awaitable[str]:
    """Return the metrics of a namespace as text for Prometheus. With an AsyncClient, await it.

    Serve the text with the content type ``CONTENT_TYPE``. The client itself needs no telemetry.

    Args:
        client: A Client or an AsyncClient.

    Returns:
        The text.

    Raises:
        Unavailable: The server did not answer.
    """
    text: str | Awaitable[str] = runner_of(client).run(exposition())
    return text


def exposition() -> Plan[str]:
    """Return the metrics of a namespace as text."""
    totals = yield from _read(METRICS, {"_id": {"$gte": TOTAL.letter + " ", "$lt": "t!"}})
    names = yield from all_queues.names()
    # Queues that were deleted have totals for another month.
    deleted = {str(each["q"]).partition("~")[0] for each in totals} - {*names, ""}
    shown = [*sorted(names), *sorted(deleted)][:MAX_QUEUES]
    page = _Page(frozenset(shown))
    yield from _count(page, names)
    _add_totals(page, totals)
    workers = yield from _read(WORKERS, {"kind": {"$in": ["worker", "pipeline"]}})
    _add_workers(page, workers, (yield from ServerTime()))
    return page.text()


def _read(suffix: str, match: Mapping[str, Any]) -> Plan[list[Document]]:
    """Return documents of telemetry, or none if the database user may not read them."""
    try:
        return (yield from aside(suffix, Find(match, sort=(("_id", 1),), limit=_MAX_READ)))
    except NotPermitted:
        return []


# ---- numbers of messages


def _count(page: _Page, names: Sequence[str]) -> Plan[None]:
    """Count the messages of queues and of consumer groups, until the time limit is reached."""
    family = page.family("pyqueue_messages", "gauge", f"Messages by state, up to {CAP}.")
    about = "For how long the oldest message has waited."
    ages = page.family("pyqueue_oldest_seconds", "gauge", about)
    now, began = (yield from ServerTime()), (yield from MonotonicTime())
    left, groups = list(names), 0
    while left and (yield from MonotonicTime()) - began < COUNTING_S:
        portion, left = left[:_PORTION], left[_PORTION:]
        for info in (yield from all_queues.queues(CAP, held=True, only=portion)):
            name = page.name(info.name)
            for state, number in states_of(info).items():
                labels = {"queue": name, "kind": info.kind, "state": state}
                family.add(labels, number)
            if info.kind == STREAM:
                groups += yield from _count_groups(family, info.name, MAX_GROUPS - groups)
            elif name == info.name:  # ages cannot be summed
                age = now - (info.oldest or now)
                ages.add({"queue": name}, max(0.0, age.total_seconds()))
    counted = page.family("pyqueue_queues", "gauge", "Queues, and whether they were counted.")
    counted.add({"counted": "yes"}, len(names) - len(left))
    counted.add({"counted": "no"}, len(left))


def states_of(info: QueueInfo) -> dict[str, int]:
    """Return how many messages a queue has in each state."""
    counts = info.counts
    if info.kind == STREAM:
        return {"kept": counts.ready}
    return {"ready": counts.ready, "scheduled": counts.scheduled, "reserved": counts.reserved}


def _count_groups(family: _Family, stream: str, room: int) -> Plan[int]:
    """Add a stream's groups, up to ``room`` in separate lines. Return how many are separate."""
    found = yield from consumers.groups(stream)
    for place, group in enumerate(found):
        alone = place < room
        labels = {"stream": stream if alone else REST, "group": group.name if alone else REST}
        for state in GROUP_STATES:
            family.add({**labels, "state": state}, getattr(group.counts, state))
    return min(len(found), max(0, room))


# ---- the stored sums


def _add_totals(page: _Page, documents: Sequence[Document]) -> None:
    """Add the stored sums, which cover all processes."""
    for name in COUNTS:
        family = page.family(f"pyqueue_{name}_total", "counter", f"Messages {name}.")
        for each in documents:
            if name in each:
                family.add(page.labels(each["q"]), each[name])
    family = page.family("pyqueue_moves_total", "counter", "Messages moved, by target.")
    for each in documents:
        for target, number in moved_of([each]).items():
            family.add({**page.labels(each["q"]), "to": page.name(target)}, number)
    for name in TIMES:
        about = f"Seconds of {name.replace('_', ' ')}."
        family = page.family(f"pyqueue_{name}_seconds", "histogram", about)
        for each in documents:
            if name in each:
                family.add_histogram(page.labels(each["q"]), *histogram_of([each], name))


def _add_workers(page: _Page, documents: Sequence[Document], now: datetime) -> None:
    """Add how many workers and pipelines are running or silent, and how busy they are."""
    family = page.family("pyqueue_workers", "gauge", "Workers and pipelines.")
    busy = page.family("pyqueue_worker_messages", "gauge", "Messages that handlers work on.")
    about = "The longest delay of an event loop between two reports."
    lags = page.family("pyqueue_worker_lag_seconds", "gauge", about)
    longest: dict[str, float] = {}
    for each in documents:
        kind = each["kind"]
        silent = now - each["beat"] > timedelta(seconds=_MISSED * each["every"])
        family.add({"kind": kind, "state": "silent" if silent else "running"}, 1)
        busy.add({"kind": kind}, each["messages"])
        if not silent and (lag := each.get("lag")) is not None:
            longest[kind] = max(longest.get(kind, 0.0), lag)
    for kind, lag in longest.items():
        lags.add({"kind": kind}, lag)


# ---- the text


class _Family:
    """The lines of one metric."""

    def __init__(self, name: str, kind: str, about: str) -> None:
        self._head = f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        self._name = name
        self._values: dict[str, float] = {}

    def add(self, labels: Labels, value: float, suffix: str = "") -> None:
        """Add a value. Values with equal labels are summed."""
        written = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        key = f"{self._name}{suffix}{{{written}}}"
        self._values[key] = self._values.get(key, 0) + value

    def add_histogram(self, labels: Labels, numbers: Sequence[int], seconds: float) -> None:
        """Add a histogram."""
        total = 0
        for bound, number in zip((*map(str, BOUNDS_S), "+Inf"), numbers, strict=True):
            total += number
            self.add({**labels, "le": bound}, total, "_bucket")
        self.add(labels, seconds, "_sum")
        self.add(labels, total, "_count")

    def lines(self) -> Iterable[str]:
        """Yield the lines, or nothing if there is no value."""
        if self._values:
            yield self._head
            yield from (f"{key} {value:.15g}\n" for key, value in self._values.items())


class _Page:
    """All metrics of a namespace.

    Args:
        shown: The queues that have separate lines.
    """

    def __init__(self, shown: frozenset[str]) -> None:
        self._shown = shown
        self._families: dict[str, _Family] = {}
        self._groups: set[str] = set()

    def family(self, name: str, kind: str, about: str) -> _Family:
        """Return the family of a metric, created without values at the first call."""
        return self._families.setdefault(name, _Family(name, kind, about))

    def name(self, queue: str) -> str:
        """Return the name under which a queue is shown."""
        return queue if queue in self._shown else REST

    def labels(self, stored: str) -> Labels:
        """Return the labels of a queue, or of a consumer group."""
        queue, _, group = stored.partition("~")
        if not group or stored == OTHER:
            return {"queue": self.name(queue)}
        if stored not in self._groups and len(self._groups) >= MAX_GROUPS:
            return {"stream": REST, "group": REST}
        self._groups.add(stored)
        return {"stream": queue, "group": group}

    def text(self) -> str:
        """Return the text of all metrics."""
        return "".join(line for each in self._families.values() for line in each.lines())


def _escaped(text: str) -> str:
    """Escape the value of a label. Foreign documents may have any text as the name of a queue."""
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
