"""A world without a server and without a clock: processes that run real plans against documents in
memory, in virtual time.

Each process has a ``Line`` and ``Head`` of its own, as a client has. A command takes a few
milliseconds, and others come in between; a signal may be lost, doubled or late. So the rules of the
head are tried against what goes wrong, thousands of times in a second.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

import bson
from bson import ObjectId
from bson.raw_bson import RawBSONDocument

from pyqueue.backends import namespace
from pyqueue.backends.scan import ScanState
from pyqueue.errors import DuplicateKey
from pyqueue.payloads import OPTIONS
from pyqueue.requests import (
    Change,
    Coalesce,
    Count,
    Delete,
    Distinct,
    EnsureQueue,
    Find,
    FindAndModify,
    Insert,
    Listen,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateEach,
    Wait,
    WriteFailure,
)
from pyqueue.waiters import Waiters
from tests.plans.runner import NOW

__all__ = ["Process", "Store", "Task", "World", "instant", "millis", "place"]

T = TypeVar("T")
Document = dict[str, Any]


def instant(time: float) -> datetime:
    """The instant of a virtual time in milliseconds."""
    return NOW + timedelta(milliseconds=time)


def millis(when: datetime) -> float:
    """The virtual time of an instant."""
    return (when - NOW) / timedelta(milliseconds=1)


# ---- documents


def place(document: Mapping[str, Any]) -> tuple[datetime, bool, Any]:
    """Where a document stands in the order of claims: strs come before ObjectIds."""
    return document["when"], isinstance(document["_id"], ObjectId), document["_id"]


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "$lt": lambda value, bound: bool(value < bound),
    "$lte": lambda value, bound: bool(value <= bound),
    "$gt": lambda value, bound: bool(value > bound),
    "$gte": lambda value, bound: bool(value >= bound),
}


_TYPES: dict[str, type] = {
    "objectId": ObjectId,
    "date": datetime,
    "object": dict,
    "string": str,
    "array": list,
}


def matches(document: Mapping[str, Any], filter: Mapping[str, Any]) -> bool:
    """Whether a filter of the standard backend matches."""
    for name, wanted in filter.items():
        if name == "$or":
            if not any(matches(document, branch) for branch in wanted):
                return False
            continue
        outer, dot, inner = name.partition(".")
        if dot:  # a field of a field
            if not matches(document.get(outer) or {}, {inner: wanted}):
                return False
        elif not isinstance(wanted, dict):
            if document.get(name) != wanted:
                return False
        elif not all(
            _holds(name in document, document.get(name), operator, it)
            for operator, it in wanted.items()
        ):
            return False
    return True


def _holds(there: bool, value: Any, operator: str, wanted: Any) -> bool:
    if operator in _COMPARE:  # within one type only, as the server does
        return type(value) is type(wanted) and _COMPARE[operator](value, wanted)
    match operator:
        case "$eq":
            return bool(value == wanted)
        case "$ne":
            return bool(value != wanted)
        case "$in":
            return value in wanted
        case "$exists":
            return there is wanted
        case "$not":
            return not all(_holds(there, value, *each) for each in wanted.items())
        case "$type":
            return isinstance(value, _TYPES[wanted])
    raise AssertionError(f"the store does not know {operator}")


def updated(document: Document, update: Mapping[str, Any], *, inserting: bool = False) -> Document:
    """A document as an update leaves it."""
    fresh = dict(document)
    for operator, fields in update.items():
        for name, value in fields.items():
            outer, dot, inner = name.partition(".")
            if dot:  # a field of a field
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
                case "$push":
                    fresh[name] = [*fresh.get(name, ()), *value["$each"]][value["$slice"] :]
                case "$setOnInsert":
                    if inserting:
                        fresh[name] = value
                case _:
                    raise AssertionError(f"the store does not know {operator}")
    return fresh


class Store:
    """The one collection: what the plans of the standard backend ask of it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.documents: dict[Any, Document] = {}
        #: When each message was put where it stands now, in true virtual time.
        self.written: dict[Any, float] = {}
        #: Told of every look for something to claim: who looks, the request, and what it found.
        self.on_look: Callable[[Process, Find | FindAndModify, list[Document]], None] = (
            lambda process, request, found: None
        )
        #: Told of every message that is changed or deleted: before, and after.
        self.on_change: Callable[[Document, Document | None], None] = lambda before, after: None
        self._asker: Any = None

    def answer(self, process: Process, request: Any) -> Any:
        """Carry one command out, at once."""
        self._asker = process
        match request:
            case Find():
                found = self._found(request.filter, request.sort, request.skip, request.limit)
                if request.sort is not None and request.limit > 1:
                    self.on_look(process, request, found)
                return [dict(each) for each in found]
            case FindAndModify():
                return self._take(request)
            case Insert():
                return self._insert(request.documents)
            case Count():
                return len(self._found(request.filter, None, 0, 0))
            case Distinct():
                return list({each[request.field] for each in self.documents.values()})
            case Update():
                return self._update(request)
            case UpdateEach():
                return sum(self._update(Update(*pair)).matched for pair in request.pairs), []
            case Delete():
                gone = self._found(request.filter, None, 0, 0 if request.many else 1)
                for document in gone:
                    self._drop(document)
                return len(gone)
        raise AssertionError(f"the store does not know {request}")

    def _found(self, filter: Mapping[str, Any], sort: Any, skip: int, limit: int) -> list[Document]:
        if isinstance(filter.get("_id"), (str, ObjectId)):
            one = self.documents.get(filter["_id"])
            found = [one] if one is not None and matches(one, filter) else []
        else:
            found = [each for each in self.documents.values() if matches(each, filter)]
        if sort is not None:
            ((first, direction), second) = sort
            assert (first, second) == ("when", ("_id", direction))
            found.sort(key=place, reverse=direction < 0)
        return found[skip : skip + limit if limit else None]

    def _take(self, request: FindAndModify) -> Document | None:
        found = self._found(request.filter, request.sort, 0, 1)
        if request.sort is not None:
            self.on_look(self._asker, request, found)
        if not found:
            if not request.upsert:
                return None
            assert request.update is not None
            fresh = updated(dict(request.filter), request.update, inserting=True)
            if fresh["_id"] in self.documents:
                raise DuplicateKey("the id is taken")
            self._put(fresh)
            return dict(fresh)
        (document,) = found
        if request.update is None:
            self._drop(document)
            return document
        return dict(self._put(updated(document, request.update)))

    def _insert(self, documents: Iterable[Any]) -> list[WriteFailure]:
        faults = []
        for index, raw in enumerate(documents):
            document = (
                bson.decode(raw.raw, OPTIONS) if isinstance(raw, RawBSONDocument) else dict(raw)
            )
            try:
                if document["_id"] in self.documents:
                    raise DuplicateKey("the id is taken")
                self._put(document)
            except DuplicateKey as error:
                faults.append(
                    WriteFailure(
                        index, "_id" if document["_id"] in self.documents else "key", error
                    )
                )
        return faults

    def _update(self, request: Update) -> Change:
        found = self._found(request.filter, None, 0, 0 if request.many else 1)
        if request.upsert and not found:
            fresh = self._put(updated(dict(request.filter), request.update, inserting=True))
            return Change(0, fresh["_id"])
        for document in found:
            self._put(updated(document, request.update))
        return Change(len(found), None)

    def _drop(self, document: Document) -> None:
        self.on_change(document, None)
        del self.documents[document["_id"]]

    def _put(self, document: Document) -> Document:
        id, key = document["_id"], document.get("key")
        for other in self.documents.values() if key is not None else ():
            if other["_id"] != id and other.get("key") == key and other["q"] == document["q"]:
                raise DuplicateKey("the key is taken")
        before = self.documents.get(id)
        if before is None or any(before.get(name) != document.get(name) for name in ("q", "when")):
            self.written[id] = self._world.time
        if before is not None:
            self.on_change(before, document)
        self.documents[id] = document
        return document

    def ready(self, queue: str) -> list[tuple[float, Document]]:
        """What may be claimed, and since when."""
        now = instant(self._world.time)
        return [
            (max(self.written[id], millis(document["when"])), document)
            for id, document in self.documents.items()
            if document["q"] == queue and document["when"] <= now and "record" not in document
        ]


# ---- time


class Pause:
    """What a task waits for: an instant, or that somebody ends it before."""

    __slots__ = ("_world", "over", "task", "until")

    def __init__(self, world: World, until: float) -> None:
        self._world, self.until = world, until
        self.over = False
        self.task: Task | None = None

    def end(self) -> None:
        """Go on now."""
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
        #: How likely each misfortune is for a signal, for each process that should hear it.
        self.fate = (lost, doubled, late)
        self._heap: list[tuple[float, int, Pause]] = []
        self._ticket = itertools.count()

    def schedule(self, at: float, pause: Pause) -> None:
        """Have a pause end then, at the latest."""
        heapq.heappush(self._heap, (at, next(self._ticket), pause))

    def spawn(self, task: Task, at: float = 0) -> None:
        """Begin a task then."""
        pause = Pause(self, at)
        pause.task = task
        self.schedule(max(at, self.time), pause)

    def run(self, until: float) -> None:
        """Let the time pass."""
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

    def sleep(self, duration: float) -> Pause:
        """To be yielded by a task."""
        return Pause(self, self.time + duration)

    def emit(self, source: Process, queue: str, when: datetime | None) -> None:
        """Carry a signal to every process that listens, unless fate wills otherwise."""
        lost, doubled, late = self.fate
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
        process.hear(when)
        yield from ()


class Process:
    """One client: its line, its head, its ear on the bus, its error about the primary's clock."""

    #: How long a command takes to the server, and its answer back.
    DISTANCE = (0.2, 1.5)

    def __init__(
        self, world: World, queue: str, *, skew: float = 0, head: type[ScanState] = ScanState
    ) -> None:
        self.world, self.queue, self.skew = world, queue, skew
        self.line = Waiters(queue)
        self.line.scan = head()
        self.commands: list[Any] = []
        self._listening = False
        self._heard: list[datetime | None] = []
        self._leader: Pause | None = None
        #: When it heard of something that is there by now.
        self.life = [0.0]
        world.processes.append(self)

    def now(self) -> datetime:
        """The instant at the primary, as this process believes; in whole milliseconds."""
        return instant(int(self.world.time + self.skew))

    def hear(self, when: datetime | None) -> None:
        """A signal comes in."""
        if self._listening:
            self._heard.append(when)
            if self._leader is not None:
                self._leader.end()

    def run(self, plan: Plan[T], *, slow: float = 0) -> Generator[Pause, None, T]:
        """Carry a plan out, as a driver does; ``slow``: how long an insert is on its way."""
        try:
            request = next(plan)
            while True:
                try:
                    answer = yield from self._answer(request, slow)
                except DuplicateKey as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]

    def _answer(self, request: Any, slow: float) -> Generator[Pause, None, Any]:
        world = self.world
        match request:
            case ServerTime():
                return self.now()
            case EnsureQueue():
                record = namespace.record_id(request.queue)
                fresh = {"_id": record, "q": request.queue, "when": self.now(), "record": True}
                world.store.documents.setdefault(
                    record, fresh | {"kind": request.kind, "v": namespace.VERSION}
                )
                return request.kind
            case Signal():
                if request.queue == self.queue:
                    self.line.on_signal(
                        request.when, self.now()
                    )  # this process knows at once; sleepers hear it from the bus
                world.emit(self, request.queue, request.when)
                return None
            case Coalesce():  # as blocking clients do: each for itself, all with one head
                return (yield from self.run(request.batch([request.item]), slow=slow))[0]
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

    def _take_in(self, when: datetime | None) -> bool:
        look = self.line.on_signal(when, self.now())
        if look:
            self.life.append(self.world.time)
        return look

    def _wait(self, request: Wait) -> Generator[Pause, None, bool]:
        deadline = None if request.deadline is None else millis(request.deadline) - self.skew
        until = millis(request.until) - self.skew
        pause = Pause(self.world, until if deadline is None else min(until, deadline))
        leads = self.line.enter(pause.end, request.until)
        guards = not leads and self.line.guard(request.until)
        try:
            if not leads:
                if not guards:
                    pause.until = float("inf") if deadline is None else deadline
                yield pause
                return True
            if not self._heard:
                self._leader = pause
                yield pause
                self._leader = None
            if not self._heard:
                return True
            heard, self._heard = self._heard, []
            return self._take_in(
                None if None in heard else min(each for each in heard if each is not None)
            )
        finally:
            self.line.leave(pause.end, leads, guards)
