"""Calls of several Queue objects of one queue settle together, each by its own options."""

from __future__ import annotations

import asyncio

from pyqueue import AsyncClient


def test_settles_of_two_objects_keep_their_options(url: str) -> None:
    asyncio.run(settle_by_two(url))


async def settle_by_two(url: str) -> None:
    async with AsyncClient(url) as client:
        kept = client.queue("a", history=60, dead_letter="kept", max_tries=1)
        gone = client.queue("a", dead_letter="gone", max_tries=1)
        await kept.push_many(range(128))
        held = await kept.reserve_many(128, timeout=0)
        ends = [
            (kept if place % 2 else gone, name, each)
            for place, each in enumerate(held)
            for name in [("commit", "bury", "rollback", "commit")[place // 32]]
        ]
        for start in (0, 64):  # 64 calls in one turn of the loop
            some = ends[start : start + 64]
            await asyncio.gather(*(getattr(queue, name)(each) for queue, name, each in some))
        committed = {each.payload for each in held[:32] + held[96:]}
        odd = {each.payload for place, each in enumerate(held) if place % 2}
        assert {each.payload for each in await kept.history(200)} == committed & odd
        buried = {each.payload for each in held[32:96]}
        for name, own in (("kept", buried & odd), ("gone", buried - odd)):
            dead = await client.queue(name).peek(200)
            assert {each.payload for each in dead} == own
        assert (await kept.counts()).reserved == 0
