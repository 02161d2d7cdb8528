"""The output of a Spark stage: run the transform, and settle part of a batch with the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

from pymongo.errors import PyMongoError
from pyspark.sql import DataFrame

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.applying import SettlementResult
from pyqueue.backends.bulk.staging import append
from pyqueue.backends.moving import moves
from pyqueue.backends.options import NewMessage
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.concurrently import concurrently
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError, Unavailable
from pyqueue.messages import UNCHANGED, Id, Reservation
from pyqueue.payloads import encode
from pyqueue.runtime.connecting import Connection
from pyqueue.runtime.server_errors import shown_cause, translated
from pyqueue.spark.columns import label
from pyqueue.spark.row_reader import Reader
from pyqueue.spark.told import Told

#: The function of a stage. Without a target, it returns nothing and may take the claim's number.
Transform = (
    Callable[[DataFrame], DataFrame]
    | Callable[[DataFrame], None]
    | Callable[[DataFrame, int], None]
)
Held = dict[Id, Reservation[Any]]
E = TypeVar("E")


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one batch."""

    #: The messages that were claimed, or taken over from an earlier claim.
    claimed: int = 0
    #: The messages that were written to the targets, or by a stage without a target.
    written: int = 0
    #: With output "move", the messages whose ids the transform left out. They are finished.
    dropped: int = 0
    #: The messages on which the transform failed, which were rolled back or buried. They include
    #: messages that were released untried, because the transform had failed too often.
    failed: int = 0
    #: The messages whose lease ran out and that have another holder now. They were not changed.
    lost: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """The counts of a batch so far."""

    written: int = 0
    dropped: int = 0
    lost: int = 0
    #: The messages on which the transform failed, or which a target refused, for example because
    #: another message of the target has their key.
    failed: list[tuple[Id, Exception]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Route:
    """Where the messages of a stage come from, and where they go."""

    #: The queue that is read, with the stage's options.
    source: QueuePlans
    #: The queues that are written. If empty, the transform writes a table itself.
    targets: Sequence[QueuePlans]
    #: Whether the column ``queue`` of each row chooses among the targets.
    by_column: bool = False


class Output:
    """The output of a stage: runs the transform, and moves the messages to the target queues.

    Args:
        connection: The connection of a blocking client.
        route: The queue that is read, and the queues that are written.
        transform: Takes a DataFrame and returns one. None passes all rows on unchanged.
        output: "move" or "transaction".

    Raises:
        ConfigurationError: An argument is invalid.
    """

    def __init__(
        self,
        connection: Connection,
        route: Route,
        transform: Transform | None,
        output: str,
    ) -> None:
        arguments.one_of("output", output, ("move", "transaction"))
        if transform is not None and not callable(transform):
            raise ConfigurationError(
                f"transform: expected a function of one DataFrame, found {type(transform).__name__}"
            )
        self._connection = connection
        self._source = route.source
        self._told = Told(connection, route.source)
        #: The targets, keyed by queue name, or by None if the rows name no queue.
        self._targets = {each.queue if route.by_column else None: each for each in route.targets}
        self._transform: Callable[..., Any] = transform or (lambda df: df)
        self.moves = output == "move"

    def transformed(self, df: DataFrame) -> list[NewMessage]:
        """Run the transform and collect its rows.

        Raises:
            ConfigurationError: The transform returned no DataFrame, or one without a needed column.
        """
        out = self._transform(df)
        if not hasattr(out, "toArrow"):
            raise ConfigurationError(
                f"transform: expected a DataFrame as its result, found {type(out).__name__}"
            )
        queues = [name for name in self._targets if name is not None]
        reader = Reader(out.schema, "id" if self.moves else None, queues=queues)
        capabilities = [each.kind.capabilities for each in self._targets.values()]
        return list(reader.rows(out.toArrow(), frozenset().union(*capabilities)))

    def check_ids(self, part: Sequence[Id], rows: Sequence[NewMessage]) -> None:
        """Check that each row belongs to a different message of the part.

        Raises:
            ConfigurationError: An id occurs twice, or is not in the batch.
        """
        known, seen = {str(id) for id in part}, set()
        for row in rows:
            if row.id not in known:
                raise ConfigurationError(
                    f"transform: returned the id {row.id!r}, which is not in the batch; "
                    'to create messages, use output="transaction"'
                )
            if row.id in seen:
                raise ConfigurationError(
                    f"transform: returned the id {row.id!r} twice; "
                    'to create several messages from one, use output="transaction"'
                )
            seen.add(row.id)

    def move(
        self, held: Held, rows: Sequence[NewMessage], payloads: Mapping[Id, Any], tally: Tally
    ) -> None:
        """Move each message that has a row, and commit all other messages.

        Args:
            held: The messages that this process holds.
            rows: The rows that the transform returned for these messages.
            payloads: The stored payloads, as far as they are known. A payload that the row does not
                change is not written again.
            tally: The counts, to which the outcome is added.
        """
        by_id = {str(id): each for id, each in held.items()}
        pairs = {
            str(row.id): (by_id[str(row.id)], self._changed(by_id[str(row.id)], row, payloads))
            for row in rows
        }
        moved: dict[str, list[Reservation[Any]]] = {}
        lost: list[Reservation[Any]] = []
        for each, outcome in self._move_each(list(pairs.values())):
            if isinstance(outcome, Unavailable):
                raise outcome
            if isinstance(outcome, QueueError):
                tally.failed.append((each.id, outcome))
            elif outcome == "done":
                tally.written += 1
                target = self._targets[pairs[str(each.id)][1].queue].queue
                moved.setdefault(target, []).append(each)
            else:
                tally.lost += 1
                lost.append(each)
        for target, some in moved.items():
            self._told.settled("move", some, to=target)
        self._told.settled("move", lost, error=LeaseLost("no longer held", lost=lost))
        absent = tuple(each for id, each in by_id.items() if id not in pairs)
        gone = 0
        try:
            self._connection.run(self._told.settling("commit", absent, self._source.commit(absent)))
        except LeaseLost as error:
            gone = len(error.lost) + len(error.unknown)
        tally.dropped += len(absent) - gone
        tally.lost += gone

    def _move_each(
        self, pairs: Sequence[tuple[Reservation[Any], NewMessage]]
    ) -> list[tuple[Reservation[Any], SettlementResult]]:
        """Move messages, in concurrent commands unless a target has ordered groups."""
        source = self._source
        plans = [
            plan
            for name, some in _by_queue(pairs, lambda pair: pair[1]).items()
            for plan in moves(source.terms, self._targets[name].target, some)
        ]
        run = self._connection.run
        if any("group" in each.kind.capabilities for each in self._targets.values()):
            # The messages of a group enter in the order of their rows.
            return [*chain.from_iterable(map(run, plans))]
        return [*chain.from_iterable(run(concurrently(plans)))]

    def _changed(
        self, held: Reservation[Any], row: NewMessage, payloads: Mapping[Id, Any]
    ) -> NewMessage:
        """Return the row with only the values that the transform changed.

        In a DataFrame all headers are strings. A header that was not changed keeps its stored type.
        """
        before = {name: label(value) for name, value in held.headers.items()}
        headers = {
            name: text
            for name, text in (row.headers or {}).items()
            if name not in before or text != before[name]
        }
        same = (
            self._targets[row.queue].codec.model
            is None  # else the target's model checks the payload
            and held.id in payloads
            and encode({"payload": row.payload}).raw == encode({"payload": payloads[held.id]}).raw
        )
        return row._replace(headers=headers, payload=UNCHANGED if same else row.payload)

    def transact(self, held: Held, rows: Iterable[NewMessage]) -> None:
        """Write the rows and commit the messages, in one transaction.

        Raises:
            LeaseLost: Some messages have another holder now. Nothing was written.
        """
        new = _by_queue([row._replace(id=None) for row in rows], lambda row: row)
        targets = {name: self._targets[name].target for name in new}
        for each in targets.values():  # a queue is recorded outside of the transaction
            self._connection.run(namespace.ensure(each.queue, each.kind, each.options))

        def work(session: Any) -> None:
            for name, some in new.items():
                self._connection.run(append(targets[name], some, session=session))
            self._connection.run(self._source.commit(tuple(held.values()), session=session))

        try:
            self._connection.run_transaction(work)
        except PyMongoError as error:
            meant = translated(error)
            raise meant from shown_cause(error, meant)
        self._told.settled("commit", held.values())


def _by_queue(each: Iterable[E], row_of: Callable[[E], NewMessage]) -> dict[str | None, list[E]]:
    """Group items by the queues that their rows name."""
    groups: dict[str | None, list[E]] = {}
    for one in each:
        groups.setdefault(row_of(one).queue, []).append(one)
    return groups
