"""One batch after the other through Spark: claimed, transformed, and settled by the driver, message by message or in one transaction.

The queue is the checkpoint. Each claim outlives this process, and each message leaves it in one atomic step, into the next queue or by a
commit; so a process that is killed at any point is followed by one that finds exactly what is still to be done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from pymongo.errors import PyMongoError

from pyqueue import arguments
from pyqueue.backends.moving import move_each
from pyqueue.backends.named_claims import MAX_CLAIM, NamedClaims
from pyqueue.backends.options import NewMessage
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.staging import append
from pyqueue.connecting import Connection
from pyqueue.drivers import translated
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
from pyqueue.spark.frames import Reader, frame, label, payload_type

__all__ = ["Batches", "Report"]

log = logging.getLogger("pyqueue")

#: What a transaction takes at most: its cost for each message grows beyond that.
TRANSACTION: Final = 10_000
#: How many failing jobs a batch may cost to find out which messages make it fail.
FAILURES: Final = 40
#: How often a part is tried again whose messages were lost to others in the middle of it.
LOST: Final = 3

Transform = Callable[[Any], Any]
Held = dict[Id, Reservation[Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one batch."""

    #: How many messages were claimed, or taken over from an earlier claim.
    claimed: int
    #: How many messages were written to the target.
    written: int
    #: How many were finished without going on: by output "move" those whose id the transform left out.
    dropped: int
    #: How many were rolled back, or buried, because the transform failed on them; or given back, because it failed on too many others.
    failed: int
    #: How many others hold by now, because their lease ran out; these were left alone.
    lost: int
    seconds: float


class Rejected(Exception):
    """A part of a batch failed."""


class Batches:
    """The work of one group: from one queue, through a transform, into another.

    Args:
        runner: runs the plans.
        source: the queue that is read, with the stage's options.
        target: the queue that follows.
        group: the durable name of this consumer.
        transform: takes and answers a DataFrame; None passes everything on as it is.
        output: "move" or "transaction".
        max_messages: how many one batch takes at most.
    """

    def __init__(
        self,
        runner: Connection,
        source: QueuePlans,
        target: QueuePlans,
        group: str,
        transform: Transform | None,
        output: str,
        max_messages: int,
    ) -> None:
        arguments.one_of("output", output, ("move", "transaction"))
        most = TRANSACTION if output == "transaction" else MAX_CLAIM
        if arguments.count("max_messages", max_messages) > most:
            raise ConfigurationError(
                f'max_messages: {max_messages} is not allowed: with output="{output}" at most {most}'
            )
        if transform is not None and not callable(transform):
            raise ConfigurationError(
                f"transform: give a function from DataFrame to DataFrame, not {type(transform).__name__}"
            )
        payload_type(source.codec.model)
        self._runner = runner
        self._source = source
        self._target = target
        self._claims = NamedClaims(source, group)
        self._transform: Transform = transform or (lambda df: df)
        self.moves = output == "move"
        self._limit = max_messages

    @property
    def id(self) -> str:
        """How the log names it."""
        return f"group {self._claims.group!r}"

    @property
    def lease(self) -> float:
        """For how long a renewal holds, in seconds."""
        return self._source.options.lease

    def run_once(self, session: Callable[[], Any]) -> Report:
        """Work on one batch: on what an earlier claim left, or else on what is ready. See ``SparkStage.run_once``.

        Args:
            session: gives the Spark session; called only if there is something to do.
        """
        began = time.monotonic()
        token, upto, ids = self._run(self._claims.begin(self._limit, self.lease))
        if not ids:
            return Report(0, 0, 0, 0, 0, time.monotonic() - began)
        batch = _Batch(self, token, upto)
        documents = {
            each["_id"]: each
            for span in self._run(self._claims.ranges(token, 0, upto, 1))
            for each in self._run(self._claims.read(span))
        }
        self._runner.renewer.add(batch, lambda _: self._run(self._claims.renew(token, self.lease)))
        try:
            # What is not there was taken by others since it was counted.
            batch.work(
                lambda part: frame(
                    session(),
                    [documents[id] for id in part if id in documents],
                    self._source.codec.model,
                )
            )
        except (Fenced, QueueClosed, Unavailable):
            raise  # it is another's; or it stays claimed, for the next run to go on with
        except BaseException as error:
            with suppress(QueueError):
                batch.give_back(error)
            raise
        finally:
            self._runner.renewer.discard(batch)
        self._run(self._claims.acknowledge(token, upto))
        return batch.report(len(ids), time.monotonic() - began)

    def foreach_batch(self, df: Any, batch_id: int) -> None:
        """Work on a batch of a stream that reads the source for the same group. See ``SparkStage.foreach_batch``."""
        standing = self._run(self._claims.progress())
        batch = _Batch(self, standing.token, standing.claimed)
        if not batch.held:
            if df.isEmpty():
                return  # it was done before
            raise ConfigurationError(
                f"foreach_batch: group {self._claims.group!r} of queue {self._source.queue!r} has nothing claimed: the stream must read that "
                "queue, by the data source pyqueue, for that group"
            )
        batch.work(
            lambda part: (
                df.where(df["id"].isin([str(id) for id in part]))
                if len(part) < len(batch.held)
                else df
            )
        )

    def _run(self, plan: Plan[Any]) -> Any:
        return self._runner.run(plan)

    # ---- what a batch is made of

    def rows(self, df: Any) -> list[NewMessage]:
        """Run the transform, and bring what it answers here."""
        out = self._transform(df)
        if not hasattr(out, "toArrow"):
            raise ConfigurationError(
                f"transform: it answered {type(out).__name__}, not a DataFrame"
            )
        reader = Reader(out.schema, "id" if self.moves else None)
        return list(reader.rows(out.toArrow()))

    def move(
        self, held: Held, rows: Sequence[NewMessage]
    ) -> tuple[int, int, int, list[tuple[Id, Exception]]]:
        """Move each message whose id is there, and commit the others.

        Answers how many were moved, dropped and lost, and which ones the target refused.
        """
        mine = {str(id): each for id, each in held.items()}
        pairs = {str(row.id): (mine[str(row.id)], _changed(mine[str(row.id)], row)) for row in rows}
        lost = 0
        refused: list[tuple[Id, Exception]] = []
        for each, outcome in self._run(
            move_each(
                self._source.queue, self._source.kind, self._target.target, list(pairs.values())
            )
        ):
            if isinstance(outcome, Unavailable):
                raise outcome
            if isinstance(outcome, QueueError):
                refused.append((each.id, outcome))
            else:
                lost += outcome != "done"
        absent = [each for id, each in mine.items() if id not in pairs]
        gone = 0
        try:
            self._run(self._source.commit(tuple(absent)))
        except LeaseLost as error:
            gone = len(error.lost) + len(error.unknown)
        return len(pairs) - lost - len(refused), len(absent) - gone, lost + gone, refused

    def unambiguous(self, part: Sequence[Id], rows: Sequence[NewMessage]) -> None:
        """Refuse rows that a move can make nothing of.

        Raises:
            ConfigurationError: an id is there twice, or is not one of the batch's.
        """
        known, seen = {str(id) for id in part}, set()
        for row in rows:
            if row.id not in known:
                raise ConfigurationError(
                    f'transform: it answered the id {row.id!r}, which is not in the batch; output="transaction" makes new messages'
                )
            if row.id in seen:
                raise ConfigurationError(
                    f'transform: it answered the id {row.id!r} twice; output="transaction" makes several messages of one'
                )
            seen.add(row.id)

    def transact(self, held: Held, rows: Iterable[NewMessage]) -> None:
        """Write the rows and commit the messages, in one transaction.

        Raises:
            LeaseLost: others hold some by now; nothing was written.
        """
        fresh = [row._replace(id=None) for row in rows]

        def work(session: Any) -> None:
            self._run(append(self._target.target, fresh, session=session))
            self._run(self._source.commit(tuple(held.values()), session=session))

        try:
            self._runner.run_transaction(work)
        except PyMongoError as error:
            raise translated(error) from error


def _changed(held: Reservation[Any], row: NewMessage) -> NewMessage:
    """A row without the headers that are as they were: in a frame all are strings, in a message they need not be."""
    were = {name: label(value) for name, value in held.headers.items()}
    return row._replace(
        headers={
            name: text
            for name, text in (row.headers or {}).items()
            if name not in were or text != were[name]
        }
    )


class _Batch:
    """A claim at work."""

    def __init__(self, batches: Batches, token: str, upto: int) -> None:
        self._batches = batches
        self._token, self._upto = token, upto
        self.held: Held = {}
        self.written = self.dropped = self.lost = 0
        self.failed: list[tuple[Id, Exception]] = []
        #: Those of which nobody knows, because too many others failed.
        self.spared: list[Id] = []
        self.buried = 0
        self._allowed = FAILURES
        self._error: Exception | None = None
        self._read = 0.0
        self._refresh()

    @property
    def id(self) -> str:
        """How the log names it."""
        return self._batches.id

    @property
    def lease(self) -> float:
        """For how long a renewal holds, in seconds."""
        return self._batches.lease

    def _run(self, plan: Plan[Any]) -> Any:
        return self._batches._run(plan)

    def _refresh(self) -> None:
        """Learn which messages are held, and until when."""
        found = self._run(self._batches._claims.reservations(self._token, 0, self._upto))
        self.held = {each.id: each for each in found}
        self._read = time.monotonic()

    def work(self, frame_of: Callable[[Sequence[Id]], Any]) -> None:
        """Have all of it transformed and settled, except what makes the transform fail: that is rolled back.

        Raises:
            Exception: the transform's, if it failed on everything, and not for each message's own sake before.
        """
        known = all(each.error is not None for each in self.held.values())
        tried = 0
        for part in self._parts():
            self._attempt(part, frame_of)
            tried += len(part)
        if (
            self._error is not None
            and len(self.failed) + len(self.spared) == tried > 1
            and not known
        ):
            raise self._error
        if tried and (self.failed or self.spared):
            self._roll_back()

    def _parts(self) -> Iterator[Sequence[Id]]:
        """What is worked on at once: all of it; or, if that was tried before, parts, twice as many each time.

        Each part is marked with a number before, so when this process dies, the highest number is on those that may be why: they are
        tried last then, when the others got past them. One that is alone with it when it had its tries is buried.
        """
        ids = list(self.held)
        tries = min((each.tries for each in self.held.values()), default=1)
        if tries == 1:
            yield ids
            return
        claims = self._batches._claims
        marks = self._run(claims.marks(self._token, self._upto))
        number = max(marks.values(), default=0)
        groups: dict[int, list[Id]] = {}
        for id in ids:
            groups.setdefault(marks.get(id, 0), []).append(id)
        if number and len(groups.get(number, ())) == 1:
            self._bury_if_worn(groups[number])
        for _, group in sorted(groups.items()):
            pieces = min(len(group), 2 ** min(tries - 1, 20))
            for piece in range(pieces):
                part = group[len(group) * piece // pieces : len(group) * (piece + 1) // pieces]
                number += 1
                self._run(claims.mark(self._token, part, number))
                yield part

    def _bury_if_worn(self, group: list[Id]) -> None:
        held, source = self.held[group[0]], self._batches._source
        if source.options.max_tries is not None and held.tries > source.options.max_tries:
            with suppress(LeaseLost):
                self._run(
                    source.rollback(
                        (held,),
                        error=Rejected("its process ended, each time that it was worked on"),
                    )
                )
                self.buried += 1
            group.clear()

    def _attempt(self, part: Sequence[Id], frame_of: Callable[[Sequence[Id]], Any]) -> None:
        """Work on a part; if it fails, on its halves."""
        if self._allowed <= 0:
            self.spared += part
            return
        try:
            self._settle(part, frame_of)
        except (QueueClosed, Fenced, Unavailable, ConfigurationError):
            raise
        except Exception as error:
            self._allowed -= 1
            self._error = self._error or error
            if len(part) == 1:
                log.warning(
                    "message %s of queue %r makes the batch fail: %s",
                    part[0],
                    self._batches._source.queue,
                    str(error)[:500],
                )
                self.failed.append((part[0], error))
                return
            middle = len(part) // 2
            self._attempt(part[:middle], frame_of)
            self._attempt(part[middle:], frame_of)

    def _settle(self, part: Sequence[Id], frame_of: Callable[[Sequence[Id]], Any]) -> None:
        asked = len(
            part
        )  # those that are lost are counted in the end: if it fails, its halves are counted
        for _ in range(LOST):
            part = [id for id in part if id in self.held]
            if not part:
                self.lost += asked
                return
            rows = self._batches.rows(frame_of(part))
            if self._batches.moves:
                self._batches.unambiguous(part, rows)
            if time.monotonic() - self._read > self.lease / 4:
                self._refresh()
            held = {id: self.held[id] for id in part if id in self.held}
            if self._batches.moves:
                here = {str(id) for id in held}
                moved, dropped, lost, refused = self._batches.move(
                    held, [row for row in rows if row.id in here]
                )
                self.failed += refused
                self.written += moved
                self.dropped += dropped
                self.lost += lost + asked - len(held)
                return
            # If some of it is another's, the rows must be made anew of what is left.
            if len(held) == len(part):
                try:
                    self._batches.transact(held, rows)
                except LeaseLost:
                    self._refresh()
                else:
                    self.written += len(rows)
                    self.lost += asked - len(part)
                    return
        raise Rejected("others took messages out of it, again and again: its lease is too short")

    def _roll_back(self) -> None:
        self._refresh()
        for id, error in self.failed:
            if id in self.held:
                with suppress(LeaseLost):
                    self._run(self._batches._source.rollback((self.held[id],), error=error))
        with suppress(LeaseLost):
            self._run(
                self._batches._source.release(
                    tuple(self.held[id] for id in self.spared if id in self.held)
                )
            )

    def give_back(self, error: BaseException) -> None:
        """Roll back all that is left; or, if it is no failure but an end, release it."""
        self._refresh()
        held = tuple(self.held.values())
        if isinstance(error, Exception) and not isinstance(error, ConfigurationError):
            self._run(self._batches._source.rollback(held, error=error))
        else:
            self._run(self._batches._source.release(held))
        self._run(self._batches._claims.acknowledge(self._token, self._upto))

    def report(self, claimed: int, seconds: float) -> Report:
        """What became of it."""
        failed = len(self.failed) + len(self.spared) + self.buried
        return Report(claimed, self.written, self.dropped, failed, self.lost, seconds)
