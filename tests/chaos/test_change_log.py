"""The change log shows what happened to each message, whatever clients believe."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pymongo

from pyqueue import Client, Queue, Reservation
from pyqueue.connecting import runner_of
from tests.chaos import ledger
from tests.chaos.change_log import END, line_of, watch
from tests.chaos.conftest import Server


def test_change_log_shows_each_operation(
    client: Client, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    """Each operation leaves the line that the checker reads. Settles show their token."""
    orders, parsed, states = (client.queue(name) for name in ("orders", "parsed", "states"))
    packed = client.queue("packed", history=60)
    collection = client.database[client.namespace]
    client.queues()  # creates the collection
    marks = itertools.count()
    with mongo[client.database.name][client.namespace].watch() as stream:

        def logged(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            operation(*args, **options)
            mark = f"~mark-{next(marks)}"
            collection.insert_one({"_id": mark, "record": True})
            events = itertools.takewhile(lambda event: event["documentKey"]["_id"] != mark, stream)
            return [line for line in map(line_of, events) if line is not None]

        def take(queue: Queue[Any], id: str) -> tuple[Reservation[Any], str]:
            got: list[Any] = []
            lines = logged(lambda: got.append(queue.reserve(0)))
            (held,) = got
            assert lines == [["set", id, {"token": held.token, "owner": runner_of(client).owner}]]
            return held, held.token

        def moved(**put: Any) -> list[Any]:
            return [["set", "a", {"token": None, **put}]]

        payload: dict[str, Any] = {"n": "a", "trail": []}
        (line,) = logged(orders.push, payload, id="a")
        assert line[:-1] == ["in", "a", "orders", "a"]
        assert abs(line[-1] / 1000 - time.time()) < 60
        held, _ = take(orders, "a")
        assert logged(orders.extend, held) == []
        assert logged(orders.release, held) == moved()
        held, token = take(orders, "a")
        assert logged(orders.rollback, held, delay=0, error=f"by {token}") == moved(by=token)
        # The first mark of the trail, a later one, and a new payload.
        held, token = take(orders, "a")
        update = {"$push": {"trail": ["orders", token]}}
        assert logged(orders.move, held, to=parsed, update=update) == moved(q="parsed", by=token)
        held, token = take(parsed, "a")
        update = {"$push": {"trail": ["parsed", token]}}
        assert logged(parsed.move, held, to=orders, update=update) == moved(q="orders", by=token)
        held, token = take(orders, "a")
        payload = {**held.payload, "trail": [*held.payload["trail"], ["orders", token]]}
        assert logged(orders.move, held, to=packed, payload=payload) == moved(
            q="packed", n="a", by=token
        )
        held, token = take(packed, "a")
        ((_, _, put),) = logged(packed.commit, held, payload={"trail": [["packed", token]]})
        assert put.pop("token") not in (None, token)
        assert put == {"processed": True, "by": token}

        (line,) = logged(states.push, {"n": "1", "trail": []}, key="k", id="s")
        assert line[:-1] == ["in", "s", "states", "1"]
        again = {"key": "k", "on_duplicate": "replace"}
        assert logged(states.push, {"n": "2", "trail": []}, **again) == [["set", "s", {"n": "2"}]]
        take(states, "s")
        assert logged(states.push, {"n": "3", "trail": []}, **again) == [
            ["set", "s", {"n": "3", "token": None}]
        ]
        held, _ = take(states, "s")
        assert logged(states.bury, held) == [
            ["set", "s", {"q": "states.dead", "token": None, "dead": True}]
        ]
        ((out, id, at),) = logged(client.queue("states.dead").pop, 0)
        assert (out, id) == ("out", "s")
        assert abs(at - time.monotonic()) < 60


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
