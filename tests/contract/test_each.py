"""Loops over each(): what happens to a message for each way in which its body is left.

The tests follow the table of docs/how-to/loops.md. ``in_block`` is the form with a ``with``
block.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import get_ident
from typing import Any
from weakref import ref

import pytest
from pymongo.errors import AutoReconnect, NetworkTimeout, PyMongoError

from pyqueue import (
    AsyncClient,
    AsyncQueue,
    Backoff,
    Client,
    ConfigurationError,
    Counts,
    Hooks,
    LeaseLost,
    Limit,
    QueueClosed,
    Reservation,
    Unavailable,
)
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.requests import Command, FindAndModify, Plan, Update
from pyqueue.runtime.connecting import runner_of
from pyqueue.runtime.drivers import AsyncDriver
from tests.contract.portal import PortalQueue
from tests.contract.world import AnyClient, AnyQueue, World, in_thread, payloads, waiting
from tests.support.eventually import LONG, async_eventually, eventually
from tests.support.recorder import Recorder

PAGE = Path(__file__).parents[2] / "docs/how-to/loops.md"

by_client = pytest.mark.differs_by("client")
both_forms = pytest.mark.parametrize("in_block", [False, True], ids=["loop", "block"])


class Oops(Exception):
    pass


@contextmanager
def messages(queue: AnyQueue, in_block: bool, timeout: float = 0) -> Iterator[Any]:
    """Give the messages of a queue, to loop over; perhaps in a ``with`` block."""
    each = queue.each(timeout)
    with each if in_block else nullcontext():
        yield each


def state_of(queue: AnyQueue, id: Any) -> str:
    """Return the state of a message."""
    message = queue.get(id)
    return "committed" if message is None else str(message.state)


def renewed(client: AnyClient, held: Reservation[Any]) -> bool:
    """Return whether the client renews a lease."""
    return bool(runner_of(client).renewer.registered([held]))


def failing(monkeypatch: pytest.MonkeyPatch, row: str) -> None:
    """Let an operation of queues fail."""

    def fail(*given: Any, **options: Any) -> Plan[Any]:
        yield from ()
        raise Unavailable("the server went away")

    monkeypatch.setattr(QueuePlans, row, fail)


# ---- the body ends


@both_forms
def test_message_is_committed_before_the_next_body(queue: AnyQueue, in_block: bool) -> None:
    ids = set(queue.push_many(range(5)))
    seen: list[Any] = []
    with messages(queue, in_block) as each:
        for held in each:
            assert (state_of(queue, held.id), held.tries) == ("reserved", 1)
            assert [state_of(queue, id) for id in seen] == ["committed"] * len(seen)
            assert queue.counts().total == len(ids) - len(seen)
            seen.append(held.id)
    assert set(seen) == ids
    assert queue.counts().total == 0


@by_client
@pytest.mark.needs("documents")
def test_nothing_is_claimed_in_advance(queue: AnyQueue) -> None:
    queue.push_many(range(5))
    for _ in queue.each(0):
        assert queue.counts().reserved == 1


@pytest.mark.needs("history")
def test_loop_commits_into_the_history(client: AnyClient, name: str) -> None:
    queue = client.queue(name, history=60)
    queue.push("x")
    assert payloads(queue.each(0)) == ["x"]
    assert queue.history()[0].outcome == "committed"


@by_client
@both_forms
def test_last_message_is_committed_while_the_loop_waits(
    client: AnyClient, queue: AnyQueue, in_block: bool
) -> None:
    queue.push("x")
    seen: list[Any] = []
    done = waiting(client, queue, lambda: waits_for_second(queue, in_block, seen))
    eventually(lambda: queue.counts().total == 0, "the first message is committed")
    assert not renewed(client, seen[0])
    queue.push("y")
    done.result(LONG)
    assert payloads(seen) == ["x", "y"]


def waits_for_second(queue: AnyQueue, in_block: bool, seen: list[Any]) -> None:
    """Loop until a second message was received."""
    with messages(queue, in_block, LONG) as each:
        for held in each:
            seen.append(held)
            if len(seen) == 2:
                queue.commit(held)
                break


@by_client
@both_forms
def test_loop_ends_after_the_timeout(client: AnyClient, queue: AnyQueue, in_block: bool) -> None:
    queue.push_many(range(2))
    with messages(queue, in_block, 0.01) as each:
        loop = iter(each)
        held = [next(loop), next(loop)]
        for _ in range(2):  # it does not begin again
            with pytest.raises(StopIteration):
                next(loop)
            queue.push("later")
    assert (queue.counts().ready, queue.counts().total) == (2, 2)
    assert not any(renewed(client, each) for each in held)


@pytest.mark.needs("group")
def test_loop_receives_the_next_message_of_a_group(queue: AnyQueue) -> None:
    """It waits for the last one, so the commit goes first."""
    queue.push_many(range(4), groups=["a", "a", "a", None])
    assert sorted(payloads(queue.each(0))) == [0, 1, 2, 3]


@pytest.mark.needs("concurrency")
def test_loop_receives_the_next_message_of_a_slot(client: AnyClient, name: str) -> None:
    queue = client.queue(name, limit=Limit(concurrency=1))
    queue.push_many(range(3))
    assert sorted(payloads(queue.each(0))) == [0, 1, 2]


@pytest.mark.needs("packs")
def test_loop_receives_the_rest_of_a_pack(client: AnyClient, queue: AnyQueue) -> None:
    """The commit may end the claim of the pack, so it goes first."""
    queue.push_many(range(5))
    seen: list[Any] = []
    for held in queue.each(0):
        seen.append(held.payload)
        # A claim that has to read the record first would meet the commit.
        runner_of(client).waiters(queue.name).scan.flag_read = None
    assert seen == [*range(5)]


@by_client
def test_loop_renews_a_short_lease(world: World, queue: AnyQueue) -> None:
    queue.push("slow")
    for held in queue.each(0, lease=1.5):
        assert held.lease == 1.5

        def renewed_later(end: datetime = held.until) -> bool:
            return bool(queue.next_when() > end + timedelta(seconds=1))

        eventually(renewed_later, "the first lease has passed")
        assert world.connect().queue(queue.name).reserve(0) is None
    assert queue.counts().total == 0


# ---- the body is left in another way


@both_forms
def test_body_that_raises_is_rolled_back(queue: AnyQueue, in_block: bool) -> None:
    id = queue.push("x")

    def loop() -> None:
        with messages(queue, in_block) as each:
            for _ in each:
                raise Oops("what happened")

    with pytest.raises(Oops, match="what happened"):
        loop()
    eventually(lambda: state_of(queue, id) == "scheduled", "the message is rolled back")
    message = queue.get(id)
    assert message.tries == 1
    known = ("Oops", "what happened")
    unknown = ("error", "a loop over each() was left while the message was in its body")
    assert (message.error["type"], message.error["message"]) == (known if in_block else unknown)


@both_forms
@pytest.mark.parametrize("way", ["break", "return"])
def test_message_of_a_loop_that_is_left(queue: AnyQueue, in_block: bool, way: str) -> None:
    ids = queue.push_many(range(2))

    def loop() -> Any:
        with messages(queue, in_block) as each:
            for held in each:
                if way == "return":
                    return held.id
                break
            assert not in_block or state_of(queue, held.id) == "reserved"  # until the block ends
        return held.id

    left = loop()
    state = "committed" if in_block else "scheduled"
    eventually(lambda: state_of(queue, left) == state, f"the message is {state}")
    (rest,) = {*ids} - {left}
    eventually(lambda: queue.counts().reserved == 0, "the rest of a pack is given back")
    assert queue.get(rest).tries == 0


@by_client
def test_each_loop_over_one_object_stands_alone(client: AnyClient, name: str) -> None:
    queue = client.queue(name, backoff=Backoff(base=LONG))
    queue.push_many(range(3))
    each = queue.each(0)
    first, second = iter(each), iter(each)
    one, two = next(first), next(second)
    three = next(first)
    states = [state_of(queue, held.id) for held in (one, two, three)]
    assert states == ["committed", "reserved", "reserved"]
    del first
    eventually(lambda: state_of(queue, three.id) == "scheduled", "the first loop is left")
    with pytest.raises(StopIteration):
        next(second)
    assert state_of(queue, two.id) == "committed"
    assert not any(renewed(client, held) for held in (one, two, three))


@by_client
def test_failure_in_a_block_rolls_back_the_messages_of_all_loops(queue: AnyQueue) -> None:
    ids = queue.push_many(range(2))

    def loops() -> None:
        with queue.each(0) as each:
            for _ in each:
                break
            for _ in each:
                raise Oops

    with pytest.raises(Oops):
        loops()
    assert [state_of(queue, id) for id in ids] == ["scheduled"] * 2


@by_client
def test_iterator_is_for_one_thread_at_a_time(client: AnyClient, queue: AnyQueue) -> None:
    loop = iter(queue.each(LONG))
    received = waiting(client, queue, lambda: next(loop))
    with pytest.raises(ConfigurationError, match="two tasks or threads use one iterator"):
        next(loop)
    queue.push("x")
    queue.commit(received.result(LONG))


@by_client
def test_each_refuses_wrong_arguments_at_once(queue: AnyQueue) -> None:
    for wrong in ({"timeout": -1}, {"timeout": "1"}, {"lease": 0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            queue.each(**wrong)


@by_client
@both_forms
@pytest.mark.parametrize("way", ["commit", "rollback", "release", "move", "bury"])
@pytest.mark.parametrize("leaves", ["break", "raise", "no"])
def test_message_that_its_body_settled_is_left_alone(
    world: World, queue: AnyQueue, other: AnyQueue, in_block: bool, way: str, leaves: str
) -> None:
    id = queue.push("x")
    options = {"rollback": {"delay": 60}, "move": {"to": other}}.get(way, {})
    before = b""
    with suppress(Oops), messages(queue, in_block) as each:
        for held in each:
            if before:  # released
                queue.release(held)
                before = world.bytes(id)
                break
            getattr(queue, way)(held, **options)
            before = b"" if way == "commit" else world.bytes(id)
            if leaves == "break":
                break
            if leaves == "raise":
                raise Oops
    if way == "commit":
        assert queue.get(id) is None
    else:
        assert world.bytes(id) == before


def test_message_that_a_transaction_settled_is_left_alone(
    client: AnyClient, queue: AnyQueue, other: AnyQueue
) -> None:
    queue.push_many(range(3))
    for held in queue.each(0):
        with client.transaction() as session:
            other.push("result", session=session)
            queue.commit(held, session=session)
    assert (queue.counts().total, other.counts().ready) == (0, 3)
    queue.push("x")
    for held in queue.each(0):
        with client.transaction() as session:
            queue.commit(held, session=session)
        break
    assert queue.counts().total == 0


@by_client
def test_block_keeps_no_message_that_its_body_settled(queue: AnyQueue) -> None:
    queue.push_many(range(2))
    with queue.each(0) as each:
        for _ in range(2):
            for held in each:
                queue.commit(held)
                break
            assert not each._left


# ---- failures


@by_client
@both_forms
def test_paused_queue_gives_no_next_message(queue: AnyQueue, in_block: bool) -> None:
    queue.push_many(range(2))
    with messages(queue, in_block) as each:
        for _ in each:
            queue.pause()
    eventually(lambda: queue.counts() == Counts(ready=1), "the rest of a pack is given back")


@by_client
@both_forms
def test_closing_the_client_ends_the_wait_of_a_loop(
    world: World, queue: AnyQueue, in_block: bool
) -> None:
    queue.push("x")
    client = world.connect()
    orders = client.queue(queue.name)

    def loop() -> None:
        with messages(orders, in_block, LONG) as each:
            for _ in each:
                pass

    done = waiting(client, orders, loop)
    client.close()
    with pytest.raises(QueueClosed):
        done.result(LONG)
    assert queue.counts().total == 0


@by_client
@pytest.mark.needs("documents")
@both_forms
def test_closing_the_client_leaves_the_message_to_its_lease(
    world: World, queue: AnyQueue, in_block: bool
) -> None:
    queue.push_many(range(2))
    client = world.connect()

    def loop() -> None:
        with messages(client.queue(queue.name), in_block) as each:
            for _ in each:
                client.close()

    with pytest.raises(QueueClosed):
        loop()
    assert (queue.counts().ready, queue.counts().reserved) == (1, 1)


@by_client
@both_forms
def test_leaving_a_loop_of_a_closed_client_is_quiet(
    world: World, queue: AnyQueue, in_block: bool
) -> None:
    queue.push("x")
    client = world.connect()

    def loop() -> None:
        with messages(client.queue(queue.name), in_block) as each:
            for _ in each:
                client.close()
                raise Oops

    with pytest.raises(Oops):
        loop()
    assert queue.counts().reserved == 1


@by_client
@pytest.mark.needs("documents")
@both_forms
@pytest.mark.parametrize("row", ["commit", "receive"])
def test_closing_the_client_during_a_commit_or_a_claim(
    world: World, queue: AnyQueue, in_block: bool, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {*queue.push_many(range(2))}
    client = world.connect()
    original, seen, closes = getattr(QueuePlans, row), list[Any](), list[Any]()

    def closing(*given: Any, **options: Any) -> Plan[Any]:
        closes.append(in_thread(client.close))
        if not isinstance(queue, PortalQueue):
            closes[-1].result(LONG)
        return (yield from original(*given, **options))

    def loop() -> None:
        with messages(client.queue(queue.name), in_block) as each:
            for held in each:
                seen.append(held.id)
                if len(seen) == 1:
                    monkeypatch.setattr(QueuePlans, row, closing)
                for each_close in closes:
                    each_close.result(LONG)

    with pytest.raises((QueueClosed, Unavailable)):
        loop()
    monkeypatch.undo()
    closes[0].result(LONG)
    states = {id: state_of(queue, id) for id in ids}
    assert states.pop(seen[0]) in ("committed", "reserved")
    assert {*states.values()} <= {"ready", "reserved"}
    # After their leases, the messages that are not committed come back.
    left = {id for id in ids if queue.get(id) is not None}
    for id in left:
        world.ready(id)
    assert {held.id for held in queue.reserve_many(9, timeout=0)} == left


@by_client
@both_forms
@pytest.mark.parametrize("noticed", [False, True], ids=["at the commit", "by a renewal"])
def test_lost_lease_ends_the_loop(
    world: World, queue: AnyQueue, in_block: bool, noticed: bool
) -> None:
    held = None

    def loop() -> None:
        nonlocal held
        each = queue.each(0, lease=0.9 if noticed else 60)
        with each if in_block else nullcontext():
            for held in each:
                lose(world, world.client, held, noticed=noticed)
                queue.push("next")

    queue.push("x")
    with pytest.raises(LeaseLost) as caught:
        loop()
    assert caught.value.lost == (held,)
    assert held is not None
    assert world.document(held.id)["token"] == "another's"
    (rest,) = queue.reserve_many(9, timeout=0)
    assert (rest.payload, rest.tries) == ("next", 1)
    assert not renewed(world.client, held)


@by_client
@pytest.mark.parametrize("error", [None, Oops], ids=["break", "raise"])
@pytest.mark.parametrize("noticed", [False, True], ids=["at the end", "by a renewal"])
def test_lost_lease_is_raised_by_the_block(
    world: World, queue: AnyQueue, error: type[Oops] | None, noticed: bool
) -> None:
    def loop() -> None:
        with queue.each(0, lease=0.9 if noticed else 60) as each:
            for held in each:
                lose(world, world.client, held, noticed=noticed)
                if error is not None:
                    raise error
                break

    queue.push("x")
    with pytest.raises(error or LeaseLost):
        loop()


def lose(world: World, client: AnyClient, held: Reservation[Any], *, noticed: bool = True) -> None:
    """Let another consumer have a message, as a claim after a lapse does.

    ``noticed``: wait until a renewal of the client has noticed it.
    """
    fields = {"token": "another's", "when": datetime.now(UTC) + timedelta(minutes=5)}
    assert world.raw().update_one({"_id": held.id}, {"$set": fields}).matched_count
    renewer = runner_of(client).renewer
    if noticed:
        eventually(lambda: renewer.state(held) == "lost", "a renewal notices it")


@both_forms
def test_failed_commit_gives_the_next_message_back(
    client: AnyClient, queue: AnyQueue, in_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = set(queue.push_many(range(2)))
    seen: list[Any] = []

    def loop() -> None:
        with messages(queue, in_block) as each:
            for held in each:
                seen.append(held)
                failing(monkeypatch, "commit")

    with pytest.raises(Unavailable, match="the server went away"):
        loop()
    (first,) = seen
    assert state_of(queue, first.id) == "reserved"  # until its lease ends
    assert not renewed(client, first)
    (rest,) = ids - {first.id}
    again = queue.reserve(0)
    assert (again.id, again.tries) == (rest, 1)


@by_client
@pytest.mark.needs("documents")
@both_forms
def test_failed_release_of_the_next_message_is_logged(
    world: World,
    queue: AnyQueue,
    in_block: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop raises the error of the commit. Both messages come back when their leases end."""
    ids = queue.push_many(range(2))

    def loop() -> None:
        with messages(queue, in_block) as each:
            for _ in each:
                failing(monkeypatch, "commit")
                failing(monkeypatch, "release")

    with pytest.raises(Unavailable, match="the server went away"):
        loop()
    text = "comes back when its lease ends: the server went away"
    assert text in caplog.text
    assert queue.counts().reserved == 2
    for id in ids:
        world.ready(id)
    assert {held.id for held in queue.reserve_many(9, timeout=0)} == {*ids}


@both_forms
def test_failed_claim_follows_a_commit(
    queue: AnyQueue, in_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue.push_many(range(2))
    seen: list[Any] = []

    def loop() -> None:
        with messages(queue, in_block) as each:
            for held in each:
                seen.append(held)
                failing(monkeypatch, "receive")

    with pytest.raises(Unavailable, match="the server went away"):
        loop()
    assert state_of(queue, seen[0].id) == "committed"
    eventually(lambda: queue.counts() == Counts(ready=1), "the rest of a pack is given back")


@by_client
@both_forms
def test_failed_rollback_of_a_loop_is_logged(
    queue: AnyQueue,
    in_block: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue.push("x")
    failing(monkeypatch, "rollback")

    def loop() -> None:
        with messages(queue, in_block) as each:
            for _ in each:
                raise Oops

    with pytest.raises(Oops):
        loop()
    text = "comes back when its lease ends: the server went away"
    eventually(lambda: text in caplog.text, "the failure is logged")


@by_client
def test_message_comes_back_though_its_rollback_cannot_begin(
    client: AnyClient,
    queue: AnyQueue,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The loop is gone, so nothing renews the lease."""
    id = queue.push("x")
    loop = iter(queue.each(0, lease=0.9))
    next(loop)

    def fail() -> None:
        raise Unavailable("the server went away")

    with monkeypatch.context() as patched:
        patched.setattr(runner_of(client).open(), "check_usable", fail)
        del loop
        text = "comes back when its lease ends: the server went away"
        eventually(lambda: text in caplog.text, "the failure is logged")
    again = queue.reserve(LONG)
    assert (again.id, again.tries) == (id, 2)


# ---- cancellation


async def cancelled(orders: AsyncQueue[Any], in_block: bool, *, waits: bool) -> None:
    """Cancel a loop in its body, or while it waits for the next message."""
    begun = asyncio.Event()

    async def loop() -> None:
        each = orders.each(LONG)
        async with each if in_block else nullcontext():
            async for _ in each:
                begun.set()
                if not waits:
                    await asyncio.sleep(LONG)

    task = asyncio.create_task(loop())
    await begun.wait()
    if waits:
        line = orders._runner.waiters(orders.name)
        await async_eventually(lambda: line.count, "the loop waits")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if in_block and not waits:  # it is rolled back before the block ends
        assert (await orders.counts()).scheduled == 1


@pytest.mark.needs("tasks")
@both_forms
def test_cancelled_body_is_rolled_back(queue: PortalQueue, in_block: bool) -> None:
    id = queue.push("x")
    queue.within(cancelled, in_block, waits=False)
    eventually(lambda: state_of(queue, id) == "scheduled", "the message is rolled back")
    error = queue.get(id).error["type"]
    assert error == ("CancelledError" if in_block else "error")


@pytest.mark.needs("tasks")
@both_forms
def test_cancelled_wait_leaves_the_last_message_committed(
    queue: PortalQueue, in_block: bool
) -> None:
    queue.push("x")
    queue.within(cancelled, in_block, waits=True)
    assert queue.counts().total == 0


async def cancelled_at(orders: AsyncQueue[Any], in_block: bool, at: int) -> bool:
    """Cancel a loop at a command that follows its first body. Return whether there is one."""
    original, numbers, counting = AsyncDriver.ask, itertools.count(), False
    reached, over = asyncio.Event(), asyncio.Event()

    async def ask(driver: AsyncDriver, request: Command[Any]) -> Any:
        if counting and next(numbers) == at:
            reached.set()
            await over.wait()
        return await original(driver, request)

    async def loop() -> None:
        nonlocal counting
        each = orders.each(0)
        async with each if in_block else nullcontext():
            async for held in each:
                if counting:
                    counting = False
                    await orders.release(held)
                    return
                counting = True

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(AsyncDriver, "ask", ask)
        task, reaching = asyncio.create_task(loop()), asyncio.create_task(reached.wait())
        await asyncio.wait({task, reaching}, return_when=asyncio.FIRST_COMPLETED)
        reaching.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        over.set()
        runner: Any = orders._runner
        await runner.open().coalescer.settled()
    return reached.is_set()


@by_client
@pytest.mark.needs("tasks", "concurrency")
@both_forms
@pytest.mark.parametrize("limit", [None, Limit(concurrency=1)], ids=["free", "slot"])
def test_cancellation_at_each_command_of_a_loop(
    world: World, name: str, in_block: bool, limit: Limit | None
) -> None:
    """The last message is committed. The next one is as it was. Hooks are told of this once."""
    recorder = Recorder()
    client = world.connect(hooks=[recorder])
    for at in range(100):
        queue = client.queue(f"{name}{at}", limit=limit)
        ids = {*queue.push_many(range(2))}
        recorder.take()
        found = queue.within(cancelled_at, in_block, at)
        assert queue.counts() == Counts(ready=1)
        (left,) = queue.peek()
        assert (left.tries, left.deliveries) == ((0, 0) if found else (0, 1))
        (done,) = ids - {left.id}
        more: list[tuple[Any, ...]] = [
            ("received", queue.name, [left.id]),
            ("settled", queue.name, "release", [left.id], None, None),
        ]
        assert recorder.take() == [
            ("received", queue.name, [done]),
            ("settled", queue.name, "commit", [done], None, None),
            *([] if found else more),
        ]
        if not found:
            assert at > 1, "fewer commands than expected"
            return
    raise AssertionError("more commands than expected")


# ---- hooks


def here() -> object:
    """Return the task or the thread that calls this."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return get_ident()


class Places(Hooks):
    """Records the events, and where they come."""

    def __init__(self) -> None:
        self.told: list[tuple[str, object]] = []

    def received(self, queue: str, messages: Any, waited: float) -> None:
        self.told.append(("received", here()))

    def settled(self, queue: str, verb: str, reservations: Any, error: Any, to: Any) -> None:
        self.told.append((verb, here()))


def loop_in_blocks(queue: AnyQueue) -> object:
    """Commit, leave the loop, and fail in its body. Return the place of the loop."""
    with queue.each(0) as each:
        for number, _ in enumerate(each):
            if number == 1:
                break
    with suppress(Oops), queue.each(0) as each:
        for _ in each:
            raise Oops
    return here()


async def loop_in_async_blocks(queue: AsyncQueue[Any]) -> object:
    """Do what ``loop_in_blocks`` does."""
    number = itertools.count()
    async with queue.each(0) as each:
        async for _ in each:
            if next(number) == 1:
                break
    with suppress(Oops):
        async with queue.each(0) as each:
            async for _ in each:
                raise Oops
    return here()


@by_client
@pytest.mark.needs("concurrency")
@pytest.mark.parametrize("limit", [None, Limit(concurrency=1)], ids=["free", "slot"])
def test_loop_tells_hooks_where_it_runs(world: World, name: str, limit: Limit | None) -> None:
    """A context variable, for example of a trace, has the same value there."""
    places = Places()
    queue = world.connect(hooks=[places]).queue(name, limit=limit)
    queue.push_many(range(3))
    if isinstance(queue, PortalQueue):
        mine = queue.within(loop_in_async_blocks)
    else:
        mine = loop_in_blocks(queue)
    verbs = ["received", "commit", "received", "commit", "received", "rollback"]
    assert places.told == [(verb, mine) for verb in verbs]


@by_client
@pytest.mark.parametrize(("lost", "leaves"), [(False, True), (True, True), (True, False)])
def test_message_whose_body_does_not_end_is_told_once(
    world: World, name: str, lost: bool, leaves: bool
) -> None:
    recorder = Recorder()
    client = world.connect(hooks=[recorder])
    queue = client.queue(name)
    id = queue.push("x")
    recorder.take()
    with nullcontext() if leaves else pytest.raises(LeaseLost):
        for held in queue.each(0, lease=0.9 if lost else 60):
            if lost:
                lose(world, client, held)
            if leaves:
                break
    verb = "lost" if lost else "rollback"
    told = [("received", name, [id]), ("settled", name, verb, [id], None, None)]
    eventually(lambda: len(recorder.told) >= len(told), "hooks are told")
    assert recorder.take() == told


@by_client
@pytest.mark.needs("documents")
@pytest.mark.parametrize("error", [None, Oops], ids=["break", "raise"])
def test_block_tells_and_names_all_lost_leases(
    world: World, name: str, error: type[Oops] | None
) -> None:
    recorder = Recorder()
    client = world.connect(hooks=[recorder])
    queue, seen = client.queue(name), list[Any]()
    queue.push_many(range(2))
    recorder.take()

    def loops() -> None:
        with queue.each(0, lease=0.9) as each:
            for _ in range(2):
                for held in each:
                    lose(world, client, held)
                    seen.append(held)
                    break
            if error is not None:
                raise error

    with pytest.raises((LeaseLost, Oops)) as caught:
        loops()
    if isinstance(caught.value, LeaseLost):
        assert error is None
        assert caught.value.lost == tuple(seen)
    ids = [held.id for held in seen]
    assert recorder.take("settled") == [(name, "lost", ids, None, None)]


# ---- the table of docs/how-to/loops.md

#: The first column of the table, and the tests of the other two.
TESTS: dict[str, Callable[..., None]] = {
    "the body ends": test_message_is_committed_before_the_next_body,
    "no message arrives in `timeout` seconds": test_loop_ends_after_the_timeout,
    "the body raises an exception": test_body_that_raises_is_rolled_back,
    "`break` or `return` in the body": test_message_of_a_loop_that_is_left,
    "the task is cancelled in the body": test_cancelled_body_is_rolled_back,
    "the task is cancelled while it waits for a message": (
        test_cancelled_wait_leaves_the_last_message_committed
    ),
    "the task is cancelled while the commit or the claim runs": (
        test_cancellation_at_each_command_of_a_loop
    ),
    "the queue is paused while the body runs": test_paused_queue_gives_no_next_message,
    "the client is closed while the body runs": (
        test_closing_the_client_leaves_the_message_to_its_lease
    ),
    "the client is closed while the loop waits for a message": (
        test_closing_the_client_ends_the_wait_of_a_loop
    ),
    "the client is closed while the commit or the claim runs": (
        test_closing_the_client_during_a_commit_or_a_claim
    ),
    "the lease is lost while the body runs": test_lost_lease_ends_the_loop,
    "the commit fails with `Unavailable`": test_failed_commit_gives_the_next_message_back,
    "the claim of the next message fails": test_failed_claim_follows_a_commit,
}


def forms(test: Callable[..., None]) -> list[object]:
    """Return the forms of a loop for which a test runs."""
    return [
        form
        for mark in getattr(test, "pytestmark", ())
        if mark.name == "parametrize" and mark.args[0] == "in_block"
        for form in mark.args[1]
    ]


def test_each_situation_of_a_loop_has_its_test() -> None:
    rows = re.findall(r"^\| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["Situation", *TESTS]
    assert {name: forms(test) for name, test in TESTS.items()} == {
        name: [False, True] for name in TESTS
    }


# ---- references


#: The errors that the first claim met and repeated, as PyMongo keeps them in a reference cycle.
kept: list[BaseException] = []


@contextmanager
def one_claim_fails(
    monkeypatch: pytest.MonkeyPatch, error: type[PyMongoError], repeated_by: str
) -> Iterator[None]:
    """Make one claim fail, so that it is repeated, while no garbage is collected.

    Args:
        monkeypatch: The fixture.
        error: The error of the claim.
        repeated_by: "pymongo" if it repeats the command and keeps the error, or else "pyqueue".
    """
    errors = [error("no answer")]

    def made(send: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def failing(request: Any, collection: Any) -> Any:
            try:
                if errors and request.w1:
                    raise errors.pop()
            except PyMongoError as met:
                if repeated_by == "pyqueue":
                    raise
                kept.append(met)
            return send(request, collection)

        return failing

    gc.collect()
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            for claim in (FindAndModify, Update):
                patch.setattr(claim, "send", made(claim.send))
            yield
        assert errors == []
    finally:
        gc.enable()
        kept.clear()


def claim_errors(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test for each error of a claim, and for both who may repeat the claim."""
    errors = pytest.mark.parametrize("error", [AutoReconnect, NetworkTimeout])
    repeaters = pytest.mark.parametrize("repeated_by", ["pyqueue", "pymongo"])
    marked: Callable[..., Any] = errors(repeaters(test))
    return marked


@claim_errors
@pytest.mark.parametrize("limit", [None, Limit(concurrency=9)], ids=["no_limit", "limit"])
def test_loop_is_dropped_at_once_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
    error: type[PyMongoError],
    repeated_by: str,
    limit: Limit | None,
) -> None:
    """The frame of an error would keep the loop, whose message would neither stay nor go back."""
    with Client("memory:") as client:
        queue = client.queue("a", limit=limit)
        queue.push_many([1, 2])
        with queue.each(0) as each:
            loop = iter(each)
            next(loop)
            with one_claim_fails(monkeypatch, error, repeated_by):
                assert next(loop).payload == 2
                dropped = ref(loop)
                del loop
                assert dropped() is None
        assert queue.counts().total == 0, "the block has committed it"


@claim_errors
def test_async_loop_is_dropped_at_once_after_an_error(
    monkeypatch: pytest.MonkeyPatch, error: type[PyMongoError], repeated_by: str
) -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            queue = client.queue("a")
            await queue.push_many([1, 2])
            async with queue.each(0) as each:
                loop = aiter(each)
                await anext(loop)
                with one_claim_fails(monkeypatch, error, repeated_by):
                    assert (await anext(loop)).payload == 2
                    dropped = ref(loop)
                    del loop
                    assert dropped() is None
            assert (await queue.counts()).total == 0, "the block has committed it"

    asyncio.run(main())
