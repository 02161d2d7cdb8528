"""Plans run step by step over a store in memory: cut, stalled, or with replies that are lost.

Time passes only when a test says so. A write at w:1 is undone by ``fail_over``, unless a write that
waits for a majority came after it.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any, Final, TypeVar

import bson

import signals
from pyqueue.backends import indexes, managing, namespace
from pyqueue.backends.limits import indexes as limit_indexes
from pyqueue.backends.limits.rates import TakePermits
from pyqueue.backends.options import QueueShape
from pyqueue.backends.transitions import record_id
from pyqueue.backends.uses import Used, note, seconds_of
from pyqueue.clock import Clock
from pyqueue.concurrently import Concurrently, Sleep
from pyqueue.errors import LeaseLost, MissingIndex, QueueError, Unavailable
from pyqueue.gathers import Look
from pyqueue.hooks import Tell
from pyqueue.memory import memory_database
from pyqueue.payloads import OPTIONS
from pyqueue.requests import (
    Aside,
    AtOneInstant,
    Coalesce,
    Command,
    Delete,
    Document,
    EnsureQueue,
    Find,
    FindAndModify,
    ForgetQueue,
    Insert,
    Latecomers,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Signal,
    ToTheEnd,
    Update,
    UpdateEach,
    Wait,
)
from pyqueue.runtime.drivers import Driver
from pyqueue.runtime.waiters import Waiters
from pyqueue.waiting_any import WaitForAny
from tests.plans.runner import NOW

T = TypeVar("T")
WRITES: Final = (Insert, Update, UpdateEach, Delete, FindAndModify, TakePermits)

#: Called with the number of a command and whether it was carried out; may raise.
Fault = Callable[[int, bool], None]


class Cut(BaseException):
    """The process died here."""


def cut(at: int, *, after: bool) -> Fault:
    """Return a fault: the process dies before or after its command number ``at``."""

    def fault(number: int, done: bool) -> None:
        if number == at and done == after:
            raise Cut

    return fault


def lost_request(at: int) -> Fault:
    """Return a fault: command number ``at`` does not arrive, and the caller cannot know that."""

    def fault(number: int, done: bool) -> None:
        if number == at and not done:
            raise Unavailable("no answer")

    return fault


def lost_reply(at: int) -> Fault:
    """Return a fault: command number ``at`` is carried out, but its reply is lost."""

    def fault(number: int, done: bool) -> None:
        if number == at and done:
            raise Unavailable("no answer")

    return fault


def asleep(at: int, act: Callable[[], object], *, after: bool) -> Fault:
    """Return a fault: the process sleeps before its command number ``at``, or before the reply."""

    def fault(number: int, done: bool) -> None:
        if number == at and done == after:
            act()

    return fault


#: Each makes the fault of one command: the process ends, or does not learn the outcome.
FAULT_AT: Final[Mapping[str, Callable[[int], Fault]]] = {
    "dies before": lambda at: cut(at, after=False),
    "dies after": lambda at: cut(at, after=True),
    "loses a request": lost_request,
    "loses a reply": lost_reply,
}


class _Clock(Clock):
    """The clock of a store, by which it counts too."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self._steps = steps

    def now(self) -> datetime:
        return self._steps.now


def shared(plans: Sequence[Plan[None]]) -> Plan[list[bool]]:
    """Run plans whose calls go in one batch. Return of each whether it kept its lease."""
    waiting = []
    for plan in plans:
        request = next(plan)
        while not isinstance(request, Coalesce):
            request = plan.send((yield request))
        waiting.append((plan, request))
    answers = yield from waiting[0][1].batch([request.item for _, request in waiting])
    kept: list[bool] = []
    for (plan, _), answer in zip(waiting, answers, strict=True):
        try:
            request = plan.send(answer)
            while True:
                request = plan.send((yield request))
        except StopIteration:
            kept.append(True)
        except LeaseLost:
            kept.append(False)
    return kept


def _noting(queue: str, shape: object) -> Plan[None]:
    """Note a use of a queue that is deleted when unused, as if the last note was long ago."""
    if (seconds_s := seconds_of(shape)) is not None:
        yield from note(queue, seconds_s)


def _ensuring(request: EnsureQueue) -> Plan[str]:
    """Read or create a record, and note the use, as ``KnownQueues`` does."""
    yield from _noting(request.queue, request.shape)
    record = yield from namespace.read_or_create_record(request)
    if request.kind is not None and seconds_of(request.shape) is None:
        yield from _noting(request.queue, record.shape)
    return record.kind


def _to_the_end(running: Generator[Any, None, T]) -> Generator[Any, None, T]:
    """Run a plan to its end. If it was cancelled, raise that only then."""
    cancelled: CancelledError | None = None
    while True:
        try:
            command = next(running)
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            return stop.value  # type: ignore[no-any-return]
        try:
            yield command
        except CancelledError as error:
            cancelled = error


class Steps:
    """One store, one clock, and any number of processes, which are plans."""

    def __init__(self, before: list[Document] | None = None) -> None:
        self.database = memory_database("pyqueue")
        bus = signals.NullBus()
        self.driver = Driver(
            self.database, "pyqueue", bus=bus, durability="majority", timeout=30, topic="t"
        )
        self.driver.run(managing.ping())
        self.driver.run(indexes.make_indexes("pyqueue", limit_indexes.LIMIT_INDEXES))
        self.seconds = 0.0
        self.driver.clock = _Clock(self)
        self.signals: list[tuple[str, datetime | None]] = []
        self.told: list[Tell] = []
        #: The gathers at which a process is to look soon.
        self.looked: list[Any] = []
        #: The waiters that hear signals. Their topic is the name of their queue.
        self.listeners: list[Waiters] = []
        #: The commands of the last plan.
        self.commands: list[Command[Any]] = []
        if before:
            self.collection.insert_many(deepcopy(before))
        #: Whether the last one of concurrent plans runs first.
        self.backwards = False
        #: How long each command takes, in seconds. If set, concurrent plans take as long as if
        #: they ran at once.
        self.trip_s = 0.0
        #: State after a fail-over, if the test needs it.
        self.safe: list[Document] | None = None

    @property
    def now(self) -> datetime:
        """Return the time of the primary."""
        return NOW + timedelta(seconds=self.seconds)

    @property
    def collection(self) -> Any:
        """Return the collection."""
        return self.database["pyqueue"]

    def all(self) -> list[Document]:
        """Return every document."""
        found = self.collection.find()
        return [bson.decode(bson.encode(each, codec_options=OPTIONS), OPTIONS) for each in found]

    def fail_over(self) -> None:
        """Undo the writes at w:1 that no other write covers."""
        assert self.safe is not None, "set it at the beginning"
        self.collection.delete_many({})
        self.collection.insert_many(deepcopy(self.safe))

    def run(self, plan: Plan[T], fault: Fault | None = None) -> T:
        """Run a plan to its end."""
        return resume(self.steps(plan, fault))

    def steps(self, plan: Plan[T], fault: Fault | None = None) -> Generator[Any, None, T]:
        """Run a plan; stop before each command."""
        commands: list[Command[Any]] = []
        self.commands = commands
        result: T = yield from self._drive(plan, fault, commands)
        return result

    def stalled(self, plan: Plan[T], at: int) -> Generator[Any, None, T] | None:
        """Run a plan up to its command number ``at``. None: it has fewer."""
        running = self.steps(plan)
        try:
            for _ in range(at + 1):
                next(running)
        except StopIteration:
            return None
        return running

    def _drive(
        self, plan: Plan[Any], fault: Fault | None, commands: list[Command[Any]]
    ) -> Generator[Any, None, Any]:
        try:
            request = next(plan)
            while True:
                try:
                    answer = yield from self._answer(request, fault, commands)
                except (Exception, CancelledError) as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value

    def _one_by_one(
        self, request: Concurrently[T], fault: Fault | None, commands: list[Command[Any]]
    ) -> Generator[Any, None, list[T]]:
        """Run concurrent plans one after the other. The first of them is the caller's."""
        results: dict[int, T] = {}
        cancelled: CancelledError | None = None
        places = range(len(request.plans))
        began = ended = self.seconds
        for number, place in enumerate(reversed(places) if self.backwards else places):
            if self.trip_s:
                ended = max(ended, self.seconds)
                if number % request.at_once == 0:
                    began = ended
                self.seconds = began
            running = self._drive(request.plans[place], fault, commands)
            if request.outlive and place:
                running = _to_the_end(running)
            elif cancelled is not None:
                continue
            try:
                results[place] = yield from running
            except CancelledError as error:
                cancelled = error
        self.seconds = max(ended, self.seconds)
        if cancelled is not None:
            raise cancelled
        return [results[place] for place in places]

    def _answer(
        self, request: Any, fault: Fault | None, commands: list[Command[Any]]
    ) -> Generator[Any, None, Any]:
        match request:
            case ServerTime():
                return self.now
            case MonotonicTime():
                return self.seconds
            case EnsureQueue():
                return (yield from self._drive(_ensuring(request), fault, commands))
            case QueueShape():
                found = self.collection.find_one({"_id": record_id(request.queue)})
                return {} if found is None else found.get("shape", {})
            case Used():
                noting = _noting(request.queue, request.shape)
                return (yield from self._drive(noting, fault, commands))
            case ForgetQueue() | Latecomers():
                return None
            case Look():
                return self.looked.append(request.id)
            case Tell():
                return self.told.append(request)
            case Signal():
                for each in self.listeners:
                    if each.topic == request.queue:
                        each.on_signal(request.when, self.now)
                return self.signals.append((request.queue, request.when))
            case AtOneInstant():
                return (yield from self._drive(request.plan(None), fault, commands))
            case Aside():
                return (yield from self._drive(request.plan, fault, commands))
            case ToTheEnd():
                return (yield from _to_the_end(self._drive(request.plan, fault, commands)))
            case Coalesce():
                batch = request.batch([request.item])
                return (yield from self._drive(batch, fault, commands))[0]
            case Concurrently():
                return (yield from self._one_by_one(request, fault, commands))
            case Sleep():
                self.seconds += request.seconds
                return None
            case Listen():
                return False
            case Wait():
                self.seconds = max(self.seconds, (request.until - NOW).total_seconds())
                return True
            case WaitForAny():
                until = min(each.until for each in request.waits)
                self.seconds = max(self.seconds, (until - NOW).total_seconds())
                return True
        assert isinstance(request, Command), request
        yield request
        self.seconds += self.trip_s
        return self._sent(request, fault, commands)

    def _sent(self, request: Any, fault: Fault | None, commands: list[Command[Any]]) -> Any:
        """Return the answer to a command, with a fault before or after it."""
        number = len(commands)
        commands.append(request)
        if fault is not None:
            fault(number, False)
        try:
            answer = self._asked(request)
        except MissingIndex:  # pragma: no cover
            raise AssertionError("mongomock has no hints") from None
        except QueueError:
            if fault is not None:
                fault(number, True)  # the server refused it, and the process may die then, too
            raise
        if self.safe is not None and isinstance(request, WRITES) and not request.w1:
            self.safe = self.all()
        if fault is not None:
            fault(number, True)
        return answer

    def _asked(self, request: Any) -> Any:
        """Return the answer to a command. A read at majority does not see later writes at w:1."""
        if self.safe is None or not (isinstance(request, Find) and request.majority):
            return self.driver.ask(request)
        newest = self.all()
        self.fail_over()
        answer = self.driver.ask(request)
        self.collection.delete_many({})
        self.collection.insert_many(newest)
        return answer


def lasting(before: list[Document] | None = None) -> Steps:
    """Return a store whose documents do not expire: mongomock takes the wall clock."""
    steps = Steps(before)
    steps.collection.drop_index("expires")
    return steps


def resume(running: Generator[Any, None, T]) -> T:
    """Run a stalled plan to its end, and return its result."""
    while True:
        try:
            next(running)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


def at_each_command(
    made: Callable[[], Steps], plan: Callable[[], Plan[Any]], least: int
) -> Iterator[tuple[Steps, Generator[Any, None, Any]]]:
    """Yield new stores with the plan, stalled before each of its commands in turn.

    Args:
        made: Makes a store.
        plan: Makes the plan.
        least: The plan has more commands than this.
    """
    for at in range(100):
        steps = made()
        running = steps.stalled(plan(), at)
        if running is None:
            assert at > least, "fewer commands than expected"
            return
        yield steps, running
    raise AssertionError("more commands than expected")
