"""Writes by epoch: the messages of a batch appear once, even if the batch runs several times.

After a crash, Spark repeats a batch, an *epoch*. By then its messages may have been published,
received and finished, so their ids no longer prove that they were written. A record proves it:

1. Tasks write messages where no consumer sees them, marked with the number of their attempt. A task
   first reads the record, and writes nothing for a committed epoch.
2. The driver counts the rows that the tasks wrote, and commits the epoch by one compare-and-set on
   the record. The record then lists the places of these rows.
3. The driver publishes the messages at these places, and removes each place from the record. If the
   epoch is repeated, the driver finds it committed, and only resumes this step.

A new attempt takes the record over, so that earlier attempts can no longer commit. Rows of an
attempt with a smaller number are replaced. Rows of an attempt with a larger number never are.

Each query has its own record, because each query numbers its epochs from 0. Each start of a query
is a new *run*. A run that begins puts the runs of all other queries of the stage *out*: they can no
longer commit, even after a long suspension.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from bson import Int64
from bson.raw_bson import RawBSONDocument

from pyqueue.backends import namespace
from pyqueue.backends.bulk import staging
from pyqueue.backends.bulk.epoch_records import (
    RECORD,
    hidden_queue,
    is_out,
    name_of,
    order_of,
    parts_of,
    records,
    unclaimed,
)
from pyqueue.backends.bulk.id_sketch import IdSketch
from pyqueue.backends.bulk.row_documents import hidden_rows
from pyqueue.backends.contents import count
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import NewMessage, Target
from pyqueue.errors import ConfigurationError, Fenced, Occupied, QueueError
from pyqueue.messages import Id
from pyqueue.requests import (
    Delete,
    Document,
    Filter,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
)

#: How long the record of a query is kept after its last epoch.
LIFETIME: Final = timedelta(days=90)
#: A query may take over a stage if no other query has written to it for this long.
FRESH: Final = timedelta(seconds=20)
#: How many former jobs, and former runs, a record lists. Only jobs that still run matter.
FORMER: Final = 100
#: The age at which hidden rows without a record are deleted.
ABANDONED: Final = timedelta(days=1)
#: How many times a compare-and-set is tried while other processes change the record.
TRIES: Final = 20


class EpochWrites:
    """The operations of one query that writes to a queue by epoch. Instances can be pickled.

    Args:
        target: The queue for places whose names contain no queue. It also owns the record.
        stage: The name of the stage, or "" if the query has none.
        query: The id of the query, or "" if it is not known.
        run: The id of its run, which differs for each start, or "" if it is not known.
    """

    __slots__ = ("_query", "_run", "_stage", "_stage_name", "name", "target")

    def __init__(self, target: Target, stage: str, query: str, run: str = "") -> None:
        self.target = target
        self._stage_name, self._query, self._run = stage, query, run
        # No part of the name contains "~".
        self._stage = f"{target.queue}~{stage}~"
        #: The name of the record. Hidden rows store it in ``staged``.
        self.name = self._stage + query

    @property
    def _id(self) -> str:
        return RECORD + self.name

    def record(self) -> Plan[Document | None]:
        """Return the record, or None if there is none."""
        found = yield from Find({"_id": self._id}, limit=1)
        return found[0] if found else None

    # ---- tasks

    def join(self, job: str, epoch: int) -> Plan[int | None]:
        """Take part in the work on an epoch.

        Args:
            job: A name that only this execution of the epoch has.
            epoch: The number of the epoch.

        Returns:
            The number of the attempt, or None if the epoch is committed: nothing is left to write,
            and the caller can pass its rows to ``check_repeated``.

        Raises:
            ConfigurationError: A later epoch has already been committed.
            Fenced: A later run has taken over.
            Occupied: Another query wrote to this stage a moment ago, and may write again.
        """
        for _ in range(TRIES):
            state = yield from self.record()
            if state is None:
                yield from self._create()
                continue
            if is_out(state, self._query, self._run):
                raise self._fenced()
            if epoch < state["epoch"]:
                raise self._behind(epoch, state["epoch"])
            # Before a run writes, the record must name it, and other runs of the stage must be out.
            if state.get("entering") or (self._run and state.get("run") != self._run):
                yield from self._enter(state)
                continue
            if state["epoch"] == epoch:
                return None
            if state["places"]:  # no caller repeats that epoch any more
                yield from self.publish_committed(state)
            attempt: int = state["attempt"]
            if job in state["former"]:
                raise self._fenced()
            if state["job"] == job:
                return attempt
            now = yield from ServerTime()
            fields = {"attempt": attempt + 1, "job": job, "processed": now}
            take_over: UpdateDocument = {
                "$set": fields | {"expires": now + LIFETIME},
                "$push": _last("former", [state["job"]]),
            }
            same = {"_id": self._id, "attempt": attempt, "epoch": state["epoch"], **self._not_out}
            if (yield from Update(same, take_over)).matched:
                return attempt + 1
        raise self._fenced()

    @property
    def _not_out(self) -> Filter:
        """The filter that matches the record as long as no later run has taken over."""
        if self._run:
            return {"out": {"$ne": self._run}}
        # A record without a query is out once a query, its heir, has taken it over.
        return {} if self._query else {"heir": None}

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._label()}: another run has taken over, so this run stops writing. Only one "
            "query at a time may use a checkpoint, and only one query at a time may write a stage"
        )

    def _behind(self, epoch: int, decided: int) -> ConfigurationError:
        return ConfigurationError(
            f"epoch: batch {epoch} of {self._label()} is older than batch {decided}, which has "
            "been written; this attempt wrote nothing. Either an older checkpoint was restored, "
            f"or the numbering was restarted. {self._ways_out()}"
        )

    def _ways_out(self) -> str:
        return (
            "Use another stage, or run `pyqueue stage forget "
            f"{' '.join(filter(None, (self.target.queue, self._stage_name)))}` for its server and "
            "namespace, to write every row whose id is neither in the queue nor in its history"
        )

    def _label(self) -> str:
        stage = self._stage_name
        return f"queue {self.target.queue!r}" + (f", stage {stage!r}" if stage else "")

    def check_repeated(self, epoch: int, ids: Iterable[Id]) -> Plan[None]:
        """Check that these rows were in the committed epoch.

        Fewer rows are not an error, because the source may no longer have rows that are finished.

        Raises:
            ConfigurationError: One of the rows was certainly not in the epoch.
        """
        state = yield from self.record()
        decided = IdSketch.stored(state.get("ids")) if state and state["epoch"] == epoch else None
        if decided is not None and (new := decided.missing(ids)):
            raise ConfigurationError(
                f"epoch: batch {epoch} of {self._label()} has been written with different rows, "
                f"without id {new[0]!r}; this attempt wrote nothing. A repeated batch must have "
                f"the same ids, so do not generate ids with uuid(). {self._ways_out()}"
            )

    # ---- one run at a time

    def _create(self) -> Plan[None]:
        """Create the record. It continues a record of an earlier release, which names no query."""
        target, now = self.target, (yield from ServerTime())
        yield from namespace.ensure(target.queue, target.kind, target.options)
        self._check_quiet((yield from self._others()), now)
        epoch, ids = yield from self._inherited()
        new = {"_id": self._id, "record": True, "epoch": epoch, "attempt": 0, "job": ""}
        new |= {"former": [], "places": [], "ids": ids, "run": self._run, "out": []}
        times = {"processed": now, "expires": now + LIFETIME}
        yield from Insert([new | {"entering": True} | times])  # or another task has inserted it

    def _inherited(self) -> Plan[tuple[int, object]]:
        """Take over the record of a write to this stage that named no query.

        Returns:
            Its last epoch and the ids of that epoch, or -1 and None if there is no such record.
        """
        if not self._query or not self._stage_name:
            return -1, None
        before = EpochWrites(self.target, self._stage_name, "")
        for _ in range(TRIES):
            state = yield from before.record()
            if state is None:
                return -1, None
            if (heir := state.get("heir")) is not None:
                return (state["epoch"], state.get("ids")) if heir == self._query else (-1, None)
            same = {"_id": state["_id"], "epoch": state["epoch"], "attempt": state["attempt"]}
            yield from Update(same | {"heir": None}, {"$set": {"heir": self._query}})
        raise self._fenced()

    def _enter(self, state: Document) -> Plan[None]:
        """Make this the only run that may write the stage.

        First name this run in the record. Then read the records of the other queries, and bar their
        runs from committing. So if two runs enter at once, at least one of them is barred. A run
        that writes its record after this run has begun to enter is not barred.
        """
        now = yield from ServerTime()
        self._check_quiet((yield from self._others()), now)
        former = state.get("run")
        if former != self._run:
            put: Document = {"run": self._run, "entering": True, "processed": now}
            pushed = _last("out", [former] if former else [])
            same = {"_id": self._id, "run": former, **self._not_out}
            if not (yield from Update(same, {"$set": put, "$push": pushed})).matched:
                return  # ``join`` reads the record again, here and below
        others = yield from self._others()
        self._check_quiet(others, now)
        for each in others:
            run = each.get("run")
            if run and run not in each.get("out", ()):
                there = {"_id": each["_id"], "run": run, "processed": each["processed"]}
                if not (yield from Update(there, {"$push": _last("out", [run])})).matched:
                    return
            # The other query may never repeat its committed epoch, so publish that epoch now.
            writes = writes_of(self.target, name_of(each))
            if (its_record := (yield from writes.record())) is not None:
                yield from writes.publish_committed(its_record)
        owners = yield from records(self.target.queue, self._stage_name)
        yield from Delete(unclaimed(self._stage, owners, now - ABANDONED), many=True)
        yield from Update({"_id": self._id, "run": self._run}, {"$unset": {"entering": ""}})

    def _others(self) -> Plan[list[Document]]:
        """Return the records of the other queries of this stage, or [] if there is no stage."""
        if not self._stage_name:
            return []
        found = yield from records(self.target.queue, self._stage_name)
        return [each for each in found if each["_id"] != self._id]

    def _check_quiet(self, others: Sequence[Document], now: datetime) -> None:
        """Raise Occupied if one of these records was changed less than ``FRESH`` ago."""
        changed = [each["processed"] for each in others]
        if changed and (until := max(changed) + FRESH) > now:
            raise Occupied(
                f"stage: another query is writing to {self._label()}; use a different stage name "
                "for each query",
                until=until,
                wait_s=(until - now).total_seconds(),
            )

    def write(
        self, epoch: int, attempt: int, task: int, place: str, messages: Iterable[NewMessage]
    ) -> Plan[int]:
        """Write messages where no consumer sees them.

        This replaces rows with the same ids from an attempt or task with a smaller number. A
        message whose id is already in the queue counts as written.

        Args:
            epoch: The number of the epoch.
            attempt: The number that ``join`` returned.
            task: The number of the task. A repetition of a task has a larger number.
            place: The name of a place that only this part of this task uses.
            messages: The messages to write.

        Returns:
            How many were written.

        Raises:
            DuplicateKey: An id belongs to a message that was never in this queue.
            ConfigurationError: Several rows of this task have the same id.
            Fenced: The epoch is committed, with rows that this task would replace.
        """
        now = yield from ServerTime()
        target = yield from staging.target_of(self.target, place)
        order = Int64(order_of(attempt, task))
        hidden: Document = {"q": hidden_queue(self.name, epoch, place), "staged": self.name}
        hidden |= {"attempt": order, "processed": now}
        # Some documents contain several messages: in total, ``surplus`` more than documents.
        rows, surplus = yield from hidden_rows(target, messages, hidden)
        judge = partial(self._to_write_again, target.queue, epoch, hidden)
        return surplus + (yield from staging.insert_until_known(target.queue, rows, judge))

    def _to_write_again(
        self, queue: str, epoch: int, hidden: Document, refused: list[RawBSONDocument]
    ) -> Plan[list[RawBSONDocument]]:
        """Free ids as ``write`` describes. Return the refused rows whose ids are free now."""
        order, ids = hidden["attempt"], [each["_id"] for each in refused]
        if (yield from self._make_room(epoch, ids, order)):
            return refused
        fields = {"q": 1, "attempt": 1}
        stored = yield from Find({"_id": {"$in": ids}, "staged": self.name}, fields)
        for each in stored:
            if each["attempt"] == order and each["q"] != hidden["q"]:
                raise ConfigurationError(
                    f"id: several rows have the id {each['_id']!r}; use a different id for each "
                    "message, even in different queues"
                )
        later = {each["_id"] for each in stored}  # these are of a larger attempt or task
        rest = [each for each in refused if each["_id"] not in later]
        return (yield from staging.free_again(queue, rest))

    def _make_room(self, epoch: int, ids: list[Id], order: int) -> Plan[int]:
        """Delete hidden rows with these ids; publish committed rows. Return the number deleted."""
        in_the_way: dict[str, Any] = {"_id": {"$in": ids}}
        smaller = in_the_way | {"staged": self.name, "attempt": {"$lt": order}}
        if (yield from Find(smaller, {"_id": 1}, limit=1)):
            yield from self._check_undecided(epoch)
        deleted = yield from Delete(smaller, many=True)
        others = in_the_way | {"staged": {"$exists": True, "$ne": self.name}}
        rows = yield from Find(others, {"q": 1, "staged": 1, "attempt": 1})
        start = f"{self.target.queue}~"
        names = {row["staged"] for row in rows} - {True}  # True marks rows of a batch write
        for name in sorted(name for name in names if name.startswith(start)):
            yield from writes_of(self.target, name).give_up_rows(
                [row for row in rows if row["staged"] == name]
            )
        for row in rows:  # delete the rows that are still hidden
            if row["q"].startswith((f"~staged:{start}", f"~staged:{self.target.queue}:")):
                deleted += yield from Delete({"_id": row["_id"], "q": row["q"]})
        return deleted

    def _check_undecided(self, epoch: int) -> Plan[None]:
        """Raise Fenced if the epoch is committed, because its hidden rows will be published."""
        state = yield from self.record()
        if state is not None and state["epoch"] >= epoch:
            text = f"batch {epoch} is committed, so this copy of a task stops writing"
            raise Fenced(f"{self._label()}: {text}")

    def give_up_rows(self, rows: Sequence[Document]) -> Plan[None]:
        """Let another query, which writes the same ids, delete hidden rows of this query.

        First publish committed rows. Then an attempt that may have counted the rows cannot commit.
        """
        for _ in range(TRIES):
            state = yield from self.record()
            if state is None:
                return
            yield from self.publish_committed(state)
            pending = hidden_queue(self.name, state["epoch"] + 1)  # names sort by epoch
            current = order_of(state["attempt"])
            if not any(row["q"] >= pending and row["attempt"] >= current for row in rows):
                return
            same = {"_id": self._id, "attempt": state["attempt"], "epoch": state["epoch"]}
            pushed = _last("former", [state["job"]])
            if (yield from Update(same, {"$inc": {"attempt": 1}, "$push": pushed})).matched:
                return
        raise self._fenced()

    # ---- the driver

    def commit(
        self,
        job: str,
        epoch: int,
        attempt: int,
        counts: Mapping[str, int],
        ids: IdSketch | None = None,
    ) -> Plan[int]:
        """Commit an epoch and publish its messages.

        Args:
            job: The execution of the epoch, as given to ``join``.
            epoch: The number of the epoch.
            attempt: The number of the attempt that the tasks belong to.
            counts: How many messages the tasks have written, by place.
            ids: A sketch of the ids of the rows, or None if the ids are not known.

        Returns:
            How many messages are published.

        Raises:
            Fenced: A later run has taken over, and this run publishes nothing.
            QueueError: Messages are missing, and nothing is published.
        """
        try:
            for place, expected in counts.items():
                yield from self._check_count(epoch, place, expected)
        except QueueError:
            state = yield from self.record()
            if state is None or is_out(state, self._query, self._run) or state["job"] != job:
                raise self._fenced() from None  # the next run has removed the rows
            raise
        now = yield from ServerTime()
        mine: Document = {"_id": self._id, "job": job, "attempt": attempt}
        mine |= {"epoch": {"$lt": epoch}, "places": [], **self._not_out}
        places = [{"at": place, "n": number} for place, number in counts.items()]
        decide: Document = {"epoch": epoch, "places": places, "processed": now}
        decide |= {"ids": ids and ids.to_document(), "expires": now + LIFETIME}
        yield from Update(mine, {"$set": decide})
        return (yield from self.resume(epoch))

    def _check_count(self, epoch: int, place: str, expected: int) -> Plan[None]:
        """Raise QueueError unless a place has the expected number of hidden messages."""
        target = yield from staging.target_of(self.target, place)
        hidden = {"q": hidden_queue(self.name, epoch, place)}
        present = yield from count(target.kind, hidden, HOT)
        if present != expected:
            raise QueueError(
                f"{self._label()}, epoch {epoch}: {expected} messages were written at {place}, but "
                f"{present} are there; publishing stops. Either rows have the same id, or two "
                "copies of a task ran at once (spark.speculation), or rows were deleted"
            )

    def resume(self, epoch: int) -> Plan[int]:
        """Publish the remaining messages of a committed epoch. Return how many.

        Raises:
            Fenced: The epoch is not committed, because a later run has taken over.
            QueueError: Messages are missing.
        """
        state = yield from self.record()
        if state is None or state["epoch"] < epoch:
            raise self._fenced()
        if state["epoch"] > epoch:
            return 0  # it was published before the next commit
        return (yield from self.publish_committed(state))

    def publish_committed(self, state: Document) -> Plan[int]:
        """Publish the committed rows of a record. Delete other hidden rows up to its epoch.

        Return how many rows were published. ``places`` of the record lists those still to publish.
        """
        epoch, places = state["epoch"], state["places"]
        now = yield from ServerTime()
        done: Counter[str] = Counter()
        partly = True  # part of the first place may be published already
        while places:
            place, expected = places[0]["at"], places[0]["n"]
            try:
                if not partly:
                    yield from self._check_count(epoch, place, expected)
            except QueueError:
                newer = yield from self.record()
                if newer is None or newer["epoch"] != epoch or newer["places"][:1] == places[:1]:
                    raise
                places, partly = newer["places"], True  # another process publishes, too
                continue
            target = yield from staging.target_of(self.target, place)
            hidden = hidden_queue(self.name, epoch, place)
            done[target.queue] += yield from staging.publish_rows(target, hidden, now)
            decided = {"_id": self._id, "epoch": epoch}
            yield from Update(decided, {"$pull": {"places": {"at": place}}})
            places, partly = places[1:], False
        first, end = (hidden_queue(self.name, number) for number in (0, epoch + 1))
        yield from Delete({"q": {"$gte": first, "$lt": end}}, many=True)
        for queue, number in done.items():
            if number:
                yield from Signal(queue, now)
        return done.total()


def _last(field: str, values: list[str]) -> Document:
    """Return the argument of ``$push`` that appends values and keeps only the last ``FORMER``."""
    return {field: {"$each": values, "$slice": -FORMER}}


def writes_of(target: Target, name: str) -> EpochWrites:
    """Return the operations of the query whose record has this name."""
    _, stage, query = parts_of(name)
    return EpochWrites(target, stage, query)
