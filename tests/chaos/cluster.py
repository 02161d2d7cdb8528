"""What faults act on: the servers, the ways to them, the bus, and the processes of the load."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pymongo import MongoClient, WriteConcern
from pymongo.collection import Collection
from pymongo.errors import PyMongoError

from pyqueue.errors import Unavailable
from tests.chaos.change_log import END
from tests.chaos.members import Member, ReplicaSet
from tests.chaos.processes import Process
from tests.chaos.proxies import Proxies
from tests.chaos.workload import CREW, QUEUES

__all__ = ["Crew", "World"]

DATABASE, NAMESPACE = "faults", "load"
BUS = "pyqueue.signals"  # the collection of the default bus
DRAIN = 120.0  # seconds for the load to finish what is there, when all faults are mended


class Crew:
    """The processes of the load. One that is killed is replaced by another of the same name, with a ledger of its own."""

    def __init__(self, folder: Path, spec: dict[str, Any]) -> None:
        self._folder, self._spec = folder, spec
        self._numbers = itertools.count(1)
        self.ledgers: list[Path] = []
        #: When which was killed, by the names of its ledger.
        self.killed: dict[str, float] = {}
        self.processes: dict[str, Process] = {}
        for name in CREW:
            self.start(name)

    def kill(self, crew: str) -> None:
        """End one by SIGKILL."""
        process = self.processes.pop(crew)
        process.kill()
        self.killed[process.name] = time.monotonic()

    def start(self, crew: str) -> None:
        """Start one."""
        name = f"{crew}.{next(self._numbers)}"
        self.ledgers.append(self._folder / f"{name}.ledger")
        spec = {**self._spec, "crew": crew, "name": name, "ledger": str(self.ledgers[-1])}
        self.processes[crew] = Process("load", self._folder, spec, name)

    def one(self, kind: str, dice: random.Random, *, asynchronous: bool | None = None) -> str:
        """The name of one of a kind."""
        fitting = [
            name
            for name, role in CREW.items()
            if role.kind == kind and asynchronous in (None, role.asynchronous)
        ]
        return dice.choice(fitting)

    def at_work(self, crew: str) -> bool:
        """Whether one has begun to write its ledger."""
        ledger = self._folder / f"{self.processes[crew].name}.ledger"
        return ledger.exists() and ledger.stat().st_size > 0

    def check(self) -> None:
        """Raise QueueError if one ended by itself."""
        for process in self.processes.values():
            process.check()

    def stop(self, *kinds: str) -> None:
        """Have all of these kinds end, and wait for them."""
        ending = [
            self.processes.pop(name) for name in list(self.processes) if CREW[name].kind in kinds
        ]
        for process in ending:
            process.tell(["stop"])
        for process in ending:
            process.end()

    def close(self) -> None:
        """End them in any case."""
        for process in self.processes.values():
            process.kill()


class World:
    """All of it; a context manager that ends everything it started."""

    def __init__(self, folder: Path, seed: int, rate: float) -> None:
        self.folder = folder
        #: Whether a fault of the servers or the network is on; and whether none is to begin.
        self.broken = self.calm = False
        with ExitStack() as stack:
            self.servers = stack.enter_context(ReplicaSet(folder))
            self.proxies = Proxies(folder, [each.port for each in self.servers.members])
            stack.callback(self.proxies.close)
            self.mongo: MongoClient[dict[str, Any]] = stack.enter_context(
                MongoClient(self.servers.url, tz_aware=True, appname="faults", socketTimeoutMS=5000)
            )
            since = self.mongo.admin.command("ping")["operationTime"]
            self.witnessed = folder / "witness"
            self.witness = Process(
                "witness",
                folder,
                {
                    "url": self.servers.url,
                    "since": [since.time, since.inc],
                    "path": str(self.witnessed),
                    "database": DATABASE,
                    "namespace": NAMESPACE,
                },
            )
            stack.callback(self.witness.kill)
            self.crew = Crew(
                folder,
                {"url": self.proxies.url, "namespace": NAMESPACE, "seed": seed, "rate": rate},
            )
            stack.callback(self.crew.close)
            while not all(map(self.crew.at_work, CREW)):
                self.check()
                time.sleep(0.05)
            self._stack = stack.pop_all()

    @property
    def messages(self) -> Collection[dict[str, Any]]:
        """The collection of the namespace."""
        return self.mongo[DATABASE].get_collection(
            NAMESPACE, write_concern=WriteConcern("majority", j=True)
        )

    def check(self) -> None:
        """Raise QueueError if a process ended that should not have."""
        self.proxies.check()
        self.witness.check()
        self.crew.check()

    def drop_bus(self, member: Member) -> None:
        """Drop the collection of the bus."""
        member.mongo[DATABASE].drop_collection(BUS)

    def finish(self) -> list[dict[str, Any]]:
        """Have the load finish what is there; then end it and the witness. What is stored in the end."""
        self.crew.stop("producer")
        for process in self.crew.processes.values():
            process.tell(["hurry"])
        live = {
            "q": {"$in": list(QUEUES)},
            "record": {"$exists": False},
            "processed": {"$exists": False},
        }
        deadline = time.monotonic() + DRAIN
        while self._left(live) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.2)
        self.crew.stop("mover", "consumer")
        self.messages.insert_one({"_id": END, "q": END, "when": datetime.now(UTC), "record": True})
        self.witness.end()
        return list(self.messages.find({"record": {"$exists": False}}, {"q": 1, "processed": 1}))

    @staticmethod
    def unfinished(stored: list[dict[str, Any]]) -> int:
        """How many of what is stored in the end should have been worked on: the machine is too slow, or something does not go on."""
        return sum(each["q"] in QUEUES and "processed" not in each for each in stored)

    def _left(self, live: dict[str, Any]) -> bool:
        try:
            return self.messages.find_one(live) is not None
        except PyMongoError as error:
            raise Unavailable(
                f"the servers are away though every fault was mended: {error}"
            ) from error

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
