"""A ledger of which process held which message when, and its audit.

``work`` runs in each process: it pushes, receives and settles, and notes every hold. All processes
of a machine share the monotonic clock, so the audit sees whether two holds of a message overlapped.
This module does not import pytest, because each of the processes loads it.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pyqueue import Client, Queue, Reservation

#: The lease of a hold that is settled; and of one that is abandoned, as if its consumer had died.
LEASE, SHORT = 60.0, 0.5
#: By how much the processes' estimates of the primary's clock may differ, in seconds.
SLACK = 0.05


@dataclass(slots=True, frozen=True)
class Hold:
    """One reservation.

    It was surely held from ``got``, when the call returned, to ``let``, just before it was settled.
    """

    id: Any
    queue: str
    got: float
    let: float
    #: commit, move, rollback, release or abandon.
    end: str
    tries: int


@dataclass(slots=True)
class Page:
    """The record of one process."""

    pushed: list[Any]
    holds: list[Hold]


@dataclass(slots=True, frozen=True)
class Job:
    """The work of one process."""

    url: str
    worker: int
    messages: int
    #: Each message passes through all of them, and is committed in the last.
    queues: tuple[str, ...]
    #: How many messages are reserved at once. With 1, they are reserved and settled one by one.
    batch: int
    #: The chance that a receive is abandoned. Each of its messages is rolled back with twice that
    #: chance, and released with twice that chance.
    faults: float
    seed: int


def work(job: Job) -> Page:
    """Push and receive by turns until everything that anyone pushed is finished."""
    rng = random.Random(f"{job.seed}/{job.worker}")
    page = Page([], [])
    with Client(job.url, owner=f"worker-{job.worker}") as client:
        queues = [client.queue(name, lease=LEASE, max_tries=None, poll=1) for name in job.queues]
        while True:
            left = job.messages - len(page.pushed)
            if left:
                page.pushed += _push(queues[0], min(left, rng.randint(1, 2 * job.batch)), job)
            taken = 0
            for place in rng.sample(range(len(queues)), len(queues)):
                onward = queues[place + 1] if place + 1 < len(queues) else None
                taken += _turn(queues[place], onward, job, rng, page, wait=0 if left else 0.05)
            # Lease ends are instants too: None says that nothing is left that could come back.
            if not taken and not left and all(queue.next_when() is None for queue in queues):
                return page


def _push(queue: Queue[Any], count: int, job: Job) -> list[Any]:
    payloads = [job.worker] * count
    return [queue.push(payloads[0])] if job.batch == 1 else queue.push_many(payloads)


def _turn(
    queue: Queue[Any],
    onward: Queue[Any] | None,
    job: Job,
    rng: random.Random,
    page: Page,
    wait: float,
) -> int:
    """Receive once and settle the messages."""
    abandon = rng.random() < job.faults
    lease = SHORT if abandon else LEASE
    began = time.monotonic()
    if job.batch == 1:
        one = queue.reserve(wait, lease=lease)
        held = [] if one is None else [one]
    else:
        held = queue.reserve_many(job.batch, timeout=wait, lease=lease)
    got = time.monotonic()
    ends: dict[str, list[Reservation[Any]]] = defaultdict(list)
    for each in held:
        chance = rng.random()
        usual = "commit" if onward is None else "move"
        ends[
            "abandon"
            if abandon
            else "rollback"
            if chance < 2 * job.faults
            else "release"
            if chance < 4 * job.faults
            else usual
        ].append(each)
    for end, members in ends.items():
        let = began + SHORT - SLACK if end == "abandon" else time.monotonic()
        page.holds += [Hold(each.id, queue.name, got, let, end, each.tries) for each in members]
        if end == "rollback":
            queue.rollback(*members, delay=0)
        elif end == "release":
            queue.release(*members)
        elif end == "commit":
            queue.commit(*members)
        elif end == "move" and onward is not None:
            if rng.random() < 0.5:
                queue.move(*members, to=onward)
            else:
                queue.move_many([(each, each.payload) for each in members], to=onward.name)
    return len(held)


def audit(pages: Iterable[Page], queues: tuple[str, ...]) -> list[str]:
    """Return the mistakes in the ledger.

    Nothing is wrong if each message was settled exactly once and never held twice at a time.
    """
    pages = list(pages)
    wrong = []
    pushed = Counter(id for page in pages for id in page.pushed)
    holds: dict[tuple[Any, str], list[Hold]] = defaultdict(list)
    for page in pages:
        for hold in page.holds:
            holds[hold.id, hold.queue].append(hold)
    final: Counter[tuple[Any, str]] = Counter()
    for (id, queue), stay in holds.items():
        stay.sort(key=lambda hold: hold.got)
        counted = 0
        for hold, following in zip(stay, [*stay[1:], None], strict=True):
            if following is not None and following.got < hold.let:
                wrong.append(f"{id} in {queue} was held twice: {hold} and {following}")
            if hold.tries != counted + 1:
                wrong.append(
                    f"{id} in {queue}: tries {hold.tries} at the hold after {counted} that counted"
                )
            counted += hold.end != "release"
            if hold.end in ("commit", "move"):
                final[id, queue] += 1
                if following is not None:
                    wrong.append(f"{id} in {queue} was received after its {hold.end}")
    for place, queue in enumerate(queues):
        done = Counter({id: count for (id, name), count in final.items() if name == queue})
        if done != pushed:
            end = "commit" if place + 1 == len(queues) else "move"
            wrong.append(
                f"{queue}: {len(pushed - done)} of {pushed.total()} had no {end}, "
                f"{len(done - pushed)} had too many"
            )
    return wrong
