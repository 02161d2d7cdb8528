"""This release works with earlier releases' documents, and leaves later documents alone.

``stored/v1.json`` was written by the first release, and never changes. A release that stores
something in another way adds a file beside it, made by the operations themselves::

    python -m tests.hostile.test_upgrade tests/hostile/stored/v2.json

If earlier releases would misread the new form, raise ``VERSION`` in ``pyqueue.backends.namespace``,
so that they refuse its queues. The file has the name of that version. First add the new form to
``write``, and to the tests its expected results.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from bson import json_util
from bson.binary import UuidRepresentation
from pydantic import BaseModel

from pyqueue import Client, ConfigurationError, Finished, Reservation
from pyqueue.backends import namespace
from pyqueue.documents import message_of
from pyqueue.embedded import EmbeddedServer
from pyqueue.payloads import OPTIONS
from pyqueue.runtime.connecting import runner_of
from tests.contract.world import AnyQueue
from tests.hostile.conftest import Place
from tests.hostile.test_documents import EARLY, message, record

STORED = Path(__file__).parent / "stored"
FILES = sorted(STORED.glob("v*.json"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)

EXACT = json_util.JSONOptions(
    json_mode=json_util.JSONMode.CANONICAL,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
)
#: Seconds that outlast these tests: for a lease that must still be held, and for the history.
AGE = 99 * 365 * 86400.0
FAR = datetime(7000, 1, 1, tzinfo=UTC)


class Order(BaseModel):
    """The model of the typed queue."""

    n: int
    note: str = ""


# ---- writing


def write(client: Client) -> None:
    """Bring messages into every state by real operations; their ids name the state."""
    plain = client.queue("plain", history=AGE, max_tries=3)
    plain.push({"n": 1}, id="ready")
    plain.push(
        {"n": 2}, id="ready-keyed", key="k1", headers={"s": "text", "i": 1, "f": 1.5, "b": True}
    )
    plain.push({"n": 3}, id="scheduled", at=FAR, key="k2")
    plain.push(None, id="ready-null")
    client.queue("typed", Order).push(Order(n=4, note="typed"), id="typed")
    # Each in a separate queue, so that it is clear which message is received.
    states = ("reserved", "lapsed", "failed", "released", "finished", "popped", "moved", "dead")
    for name in (*states, "worn", "replayed"):
        queue = client.queue(f"q-{name}", history=AGE, max_tries=2)
        queue.push({"n": 5}, id=name, key=f"key of {name}", headers={"h": name})
    held = one(client, "reserved", lease=AGE)
    client.queue("q-reserved").progress(held, 0.25, "a quarter")
    client.queue("q-reserved").checkpoint(held, {"page": 7})
    one(client, "lapsed", lease=0.001)
    failed = one(client, "failed")
    client.queue("q-failed").rollback(failed, delay=0, error=ValueError("why it failed"))
    client.queue("q-released").release(one(client, "released"))
    client.queue("q-finished", history=AGE).commit(one(client, "finished"), payload={"n": 6})
    assert client.queue("q-popped", history=AGE).pop(0) is not None
    moved, more = one(client, "moved"), {"more": 1}
    client.queue("q-moved").move(
        moved, to="q-target", update={"$inc": {"n": 1}}, headers=more, key="kt"
    )
    client.queue("q-dead").bury(one(client, "dead"), error="why it is dead")
    for _ in range(2):
        worn = one(client, "worn")
        client.queue("q-worn", max_tries=2).rollback(worn, delay=0, error=KeyError("worn"))
    replayed = client.queue("q-replayed", history=AGE)
    replayed.commit(one(client, "replayed"))
    assert replayed.replay("replayed") == 1
    misfits = client.queue("q-misfit")
    misfits.push({"n": "many"}, id="misfit")
    assert client.queue("q-misfit", Order).reserve(0) is None
    removed = client.queue("q-removed", history=AGE)
    removed.push(8, id="removed")
    assert removed.remove("removed")
    client.queue("q-paused").pause()  # a record without any message


def one(client: Client, name: str, **options: Any) -> Reservation[Any]:
    """Reserve the message of that queue."""
    held = client.queue(f"q-{name}", max_tries=2).reserve(0, **options)
    assert held is not None
    assert held.id == name
    return held


def make(path: Path) -> None:
    """Write the file, which is never changed again."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(directory) as server,
        Client(server.url, owner="the writer", signals="none:") as client,
    ):
        write(client)
        documents = list(client.database["pyqueue"].find().sort("_id", 1))
    lines = [json_util.dumps(each, json_options=EXACT, ensure_ascii=False) for each in documents]
    with path.open("x", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


# ---- working with it


def load(path: Path) -> list[dict[str, Any]]:
    return [
        json_util.loads(line, json_options=EXACT)
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture
def cleared(place: Place) -> Iterator[Place]:
    """A place that is empty again after the test."""
    yield place
    place.raw.delete_many({})
    runner_of(place.client).open().known.forget_records()  # as after a while


@pytest.fixture
def old(cleared: Place, path: Path) -> Place:
    """A place with the documents of an earlier release."""
    cleared.raw.insert_many(load(path))
    return cleared


def test_stored_file_exists_for_this_version() -> None:
    assert (STORED / f"v{namespace.VERSION}.json") in FILES


@each_file
def test_stored_file_has_every_field_of_today(path: Path, client: Client) -> None:
    """Field by field and type by type: a release with another stored form needs another file."""
    write(client)
    today = {
        each["_id"]: each
        for each in client.database["pyqueue"].with_options(codec_options=OPTIONS).find()
    }
    for document in load(path):
        now = today[document["_id"]]
        assert {name: type(value) for name, value in document.items()}.items() <= {
            name: type(value) for name, value in now.items()
        }.items()


@each_file
def test_stored_messages_are_read(old: Place, path: Path) -> None:
    client = old.client
    infos = {each.name: each for each in client.queues()}
    assert infos["q-paused"].paused
    assert (infos["plain"].counts.ready, infos["plain"].counts.scheduled) == (3, 1)
    assert infos["q-reserved"].counts.reserved == 1
    assert infos["q-finished"].counts.history == infos["q-popped"].counts.history == 1
    plain = client.queue("plain", history=AGE, max_tries=3)
    keyed = plain.get("ready-keyed")
    assert keyed is not None
    assert (keyed.key, keyed.payload, keyed.state) == ("k1", {"n": 2}, "ready")
    assert keyed.headers == {"s": "text", "i": 1, "f": 1.5, "b": True}
    scheduled = plain.get("scheduled")
    assert scheduled is not None
    assert (scheduled.when, scheduled.state) == (FAR, "scheduled")
    assert [each.id for each in plain.peek()] == ["ready", "ready-keyed", "ready-null"]
    reserved = client.queue("q-reserved").get("reserved")
    assert reserved is not None
    assert reserved.progress is not None
    assert (reserved.state, reserved.progress["fraction"]) == ("reserved", 0.25)
    assert reserved.checkpoint == {"page": 7}
    failed = client.queue("q-failed").get("failed")
    assert failed is not None
    assert failed.error is not None
    assert (failed.error["type"], failed.error["message"]) == ("ValueError", "why it failed")
    assert (failed.error.type, failed.error.fp, failed.error.trace) == ("ValueError", None, None)
    assert (failed.deliveries, failed.attempts) == (1, ())
    assert failed.tries == 1
    moved = client.queue("q-target").get("moved")
    assert moved is not None
    assert (moved.payload, moved.key, moved.headers) == ({"n": 6}, "kt", {"h": "moved", "more": 1})
    assert [each["q"] for each in moved.trail] == ["q-moved"]
    for name, outcome, n in (("finished", "committed", 6), ("popped", "popped", 5)):
        [finished] = client.queue(f"q-{name}").history()
        assert isinstance(finished, Finished)
        assert (finished.outcome, finished.payload) == (outcome, {"n": n})
        assert finished.key == f"key of {name}"
    for name, reason in {"dead": "buried", "worn": "tries", "misfit": "invalid"}.items():
        dead = client.queue(f"q-{name}.dead").get(name)
        assert dead is not None
        assert dead.dead is not None
        assert (dead.dead["from"], dead.dead["reason"]) == (f"q-{name}", reason)
        assert (dead.dead.queue, dead.dead.reason) == (f"q-{name}", reason)
        assert (dead.deliveries, dead.attempts) == (0, ())
        assert dead.error is not None
    typed: AnyQueue = client.queue("typed", Order)
    assert typed.peek()[0].payload == Order(n=4, note="typed")


@each_file
def test_stored_messages_are_received_and_settled(old: Place, path: Path) -> None:
    client = old.client
    plain = client.queue("plain", history=AGE, max_tries=3)
    taken = plain.reserve_many(10, timeout=0)
    assert [each.id for each in taken] == ["ready", "ready-keyed", "ready-null"]
    assert {each.tries for each in taken} == {1}
    plain.extend(*taken)
    plain.commit(taken[0])
    plain.rollback(taken[1], delay=0)
    plain.move(taken[2], to="q-target")
    assert plain.push(9, key="k1") is None  # the old message has it
    assert plain.push(9, key="k2", on_duplicate="replace") == "scheduled"
    for name, tries in {"lapsed": 2, "failed": 2, "released": 1, "replayed": 1}.items():
        queue = client.queue(f"q-{name}", history=AGE)
        held = queue.reserve(0)
        assert held is not None
        assert (held.id, held.tries) == (name, tries)
        assert (held.key, held.headers) == (f"key of {name}", {"h": name})
        queue.commit(held)
    typed: AnyQueue = client.queue("typed", Order)
    popped = typed.pop(0)
    assert popped.payload == Order(n=4, note="typed")
    assert client.queue("q-paused").reserve(0) is None
    client.queue("q-paused").resume()


@each_file
def test_stored_reservation_is_settled(old: Place, path: Path) -> None:
    """For example, it was pickled before the upgrade."""
    document = next(each for each in load(path) if each["_id"] == "reserved")
    held: Any = message_of(document, document["payload"], datetime.now(UTC), lease=AGE)
    queue = old.client.queue("q-reserved", history=AGE)
    assert queue.reserve(0) is None
    queue.extend(held, lease=60)
    queue.progress(held, 0.5)
    queue.commit(held)
    assert [each.id for each in queue.history()] == ["reserved"]


def test_pickled_reservation_is_settled(cleared: Place) -> None:
    """``stored/pickled.json``: a reservation that the first release pickled, and its document."""
    stored = json.loads((STORED / "pickled.json").read_text())
    document = json_util.loads(json.dumps(stored["document"]), json_options=EXACT)
    cleared.raw.insert_one(document)
    held = pickle.loads(base64.b64decode(stored["reservation"]))
    assert (held.id, held.token, held.payload) == ("pickled", document["token"], {"n": 8})
    assert (held.key, held.headers) == ("key of pickled", {"h": "pickled"})
    assert held.owner == "first release"
    # Fields that the first release lacks.
    assert held.reserved == held.until - timedelta(seconds=held.lease)
    assert (held.deliveries, held.attempts, held.group, held.slot) == (0, (), None, None)
    queue = cleared.client.queue(held.queue, history=AGE)
    queue.extend(held, lease=60)
    queue.commit(held)
    assert [(each.id, each.key) for each in queue.history()] == [("pickled", "key of pickled")]


def test_client_settles_a_pickled_reservation(cleared: Place) -> None:
    """It carries no options, so the record of its queue has them."""
    stored = json.loads((STORED / "pickled.json").read_text())
    document = json_util.loads(json.dumps(stored["document"]), json_options=EXACT)
    cleared.raw.insert_one(document)
    held = pickle.loads(base64.b64decode(stored["reservation"]))
    assert held.carried is None
    queue = cleared.client.queue(held.queue, history=AGE)
    queue.push("makes the record")
    cleared.client.extend(held, lease=60)
    cleared.client.commit(held)
    assert [(each.id, each.key) for each in queue.history()] == [("pickled", "key of pickled")]


def test_pickled_dicts_of_the_first_release_become_values() -> None:
    """It pickled errors, progress and burials as dicts."""
    stored = json.loads((STORED / "pickled.json").read_text())
    held = pickle.loads(base64.b64decode(stored["reservation"]))
    names = [each.name for each in fields(held) if each.name not in ("deliveries", "attempts")]
    given = {name: getattr(held, name) for name in names}
    given["error"] = {"type": "KeyError", "message": "'x'", "at": EARLY}
    given["progress"] = {"fraction": 0.5, "note": None, "at": EARLY}
    given["dead"] = {"from": "a", "at": EARLY, "reason": "tries", "tries": 2, "error": None}
    held.__setstate__((None, given))
    assert (held.error.type, held.error["message"], held.error.fp) == ("KeyError", "'x'", None)
    assert (held.progress.fraction, held.dead.queue, held.dead["from"]) == (0.5, "a", "a")
    again = pickle.loads(pickle.dumps(held))
    assert (again.error, again.dead) == (held.error, held.dead)


@each_file
def test_stored_dead_and_finished_messages_return(old: Place, path: Path) -> None:
    client = old.client
    for name in ("dead", "worn"):
        assert client.queue(f"q-{name}.dead").redrive() == 1
        held = client.queue(f"q-{name}").reserve(0)
        assert held is not None
        assert (held.id, held.tries, held.key, held.dead) == (name, 1, f"key of {name}", None)
        assert [each["q"] for each in held.trail] == [f"q-{name}", f"q-{name}.dead"]
    for name in ("finished", "popped", "removed"):
        queue = client.queue(f"q-{name}", history=AGE)
        assert queue.replay(name) == 1
        held = queue.reserve(0)
        assert held is not None
        assert (held.id, held.tries) == (name, 1)
        queue.commit(held)


# ---- documents of a later release


#: How a later release may have changed a record.
LATER: dict[str, dict[str, Any]] = {
    "a newer version": {"v": namespace.LATEST_VERSION + 1},
    "a version in words": {"v": "2"},
    "no version": {"v": None},
    "another kind": {"kind": "later"},
    "a kind that is no name": {"kind": {"name": "standard"}},
}

Operation = Callable[[Client, AnyQueue, Reservation[Any]], Any]
ENTERING: dict[str, Operation] = {
    "push": lambda client, queue, held: queue.push(1),
    "push with a key": lambda client, queue, held: queue.push(1, key="k", on_duplicate="replace"),
    "push_many": lambda client, queue, held: queue.push_many([1, 2]),
    "pop": lambda client, queue, held: queue.pop(0),
    "pop_many": lambda client, queue, held: queue.pop_many(5, timeout=0),
    "reserve": lambda client, queue, held: queue.reserve(0),
    "reserve_many": lambda client, queue, held: queue.reserve_many(5, timeout=0),
    "move to it": lambda client, queue, held: client.queue("source").move(held, to="later"),
    "move to the queue": lambda client, queue, held: client.queue("source").move(held, to=queue),
    "bury in it": lambda client, queue, held: client.queue("source", dead_letter="later").bury(
        held
    ),
    "redrive to it": lambda client, queue, held: client.queue("from.dead").redrive(),
}


def leaves_alone(place: Place, change: dict[str, Any], operations: dict[str, Operation]) -> None:
    client, far = place.client, datetime(9026, 1, 1, tzinfo=UTC)
    dead = {"from": "later", "at": EARLY, "reason": "buried", "tries": 1, "error": None}
    try:
        client.queue("source").push(1)
        held = client.queue("source").reserve(0)
        assert held is not None
        client.queue("from.dead").notify()
        place.raw.insert_many(
            [
                record("later", **change),
                message("later", _id="there", key="k"),
                message("later", _id="dead", dead=dead | {"from": "elsewhere"}),
                message("later", _id="done", when=far, processed=EARLY),
                message("from.dead", _id="buried", dead=dead),
            ]
        )
        before = place.bytes()
        for name, operation in operations.items():
            runner_of(client).open().known.forget_records()  # another place knew it
            with pytest.raises(ConfigurationError, match=r"queue 'later' is of kind"):
                operation(client, client.queue("later", history=60), held)
            assert place.bytes() == before, name
    finally:
        place.raw.delete_many({})
        runner_of(client).open().known.forget_records()


@pytest.mark.parametrize("change", [change for change in LATER.values() if "v" in change], ids=repr)
def test_record_of_a_later_version_is_left_alone(place: Place, change: dict[str, Any]) -> None:
    leaves_alone(place, change, ENTERING)


# ---- the first release and the kinds of this one


@pytest.mark.parametrize("kind", ["stream", "priority"])
def test_first_release_leaves_a_new_kind_alone(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows records up to version 1, and refuses later records. Its own queues continue."""
    client = place.client
    log, urgent = client.stream("later"), client.queue("later", kind="priority")
    group = log.consumer("audit")
    try:
        client.queue("source").push(1)
        held = client.queue("source").reserve(0)
        assert held is not None
        if kind == "stream":
            log.append_many(range(3))
            reserved: Any = group.reserve_many(2, timeout=0)
        else:
            urgent.push_many([0, 1, 2], priorities=[1, 9, 9])
            reserved = urgent.reserve_many(1, timeout=0)
        with monkeypatch.context() as first:
            first.setattr(namespace, "LATEST_VERSION", 1)
            before = place.bytes()
            for name, operation in ENTERING.items():
                if name == "redrive to it":
                    continue
                runner_of(client).open().known.forget_records()
                with pytest.raises(ConfigurationError, match=rf"queue 'later' is of kind '{kind}'"):
                    operation(client, client.queue("later", history=60), held)
                assert place.bytes() == before, name
            client.queue("source").commit(held)
            client.queue("source").push(2)
            assert client.queue("source").pop(0).payload == 2  # type: ignore[union-attr]
        runner_of(client).open().known.forget_records()
        if kind == "stream":
            group.commit(*reserved)
            assert [each.payload for each in group.reserve_many(9, timeout=0)] == [2]
        else:
            urgent.commit(*reserved)
            assert [each.payload for each in urgent.pop_many(9, timeout=0)] == [2, 0]
    finally:
        place.raw.delete_many({})
        runner_of(client).open().known.forget_records()


def test_consumers_of_queues_pass_over_a_stream(cleared: Place) -> None:
    """Whatever a first release asks by ``q`` and ``when``: packs and groups have no ``when``."""
    client, raw = cleared.client, cleared.raw
    log = client.stream("clicks")
    log.append_many(range(3))
    log.consumer("audit").reserve(0)
    names = [each["q"] for each in raw.find({"_id": {"$regex": "^~(log|group)"}})]
    assert sorted(names) == ["~group:clicks", "~log:clicks"]
    assert not raw.count_documents({"q": {"$in": names}, "when": {"$exists": True}})
    assert {each.name for each in client.queues()} == {"clicks"}


if __name__ == "__main__":
    make(Path(sys.argv[1]))
