"""The rules that the blocking and the async driver share.

They decide to which collection a command goes, how errors are translated, when the primary is asked
for its time, and which events are counted. This module sends nothing; ``runtime/drivers.py`` does.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

import pymongo
from pymongo import ReadPreference, WriteConcern, _csot, errors
from pymongo.read_concern import ReadConcern

from pyqueue.aside import Beside
from pyqueue.backends.options import QueueShape
from pyqueue.backends.recovering import Sweep
from pyqueue.backends.uses import Used
from pyqueue.clock import Clock, Sample
from pyqueue.errors import ConfigurationError, QueueClosed, TimeLimitReached, Unavailable
from pyqueue.gathers import Look
from pyqueue.hooks import HookCalls, Tell
from pyqueue.memory import MemoryCollection, is_memory
from pyqueue.payloads import OPTIONS
from pyqueue.requests import (
    Aside,
    Coalesce,
    Command,
    EnsureQueue,
    ForgetQueue,
    Hello,
    Insert,
    Latecomers,
    MonotonicTime,
    Plan,
    Request,
    ServerTime,
    Signal,
    UpdateEach,
    Wait,
)
from pyqueue.runtime.known_queues import KnownQueues
from pyqueue.runtime.looking import Looks
from pyqueue.runtime.server_errors import (
    lacks_sessions,
    matched_count,
    shown_cause,
    transient,
    translated,
    write_failures,
)
from pyqueue.runtime.using import Uses
from pyqueue.runtime.waiters import Waiters, seconds_left
from signals import AsyncBus, Bus, Listener


class ListensAsync(Protocol):
    """A listener of a bus whose ``wait`` is awaited."""

    @property
    def when(self) -> datetime | None:
        """The earliest instant in the events that the last successful wait heard."""

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds. Return whether an event was heard."""

    def close(self) -> None:
        """Stop listening."""


L = TypeVar("L", Listener, ListensAsync)

#: How many times in a row the primary is asked for its time, to use the quickest answer.
_CLOCK_SAMPLES: Final = 5

#: How long a client remembers a queue that it does not use, and how often it drops such queues.
_IDLE_S: Final = 600.0
_DROP_INTERVAL_S: Final = 60.0

#: How long a waiting consumer tries to refresh the clock, and how long it waits before it tries
#: again. While it tries, it hears no signal.
REFRESH_TIMEOUT_S: Final = 5.0
_REFRESH_REST_S: Final = (2.0, 3.0)
#: Between which parts of ``poll`` a queue is checked. Each queue of a client has its own part, so
#: that consumers which an outage woke together do not all check again at one moment.
_POLL_SHARES: Final = (0.75, 1.0)
#: How many seconds too early a wait may end.
_EARLY_S: Final = 0.01

#: Stands for an answer for which the driver has to wait.
PENDING: Final = object()

#: A transaction that only reads. "local" shows the data of the primary at the first read; a
#: "snapshot" may be older than a claim at w:1 that was just acknowledged.
READ_ONLY: Final[Mapping[str, Any]] = {
    "read_concern": ReadConcern("local"),
    "write_concern": WriteConcern(w=1),
    "read_preference": ReadPreference.PRIMARY,
}

#: How many times a process was forked, from the first process to this process.
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


def _admit_none(items: list[Any]) -> None:
    """Add no call to a batch, because batches of a blocking driver do not grow while they run."""


def collection_of(database: Any, name: str) -> Any:
    """Return a collection that reads from the primary and returns aware datetimes in UTC."""
    if is_memory(database):
        return MemoryCollection(database, name)
    options = database.codec_options.with_options(
        document_class=dict,
        tz_aware=OPTIONS.tz_aware,
        tzinfo=OPTIONS.tzinfo,
        uuid_representation=OPTIONS.uuid_representation,
        datetime_conversion=OPTIONS.datetime_conversion,
    )
    return database.get_collection(
        name, codec_options=options, read_preference=ReadPreference.PRIMARY
    )


class BaseDriver(Generic[L]):
    """The base of both drivers, blocking and async.

    Args:
        database: The database object.
        name: The name of the collection.
        bus: The bus that wakes consumers.
        durability: "majority" or "acknowledged".
        timeout: Seconds that a command may take, including its retries.
        topic: The prefix of the topics on the bus.
        owner: A function that returns the label of this process, for the records of queues.
        hooks: The hooks of the client, or None.
    """

    def __init__(
        self,
        database: Any,
        name: str,
        *,
        bus: Bus | AsyncBus,
        durability: str,
        timeout: float,
        topic: str,
        owner: Callable[[], str] = str,
        hooks: HookCalls | None = None,
    ) -> None:
        #: The gathers that this client checks soon.
        self.looks: Looks
        self.clock = Clock()
        self.stats: Counter[str] = Counter()
        self._sweep = Sweep()
        self.bus: Bus | AsyncBus = bus
        self.topic = topic
        self.hooks = hooks
        self.closed = False
        #: The signals, events and checks that wait until a transaction commits, keyed by the
        #: id() of its session, because the sessions of motor cannot be hashed.
        self.sessions: dict[int, list[Signal | Tell | Look]] = {}
        #: Whether the server is a replica set or a mongos. If so, it has transactions.
        self.replicated = False
        self._admit: Callable[[list[Any]], object] = _admit_none
        self._name, self._timeout = name, timeout
        self._forks = _forks
        self._prepared = False
        #: The member that was primary when the clock was last sampled.
        self._primary: tuple[object, ...] = ()
        self._waiters: dict[str, Waiters] = {}
        self._drop_at = 0.0
        #: The tables of the waiting consumers of this driver, and of the adapters that use it.
        self._all_waiters = [self._waiters]
        self._listeners: dict[Waiters, L] = {}
        #: The uses of queues that are deleted when unused.
        self.uses = Uses(lambda: self.clock.now())
        #: The known records of queues, and the known indexes.
        self.known = KnownQueues(name, owner, self.uses)
        self.memory = is_memory(database)
        if self.memory:
            self._plain = self._durable = MemoryCollection(database, name, lambda: self.clock.now())
            self._w1 = self._majority = self._plain
        else:
            self._plain = collection_of(database, name)
            primary_only = WriteConcern(w=1)
            majority = WriteConcern(w="majority", j=True)
            self._durable = self._plain.with_options(
                write_concern=majority if durability == "majority" else primary_only
            )
            self._w1 = self._plain.with_options(write_concern=primary_only)
            self._majority = self._plain.with_options(
                read_concern=ReadConcern("majority"), write_concern=majority
            )

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that are waiting in this client.

        "STREAM~GROUP" stands for the consumers of a consumer group, which hear the events of the
        stream. A name that begins with "~" is itself a topic.
        """
        found = self._waiters.get(queue)
        if found is None:
            self._drop_idle()
            found = self._waiters.setdefault(
                queue,
                Waiters(
                    f"{self.topic}/{queue.partition('~')[0] or queue}",
                    partial(self.stats.update, ["dead"]),
                    self._sweep,
                    poll_share=random.uniform(*_POLL_SHARES),
                ),
            )
        found.used = time.monotonic()
        return found

    def _drop_idle(self) -> None:
        """Forget queues that have not been used for a while. Their next use costs one rescan.

        A queue with a listener is kept, because consumers have waited for its events.
        """
        now = time.monotonic()
        if now < self._drop_at:
            return
        self._drop_at = now + _DROP_INTERVAL_S
        for queue, waiters in list(self._waiters.items()):
            idle = now - waiters.used > _IDLE_S and not waiters.count
            if idle and waiters not in self._listeners:
                self._waiters.pop(queue, None)
        self.known.forget_idle(_IDLE_S)

    def check_usable(self) -> None:
        """Refuse a call if the client is closed, or was created before the process forked."""
        if self.closed:
            raise QueueClosed("the client was closed")
        if self._forks != _forks:  # not covered: in a forked process, which ends at once
            raise ConfigurationError(
                "this client was created before the process forked; create a client after the fork"
            )

    def _deadline(self, request: Command[Any]) -> AbstractContextManager[Any]:
        """Return a context manager that limits the time of one command, including its retries.

        A command in a transaction gets no limit here, because its caller sets the limits.
        """
        if self.memory or request.session is not None:
            return nullcontext()
        return pymongo.timeout(_limit_s(request, self._timeout))

    def _preparation(self) -> Plan[None]:
        """Set the clock from the primary. If the primary changed, also create missing indexes."""
        if not self.clock.stale:
            return
        if self._prepared:
            self.clock.touch()  # concurrent callers use the current estimate
        try:
            primary = yield from self._sample()
            if not self._prepared or primary != self._primary:
                self._expect_changes()
                self.clock.changes += 1
                self.known.forget_records()  # the records may be missing too
                yield from self.known.make_indexes()
                self._primary, self._prepared = primary, True
                self.clock.touch()
        except BaseException:
            self.clock.expire()
            raise

    def _sample(self) -> Plan[tuple[object, ...]]:
        """Ask the primary for its time, only once if the estimate is right. Return its identity."""
        if self.memory:
            self.clock.touch()
            return ()
        samples: list[Sample] = []
        while len(samples) < _CLOCK_SAMPLES:
            sent = time.monotonic()
            hello = yield from Hello()
            samples.append((sent, time.monotonic(), hello["localTime"]))
            if self._prepared and len(samples) == 1 and self.clock.agrees(samples[0]):
                break
        else:
            self.clock.sample(samples)
        self.replicated = "setName" in hello or hello.get("msg") == "isdbgrid"
        return hello.get("me"), hello.get("electionId")

    def _start_session(self) -> Any:
        return self._plain.database.client.start_session()

    def _send(self, request: Command[Any]) -> Any:
        self.stats["commands"] += 1
        if not self.replicated:
            request.server_limit_s = None  # there are no transactions that hold messages
        if request.session is not None:
            return request.send(self._plain)
        if request.majority:
            return request.send(self._majority)
        return request.send(self._w1 if request.w1 else self._durable)

    def _failed(self, request: Command[Any], error: Exception) -> Any:
        """Translate an error into an answer, or raise the error for the caller."""
        if isinstance(request, Beside):
            raise translated(error) from error
        if lacks_sessions(error) and id(request.session) in self.sessions:
            # Another connection has sessions, so the transaction is repeated.
            raise transient(error) from error
        if (
            request.session is not None
            and isinstance(error, errors.PyMongoError)
            and not lacks_sessions(error)
        ):
            raise error  # retry loops around transactions need the original error
        if isinstance(request, (Insert, UpdateEach)):
            failures = write_failures(error)
            if failures is not None:
                if any(isinstance(each.error, Unavailable) for each in failures):
                    self._expect_changes()
                return failures if isinstance(request, Insert) else (matched_count(error), failures)
        meant = self._meaning(error)
        if request.session is None and isinstance(meant, Unavailable):
            limit_s = _limit_s(request, self._timeout)
            remedy = f"time limit {limit_s:.3g} s; `pyqueue doctor` checks the server"
            meant = type(meant)(f"{meant} ({remedy})")
        try:
            raise meant from shown_cause(error, meant)
        finally:
            del error, meant  # such a cycle would keep the loop of a caller alive

    def _meaning(self, error: Exception) -> Exception:
        """Return the error that the caller gets, and count it."""
        meant = translated(error)
        if isinstance(meant, Unavailable) and not isinstance(meant, TimeLimitReached):
            self._expect_changes()
        self.stats["errors"] += 1
        return meant

    def _expect_changes(self) -> None:
        """Expect a new primary: ask for the time again, and scan the queues from the start.

        Claims may have been undone, and delayed pushes may arrive below the lower bounds of scans.
        """
        self.clock.expire()
        for waiters in _every_waiters(self):
            waiters.scan.forget()

    def _watch(self, request: Wait, listener: L) -> Generator[float | None, bool, bool]:
        """Wait as the leader. Yield how many seconds to listen, or None to refresh the clock.

        A clock that is behind hides ready messages. While all consumers of this client wait,
        perhaps no other call refreshes the clock.
        """
        clock, changes, rest = self.clock, self.clock.changes, 0.0
        queue = request.waiters.topic.removeprefix(f"{self.topic}/")
        while True:
            left = seconds_left(request, clock)
            assert left is not None
            _note_use(self, queue)
            pause = max(min(clock.fresh_s, self.uses.left_s(queue)), rest) + _EARLY_S
            end = time.monotonic() + pause - _EARLY_S
            heard = yield min(left, pause)
            if clock.stale:
                yield None
                rest = random.uniform(*_REFRESH_REST_S) if clock.stale else 0.0
            if heard:
                waiters: Waiters = request.waiters
                return waiters.on_signal(listener.when, clock.now())
            # The instant has come, the listener was closed, or ``until`` cannot be trusted now.
            if left <= pause or time.monotonic() < end or clock.changes != changes:
                return True

    def _answer_now(self, request: Request[Any]) -> Any:
        """Return the answer to a request that needs no waiting, otherwise PENDING."""
        if type(request) is Coalesce:
            return PENDING
        if type(request) is ServerTime:
            return self.clock.now()
        if type(request) is MonotonicTime:
            return time.monotonic()
        if type(request) is EnsureQueue:
            return self.known.kind_of(request) or PENDING
        if type(request) is QueueShape:
            return self.known.shape_of(request.queue)
        if type(request) is ForgetQueue:
            return self.known.forget(request.queue)
        if type(request) is Signal:
            return self.signal(request)
        if type(request) is Latecomers:
            return self._admit(request.items)
        if type(request) is Tell:
            if self.hooks is not None:
                self.hooks.tell(request, self.sessions.get(id(request.session)))
            return None
        if type(request) is Look:
            return _look(self, request)
        if type(request) is Used:
            self.uses.follow(request.queue, request.shape)
            return _note_use(self, request.queue)
        if type(request) is Aside:
            return self.aside(request.plan)
        return PENDING

    def aside(self, plan: Plan[None]) -> None:
        """Run a plan in the background; see ``Aside``."""
        raise NotImplementedError

    def signal(self, request: Signal) -> None:
        """Publish a signal now, or once the transaction of its session is committed."""
        if request.session is None:
            self.stats["signals"] += 1
            waiters = self.waiters(request.queue)
            # This client learns of the signal at once, even if it does not listen.
            waiters.on_signal(request.when, self.clock.now())
            self.bus.emit(waiters.topic, request.when)
        elif id(request.session) in self.sessions:
            self.sessions[id(request.session)].append(request)

    def committed(self, session: Any) -> None:
        """Carry out the signals, events and checks that waited until a transaction committed."""
        for request in self.sessions.get(id(session), ()):
            request.session = None
            self._answer_now(request)

    def close_waiters(self) -> None:
        """Wake every waiting consumer. Each then finds that the client is closed."""
        self.closed = True
        self._all_waiters[:] = [each for each in self._all_waiters if each is not self._waiters]
        for waiters in self._waiters.values():
            waiters.wake_all()
        for listener in self._listeners.values():
            listener.close()


def _look(driver: BaseDriver[Any], request: Look) -> None:
    """Check a gather soon; in a transaction, only after its commit."""
    if request.session is None:
        driver.looks.add(request.id)
    elif id(request.session) in driver.sessions:
        driver.sessions[id(request.session)].append(request)


def _note_use(driver: BaseDriver[Any], queue: str) -> None:
    """Note in the background that a queue is used, if a note is due."""
    if (plan := driver.uses.due(queue)) is not None:
        driver.aside(plan)


def _limit_s(request: Command[Any], timeout_s: float) -> float:
    """Return the time limit of a command; a ``pymongo.timeout`` of the caller may be shorter."""
    limit_s = timeout_s / 2 if request.half_time else timeout_s
    limits = (limit_s, request.max_time_s, _csot.get_timeout())
    return min(each for each in limits if each is not None)


def _every_waiters(driver: BaseDriver[Any]) -> list[Waiters]:
    return [each for table in driver._all_waiters for each in list(table.values())]


# ---- for the testing kit


def wake_all(drivers: Sequence[BaseDriver[Any]]) -> None:
    """Wake the consumers that wait for an instant, after a test moved their drivers' clocks.

    Args:
        drivers: The drivers. The bus of the first driver wakes the consumers of all drivers.
    """
    for driver in drivers:
        for waiters in _every_waiters(driver):
            waiters.on_signal(None, driver.clock.now())
            drivers[0].bus.emit(waiters.topic, None)


def wrap_collections(driver: BaseDriver[Any], wrap: Callable[[Any], Any]) -> None:
    """Send all further commands of a driver to wrappers of its collections."""
    driver._plain, driver._durable = wrap(driver._plain), wrap(driver._durable)
    driver._w1, driver._majority = wrap(driver._w1), wrap(driver._majority)


def forget_queues(driver: BaseDriver[Any]) -> None:
    """Forget everything about the queues of a driver, because all queues were deleted."""
    driver.known.forget_all()
    for waiters in _every_waiters(driver):
        waiters.reset()
