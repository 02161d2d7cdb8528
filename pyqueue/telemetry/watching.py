"""Read all that telemetry has stored: the last hour of every queue, errors, workers and pipelines.

The plans read a bounded number of documents. They return nothing if the database user may not read
a collection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue.aside import aside
from pyqueue.errors import NotPermitted
from pyqueue.messages import Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Sort
from pyqueue.telemetry.reading import stats_of
from pyqueue.telemetry.storing import ERRORS, METRICS, MINUTE, WORKERS
from pyqueue.telemetry.values import QueueStats

#: The maximum numbers of documents that are read.
_MAX_MINUTES: Final = 10_000
_MAX_GROUPS: Final = 500
_MAX_RUNS: Final = 1000
_MAX_GRAPHS: Final = 50
#: A worker that has missed this many beats is silent.
_MISSED: Final = 3


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """The failed tries of a queue that have the same fingerprint."""

    #: The queue. For a consumer group: the stream, "~" and the group.
    queue: str
    fp: str
    type: str
    where: str | None
    #: The last text, up to 200 characters.
    message: str
    first: datetime | None
    last: datetime | None
    tries: int
    dead: int
    #: The ids of the last messages.
    ids: Sequence[Id]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A worker or a pipeline that is running, or that has stopped reporting."""

    kind: str
    name: str
    #: ``owner``, ``host``, ``pid``, ``version``, and ``memory`` in bytes.
    process: Mapping[str, Any]
    #: For each stage the queue ``q``, ``to``, ``concurrency`` and other options.
    stages: Sequence[Mapping[str, Any]]
    #: The number of messages in progress, and up to 20 of them.
    messages: int
    in_progress: Sequence[Mapping[str, Any]]
    started: datetime | None
    beat: datetime | None
    #: Whether it has missed three beats.
    silent: bool

    def works_on(self, queue: str) -> bool:
        """Return whether this run receives from ``queue``, or from any consumer group of it."""
        names = {str(each.get("q")) for each in self.stages}
        return queue in names or any(name.partition("~")[0] == queue for name in names)


@dataclass(frozen=True, slots=True)
class GraphSummary:
    """The graph of a pipeline that is running, or has run in the last few days."""

    name: str
    #: For each stage the queue ``q``, ``to``, ``handler``, ``kind`` and other options.
    stages: Sequence[Mapping[str, Any]]


def recent_stats(minutes: int = 60) -> Plan[dict[str, QueueStats]]:
    """Return the figures of all queues in the last ``minutes`` minutes, keyed by name.

    If there are too many documents, the oldest minutes are missing.
    """
    now = yield from ServerTime()
    start = MINUTE.start(now - timedelta(minutes=minutes))
    match = {"_id": {"$gte": MINUTE.id(start, ""), "$lt": MINUTE.letter + "~"}}
    found = yield from _read(METRICS, match, (("_id", -1),), _MAX_MINUTES)
    by_queue: dict[str, list[Document]] = {}
    for each in reversed(found):
        if isinstance(each.get("q"), str) and isinstance(each.get("at"), datetime):
            by_queue.setdefault(each["q"], []).append(each)
    return {name: stats_of(name, start, now, some) for name, some in by_queue.items()}


def moved_in(stats: Mapping[str, QueueStats]) -> dict[str, float]:
    """Return how many messages per second moved to each queue, by the figures of the sources."""
    found: dict[str, float] = {}
    for each in stats.values():
        for target, number in each.moved.items():
            found[target] = found.get(target, 0.0) + number / each.seconds
    return found


def error_groups() -> Plan[list[ErrorSummary]]:
    """Return the groups of errors, the most recent first."""
    found = yield from _read(ERRORS, {}, (("last", -1),), _MAX_GROUPS)
    return [
        ErrorSummary(
            queue=str(each.get("q", "")),
            fp=str(each.get("fp", "")),
            type=str(each.get("type", "")),
            where=each.get("where"),
            message=str(each.get("message", "")),
            first=each.get("first"),
            last=each.get("last"),
            tries=each.get("tries", 0),
            dead=each.get("dead", 0),
            ids=each.get("ids", []),
        )
        for each in found
    ]


def runs() -> Plan[list[RunSummary]]:
    """Return the running workers and pipelines, and those that have been silent for up to an hour.

    The result is sorted by name.
    """
    now = yield from ServerTime()
    match = {"kind": {"$in": ["worker", "pipeline"]}}
    found = yield from _read(WORKERS, match, (("_id", 1),), _MAX_RUNS)
    summaries = [_run(each, now) for each in found]
    return sorted(summaries, key=lambda each: (each.name, str(each.process.get("owner"))))


def graphs() -> Plan[list[GraphSummary]]:
    """Return the graphs of pipelines, sorted by name."""
    found = yield from _read(WORKERS, {"kind": "graph"}, (("_id", 1),), _MAX_GRAPHS)
    return [GraphSummary(str(each.get("name", "")), each.get("stages", [])) for each in found]


def _run(document: Document, now: datetime) -> RunSummary:
    get = document.get
    stored, every_s = get("beat"), get("every", 0.0)
    beat = stored if isinstance(stored, datetime) else None
    return RunSummary(
        kind=str(get("kind")),
        name=str(get("name", "")),
        process={name: get(name) for name in ("owner", "host", "pid", "version", "memory")},
        stages=get("stages", []),
        messages=get("messages", 0),
        in_progress=get("in_progress", []),
        started=get("started"),
        beat=beat,
        silent=beat is None or now - beat > timedelta(seconds=_MISSED * every_s),
    )


def _read(suffix: str, match: Filter, sort: Sort, limit: int) -> Plan[list[Document]]:
    try:
        return (yield from aside(suffix, Find(match, sort=sort, limit=limit)))
    except NotPermitted:
        return []
