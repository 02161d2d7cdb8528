"""The change log shows the story of each message, whatever clients believe."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import ObjectId
from pymongo.change_stream import ChangeStream

from pyqueue import Client, Queue, Reservation
from pyqueue.backends.bucket import packs
from pyqueue.runtime.connecting import runner_of
from tests.chaos import ledger
from tests.chaos.change_log import END, line_of, watch
from tests.chaos.conftest import Server
from tests.chaos.names import document_of, name_of


def timeless(line: list[Any]) -> list[Any]:
    """Check the times in a line, and return it without them. Leases last a minute."""
    kind, id, *rest = line
    if kind in ("in", "pack", "copy"):
        at, when = rest[3:5]
        del rest[3:5]
    elif kind == "tick":
        at = when = rest.pop()
    elif kind == "set":
        *rest, at = rest
        when = rest[0].pop("when", at)
        assert abs(rest[0].pop("due", at) - at) < 120
        if "processed" in rest[0]:  # it will never be claimed
            when = at
    else:
        at = when = rest[0]
    assert abs(at - time.monotonic()) < 60
    assert abs(when - at) < 120
    return [kind, id, *rest]


class Log:
    """The lines of the change log for each operation of a client."""

    def __init__(self, client: Client, stream: ChangeStream[dict[str, Any]]) -> None:
        self._client, self._stream = client, stream
        self._marks = itertools.count()

    def lines(self, operation: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call an operation and return the lines that it leaves."""
        operation(*args, **options)
        mark = f"~mark-{next(self._marks)}"
        collection = self._client.database[self._client.namespace]
        collection.insert_one({"_id": mark, "record": True})
        events = itertools.takewhile(
            lambda event: event["documentKey"]["_id"] != mark, self._stream
        )
        return [timeless(line) for line in map(line_of, events) if line is not None]

    def reserve(self, queue: Queue[Any], id: str) -> tuple[Reservation[Any], str]:
        """Reserve a message, check the line, and return the reservation and its token."""
        got: list[Any] = []
        lines = self.lines(lambda: got.append(queue.reserve(0)))
        (held,) = got
        owner = runner_of(self._client).owner()
        assert lines == [["set", id, {"token": held.token, "owner": owner}]]
        return held, held.token

    def reserve_many(self, queue: Queue[Any], pack: str) -> tuple[list[Reservation[Any]], str]:
        """Reserve the messages of a pack, check the line, and return them and their token."""
        got: list[Any] = []
        lines = self.lines(lambda: got.extend(queue.reserve_many(100, timeout=0)))
        owner = runner_of(self._client).owner()
        assert lines == [["set", pack, {"token": got[0].token, "owner": owner}]]
        return got, got[0].token


@pytest.fixture
def log(client: Client, mongo: pymongo.MongoClient[dict[str, Any]]) -> Iterator[Log]:
    """The change log of the client of the test."""
    client.queues()  # creates the collection
    with mongo[client.database.name][client.namespace].watch() as stream:
        yield Log(client, stream)


def moved(**put: Any) -> list[Any]:
    return [["set", "a", {"token": None, **put}]]


def test_change_log_shows_each_operation(client: Client, log: Log) -> None:
    """Each operation leaves the line that the checker reads. Settles show their token."""
    orders, parsed = client.queue("orders"), client.queue("parsed")
    packed = client.queue("packed", history=60)
    payload: dict[str, Any] = {"n": "a", "trail": []}
    (line,) = log.lines(orders.push, payload, id="a")
    assert line[:-1] == ["in", "a", "orders", "a"]
    assert abs(line[-1] / 1000 - time.time()) < 60
    held, _ = log.reserve(orders, "a")
    assert log.lines(orders.extend, held) == [["set", "a", {}]]
    assert log.lines(orders.release, held) == moved(tries=0)
    held, token = log.reserve(orders, "a")
    assert log.lines(orders.rollback, held, delay=0, error=f"by {token}") == moved(by=token)
    # The first mark of the trail, a later one, and a new payload.
    held, token = log.reserve(orders, "a")
    update = {"$push": {"trail": ["orders", token]}}
    assert log.lines(orders.move, held, to=parsed, update=update) == moved(q="parsed", by=token)
    held, token = log.reserve(parsed, "a")
    update = {"$push": {"trail": ["parsed", token]}}
    assert log.lines(parsed.move, held, to=orders, update=update) == moved(q="orders", by=token)
    held, token = log.reserve(orders, "a")
    payload = {**held.payload, "trail": [*held.payload["trail"], ["orders", token]]}
    assert log.lines(orders.move, held, to=packed, payload=payload) == moved(
        q="packed", n="a", by=token
    )
    held, token = log.reserve(packed, "a")
    ((_, _, put),) = log.lines(packed.commit, held, payload={"trail": [["packed", token]]})
    assert put.pop("token") not in (None, token)
    assert put == {"processed": True, "by": token}


def test_change_log_shows_messages_with_keys(client: Client, log: Log) -> None:
    """A replaced message has new content and no claim. A buried one is deleted by a pop."""
    states = client.queue("states")
    (line,) = log.lines(states.push, {"n": "1", "trail": []}, key="k", id="s")
    assert line[:-1] == ["in", "s", "states", "1"]
    again = {"key": "k", "on_duplicate": "replace"}
    assert log.lines(states.push, {"n": "2", "trail": []}, **again) == [["set", "s", {"n": "2"}]]
    log.reserve(states, "s")
    assert log.lines(states.push, {"n": "3", "trail": []}, **again) == [
        ["set", "s", {"n": "3", "token": None, "tries": 0}]
    ]
    held, _ = log.reserve(states, "s")
    assert log.lines(states.bury, held) == [
        ["set", "s", {"q": "states.dead", "token": None, "dead": True}]
    ]
    ((out, id, at),) = log.lines(client.queue("states.dead").pop, 0)
    assert (out, id) == ("out", "s")
    assert abs(at - time.monotonic()) < 60


def test_change_log_shows_groups_and_packs(client: Client, log: Log) -> None:
    """The place in a group, the bits of a pack, and the copy of a message that leaves it."""
    turns, parcels = client.queue("turns", kind="ordered"), client.queue("parcels", kind="bucket")
    (line,) = log.lines(turns.push, {"n": "a", "trail": []}, id="a", group="g")
    group, (seq, no) = line[-2:]
    assert (line[:4], group[4:], seq > 0 < no) == (["in", "a", "turns", "a"], "g", True)
    held, token = log.reserve(turns, "a")
    assert log.lines(turns.rollback, held, delay=0, error=f"by {token}") == moved(by=token)

    (line,) = log.lines(parcels.push_many, [{"n": n, "trail": []} for n in "abcd"])
    kind, pack, *rest = line
    assert [kind, *rest[:2]] == ["pack", "parcels", list("abcd")]
    (held, *more), token = log.reserve_many(parcels, pack)
    assert log.lines(parcels.commit, held) == [["set", pack, {"left": 3, "done": {"0": 1}}]]
    for each, target, bits, left in ((more[0], "parcels", 3, 2), (more[1], "parcels.dead", 7, 1)):
        place, dead = str(each.id), target != "parcels"
        if dead:
            lines = log.lines(parcels.bury, each)
        else:
            lines = log.lines(parcels.rollback, each, delay=0, error=f"by {token}")
        copy, decided, shown = lines
        assert copy[:2] == ["copy", place]
        content = {name_of(place): each.payload["n"]}
        assert copy[2:4] + copy[5:] == ["~handover:parcels", content, target, token, dead]
        put = {"left": left, "done": {"0": bits}, "handed": [[token, [place]]]}
        assert decided == ["set", pack, put]
        assert shown == ["set", place, {"q": target}]
    assert [line[:2] for line in log.lines(parcels.commit, more[2])] == [["out", pack]]
    part = packs.part_id(pack, token, [2, 3])
    assert (name_of(part), document_of(part)) == (f"{pack}:2", pack)
    # A push that is repeated keeps its first pack out, and enters one by one.
    again = [f"{ObjectId()}:0"]
    (line,) = log.lines(parcels.push_many, [{"n": "e", "trail": []}], ids=again)
    assert line[:4] == ["in", again[0], "parcels", "e"]


def test_change_log_shows_ends_tries_and_results(client: Client, log: Log) -> None:
    """A message that was cancelled or removed, and a try that does not count."""
    chores = client.queue("chores", history=60)
    for id in "abcd":
        chores.push({"n": id, "trail": []}, id=id, result=60)
    assert log.lines(chores.cancel, "a")[-1] == [
        "set",
        "a",
        {"processed": True, "outcome": "cancelled"},
    ]
    assert log.lines(chores.select(where={"payload.n": "b"}).remove) == [
        ["set", "b", {"processed": True, "outcome": "removed"}]
    ]
    held, token = log.reserve(chores, "c")
    again = {"delay": 60, "counted": False, "error": f"by {token}"}
    assert log.lines(chores.rollback, held, **again) == [
        ["set", "c", {"token": None, "tries": 0, "by": token}]
    ]
    assert log.lines(chores.select(state="scheduled").requeue) == [["set", "c", {}]]
    held, token = log.reserve(chores, "d")
    ((_, _, put),) = log.lines(chores.commit, held, result={"n": "d", "by": token})
    assert put.pop("token") not in (None, token)
    assert put == {"processed": True, "by": token}


def test_change_log_shows_schedules(client: Client, log: Log) -> None:
    """A message that a schedule pushes enters its queue as a copy."""
    begun = time.time()
    every: dict[str, Any] = {"queue": "ticks", "every": 60, "payload": {"n": "beat"}}
    ((kind, id, put),) = log.lines(client.schedule, "beat", **every)
    assert (kind, id) == ("tick", "~cron:beat")
    assert abs(put["when"] / 1000 - begun - 60) < 60
    ids: list[Any] = []
    lines = log.lines(lambda: ids.append(client.run_schedule("beat")))
    assert ["tick", id, {"last": ids[0]}] in lines
    assert [line[:2] for line in lines if line[0] != "tick"] == [["copy", ids[0]], ["set", ids[0]]]
    assert log.lines(client.pause_schedule, "beat") == [["tick", id, {"when": None}]]
    assert log.lines(client.unschedule, "beat") == [["tick", id, {"gone": True}]]


def test_change_log_continues_after_a_failed_stream(
    server: Server, database: str, tmp_path: Path
) -> None:
    url = server.url(database) + "&appName=pyqueue"  # the name that fail points ask for
    with Client(server.url(database), namespace="load") as client:
        client.queues()  # creates the collection
        since = client.database.client.admin.command("ping")["operationTime"]
        client.queue("orders").push_many([{"n": "a"}, {"n": "b"}], ids=["a", "b"])
        client.queue("orders").pop(0)
        client.database["load"].insert_one({"_id": END, "record": True})
        server.fail(1, "aggregate", errorCode=50)
        spec = {"url": url, "database": database, "namespace": "load"}
        watch({**spec, "since": [since.time, since.inc], "path": str(tmp_path / "change_log")})
    assert server.has_failed()
    assert [line[:2] for line in ledger.read(tmp_path / "change_log")] == [
        ["in", "a"],
        ["in", "b"],
        ["out", "a"],
    ]
