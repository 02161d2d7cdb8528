"""Renewing many leases on a real server, and renewing next to a lock."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import pytest

from pyqueue import AsyncClient, Client
from pyqueue.requests import Delete
from pyqueue.reserved import renewal
from pyqueue.runtime.connecting import runner_of
from tests.conftest import Mongo
from tests.support.eventually import eventually

MANY, LEASE = 4_000, 5.0


def test_locked_message_does_not_delay_other_renewals(url: str, mongo: Mongo) -> None:
    """A transaction that was left open locks one of two messages that are renewed together."""
    with Client(url, command_timeout=120) as client, ExitStack() as blocks:
        queue = client.queue("jobs")
        queue.push_many(["locked", "free"])
        locked, free = [blocks.enter_context(queue.reserved(0, lease=3)) for _ in range(2)]
        assert locked is not None
        assert free is not None
        session = blocks.enter_context(mongo.start_session())
        session.start_transaction()
        collection = mongo[client.database.name]["pyqueue"]
        collection.update_one({"_id": locked.id}, {"$set": {"note": 1}}, session=session)
        end = free.until
        eventually(lambda: free.until > end, "the free message is renewed")
        session.abort_transaction()
        queue.commit(locked, free)


def test_lease_is_renewed_while_its_commit_runs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many commits at once, or a slow server, may take longer than the rest of the lease."""
    with Client(url) as client:
        queue = client.queue("jobs")
        queue.push(1)
        driver = runner_of(client).open()
        send = driver._send
        ends: list[datetime] = []

        with queue.reserved(0, lease=1) as held:
            assert held is not None
            mine = held

            def slow(request: Any) -> Any:
                if isinstance(request, Delete):
                    ends.append(mine.until)
                    eventually(lambda: mine.until > ends[0], "the lease is renewed")
                return send(request)

            monkeypatch.setattr(driver, "_send", slow)
        assert ends
        assert queue.counts().total == 0
        assert runner_of(client).renewer.state(held) is None


def test_first_renewal_follows_a_slow_claim_at_once(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of this lease ends in 20 minutes."""
    with Client(url) as client:
        queue = client.queue("jobs")
        queue.push(1)
        reserve = queue.reserve

        def late(*args: Any, **options: Any) -> Any:
            held = reserve(*args, **options)
            assert held is not None
            held.until -= timedelta(minutes=10)
            return held

        monkeypatch.setattr(queue, "reserve", late)
        with queue.reserved(0, lease=3600) as held:
            assert held is not None
            first = held.until
            eventually(lambda: held.until > first, "the lease is renewed")


@pytest.mark.slow
def test_no_lease_of_thousands_lapses_in_threads(url: str) -> None:
    with Client(url) as client, Client(url) as other:
        queue, runner = client.queue("jobs", lease=LEASE), runner_of(client)
        for _ in range(MANY // 1000):
            queue.push_many(range(1000))
            for held in queue.reserve_many(1000, timeout=0):
                runner.renewer.add(held, renewal(runner), group="jobs")
        assert queue.counts().reserved == MANY
        assert other.queue("jobs").reserve(3 * LEASE) is None


@pytest.mark.slow
def test_no_lease_of_thousands_lapses_in_tasks(url: str) -> None:
    async def main() -> None:
        async with AsyncClient(url) as client, AsyncClient(url) as other:
            queue, runner = client.queue("jobs", lease=LEASE), runner_of(client)
            for _ in range(MANY // 1000):
                await queue.push_many(range(1000))
                for held in await queue.reserve_many(1000, timeout=0):
                    runner.renewer.add(held, renewal(runner), group="jobs")
            assert (await queue.counts()).reserved == MANY
            assert await other.queue("jobs").reserve(3 * LEASE) is None

    asyncio.run(main())
