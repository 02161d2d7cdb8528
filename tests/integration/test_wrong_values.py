"""Wrong values for public methods: a clear error that names the argument, before any write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from bson import ObjectId
from pydantic import BaseModel

from pyqueue import Client, ConfigurationError, QueueError
from pyqueue.memory import memory_database


class Order(BaseModel):
    n: int


class Whole:
    """A number of another library: it has __index__, and is no int."""

    def __index__(self) -> int:
        return 3


@pytest.fixture(params=["memory", "mongod"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    server = request.param == "mongod"
    target: Any = request.getfixturevalue("url") if server else memory_database("pyqueue")
    with Client(target, signals="none:") as made:
        yield made


NAIVE = datetime(2026, 1, 1)
#: Calls with a queue and a reservation, by the beginning of their errors.
WRONG: dict[str, Callable[[Any, Any], object]] = {
    "payloads: expected a list of payloads, found str": lambda q, h: q.push_many("abc"),
    "payloads: expected a list of payloads, found bytes": lambda q, h: q.push_many(b"abc"),
    "payloads: expected a list of payloads, found bytearray": lambda q, h: q.push_many(
        bytearray(2)
    ),
    "payloads: expected a list of payloads, found dict": lambda q, h: q.push_many({"a": 1}),
    "payloads: expected a list of payloads, found int": lambda q, h: q.push_many(5),
    "keys: expected a list": lambda q, h: q.push_many([1, 2], keys={"a", "b"}),
    "keys: found 1 values for 2 payloads": lambda q, h: q.push_many([1, 2], keys=["a"]),
    "ids: expected a list": lambda q, h: q.push_many([1], ids={"a": 1}),
    "id: 5 is not allowed": lambda q, h: q.push(1, id=5),
    "key: 5 is not allowed": lambda q, h: q.push(1, key=5),
    "delay: expected seconds": lambda q, h: q.push(1, delay=True),
    "delay: nan is not": lambda q, h: q.push(1, delay=math.nan),
    "delay: -1 is not": lambda q, h: q.push(1, delay=-1),
    "at: datetime.datetime(2026, 1, 1, 0, 0) has": lambda q, h: q.push(1, at=NAIVE),
    "at: expected a timezone-aware datetime, found float": lambda q, h: q.push(1, at=1.5),
    "headers: expected a mapping": lambda q, h: q.push(1, headers=["a"]),
    "on_duplicate: 'skip' is not": lambda q, h: q.push(1, on_duplicate="skip"),
    "on_duplicate: ['ignore'] is not": lambda q, h: q.push(1, on_duplicate=["ignore"]),
    "limit: True is not": lambda q, h: q.reserve_many(True, timeout=0),
    "limit: 2.0 is not": lambda q, h: q.pop_many(2.0, timeout=0),
    "limit: <": lambda q, h: q.pop_many(Whole(), timeout=0),
    "limit: 0 is not": lambda q, h: q.peek(0),
    "timeout: expected seconds (int or float) or a timedelta, found str": lambda q, h: q.pop("0"),
    "timeout: inf is not": lambda q, h: q.pop(math.inf),
    "lease: 0 is not": lambda q, h: q.reserve(0, lease=0),
    "reservations: expected reservations from reserve(), found ObjectId": lambda q, h: q.commit(
        h.id
    ),
    "reservations: expected reservations from reserve(), found list": lambda q, h: q.commit([h]),
    "reservations: expected reservations from reserve(), found NoneType": lambda q, h: q.rollback(
        None
    ),
    "error: pass an exception or a str, not int": lambda q, h: q.rollback(h, error=5),
    "error: pass an exception or a str, not type": lambda q, h: q.bury(h, error=ValueError),
    "to: expected a Queue": lambda q, h: q.move(h, to=None),
    "pairs: expected pairs": lambda q, h: q.move_many([h], to="b"),
    "reservations: expected reservations from reserve(), found str": lambda q, h: q.move_many(
        ["ab"], to="b"
    ),
    "update: expected operators, each with ": lambda q, h: q.move(h, to="b", update={"a": 1}),
    "fraction: ": lambda q, h: q.progress(h, math.nan),
    "note: ": lambda q, h: q.progress(h, 0.5, 5),
    "id: None is not": lambda q, h: q.get(None),
    "id: b'x' is not": lambda q, h: q.remove(b"x"),
    "id: 7 is not": lambda q, h: q.requeue(7),
    "id: ['x'] is not": lambda q, h: q.replay(["x"]),
    "since: ": lambda q, h: q.history(since=NAIVE),
    "state: 5 is not": lambda q, h: q.browse(5),
    "where: expected a mapping": lambda q, h: q.browse(where="n=1"),
    "after: this is not": lambda q, h: q.browse(after=h.id),
    "budget: 1.5 is not": lambda q, h: q.browse(budget=1.5),
    "limit: 1.5 is not": lambda q, h: q.redrive(1.5),
    "group: ": lambda q, h: q.claim("a b", limit=1).__enter__(),
    "limit: '1' is not": lambda q, h: q.claim("g", limit="1").__enter__(),
}


def stored(client: Client) -> list[Any]:
    return list(client.database["pyqueue"].find({"record": {"$exists": False}}))


def test_wrong_value_is_refused_before_a_write(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push({"n": 1})
    held = queue.reserve(0)
    before = stored(client)
    for said, call in WRONG.items():
        with pytest.raises(QueueError) as caught:
            call(queue, held)
        assert str(caught.value).startswith(said)
        assert stored(client) == before, said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": {"type": "int"}}, "model: expected a type, such as"),
        ({"model": {"n": int}}, "model: expected a type, such as"),
        ({"model": Order(n=1)}, "model: expected the type Order, found an instance of it"),
        ({"model": "no such name"}, "model: pydantic cannot validate"),
        ({"model": 5}, "model: pydantic cannot validate"),
        ({"dead_letter": "jobs"}, "dead_letter: queue 'jobs' cannot be its own"),
        ({"dead_letter": 5}, "dead_letter: expected the name of a queue as a str"),
        ({"max_tries": 0}, "max_tries: 0 is not"),
        ({"max_tries": True}, "max_tries: True is not"),
        ({"lease": "60"}, "lease: expected seconds"),
        ({"lease": math.nan}, "lease: nan is not"),
        ({"history": timedelta(0)}, "history: "),
        ({"backoff": 5}, "backoff: expected a Backoff"),
        ({"kind": ["standard"]}, "kind: invalid kind"),
    ],
)
def test_wrong_option_is_refused(options: dict[str, Any], said: str) -> None:
    with Client("memory:") as client, pytest.raises(QueueError) as caught:
        client.queue("jobs", **options)
    assert str(caught.value).startswith(said)


def test_generator_of_payloads_is_a_list(client: Client) -> None:
    assert len(client.queue("jobs").push_many(n for n in range(3))) == 3


# ---- ids


def test_lookups_take_an_object_id_as_text(client: Client) -> None:
    queue = client.queue("jobs", history=60)
    id = queue.push("payload")
    text = str(id)
    found = queue.get(text)
    assert found is not None
    assert found.id == id
    assert queue.remove(text)
    finished = queue.get(text)
    assert finished is not None
    assert finished.state == "finished"
    assert queue.replay(text, ObjectId(text)) == 1
    assert queue.counts().ready == 1


def test_lookups_prefer_the_text(client: Client) -> None:
    """The first release stored 24 hexadecimal digits as text if they were given as text."""
    queue = client.queue("jobs", history=60)
    text = "0123456789abcdef01234567"
    queue.push_many(["text", "object id"], ids=[text, ObjectId(text)])
    found = queue.get(text)
    assert found is not None
    assert found.payload == "text"
    assert queue.remove(text)
    assert [each.payload for each in queue.peek()] == ["object id"]
    assert not queue.remove(text)  # the text is finished; the other message is not meant
    assert queue.replay(text) == 1
    assert sorted(each.payload for each in queue.peek()) == ["object id", "text"]


def test_held_text_hides_the_object_id(client: Client) -> None:
    queue = client.queue("jobs")
    text = "0123456789abcdef01234567"
    queue.push("text", id=text)
    assert queue.reserve(0) is not None
    queue.push("object id", id=ObjectId(text))
    assert not queue.remove(text)
    assert queue.counts().total == 2


def test_other_ids_are_taken_as_they_are(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push(1, id="abcdefabcdef")  # bytes of an ObjectId, in some libraries
    assert queue.get("abcdefabcdef") is not None
    assert queue.get("ABCDEFABCDEF") is None
    with pytest.raises(ConfigurationError, match=r"^id: "):
        queue.get("~queue:jobs")
