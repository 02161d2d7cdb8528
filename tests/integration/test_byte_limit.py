"""A call receives no more bytes than it may, on a real server and in memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pyqueue import Client
from pyqueue.backends import transaction_locks
from tests.integration.conftest import Connect
from tests.integration.test_cancel import opened

MB = 2**20


def stored(client: Any, queue: str = "jobs") -> list[tuple[int, bool]]:
    """Return the tries of each message that is left, and whether it is reserved."""
    return [(each.tries, each.state == "reserved") for each in client.queue(queue).peek(50)]


@pytest.mark.parametrize("verb", ["reserve_many", "pop_many"])
def test_receive_keeps_to_max_bytes(
    connect: Connect, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First small messages come, and then large messages, more than fit into a batch."""
    # On a busy machine, a claim of 17 MB may take longer, and then takes fewer messages.
    monkeypatch.setattr(transaction_locks, "CLAIM_LIMIT_S", 20.0)
    client = connect()
    queue = client.queue("jobs")
    receive = getattr(queue, verb)
    queue.push_many(range(10))
    assert len(receive(10, timeout=0)) == 10
    queue.push_many([bytes(MB)] * 20, ids=[f"m{number:02}" for number in range(20)])
    first = receive(20, timeout=0, max_bytes=18 * MB)
    assert [each.id for each in first] == [f"m{number:02}" for number in range(17)]
    assert stored(client) == [(0, False)] * 3
    second = receive(20, timeout=0, max_bytes=MB)
    assert [each.id for each in second] == ["m17"]
    assert [each.id for each in receive(20, timeout=0)] == ["m18", "m19"]


@pytest.mark.parametrize("verb", ["reserve_many", "pop_many"])
def test_receive_in_memory_keeps_to_max_bytes(verb: str) -> None:
    with Client("memory:") as client:
        queue = client.queue("jobs")
        receive = getattr(queue, verb)
        queue.push_many([bytes(1000)] * 10)
        assert [len(receive(10, timeout=0, max_bytes=5000)) for _ in range(3)] == [4, 4, 2]


@pytest.mark.parametrize("driver", ["pymongo", "motor"])
def test_concurrent_callers_keep_to_their_own_limits(driver: str, url: str) -> None:
    async def main() -> None:
        async with opened(driver, url, "pyqueue") as client:
            queue = client.queue("jobs")
            await queue.push_many([bytes(100_000)] * 40)
            batches = await asyncio.gather(
                *(queue.reserve_many(10, timeout=0, max_bytes=250_000) for _ in range(8)),
                *(queue.reserve_many(1, timeout=0, max_bytes=1) for _ in range(8)),
            )
            sizes = [len(batch) for batch in batches]
            # Calls that share a claim share its bytes too.
            assert all(1 <= size <= 2 for size in sizes[:8])
            assert sizes[8:] == [1] * 8
            assert len({each.id for batch in batches for each in batch}) == sum(sizes)
            counts = await queue.counts()
            assert (counts.ready, counts.reserved) == (40 - sum(sizes), sum(sizes))

    asyncio.run(main())
