"""The cluster that faults act on: servers, proxies, change log and the workload's processes."""

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

from pyqueue.backends.bucket import packs
from pyqueue.errors import Unavailable
from pyqueue.telemetry.storing import METRICS, TOTAL
from tests.chaos.change_log import END
from tests.chaos.members import Member, ReplicaSet
from tests.chaos.names import name_in
from tests.chaos.processes import Process
from tests.chaos.proxies import Proxies
from tests.chaos.queues import QUEUES
from tests.chaos.redis_server import Redis
from tests.chaos.stream_load import behind, contents_of
from tests.chaos.windows import Lock
from tests.chaos.workload import ROLES

DATABASE, NAMESPACE = "faults", "load"
BUS_COLLECTION = "pyqueue.signals"  # of the default bus
DRAIN_TIMEOUT_S = 120.0


class WorkloadProcesses:
    """The processes of the workload, one for each role of ``workload``.

    A killed process is replaced by another one with the same role and a new ledger.

    Args:
        folder: A folder for the ledgers.
        spec: The part of the specification that all processes share.
        roles: The names of the roles.
    """

    def __init__(self, folder: Path, spec: dict[str, Any], roles: tuple[str, ...]) -> None:
        self._folder, self._spec = folder, spec
        self._numbers = itertools.count(1)
        self._ledgers: list[Path] = []
        #: When each process was killed, by the name of its ledger.
        self.killed: dict[str, float] = {}
        #: The running processes, by their role.
        self.processes: dict[str, Process] = {}
        for role in roles:
            self.start(role)

    @property
    def ledgers(self) -> list[Path]:
        """The ledgers. A process that was killed before it began has none."""
        return [path for path in self._ledgers if path.exists()]

    def kill(self, role: str) -> str:
        """Kill the process of a role and return its name."""
        process = self.processes.pop(role)
        process.kill()
        self.killed[process.name] = time.monotonic()
        return process.name

    def start(self, role: str) -> None:
        """Start a process for a role."""
        name = f"{role}.{next(self._numbers)}"
        self._ledgers.append(self._folder / f"{name}.ledger")
        spec = {**self._spec, "role": role, "name": name, "ledger": str(self._ledgers[-1])}
        self.processes[role] = Process("workload", self._folder, spec, name)

    def choose(self, kind: str, dice: random.Random, *, asynchronous: bool | None = None) -> str:
        """Choose a role of a kind.

        Args:
            kind: "producer", "mover", "consumer" or "holder".
            dice: The source of randomness.
            asynchronous: Choose among roles with an async client, or with a blocking one.
        """
        fitting = [
            name
            for name, role in ROLES.items()
            if role.kind == kind and asynchronous in (None, role.asynchronous)
        ]
        return dice.choice(fitting)

    def is_running(self, role: str) -> bool:
        """Return whether the process of a role has begun to write its ledger."""
        ledger = self._folder / f"{self.processes[role].name}.ledger"
        return ledger.exists() and ledger.stat().st_size > 0

    def check(self) -> None:
        """Raise QueueError if a process has ended."""
        for process in self.processes.values():
            process.check()

    def stop(self, *kinds: str) -> None:
        """Stop all processes of these kinds and wait for them."""
        ending = [
            self.processes.pop(role) for role in list(self.processes) if ROLES[role].kind in kinds
        ]
        for process in ending:
            process.send(["stop"])
        for process in ending:
            process.wait()

    def close(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            process.kill()


class Cluster:
    """Everything that a run starts; a context manager that ends it.

    Args:
        folder: A folder for data, logs and ledgers.
        seed: The seed of the workload.
        rate: Messages pushed per second.
        mutant: The change of the product to run with; see ``mutants``.
    """

    def __init__(self, folder: Path, seed: int, rate: float, mutant: str | None = None) -> None:
        self.folder = folder
        #: Whether a fault of the servers or the network is active.
        self.broken = False
        #: Whether no such fault may begin.
        self.calm = False
        #: The messages that transactions of another program held, as their faults say.
        self.locks: list[Lock] = []
        #: The contents of the stream at the end, and how far its groups are behind.
        self.contents: dict[int, str] = {}
        #: The counts that telemetry has stored at the end: a document for each queue and group.
        self.metrics: list[dict[str, Any]] = []
        self.behind = 0
        with ExitStack() as stack:
            self.servers = stack.enter_context(ReplicaSet(folder))
            self.proxies = Proxies(
                folder, [each.port for each in self.servers.members], self.servers.network.ports
            )
            stack.callback(self.proxies.close)
            self.mongo: MongoClient[dict[str, Any]] = stack.enter_context(
                MongoClient(self.servers.url, tz_aware=True, appname="faults", socketTimeoutMS=5000)
            )
            since = self.mongo.admin.command("ping")["operationTime"]
            self.change_log = folder / "change_log"
            self._logger = Process(
                "change_log",
                folder,
                {
                    "url": self.servers.url,
                    "since": [since.time, since.inc],
                    "path": str(self.change_log),
                    "database": DATABASE,
                    "namespace": NAMESPACE,
                },
            )
            stack.callback(self._logger.kill)
            self.redis = Redis(folder)
            stack.callback(self.redis.kill)
            spec = {
                "url": self.proxies.url,
                "namespace": NAMESPACE,
                "seed": seed,
                "rate": rate,
                "redis": self.redis.url,
                "mutant": mutant,
            }
            self.workload = WorkloadProcesses(folder, spec, tuple(ROLES))
            stack.callback(self.workload.close)
            while not all(map(self.workload.is_running, ROLES)):
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
        """Raise QueueError if a process has ended that should run."""
        self.proxies.check()
        self.servers.network.check()
        self._logger.check()
        self.workload.check()

    def open_transaction(self, spec: dict[str, Any]) -> Process:
        """Start a process that holds messages in a transaction; see ``transaction``."""
        address = {"url": self.servers.url, "database": DATABASE, "namespace": NAMESPACE}
        return Process("transaction", self.folder, {**address, **spec})

    def drop_bus(self, member: Member) -> None:
        """Drop the collection of the bus."""
        member.mongo[DATABASE].drop_collection(BUS_COLLECTION)

    def finish(self) -> list[dict[str, Any]]:
        """Drain the queues, then stop the workload and the change log.

        Returns:
            The messages that are stored at the end.
        """
        self.workload.stop("producer")
        for process in self.workload.processes.values():
            process.send(["drain"])
        live = {
            "q": {"$in": list(QUEUES)},
            "record": {"$exists": False},
            "processed": {"$exists": False},
        }
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while (
            is_any_left(self.messages, live) or behind(self.messages)
        ) and time.monotonic() < deadline:
            self.check()
            time.sleep(0.2)
        self.workload.stop("mover", "consumer", "holder")
        self.messages.insert_one({"_id": END, "q": END, "when": datetime.now(UTC), "record": True})
        self._logger.wait()
        self.contents, self.behind = contents_of(self.messages), behind(self.messages)
        metrics = self.mongo[DATABASE][f"{NAMESPACE}.{METRICS}"]
        self.metrics = list(metrics.find({"_id": {"$regex": f"^{TOTAL.letter} "}}))
        messages = {"record": {"$exists": False}, "_id": {"$not": {"$regex": "^~"}}}
        fields = dict.fromkeys(("q", "processed", "done", "b.h", "at"), 1)
        return list(self.messages.find(messages, fields))

    def unfinished(self, stored: list[dict[str, Any]]) -> int:
        """Return how many of the stored messages the workload should have finished.

        Not 0: the machine is too slow, or a consumer is stuck.
        """
        left = sum(each["q"] in QUEUES and "processed" not in each for each in stored)
        return left + self.behind

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def ids_of(document: dict[str, Any]) -> list[str]:
    """Return the names of the messages in a stored document: one, or several of a pack."""
    id = document["_id"]
    if "b" not in document:
        return [name_in(document["q"], id)]
    at = document.get("at", range(len(document["b"])))
    first = str(id).partition("/")[0]
    return [f"{first}:{at[place]}" for place in packs.places(packs.alive_of(document))]


def is_any_left(messages: Collection[dict[str, Any]], live: dict[str, Any]) -> bool:
    """Return whether a message matches a filter, after the last fault.

    Raises:
        Unavailable: The servers do not answer.
    """
    try:
        return messages.find_one(live) is not None
    except PyMongoError as error:
        raise Unavailable(f"the servers do not answer after the last fault: {error}") from error
