"""The door of a queue: open only while nothing has to be found out, and then it changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any
from unittest.mock import ANY

import pytest

from pyqueue import Client, ConfigurationError, Limit, Queue
from pyqueue.runtime.base_driver import BaseDriver
from pyqueue.runtime.doors import Call, Door

CALLS: tuple[Call, ...] = ("push", "receive", "settle")


@pytest.fixture
def client() -> Iterator[Client]:
    with Client("memory:") as client:
        yield client


def opened(queue: Queue[Any]) -> list[str]:
    """Return the calls that find the door open."""
    known = queue._runner.known
    return [call for call in CALLS if queue._door.plans(known, call) is not None]


def used(queue: Queue[Any]) -> Queue[Any]:
    """Return a queue after one use of each call."""
    queue.push(1)
    held = queue.reserve(0)
    assert held is not None
    queue.commit(held)
    return queue


def test_door_opens_once_the_record_is_known(client: Client) -> None:
    queue = client.queue("a")
    assert opened(queue) == []
    queue.push(1)
    assert opened(queue) == ["push", "settle"]  # a receive names the kind in the record
    held = queue.reserve(0)
    assert held is not None
    assert opened(queue) == list(CALLS)
    assert opened(client.queue("a")) == list(CALLS)


@pytest.mark.parametrize(
    "options",
    [{"kind": "bucket"}, {"limit": Limit(rate=1000)}, {"auto_delete": 60}],
    ids=lambda each: next(iter(each)),
)
def test_door_stays_shut_for_shared_options_and_packs(
    client: Client, options: dict[str, Any]
) -> None:
    assert opened(used(client.queue("a", **options))) == []
    assert opened(client.queue("a")) == []


def test_door_shuts_when_the_queue_is_deleted(client: Client) -> None:
    queue = used(client.queue("a"))
    client.delete_queue("a")
    assert opened(queue) == []
    assert opened(used(queue)) == list(CALLS)


def test_door_shuts_in_time(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is read again after some time: another program may have deleted the queue."""
    queue, later = used(client.queue("a")), time.monotonic() + 31
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert opened(queue) == []
    assert opened(used(queue)) == list(CALLS)


def test_open_door_does_not_hide_another_kind(client: Client) -> None:
    used(client.queue("a"))
    with pytest.raises(ConfigurationError, match="kind"):
        client.queue("a", kind="ordered").push(1)


def shape(value: object) -> object:
    """Return a value with the types of its leaves in place of the leaves."""
    if isinstance(value, Mapping):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shape(each) for each in value]
    return type(value).__name__


def commands(monkeypatch: pytest.MonkeyPatch, *, shut: bool) -> list[object]:
    """Use a queue in the usual ways. Return the shape of each command."""
    sent: list[object] = []
    send = BaseDriver._send

    def recorded(driver: BaseDriver[Any], request: Any) -> Any:
        content = {each.name: getattr(request, each.name) for each in fields(request)}
        if content.get("update") != {"$set": {"when": ANY}}:  # it marks the end of scans, in time
            sent.append((type(request).__name__, shape(content)))
        return send(driver, request)

    with monkeypatch.context() as patched, Client("memory:") as client:
        patched.setattr(BaseDriver, "_send", recorded)
        if shut:
            patched.setattr(Door, "plans", lambda *_: None)
        queue = client.queue("a")
        for round in range(3):
            used(queue)
            queue.push(round)
            queue.push(round, key="k")
            for each in queue.reserve_many(2, timeout=0):
                queue.rollback(each)
            for _ in queue.each(timeout=0):
                pass
        assert opened(queue) == ([] if shut else list(CALLS))
    return sent


def test_commands_are_equal_with_an_open_door(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = commands(monkeypatch, shut=False)
    assert len(sent) > 30
    assert sent == commands(monkeypatch, shut=True)
