"""The databases on which the machine runs: real clients in a time that only the test advances.

The clients are pyqueue's own, with their drivers and clocks. Three parts are simulated. The clocks
read a ``time`` module of their machine, which may show any time. The primary's ``hello`` returns
the virtual time. The bus delivers every signal to every client at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import bson
import mongomock
import pymongo
import pytest

from pyqueue import Client, clock
from pyqueue.documents import message_of
from pyqueue.messages import Message
from pyqueue.payloads import OPTIONS
from pyqueue.requests import CreateIndex, Hello
from pyqueue.runtime.connecting import Connection, runner_of
from pyqueue.runtime.drivers import Driver
from tests.plans.runner import NOW
from tests.plans.store import Process, World


@dataclass
class Computer:
    """The clocks of a machine, as seconds relative to the true time."""

    wall: float
    up: float


class Time:
    """A ``time`` module for pyqueue's clocks; it shows the time of the machine that is running."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew, and number messages anew: an example depends on no earlier one."""
        self.true = 0.0
        self.at = Computer(0, 0)
        clock._numbers = itertools.count()

    def monotonic(self) -> float:
        """Return the seconds since the machine was switched on."""
        return self.true + self.at.up

    def time(self) -> float:
        """Return the wall clock."""
        return NOW.timestamp() + self.true + self.at.wall


@contextmanager
def virtual_time() -> Iterator[Time]:
    """Make the clocks of pyqueue read a virtual time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "_numbers", clock._numbers)  # the old numbers continue afterwards
        time = Time()
        patch.setattr("pyqueue.clock.time", time)
        patch.setattr("pyqueue.runtime.base_driver.time", time)
        yield time


class Cluster:
    """One database, some of its clients, and the time."""

    def __init__(self, place: Place, time: Time, clients: int = 3) -> None:
        self._time = time
        self._read = place.read
        #: The virtual time of this world, in milliseconds.
        self.world = World(0)
        self.asker = Process(self.world, "any")
        #: Whether the bus loses every signal.
        self.deaf = False
        place.clear()
        time.restart()
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
        """Return the primary's time in milliseconds."""
        return int(self.world.time)

    def _advance(self, milliseconds: int) -> None:
        self.world.time += milliseconds
        # Half a millisecond more, so that rounding does not show.
        self._time.true = (self.world.time + 0.5) / 1000

    def advance(self, milliseconds: int) -> None:
        """Advance the time."""
        self._advance(milliseconds)

    def set_wall(self, client: int, seconds: float) -> None:
        """Set the wall clock of a client's machine."""
        self.clients[client].computer.wall += seconds

    @contextmanager
    def at(self, computer: Computer) -> Iterator[None]:
        """Run a block on this machine."""
        before, self._time.at = self._time.at, computer
        try:
            yield
        finally:
            self._time.at = before

    def hello(self) -> dict[str, Any]:
        """Return the primary's answer to ``hello``, which shows its time."""
        return {"localTime": NOW + timedelta(seconds=self._time.true)}

    # ---- the bus

    def emit(self, topic: str, when: datetime | None) -> None:
        """Signal every client."""
        for each in () if self.deaf else self.clients:
            each.receive_signal(topic.rpartition("/")[2], when)

    def close(self) -> None:
        """Close the clients."""
        for each in self.clients:
            each.close()

    # ---- stored messages

    def stored(self) -> dict[Any, tuple[Message[Any], str | None]]:
        """Return every stored message with its token."""
        now = NOW + timedelta(milliseconds=self.now)
        return {
            each["_id"]: (message_of(each, each["payload"], now), each.get("token"))
            for each in self._read(self)
            if "record" not in each
        }


class VirtualDriver(Driver):
    """A driver whose primary returns the virtual time."""

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
        """Run a plan on this machine."""
        with self._cluster.at(self._computer):
            return super().run(plan)


class VirtualClient(Client):
    """A client on a machine of the cluster."""

    def __init__(self, cluster: Cluster, computer: Computer, place: Place) -> None:
        connection = VirtualConnection(cluster, computer, place)
        super(Client, self).__init__(connection)
        self._telemetry = None
        self._cluster, self.computer = cluster, computer

    def receive_signal(self, queue: str, when: datetime | None) -> None:
        """Receive a signal, as a waiting consumer does."""
        with self._cluster.at(self.computer):
            driver = runner_of(self).open()
            driver.waiters(queue).on_signal(when, driver.clock.now())


@dataclass
class Place:
    """A kind of database."""

    driver: type[VirtualDriver]
    #: The target that clients get.
    target: Callable[[], Any]
    #: Empties the database.
    clear: Callable[[], object]
    #: Reads all documents.
    read: Callable[[Cluster], Any]
    #: Whether clients can ask for the primary's time, so that the clocks of their machines do not
    #: matter.
    corrects: bool = True


def plans_place() -> Place:
    """Return a place that runs real plans over documents in memory, for many examples."""
    return Place(
        StoreDriver,
        target=lambda: mongomock.MongoClient()["unused"],
        clear=lambda: None,
        read=lambda cluster: cluster.world.store.documents.values(),
    )


def memory_place() -> Place:
    """Return a place on mongomock."""
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
    """Return a place on a real mongod."""
    collection = database.get_collection("pyqueue", codec_options=OPTIONS)
    return Place(
        VirtualDriver,
        target=lambda: database,
        clear=lambda: collection.delete_many({}),
        read=lambda _: collection.find(),
    )
