"""What only the buses on MongoDB's capped collections can get wrong."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mongomock
import pytest
from bson import ObjectId, Timestamp
from pymongo import AsyncMongoClient, MongoClient
from pymongo.monitoring import CommandListener

import signals
from pyqueue.embedded import EmbeddedServer, find_mongod
from tests.signals.conftest import Kind
from tests.signals.servers import NOW, answers, closing, eventually, free_port

every = pytest.mark.parametrize(
    "kind", ["capped-blocking", "capped-async", "capped-motor"], indirect=True
)
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
    """An event comes through, once what remains of a repair has been heard too."""
    end = time.monotonic() + 10
    while True:
        bus.emit("a", NOW)
        while listener.wait(0.5):
            if listener.when == NOW:
                return
        assert time.monotonic() < end


@every
def test_an_empty_collection_is_no_trouble(kind: Kind, mongo: Client) -> None:
    mongo[kind.place].create_collection("pyqueue.signals", capped=True, size=65536)
    bus = kind.make()
    with bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(5)
    assert bus.stats["restarts"] == 0


@every
def test_a_ring_overrun_wakes_listeners(kind: Kind, mongo: Client) -> None:
    ring = mongo[kind.place].create_collection("pyqueue.signals", capped=True, size=4096)
    bus = kind.make()
    with bus.listen("a") as listener, bus.listen("b") as other:
        for _ in range(10):
            ring.insert_many(
                [{"topic": "b", "when": NOW, "filler": "x" * 100} for _ in range(1000)]
            )
        assert listener.wait(10)
        assert listener.when is None
        assert other.wait(5)
        hears(bus, listener)
    assert bus.stats["restarts"] > 0


@every
def test_a_dropped_collection_is_made_again_and_capped(kind: Kind, mongo: Client) -> None:
    bus, other = kind.make(), kind.make()
    with bus.listen("a") as listener:
        other.emit("b", NOW)
        eventually(lambda: other.stats["published"] == 1)
        mongo[kind.place].drop_collection("pyqueue.signals")
        other.emit("b", NOW)  # an insert, which makes a plain collection of that name
        assert listener.wait(10)
        assert listener.when is None
        hears(other, listener)
        assert capped(mongo, kind.place)


@every
def test_a_dropped_database_is_no_trouble(kind: Kind, mongo: Client) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        mongo.drop_database(kind.place)
        assert listener.wait(10)
        assert listener.when is None
        hears(bus, listener)
    assert capped(mongo, kind.place)


@every
def test_a_writer_sees_to_it_that_the_collection_is_capped(
    kind: Kind, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.capped_bus.CHECK_INTERVAL_S", 0.0)
    bus = kind.make()
    mongo[kind.place]["pyqueue.signals"].insert_one({"topic": "x", "when": NOW})
    bus.emit("a", NOW)
    eventually(lambda: bus.stats["published"] == 1)
    assert capped(mongo, kind.place)


@every
def test_what_holds_other_things_is_left_alone(kind: Kind, mongo: Client) -> None:
    mongo[kind.place]["pyqueue.signals"].insert_one({"precious": True})
    bus = kind.make()
    with pytest.raises(signals.BusError, match="other things"):
        bus.check()
    bus.emit("a", NOW)
    eventually(lambda: bus.stats["failed"] > 0)
    assert [
        document.get("precious") for document in mongo[kind.place]["pyqueue.signals"].find()
    ] == [True]


@every
def test_clocks_that_differ_lose_nothing(kind: Kind, mongo: Client) -> None:
    with kind.make().listen("a") as listener:
        old = ObjectId("00000001" + "0" * 16)  # as made by a process whose clock stands in 1970
        event = {"_id": old, "at": Timestamp(0, 0), "topic": "a", "when": NOW}
        mongo[kind.place]["pyqueue.signals"].insert_one(event)
        assert listener.wait(5)
        assert listener.when == NOW


@every
def test_garbage_of_others_is_passed_over(kind: Kind, mongo: Client) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        empty = Timestamp(0, 0)
        garbage: list[dict[str, Any]] = [
            {},
            {"topic": 3},
            {"topic": "a", "when": "soon"},
            {"topic": ["a"]},
        ]
        mongo[kind.place]["pyqueue.signals"].insert_many([{"at": empty} | each for each in garbage])
        bus.emit("a", NOW)
        assert listener.wait(5)
        assert listener.when == NOW
        assert bus.stats["heard"] == 1
        assert bus.stats["restarts"] == 0


@every
def test_many_buses_make_the_collection_at_once(kind: Kind, mongo: Client) -> None:
    buses = [kind.make() for _ in range(4)]
    for number, bus in enumerate(buses):
        bus.emit(f"topic-{number}", NOW)
    for bus in buses:
        eventually(lambda bus=bus: bus.stats["published"] == 1)  # type: ignore[misc]
    with buses[0].listen("a") as listener:
        hears(buses[3], listener)
    assert capped(mongo, kind.place)


def test_a_collection_that_always_comes_and_goes_keeps_no_event_back(
    mongod: EmbeddedServer, mongo: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others make it between the look and the making, and drop it before the next look."""
    place = f"t{os.urandom(6).hex()}"
    mongo[place].create_collection("pyqueue.signals", capped=True, size=65536)
    asked: list[str] = []
    with Client(mongod.url) as client:
        database = client[place]
        command = database.command

        def blind(document: dict[str, Any]) -> Any:
            asked.append(next(iter(document)))
            return (
                {"cursor": {"firstBatch": []}}
                if "listCollections" in document
                else command(document)
            )

        monkeypatch.setattr(database, "command", blind)
        with signals.CappedBus(database) as bus:
            bus.emit("a", NOW)
            eventually(lambda: bus.stats["published"] == 1)
            assert asked == ["listCollections", "create"] * 3
            bus.emit("b", NOW)
            eventually(lambda: bus.stats["published"] == 2)
            assert len(asked) == 12, "it was never seen, so it is looked for again"
        assert bus.stats["failed"] == 0
    assert [document["topic"] for document in mongo[place]["pyqueue.signals"].find()] == ["a", "b"]
    mongo.drop_database(place)


FORK = """
import datetime, os, sys, pymongo, signals
now = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)
client = pymongo.MongoClient(sys.argv[1])
bus = signals.open("capped:", client[sys.argv[2]])
with bus.listen("a") as listener:
    child = os.fork()
    if not child:
        assert listener.closed and not listener.wait(None) and bus._runner._transport._cursor is None
        with pymongo.MongoClient(sys.argv[1]) as fresh, signals.open("capped:", fresh[sys.argv[2]]) as own:
            with own.listen("b") as heard:
                own.emit("a", now)
                own.emit("b", now)
                assert heard.wait(5) and heard.when == now
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    assert listener.wait(5) and listener.when == now
    bus.emit("a", None)
    assert listener.wait(5) and listener.when is None
assert bus.stats["restarts"] == 0
bus.close()
client.close()
print("fine")
"""


def test_a_child_of_fork_uses_a_new_client_and_leaves_the_parents_cursor_alone(
    mongo: Client, mongod: EmbeddedServer
) -> None:
    place = f"t{os.urandom(6).hex()}"
    done = subprocess.run(
        [sys.executable, "-c", FORK, mongod.url, place],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr
    mongo.drop_database(place)


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


def test_two_processes_make_the_collection_at_once(mongo: Client, mongod: EmbeddedServer) -> None:
    place = f"t{os.urandom(6).hex()}"
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
    mongo.drop_database(place)


def test_fifty_listeners_idle_for_one_command_a_second(mongod: EmbeddedServer) -> None:
    commands = Commands()
    place = f"t{os.urandom(6).hex()}"
    with Client(mongod.url, event_listeners=[commands]) as client:
        with signals.CappedBus(client[place]) as bus:
            listeners = [bus.listen(f"topic-{number}") for number in range(50)]
            for listener in listeners:
                listener.__enter__()
            assert commands.names.count("find") == 2  # the marker, and one cursor for all
            commands.names.clear()
            began = time.monotonic()
            assert not listeners[0].wait(3)
            assert len(commands.names) <= 2 * (time.monotonic() - began)
            for listener in listeners:
                listener.close()
        client.drop_database(place)


def test_nobody_listening_costs_nothing(
    mongod: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.hub.UNSUBSCRIBE_DELAY_S", 0.1)
    commands = Commands()
    place = f"t{os.urandom(6).hex()}"
    with Client(mongod.url, event_listeners=[commands]) as client:
        with signals.CappedBus(client[place]) as bus:
            with bus.listen("a"):
                pass
            eventually(lambda: "killCursors" in commands.names)
            commands.names.clear()
            time.sleep(1.2)  # a getMore takes a second
            assert commands.names == []
            with bus.listen("a") as listener:
                bus.emit("a", NOW)
                assert listener.wait(5)
        client.drop_database(place)


def test_broken_it_does_not_try_busily(mongod: EmbeddedServer) -> None:
    commands = Commands()
    place = f"t{os.urandom(6).hex()}"
    with Client(mongod.url, event_listeners=[commands]) as client:
        client[place]["pyqueue.signals"].insert_one({"precious": True})
        commands.names.clear()
        with signals.CappedBus(client[place]) as bus, bus.listen("a") as listener:
            bus.emit("a", NOW)
            assert not listener.wait(2)
            assert 2 < len(commands.names) < 50
        client.drop_database(place)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A mongod that the test may kill."""
    server = EmbeddedServer(tmp_path)
    yield server
    server.close()


@every
def test_mongod_killed_and_started_again(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.capped_bus.COMMAND_TIMEOUT_S", 1.0)
    for n in range(5):
        with EmbeddedServer(tmp_path / str(n)) as own:
            bus, other = kind.make(url=own.url), kind.make(url=own.url)
            with bus.listen("a") as listener:
                hears(other, listener)
                os.kill(own.pid, 9)
                own.close()
                other.emit("b", NOW)
                eventually(lambda: other.stats["failed"] > 0)  # noqa: B023  # called at once
                assert not listener.wait(0)
                with EmbeddedServer(own.path) as again:
                    if again.port == own.port:  # else somebody took the port meanwhile
                        assert listener.wait(15)
                        assert listener.when is None
                        eventually(lambda: other.stats["published"] >= 2)  # noqa: B023
                        hears(other, listener)
                        kind.undo()
                        return
                    kind.undo()
    raise AssertionError("the port was taken each time")


@pytest.mark.slow
@every
def test_a_primary_that_steps_down(kind: Kind, own: EmbeddedServer) -> None:
    bus, other = kind.make(url=own.url), kind.make(url=own.url)
    with bus.listen("a") as listener, Client(own.url) as client:
        client.admin.command({"replSetStepDown": 2, "secondaryCatchUpPeriodSecs": 0, "force": True})
        other.emit("a", NOW)
        end = time.monotonic() + 30
        while listener.when != NOW:
            assert listener.wait(end - time.monotonic())
        kind.undo()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The port of a mongod that asks for passwords; its administrator is admin:admin."""
    port = free_port()
    command = [
        find_mongod(),
        "--auth",
        "--bind_ip",
        "127.0.0.1",
        "--port",
        str(port),
        "--dbpath",
        str(tmp_path),
    ]
    process = subprocess.Popen([*command, "--nounixsocket"], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: answers(port), 30)
        with Client("127.0.0.1", port) as client:
            client.admin.command("createUser", "admin", pwd="admin", roles=["root"])
        yield port
    finally:
        process.kill()
        process.wait()


def test_not_permitted_names_the_remedy_and_the_remedy_works(guarded: int) -> None:
    with Client("127.0.0.1", guarded, username="admin", password="admin") as admin:
        privileges = [
            {
                "resource": {"db": "t", "collection": "pyqueue.signals"},
                "actions": ["find", "insert"],
            }
        ]
        admin["t"].command("createRole", "signaller", privileges=privileges, roles=[])
        admin["t"].command("createUser", "user", pwd="secret", roles=["signaller"])
        admin["t"].command("createUser", "nobody", pwd="secret", roles=[])
        url = f"mongodb://{{}}:{{}}@127.0.0.1:{guarded}/t"
        with Client(url.format("user", "secret")) as client:
            bus = signals.CappedBus(client["t"])
            with closing(bus):
                with pytest.raises(signals.BusError, match="not permitted") as caught:
                    bus.check()
                remedy = 'db.getSiblingDB("t").createCollection("pyqueue.signals", {capped: true, size: 1048576})'
                assert remedy in str(caught.value)
                assert "pyqueue.signals" not in admin["t"].list_collection_names()
                admin["t"].create_collection("pyqueue.signals", capped=True, size=1048576)
                bus.check()
                with bus.listen("a") as listener:
                    bus.emit("a", NOW)
                    assert listener.wait(5)
        for user, password in (("nobody", "secret"), ("user", "wrong-secret")):
            with Client(url.format(user, password)) as client:
                bus = signals.CappedBus(client["t"])
                with closing(bus), pytest.raises(signals.BusError) as caught:
                    bus.check()
                assert "secret" not in str(caught.value)


def test_other_databases_are_refused() -> None:
    database: Any = mongomock.MongoClient()["t"]
    for cls in (signals.CappedBus, signals.AsyncCappedBus):
        for wrong in (database, None, "t"):
            with pytest.raises(signals.BusError, match="needs a database"):
                cls(wrong)
    with Client("127.0.0.1", connect=False) as client, pytest.raises(signals.BusError):
        signals.AsyncCappedBus(client["t"])
    with pytest.raises(signals.BusError):
        signals.CappedBus(AsyncMongoClient[dict[str, Any]]("127.0.0.1", connect=False)["t"])
