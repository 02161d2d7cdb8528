"""This release settles messages the first release left behind in every kind of queue.

``stored/kinds.json`` has the documents and the pickled reservations that the first release wrote
by ``write``, and never changes::

    python -m tests.hostile.test_upgrade_kinds tests/hostile/stored/kinds.json
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bson import json_util

from pyqueue import Client, ConfigurationError, LeaseLost, Limit, Queue
from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.options import NewMessage
from pyqueue.embedded import EmbeddedServer
from pyqueue.queue_base import backend_of
from pyqueue.requests import Plan, Request, Update
from pyqueue.runtime.connecting import runner_of
from tests.hostile.test_upgrade import AGE, EXACT, FAR, STORED

ON_FAILURE: tuple[Any, ...] = ("block", "skip")
LIMIT = Limit(concurrency=5)
EPOCH = 3


def epoch_writes(client: Client, name: str) -> EpochWrites:
    """Return the writes of a caller that numbers the epochs."""
    return EpochWrites(backend_of(client.queue(name)).target, "", "")


def rows(name: str) -> list[NewMessage]:
    """Return the rows of the epoch."""
    return [NewMessage(f"{name}~1", 1), NewMessage(f"{name}~2", 2, None, "k")]


# ---- writing


def write(client: Client) -> list[Any]:
    """Bring messages into every state of each kind. Return the reservations that are left."""
    for mode in ON_FAILURE:
        turns = client.queue(f"turns-{mode}", kind="ordered", on_failure=mode)
        turns.push_many(["a", "b"], groups=["g", "g"])
        turns.push("soon", group="g", delay=0.5)
        turns.push("later", group="g", at=FAR)
    client.queue("limited", limit=LIMIT).push("limited")
    for name in ("rows", "decided"):
        run = runner_of(client).run
        writes = epoch_writes(client, name)
        attempt = run(writes.join("job", EPOCH))
        assert attempt == 1
        assert run(writes.write(EPOCH, attempt, 0, "1:0:0", rows(name))) == 2
    _decide(client, epoch_writes(client, "decided").commit("job", EPOCH, 1, {"1:0:0": 2}))
    resting = client.queue("resting", kind="bucket", lease=AGE)
    resting.push_many(list(range(12)))
    held = resting.reserve_many(12, timeout=0)
    resting.commit(*held[:3])
    resting.release(*held[3:])
    parcels = client.queue("parcels", kind="bucket", lease=AGE)
    parcels.push_many(list(range(12)))
    held = parcels.reserve_many(12, timeout=0)
    parcels.commit(held[0])
    parcels.rollback(held[1], delay=0)
    parcels.move(held[2], held[3], to=client.queue("crates", kind="bucket"))
    parcels.move(held[4], to="plain")
    return held[5:]


def _decide(client: Client, plan: Plan[Any]) -> None:
    """Run the commit of an epoch until it is decided, as if the process had died there."""

    def one(request: Request[Any]) -> Plan[Any]:
        return (yield request)

    request = next(plan)
    while not isinstance(request, Update):
        request = plan.send(runner_of(client).run(one(request)))
    runner_of(client).run(one(request))
    plan.close()


def make(path: Path) -> None:
    """Write the file, which is never changed again."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(directory) as server,
        Client(server.url, owner="first release", signals="none:") as client,
    ):
        held = write(client)
        documents = list(client.database["pyqueue"].find().sort("_id", 1))
    with path.open("x", encoding="utf-8") as file:
        for each in documents:
            file.write(json_util.dumps(each, json_options=EXACT, ensure_ascii=False) + "\n")
        file.write(json.dumps([base64.b64encode(pickle.dumps(each)).decode() for each in held]))
        file.write("\n")


# ---- working with it


@pytest.fixture
def left(client: Client) -> list[Any]:
    """Store the documents of the first release, and return its reservations."""
    *documents, held = (STORED / "kinds.json").read_text(encoding="utf-8").splitlines()
    client.queues()  # makes the indexes before any document
    client.database["pyqueue"].insert_many(
        [json_util.loads(each, json_options=EXACT) for each in documents]
    )
    return [pickle.loads(base64.b64decode(each)) for each in json.loads(held)]


def drain(queue: Queue[Any], *, alone: bool = False) -> list[Any]:
    """Receive and commit everything, and return the payloads."""
    found: list[Any] = []
    while held := queue.reserve_many(1 if alone else 100, timeout=0):
        found += [each.payload for each in held]
        queue.commit(*held)
    return found


def places(held: Sequence[Any]) -> list[int]:
    """Return the places in the ids of messages. They are the payloads, too."""
    return sorted(int(str(each.id).rpartition(":")[2].rpartition(".")[2]) for each in held)


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("mode", ON_FAILURE)
def test_stored_groups_keep_their_order(client: Client, mode: Any) -> None:
    """New messages come after the messages of the first release, and before a far schedule."""
    turns = client.queue(f"turns-{mode}", kind="ordered", on_failure=mode)
    turns.push_many(["c", "d"], groups=["g", "g"])
    turns.push("much later", group="g", at=FAR)
    first = turns.reserve(0)
    assert first is not None
    assert first.payload == "a"
    assert turns.reserve(0) is None, "its group is held"
    turns.rollback(first, delay=0)
    rest = ["b", "soon", "c", "d"]
    assert drain(turns, alone=True) == (["a", *rest] if mode == "block" else [*rest, "a"])
    assert turns.counts().scheduled == 2


def test_stored_packs_are_settled(client: Client, left: list[Any]) -> None:
    """By pickled reservations. Ids stay, also of messages that left a pack before."""
    parcels, crates = (client.queue(name, kind="bucket") for name in ("parcels", "crates"))
    plain = client.queue("plain")
    parcels.extend(*left, lease=60)
    parcels.commit(left[0])
    parcels.rollback(left[1], delay=0)
    parcels.bury(left[2])
    parcels.move(left[3], to=plain)
    parcels.move(left[4], left[5], to=crates)
    parcels.commit(left[6])
    for queue, expected in (
        (parcels, [1, 6]),
        (client.queue("parcels.dead"), [7]),
        (plain, [4, 8]),
        (crates, [2, 3, 9, 10]),
        (client.queue("resting", kind="bucket"), list(range(3, 12))),
    ):
        held = queue.reserve_many(100, timeout=0)
        assert sorted(each.payload for each in held) == places(held) == expected
        queue.rollback(held[0], delay=0)
        queue.commit(*held[1:])
        assert drain(queue) == [held[0].payload]


def test_client_settles_stored_packs(client: Client, left: list[Any]) -> None:
    """By pickled reservations that carry nothing: the record has the kind of their queue."""
    assert {each.carried for each in left} == {None}
    client.extend(*left, lease=60)
    client.commit(*left[:2])
    client.bury(left[2])
    client.release(*left[3:])
    with pytest.raises(LeaseLost):
        client.commit(left[0])
    assert places(client.queue("parcels.dead").reserve_many(9, timeout=0)) == places([left[2]])
    found = client.queue("parcels", kind="bucket").reserve_many(100, timeout=0)
    assert set(places(left[3:])) <= set(places(found))
    assert not set(places(left[:3])) & set(places(found))


@pytest.mark.usefixtures("left")
def test_stored_limit_holds(client: Client) -> None:
    assert drain(client.queue("limited", limit=LIMIT)) == ["limited"]
    client.queue("limited").push(2)
    with pytest.raises(ConfigurationError, match="limit"):
        client.queue("limited", limit=Limit(concurrency=6)).push(3)
    assert drain(client.queue("limited")) == [2]


@pytest.mark.usefixtures("left")
@pytest.mark.parametrize("name", ["rows", "decided"])
@pytest.mark.parametrize("job", ["job", "next"])
def test_stored_epoch_appears_once(client: Client, name: str, job: str) -> None:
    """The driver died after its tasks, or after the decision. Spark runs the epoch again."""
    run, writes = runner_of(client).run, epoch_writes(client, name)
    for shown in (2, 0):
        attempt = run(writes.join(job, EPOCH))
        if attempt is None:
            assert run(writes.resume(EPOCH)) == shown
        else:
            place = f"{attempt}:0:0"
            run(writes.write(EPOCH, attempt, 0, place, rows(name)))
            assert run(writes.commit(job, EPOCH, attempt, {place: 2})) == shown
        assert sorted(drain(client.queue(name))) == [1, 2][:shown]


if __name__ == "__main__":
    make(Path(sys.argv[1]))
