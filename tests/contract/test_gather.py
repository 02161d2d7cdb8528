"""Gathers: a message that is pushed once all messages of a block have ended."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import (
    Client,
    ConfigurationError,
    DuplicateKey,
    Gather,
    InvalidName,
    Push,
    To,
    Unavailable,
)
from pyqueue.runtime import looking
from tests.contract.world import AnyClient, AnyQueue, World, refuses
from tests.support.eventually import eventually


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at once."""
    monkeypatch.setattr(looking, "_SOON_S", 0.0)


@pytest.fixture
def report(name: str) -> str:
    """Return the name of the queue of the message."""
    return f"{name}-report"


def records(world: World, report: str) -> list[dict[str, Any]]:
    """Return the stored records of gathers whose messages go to a queue."""
    return list(world.raw().find({"q": "~gather", "then.to": report}))


def finish(queue: AnyQueue, number: int = 1) -> None:
    """Finish some messages of a queue, one by one."""
    for _ in range(number):
        held = queue.reserve(5)
        assert held is not None
        queue.commit(held)


def comes(client: AnyClient, report: str, payload: Any = "done") -> Any:
    """Wait for the message, take it, and check that no second one comes."""
    queue = client.queue(report)
    found = queue.reserve(5)
    assert found is not None
    queue.commit(found)
    assert (found.payload, queue.counts().total) == (payload, 0)
    return found


def nothing_comes(client: AnyClient, report: str) -> None:
    """Check that every look that was due has been made, without an effect."""
    connection = client._connection
    looks = getattr(connection, "_target", connection).driver.looks
    eventually(lambda: not looks.pending, "all looks")
    assert client.queue(report).counts().total == 0


def test_message_comes_after_all_have_ended(
    client: AnyClient, queue: AnyQueue, report: str, world: World
) -> None:
    with client.gather(To(report, {"n": 2}, headers={"h": 1})) as g:
        assert records(world, report)[0]["_id"] == g.id
        queue.push("x", gather=g)
        queue.push_many([Push("y", gather=g), Push("z")])
    finish(queue, 2)
    if queue.counts().total:
        finish(queue)
    found = comes(client, report, {"n": 2})
    assert (found.id, found.headers, found.tries) == (g.id, {"h": 1}, 1)
    assert records(world, report) == []


@pytest.mark.needs("dead_letter")
@pytest.mark.parametrize("dead", ["hold", "end"])
def test_dead_letter_is_waited_for_or_not(
    client: AnyClient, queue: AnyQueue, report: str, dead: Any
) -> None:
    with client.gather(To(report, "done"), dead=dead) as g:
        queue.push("x", gather=g)
    queue.bury(queue.reserve(5), error="bad")
    if dead == "hold":
        nothing_comes(client, report)
        assert client.queue(f"{queue.name}.dead").redrive() == 1
        finish(queue)
    comes(client, report)


@pytest.mark.needs("history")
def test_history_keeps_the_gather_of_a_message_apart(
    client: AnyClient, name: str, report: str, world: World
) -> None:
    queue = client.queue(name, history=60)
    with client.gather(To(report, "done")) as g:
        id = queue.push("x", gather=g)
    finish(queue)
    comes(client, report)
    stored = world.document(id)
    assert ("gather" in stored, stored["last_gather"]) == (False, {"id": g.id, "dead": "hold"})


@pytest.mark.needs("move")
def test_message_that_moves_is_waited_for(
    client: AnyClient, queue: AnyQueue, other: AnyQueue, report: str
) -> None:
    with client.gather(To(report, "done")) as g:
        queue.push("x", gather=g)
    queue.move(queue.reserve(5), to=other)
    nothing_comes(client, report)
    finish(other)
    comes(client, report)


@pytest.mark.needs("bucket")
def test_message_of_a_gather_is_in_no_pack(
    client: AnyClient, queue: AnyQueue, report: str, world: World
) -> None:
    with client.gather(To(report, "done")) as g:
        ids = queue.push_many([Push(n, gather=g) for n in range(3)])
    assert [world.document(id)["payload"] for id in ids] == [0, 1, 2]
    queue.commit(*queue.reserve_many(3, timeout=5))
    comes(client, report)


@pytest.mark.needs("ordered")
def test_message_goes_to_a_group(client: AnyClient, report: str) -> None:
    client.queue(report, kind="ordered").pause()
    client.queue(report, kind="ordered").resume()
    with client.gather(To(report, "done", group="g")):
        pass
    found = client.queue(report, kind="ordered").reserve(5)
    assert (found.payload, found.group) == ("done", "g")


def test_holder_of_a_message_adds_more(client: AnyClient, queue: AnyQueue, report: str) -> None:
    """Its reservation shows the gather, also after it was pickled."""
    with client.gather(To(report, "done"), dead="end") as g:
        queue.push("x", gather=g)
    held = queue.reserve(5)
    assert held.gather == Gather(g.id, "end")
    more = pickle.loads(pickle.dumps(held)).gather
    queue.push("more", gather=more)
    queue.commit(held)
    nothing_comes(client, report)
    finish(queue)
    comes(client, report)


def test_block_that_fails_sends_nothing(
    client: AnyClient, queue: AnyQueue, report: str, world: World
) -> None:
    def work() -> None:
        with client.gather(To(report, "done")) as g:
            queue.push("x", gather=g)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()
    assert records(world, report) == []
    finish(queue)
    nothing_comes(client, report)


@pytest.mark.differs_by("client")
def test_error_of_the_block_outranks_its_cleanup(
    world: World, queue: AnyQueue, report: str, caplog: pytest.LogCaptureFixture
) -> None:
    other = world.connect()
    gathers: list[Gather] = []

    def work() -> None:
        with other.gather(To(report, "done")) as g:
            gathers.append(g)
            other.close()
            raise ValueError("mine")

    with caplog.at_level("WARNING", "pyqueue"), pytest.raises(ValueError, match="mine"):
        work()
    assert "its record stays for a day, and its message is not sent" in caplog.text
    assert [each["_id"] for each in records(world, report)] == [gathers[0].id]
    refuses("gather: expected an open gather", lambda: queue.push(1, gather=gathers[0]))


@pytest.mark.needs("keys")
def test_push_that_fails_sends_nothing(
    client: AnyClient, queue: AnyQueue, report: str, world: World
) -> None:
    """Even if the program catches its error."""
    queue.push("there", key="k")

    def work() -> None:
        with client.gather(To(report, "done")) as g:
            queue.push("x", gather=g)
            with pytest.raises(DuplicateKey):
                queue.push("y", key="k", on_duplicate="error", gather=g)

    with pytest.raises(Unavailable, match="a push to it failed"):
        work()
    assert (records(world, report), queue.counts().total) == ([], 2)


@pytest.mark.needs("keys")
def test_push_that_writes_nothing_adds_nothing(
    client: AnyClient, queue: AnyQueue, report: str
) -> None:
    queue.push("there", key="k")
    with client.gather(To(report, "done")) as g:
        assert queue.push("x", key="k", gather=g) is None
    comes(client, report)
    assert queue.counts().total == 1


@pytest.mark.needs("server")
def test_settlement_in_a_transaction_looks_after_it(
    client: AnyClient, queue: AnyQueue, report: str
) -> None:
    with client.gather(To(report, "done")) as g:
        queue.push("x", gather=g)
    held = queue.reserve(5, lease=60)
    with client.transaction() as session:
        queue.commit(held, session=session)
        nothing_comes(client, report)
    comes(client, report)


@pytest.mark.differs_by("client")
def test_close_looks_first(world: World, name: str, report: str) -> None:
    other = world.connect()
    with other.gather(To(report, "done")) as g:
        other.queue(name).push("x", gather=g)
    finish(other.queue(name))
    other.close()
    assert world.client.queue(report).counts().total == 1


@pytest.mark.differs_by("client")
def test_wrong_gathers_are_refused(
    client: AnyClient, queue: AnyQueue, report: str, world: World
) -> None:
    with client.gather(To(report, "done")) as g:
        pass
    comes(client, report)
    refuses("gather: expected an open gather", lambda: queue.push(1, gather=g))
    refuses("gather: expected the value of client.gather", lambda: queue.push(1, gather=g.id))
    elsewhere = world.connect(namespace="elsewhere")
    with elsewhere.gather(To(report, "done")) as far:
        refuses("of this database and namespace", lambda: queue.push(1, gather=far))
    assert queue.counts().total == 0
    cases: dict[str, Any] = {
        "then: expected a To, found str": {"then": report},
        "then: expected a To with a payload": {"then": To(report)},
        "then: invalid queue name": {"then": To("a b", 1)},
        "dead: 'no' is not allowed": {"then": To(report, 1), "dead": "no"},
        "priority: queue": {"then": To(report, 1, priority=3)},
    }
    for text, given in cases.items():
        refused = pytest.raises((ConfigurationError, InvalidName), match=text)
        with refused, client.gather(**given):
            raise AssertionError("it began")
    assert records(world, report) == []


@pytest.mark.differs_by("client")
def test_stream_gets_no_message_of_a_gather(client: AnyClient, name: str, report: str) -> None:
    client.stream(report).append(1)
    with (
        pytest.raises(ConfigurationError, match="is a stream"),
        client.gather(To(report, "done")),
    ):
        raise AssertionError("it began")


def test_session_is_refused_beside_a_gather() -> None:
    with Client("memory:") as client, client.gather(To("report", 1)) as g:
        with client.transaction() as session, pytest.raises(ConfigurationError, match="session"):
            client.queue("a").push(1, gather=g, session=session)
        assert client.queue("a").counts().total == 0


def test_message_may_come_later(client: AnyClient, report: str) -> None:
    with client.gather(To(report, "done", delay=timedelta(hours=1))) as g:
        pass
    eventually(lambda: client.queue(report).counts().scheduled == 1, "the message")
    assert client.find(g.id).payload == "done"


@pytest.mark.needs("server")
def test_looks_read_an_index(client: AnyClient, queue: AnyQueue, report: str, world: World) -> None:
    with client.gather(To(report, "done")) as g:
        queue.push_many([Push(n, gather=g) for n in range(3)])
    look = world.raw().find({"gather.id": g.id}, {"_id": 1}, sort=[("_id", -1)], limit=1)
    plan = look.hint("gathers").explain()
    assert plan["executionStats"]["totalKeysExamined"] == 1
    due = {"q": {"$in": ["~cron", "~gather"]}}
    found = world.raw().find(due, sort=[("when", 1), ("_id", 1)], limit=100).hint("hot").explain()
    assert found["executionStats"]["totalDocsExamined"] <= world.raw().count_documents(
        {"q": "~gather"}
    )
    assert "SORT_MERGE" in str(found["queryPlanner"]["winningPlan"])
