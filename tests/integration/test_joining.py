"""Joined calls on a real server: an error belongs to one call; cancelling loses nothing."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from pyqueue import AsyncClient, AsyncQueue, DuplicateKey, InvalidMessage, LeaseLost, Reservation
from tests.integration.test_cancel import opened, settled
from tests.support.samples import sampled

CALLERS = 64

#: The plans and their errors are the same on both drivers.
drivers = pytest.mark.parametrize(
    "driver", ["pymongo", pytest.param("motor", marks=pytest.mark.slow)]
)


Test = Callable[[AsyncClient], Coroutine[Any, Any, None]]


def run(driver: str, url: str, test: Test, **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(300), opened(driver, url, "pyqueue", **options) as client:
            await client.queue("jobs").counts()
            await test(client)

    asyncio.run(main())


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """Make calls in one turn of the loop; return their results and errors."""
    return await asyncio.gather(*calls, return_exceptions=True)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


async def commands(client: AsyncClient, calls: list[Awaitable[Any]]) -> tuple[list[Any], int]:
    """Return the results of calls, and how many commands they took together."""
    before = client.stats["commands"]
    answers = await together(*calls)
    return answers, client.stats["commands"] - before


# MongoDB refuses a document of more than 180 levels, and from about 200 on the command with it.
@drivers
@pytest.mark.parametrize("levels", [190, 250])
def test_joined_push_refused_by_the_server_fails_alone(driver: str, url: str, levels: int) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs")
        await queue.push("the record is there")
        payloads = [nested(levels) if n == 40 else n for n in range(CALLERS)]
        answers, cost = await commands(client, [queue.push(payload) for payload in payloads])
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [40]
        assert isinstance(answers[40], InvalidMessage)
        assert cost <= (8 if levels < 200 else CALLERS + 8)  # they were joined
        stored = Counter(repr(message.payload) for message in await queue.peek(100))
        assert stored == Counter(
            map(repr, ["the record is there", *(n for n in range(CALLERS) if n != 40)])
        )

    run(driver, url, test)


@drivers
def test_joined_push_with_a_taken_id_or_key_fails_alone(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue, other = client.queue("jobs"), client.queue("other")
        await other.push("elsewhere", id="taken")
        await queue.push("first", key="k")
        calls = []
        for n in range(CALLERS):
            more: dict[str, Any] = {}
            if n == 10:
                more = {"id": "taken"}
            elif n in (20, 30, 40):
                more = {"key": "k", "on_duplicate": {20: "error", 30: "ignore", 40: "replace"}[n]}
            elif n in (50, 60):
                more = {"id": "same"}
            calls.append(queue.push(n, **more))
        answers = await together(*calls)
        assert [n for n, answer in enumerate(answers) if isinstance(answer, Exception)] == [10, 20]
        assert isinstance(answers[10], DuplicateKey)
        assert answers[10].ids == ["taken"]
        assert isinstance(answers[20], DuplicateKey)
        assert answers[20].keys == ["k"]
        assert answers[30] is None
        assert answers[50] == answers[60] == "same"
        stored = [message.payload for message in await queue.peek(100)]
        assert (
            len(stored) == CALLERS - 4
        )  # of 10, 20 and 30 nothing, of 50 and 60 one; 40 went into the first of its key
        assert set(range(CALLERS)) - set(stored) >= {10, 20, 30}
        assert 40 in stored
        assert "first" not in stored
        assert len({50, 60} & set(stored)) == 1

    run(driver, url, test)


@drivers
def test_joined_rollbacks_keep_their_errors(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs")
        await queue.push_many(range(CALLERS))
        held = await queue.reserve_many(CALLERS, timeout=0)
        calls: list[Awaitable[None]] = [
            queue.rollback(each, delay=0, error=f"of {each.payload}") for each in held
        ]
        answers, cost = await commands(client, calls)
        assert answers == [None] * CALLERS
        assert cost <= 8  # they were joined
        errors = {
            each.payload: each.error and each.error["message"] for each in await queue.peek(CALLERS)
        }
        assert errors == {n: f"of {n}" for n in range(CALLERS)}

    run(driver, url, test)


@drivers
def test_joined_commits_keep_their_payloads(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs", history=600)
        await queue.push_many(range(CALLERS))
        held = await queue.reserve_many(CALLERS, timeout=0)
        calls: list[Awaitable[None]] = [
            queue.commit(each, payload={"of": each.payload}) for each in held
        ]
        answers, cost = await commands(client, calls)
        assert answers == [None] * CALLERS
        assert cost <= 8  # they were joined
        assert {each.id: each.payload for each in await queue.history()} == {
            each.id: {"of": each.payload} for each in held
        }

    run(driver, url, test)


@drivers
@pytest.mark.parametrize("history", [None, 600.0])
@pytest.mark.parametrize("settle", ["commit", "rollback"])
def test_joined_settle_with_a_lost_lease_fails_alone(
    driver: str, url: str, history: float | None, settle: str
) -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("jobs", history=history)
        await queue.push("goes to another")
        lapsed = await queue.reserve(0, lease=0.05)
        assert lapsed is not None
        await asyncio.sleep(0.1)  # the lease's end is the case itself
        again = await queue.reserve(0)
        assert again is not None
        assert again.id == lapsed.id
        await queue.push_many(range(CALLERS - 1))
        held: list[Reservation[Any]] = await queue.reserve_many(CALLERS - 1, timeout=0)
        held.insert(40, lapsed)
        call: Callable[[Any], Awaitable[None]] = (
            queue.commit if settle == "commit" else lambda each: queue.rollback(each, delay=600)
        )
        answers, cost = await commands(client, [call(each) for each in held])
        assert [n for n, answer in enumerate(answers) if answer is not None] == [40]
        assert isinstance(answers[40], LeaseLost)
        assert answers[40].lost == (lapsed,)
        assert answers[40].unknown == ()
        assert cost <= 12  # they were joined
        counts = await queue.counts()
        assert counts.reserved == 1  # the message of the other consumer
        await queue.commit(again)
        assert counts.scheduled == (0 if settle == "commit" else CALLERS - 1)
        assert counts.history == (CALLERS - 1 if settle == "commit" and history else 0)

    run(driver, url, test)


@dataclass
class Ledger:
    """The state of each message, by its id."""

    pushed: set[Any] = field(default_factory=set)
    perhaps: set[Any] = field(default_factory=set)
    #: Surely committed or popped.
    finished: list[Any] = field(default_factory=list)
    #: Settled by a call that was cancelled: settled, or still held.
    open: list[Reservation[Any]] = field(default_factory=list)
    cancelled: Counter[str] = field(default_factory=Counter)


class Cancelled(Exception):
    """The call was cancelled."""


async def perhaps(rng: random.Random, ledger: Ledger, name: str, call: Awaitable[Any]) -> Any:
    """Make a call, and cancel it at a random point, or not."""
    task = asyncio.ensure_future(call)
    if rng.random() < 0.5:
        asyncio.get_running_loop().call_later(rng.expovariate(150), task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        ledger.cancelled[name] += 1
        raise Cancelled from None


async def actor(number: str, queue: AsyncQueue[Any], ledger: Ledger, turns: int) -> None:
    rng = random.Random(f"joining/{number}")
    for turn in range(turns):
        id = f"{number}-{turn}"
        try:
            ledger.perhaps.add(id)
            await perhaps(rng, ledger, "push", queue.push(turn, id=id))
            ledger.pushed.add(id)
        except Cancelled:
            pass
        try:
            if rng.random() < 0.3:
                message = await perhaps(rng, ledger, "pop", queue.pop(0))
                ledger.finished += [] if message is None else [message.id]
                continue
            held = await perhaps(rng, ledger, "reserve", queue.reserve(0))
        except Cancelled:
            continue
        if held is None:
            continue
        try:
            if rng.random() < 0.5:
                await perhaps(rng, ledger, "commit", queue.commit(held))
                ledger.finished.append(held.id)
            else:
                await perhaps(rng, ledger, "rollback", queue.rollback(held, delay=0))
        except Cancelled:
            ledger.open.append(held)


# PyMongo drops the connection of a command that is cancelled.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("driver", sampled(["pymongo", "motor"], few=1))
def test_cancelled_joined_calls_lose_nothing(driver: str, url: str) -> None:
    async def test(client: AsyncClient) -> None:
        queue, ledger = client.queue("jobs", lease=600, max_tries=None), Ledger()
        kinds = {"push", "pop", "reserve", "commit", "rollback"}
        storms = 0
        while storms < 2 or set(ledger.cancelled) != kinds:  # until each has been cancelled
            assert storms < 40
            calls = (actor(f"{storms}-{n}", queue, ledger, 4) for n in range(16))
            await asyncio.gather(*calls)
            storms += 1
        await settled(client)
        kept = 0
        for each in ledger.open:
            try:
                await queue.release(each)
                kept += 1
            except LeaseLost:
                pass
        assert (await queue.counts()).reserved == 0  # cancelled receives hold nothing
        rest = []
        while batch := await queue.pop_many(100, timeout=0):
            rest += [message.id for message in batch]
        done = Counter(ledger.finished + rest)
        assert max(done.values()) == 1
        assert set(done) <= ledger.perhaps
        assert ledger.pushed - set(done) <= {each.id for each in ledger.open}
        assert (await queue.counts()).total == 0

    run(driver, url, test)
    gc.collect()  # dropped connections are collected here, where the warning is expected
