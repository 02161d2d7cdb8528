"""How telemetry is stored: documents that many processes add to, in collections beside the queues.

``<namespace>.metrics`` has a document for each queue and minute, one for each hour, and one for all
time. ``<namespace>.errors`` has a document for each queue and fingerprint, and
``<namespace>.workers`` one for each worker and pipeline that runs. The server deletes a document
when its ``expires`` has passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.aside import UpsertEach, aside
from pyqueue.requests import (
    Count,
    CreateIndex,
    Delete,
    Filter,
    Indexes,
    Plan,
    UpdateDocument,
)
from pyqueue.telemetry.counting import SAMPLES, ErrorGroup
from pyqueue.telemetry.figures import Figures

#: The suffixes of the collections.
METRICS: Final = "metrics"
ERRORS: Final = "errors"
WORKERS: Final = "workers"
SUFFIXES: Final = (METRICS, ERRORS, WORKERS)

#: The index by which the server deletes documents: its name, its keys and its options.
_INDEX: Final = "expires"
_KEYS: Final = (("expires", 1),)
_OPTIONS: Final[Mapping[str, Any]] = {"expireAfterSeconds": 0}

#: How long an error group is kept after its last error.
_KEPT_ERRORS: Final = timedelta(days=30)
#: The longest error text that is kept, in characters.
_MAX_TEXT: Final = 200
#: The maximum number of workers that are counted. The more workers, the rarer are their flushes.
_MAX_WORKERS: Final = 5000

Upsert = tuple[Filter, UpdateDocument]


class Span(NamedTuple):
    """A length of time for which each queue has a document."""

    letter: str
    #: The format of the beginning of the time. It puts the ids of documents in chronological order.
    format: str
    length: timedelta
    kept: timedelta

    def start(self, instant: datetime) -> datetime:
        """Return the beginning of the minute or hour that contains an instant."""
        whole = instant.replace(second=0, microsecond=0)
        return whole if self.length < timedelta(hours=1) else whole.replace(minute=0)

    def id(self, start: datetime, queue: str) -> str:
        """Return the id of a queue's document for the time that begins at ``start``."""
        return f"{self.letter}{start.strftime(self.format)} {queue}"


MINUTE: Final = Span("m", "%Y%m%d%H%M", timedelta(minutes=1), timedelta(hours=24))
HOUR: Final = Span("h", "%Y%m%d%H", timedelta(hours=1), timedelta(days=30))
#: The sums of all time. They are deleted once a queue was not used for as long as hours are kept.
#: A scraper needs numbers that never fall.
TOTAL: Final = Span("t", "", timedelta(hours=1), HOUR.kept)


def escaped(target: str) -> str:
    """Return the name of a queue as a name of a field, which cannot contain a dot."""
    return target.replace(".", "%2E")


def unescaped(name: str) -> str:
    """Return the queue that a field is named after."""
    return name.replace("%2E", ".")


def metrics(figures: Mapping[str, Figures], now: datetime) -> Iterator[Upsert]:
    """Yield the upserts that add figures to the documents of this minute, hour and all time."""
    for queue, each in figures.items():
        added = _added(each)
        for span in (MINUTE, HOUR, TOTAL):
            start = span.start(now)
            fields: dict[str, Any] = {"q": queue}
            if span is not TOTAL:
                fields["at"] = start
            update = {
                "$inc": added,
                "$setOnInsert": fields,
                "$max": {"expires": start + span.length + span.kept},
            }
            yield {"_id": span.id(start, queue)}, update


def _added(figures: Figures) -> dict[str, float]:
    """Return the numbers to add to a document, keyed by field."""
    added: dict[str, float] = dict(figures.counts)
    for target, number in figures.moved.items():
        added[f"to.{escaped(target)}"] = number
    for name, histogram in figures.times.items():
        numbers = {f"{name}.{place}": each for place, each in enumerate(histogram.numbers) if each}
        if numbers:
            added |= numbers
            added[f"{name}.sum"] = histogram.seconds
    return added


def errors(groups: Mapping[tuple[str, str], ErrorGroup], now: datetime) -> Iterator[Upsert]:
    """Yield the upserts that add failed tries to the documents of their error groups."""
    for (fp, queue), group in groups.items():
        error = group.error
        if error is None:
            continue
        shown = {"type": error.type, "where": error.where, "message": error.message[:_MAX_TEXT]}
        yield (
            {"_id": f"{fp} {queue}"},
            {
                "$inc": {"tries": group.tries, "dead": group.dead},
                "$set": shown,
                "$setOnInsert": {"fp": fp, "q": queue, "first": now},
                "$max": {"last": now, "expires": now + _KEPT_ERRORS},
                "$push": {"ids": {"$each": group.ids, "$slice": -SAMPLES}},
            },
        )


def write(
    prepared: set[str], writes: Mapping[str, Sequence[Upsert]], ended: Sequence[str] = ()
) -> Plan[None]:
    """Write documents, and delete the documents of workers that have ended.

    Args:
        prepared: The suffixes of collections whose index exists. New suffixes are added here.
        writes: The upserts, keyed by the suffix of the collection.
        ended: The ids of the workers that have ended.
    """
    for suffix, upserts in writes.items():
        if upserts:
            yield from _prepare(prepared, suffix)
            yield from aside(suffix, UpsertEach(upserts))
    if ended:
        yield from aside(WORKERS, Delete({"_id": {"$in": list(ended)}}, many=True))


def _prepare(prepared: set[str], suffix: str) -> Plan[None]:
    """Create the index of a collection, unless this client knows that it exists."""
    if suffix in prepared:
        return
    if _INDEX not in (yield from aside(suffix, Indexes())):
        yield from aside(suffix, CreateIndex(_INDEX, _KEYS, _OPTIONS))
    prepared.add(suffix)


def live_workers(now: datetime) -> Plan[int]:
    """Return how many workers and pipelines are running."""
    recent = {"beat": {"$gte": now - timedelta(minutes=1)}}
    return (yield from aside(WORKERS, Count(recent, hint="_id_", cap=_MAX_WORKERS)))
