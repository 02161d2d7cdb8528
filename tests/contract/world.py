"""The places where the contract suite runs, and raw access to the stored documents.

A place is one kind of client over one backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from threading import Thread
from typing import Any, Final
from uuid import uuid4

import bson
import pymongo
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from bson.codec_options import CodecOptions

from pyqueue import AsyncClient, Client, ConfigurationError, QueueError, Reservation
from pyqueue.backends.bucket.kind import Bucket
from pyqueue.backends.kind import Kind
from pyqueue.backends.ordered.kind import Ordered
from pyqueue.backends.priority.kind import Priority
from pyqueue.backends.standard import Standard
from pyqueue.memory_sessions import MemoryDatabase
from pyqueue.messages import PackedReservation
from pyqueue.payloads import OPTIONS
from tests.contract.newest import Newest
from tests.contract.portal import PortalClient
from tests.contract.renaming import RenamingDatabase
from tests.support.eventually import eventually, waiters

STANDARD: Final = Standard()
#: A Queue and a Client of any place. They may be wrapped async objects, so the tests do not depend
#: on the types.
AnyQueue = Any
AnyClient = Any

#: The largest difference between two clocks of one machine, in seconds.
SLACK: Final = 1.0


@dataclass(frozen=True)
class Place:
    """One kind of client over one backend."""

    driver: str
    kind: Kind = STANDARD

    @property
    def name(self) -> str:
        """Return the name in test ids."""
        return self.driver if self.kind.name == "standard" else f"{self.kind.name}-{self.driver}"

    @property
    def server(self) -> bool:
        """Return whether the place needs a mongod."""
        return "memory" not in self.driver

    @property
    def offers(self) -> frozenset[str]:
        """Return the features that tests may need."""
        more = {"server"} if self.server else set[str]()
        if self.driver not in ("memory", "pymongo"):
            more |= {"tasks"}  # the client is async
        if "packs" not in self.kind.capabilities:
            # Each message has one document.
            more |= {"documents"}
        # The messages of one priority are handed out first in, first out.
        more |= {"fifo"} if self.kind.name in ("standard", "priority") else set()
        more |= {self.kind.name}
        return self.kind.capabilities | more

    def runs(self, file: str, differs_by: str | None = None) -> bool:
        """Return whether ``make test`` runs a test here; ``make test-slow`` runs the rest.

        Args:
            file: The test's file.
            differs_by: "client" or "kind", if only this part of a place can change the result.
        """
        if differs_by == "client" and self.kind.name != "standard":
            return False
        if self.kind.name == "newest" and file not in NEWEST_FILES:
            return False
        if self.kind.name in ("priority", "ordered") and file in KINDLESS_FILES:
            return False
        if self.driver in ("memory", "renaming"):
            return True
        if differs_by == "kind":
            return False
        if self.kind.name == "newest":
            return self.driver == "pymongo" and file == "test_kinds"
        if self.kind.name != "standard":
            return self.driver == "pymongo" and file in KIND_FILES
        if self.driver == "motor":
            return file in MOTOR_FILES
        if self.driver == "asyncmongo":
            return file in ASYNC_FILES
        return self.driver != "async-memory" or file not in PLAN_FILES | ASYNC_FILES

    @property
    def few(self) -> int | None:
        """Return how many cases of each test ``make test`` runs here; None: all.

        All cases run in memory on a blocking client. The other clients run the same plans.
        """
        return None if self.name == "memory" else 1


#: The test files that ``make test`` runs on Motor: pushes, waiting, settling and sessions. These
#: read results, errors and sessions of the driver. In the other files Motor runs the same plans
#: and the same code as PyMongo's async driver.
MOTOR_FILES: Final = {"test_also", "test_push", "test_receive", "test_settle", "test_transactions"}
#: The test files that ``make test`` runs on PyMongo's async client with a server: waits, results,
#: errors, sessions and tasks. The other files run there for an async client in memory: the same
#: plans, with commands that these files send from there.
ASYNC_FILES: Final = {
    "test_also",
    "test_concurrency",
    "test_each",
    "test_kinds",
    "test_push",
    "test_receive",
    "test_refused",
    "test_renew",
    "test_results",
    "test_settle",
    "test_stream_groups",
    "test_telemetry",
    "test_transactions",
}
#: The only test file for collections that rename a field: it receives, settles, pauses and reads.
RENAMING_FILE: Final = "test_receive"
#: The test files that ``make test`` runs on a server for the other kinds. A kind changes plans and
#: not drivers, so the rest runs in memory.
KIND_FILES: Final = {
    "test_kinds",
    "test_ordered",
    "test_priority",
    "test_buckets",
    "test_receive",
    "test_settle",
    "test_transactions",
}
#: The test files that ``make test`` runs on no async client: rules of plans and of models, with
#: commands that the other files send from there.
PLAN_FILES: Final = {"test_fences", "test_models"}
#: The test files whose rules only packs change. They do not run for queues with priorities and
#: ordered queues.
KINDLESS_FILES: Final = {
    "test_facts",
    "test_hooks",
    "test_models",
    "test_payloads",
    "test_refused",
    "test_renew",
    "test_results",
    "test_telemetry",
}
#: The test files that ``make test`` runs for the newest kind, which stands for the changes another
#: kind may make: messages enter, are claimed, and leave.
NEWEST_FILES: Final = {
    "test_claims",
    "test_fences",
    "test_kinds",
    "test_move",
    "test_push",
    "test_reading",
    "test_receive",
    "test_settle",
}

PLACES: Final = [
    *(Place(driver) for driver in ("memory", "async-memory", "pymongo", "asyncmongo", "motor")),
    Place("renaming"),
    *(
        Place(driver, kind)
        for kind in (Newest(), Priority(), Ordered(), Bucket())
        for driver in ("memory", "pymongo", "asyncmongo")
    ),
]


class World:
    """A client, and raw access to its collection."""

    def __init__(
        self, place: Place, client: AnyClient, connect: Callable[..., AnyClient], raw: Any
    ) -> None:
        self.place = place
        self.client = client
        #: Makes another client of the same database; it is closed at the end.
        self.connect = connect
        self._raw = raw

    def raw(self, namespace: str = "pyqueue") -> Any:
        """Return the collection behind the queues, read without pyqueue."""
        # mongomock knows no other options.
        options = OPTIONS if self.place.server else CodecOptions(tz_aware=True)
        return self._raw.get_collection(namespace, codec_options=options)

    def document(self, id: Any) -> dict[str, Any]:
        """Return a stored message."""
        found = self.raw().find_one({"_id": id})
        assert found is not None, f"there is no message {id!r}"
        # Decode it as a server returns it.
        return bson.decode(bson.encode(found, codec_options=OPTIONS), OPTIONS)

    def stored(self, *queues: AnyQueue | str) -> list[bytes]:
        """Return everything that is stored of these queues, records included, as bytes."""
        names = [each if isinstance(each, str) else each.name for each in queues]
        found = self.raw().find({"q": {"$in": names}}).sort("_id", 1)
        return [bson.encode(each, codec_options=OPTIONS) for each in found]

    def bytes(self, id: Any) -> bytes:
        """Return a stored message as bytes."""
        return bson.encode(self.document(id), codec_options=OPTIONS)

    def lapse(self, *reservations: Reservation[Any] | None, known: bool = True) -> None:
        """Let leases expire without waiting; ``known``: the holder's clock agrees."""
        for each in reservations:
            assert each is not None
            id = each.pack if isinstance(each, PackedReservation) else each.id
            past = self.ready(id, token=each.token)
            if known:
                each.until = past

    def ready(self, id: Any, **match: Any) -> datetime:
        """Make a message eligible now.

        The time is a tenth of a second ago, because clients do not expect messages far below their
        scan start.
        """
        past = datetime.now(UTC) - timedelta(seconds=0.1)
        past = past.replace(microsecond=past.microsecond // 1000 * 1000)
        done = self.raw().update_one({"_id": id, **match}, {"$set": {"when": past}})
        assert done.matched_count == 1, "there is none"
        return past

    @property
    def many(self) -> int:
        """Return a count above the limit of one claim, and small enough for mongomock."""
        return 250 if self.place.server else 110


class KindClient:
    """A client whose queues have the kind of the place, except for queues that a plan created."""

    def __init__(self, client: AnyClient, place: Place, raw: Any) -> None:
        self._client = client
        self._place = place
        self._raw = raw

    def queue(self, name: str, model: Any = None, **options: Any) -> AnyQueue:
        """Wrap ``Client.queue``."""
        database = self._client.database if self._raw is None else self._raw
        record = database[self._client.namespace].find_one({"_id": f"~queue:{name}"})
        # A queue that a plan created by name, such as a dead-letter queue, is a standard one.
        standard = str(name).endswith(".dead") or (
            record is not None and record["kind"] == "standard"
        )
        kind = "standard" if standard else self._place.kind.name
        return self._client.queue(name, model, **{"kind": kind, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@contextmanager
def open_world(place: Place, base: str | None) -> Iterator[World]:
    """Open a world; ``base`` is the URL of a server, for the places that need one."""
    with ExitStack() as stack:
        portal: BlockingPortal | None = None
        if place.driver in ("async-memory", "asyncmongo", "motor"):
            portal = stack.enter_context(start_blocking_portal())

        def connect(target: Any, **options: Any) -> AnyClient:
            client: Any = Client if portal is None else AsyncClient
            if place.driver == "renaming":  # the capped bus takes plain databases only
                options = {"signals": "memory:", **options}
            client = client(target, **options)
            if portal is not None:
                client = PortalClient(portal, client)
            stack.callback(client.close)
            return client if place.kind.name == "standard" else KindClient(client, place, raw)

        target: Any = "memory:" if portal is None else MemoryDatabase.new()
        raw: Any = None if portal is None else target
        if base is not None:
            front, _, query = base.partition("?")
            name = f"t{uuid4().hex[:16]}"
            target = f"{front.rstrip('/')}/{name}?{query}"
            mongo = stack.enter_context(pymongo.MongoClient[dict[str, Any]](target))
            stack.callback(mongo.drop_database, name)
            raw = mongo[name]
            if place.driver == "renaming":
                target = raw = RenamingDatabase(mongo, name)
            if place.driver == "motor":
                assert portal is not None
                motor = portal.call(_motor, target)
                stack.callback(portal.call, motor.close)
                target = motor[name]
        client = connect(target)
        if raw is None:
            raw = client.database
        shared = raw if base is None else client.database
        yield World(place, client, lambda **options: connect(shared, **options), raw)


async def _motor(url: str) -> Any:
    from motor.motor_asyncio import AsyncIOMotorClient

    return AsyncIOMotorClient(url)


#: Every way in which a message finishes.
FINISHES: dict[str, Callable[[AnyQueue], object]] = {
    "commit": lambda queue: queue.commit(queue.reserve(0)),
    "pop": lambda queue: queue.pop(0),
    "pop_many": lambda queue: queue.pop_many(1, timeout=0),
    "remove": lambda queue: queue.remove(queue.peek()[0].id),
}


class Began:
    """The time at which the current test began; a fixture sets it."""

    at = datetime.now(UTC)


def near(instant: datetime | None, seconds: float) -> bool:
    """Return whether an instant is ``seconds`` after a moment of the running test."""
    assert instant is not None
    moment = instant - timedelta(seconds=seconds)
    slack = timedelta(seconds=SLACK)
    return Began.at - slack < moment < datetime.now(UTC) + slack


def hold(queue: AnyQueue, payload: Any = 1, **options: Any) -> Reservation[Any]:
    """Push one message and reserve it."""
    queue.push(payload, **options)
    held = queue.reserve(0)
    assert isinstance(held, Reservation)
    return held


def payloads(messages: Iterable[Any]) -> list[Any]:
    """Return the payloads of messages."""
    return [each.payload for each in messages]


@contextmanager
def expect_error(error: type[QueueError], **attributes: Any) -> Iterator[None]:
    """Check that the block raises this error, and that its attributes have these values."""
    with pytest.raises(error) as caught:
        yield
    assert {name: getattr(caught.value, name) for name in attributes} == attributes


def refuses(match: str | None, *calls: Callable[[], Any]) -> None:
    """Check that each call raises a ConfigurationError with these words."""
    for call in calls:
        with pytest.raises(ConfigurationError, match=match):
            call()


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Do some work in another thread, which does not outlive the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future


def waiting(client: AnyClient, queue: AnyQueue, receive: Callable[[], Any]) -> Future[Any]:
    """Receive from a queue in another thread. Return once that consumer waits."""
    before = waiters(client, queue.name)
    future = in_thread(receive)
    eventually(lambda: waiters(client, queue.name) == before + 1, "one more consumer waits")
    return future
