"""Acknowledge the last batch of a streaming query, and count the work of a session's queries.

Spark tells a source that a batch is committed only when it asks for the next batch. After the last
batch of a query it does not ask again, so a listener has to acknowledge that batch.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from pyqueue.errors import Fenced, QueueError
from pyqueue.spark.offsets import Offset

log = logging.getLogger("pyqueue")

#: How long the listener waits for a query to acknowledge a batch itself, in seconds.
HEAD_START_S: Final = 0.2
#: The maximum number of sources whose figures are kept. The oldest source is dropped first.
MAX_QUERIES: Final = 1000
#: The name of the error in the text of an exception that ended a query.
_FENCED: Final = f"{Fenced.__module__}.{Fenced.__qualname__}"

#: The id of a query, the name of a queue, and the name of a group.
Source = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class SourceNumbers:
    """The figures of a query for one of the queues that it reads.

    ``buried`` and ``lost`` count from the first run of the group; the other figures count from the
    start of the session. ``buried`` and ``lost`` stay 0 if the listener does not know the server's
    address.
    """

    #: The queue that the query reads.
    queue: str
    #: The group of the query.
    group: str
    #: The rows that Spark has read.
    rows: int = 0
    #: The number of the last claim that Spark has committed.
    claim: int = 0
    #: The number of messages that were ready after the last batch, up to 100 000, or None before
    #: the first count. While many messages are ready, there is at most one count in 10 seconds.
    ready: int | None = None
    #: The age of the oldest ready message, in seconds, or None if no message is ready.
    oldest_age: float | None = None
    #: The bad records that were buried.
    buried: int = 0
    #: The messages whose lease ran out, and that other consumers claimed, before the query
    #: acknowledged them. They may have been processed twice.
    lost: int = 0
    #: How many times another runner took the group over from this query.
    fenced: int = 0


class QueueProgressListener(StreamingQueryListener):
    """A listener that finishes the messages of streaming reads once Spark has committed them.

    ``register`` and ``spark_session`` add this listener, and ``register`` returns it. Even
    without it, no message is lost or delivered twice, but the last batch of a stopped query stays
    reserved until the query starts again.

    The listener needs the server's address. It cannot act for a source whose ``uri`` contains a
    password: use ``uriEnv`` there.

    ``queries`` has the figures of each query. Spark's listener thread never waits for the server: a
    thread of this object does all I/O, and ends when it has nothing to do.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()
        self._numbers: dict[Source, SourceNumbers] = {}
        #: The last token of each source, and its last token that was fenced.
        self._tokens: dict[Source, str] = {}
        self._fenced: dict[Source, str] = {}
        #: The offset of each source that is to be acknowledged.
        self._pending: dict[Source, Offset] = {}
        self._hurry = False
        self._thread: threading.Thread | None = None

    @property
    def queries(self) -> Mapping[str, list[SourceNumbers]]:
        """The figures of the queries that read queues, keyed by the id of the query.

        A query has one entry for each queue and group that it reads.
        """
        queries: dict[str, list[SourceNumbers]] = {}
        with self._changed:
            for (query, *_), numbers in self._numbers.items():
                queries.setdefault(query, []).append(numbers)
        return queries

    def onQueryStarted(self, event: QueryStartedEvent) -> None:
        """Do nothing."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:
        """Finish the messages of the batch that was committed, and record the figures."""
        for source in event.progress.sources:
            fields = _document(source.endOffset)
            if not {"n", "token", "queue", "group", "namespace"} <= fields.keys():
                continue  # another kind of source
            key = (str(event.progress.id), fields["queue"], fields["group"])
            offset = None
            try:
                offset = Offset.parse(fields)
            except QueueError as error:
                log.info("the last batch stays reserved until the next batch starts: %s", error)
            with self._changed:
                self._take_in(key, fields["n"], fields["token"], source)
                if offset is not None:
                    self._pending[key] = offset
                    self._start()

    def onQueryIdle(self, event: QueryIdleEvent) -> None:
        """Do nothing."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:
        """Finish the committed batches at once, because the query will not do that itself."""
        with self._changed:
            if event.exception is not None and _FENCED in event.exception:
                for key, token in self._tokens.items():
                    if key[0] == str(event.id):
                        self._count_fenced(key, token)
            self._hurry = bool(self._pending)
            self._changed.notify_all()

    def _take_in(self, key: Source, n: int, token: str, source: Any) -> None:
        known = self._numbers.get(key) or SourceNumbers(*key[1:])
        latest = _document(source.latestOffset)
        self._tokens[key] = token
        self._numbers[key] = replace(
            known,
            rows=known.rows + source.numInputRows,
            claim=n,
            ready=latest.get("ready", known.ready),
            oldest_age=latest.get("oldestAgeSeconds"),
        )
        while len(self._numbers) > MAX_QUERIES:
            oldest = next(iter(self._numbers))
            del self._numbers[oldest], self._tokens[oldest]
            self._fenced.pop(oldest, None)

    def _count_fenced(self, key: Source, token: str) -> None:
        if self._fenced.get(key) != token and key in self._numbers:
            self._fenced[key] = token
            known = self._numbers[key]
            self._numbers[key] = replace(known, fenced=known.fenced + 1)

    # ---- the thread

    def _start(self) -> None:
        if self._thread is not None:
            return
        # Not a daemon: the interpreter waits for it at exit, so it finishes pending work.
        self._thread = threading.Thread(target=self._run, name="pyqueue-listener")
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter is ending
            self._thread = None
            log.info("the last batch stays reserved until the next batch starts: %s", error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._hurry, HEAD_START_S)
                self._hurry = False
                pending, self._pending = self._pending, {}
                if not pending:
                    self._thread = None
                    return
            for key, offset in pending.items():
                self._acknowledge(key, offset)

    def _acknowledge(self, key: Source, offset: Offset) -> None:
        try:
            progress = offset.acknowledge()
        except Exception as error:  # this thread has to serve the other queries
            log.info("the last batch stays reserved until the next batch starts: %s", error)
            if isinstance(error, Fenced):
                with self._changed:
                    self._count_fenced(key, offset.token)
            return
        with self._changed:
            if key in self._numbers:
                self._numbers[key] = replace(
                    self._numbers[key], buried=progress.buried, lost=progress.lost
                )


def _document(text: str | None) -> dict[str, Any]:
    """Return the offset that Spark shows as ``text``, or {} if the text is not a JSON object."""
    try:
        found = json.loads(text or "null")
    except ValueError:  # Spark shows a missing offset as "None"
        found = None
    return found if isinstance(found, dict) else {}
