"""Queue operations in transactions: all or nothing with the writes of the user; late signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest
from bson import ObjectId
from pymongo import errors
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.errors import OperationFailure, PyMongoError
from pymongo.synchronous.client_session import ClientSession

from pyqueue import (
    AsyncClient,
    Client,
    ConfigurationError,
    Counts,
    DuplicateKey,
    LeaseLost,
    Queue,
    Reservation,
    Unavailable,
)
from pyqueue.hooks import Uncommitted
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.server_errors import transient
from tests.integration.conftest import Connect
from tests.support.eventually import LONG, eventually, waiters
from tests.support.recorder import Recorder

Mongo = pymongo.MongoClient[dict[str, Any]]


class Undo(Exception):
    """End a transaction without a commit."""


@pytest.fixture
def things(mongo: Mongo, client: Client) -> Any:
    """A collection of the user, beside the queues."""
    collection = mongo[client.database.name].things
    collection.insert_one({"_id": 0})
    return collection


def ids(things: Any) -> list[int]:
    return sorted(each["_id"] for each in things.find())


def totals(*queues: Queue[Any]) -> list[int]:
    return [queue.counts().total for queue in queues]


@contextmanager
def undone(client: Client) -> Iterator[Any]:
    """A transaction that is aborted at its end."""
    with suppress(Undo), client.transaction() as session:
        yield session
        raise Undo


def hold(queue: Queue[Any]) -> Reservation[Any]:
    """Reserve the next message."""
    [reservation] = queue.reserve_many(1, timeout=0)
    return reservation


# ---- duplicates do not abort


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace"])
def test_taken_key_does_not_abort(client: Client, things: Any, on_duplicate: Any) -> None:
    queue = client.queue("jobs")
    first = queue.push("old", key="k")
    with client.transaction() as session:
        answer = queue.push("new", key="k", on_duplicate=on_duplicate, session=session)
        queue.push("another", key="other", session=session)
        client.database.things.insert_one({"_id": 1}, session=session)
    assert answer == (first if on_duplicate == "replace" else None)
    assert ids(things) == [0, 1]
    assert [each.payload for each in queue.peek()] == [
        {"ignore": "old", "replace": "new"}[on_duplicate],
        "another",
    ]


def test_push_many_returns_none_for_taken_keys(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push_many(["old", "old"], keys=["k", "l"])
    with client.transaction() as session:
        answers = queue.push_many(
            ["new"] * 3, keys=["k", "l", "m"], ids=[None, None, "a"], session=session
        )
    assert answers == [None, None, "a"]


def test_reported_duplicate_key_does_not_abort(client: Client, things: Any) -> None:
    queue = client.queue("jobs")
    queue.push("old", key="k")
    with client.transaction() as session:
        with pytest.raises(DuplicateKey) as clash:
            queue.push_many(
                ["new", "another"], keys=["k", "other"], on_duplicate="error", session=session
            )
        client.database.things.insert_one({"_id": 1}, session=session)
    assert clash.value.keys == ["k"]
    assert ids(things) == [0, 1]
    assert [each.payload for each in queue.peek()] == ["old", "another"]


def test_taken_id_does_not_abort(client: Client, things: Any) -> None:
    queue, other = client.queue("jobs"), client.queue("other")
    queue.push("old", id="a")
    with client.transaction() as session:
        assert queue.push("again", id="a", session=session) == "a"
        assert queue.push_many(["again", "new"], ids=["a", "b"], session=session) == ["a", "b"]
        with pytest.raises(DuplicateKey) as stranger:
            other.push("elsewhere", id="a", session=session)
        client.database.things.insert_one({"_id": 1}, session=session)
    assert stranger.value.ids == ["a"]
    assert ids(things) == [0, 1]
    assert [(each.id, each.payload) for each in queue.peek()] == [("a", "old"), ("b", "new")]
    assert totals(other) == [0]


def test_taken_ids_do_not_abort_what_leaves_a_pack(client: Client) -> None:
    """They belong to results, or to a copy that a dead holder left hidden."""
    queue, results, done = client.queue("jobs", kind="bucket"), *map(client.queue, ("r", "done"))
    queue.push_many(range(5))
    held = queue.reserve_many(5, timeout=0)
    results.push("result", id=held[0].id)
    done.paused()
    mark = {"to": "jobs", "source": held[1].pack, "token": "dead"}  # type: ignore[attr-defined]
    zombie = {"_id": held[1].id, "q": "~handover:former", "when": held[1].when, "handover": mark}
    client.database["pyqueue"].insert_one(zombie)
    with client.transaction() as session:
        results.push_many(["result"] * 2, ids=[held[2].id, held[3].id], session=session)
        queue.rollback(*held[:3], delay=0, session=session)
        queue.move(held[3], to=done, session=session)
    queue.commit(held[4])
    back = queue.reserve_many(5, timeout=0)
    assert {each.id: each.payload for each in back} == {each.id: each.payload for each in held[:3]}
    [moved] = done.peek()
    assert (moved.payload, moved.trail[-1]["id"]) == (3, held[3].id)
    assert results.counts().total == 3


@pytest.mark.parametrize("holder", ["alive", "replaced", "gone"])
def test_push_under_the_id_of_a_copy_does_not_abort(
    client: Client, things: Any, holder: str
) -> None:
    """The holder of a message died when it handed the message over, or is about to decide."""
    queue, results = client.queue("jobs", kind="bucket"), client.queue("results")
    queue.push_many(range(3))
    held, *_ = queue.reserve_many(3, timeout=0)
    documents = client.database["pyqueue"]
    pack, token = held.pack, held.token  # type: ignore[attr-defined]
    source = ObjectId() if holder == "gone" else pack
    mark = {"to": "jobs", "source": source, "token": token if holder == "alive" else "dead"}
    copy = {"_id": held.id, "q": "~handover:jobs", "when": held.when, "handover": mark}
    documents.insert_one(copy)

    def act(session: Any) -> None:
        with pytest.raises(DuplicateKey) if holder == "alive" else nullcontext():
            assert results.push("result", id=held.id, session=session) == held.id
        queue.commit(held, session=session)
        client.database.things.insert_one({"_id": 1}, session=session)

    with undone(client) as session:
        act(session)
    assert documents.count_documents({"_id": held.id, "handover": mark}) == 1
    assert documents.count_documents({"_id": source}) == (holder != "gone")
    client.run_transaction(act)
    assert ids(things) == [0, 1]
    assert [each.payload for each in results.peek()] == ["result"] * (holder != "alive")
    assert queue.counts().total == 2


def test_replace_with_and_without_keys_does_not_abort(client: Client, things: Any) -> None:
    queue = client.queue("jobs")
    old, known = queue.push_many(["old", "known"], keys=["k", None], ids=[None, "a"])

    def replace(session: Any) -> list[Any]:
        return queue.push_many(
            ["new", "again", "one more"],
            keys=["k", None, None],
            ids=[None, "a", "b"],
            on_duplicate="replace",
            session=session,
        )

    with undone(client) as session:
        replace(session)
    assert sorted(each.payload for each in queue.peek()) == ["known", "old"]
    with client.transaction() as session:
        assert replace(session) == [old, known, "b"]
        client.database.things.insert_one({"_id": 1}, session=session)
    assert ids(things) == [0, 1]
    assert sorted(each.payload for each in queue.peek()) == ["known", "new", "one more"]


def test_transaction_knows_the_ids_it_pushed(client: Client) -> None:
    queue = client.queue("jobs")
    with client.transaction() as session:
        assert [queue.push("x", id="a", session=session) for _ in range(2)] == ["a", "a"]
    assert totals(queue) == [1]


# ---- all or nothing


def everything(client: Client, session: Any, held: list[Any]) -> None:
    """A push, and each way of settling, in one transaction with a write of the user."""
    source, target = client.queue("source"), client.queue("target")
    committed, rolled, moved, again = held
    target.push("pushed", session=session)
    target.push("pushed with a key", key="k", session=session)
    target.push_many(["one", "two"], session=session)
    source.commit(committed, session=session)
    source.rollback(rolled, delay=0, session=session)
    source.move(moved, to=target, session=session)
    source.move_many([(again, "changed")], to="target", session=session)
    client.database.things.insert_one({"_id": 1}, session=session)


def test_abort_undoes_all_and_commit_does_all(client: Client, things: Any) -> None:
    source = client.queue("source", history=600)
    target = client.queue("target", kind="standard")
    target.pop(0)
    source.push_many(["committed", "rolled back", "moved", "moved and changed"])
    held = source.reserve_many(4, timeout=0)
    before = list(client.database[client.namespace].find(sort=[("_id", 1)]))
    with undone(client) as session:
        everything(client, session, held)
        assert totals(source, target) == [4, 0]  # invisible outside the transaction
    assert list(client.database[client.namespace].find(sort=[("_id", 1)])) == before
    assert ids(things) == [0]

    with client.transaction() as session:
        everything(client, session, held)
    assert source.counts() == Counts(ready=1)
    assert sorted(each.payload for each in target.peek()) == sorted(
        ["pushed", "pushed with a key", "one", "two", "moved", "changed"]
    )
    assert ids(things) == [0, 1]
    with pytest.raises(LeaseLost):
        source.commit(*held)


def test_operations_in_a_driver_transaction(client: Client, things: Any) -> None:
    source, target = client.queue("source"), client.queue("target")
    source.push_many(["committed", "rolled back", "moved", "moved and changed"])
    held = source.reserve_many(4, timeout=0)
    target.pop(0)
    with client.database.client.start_session() as session:
        session.start_transaction()
        everything(client, session, held)
        session.abort_transaction()
        assert (totals(source, target), ids(things)) == ([4, 0], [0])
        session.start_transaction()
        everything(client, session, held)
        session.commit_transaction()
    assert (totals(source, target), ids(things)) == ([1, 6], [0, 1])


def test_operations_in_an_async_transaction(connect: Connect) -> None:
    client = connect()
    source, target = client.queue("source"), client.queue("target")
    target.pop(0)
    source.push("moved")
    held = hold(source)
    with undone(client) as session:
        source.move(held, to="target", session=session)
        target.push("pushed", session=session)
    assert totals(source, target) == [1, 0]

    def act(session: Any) -> str:
        source.move(held, to="target", session=session)
        target.push("pushed", session=session)
        return "done"

    assert client.run_transaction(act) == "done"
    assert totals(source, target) == [0, 2]


@pytest.mark.own_mongod
@pytest.mark.parametrize("databases", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_transaction_sees_the_claim_just_before_it(url: str, databases: int) -> None:
    """A snapshot may be older than a write that was just acknowledged at w:1.

    With the default journal interval, one of seven was in a fresh database.
    """
    base, _, query = url.partition("?")
    for n in range(databases):
        with Client(f"{base}-{n}?{query}") as client:
            queue = client.queue("jobs")
            queue.push(n)
            reservation = hold(queue)
            with client.transaction() as session:
                queue.commit(reservation, session=session)


def test_lost_lease_aborts_the_whole_transaction(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push_many(["one", "two"])
    one, two = queue.reserve_many(2, timeout=0)
    queue.commit(one)

    def act(session: Any) -> None:
        queue.commit(two, session=session)
        queue.commit(one, session=session)

    with pytest.raises(LeaseLost):
        client.run_transaction(act)
    assert queue.counts() == Counts(reserved=1)
    queue.commit(two)


# ---- errors pass unchanged


def test_transaction_errors_keep_type_and_labels(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    reservation = hold(queue)
    with client.database.client.start_session() as session:
        session.start_transaction()
        assert queue.push("snapshot", session=session)
        queue.extend(reservation)  # outside, so that the settle meets a newer document
        with pytest.raises(OperationFailure) as conflict:
            queue.commit(reservation, session=session)
        assert type(conflict.value).__module__.startswith("pymongo")
        assert conflict.value.code == 112
        assert conflict.value.has_error_label("TransientTransactionError")
        session.abort_transaction()
    queue.commit(reservation)


def test_run_transaction_repeats_transient_errors(client: Client, things: Any) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    reservation = hold(queue)
    attempts = []

    def act(session: Any) -> int:
        attempts.append(session)
        client.database.things.insert_one({"_id": len(attempts)}, session=session)
        queue.push("pushed", session=session)
        if len(attempts) == 1:
            queue.extend(reservation)
        queue.commit(reservation, session=session)
        return len(attempts)

    assert client.run_transaction(act) == 2
    assert ids(things) == [0, 2]
    assert queue.counts() == Counts(ready=1)


def test_caller_exception_passes_and_writes_nothing(client: Client, things: Any) -> None:
    queue = client.queue("jobs")
    queue.pop(0)

    def act(session: Any) -> None:
        queue.push("pushed", session=session)
        raise Undo

    with pytest.raises(Undo):
        client.run_transaction(act)
    assert queue.counts().total == 0


# ---- short leases


@pytest.mark.parametrize("operation", ["commit", "rollback", "move"])
def test_settle_with_too_little_lease_left_is_refused(client: Client, operation: str) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    reservation = queue.reserve(0, lease=60)
    assert reservation is not None
    queue.extend(reservation, lease=19)
    reservation.lease = 60
    before = queue.get(reservation.id)
    settle: Callable[[Any], None] = {
        "commit": lambda session: queue.commit(reservation, session=session),
        "rollback": lambda session: queue.rollback(reservation, session=session),
        "move": lambda session: queue.move(reservation, to="other", session=session),
    }[operation]
    with client.transaction() as session:
        with pytest.raises(ConfigurationError, match=r"(?s)extend\(\).*lease="):
            settle(session)
        queue.push("goes on", session=session)
    assert queue.counts() == Counts(ready=1, reserved=1)
    after = queue.get(reservation.id)
    assert before is not None
    assert after is not None
    assert (after.when, after.tries, after.state) == (before.when, before.tries, "reserved")
    queue.extend(reservation)
    with client.transaction() as session:
        settle(session)
    with pytest.raises(LeaseLost):
        queue.commit(reservation)


def test_short_lease_needs_a_third_of_its_length(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    reservation = queue.reserve(0, lease=6)
    assert reservation is not None
    with client.transaction() as session:
        queue.commit(reservation, session=session)
    assert queue.counts().total == 0


# ---- renewal


#: A lease that is renewed after a third of it, and that a busy machine does not let run out.
LEASE = 3.0


def test_renewal_is_suspended_by_a_settle_with_a_session(connect: Connect) -> None:
    """A renewal after the settle would end the transaction with a write conflict."""
    client = connect()
    source, target = client.queue("source"), client.queue("target")
    target.pop(0)
    source.push("moved")
    states: list[object] = []

    def act(session: Any) -> None:
        assert reservation is not None
        states.append(runner_of(client).renewer.state(reservation))
        source.move(reservation, to=target, session=session)
        states.append(runner_of(client).renewer.state(reservation))

    with source.reserved(0) as reservation:
        assert reservation is not None
        client.run_transaction(act)
    assert states == ["renewed", "suspended"]
    assert totals(source, target) == [0, 1]


def test_transaction_is_repeated_after_a_renewal(client: Client) -> None:
    source, target = client.queue("source", lease=LEASE), client.queue("target")
    target.pop(0)
    source.push("moved")
    attempts: list[Any] = []

    def act(session: Any) -> None:
        held = reservation
        assert held is not None
        attempts.append(session)
        until = held.until
        target.push("pushed", session=session)  # the snapshot is taken
        if len(attempts) == 1:
            eventually(lambda: held.until > until, "a renewal")
        source.move(held, to=target, session=session)

    with source.reserved(0) as reservation:
        assert reservation is not None
        client.run_transaction(act)
    assert len(attempts) == 2
    assert totals(source, target) == [0, 2]


def test_renewed_message_returns_after_an_abort(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push("held")
    with queue.reserved(0) as reservation:
        assert reservation is not None
        with undone(client) as session:
            queue.commit(reservation, session=session)
    assert runner_of(client).renewer.state(reservation) is None
    held = {"_id": reservation.id, "token": reservation.token}
    ended = {"$set": {"when": datetime.now(UTC) - timedelta(seconds=0.1)}}
    assert client.database["pyqueue"].update_one(held, ended).matched_count == 1
    again = queue.reserve(LONG)
    assert again is not None
    assert (again.id, again.tries) == (reservation.id, 2)
    queue.commit(again)


# ---- signals wait for the commit


@contextmanager
def listening(client: Client, name: str) -> Iterator[Any]:
    with ThreadPoolExecutor(1) as pool:
        queue = client.queue(name, poll=3600)
        future = pool.submit(lambda: (queue.pop(LONG), time.monotonic()))
        eventually(lambda: waiters(client, name) == 1)
        yield future


@pytest.mark.parametrize("way", ["transaction", "run_transaction"])
def test_waiters_wake_after_the_commit(connect: Connect, way: str) -> None:
    client = connect()
    queue = client.queue("jobs")

    def act(session: Any) -> float:
        queue.push("pushed", session=session)
        signals = client.stats.get("signals", 0)
        before = commands(client)
        time.sleep(0.3)
        assert client.stats.get("signals", 0) == signals
        assert commands(client) == before, "the waiter scanned before the commit"
        return time.monotonic()

    def commands(client: Any) -> int:
        return int(client.stats["commands"])

    with listening(client, "jobs") as future:
        if way == "transaction":
            with client.transaction() as session:
                committing = act(session)
        else:
            committing = client.run_transaction(act)
        message, at = future.result(LONG)  # no poll comes in that time
        assert message.payload == "pushed"
        assert committing <= at


def test_aborted_transaction_signals_nothing(client: Client) -> None:
    queue = client.queue("jobs")
    queue.push_many(["moved", "rolled back"])
    moved, rolled = queue.reserve_many(2, timeout=0)
    signals = client.stats.get("signals", 0)
    with undone(client) as session:
        queue.push("pushed", session=session)
        queue.push("pushed", key="k", on_duplicate="replace", session=session)
        queue.move(moved, to="other", session=session)
        queue.rollback(rolled, delay=0, session=session)
    assert client.stats.get("signals", 0) == signals


@pytest.mark.parametrize("age", [0, 60])
def test_notify_wakes_after_a_driver_transaction(client: Client, age: float) -> None:
    """However long it was open: its messages are that old, far below the start of the scans."""
    queue = client.queue("jobs")
    with listening(client, "jobs") as future:
        with client.database.client.start_session() as session, session.start_transaction():
            id = queue.push("pushed", session=session)
            past = datetime.now(UTC) - timedelta(seconds=age)
            client.database["pyqueue"].update_one(
                {"_id": id}, {"$set": {"when": past}}, session=session
            )
        time.sleep(0.2)
        assert not future.done()
        queue.notify()
        message, _ = future.result(LONG)  # no poll comes in that time
        assert message.payload == "pushed"


def test_driver_errors_of_the_commit_pass_unwrapped(client: Client) -> None:
    queue = client.queue("jobs")
    queue.pop(0)

    def transact() -> None:
        with client.transaction() as session:
            queue.push("pushed", session=session)
            client.database.client.admin.command("killSessions", [session.session_id])

    with pytest.raises(PyMongoError):
        transact()
    assert queue.counts().total == 0


# ---- locks


def test_purge_gets_past_a_message_that_a_transaction_holds(client: Client) -> None:
    """A stranger's open transaction delays a purge, but does not stop it half done."""
    queue = client.queue("jobs")
    queue.push_many(range(20))
    held = hold(queue)
    queue.release(held)
    stored = client.database["pyqueue"]
    with client.database.client.start_session() as session, ThreadPoolExecutor(1) as pool:
        session.start_transaction()
        stored.update_one({"_id": held.id}, {"$set": {"x": 1}}, session=session)
        purge = pool.submit(queue.purge)
        try:
            eventually(lambda: queue.counts().total == 1, "the other messages are deleted")
            assert not purge.done()
        finally:
            session.abort_transaction()
        assert purge.result(LONG) == 20
    assert queue.counts().total == 0


#: Commands that a connection may refuse, by their names and collections.
QUEUE, USER, COMMIT = ("insert", "pyqueue"), ("insert", "things"), ("commitTransaction", 1)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
    """Let one command meet a connection without sessions. Return a list of it until it did.

    PyMongo opened it while its member had no readable state, after a fail-over for example.
    """

    def patch(refused: Any) -> list[Any]:
        refusals = [refused]
        apply_to = ClientSession._apply_to  # the other one has the same

        def refuse(self: Any, command: Any, *args: Any) -> None:
            if not self._implicit and next(iter(command.items())) in refusals:
                refusals.pop()
                raise errors.ConfigurationError(
                    "Sessions are not supported by this MongoDB deployment"
                )
            apply_to(self, command, *args)

        for each in (ClientSession, AsyncClientSession):
            monkeypatch.setattr(each, "_apply_to", refuse)
        return refusals

    return patch


@pytest.mark.parametrize("refused", [QUEUE, USER, COMMIT])
@pytest.mark.parametrize("repeats", [True, False])
def test_connection_without_sessions_repeats_a_transaction(
    client: Client, things: Any, refuse: Any, repeats: bool, refused: Any
) -> None:
    queue = client.queue("jobs")
    queue.push(1)

    def act(session: Any) -> None:
        queue.push(2, session=session)
        client.database.things.insert_one({"_id": 1}, session=session)

    def once(act: Callable[[Any], None]) -> None:
        with client.transaction() as session:
            act(session)

    refusals = refuse(refused)
    run = client.run_transaction if repeats else once
    if repeats and refused is not COMMIT:
        run(act)
    else:
        with pytest.raises(errors.AutoReconnect) as caught:
            run(act)
        assert caught.value.has_error_label("TransientTransactionError")
        run(act)  # nothing of the first one is left
    assert not refusals
    assert (queue.counts().ready, ids(things)) == (2, [0, 1])


def test_connection_without_sessions_repeats_async_transactions(
    url: str, client: Client, things: Any, refuse: Any
) -> None:
    client.queue("jobs").pop(0)

    async def main() -> None:
        async with AsyncClient(url) as other:

            async def act(session: Any) -> None:
                await other.queue("jobs").push(2, session=session)
                await other.database.things.insert_one({"_id": 1}, session=session)

            refusals = refuse(USER)
            await other.run_transaction(act)
            assert not refusals
            refusals = refuse(COMMIT)
            with pytest.raises(errors.AutoReconnect):
                async with other.transaction() as session:
                    await other.queue("jobs").push(3, session=session)
            assert not refusals

    asyncio.run(main())
    assert (client.queue("jobs").counts().ready, ids(things)) == (1, [0, 1])


def test_connection_without_sessions_is_unavailable(client: Client, refuse: Any) -> None:
    queue = client.queue("jobs")
    queue.push(1)
    refusals = refuse(("aggregate", "pyqueue"))
    with pytest.raises(Unavailable, match="Sessions"):
        queue.counts()
    assert not refusals


# ---- hooks


def test_hooks_are_told_once_of_a_repeated_transaction(url: str) -> None:
    recorder = Recorder()
    with Client(url, hooks=[recorder]) as client:
        queue = client.queue("jobs")
        queue.push(0)
        recorder.take()
        attempts: list[Any] = []

        def act(session: Any) -> None:
            attempts.append(queue.push(1, session=session))
            if len(attempts) == 1:
                raise transient(OSError("once more"))

        client.run_transaction(act)
    pushing = ("pushing", "jobs", [1])
    assert recorder.take() == [pushing, pushing, ("pushed", "jobs", attempts[1:], None)]


def test_hooks_are_told_at_once_in_a_session_of_the_program(url: str) -> None:
    recorder = Recorder()
    with Client(url, hooks=[recorder]) as client:
        queue = client.queue("jobs")
        queue.push(0)
        held = queue.reserve(0)
        assert held is not None
        recorder.take()
        with client.database.client.start_session() as session, session.start_transaction():
            id = queue.push(1, session=session)
            queue.commit(held, session=session)
            assert recorder.take()[1:] == [
                ("pushed", "jobs", [id], Uncommitted),
                ("settled", "jobs", "commit", [held.id], Uncommitted, None),
            ]
            session.abort_transaction()
        assert queue.counts().reserved == 1
