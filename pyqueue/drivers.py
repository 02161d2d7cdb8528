"""The drivers carry plans out. They are the only code that talks to a database.

``Driver`` blocks (pymongo, mongomock); ``AsyncDriver`` awaits (PyMongo's async client, motor). They differ by ``await`` and by how one
waits; all rules they share are in ``BaseDriver``: which collection a request goes to, what errors mean, what is counted. A rule of the
queue has no place here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Any, Final, TypeVar

import pymongo
from bson.errors import InvalidBSON, InvalidDocument
from pymongo import ReadPreference, WriteConcern, errors

from pyqueue.backends import namespace
from pyqueue.clock import Clock
from pyqueue.coalescing import Coalescer
from pyqueue.errors import (
    ConfigurationError,
    DuplicateKey,
    InvalidMessage,
    MissingIndex,
    NotPermitted,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.memory import MemoryCollection
from pyqueue.payloads import OPTIONS
from pyqueue.requests import (
    Coalesce,
    Command,
    EnsureQueue,
    Hello,
    Insert,
    Listen,
    Plan,
    ServerTime,
    Signal,
    UpdateEach,
    Wait,
    WriteFailure,
)
from pyqueue.thread_pool import DaemonThreadPool
from pyqueue.waiters import Waiters

__all__ = ["AsyncDriver", "BaseDriver", "BlockingAdapter", "Driver"]

T = TypeVar("T")

#: How often the primary is asked for its time at first: the quickest answer counts.
SAMPLES: Final = 5

#: By these the server says, even of one write among several, that it is no primary any more, or is going away.
_ELECTION: Final = {91, 189, 10058, 10107, 11600, 11602, 13435, 13436}
_TOO_LARGE: Final = {10334, 17280, 17419, 17420}
_MISFIT: Final = {2, 9, 14, 15, 28, 40, 52, 54, 56, 57, 111}


_PENDING: Final = object()

#: How many forks lie between the first process and this one.
_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class BaseDriver:
    """What both drivers share."""

    def __init__(
        self,
        database: Any,
        name: str,
        *,
        bus: Any,
        durability: str,
        timeout: float,
        topic: str,
    ) -> None:
        self.clock = Clock()
        self.stats: Counter[str] = Counter()
        self.bus = bus
        self.topic = topic
        self.closed = False
        #: What the transactions of ours will signal once they are committed, by the id() of their sessions (motor's do not hash).
        self.sessions: dict[int, list[Signal]] = {}
        #: Whether the server is a replica set (or mongos): it has sessions, transactions and retryable writes.
        self.replicated = False
        self._name = name
        self._timeout = timeout
        self._forks = _forks
        self._prepared = False
        self._failures = 0
        self._waiters: dict[str, Waiters] = {}
        self._kinds: dict[str, str] = {}
        self.memory = type(database).__module__.startswith("mongomock")
        if self.memory:
            self._plain = self._durable = self._quick = MemoryCollection(database, name)
        else:
            options = database.codec_options.with_options(
                document_class=dict,
                tz_aware=OPTIONS.tz_aware,
                tzinfo=OPTIONS.tzinfo,
                uuid_representation=OPTIONS.uuid_representation,
                datetime_conversion=OPTIONS.datetime_conversion,
            )
            self._plain = database.get_collection(
                name, codec_options=options, read_preference=ReadPreference.PRIMARY
            )
            sure = (
                WriteConcern(w="majority", j=True)
                if durability == "majority"
                else WriteConcern(w=1)
            )
            self._durable = self._plain.with_options(write_concern=sure)
            self._quick = self._plain.with_options(write_concern=WriteConcern(w=1))

    def waiters(self, queue: str) -> Waiters:
        """Return the consumers of a queue that wait in this client."""
        found = self._waiters.get(queue)
        if found is None:
            found = self._waiters.setdefault(queue, Waiters(f"{self.topic}/{queue}"))
        return found

    def _check(self) -> None:
        if self.closed:
            raise QueueClosed("the client was closed")
        if self._forks != _forks:  # not covered: in a forked process, which ends at once
            raise ConfigurationError(
                "this client was made before this process was forked: make a client after the fork"
            )

    def _deadline(self, request: Command[Any]) -> AbstractContextManager[Any]:
        """The time a command may take, its retries included; a transaction's is its owner's."""
        if self.memory or request.session is not None:
            return nullcontext()
        return pymongo.timeout(
            self._timeout if request.max_time_s is None else min(self._timeout, request.max_time_s)
        )

    def _limit(self) -> AbstractContextManager[Any]:
        """The time that all commands of a preparation may take together."""
        return nullcontext() if self.memory else pymongo.timeout(self._timeout)

    def _late(self) -> Unavailable:
        return Unavailable(f"the server did not answer within {self._timeout:g} s")

    def _preparation(self, failures: int) -> Plan[None]:
        """Take the primary's time, and see to the indexes; ``failures``: how many there had been when this caller began to wait."""
        if failures != self._failures:
            raise self._late()  # another tried meanwhile: do not let one caller after the other wait
        if not self.clock.stale:
            return
        if self._prepared:
            self.clock.touch()  # the others go on with what there is
        try:
            if self.memory:
                self.clock.touch()
            else:
                samples = []
                for _ in range(SAMPLES):
                    sent = time.monotonic()
                    answer = yield Hello()
                    samples.append((sent, time.monotonic(), answer))
                self.replicated = "setName" in answer or answer.get("msg") == "isdbgrid"
                self.clock.sample(
                    [(sent, received, hello["localTime"]) for sent, received, hello in samples]
                )
            self._forget()
            yield from namespace.make_indexes(self._name)
            self._prepared = True
        except BaseException:
            self._failures += 1
            self.clock.expire()
            raise

    def _send(self, request: Command[Any]) -> Any:
        self.stats["commands"] += 1
        if request.session is not None:
            return request.send(self._plain)
        return request.send(self._quick if request.w1 else self._durable)

    def _failed(self, request: Command[Any], error: Exception) -> Any:
        """What an error means: the answer it stands for, or another error, which is raised."""
        if request.session is not None and isinstance(error, errors.PyMongoError):
            raise error  # retry loops around transactions need it as it is
        if isinstance(request, (Insert, UpdateEach)):
            faults = _faults(error)
            if faults is not None:
                if any(isinstance(fault.error, Unavailable) for fault in faults):
                    self.clock.expire()
                return faults if isinstance(request, Insert) else (_matched(error), faults)
        meant = translated(error)
        if isinstance(meant, Unavailable):
            self.clock.expire()
        self.stats["errors"] += 1
        raise meant from error

    def _left(self, until: datetime | None) -> float | None:
        return None if until is None else max(0.0, (until - self.clock.now()).total_seconds())

    def _at_once(self, request: Any) -> Any:
        """The answer of a request that needs no waiting; else _PENDING."""
        kind = type(request)
        if kind is ServerTime:
            return self.clock.now()
        if kind is EnsureQueue:
            return self._kinds.get(request.queue, _PENDING)
        if kind is Signal:
            return self.signal(request)
        return _PENDING

    def signal(self, request: Signal) -> None:
        """Tell the bus; or, inside a transaction of ours, once it is committed."""
        if request.session is None:
            self.stats["signals"] += 1
            line = self.waiters(request.queue)
            line.on_signal(
                request.when, self.clock.now()
            )  # this client knows it at once, whether it listens or not
            self.bus.emit(line.topic, request.when)
        elif id(request.session) in self.sessions:
            self.sessions[id(request.session)].append(request)

    def committed(self, session: Any) -> None:
        """A transaction of ours was committed: send what was held back for it."""
        for request in self.sessions.get(id(session), ()):
            self.signal(Signal(request.queue, request.when))

    def _forget(self) -> None:
        """The collection is not what it was: make the indexes and records again."""
        self._kinds.clear()

    def close_waiters(self) -> None:
        """Wake every consumer that waits; each finds the client closed."""
        self.closed = True
        for line in self._waiters.values():
            line.close()
            if line.listener is not None:
                line.listener.close()


def _faults(error: Exception) -> list[WriteFailure] | None:
    """Which operations of a batch the server refused; None if the batch as a whole went wrong."""
    if isinstance(error, errors.BulkWriteError):
        details = error.details or {}
        if details.get("writeConcernErrors"):
            return None
        return [
            _fault(each["index"], each.get("code"), each) for each in details.get("writeErrors", [])
        ]
    if isinstance(error, errors.WriteError):
        return [_fault(0, error.code, error.details or {"errmsg": str(error)})]
    return None


def _fault(place: int, code: int | None, details: Mapping[str, Any]) -> WriteFailure:
    text = str(details.get("errmsg", ""))
    if code != 11000:
        return WriteFailure(place, None, _refused(errors.WriteError(text, code)))
    pattern = details.get("keyPattern")
    if pattern is None:  # mongomock names the values only
        pattern = {"key": 1} if "'key'" in text or "key:" in text else {"_id": 1}
    return WriteFailure(
        place, "_id" if "_id" in pattern else "key", DuplicateKey("the key or the id is taken")
    )


def _matched(error: Exception) -> int:
    details = getattr(error, "details", None) or {}
    return int(details.get("nMatched", 0))


def translated(error: Exception) -> Exception:
    """A driver's error as one of pyqueue's."""
    if isinstance(error, QueueError):
        return error
    if isinstance(error, errors.BulkWriteError):
        return Unavailable(
            f"the write may not be durable: {(error.details or {}).get('writeConcernErrors')}"
        )
    if isinstance(error, errors.DuplicateKeyError):
        return DuplicateKey("the key or the id is taken")
    if isinstance(error, InvalidBSON):
        return InvalidMessage(f"payload: a stored message cannot be read: {error}")
    if isinstance(
        error, (errors.DocumentTooLarge, InvalidDocument, UnicodeEncodeError, OverflowError)
    ):
        return InvalidMessage(f"payload: {error}")
    if isinstance(error, errors.InvalidOperation) and "close" in str(error):
        return QueueClosed("the database client was closed")
    if isinstance(error, errors.PyMongoError) and (
        isinstance(
            error, (errors.ConnectionFailure, errors.WriteConcernError, errors.ExecutionTimeout)
        )
        or error.timeout
    ):
        return Unavailable(f"the server did not answer: {_brief(error)}")
    if isinstance(error, errors.OperationFailure):
        return _refused(error)
    if isinstance(error, errors.ConfigurationError):
        return ConfigurationError(f"target: {_brief(error)}")
    if isinstance(error, errors.PyMongoError):
        return QueueError(_brief(error))
    return error


def _refused(error: errors.OperationFailure) -> QueueError:
    text, code = _brief(error), error.code
    if code in (13, 8000) or "not authorized" in text:
        return NotPermitted(f"the database user is not permitted to do this: {text}")
    if code == 18:
        return ConfigurationError("target: the server refused the user name or the password")
    if code in (85, 86):
        return ConfigurationError(
            f"the collection has an index of the same name with other options: drop it ({text})"
        )
    if code == 20 or "Transaction numbers" in text:
        return ConfigurationError(
            "session: transactions need a replica set; this server is a standalone"
        )
    if "hint" in text:
        return MissingIndex(text)
    if code in _TOO_LARGE or "too large" in text or "larger than" in text:
        return InvalidMessage(
            f"payload: the message would be larger than the server allows: {text}"
        )
    if code in _ELECTION:
        return Unavailable(f"the server did not answer: {text}")
    if isinstance(error, errors.WriteError) or code in _MISFIT:
        return InvalidMessage(f"payload: the server refused it: {text}")
    return QueueError(text)


def _brief(error: Exception) -> str:
    """What an error says, without the dump of the topology that the driver adds."""
    return str(error).split(", Timeout:")[0].split(", full error:")[0][:1000]


class Driver(BaseDriver):
    """Carries plans out over pymongo, or mongomock."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lock = threading.Lock()
        self._preparing = threading.Lock()

    def run(self, plan: Plan[T]) -> T:
        """Carry a plan out, and return its result."""
        self._check()
        if self.clock.stale:
            self.prepare()
        return self._drive(plan)

    def prepare(self) -> None:
        """Take the primary's time, and see to the indexes."""
        failures = self._failures
        if not self._preparing.acquire(timeout=self._timeout):
            raise self._late()
        try:
            with self._limit():
                self._drive(self._preparation(failures))
        finally:
            self._preparing.release()

    def _drive(self, plan: Generator[Any, Any, T]) -> T:
        try:
            request = next(plan)
            while True:
                try:
                    answer = self._at_once(request)
                    if answer is _PENDING:
                        answer = self._answer(request)
                except BaseException as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a plan's result is its T

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Command):
            return self._ask(request)
        if isinstance(request, EnsureQueue):
            kind = self._drive(
                namespace.read_or_create_record(request.queue, request.kind, request.options)
            )
            self._kinds[request.queue] = kind
            return kind
        if isinstance(request, Coalesce):
            return self._drive(request.batch([request.item]))[0]
        if isinstance(request, Listen):
            return self._listen(request.line)
        return self._wait(request)

    def _ask(self, request: Command[Any]) -> Any:
        self._check()
        for again in (True, False):
            try:
                with self._deadline(request):
                    raw = self._send(request)
                    return request.read(list(raw) if request.cursor else raw)
            except Exception as error:
                try:
                    return self._failed(request, error)
                except MissingIndex:
                    if not again:
                        raise
                    self._forget()
                    self._drive(namespace.make_indexes(self._name))
        raise AssertionError("unreachable")

    def _listen(self, line: Waiters) -> bool:
        with self._lock:
            if line.listener is not None:
                return False
            line.listener = self.bus.listen(line.topic).__enter__()
            return True

    def _wait(self, request: Wait) -> bool:
        line, woken = request.line, threading.Event()
        leads = line.enter(woken.set, request.until)
        guards = not leads and line.guard(request.until)
        try:
            until = request.deadline
            if leads or guards:
                until = request.until if until is None else min(request.until, until)
            if leads:
                heard = line.listener.wait(self._left(until))
                return not heard or line.on_signal(line.listener.when, self.clock.now())
            woken.wait(self._left(until))
            return True
        finally:
            line.leave(woken.set, leads, guards)


class AsyncDriver(BaseDriver):
    """Carries plans out over PyMongo's async client, or motor; and over mongomock, inline."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._coalescer = Coalescer(self._drive, self.stats)

    async def run(self, plan: Plan[T]) -> T:
        """Carry a plan out, and return its result."""
        self._check()
        if self.clock.stale:
            await self.prepare()
        return await self._drive(plan)

    def _check(self) -> None:
        super()._check()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise ConfigurationError(
                    "this client was first used in another event loop: make one client for each loop (for each asyncio.run)"
                )
            self._loop = loop

    async def prepare(self) -> None:
        """Take the primary's time, and see to the indexes."""
        failures = self._failures
        async with self._lock:
            with self._limit():
                await self._drive(self._preparation(failures))

    async def _drive(self, plan: Generator[Any, Any, T]) -> T:
        try:
            request = next(plan)
            while True:
                try:
                    answer = self._at_once(request)
                    if answer is _PENDING:
                        answer = await self._answer(request)
                except BaseException as error:
                    request = plan.throw(error)
                else:
                    request = plan.send(answer)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # a plan's result is its T

    async def _answer(self, request: Any) -> Any:
        if isinstance(request, Command):
            return await self._ask(request)
        if isinstance(request, EnsureQueue):
            kind = await self._drive(
                namespace.read_or_create_record(request.queue, request.kind, request.options)
            )
            self._kinds[request.queue] = kind
            return kind
        if isinstance(request, Coalesce):
            return await self._coalescer.join(request)
        if isinstance(request, Listen):
            return await self._listen(request.line)
        return await self._wait(request)

    async def _ask(self, request: Command[Any]) -> Any:
        self._check()
        for again in (True, False):
            try:
                with self._deadline(request):
                    raw = self._send(request)
                    if inspect.isawaitable(raw):
                        raw = await raw
                    if request.cursor and not self.memory:
                        raw = await raw.to_list(None)
                    return request.read(raw)
            except Exception as error:
                try:
                    return self._failed(request, error)
                except MissingIndex:
                    if not again:
                        raise
                    self._forget()
                    await self._drive(namespace.make_indexes(self._name))
        raise AssertionError("unreachable")

    async def settled(self) -> None:
        """Wait for what runs on behalf of callers that are gone."""
        await self._coalescer.settled()

    async def _listen(self, line: Waiters) -> bool:
        async with self._lock:
            if line.listener is not None:
                return False
            line.listener = await self.bus.listen(line.topic).__aenter__()
            return True

    async def _wait(self, request: Wait) -> bool:
        line, woken = request.line, asyncio.Event()
        leads = line.enter(woken.set, request.until)
        guards = not leads and line.guard(request.until)
        try:
            until = request.deadline
            if leads or guards:
                until = request.until if until is None else min(request.until, until)
            if leads:
                heard = await line.listener.wait(self._left(until))
                return not heard or line.on_signal(line.listener.when, self.clock.now())
            try:
                async with asyncio.timeout(self._left(until)):
                    await woken.wait()
            except TimeoutError:
                pass
            return True
        finally:
            line.leave(woken.set, leads, guards)


class BlockingAdapter(AsyncDriver):
    """An AsyncDriver over a blocking one, for async code that serves a blocking client: its commands and waits run in threads.

    Concurrent calls are joined here, and consumers wait in lines of their own; clock, bus, transactions and counters are the blocking
    driver's. A call that is cancelled is answered at once, as with any AsyncDriver; its command goes on in its thread.
    """

    def __init__(self, driver: Driver, threads: DaemonThreadPool) -> None:
        vars(self).update(vars(driver))
        self._driver = driver
        self._threads = threads
        self._waiters = {}
        self._loop = None
        self._lock = asyncio.Lock()
        self._coalescer = Coalescer(self._drive, self.stats)

    def _check(self) -> None:
        self._driver._check()
        super()._check()

    async def prepare(self) -> None:
        """Have the blocking driver prepare itself."""
        await self._threads.run(self._driver.prepare)
        self.replicated = self._driver.replicated

    async def _ask(self, request: Command[Any]) -> Any:
        self._check()
        return await self._threads.run(self._driver._ask, request)

    async def _listen(self, line: Waiters) -> bool:
        async with self._lock:
            if line.listener is not None:
                return False
            # A task of its own: whoever is cancelled meanwhile, what began to hear is kept, and closed in the end.
            await asyncio.shield(asyncio.ensure_future(self._hear(line)))
            return True

    async def _hear(self, line: Waiters) -> None:
        listener = await self._threads.run(self.bus.listen(line.topic).__enter__)
        if (
            self.closed or line.listener is not None
        ):  # not covered: the client was closed as it began to listen
            listener.close()
        else:
            line.listener = AdaptedListener(listener, self._threads, self._check)


class AdaptedListener:
    """A bus's blocking listener, awaited: in slices, so that a thread that waits ends soon after whoever waited."""

    SLICE: Final = 0.25

    def __init__(self, listener: Any, threads: DaemonThreadPool, check: Callable[[], None]) -> None:
        self._listener = listener
        self._threads = threads
        self._check = check

    @property
    def when(self) -> datetime | None:
        """The earliest instant heard by the last wait."""
        return self._listener.when  # type: ignore[no-any-return]  # the bus's protocol says so

    async def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; whether anything was heard."""
        end = time.monotonic() + timeout
        while True:
            left = end - time.monotonic()
            if await self._threads.run(self._listener.wait, max(0.0, min(left, self.SLICE))):
                return True
            self._check()
            if left <= self.SLICE:
                return False

    def close(self) -> None:
        """Stop hearing."""
        self._listener.close()
