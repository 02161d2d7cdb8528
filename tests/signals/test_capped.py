"""Faults that only the buses on capped collections of MongoDB can have."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import mongomock
import pytest
from bson import ObjectId, Timestamp
from pymongo import AsyncMongoClient, MongoClient
from pymongo.monitoring import CommandListener

import signals
from pyqueue.embedded import EmbeddedServer
from signals.capped_bus import CappedTransport
from tests.signals.conftest import ROOT_PASSWORD, ROOT_USER, Kind, OpenKind
from tests.signals.portal import NOW, SECONDS, closing, expect, python
from tests.support.eventually import eventually
from tests.support.shared import Mongod

CAPPED = ["capped-blocking", "capped-async", "capped-motor"]
every = pytest.mark.parametrize("kind", CAPPED, indirect=True)
Client = MongoClient[dict[str, Any]]


class Commands(CommandListener):
    """The names of the commands that a client sent."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def started(self, event: Any) -> None:
        self.names.append(event.command_name)

    def succeeded(self, event: Any) -> None:
        pass

    def failed(self, event: Any) -> None:
        pass


def capped(client: Client, place: str) -> bool:
    found = list(client[place].list_collections(filter={"name": "pyqueue.signals"}))
    return bool(found and found[0]["options"].get("capped"))


def hears(bus: Any, listener: Any) -> None:
    """Wait until an event comes through, behind the wake-ups of a repair."""

    def heard() -> bool:
        bus.emit("a", NOW)
        while listener.wait(0.5):
            if listener.when == NOW:
                return True
        return False

    eventually(heard)


def counts(bus: Any, name: str, least: int) -> bool:
    return bool(bus.stats[name] >= least)


@pytest.fixture
def place(mongo: Client) -> Iterator[str]:
    """The name of a database that is dropped at the end."""
    place = f"t{os.urandom(6).hex()}"
    yield place
    mongo.drop_database(place)


@every
def test_empty_collection_is_usable(kind: Kind, mongo: Client) -> None:
    mongo[kind.place].create_collection("pyqueue.signals", capped=True, size=65536)
    bus, producer = kind.make(), kind.make()
    with bus.listen("a") as listener:
        producer.emit("a", NOW)
        assert listener.wait(SECONDS)
    assert bus.stats["restarts"] == 0


@every
def test_ring_overrun_wakes_listeners(kind: Kind, mongo: Client) -> None:
    ring = mongo[kind.place].create_collection("pyqueue.signals", capped=True, size=4096)
    bus = kind.make()
    filler = [{"topic": "c", "when": NOW, "filler": "x" * 100} for _ in range(1000)]
    with bus.listen("a") as listener, bus.listen("b") as second:

        def overrun() -> bool:
            ring.insert_many([{**document} for document in filler])
            return bool(bus.stats["restarts"])

        eventually(overrun)
        expect(listener, None)
        assert second.wait(SECONDS)
        hears(kind.make(), listener)


@every
def test_dropped_collection_is_created_again_and_capped(kind: Kind, mongo: Client) -> None:
    bus, producer = kind.make(), kind.make()
    with bus.listen("a") as listener:
        producer.emit("b", NOW)
        eventually(lambda: producer.stats["published"] == 1)
        mongo[kind.place].drop_collection("pyqueue.signals")
        producer.emit("b", NOW)  # an insert, which makes a plain collection of that name
        expect(listener, None)
        hears(producer, listener)
        assert capped(mongo, kind.place)


@every
def test_dropped_database_is_created_again(kind: Kind, mongo: Client) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        mongo.drop_database(kind.place)
        expect(listener, None)
        hears(kind.make(), listener)
    assert capped(mongo, kind.place)


@every
def test_writer_converts_a_plain_collection(
    kind: Kind, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.capped_bus.CHECK_INTERVAL_S", 0.0)
    bus = kind.make()
    mongo[kind.place]["pyqueue.signals"].insert_one({"topic": "x", "when": NOW})
    bus.emit("a", NOW)
    eventually(lambda: bus.stats["published"] == 1)
    assert capped(mongo, kind.place)


@every
def test_collection_with_other_things_is_left_alone(kind: Kind, mongo: Client) -> None:
    mongo[kind.place]["pyqueue.signals"].insert_one({"precious": True})
    bus = kind.make()
    with pytest.raises(signals.BusError, match="other documents"):
        bus.check()
    bus.emit("a", NOW)
    eventually(lambda: bus.stats["failed"] > 0)
    stored = mongo[kind.place]["pyqueue.signals"].find()
    assert [document.get("precious") for document in stored] == [True]


@every
def test_clocks_that_differ_lose_no_event(kind: Kind, mongo: Client) -> None:
    with kind.make().listen("a") as listener:
        old = ObjectId("00000001" + "0" * 16)  # as made by a process whose clock stands in 1970
        event = {"_id": old, "at": Timestamp(0, 0), "topic": "a", "when": NOW}
        mongo[kind.place]["pyqueue.signals"].insert_one(event)
        expect(listener, NOW)


@every
def test_foreign_documents_are_skipped(kind: Kind, mongo: Client) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        empty = Timestamp(0, 0)
        garbage: list[dict[str, Any]] = [{}, {"topic": 3}, {"topic": ["a"]}]
        garbage += [{"topic": "a", "when": "soon"}]
        mongo[kind.place]["pyqueue.signals"].insert_many([{"at": empty} | each for each in garbage])
        kind.make().emit("a", NOW)
        expect(listener, NOW)
        assert bus.stats["heard"] == 1
        assert bus.stats["restarts"] == 0


@every
def test_many_buses_create_the_collection_at_once(kind: Kind, mongo: Client) -> None:
    buses = [kind.make() for _ in range(4)]
    for number, bus in enumerate(buses):
        bus.emit(f"topic-{number}", NOW)
    for bus in buses:
        eventually(lambda bus=bus: bus.stats["published"] == 1)  # type: ignore[misc]
    with buses[0].listen("a") as listener:
        hears(buses[3], listener)
    assert capped(mongo, kind.place)


def test_collection_that_comes_and_goes_holds_no_event(
    mongod: Mongod, mongo: Client, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client creates it after each check and drops it before the next one."""
    mongo[place].create_collection("pyqueue.signals", capped=True, size=65536)
    asked: list[str] = []
    with Client(mongod.url) as client:
        database = client[place]
        command = database.command

        def blind(document: dict[str, Any]) -> Any:
            asked.append(next(iter(document)))
            empty: dict[str, Any] = {"cursor": {"firstBatch": []}}
            return empty if "listCollections" in document else command(document)

        monkeypatch.setattr(database, "command", blind)
        with signals.CappedBus(database) as bus:
            bus.emit("a", NOW)
            eventually(lambda: bus.stats["published"] == 1)
            assert asked == ["listCollections", "create"] * 3
            bus.emit("b", NOW)
            eventually(lambda: bus.stats["published"] == 2)
            assert len(asked) == 12, "the collection was never seen, so the bus checks again"
        assert bus.stats["failed"] == 0
    assert [document["topic"] for document in mongo[place]["pyqueue.signals"].find()] == ["a", "b"]


FORK = """
import datetime, os, sys, pymongo, signals
now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
client = pymongo.MongoClient(sys.argv[1])
bus = signals.open("capped:", client[sys.argv[2]])
with bus.listen("a") as listener:
    child = os.fork()
    if not child:
        assert listener.closed and not listener.wait(None)
        assert bus._runner._transport._cursor is None
        with pymongo.MongoClient(sys.argv[1]) as fresh:
            own = signals.open("capped:", fresh[sys.argv[2]])
            with own, own.listen("b") as heard:
                own.emit("a", now)
                own.emit("b", now)
                assert heard.wait(20) and heard.when == now
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert listener.wait(20) and listener.when == now
    bus.emit("a", None)
    assert listener.wait(20) and listener.when is None
assert bus.stats["restarts"] == 0
bus.close()
client.close()
print("fine")
"""


def test_fork_leaves_the_cursor_of_the_parent_alone(mongod: Mongod, place: str) -> None:
    """The child uses a new client."""
    assert python(FORK, mongod.url, place) == "fine\n"


MAKER = """
import sys, datetime, pymongo, signals
with pymongo.MongoClient(sys.argv[1]) as client:
    bus = signals.open("capped:", client[sys.argv[2]])
    sys.stdin.readline()
    bus.check()
    bus.emit("a", datetime.datetime.now(datetime.UTC))
    bus.close()
    print(bus.stats["published"], bus.stats["failed"])
"""


@pytest.mark.slow
def test_two_processes_create_the_collection_at_once(
    mongo: Client, mongod: Mongod, place: str
) -> None:
    """The long form of `test_many_buses_create_the_collection_at_once`."""
    command = [sys.executable, "-c", MAKER, mongod.url, place]
    makers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for maker in makers:
        assert maker.stdin
        maker.stdin.write("\n")
        maker.stdin.flush()
    assert [maker.communicate()[0] for maker in makers] == ["1 0\n"] * 2
    assert capped(mongo, place)


def test_fifty_idle_listeners_cost_one_command_a_second(mongod: Mongod, place: str) -> None:
    commands = Commands()
    with (
        Client(mongod.url, event_listeners=[commands]) as client,
        signals.CappedBus(client[place]) as bus,
        ExitStack() as stack,
    ):
        listeners = [stack.enter_context(bus.listen(f"topic-{number}")) for number in range(50)]
        bus.emit("topic-1", NOW)
        # Nothing of entering is left to be sent.
        eventually(lambda: bus.stats["published"] == 1 and commands.names.count("find") == 2)
        eventually(lambda: commands.names[-1] == "getMore")  # one cursor for all; a marker before
        assert commands.names.count("find") == 2
        commands.names.clear()
        began = time.monotonic()
        assert not listeners[0].wait(1.6)
        assert len(commands.names) <= 2 * (time.monotonic() - began)


def test_bus_without_listeners_costs_no_command(
    mongod: Mongod, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.hub.UNSUBSCRIBE_DELAY_S", 0.1)
    monkeypatch.setattr("signals.capped_bus.READ_TIMEOUT_S", 0.1)
    commands = Commands()
    with (
        Client(mongod.url, event_listeners=[commands]) as client,
        signals.CappedBus(client[place]) as bus,
    ):
        with bus.listen("a"):
            pass
        eventually(lambda: "killCursors" in commands.names)
        commands.names.clear()
        time.sleep(0.3)  # a read would have sent three commands
        assert commands.names == []
        with bus.listen("a") as listener:
            bus.emit("a", NOW)
            assert listener.wait(SECONDS)


def test_broken_bus_does_not_retry_busily(
    mongod: Mongod, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each procedure waits longer after each failure."""
    starts: list[float] = []
    start = CappedTransport.start

    def counted(self: CappedTransport) -> Any:
        starts.append(time.monotonic())
        return start(self)

    monkeypatch.setattr(CappedTransport, "start", counted)
    commands = Commands()
    with Client(mongod.url, event_listeners=[commands]) as client:
        client[place]["pyqueue.signals"].insert_one({"precious": True})
        commands.names.clear()
        with signals.CappedBus(client[place]) as bus, bus.listen("a") as listener:
            bus.emit("b", NOW)
            eventually(lambda: len(starts) >= 4)
            assert starts[3] - starts[0] > 0.05 + 0.1 + 0.2  # half of the first three delays
            assert len(commands.names) < 50
            assert not listener.wait(0)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A mongod that the test may kill."""
    server = EmbeddedServer(tmp_path)
    yield server
    server.close()


def test_mongod_killed_and_started_again(
    opened: OpenKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds share the one server that is killed."""
    monkeypatch.setattr("signals.capped_bus.COMMAND_TIMEOUT_S", 1.0)
    for attempt in range(5):
        with EmbeddedServer(tmp_path / str(attempt)) as own, ExitStack() as stack:
            kinds = [stack.enter_context(opened(name)) for name in CAPPED]
            pairs = [(kind.make(url=own.url), kind.make(url=own.url)) for kind in kinds]
            listeners = [stack.enter_context(bus.listen("a")) for bus, _ in pairs]
            for (_, producer), listener in zip(pairs, listeners, strict=True):
                hears(producer, listener)
            os.kill(own.pid, 9)
            own.close()
            for (_, producer), listener in zip(pairs, listeners, strict=True):
                producer.emit("b", NOW)
                eventually(partial(counts, producer, "failed", 1))
                while listener.wait(0):  # an event that was sent before the kill
                    assert listener.when == NOW
            with EmbeddedServer(own.path) as again:
                if again.port != own.port:
                    continue  # another program took the port
                for (_, producer), listener in zip(pairs, listeners, strict=True):
                    expect(listener, None)
                    eventually(partial(counts, producer, "published", 2))
                    hears(producer, listener)
                stack.close()
                return
    raise AssertionError("another program took the port each time")


@pytest.mark.slow
@every
def test_primary_that_steps_down(kind: Kind, own: EmbeddedServer) -> None:
    bus, producer = kind.make(url=own.url), kind.make(url=own.url)
    with bus.listen("a") as listener, Client(own.url) as client:
        client.admin.command({"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 0, "force": True})
        producer.emit("a", NOW)
        end = time.monotonic() + 30
        while listener.when != NOW:
            assert listener.wait(end - time.monotonic())
        kind.close()


def test_missing_permission_names_the_remedy(guarded: int) -> None:
    """The remedy works."""
    with Client("127.0.0.1", guarded, username=ROOT_USER, password=ROOT_PASSWORD) as root:
        database = root["remedy"]
        resource = {"db": "remedy", "collection": "pyqueue.signals"}
        privileges = [{"resource": resource, "actions": ["find", "insert"]}]
        database.command("createRole", "signaller", privileges=privileges, roles=[])
        database.command("createUser", "user", pwd="secret", roles=["signaller"])
        database.command("createUser", "stranger", pwd="secret", roles=[])
        url = f"mongodb://{{}}:{{}}@127.0.0.1:{guarded}/remedy"
        with Client(url.format("user", "secret")) as client:
            bus = signals.CappedBus(client["remedy"])
            with closing(bus):
                with pytest.raises(signals.BusError, match="not permitted") as caught:
                    bus.check()
                remedy = (
                    'db.getSiblingDB("remedy").createCollection("pyqueue.signals", '
                    "{capped: true, size: 1048576})"
                )
                assert remedy in str(caught.value)
                assert "pyqueue.signals" not in database.list_collection_names()
                database.create_collection("pyqueue.signals", capped=True, size=1048576)
                bus.check()
                with bus.listen("a") as listener:
                    bus.emit("a", NOW)
                    assert listener.wait(SECONDS)
                    eventually(lambda: bus.stats["published"] == 1)
        for user, password in (("stranger", "secret"), ("user", "wrong-secret")):
            with Client(url.format(user, password)) as client:
                bus = signals.CappedBus(client["remedy"])
                with closing(bus), pytest.raises(signals.BusError) as caught:
                    bus.check()
                assert "secret" not in str(caught.value)


def test_databases_of_another_library_are_refused() -> None:
    database: Any = mongomock.MongoClient()["t"]
    for cls in (signals.CappedBus, signals.AsyncCappedBus):
        for wrong in (database, None, "t"):
            with pytest.raises(signals.BusError, match="needs a database"):
                cls(wrong)
    with Client("127.0.0.1", connect=False) as client, pytest.raises(signals.BusError):
        signals.AsyncCappedBus(client["t"])
    with pytest.raises(signals.BusError):
        signals.CappedBus(AsyncMongoClient[dict[str, Any]]("127.0.0.1", connect=False)["t"])
