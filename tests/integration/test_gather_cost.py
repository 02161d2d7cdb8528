"""The cost of ending a message of a large gather: as low near its end as near its beginning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from pyqueue import Client, Push, Queue, To
from pyqueue.runtime import looking
from pyqueue.runtime.connecting import runner_of
from tests.support.eventually import LONG, eventually

#: How many messages a call pushes or finishes, and how many a measured batch has.
PAGE, BATCH = 1000, 10
#: How often each cost is measured. The least counts: a client reads its records from time to time.
ROUNDS = 3


class Cost(NamedTuple):
    """The cost of a call and of the look that it causes.

    Attributes:
        commands: How many commands the client sends.
        keys: How many index keys the server examines.
        documents: How many documents the server examines.
    """

    commands: int
    keys: int
    documents: int


def cost_of(client: Client, act: Callable[[], object]) -> Cost:
    """Return the cost of a call, as the profiler of the server counts it."""
    database, looks = client.database, runner_of(client).open().looks
    eventually(lambda: not looks.pending, "all earlier looks")
    database.command("profile", 2)
    before = client.stats["commands"]
    act()
    eventually(lambda: not looks.pending, "the look")
    commands = client.stats["commands"] - before
    database.command("profile", 0)
    profile = database["system.profile"]
    found = list(profile.find({"ns": f"{database.name}.pyqueue"}))
    profile.drop()
    assert found, "the profiler was off"
    keys = sum(each.get("keysExamined", 0) for each in found)
    return Cost(commands, keys, sum(each.get("docsExamined", 0) for each in found))


def costs(client: Client, queue: Queue[Any], ids: list[Any]) -> dict[str, Cost]:
    """Return the costs of ending the oldest message, the youngest message, and a batch.

    Args:
        client: The client.
        queue: Its queue.
        ids: The ids of its messages, oldest first. This removes the ids of ended messages.
    """
    found: dict[str, list[Cost]] = {"oldest": [], "youngest": [], "batch": []}
    for _ in range(ROUNDS):
        held = {"oldest": queue.reserve_many(1, timeout=5)}
        # The last look found it, so the next look reads the index.
        youngest = queue.reserve_id(ids[-1])
        assert youngest is not None
        held |= {"youngest": [youngest], "batch": queue.reserve_many(BATCH, timeout=5)}
        for name, some in held.items():
            assert len(some) == (BATCH if name == "batch" else 1)
            found[name].append(cost_of(client, lambda some=some: queue.commit(*some)))  # type: ignore[misc]
        del ids[-1], ids[: BATCH + 1]
    return {name: min(each) for name, each in found.items()}


def finish(queue: Queue[Any], number: int, ids: list[Any]) -> None:
    """Finish the oldest messages, and remove their ids."""
    del ids[:number]
    while number > 0:
        held = queue.reserve_many(min(number, PAGE), timeout=5)
        assert held, "a message is missing"
        queue.commit(*held)
        number -= len(held)


@pytest.mark.parametrize("history", [None, 3600])
@pytest.mark.parametrize(
    ("number", "early", "late"),
    [(300, 50, 200), pytest.param(100_000, 100, 99_000, marks=pytest.mark.slow)],
)
def test_cost_of_an_end_does_not_grow(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    early: int,
    late: int,
    history: float | None,
) -> None:
    """Neither with the messages that have ended, nor with those that are left."""
    monkeypatch.setattr(looking, "_SOON_S", 0.0)
    queue = client.queue("part", history=history, lease=600)
    ids: list[Any] = []
    with client.gather(To("report", "done")) as g:
        for first in range(0, number, PAGE):
            payloads = range(first, min(first + PAGE, number))
            ids += queue.push_many([Push(each, gather=g) for each in payloads])
    finish(queue, early, ids)
    begin = costs(client, queue, ids)
    finish(queue, late - (number - len(ids)), ids)
    assert costs(client, queue, ids) == begin
    # The commit, and one read of a message that the client knows, or also one of the index.
    commands = {name: each.commands for name, each in begin.items()}
    assert commands == {"oldest": 2, "youngest": 3, "batch": 2}
    assert begin["oldest"].documents <= 3
    assert client.queue("report").counts().total == 0
    finish(queue, len(ids), ids)
    report = client.queue("report").reserve(LONG)
    assert report is not None
    assert report.payload == "done"
