"""Where the machine runs: real clients, on three kinds of database, in a time that only the test
moves.

The clients are pyqueue's own, drivers and clocks included. What stands in for the world is put
beside them: the ``time`` module that their clocks read is one of the machine they run on, which may
show any time it likes; the primary's ``hello`` tells the virtual time; and the bus is ideal, so
that every client knows at once what any of them says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import bson
import mongomock
import pymongo
import pytest

from pyqueue import Client
from pyqueue.client import runner_of
from pyqueue.connecting import Connection
from pyqueue.documents import message_of
from pyqueue.drivers import Driver
from pyqueue.messages import Message
from pyqueue.payloads import OPTIONS
from pyqueue.requests import CreateIndex, Hello
from tests.plans.runner import NOW
from tests.plans.store import Process, World

__all__ = ["Cluster", "Place", "memory_place", "plans_place", "server_place", "virtual_time"]


@dataclass
class Computer:
    """A machine: what its clocks show, in seconds beside the true time."""

    wall: float
    up: float


class Time:
    """Stands for the ``time`` module of pyqueue's clocks: that of the machine which is at work."""

    def __init__(self) -> None:
        self.true = 0.0
        self.at = Computer(0, 0)

    def monotonic(self) -> float:
        """Seconds since it was switched on."""
        return self.true + self.at.up

    def time(self) -> float:
        """Its wall clock."""
        return NOW.timestamp() + self.true + self.at.wall


@contextmanager
def virtual_time() -> Iterator[Time]:
    """Have the clocks of pyqueue read a virtual time."""
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pyqueue.clock.time", time)
        patch.setattr("pyqueue.drivers.time", time)
        yield time


class Cluster:
    """One database, some clients of it, and the time."""

    def __init__(self, place: Place, time: Time, clients: int = 3) -> None:
        self._time = time
        self._read = place.read
        #: The virtual time is this world's, in milliseconds.
        self.world = World(0)
        self.asker = Process(self.world, "any")
        place.clear()
        self._advance(0)
        skews = (0.0, 18_000.0, -400.0)
        self.clients = [
            VirtualClient(
                self, Computer(skews[which] if place.corrects else 0, 100.0 * which), place
            )
            for which in range(clients)
        ]

    @property
    def now(self) -> int:
        """The instant at the primary, in milliseconds."""
        return int(self.world.time)

    def _advance(self, milliseconds: int) -> None:
        self.world.time += milliseconds
        # Half a millisecond more, far from where rounding would show.
        self._time.true = (self.world.time + 0.5) / 1000

    def advance(self, milliseconds: int) -> None:
        """Let time pass."""
        self._advance(milliseconds)

    def set_wall(self, client: int, seconds: float) -> None:
        """Somebody sets the wall clock of a client's machine."""
        self.clients[client].computer.wall += seconds

    @contextmanager
    def at(self, computer: Computer) -> Iterator[None]:
        """On that machine."""
        before, self._time.at = self._time.at, computer
        try:
            yield
        finally:
            self._time.at = before

    def hello(self) -> dict[str, Any]:
        """What the primary says of its time."""
        return {"localTime": NOW + timedelta(seconds=self._time.true)}

    # ---- the bus

    def emit(self, topic: str, when: datetime | None) -> None:
        """Tell every client."""
        for each in self.clients:
            each.hear(topic.rpartition("/")[2], when)

    def close(self) -> None:
        """Close the clients."""
        for each in self.clients:
            each.close()

    # ---- what is stored

    def stored(self) -> dict[Any, tuple[Message[Any], str | None]]:
        """Return every stored message with its token."""
        now = NOW + timedelta(milliseconds=self.now)
        return {
            each["_id"]: (message_of(each, each["payload"], now), each.get("token"))
            for each in self._read(self)
            if "record" not in each
        }


class VirtualDriver(Driver):
    """A driver whose primary tells the virtual time."""

    cluster: Cluster

    def ask(self, request: Any) -> Any:
        answer = super().ask(request)
        return answer | self.cluster.hello() if isinstance(request, Hello) else answer


class StoreDriver(VirtualDriver):
    """A driver over documents in memory."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory = False  # its primary can be asked for its time

    def ask(self, request: Any) -> Any:
        self.stats["commands"] += 1
        if isinstance(request, Hello):
            return self.cluster.hello()
        return (
            None
            if isinstance(request, CreateIndex)
            else self.cluster.world.store.answer(self.cluster.asker, request)
        )


class VirtualConnection(Connection):
    """A connection on a machine of the cluster."""

    def __init__(self, cluster: Cluster, computer: Computer, place: Place) -> None:
        bus: Any = cluster
        super().__init__(place.target(), signals=bus, owner="me")
        self._cluster, self._computer = cluster, computer
        self.driver_type = place.driver
        with cluster.at(computer):
            driver: Any = self.open()
            driver.cluster = cluster

    def run(self, plan: Any) -> Any:
        """Carry a plan out on this machine."""
        with self._cluster.at(self._computer):
            return super().run(plan)


class VirtualClient(Client):
    """A client on a machine of the cluster."""

    def __init__(self, cluster: Cluster, computer: Computer, place: Place) -> None:
        connection = VirtualConnection(cluster, computer, place)
        super(Client, self).__init__(connection)
        self._cluster, self.computer = cluster, computer

    def hear(self, queue: str, when: datetime | None) -> None:
        """Take in what the bus says, as a consumer that waits does."""
        with self._cluster.at(self.computer):
            driver = runner_of(self).open()
            driver.waiters(queue).on_signal(when, driver.clock.now())


@dataclass
class Place:
    """A kind of database."""

    driver: type[VirtualDriver]
    #: The target that clients are given.
    target: Callable[[], Any]
    #: Empty the database.
    clear: Callable[[], object]
    #: Read all documents.
    read: Callable[[Cluster], Any]
    #: Whether clients can ask for the primary's time, whatever their machines show.
    corrects: bool = True


def plans_place() -> Place:
    """Real plans over documents in memory: no database, many examples."""
    return Place(
        StoreDriver,
        target=lambda: mongomock.MongoClient()["unused"],
        clear=lambda: None,
        read=lambda cluster: cluster.world.store.documents.values(),
    )


def memory_place() -> Place:
    """mongomock."""
    database: Any = mongomock.MongoClient()["pyqueue"]

    def read(_: Cluster) -> Iterator[Any]:
        for each in database["pyqueue"].find():
            yield bson.decode(bson.encode(each), OPTIONS)

    return Place(
        VirtualDriver,
        target=lambda: database,
        clear=lambda: database["pyqueue"].delete_many({}),
        read=read,
        corrects=False,
    )


def server_place(database: pymongo.database.Database[dict[str, Any]]) -> Place:
    """A real mongod."""
    collection = database.get_collection("pyqueue", codec_options=OPTIONS)
    return Place(
        VirtualDriver,
        target=lambda: database,
        clear=lambda: collection.delete_many({}),
        read=lambda _: collection.find(),
    )
