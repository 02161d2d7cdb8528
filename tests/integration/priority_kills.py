"""A program that kills processes which push to a queue with priorities and consume it.

``python -m tests.integration.priority_kills URL KILLS SEED LEDGER``

A payload ends with the priority of its message.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from operator import attrgetter
from typing import NoReturn

from pyqueue import Client
from tests.support import kills
from tests.support.kills import LEASE_S, Note, kill_again_and_again


def push(url: str, name: str, note: Note) -> NoReturn:
    """Push single messages and batches, and change the priority of some, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("jobs", kind="priority", strict=True)
        number = 0
        queue.paused()
        note("started", name)
        while True:
            levels = [rng.randrange(10) for _ in range(rng.choice([1, 1, 5, 200]))]
            payloads = [f"{name}.{number + n}.{level}" for n, level in enumerate(levels)]
            number += len(payloads)
            ids = queue.push_many(payloads, priorities=levels)
            note("pushed", *payloads)
            if rng.random() < 0.3:
                note("begin-reprioritize", payloads[-1])
                queue.reprioritize(ids[-1] or "", rng.randrange(10))


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, and end each message in one of four ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("jobs", kind="priority", strict=True, lease=LEASE_S, max_tries=None)
        queue.paused()
        note("started", name)
        kills.consume(
            queue,
            note,
            rng,
            [1, 1, 3, 50],
            attrgetter("payload"),
            rollback=partial(queue.rollback, delay=0),
            release=queue.release,
            bury=queue.bury,
        )


if __name__ == "__main__":
    kill_again_and_again([push, consume], sys.argv[1:])
