"""The reader of streaming queries on queues, which claims messages. It needs Spark 4.2."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import DataType

from pyqueue.backends.claims.admitting import MAX_CLAIM
from pyqueue.backends.claims.claims import ClaimRange, NamedClaims, divided
from pyqueue.backends.contents import backlog
from pyqueue.backends.reading import due_in
from pyqueue.concurrently import concurrently
from pyqueue.errors import ConfigurationError, Fenced, Unavailable
from pyqueue.messages import Id
from pyqueue.requests import Plan, ServerTime
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark.addresses import client_of
from pyqueue.spark.idle import IdleReader
from pyqueue.spark.offsets import Offset, after_of, lineage_of
from pyqueue.spark.options import CHUNK, Options
from pyqueue.spark.rows import decoded, rows_of
from pyqueue.spark.runners import StreamRunner, members_of

log = logging.getLogger("pyqueue")

#: How often a streaming query counts the ready messages, in seconds, and the limit of the count.
BACKLOG_INTERVAL_S: Final = 10.0
MAX_BACKLOG: Final = 100_000


@dataclass
class _ClaimPartition(InputPartition):
    member: int | None
    range: ClaimRange


class StreamReader(IdleReader):
    """Claims batches for a group. The offset is the number of a claim.

    The process that plans the query runs the group and renews the outstanding claims. Executors
    read parts of the claims. While another process runs the group, the query stands by: it gets no
    new messages.

    A restarted query continues the claims in its checkpoint, as its lineage says (see ``Offset``).
    If another query ran the group in between, the claims in the checkpoint no longer belong to this
    query. Their outstanding messages become part of the next batch; none of them counts as
    processed.
    """

    def __init__(self, options: Options, payload: DataType | None) -> None:
        if options.group is None:
            raise ConfigurationError(
                'group: set the durable name of this consumer with .option("group", "...")'
            )
        super().__init__(options)
        #: The offset of a query that has committed no batch.
        self._first = Offset(0, "", options.queue, options.group, options.address)
        self._payload = payload
        self._runner: StreamRunner | None = None
        self._since: datetime | None = None
        #: The numbers of the last acknowledged claim and of the last claim that this runner knows.
        self._acknowledged = self._claimed = 0
        #: When this runner made its last claim, by the monotonic clock.
        self._claimed_at = -math.inf
        #: The claims of the last batch, and how many messages each of its documents has.
        self._batch: tuple[int, int, Mapping[Id, int]] = (0, 0, {})
        #: Whether the queue exists, and whether a warning has said that it does not.
        self._is_there = self._warned = False
        #: The number of ready messages and the age of the oldest, and when to count again, or None
        #: not to count, because no message is ready.
        self._backlog: tuple[int, float | None] = (0, None)
        self._count_at: float | None = -math.inf

    def _take(self, offset: Mapping[str, Any]) -> tuple[StreamRunner, str | None]:
        """Return the runner and its token, or None as the token if the query must stand by.

        Args:
            offset: The last offset in the checkpoint.
        """
        options = self._options
        if self._runner is None:
            members = members_of(options.claims().backend, self._first.group, options.members)
            connection = runner_of(client_of(options.address))
            self._runner = StreamRunner(connection, members, options.lease)
        runner, known = self._runner, lineage_of(offset) or None
        new = runner.token is None
        token = runner.take_for(known, wait=self._since is not None)
        if new and token is not None:
            progress = runner.progress
            self._acknowledged, self._claimed = progress.acknowledged, progress.claimed
            self._batch = (0, 0, {})
        return runner, token

    def _recorded(self, runner: StreamRunner) -> NamedClaims:
        return replace(self._first, member=runner.claims.member).claims()

    def initialOffset(self) -> dict[str, Any]:
        """Return the first offset of a query that has committed no batch.

        Spark also calls this before it repeats the first batch after a crash. Only the offset of
        that batch, which Spark passes later, shows whose work the query continues. So this method
        does not take the group over.
        """
        self._exists()  # a server that does not answer ends the query here
        return self._first.to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        """Limit the query to the messages that are ready now."""
        self._since = self._options.run(_server_time())

    def _hurries(self, start: dict[str, Any]) -> bool:
        return self._since is not None

    def _next(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Finish the batch that Spark has committed, and claim the next one."""
        if not self._exists():
            self._idle.rest(math.inf)
            return start
        runner, token = self._take(start)
        if token is None:
            self._idle.rest(math.inf)
            return start
        try:
            return self._claim(runner, token, start, limit)
        except Fenced as error:
            runner.drop(fenced=True)
            if self._since is not None:
                raise
            log.warning("%s", error)
            return start

    def _exists(self) -> bool:
        """Return whether the queue exists. If not, its kind is unknown, and nothing is claimed."""
        if self._is_there:
            return True
        options = self._options
        self._is_there = bool(options.source_kind())
        if not self._is_there and not self._warned:
            self._warned = True
            text = "there is no queue %r in namespace %r: this query waits for it"
            log.warning(text, options.queue, options.address.namespace)
        return self._is_there

    def _claim(
        self, runner: StreamRunner, token: str, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        options, run = self._options, self._options.run
        # Spark has committed everything up to ``start``.
        done = start["n"] if lineage_of(start) == runner.lineage else 0
        after = max(done, self._acknowledged)
        # If this is more, a former process claimed it and died before Spark logged the offset.
        if self._claimed > after:
            self._acknowledge(runner, token, done)
        else:
            wait_s = 0.0 if self._since is not None else self._until_claim()
            if wait_s > 0:
                self._acknowledge(runner, token, done)
                run(runner.claims.progress(token))  # another runner ends this one
                self._idle.rest(wait_s)
                return start
            most = limit.max_rows if isinstance(limit, ReadMaxRows) else MAX_CLAIM
            claim = self._recorded(runner).claim(
                token, most, options.lease, since=self._since, max_bytes=options.batch.max_bytes
            )
            n = self._acknowledge(runner, token, done, claim)
            if n is None:  # the queue is paused, or other consumers were faster
                self._count_at = self._count_at or -math.inf
                self._idle.rest(math.inf)
                return start
            self._claimed, self._claimed_at = n, time.monotonic()
            if self._count_at is None or sum(self._held(runner, token, after, n).values()) < most:
                # Few messages are ready, so counting costs little, or the batch has many bytes.
                self._count_at = -math.inf
        return replace(
            self._first,
            n=self._claimed,
            token=token,
            member=runner.claims.member,
            after=after,
            lineage=runner.lineage or "",
            count=sum(self._held(runner, token, after, self._claimed).values()),
        ).to_json()

    def _until_claim(self) -> float:
        """Return the seconds to wait before the next claim, if no signal comes earlier."""
        options, run = self._options, self._options.run
        due_s = run(due_in(options.queue))
        if due_s > 0:
            self._count_at, self._backlog = None, (0, None)
            return due_s
        left_s = self._claimed_at + options.batch.max_delay - time.monotonic()
        if options.batch.min_messages == 1 or left_s <= 0:
            return 0.0
        kind = options.claims().backend.kind
        ready, _ = run(backlog(options.queue, kind, options.batch.min_messages))
        return 0.0 if ready >= options.batch.min_messages else left_s

    def _held(self, runner: StreamRunner, token: str, after: int, upto: int) -> Mapping[Id, int]:
        """Return the number of messages in each document of a batch, keyed by document id.

        The result is kept, because Spark asks first for the end of a batch, and then for its parts.
        """
        if self._batch[:2] != (after, upto):
            sizes = self._options.run(runner.claims.sizes(token, after, upto))
            self._batch = after, upto, sizes
        return self._batch[2]

    def reportLatestOffset(self) -> dict[str, Any]:
        """Return the last claim's number, the count of ready messages, and the age of the first."""
        if self._count_at is not None and time.monotonic() >= self._count_at:
            options = self._options
            with suppress(Unavailable):  # a missing count must not end the query
                if self._exists():
                    kind = options.claims().backend.kind
                    self._backlog = options.run(backlog(options.queue, kind, MAX_BACKLOG))
            self._count_at = time.monotonic() + BACKLOG_INTERVAL_S
        ready, age_s = self._backlog
        return {"n": self._claimed, "ready": ready, "oldestAgeSeconds": age_s}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Divide the claims of a batch among tasks.

        Raises:
            Fenced: Another query has taken the group over since this one claimed the batch.
        """
        runner, token = self._take(end)
        if lineage_of(end) != runner.lineage:
            if lineage_of(end) not in runner.lineages:
                # Another query took the group over before this restart. It delivers the messages.
                return []
            token = None
        token, after, upto = token or "", after_of(start, end), end["n"]
        held = self._held(runner, token, after, upto) if token else {}
        if not held:
            self._options.run(runner.claims.progress(token))  # after a takeover they are missing
        return [
            _ClaimPartition(runner.claims.member, ClaimRange(token, after, upto, ranges))
            for ranges in divided(held, self._options.partitions)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read the messages in a part of a batch, and note the bad records among them."""
        assert isinstance(partition, _ClaimPartition)
        part, run, claims = (
            partition.range,
            self._options.run,
            self._options.claims(partition.member),
        )
        found = claims.contents.encoded(run(claims.read(part, encoded=True)))
        for start in range(0, len(found), CHUNK):
            some = found[start : start + CHUNK]
            rows, bad = rows_of(self._options, some, self._payload, "bury")
            # An earlier reader may have read the same batch as another type.
            maybe = decoded([each for each in some if b"\x02bad\0" in each])
            noted = dict.fromkeys(each["_id"] for each in maybe if "bad" in each.get("claim", ()))
            if bad or noted:
                run(claims.note_bad(part.token, part.upto, noted | bad))
            yield rows

    def commit(self, end: dict[str, Any]) -> None:
        """Finish a batch that Spark has committed."""
        runner, token = self._take(end)
        if token is None or lineage_of(end) != runner.lineage:
            return
        with suppress(Fenced):  # ``partitions`` raises it if there is a batch
            self._acknowledge(runner, token, end["n"])

    def _acknowledge(
        self, runner: StreamRunner, token: str, n: int, claim: Plan[int | None] | None = None
    ) -> int | None:
        """Acknowledge the claims up to ``n``, and make the next claim at the same time.

        The next claim does not wait for the acknowledgement. If the acknowledgement fails, the next
        runner takes over all of these claims.

        Returns:
            The number of the next claim, or None if there is none.
        """
        plans = [] if claim is None else [claim]
        if n > self._acknowledged:
            _, upto, sizes = self._batch
            held = sum(sizes.values()) if upto == n else None
            plans.append(self._recorded(runner).acknowledge(token, n, held))
        results = self._options.run(concurrently(plans))
        self._acknowledged, self._claimed = max(n, self._acknowledged), max(n, self._claimed)
        return None if claim is None else results[0]

    def stop(self) -> None:
        """Stop renewing leases and listening for signals.

        The runner's lease lasts some seconds longer, during which the listener acknowledges the
        last batch.
        """
        if self._runner is not None:
            self._runner.drop(fenced=False)
        super().stop()


def _server_time() -> Plan[datetime]:
    now: datetime = yield ServerTime()
    return now
