"""Where the contract suite runs: each kind of client over each backend, and a raw look at what is
stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

import bson
import pymongo
from anyio.from_thread import BlockingPortal, start_blocking_portal
from bson.codec_options import CodecOptions

from pyqueue import AsyncClient, Client, Reservation
from pyqueue.backends.kind import Kind
from pyqueue.backends.standard import Standard
from pyqueue.payloads import OPTIONS
from tests.contract.newest import Newest
from tests.contract.portal import PortalClient

__all__ = ["PLACES", "AnyClient", "AnyQueue", "Began", "Place", "World", "near", "wait_until"]

STANDARD: Final = Standard()
#: A Queue and a Client of any place. They may be twins behind a portal, so the suite does not lean
#: on their types.
AnyQueue = Any
AnyClient = Any

#: By how much two clocks of one machine may differ, in seconds.
SLACK: Final = 1.0


@dataclass(frozen=True)
class Place:
    """One kind of client over one backend."""

    driver: str
    kind: Kind = STANDARD

    @property
    def name(self) -> str:
        """How reports call it."""
        return self.driver if self.kind.name == "standard" else f"{self.kind.name}-{self.driver}"

    @property
    def server(self) -> bool:
        """Whether it needs a mongod."""
        return "memory" not in self.driver

    @property
    def offers(self) -> frozenset[str]:
        """What tests may need of it."""
        more = {"sessions"} if self.server else {"no sessions"}
        more.add("fifo" if self.kind.name == "standard" else self.kind.name)
        return self.kind.capabilities | more


PLACES: Final = [
    *(Place(driver) for driver in ("memory", "async-memory", "pymongo", "asyncmongo", "motor")),
    *(Place(driver, Newest()) for driver in ("memory", "pymongo", "asyncmongo")),
]


class World:
    """A client, and a raw look at its collection."""

    def __init__(
        self, place: Place, client: AnyClient, connect: Callable[..., AnyClient], raw: Any
    ) -> None:
        self.place = place
        self.client = client
        #: Makes another client of the same database; closed at the end.
        self.connect = connect
        self._raw = raw

    def raw(self, namespace: str = "pyqueue") -> Any:
        """The collection behind the queues, not by way of pyqueue."""
        options = (
            OPTIONS if self.place.server else CodecOptions(tz_aware=True)
        )  # mongomock knows no others
        return self._raw.get_collection(namespace, codec_options=options)

    def document(self, id: Any) -> dict[str, Any]:
        """A stored message."""
        found = self.raw().find_one({"_id": id})
        assert found is not None, f"there is no message {id!r}"
        return bson.decode(
            bson.encode(found, codec_options=OPTIONS), OPTIONS
        )  # as a server gives it

    def stored(self, *queues: AnyQueue | str) -> list[bytes]:
        """All that is stored of these queues, their records too, byte by byte."""
        names = [each if isinstance(each, str) else each.name for each in queues]
        found = self.raw().find({"q": {"$in": names}}).sort("_id", 1)
        return [bson.encode(each, codec_options=OPTIONS) for each in found]

    def bytes(self, id: Any) -> bytes:
        """A stored message, byte by byte."""
        return bson.encode(self.document(id), codec_options=OPTIONS)

    def lapse(self, *reservations: Reservation[Any] | None, known: bool = True) -> None:
        """Let the leases run out, without waiting; ``known``: the holder's clock says so too."""
        for each in reservations:
            assert each is not None
            past = self.ready(each.id, token=each.token)
            if known:
                each.until = past

    def ready(self, id: Any, **match: Any) -> datetime:
        """Let the time come that a message waits for: a tenth of a second ago, as clients count on
        none to turn up far below.
        """
        past = datetime.now(UTC) - timedelta(seconds=0.1)
        past = past.replace(microsecond=past.microsecond // 1000 * 1000)
        done = self.raw().update_one({"_id": id, **match}, {"$set": {"when": past}})
        assert done.matched_count == 1, "there is none"
        return past

    @property
    def many(self) -> int:
        """More than one claim takes, and not too many for mongomock."""
        return 250 if self.place.server else 110


class KindClient:
    """A client whose queues are of the place's kind, but for those that a plan made by name."""

    def __init__(self, client: AnyClient, place: Place, raw: Any) -> None:
        self._client = client
        self._place = place
        self._raw = raw

    def queue(self, name: str, model: Any = None, **options: Any) -> AnyQueue:
        """As Client.queue."""
        database = self._client.database if self._raw is None else self._raw
        record = database[self._client.namespace].find_one({"_id": f"~queue:{name}"})
        # A queue that a plan made by name, such as a dead-letter queue, is a standard one.
        standard = str(name).endswith(".dead") or (
            record is not None and record["kind"] == "standard"
        )
        kind = "standard" if standard else self._place.kind.name
        return self._client.queue(name, model, **{"kind": kind, **options})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


@contextmanager
def open_world(place: Place, base: str | None) -> Iterator[World]:
    """A world of its own; ``base`` is the URL of a server, for the places that need one."""
    with ExitStack() as stack:
        portal: BlockingPortal | None = None
        if place.driver in ("async-memory", "asyncmongo", "motor"):
            portal = stack.enter_context(start_blocking_portal())

        def connect(target: Any, **options: Any) -> AnyClient:
            client: Any = Client if portal is None else AsyncClient
            client = client(target, **options)
            if portal is not None:
                client = PortalClient(portal, client)
            stack.callback(client.close)
            return client if place.kind.name == "standard" else KindClient(client, place, raw)

        target: Any = "memory:"
        raw: Any = None
        if base is not None:
            front, _, query = base.partition("?")
            name = f"t{uuid4().hex[:16]}"
            target = f"{front.rstrip('/')}/{name}?{query}"
            mongo = stack.enter_context(pymongo.MongoClient[dict[str, Any]](target))
            stack.callback(mongo.drop_database, name)
            raw = mongo[name]
            if place.driver == "motor":
                assert portal is not None
                motor = portal.call(_motor, target)
                stack.callback(portal.call, motor.close)
                target = motor[name]
        client = connect(target)
        if raw is None:
            raw = client.database
        yield World(place, client, lambda **options: connect(client.database, **options), raw)


async def _motor(url: str) -> Any:
    from motor.motor_asyncio import AsyncIOMotorClient

    return AsyncIOMotorClient(url)


class Began:
    """When the current test began; a fixture sets it."""

    at = datetime.now(UTC)


def near(instant: datetime | None, seconds: float) -> bool:
    """Return whether an instant is ``seconds`` after some moment of this test."""
    assert instant is not None
    moment = instant - timedelta(seconds=seconds)
    slack = timedelta(seconds=SLACK)
    return Began.at - slack < moment < datetime.now(UTC) + slack


def wait_until(holds: Callable[[], Any], what: str, seconds: float = 20) -> None:
    """Wait until something holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.005)
