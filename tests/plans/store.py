"""A simulated world without a server: processes run real plans against documents in memory, in
virtual time.

Each process has its own ``Waiters`` and ``ScanState``, as a client has. A command takes a few
milliseconds, so commands of other processes run in between. A signal may be lost, doubled or late.
So the tests try the rules of the scan against failures thousands of times in a second.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import datetime, timedelta
from operator import ge, gt, le, lt
from typing import Any, TypeVar

import bson
from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue.backends import namespace
from pyqueue.backends.limits.rates import TakePermits
from pyqueue.backends.ordered.groups import rank
from pyqueue.backends.scan import BATCH_BYTES, ScanState
from pyqueue.backends.tallies import AskEach, SumByQueue
from pyqueue.backends.transitions import record_id
from pyqueue.backends.turns import MAX_PAGE, FirstOfEach
from pyqueue.concurrently import Concurrently
from pyqueue.errors import DuplicateKey, QueueError
from pyqueue.hooks import Tell
from pyqueue.memory import MemoryCollection, memory_database
from pyqueue.payloads import OPTIONS
from pyqueue.requests import (
    Change,
    Coalesce,
    Count,
    CreateIndex,
    Delete,
    Distinct,
    EnsureQueue,
    Find,
    FindAndModify,
    Insert,
    Latecomers,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateEach,
    Wait,
    WriteFailure,
)
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW

T = TypeVar("T")
Document = dict[str, Any]


def instant(time: float) -> datetime:
    """Return the instant of a virtual time in milliseconds."""
    return NOW + timedelta(milliseconds=time)


def millis(when: datetime) -> float:
    """Return the virtual time of an instant."""
    return (when - NOW) / timedelta(milliseconds=1)


# ---- documents


def place(document: Mapping[str, Any]) -> tuple[datetime, bool, Any]:
    """Return the position of a document in the order of claims: strings come before ObjectIds."""
    return document["when"], isinstance(document["_id"], ObjectId), document["_id"]


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"$lt": lt, "$lte": le, "$gt": gt, "$gte": ge}


_TYPES: dict[str, type] = {
    "objectId": ObjectId,
    "date": datetime,
    "object": dict,
    "string": str,
    "array": list,
}


Matcher = Callable[[Mapping[str, Any]], bool]


def matches(document: Mapping[str, Any], filter: Mapping[str, Any]) -> bool:
    """Return whether a filter of the standard backend matches."""
    return matcher(filter)(document)


def matcher(filter: Mapping[str, Any]) -> Matcher:
    """Return a function that tells whether the filter matches a document."""
    tests = [_test(name, wanted) for name, wanted in filter.items()]
    if len(tests) == 1:
        return tests[0]

    def test(document: Mapping[str, Any]) -> bool:
        for each in tests:  # noqa: SIM110  # a generator takes twice as long
            if not each(document):
                return False
        return True

    return test


def _test(name: str, wanted: Any) -> Matcher:
    if name == "$and":
        branches = [matcher(each) for each in wanted]
        return lambda document: all(each(document) for each in branches)
    if name == "$or":
        branches = [matcher(each) for each in wanted]
        return lambda document: any(each(document) for each in branches)
    outer, dot, inner = name.partition(".")
    if dot:  # a nested field
        nested = matcher({inner: wanted})
        return lambda document: nested(document.get(outer) or {})
    if not isinstance(wanted, dict) or not all(each.startswith("$") for each in wanted):
        return lambda document: bool(document.get(name) == wanted)
    operators = list(wanted.items())

    def test(document: Mapping[str, Any]) -> bool:
        there, value = name in document, document.get(name)
        for operator, bound in operators:  # noqa: SIM110
            if not _holds(there, value, operator, bound):
                return False
        return True

    return test


def _holds(there: bool, value: Any, operator: str, wanted: Any) -> bool:
    if operator in _COMPARE:  # the server compares values of one type only
        return type(value) is type(wanted) and _COMPARE[operator](value, wanted)
    match operator:
        case "$eq":
            return bool(value == wanted)
        case "$ne":
            return bool(value != wanted)
        case "$in":
            return value in wanted
        case "$nin":
            return value not in wanted
        case "$regex":
            return isinstance(value, str) and re.search(wanted, value) is not None
        case "$exists":
            return there is wanted
        case "$not":
            return not all(_holds(there, value, *each) for each in wanted.items())
        case "$type":
            return isinstance(value, _TYPES[wanted])
    raise AssertionError(f"the store does not know {operator}")


def _equalities(match: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a document that an upsert with this filter inserts."""
    return {
        name: value
        for name, value in match.items()
        if not name.startswith("$") and not (isinstance(value, dict) and "$exists" in value)
    }


def updated(document: Document, update: Mapping[str, Any], *, inserting: bool = False) -> Document:
    """Return a document after an update."""
    fresh = dict(document)
    for operator, fields in update.items():
        for name, value in fields.items():
            outer, dot, inner = name.partition(".")
            if dot:  # a nested field
                fresh[outer] = updated(
                    fresh.get(outer) or {}, {operator: {inner: value}}, inserting=inserting
                )
                continue
            match operator:
                case "$set":
                    fresh[name] = value
                case "$unset":
                    fresh.pop(name, None)
                case "$inc":
                    fresh[name] = fresh.get(name, 0) + value
                case "$max":
                    fresh[name] = max(fresh.get(name, value), value)
                case "$rename":
                    if name in fresh:
                        fresh[value] = fresh.pop(name)
                case "$addToSet":
                    fresh[name] = list(dict.fromkeys((*fresh.get(name, ()), *value["$each"])))
                case "$push":
                    fresh[name] = [*fresh.get(name, ()), *value["$each"]][value["$slice"] :]
                case "$setOnInsert":
                    if inserting:
                        fresh[name] = value
                case _:
                    raise AssertionError(f"the store does not know {operator}")
    return fresh


def _first_batch(found: list[Document]) -> list[Document]:
    """Return the first batch of a server's reply."""
    sizes = itertools.accumulate(len(bson.encode(each)) for each in found)
    fits = sum(size <= BATCH_BYTES for size in sizes)
    return found[: max(1, fits)]


class Store:
    """The one collection, with the commands that plans of the standard backend use."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.documents: dict[Any, Document] = {}
        #: When each message was written to its present position, in true virtual time.
        self.written: dict[Any, float] = {}
        #: Called for each scan with the process, the request and the documents that it found.
        self.on_scan: Callable[[Process, Find | FindAndModify, list[Document]], None] = (
            lambda process, request, found: None
        )
        #: Called for each changed or deleted message, with the document before and after.
        self.on_change: Callable[[Document, Document | None], None] = lambda before, after: None
        #: The buckets of rates, which are updated by pipelines.
        self.buckets: Any = None
        self._asker: Any = None

    def answer(self, process: Process, request: Any) -> Any:
        """Carry one command out at once."""
        self._asker = process
        match request:
            case Find(projection={"tokens": 1, "at": 1}):
                return list(self._buckets().find(request.filter))
            case Find():
                found = self._found(request.filter, request.sort, request.skip, request.limit)
                if request.sort is not None and request.limit > 1:
                    self.on_scan(process, request, found)
                if request.projection and "bytes" in request.projection:
                    return [each | {"bytes": len(bson.encode(each))} for each in found]
                return [
                    dict(each) for each in (_first_batch(found) if request.one_batch else found)
                ]
            case FindAndModify():
                return self._take(request)
            case Insert():
                return self._insert(request.documents)
            case Count():
                return len(self._found(request.filter, None, 0, request.cap or 0))
            case SumByQueue() | AskEach():
                return request.read(request.send(self._copied()))
            case FirstOfEach():
                return self._first_of_each(request)
            case CreateIndex():
                return request.name  # ``_put`` keeps unique keys
            case Distinct():
                return list({each[request.field] for each in self.documents.values()})
            case Update():
                return self._update(request)
            case UpdateEach() if str(request.pairs[0][0].get("_id")).startswith("~limit:"):
                return request.read(request.send(self._buckets()))
            case UpdateEach():
                return self._update_each(request)
            case TakePermits():
                return request.read(request.send(self._buckets()))
            case Delete():
                gone = self._found(request.filter, None, 0, 0 if request.many else 1)
                for document in gone:
                    self._drop(document)
                return len(gone)
        raise AssertionError(f"the store does not know {request}")

    def _buckets(self) -> Any:
        if self.buckets is None:
            self.buckets = self._collection()
        return self.buckets

    def _collection(self) -> Any:
        """Return a new collection in memory."""
        now = lambda: instant(int(self._world.time))  # noqa: E731
        return MemoryCollection(memory_database("store"), "store", now)

    def _copied(self) -> Any:
        """Return a collection with the documents, for aggregates."""
        collection = self._collection()
        if self.documents:
            collection.insert_many([dict(each) for each in self.documents.values()])
        return collection

    def _found(self, filter: Mapping[str, Any], sort: Any, skip: int, limit: int) -> list[Document]:
        if "$expr" in filter:
            assert "_id" in filter, "a scan would read everything in vain"
            filter = dict(filter)
            (now, until) = filter.pop("$expr")["$lt"]
            assert now == "$$NOW"
            if instant(int(self._world.time)) >= until:
                return []
        if isinstance(filter.get("_id"), (str, ObjectId)):
            one = self.documents.get(filter["_id"])
            found = [one] if one is not None and matches(one, filter) else []
        else:
            test = matcher(filter)
            found = [each for each in self.documents.values() if test(each)]
        if sort is not None:
            ((first, direction), second) = sort[-2:]
            assert first in ("when", "due")
            assert second == ("_id", direction)
            found.sort(key=lambda each: (each[first], *place(each)[1:]), reverse=direction < 0)
            if len(sort) == 3:
                assert sort[0] == ("priority", -1)
                found.sort(key=lambda each: each["priority"], reverse=True)  # a stable sort
        return found[skip : skip + limit if limit else None]

    def _first_of_each(self, request: FirstOfEach) -> list[Document]:
        firsts: dict[Any, Document] = {}
        name, (by, *_), _ = request.order
        every = [each for each in self.documents.values() if name in each]
        for each in sorted(
            every, key=rank if by == "seq" else lambda each: (each[by], each["_id"])
        ):
            wanted = each["q"] == request.queue
            if request.names is None:
                wanted = wanted and each[name] > request.after
            else:
                wanted = wanted and each[name] in request.names
            if wanted:
                firsts.setdefault(each[name], dict(each))
        found = [firsts[name] for name in sorted(firsts)[:MAX_PAGE]]
        if request.not_ready is None:
            return found
        return [each for each in found if each["when"] > request.not_ready]

    def _take(self, request: FindAndModify) -> Document | None:
        found = self._found(request.filter, request.sort, 0, 1)
        if request.sort is not None:
            self.on_scan(self._asker, request, found)
        if not found:
            if not request.upsert:
                return None
            assert request.update is not None
            fresh = updated(_equalities(request.filter), request.update, inserting=True)
            if fresh["_id"] in self.documents:
                raise DuplicateKey("the id is taken")
            self._put(fresh)
            return None if request.before else dict(fresh)
        (document,) = found
        if request.update is None:
            self._drop(document)
            return document
        before = dict(document)
        after = dict(self._put(updated(document, request.update)))
        return before if request.before else after

    def _insert(self, documents: Iterable[Any]) -> list[WriteFailure]:
        failures = []
        for index, raw in enumerate(documents):
            document = (
                bson.decode(raw.raw, OPTIONS) if isinstance(raw, RawBSONDocument) else dict(raw)
            )
            try:
                if document["_id"] in self.documents:
                    raise DuplicateKey("the id is taken")
                self._put(document)
            except DuplicateKey as error:
                failures.append(
                    WriteFailure(
                        index, "_id" if document["_id"] in self.documents else "key", error
                    )
                )
        return failures

    def _update(self, request: Update) -> Change:
        found = self._found(request.filter, None, 0, 0 if request.many else 1)
        if request.upsert and not found:
            fresh = self._put(updated(_equalities(request.filter), request.update, inserting=True))
            return Change(0, fresh["_id"])
        for document in found:
            self._put(updated(document, request.update))
        return Change(len(found), None)

    def _update_each(self, request: UpdateEach) -> tuple[int, list[WriteFailure]]:
        matched, failures = 0, []
        for index, pair in enumerate(request.pairs):
            try:
                matched += self._update(Update(*pair, many=request.many)).matched
            except DuplicateKey as error:
                failures.append(WriteFailure(index, "key", error))
        return matched, failures

    def _drop(self, document: Document) -> None:
        self.on_change(document, None)
        del self.documents[document["_id"]]

    def _put(self, document: Document) -> Document:
        id, key = document["_id"], document.get("key")
        for other in self.documents.values() if key is not None else ():
            if other["_id"] != id and other.get("key") == key and other["q"] == document["q"]:
                raise DuplicateKey("the key is taken")
        for unique in ("lock", "slot"):
            for other in self.documents.values() if unique in document else ():
                same = other["q"] == document["q"] and other.get(unique) == document[unique]
                if same and other["_id"] != id:
                    raise DuplicateKey(f"the {unique} is taken")
        before = self.documents.get(id)
        if before is None or any(before.get(name) != document.get(name) for name in ("q", "when")):
            self.written[id] = self._world.time
        if before is not None:
            self.on_change(before, document)
        self.documents[id] = document
        return document

    def ready(self, queue: str) -> list[tuple[float, Document]]:
        """Return the claimable messages, each with the time since when it is claimable."""
        now = instant(self._world.time)
        return [
            (max(self.written[id], millis(document["when"])), document)
            for id, document in self.documents.items()
            if document["q"] == queue and document["when"] <= now and "record" not in document
        ]


# ---- time


class Pause:
    """A wait that a task yields: it ends at an instant, or when ``end`` is called."""

    __slots__ = ("_world", "over", "task", "until")

    def __init__(self, world: World, until: float) -> None:
        self._world, self.until = world, until
        self.over = False
        self.task: Task | None = None

    def end(self) -> None:
        """End the pause now."""
        if not self.over and self.task is not None:
            self._world.schedule(self._world.time, self)


Task = Generator[Pause, None, Any]


class World:
    """Virtual time in milliseconds, the store, and the processes."""

    def __init__(self, seed: int, *, lost: float = 0, doubled: float = 0, late: float = 0) -> None:
        self.time = 0.0
        self.random = random.Random(seed)
        self.store = Store(self)
        self.processes: list[Process] = []
        #: The probability that a signal is lost, doubled or late, for each process that receives
        #: it.
        self.fault_rates = (lost, doubled, late)
        self._heap: list[tuple[float, int, Pause]] = []
        self._ticket = itertools.count()

    def schedule(self, at: float, pause: Pause) -> None:
        """End a pause at this time at the latest."""
        heapq.heappush(self._heap, (at, next(self._ticket), pause))

    def spawn(self, task: Task, at: float = 0) -> None:
        """Start a task at this time."""
        pause = Pause(self, at)
        pause.task = task
        self.schedule(max(at, self.time), pause)

    def run(self, until: float) -> None:
        """Advance the time."""
        while self._heap and self._heap[0][0] <= until:
            at, _, pause = heapq.heappop(self._heap)
            if pause.over or pause.task is None:
                continue
            pause.over = True
            self.time = max(self.time, at)
            try:
                upcoming = next(pause.task)
            except StopIteration:
                continue
            upcoming.task = pause.task
            self.schedule(upcoming.until, upcoming)
        self.time = max(self.time, until)

    def finish(self, running: Generator[Pause, None, T]) -> T:
        """Run a process to its end. Return its result, or raise its error."""
        results: list[Any] = []

        def task() -> Task:
            try:
                results.append((yield from running))
            except QueueError as error:
                results.append(error)

        self.spawn(task(), self.time)
        while not results:
            self.run(self.time + 5)
        if isinstance(results[0], Exception):
            raise results[0]
        result: T = results[0]
        return result

    def sleep(self, duration: float) -> Pause:
        """Return a pause, which a task yields."""
        return Pause(self, self.time + duration)

    def emit(self, source: Process, queue: str, when: datetime | None) -> None:
        """Send a signal to every process that listens; it may be lost, doubled or late."""
        lost, doubled, late = self.fault_rates
        for each in self.processes:
            if each.queue != queue or self.random.random() < lost:
                continue
            for _ in range(2 if self.random.random() < doubled else 1):
                delay = (
                    self.random.uniform(200, 4000)
                    if self.random.random() < late
                    else self.random.uniform(0, 3)
                )
                self.spawn(self._deliver(each, when), self.time + delay)

    def _deliver(self, process: Process, when: datetime | None) -> Task:
        process.receive_signal(when)
        yield from ()


class Process:
    """One client: its waiters, its subscription to signals, and the error of its clock."""

    #: How long a command travels to the server, and its answer back, in milliseconds.
    DISTANCE = (0.2, 1.5)

    def __init__(
        self, world: World, queue: str, *, skew: float = 0, scan: type[ScanState] = ScanState
    ) -> None:
        self.world, self.queue, self.skew = world, queue, skew
        self.waiters = Waiters(queue)
        self.waiters.scan = scan()
        self.commands: list[Any] = []
        self._listening = False
        self._received: list[datetime | None] = []
        self._leader: Pause | None = None
        #: When it received a signal for a message that was ready, or received messages.
        self.active_at = [0.0]
        world.processes.append(self)

    def now(self) -> datetime:
        """Return the primary's time in whole milliseconds, as this process estimates it."""
        return instant(int(self.world.time + self.skew))

    def receive_signal(self, when: datetime | None) -> None:
        """Receive a signal."""
        if self._listening:
            self._received.append(when)
            if self._leader is not None:
                self._leader.end()

    def run(self, plan: Plan[T], *, slow: float = 0) -> Generator[Pause, None, T]:
        """Run a plan as a driver does; ``slow``: how long an insert takes to arrive."""
        try:
            request = next(plan)
            while True:
                try:
                    answer = yield from self._answer(request, slow)
                except QueueError as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _each(self, plans: Any, slow: float) -> Generator[Pause, None, list[Any]]:
        """Run plans one after the other."""
        results: list[Any] = [None] * len(plans)
        for place, plan in enumerate(plans):
            results[place] = yield from self.run(plan, slow=slow)
        return results

    def _answer(self, request: Any, slow: float) -> Generator[Pause, None, Any]:
        world = self.world
        match request:
            case ServerTime():
                return self.now()
            case MonotonicTime():
                return world.time / 1000
            case EnsureQueue():
                if request.levels:
                    yield from self.run(namespace.read_or_create_record(request))
                record = record_id(request.queue)
                fresh = {"_id": record, "q": request.queue, "when": self.now(), "record": True}
                world.store.documents.setdefault(
                    record, fresh | {"kind": request.kind, "v": namespace.VERSION}
                )
                return request.kind
            case Signal():
                if request.queue == self.queue:
                    # This process knows at once; its waiting consumers receive it from the bus.
                    self.waiters.on_signal(request.when, self.now())
                world.emit(self, request.queue, request.when)
                return None
            case Coalesce():
                # Like blocking clients: each call runs alone, and all calls share one scan state.
                return (yield from self.run(request.batch([request.item]), slow=slow))[0]
            case Latecomers() | Tell():
                return None
            case Concurrently():
                return (yield from self._each(request.plans, slow))
            case Listen():
                began, self._listening = not self._listening, True
                return began
            case Wait():
                return (yield from self._wait(request))
        self.commands.append(request)
        yield world.sleep(
            world.random.uniform(*self.DISTANCE)
            + (slow if isinstance(request, (Insert, FindAndModify)) else 0)
        )
        try:
            return world.store.answer(self, request)
        finally:
            yield world.sleep(world.random.uniform(*self.DISTANCE))

    def _on_signal(self, when: datetime | None) -> bool:
        scan_now = self.waiters.on_signal(when, self.now())
        if scan_now:
            self.active_at.append(self.world.time)
        return scan_now

    def _wait(self, request: Wait) -> Generator[Pause, None, bool]:
        deadline = None
        if request.deadline is not None:
            # Rounded down, it comes before the deadline, and the wait begins anew for ever.
            deadline = math.nextafter(request.deadline * 1000, math.inf)
        until = millis(request.until) - self.skew
        pause = Pause(self.world, until if deadline is None else min(until, deadline))
        leads = self.waiters.enter(pause.end, request.until)
        guards = not leads and self.waiters.guard(request.until)
        try:
            if not leads:
                if not guards:
                    pause.until = float("inf") if deadline is None else deadline
                yield pause
                return True
            if not self._received:
                self._leader = pause
                yield pause
                self._leader = None
            if not self._received:
                return True
            received, self._received = self._received, []
            return self._on_signal(
                None if None in received else min(each for each in received if each is not None)
            )
        finally:
            self.waiters.leave(pause.end, leads, guards)
