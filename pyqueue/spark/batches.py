"""The batches of a Spark stage: claimed, transformed by Spark, and settled by the driver.

The queue is the checkpoint. A claim outlives the process that made it, and each message leaves the
claim in one atomic step: by a move into the next queue, or by a commit. So whenever a
process is killed, the next process finds exactly the remaining messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Unpack

from pyspark.sql import DataFrame, SparkSession

from pyqueue import arguments
from pyqueue.backends.claims.admitting import MAX_CLAIM
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import (
    ConfigurationError,
    Fenced,
    LeaseLost,
    Occupied,
    QueueClosed,
    Unavailable,
)
from pyqueue.messages import BatchOptions, Id
from pyqueue.requests import Plan, ServerTime
from pyqueue.runtime.connecting import Connection
from pyqueue.spark.ahead import Ahead, Claimed, Rejected, bury_killer, claimed_now, working
from pyqueue.spark.models import frame, payload_type
from pyqueue.spark.outputs import Held, Output, Report, Route, Tally, Transform
from pyqueue.spark.runners import GroupRunner, members_of
from pyqueue.spark.sinks import TableSink
from pyqueue.spark.told import Told

log = logging.getLogger("pyqueue")

#: The maximum size of a batch in one transaction. A larger one costs more for each message.
MAX_TRANSACTION: Final = 10_000
#: How many jobs may fail in the search for the messages that make a batch fail.
MAX_FAILURES: Final = 40
#: How often a part of a batch is transformed at most. If other consumers take messages of the part
#: in the meantime, the part is transformed again.
MAX_ATTEMPTS: Final = 3

#: Returns the DataFrame of the messages with these ids.
FrameOf = Callable[[Sequence[Id]], DataFrame]


class Batches:
    """The work of one group: read one queue, transform its messages, write them to other queues.

    Args:
        connection: The connection of a blocking client.
        route: The queue that is read, and the queues that are written.
        group: The durable name of this consumer.
        transform: A function that takes a DataFrame and returns one; without targets it returns
            nothing. None passes all rows on unchanged.
        options: The output, the maximum size of a batch, and the number of members.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        connection: Connection,
        route: Route,
        group: str,
        transform: Transform | None,
        **options: Unpack[BatchOptions],
    ) -> None:
        source, output, members = route.source, options["output"], options["members"]
        max_messages = options["max_messages"]
        self.output = Output(connection, route, transform, output)
        most = MAX_TRANSACTION if output == "transaction" else MAX_CLAIM
        if arguments.count("max_messages", max_messages) > most:
            raise ConfigurationError(
                f'max_messages: {max_messages} is too large; with output="{output}", '
                f"use at most {most}"
            )
        payload_type(source.codec.model)
        self._sink = None
        if not route.targets:
            self._sink = TableSink(connection, source, transform, output, max_messages)
        if self._sink is not None and self._sink.takes_number and members != 1:
            raise ConfigurationError(
                "members: each member numbers its claims from 1, so rows written by claim number "
                "would overwrite those of another member; leave out members, or do not use the "
                "number of the claim"
            )
        self._connection = connection
        self.run = connection.run
        self.source = source
        self.told = Told(connection, source)
        self._runner = GroupRunner(
            connection, members_of(source, group, members), source.options.lease, source.terms.owner
        )
        self._limit = max_messages
        self._ahead = Ahead(connection)
        #: Whether another process ran the group at the last ``step``.
        self.stands_by = False

    @property
    def claims(self) -> NamedClaims:
        """The plans (command sequences) of the group, or of the member that this process runs."""
        return self._runner.claims

    def step(self, session: Callable[[], SparkSession]) -> tuple[Report | None, float]:
        """Work on one batch, as ``run_once`` does, and claim the next one in the meantime.

        Args:
            session: Returns the Spark session.

        Returns:
            The outcome, or None if another process runs the group or took it over; and how many
            seconds to wait before the next step.
        """
        try:
            report = self.run_once(session, ahead=True)
        except Occupied as other:
            if not self.stands_by:
                log.info("%s", other)
            self.stands_by = True
            return None, other.wait_s
        except Fenced as error:
            log.warning("%s", error)
            return None, 0.0
        self.stands_by = False
        return report, 0.0

    def run_once(self, session: Callable[[], SparkSession], *, ahead: bool = False) -> Report:
        """Work on one batch. This process then runs the group until ``release`` is called.

        See ``SparkStage.run_once``.

        Args:
            session: Returns the Spark session. It is called only if there is something to do.
            ahead: Whether to claim the next batch during the work on this one, if this one is
                full. The next call works on that batch; ``release`` returns it to the queue.

        Raises:
            Occupied: Another process runs the group.
            Fenced: Another process took the group over.
        """
        began = time.monotonic()
        try:
            report = self._run_once(session, ahead=ahead)
        except (Fenced, QueueClosed, Unavailable) as error:
            # Another runner has the batch, or it stays claimed for the next call.
            self._ahead.forget()
            self._runner.drop(fenced=isinstance(error, Fenced) and not isinstance(error, Occupied))
            raise
        except BaseException:
            self._ahead.give_back(self.source.release)
            raise
        return replace(report, seconds=time.monotonic() - began)

    def release(self) -> None:
        """Let another process run the group at once. Release the messages claimed in advance."""
        self._ahead.give_back(self.source.release)
        self._ahead.close()
        self._runner.release()
        self.stands_by = False

    def has_work(self) -> bool:
        """Return whether messages are outstanding, or ready in a queue that is not paused."""
        return self.run(self.claims.has_work())

    def has_ready(self) -> bool:
        """Return whether a message is ready."""
        return self.run(_has_ready(self.source))

    def _run_once(self, session: Callable[[], SparkSession], *, ahead: bool) -> Report:
        began = time.monotonic()
        claimed = self._ahead.take()
        if claimed is None or not claimed.held or claimed.token != self._runner.token:
            # A process that runs the group checks before it claims. An idle check writes nothing.
            if self._runner.token is not None and not self.has_work():
                return Report()
            token = self._runner.take()
            if self._sink is not None:
                return self._sink.run_once(self.claims, token, session)
            claimed = self.run(claimed_now(self.claims, token, self._limit))
        if not claimed.held:
            return Report()
        self.told.received(claimed.held.values(), began)
        token, upto, documents = claimed.token, claimed.upto, claimed.documents
        batch, model = Batch(self, claimed), self.source.codec.model
        with working(self._connection, self.claims, claimed):
            if ahead and batch.is_new and len(documents) >= self._limit:
                self._ahead.begin(self.claims, token, upto, self._limit)
            batch.work(
                lambda part: frame(
                    session(), [documents[id] for id in part if id in documents], model
                )
            )
        self.run(self.claims.acknowledge(token, upto))
        return batch.report()

    def foreach_batch(self, df: DataFrame) -> None:
        """Work on a batch from a streaming query that reads the stage's source for the same group.

        See ``SparkStage.foreach_batch``.
        """
        if self._sink is not None:
            raise ConfigurationError(
                "to: a stage without a target claims its messages itself, so it cannot settle the "
                "batch of a streaming query; set a target, or write the table in your own "
                "foreachBatch"
            )
        if self.claims.member is not None:
            raise ConfigurationError(
                "members: a stage with members cannot settle the batches of a streaming query, "
                "which chooses its member itself; leave out members in the stage and in the query, "
                "and use a different group for each query"
            )
        began = time.monotonic()
        progress = self.run(self.claims.progress())
        token, upto = progress.token, progress.claimed
        self.run(self.claims.begin_work(token, upto))
        batch = Batch(self, Claimed(token, 0, upto, {}, {}, read_at=0.0), streams=True)
        batch.refresh()
        if not batch.held:
            if df.isEmpty():
                return  # the batch was done before
            raise ConfigurationError(
                f"foreach_batch: group {self.claims.group!r} of queue {self.source.queue!r} has "
                "nothing claimed; the streaming query must read that queue for that group, with "
                "the data source pyqueue"
            )
        self.told.received(batch.held.values(), began)
        batch.work(
            lambda part: (
                df.where(df["id"].isin([str(id) for id in part]))
                if len(part) < len(batch.held)
                else df
            )
        )


def _has_ready(source: QueuePlans) -> Plan[bool]:
    first = yield from source.next_when()
    return first is not None and first <= (yield from ServerTime())


class Batch:
    """The messages that a group has claimed, and the work on them.

    Args:
        batches: The work of the group.
        claimed: The claim with the messages.
        streams: Whether a streaming query read the batch, so that its documents are not known.
    """

    def __init__(self, batches: Batches, claimed: Claimed, *, streams: bool = False) -> None:
        self._batches, self._claimed, self._streams = batches, claimed, streams
        self._run, self._source = batches.run, batches.source
        #: The stored payloads, as far as they are known.
        self.payloads = {id: each.get("payload") for id, each in claimed.documents.items()}
        self._tally = Tally()
        self._buried = 0
        #: The messages that were not tried alone, because too many jobs failed before.
        self._untried: list[Id] = []
        self._failures_left = MAX_FAILURES
        self._first_error: Exception | None = None
        #: The messages that are held, and when they were read.
        self.held: Held = claimed.held
        self._refreshed_at = claimed.read_at

    @property
    def is_new(self) -> bool:
        """Whether the batch contains messages that were not tried before."""
        return min((each.tries for each in self.held.values()), default=1) == 1

    def refresh(self) -> None:
        """Read which messages the group still holds, and until when."""
        # A streaming query leaves out bad records, and buries them itself.
        claimed, claims = self._claimed, self._batches.claims
        found = self._run(
            claims.reservations(claimed.token, claimed.after, claimed.upto, noted=False)
        )
        self.held = {each.id: each for each in found}
        self._refreshed_at = time.monotonic()

    def work(self, frame_of: FrameOf) -> None:
        """Transform and settle the batch; roll back the messages that make the transform fail.

        Raises:
            Exception: The transform's first error, if it failed on every message of the batch and
                the batch contains messages that had not failed before.
        """
        all_failed_before = all(each.error is not None for each in self.held.values())
        tried = 0
        for part in self._parts():
            self._attempt(part, frame_of)
            tried += len(part)
        failed = len(self._tally.failed) + len(self._untried)
        if self._first_error is not None and failed == tried > 1 and not all_failed_before:
            raise self._first_error
        if tried and failed:
            self._roll_back()

    def _parts(self) -> Iterator[Sequence[Id]]:
        """Divide the batch into parts, and yield one after another.

        A batch that is tried for the first time is one part. A batch that was tried before may
        contain a message that kills the process, so each try doubles the number of parts. Each
        part gets a number before the work on it begins. After a crash, the messages of the part
        with the highest number are suspects, which are tried last. If there is only one suspect,
        and it has no try left, it is buried.
        """
        ids = list(self.held)
        if self.is_new:
            yield ids
            return
        tries = min(each.tries for each in self.held.values())
        claims, token = self._batches.claims, self._claimed.token
        marks = self._run(claims.marks(token, self._claimed.upto))
        number = max(marks.values(), default=0)
        groups: dict[int, list[Id]] = {}
        for id in ids:
            groups.setdefault(marks.get(id, 0), []).append(id)
        suspects = groups.get(number, []) if number else []
        if len(suspects) == 1 and self._run(bury_killer(self._source, self.held[suspects[0]])):
            self._buried += 1
            del groups[number]
        for _, group in sorted(groups.items()):
            pieces = min(len(group), 2 ** min(tries - 1, 20))
            for piece in range(pieces):
                part = group[len(group) * piece // pieces : len(group) * (piece + 1) // pieces]
                number += 1
                self._run(claims.mark(token, part, number))
                yield part

    def _attempt(self, part: Sequence[Id], frame_of: FrameOf) -> None:
        """Transform and settle a part. If that fails, transform and settle each of its halves."""
        if self._failures_left <= 0:
            self._untried += part
            return
        try:
            self._settle(part, frame_of)
        except (QueueClosed, Fenced, Unavailable, ConfigurationError):
            raise
        except Exception as error:
            self._failures_left -= 1
            self._first_error = self._first_error or error
            if len(part) == 1:
                text = "message %s of queue %r makes the batch fail: %s"
                log.warning(text, part[0], self._source.queue, str(error)[:500])
                self._tally.failed.append((part[0], error))
                return
            middle = len(part) // 2
            self._attempt(part[:middle], frame_of)
            self._attempt(part[middle:], frame_of)

    def _settle(self, part: Sequence[Id], frame_of: FrameOf) -> None:
        """Transform a part and settle it. Lost messages are counted only if the part succeeds."""
        size, tally, output = len(part), self._tally, self._batches.output
        for _ in range(MAX_ATTEMPTS):
            part = [id for id in part if id in self.held]
            if not part:
                tally.lost += size
                return
            rows = output.transformed(frame_of(part))
            if output.moves:
                output.check_ids(part, rows)
            age_s = time.monotonic() - self._refreshed_at
            if self._streams or age_s > self._source.options.lease / 4:
                self.refresh()
            held = {id: self.held[id] for id in part if id in self.held}
            if output.moves:
                here = {str(id) for id in held}
                output.move(held, [row for row in rows if row.id in here], self.payloads, tally)
                tally.lost += size - len(held)
                return
            # If messages were lost, the rows must be made anew from the remaining messages.
            if len(held) == len(part):
                try:
                    output.transact(held, rows)
                except LeaseLost:
                    self.refresh()
                else:
                    tally.written += len(rows)
                    tally.lost += size - len(part)
                    return
        raise Rejected(
            f"other consumers took messages of a part of the batch {MAX_ATTEMPTS} times; set a "
            "longer lease, so that no lease ends before the part is settled"
        )

    def _roll_back(self) -> None:
        self.refresh()
        source, told = self._source, self._batches.told
        for id, error in self._tally.failed:
            if id in self.held:
                with suppress(LeaseLost):
                    plan = source.rollback((self.held[id],), error=error)
                    self._run(told.settling("rollback", (self.held[id],), plan))
        untried = tuple(self.held[id] for id in self._untried if id in self.held)
        with suppress(LeaseLost):
            self._run(told.settling("release", untried, source.release(untried)))

    def report(self) -> Report:
        """Return the outcome of the batch."""
        tally = self._tally
        failed = len(tally.failed) + len(self._untried) + self._buried
        claimed = len(self._claimed.documents)
        return Report(claimed, tally.written, tally.dropped, failed, tally.lost)
