"""The batches of a Spark stage: claimed, transformed by Spark, and settled by the driver.

The queue is the checkpoint. A claim outlives the process that made it, and each message leaves the
claim in one atomic step: by a move into the next queue, or by a commit. So a process that is killed
at any point is followed by one that finds exactly the messages that are left.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pymongo.errors import PyMongoError
from pyspark.sql import DataFrame, SparkSession

from pyqueue import arguments
from pyqueue.backends.acknowledging import NOTE
from pyqueue.backends.moving import move_each
from pyqueue.backends.named_claims import MAX_CLAIM, NamedClaims
from pyqueue.backends.options import NewMessage
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.staging import append
from pyqueue.connecting import Connection
from pyqueue.errors import (
    ConfigurationError,
    Fenced,
    LeaseLost,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.messages import Id, Reservation
from pyqueue.requests import Plan
from pyqueue.reserved import log_failed_rollback
from pyqueue.server_errors import shown_cause, translated
from pyqueue.spark.frames import Reader, label
from pyqueue.spark.models import frame, payload_type

__all__ = ["Batches", "Report"]

log = logging.getLogger("pyqueue")

#: The largest batch of one transaction. Beyond it a transaction costs more for each message.
MAX_TRANSACTION: Final = 10_000
#: How many failing jobs a batch may cost while the messages that make it fail are searched.
MAX_FAILURES: Final = 40
#: How often a part is transformed anew because some of its messages were lost meanwhile.
MAX_ATTEMPTS: Final = 3

R = TypeVar("R")
Transform = Callable[[DataFrame], DataFrame]
#: Returns the DataFrame of the messages with these ids.
FrameOf = Callable[[Sequence[Id]], DataFrame]
Held = dict[Id, Reservation[Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What happened to one batch."""

    #: The messages that were claimed, or taken over from an earlier claim.
    claimed: int
    #: The messages that were written to the target.
    written: int
    #: With output "move", the messages whose ids the transform left out. They are finished.
    dropped: int
    #: The messages on which the transform failed, which were rolled back or buried; and those that
    #: were released untried, because the transform failed on too many.
    failed: int
    #: The messages whose lease ran out and that have another holder now. They were left alone.
    lost: int
    seconds: float


class Rejected(Exception):
    """A part of a batch failed."""


@dataclass(slots=True)
class Moved:
    """What became of the messages of a part that were to be moved."""

    moved: int
    dropped: int
    lost: int
    #: The messages that the target refused, for example because their key is taken there.
    refused: list[tuple[Id, Exception]]


class Batches:
    """The work of one group: from one queue, through a transform, into another.

    Args:
        connection: The connection of a blocking client.
        source: The queue that is read, with the stage's options.
        target: The queue that is written.
        group: The durable name of this consumer.
        transform: Takes a DataFrame and returns one. None passes everything on unchanged.
        output: "move" or "transaction".
        max_messages: The largest size of a batch.

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        connection: Connection,
        source: QueuePlans,
        target: QueuePlans,
        group: str,
        transform: Transform | None,
        output: str,
        max_messages: int,
    ) -> None:
        arguments.one_of("output", output, ("move", "transaction"))
        most = MAX_TRANSACTION if output == "transaction" else MAX_CLAIM
        if arguments.count("max_messages", max_messages) > most:
            raise ConfigurationError(
                f'max_messages: {max_messages} is too large: with output="{output}" '
                f"give at most {most}"
            )
        if transform is not None and not callable(transform):
            raise ConfigurationError(
                "transform: give a function from DataFrame to DataFrame, "
                f"not {type(transform).__name__}"
            )
        payload_type(source.codec.model)
        self._connection = connection
        self.source = source
        self._target = target
        self.claims = NamedClaims(source, group)
        self._transform: Transform = transform or (lambda df: df)
        self.moves = output == "move"
        self._limit = max_messages

    @property
    def id(self) -> str:
        """The name in log messages."""
        return f"group {self.claims.group!r}"

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""
        return self.source.options.lease

    def run(self, plan: Plan[R]) -> R:
        """Run a plan."""
        return self._connection.run(plan)

    def run_once(self, session: Callable[[], SparkSession]) -> Report:
        """Work on one batch. See ``SparkStage.run_once``.

        Args:
            session: Returns the Spark session. It is called only if there is something to do.
        """
        began = time.monotonic()
        work = self.run(self.claims.has_work())
        begin = self.claims.begin(self._limit, self.lease)
        token, upto, ids = self.run(begin) if work else ("", 0, [])
        if not ids:
            return Report(0, 0, 0, 0, 0, time.monotonic() - began)
        batch, model = Batch(self, token, upto), self.source.codec.model
        documents = {
            each["_id"]: each
            for part in self.run(self.claims.ranges(token, 0, upto, 1))
            for each in self.run(self.claims.read(part))
        }
        renewer = self._connection.renewer
        renewer.add(batch, lambda _: self.run(self.claims.renew(token, self.lease)))
        try:
            # A message that is missing here was taken by another consumer since the claim.
            batch.work(
                lambda part: frame(
                    session(), [documents[id] for id in part if id in documents], model
                )
            )
        except (Fenced, QueueClosed, Unavailable):
            raise  # another runner has the batch, or it stays claimed for the next run
        except BaseException as error:
            try:
                batch.give_back(error)
            except QueueError as failure:  # the first exception matters more
                log_failed_rollback(f"the batch of {self.id}", failure)
            raise
        finally:
            renewer.discard(batch)
        self.run(self.claims.acknowledge(token, upto))
        return batch.report(len(ids), time.monotonic() - began)

    def foreach_batch(self, df: DataFrame) -> None:
        """Work on a batch of a stream that reads the source for the same group.

        See ``SparkStage.foreach_batch``.
        """
        progress = self.run(self.claims.progress())
        self.run(self.claims.begin_work(progress.token, progress.claimed))
        batch = Batch(self, progress.token, progress.claimed, streams=True)
        if not batch.held:
            if df.isEmpty():
                return  # the batch was done before
            raise ConfigurationError(
                f"foreach_batch: group {self.claims.group!r} of queue {self.source.queue!r} has "
                "nothing claimed: the stream must read that queue, by the data source pyqueue, "
                "for that group"
            )
        batch.work(
            lambda part: (
                df.where(df["id"].isin([str(id) for id in part]))
                if len(part) < len(batch.held)
                else df
            )
        )

    # ---- the steps of a batch

    def transformed(self, df: DataFrame) -> list[NewMessage]:
        """Run the transform and collect its rows.

        Raises:
            ConfigurationError: The transform returned something else, or a column is missing.
        """
        out = self._transform(df)
        if not hasattr(out, "toArrow"):
            raise ConfigurationError(
                f"transform: it returned {type(out).__name__}: return a DataFrame"
            )
        reader = Reader(out.schema, "id" if self.moves else None)
        return list(reader.rows(out.toArrow()))

    def check_ids(self, part: Sequence[Id], rows: Sequence[NewMessage]) -> None:
        """Refuse rows that cannot be moved.

        Raises:
            ConfigurationError: An id occurs twice, or is not in the batch.
        """
        known, seen = {str(id) for id in part}, set()
        for row in rows:
            if row.id not in known:
                raise ConfigurationError(
                    f"transform: it returned the id {row.id!r}, which is not in the batch; "
                    'output="transaction" makes new messages'
                )
            if row.id in seen:
                raise ConfigurationError(
                    f"transform: it returned the id {row.id!r} twice; "
                    'output="transaction" makes several messages of one'
                )
            seen.add(row.id)

    def move(self, held: Held, rows: Sequence[NewMessage]) -> Moved:
        """Move each message that has a row, and commit all other messages."""
        by_id = {str(id): each for id, each in held.items()}
        pairs = {
            str(row.id): (by_id[str(row.id)], _changed(by_id[str(row.id)], row)) for row in rows
        }
        result = Moved(0, 0, 0, [])
        for each, outcome in self.run(
            move_each(
                self.source.queue, self.source.kind, self._target.target, list(pairs.values())
            )
        ):
            if isinstance(outcome, Unavailable):
                raise outcome
            if isinstance(outcome, QueueError):
                result.refused.append((each.id, outcome))
            elif outcome == "done":
                result.moved += 1
            else:
                result.lost += 1
        absent = tuple(each for id, each in by_id.items() if id not in pairs)
        gone = 0
        try:
            self.run(self.source.commit(absent))
        except LeaseLost as error:
            gone = len(error.lost) + len(error.unknown)
        result.dropped = len(absent) - gone
        result.lost += gone
        return result

    def transact(self, held: Held, rows: Iterable[NewMessage]) -> None:
        """Write the rows and commit the messages, in one transaction.

        Raises:
            LeaseLost: Some messages have another holder now. Nothing was written.
        """
        new = [row._replace(id=None) for row in rows]

        def work(session: Any) -> None:
            self.run(append(self._target.target, new, session=session))
            self.run(self.source.commit(tuple(held.values()), session=session))

        try:
            self._connection.run_transaction(work)
        except PyMongoError as error:
            meant = translated(error)
            raise meant from shown_cause(error, meant)


def _changed(held: Reservation[Any], row: NewMessage) -> NewMessage:
    """Return the row with only those headers that the transform changed.

    In a DataFrame all headers are strings. A header that was not changed keeps its stored type.
    """
    before = {name: label(value) for name, value in held.headers.items()}
    headers = {
        name: text
        for name, text in (row.headers or {}).items()
        if name not in before or text != before[name]
    }
    return row._replace(headers=headers)


class Batch:
    """The messages that a group has claimed, and the work on them."""

    def __init__(self, batches: Batches, token: str, upto: int, *, streams: bool = False) -> None:
        self._batches = batches
        self._token, self._upto, self._streams = token, upto, streams
        self.held: Held = {}
        self._written = self._dropped = self._lost = self._buried = 0
        self._failed: list[tuple[Id, Exception]] = []
        #: The messages that were not tried by themselves, because too many jobs failed before.
        self._untried: list[Id] = []
        self._failures_left = MAX_FAILURES
        self._first_error: Exception | None = None
        self._refreshed_at = 0.0
        self._refresh()

    @property
    def id(self) -> str:
        """The name in log messages."""
        return self._batches.id

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""
        return self._batches.lease

    def _run(self, plan: Plan[R]) -> R:
        return self._batches.run(plan)

    def _refresh(self) -> None:
        """Read which messages are held, and until when."""
        fit = {NOTE: {"$exists": False}}  # a stream leaves bad records out, and buries them
        found = self._run(self._batches.claims.reservations(self._token, 0, self._upto, fit))
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
        failed = len(self._failed) + len(self._untried)
        if self._first_error is not None and failed == tried > 1 and not all_failed_before:
            raise self._first_error
        if tried and failed:
            self._roll_back()

    def _parts(self) -> Iterator[Sequence[Id]]:
        """Divide the batch into the parts that are worked on at once.

        A batch that is tried for the first time is one part. A batch that was tried before may
        contain a message that kills the process, so it has twice as many parts on each try. Each
        part gets a number before the work on it begins. After a crash the highest number marks the
        suspects: they are tried last. A suspect that is alone and has no try left is buried.
        """
        ids = list(self.held)
        tries = min((each.tries for each in self.held.values()), default=1)
        if tries == 1:
            yield ids
            return
        claims = self._batches.claims
        marks = self._run(claims.marks(self._token, self._upto))
        number = max(marks.values(), default=0)
        groups: dict[int, list[Id]] = {}
        for id in ids:
            groups.setdefault(marks.get(id, 0), []).append(id)
        if number and len(groups.get(number, ())) == 1:
            self._bury_suspect(groups[number])
        for _, group in sorted(groups.items()):
            pieces = min(len(group), 2 ** min(tries - 1, 20))
            for piece in range(pieces):
                part = group[len(group) * piece // pieces : len(group) * (piece + 1) // pieces]
                number += 1
                self._run(claims.mark(self._token, part, number))
                yield part

    def _bury_suspect(self, group: list[Id]) -> None:
        """Take the only message out of the group and bury it, if it had all its tries."""
        held, source = self.held[group[0]], self._batches.source
        if source.options.max_tries is None or held.tries <= source.options.max_tries:
            return
        error = Rejected("the process ended each time it worked on this message")
        with suppress(LeaseLost):
            self._run(source.rollback((held,), error=error))
            self._buried += 1
        group.clear()

    def _attempt(self, part: Sequence[Id], frame_of: FrameOf) -> None:
        """Work on a part; if it fails, work on its halves."""
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
                log.warning(text, part[0], self._batches.source.queue, str(error)[:500])
                self._failed.append((part[0], error))
                return
            middle = len(part) // 2
            self._attempt(part[:middle], frame_of)
            self._attempt(part[middle:], frame_of)

    def _settle(self, part: Sequence[Id], frame_of: FrameOf) -> None:
        """Transform a part and settle it. Lost messages are counted only if the part succeeds."""
        size = len(part)
        for _ in range(MAX_ATTEMPTS):
            part = [id for id in part if id in self.held]
            if not part:
                self._lost += size
                return
            rows = self._batches.transformed(frame_of(part))
            if self._batches.moves:
                self._batches.check_ids(part, rows)
            if self._streams or time.monotonic() - self._refreshed_at > self.lease / 4:
                self._refresh()
            held = {id: self.held[id] for id in part if id in self.held}
            if self._batches.moves:
                self._move(held, rows, size)
                return
            # If messages were lost, the rows must be made anew from those that are left.
            if len(held) == len(part):
                try:
                    self._batches.transact(held, rows)
                except LeaseLost:
                    self._refresh()
                else:
                    self._written += len(rows)
                    self._lost += size - len(part)
                    return
        raise Rejected(
            f"the part lost messages to other consumers {MAX_ATTEMPTS} times: give a longer lease"
        )

    def _move(self, held: Held, rows: Sequence[NewMessage], size: int) -> None:
        here = {str(id) for id in held}
        result = self._batches.move(held, [row for row in rows if row.id in here])
        self._failed += result.refused
        self._written += result.moved
        self._dropped += result.dropped
        self._lost += result.lost + size - len(held)

    def _roll_back(self) -> None:
        self._refresh()
        source = self._batches.source
        for id, error in self._failed:
            if id in self.held:
                with suppress(LeaseLost):
                    self._run(source.rollback((self.held[id],), error=error))
        untried = tuple(self.held[id] for id in self._untried if id in self.held)
        with suppress(LeaseLost):
            self._run(source.release(untried))

    def give_back(self, error: BaseException) -> None:
        """Roll back what is left of the batch.

        Misuse and interrupts are no failures of the messages: these release the messages, and no
        try is counted.
        """
        self._refresh()
        held, source = tuple(self.held.values()), self._batches.source
        if isinstance(error, Exception) and not isinstance(error, ConfigurationError):
            self._run(source.rollback(held, error=error))
        else:
            self._run(source.release(held))
        self._run(self._batches.claims.acknowledge(self._token, self._upto))

    def report(self, claimed: int, seconds: float) -> Report:
        """Return what happened to the batch."""
        failed = len(self._failed) + len(self._untried) + self._buried
        return Report(claimed, self._written, self._dropped, failed, self._lost, seconds)
