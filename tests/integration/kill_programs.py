"""Programs that kill processes in the middle of their work: the processes of each.

``python -m tests.integration.kill_programs PROGRAM URL KILLS SEED LEDGER``
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any

from pyqueue import AsyncClient, DuplicateKey, Many, Reservation, To
from tests.support.kills import LEASE_S, Child, Work, kill_again_and_again

#: How many groups each producer has in an ordered queue.
GROUPS = 5
#: How many parts become of each message.
OUTPUTS = 3
#: The further queues of a push into several queues.
ALSO = ("second", "third")


def claim_of(held: Reservation[Any]) -> str:
    """Return the payload and the token, which tells two claims of one message apart."""
    return f"{held.payload}|{held.token}"


# ---- queues with groups, limits and rates. The messages belong to two customers


def push(child: Child, queue: str, kind: str, sizes: Sequence[int], enough: int) -> None:
    """Push batches. ``enough``: the test has to drain the documents that are left at the end."""
    target = child.queue(queue, kind=kind)
    for payloads, marks in child.batches(sizes, marks=GROUPS, enough=enough):
        groups = [f"{child.name}.{mark}" for mark in marks] if kind == "ordered" else None
        target.push_many(payloads, groups=groups, headers={"customer": child.rng.choice("aab")})
        child.note("pushed", *payloads)


def consume(child: Child, queue: str, kind: str, limits: Sequence[int]) -> None:
    """Receive, and end each message in one of three ways."""
    child.consume(child.queue(queue, kind=kind), limits, claim_of)


def consume_slots(child: Child, kind: str) -> None:
    """Hold messages for a moment. Note when they were held for sure."""

    def use(held: Sequence[Any]) -> None:
        began = time.time()
        time.sleep(child.rng.uniform(0, 0.005))
        end = time.time()
        for each in held:  # a lease that has ended is not held any more
            until = min(end, each.until.timestamp() - 0.1)
            child.note("held", f"{each.slot}|{began!r}|{until!r}")

    child.consume(child.queue("limited", kind=kind), [1, 2, 10], claim_of, share=3, use=use)


def using_slots(kind: str) -> list[Work]:
    """Return the works on a queue of this kind whose limit has slots."""
    sizes = [1, 1, 5, 20]
    return [
        partial(push, queue="limited", kind=kind, sizes=sizes, enough=60),
        *[partial(consume_slots, kind=kind)] * 3,
    ]


# ---- priorities


def push_by_priority(child: Child) -> None:
    """Push batches, and change the priority of some messages."""
    queue = child.queue("jobs", kind="priority", strict=True)
    for payloads, levels in child.batches([1, 1, 5, 200], marks=10):
        ids = queue.push_many(payloads, priorities=levels)
        child.note("pushed", *payloads)
        if child.rng.random() < 0.3:
            child.note("begin-reprioritize", payloads[-1])
            queue.reprioritize(ids[-1] or "", child.rng.randrange(10))


def consume_by_priority(child: Child) -> None:
    queue = child.queue("jobs", kind="priority", strict=True)
    child.consume(queue, [1, 1, 3, 50], bury=queue.bury)


# ---- buckets: a second bucket is behind the first


def push_packs(child: Child) -> None:
    queue = child.queue("jobs", kind="bucket", pack=20)
    for payloads, _ in child.batches([1, 5, 20, 200]):
        queue.push_many(payloads)
        child.note("pushed", *payloads)


def consume_packs(child: Child, source: str, to: str) -> None:
    """Push results under the ids of messages, and under ids that are made of them."""
    results = child.client.queue("results")
    child.client.queue("further", kind="bucket", pack=20).paused()
    queue = child.queue(source, kind="bucket", pack=20)

    def answer(*held: Any) -> None:
        """Push results, and fail all the same."""
        ids = [each.id if n % 2 else f"{each.id}:{n}" for n, each in enumerate(held)]
        with suppress(DuplicateKey):  # a slow machine: another process moved one of them on
            results.push_many(ids, ids=ids)
        for each in held:
            queue.rollback(each, delay=0)

    move = partial(queue.move, to=to)
    child.consume(queue, [1, 3, 20, 50], bury=queue.bury, answer=answer, move=move)


# ---- streams


def append(child: Child) -> None:
    log = child.client.stream("log")
    log.read(limit=1)
    child.started()
    for payloads, _ in child.batches([1, 1, 5, 1200]):
        positions = log.append_many(payloads) if payloads[1:] else [log.append(payloads[0])]
        for payload, position in zip(payloads, positions, strict=True):
            child.note("appended", payload, position)


def consume_stream(child: Child) -> None:
    group = child.client.stream("log").consumer("g", lease=LEASE_S, max_tries=None)
    group.counts()
    child.started()
    child.consume(group, [1, 3, 50, 2000], attrgetter("position"), bury=group.bury)


# ---- handlers that make several messages of each


def split(number: int) -> Many:
    """Make parts of a message, in two queues."""
    return Many([To(f"parts-{part % 2}", [number, part]) for part in range(OUTPUTS)])


def stage(client: Any) -> Any:
    """Return the pipeline: one stage."""
    options = {"lease": LEASE_S, "max_tries": None}
    return client.pipeline().choice("in", split, to=["parts-0", "parts-1"], **options)


def split_blocking(child: Child) -> None:
    child.queue("in")
    stage(child.client).run(concurrency=4, handle_signals=False)


def split_async(child: Child) -> None:
    async def work() -> None:
        async with AsyncClient(child.url) as client:
            await client.queue("in").paused()
            child.started()
            await stage(client).run(concurrency=4, handle_signals=False)

    asyncio.run(work())


# ---- pushes into several queues


def push_also(child: Child) -> None:
    """Push each message into three queues, some of them twice under one id."""
    queue = child.queue("first")
    for (payload,), _ in child.batches([1]):
        id = payload if child.rng.random() < 0.5 else None
        for _ in range(1 if id is None else 2):
            queue.push(payload, id=id, also=ALSO)
        child.note("pushed", payload)


#: The works of the children of each program.
PROGRAMS: dict[str, Sequence[Work]] = {
    "ordered": [
        partial(push, queue="ordered", kind="ordered", sizes=[1, 1, 5, 40], enough=100),
        *[partial(consume, queue="ordered", kind="ordered", limits=[1, 3, 50])] * 2,
    ],
    "rate": [partial(consume, queue="limited", kind="standard", limits=[1, 3, 20])] * 3,
    "priority": [push_by_priority, consume_by_priority],
    "bucket": [
        push_packs,
        partial(consume_packs, source="jobs", to="further"),
        partial(consume_packs, source="further", to="moved"),
    ],
    "stream": [append, consume_stream],
    "handover": [split_blocking, split_async],
    "also": [push_also] * 3,
    "slots of standard": using_slots("standard"),
    "slots of ordered": using_slots("ordered"),
}
#: What the children of a program must have done. By default this is a commit.
WORDS = {"bucket": ["answer", "commit"], "handover": [], "also": ["pushed"]}


if __name__ == "__main__":
    kill_again_and_again(
        PROGRAMS[sys.argv[1]], sys.argv[2:], words=WORDS.get(sys.argv[1], ["commit"])
    )
