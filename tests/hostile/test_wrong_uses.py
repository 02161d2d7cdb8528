"""Wrong uses that a newcomer makes: each error names the argument and a valid replacement."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from pyqueue import (
    AsyncClient,
    Client,
    InvalidMessage,
    Many,
    Queue,
    QueueError,
    To,
    Worker,
)


class Colour(Enum):
    """A payload of a type that BSON lacks; its value is a secret."""

    RED = "s3cret"


class Order(BaseModel):
    """A model."""

    n: int


class Later:
    """The result of a call that is not awaited; Python does not warn of this one."""

    def __await__(self) -> Any:
        yield


#: A value that BSON cannot store, the type that the error names, and the remedy.
UNSTORABLE: dict[str, tuple[Any, str, str]] = {
    "decimal": (Decimal("1.5"), "type Decimal", "bson.Decimal128"),
    "date": (date(2030, 1, 1), "type date", "a datetime with a time zone"),
    "time": (time(9), "type time", "isoformat()"),
    "timedelta": (timedelta(1), "type timedelta", "total_seconds()"),
    "set": ({1}, "type set", "a list"),
    "enum": (Colour.RED, "type Colour", "its value"),
    "path": (Path("a"), "type PosixPath", "its str()"),
    "object": (object(), "type object", "a model"),
    "large int": (1 << 64, "type int", "64 bits"),
    "surrogate": ("\ud800", "type str", "surrogates"),
    "coroutine": (Later(), "type Later", "await it first"),
    "iterator": (iter([1]), "type list_iterator", "a list"),
    "key": ({1: 2}, "a key of type int", "str keys"),
    "key with NUL": ({"a\0": 2}, "a key of type str", "without NUL"),
}
Push = Callable[[Client, Any], object]
#: How a payload enters, and the beginning of the error: of several, the text names the index.
ENTRIES: dict[str, tuple[Push, str]] = {
    "push": (lambda client, value: client.queue("a").push(value), "payload"),
    "push_many": (lambda client, value: client.queue("a").push_many([1, value]), "payloads[1]"),
    "bucket": (
        lambda client, value: client.queue("b", kind="bucket").push_many([1, value]),
        "payloads[1]",
    ),
    "append": (lambda client, value: client.stream("s").append_many([1, value]), "payloads[1]"),
}


@pytest.fixture
def client() -> Any:
    with Client("memory:") as client:
        yield client


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("value", UNSTORABLE)
def test_unstorable_payload_names_place_and_remedy(client: Client, entry: str, value: str) -> None:
    push, name = ENTRIES[entry]
    given, fault, remedy = UNSTORABLE[value]
    with pytest.raises(InvalidMessage) as caught:
        push(client, {"order": {"lines": [0, given]}})
    text = str(caught.value)
    assert text.startswith(f"{name}.order.lines.1: not storable as BSON ({fault}); "), text
    assert remedy in text
    assert "s3cret" not in text
    assert client.queues() == []


def test_misfit_of_several_payloads_names_its_index(client: Client) -> None:
    queue: Queue[Any] = client.queue("a", Order)
    with pytest.raises(InvalidMessage, match=r"payloads\[1\]: not a valid Order: n: "):
        queue.push_many([{"n": 1}, {"n": "x"}])
    with pytest.raises(InvalidMessage, match=r"^payload: not a valid Order"):
        queue.push_many([{"n": "x"}])


def test_deep_payload_is_refused(client: Client) -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(InvalidMessage, match="payload: not storable as BSON"):
        client.queue("a").push(deep)


def held(queue: Queue[Any]) -> Any:
    queue.push(1)
    return queue.reserve(0)


def popped(client: Client) -> Any:
    client.queue("a").push(1)
    return client.queue("a").pop(0)


async def run_worker(client: Client) -> None:
    Worker(client).on("a", print).run(until_empty=True)


#: Without types, as a newcomer has them: the type checker refuses most of these uses.
worker: Any = Worker
many: Any = Many

#: A wrong use, and words that its error has: the argument and the remedy.
WRONG: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "no target": (lambda client: Client(None), ("target: None", "mongodb://host/db")),
    "a mongo client": (
        lambda client: Client(client.database.client),
        ("target", "one of its databases"),
    ),
    "a collection": (lambda client: Client(client.database["a"]), ("target", "namespace=")),
    "empty target": (lambda client: Client(""), ("target: ''", "mongodb://host/db")),
    "pickled client": (pickle.dumps, ("cannot be pickled", "Client.url")),
    "pickled queue": (lambda client: pickle.dumps(client.queue("a")), ("cannot be pickled",)),
    "session": (
        lambda client: client.queue("a").push(1, session="x"),
        ("session: expected the session of transaction()", "found str"),
    ),
    "session that has ended": (
        lambda client: client.queue("a").push(
            1, session=SimpleNamespace(in_transaction=False, has_ended=True)
        ),
        ("session: the session has ended; use it within transaction()",),
    ),
    "session of a settle": (
        lambda client: client.queue("a").commit(held(client.queue("a")), session=object()),
        ("session: expected the session of transaction()", "found object"),
    ),
    "another kind": (
        lambda client: [client.queue("a", kind=kind).push(1) for kind in ("priority", "bucket")],
        ("kind: queue 'a' is of kind 'priority'", "not 'bucket'; set kind='priority'"),
    ),
    "a list of reservations": (
        lambda client: client.queue("a").commit([held(client.queue("a"))]),
        ("reservations", "commit(*batch)"),
    ),
    "no reservation": (
        lambda client: client.queue("a").commit(None),
        ("reservations", "no message came in time"),
    ),
    "a worker on a URL": (lambda client: worker("memory:"), ("client: expected a Client",)),
    "bytes as target": (
        lambda client: Client(b"mongodb://h"),
        ("target: type bytes is not", "mongodb://"),
    ),
    "unquoted password": (
        lambda client: Client("mongodb://u:p@ss/word@127.0.0.1:1/shop"),
        ("target", "quote the user name and the password with urllib.parse.quote_plus"),
    ),
    "name of a database": (
        lambda client: Client("mongodb://127.0.0.1:1/a b").queue("a").push(1),
        ("target: 'a b' is not a valid database name; remove ' '",),
    ),
    "kind of a stream": (
        lambda client: client.queue("a", kind="stream"),
        ("kind: invalid kind 'stream'", "client.stream()"),
    ),
    "a coroutine of a reserve": (
        lambda client: client.queue("a").commit(Later()),
        ("reservations", "await reserve()"),
    ),
    "a popped message": (
        lambda client: client.queue("a").commit(popped(client)),
        ("reservations", "found Message; pop() has already removed the message"),
    ),
    "a message as id": (
        lambda client: client.queue("a").remove(popped(client)),
        ("id: expected the id of a message, found Message",),
    ),
    "a str as keys": (
        lambda client: client.queue("a").push_many([1], keys="k"),
        ("keys: expected a list with one value (or None) per payload, found str",),
    ),
    "a queue of another store": (
        lambda client: client.queue("a").move(
            held(client.queue("a")), to=Client("memory:").queue("b")
        ),
        ("to: queue 'b' is in another database or namespace",),
    ),
    "async function in a transaction": (
        lambda client: client.run_transaction(run_worker),
        ("fn: expected a synchronous function", "AsyncClient"),
    ),
    "called function in a transaction": (
        lambda client: client.run_transaction(5),
        ("fn: expected a synchronous function", "found int"),
    ),
    "decorator without a queue": (
        lambda client: worker(client).on(print),
        (
            "queue: expected the name of a queue",
            "found builtin_function_or_method",
            '@worker.on("NAME")',
        ),
    ),
    "a stream to consume": (
        lambda client: worker(client).on(client.stream("s"), print),
        ("queue: expected the name of a queue", "found Stream", "Stream.consumer()"),
    ),
    "a worker without handlers": (
        lambda client: Worker(client).run(until_empty=True),
        ("pipeline: has no stages", "Worker.on()"),
    ),
    "a worker in an event loop": (
        lambda client: asyncio.run(run_worker(client)),
        ("run: an event loop is already running", "AsyncClient", "asyncio.to_thread"),
    ),
    "Many of one": (lambda client: many(To("a")), ("outputs: expected a list of To(...), ",)),
    "start of a group": (
        lambda client: client.stream("s").consumer("g", start="begin"),
        ("start: 'begin' is not allowed", '"first", "last"'),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_use_names_argument_and_remedy(client: Client, wrong: str) -> None:
    use, words = WRONG[wrong]
    with pytest.raises(QueueError) as caught:
        use(client)
    text = str(caught.value)
    assert [word for word in words if word not in text] == [], text
    assert "\n" not in text


def test_message_moves_between_clients_of_one_database(client: Client) -> None:
    with Client(client.database) as other:
        client.queue("a").move(held(client.queue("a")), to=other.queue("b"))
        assert other.queue("b").counts().ready == 1


def test_database_of_the_other_client_is_refused(url: str, client: Client) -> None:
    with (
        Client(url) as blocking,
        pytest.raises(QueueError, match="use AsyncClient for an async object"),
    ):
        AsyncClient(blocking.database)
