"""A program that kills processes which push into an ordered queue and consume it, again and again.

``python -m tests.integration.group_kills URL KILLS SEED LEDGER``
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from typing import Any, NoReturn

from pyqueue import Client, Reservation
from tests.support import kills
from tests.support.kills import LEASE_S, Note, kill_again_and_again

#: How many groups each producer has.
GROUPS = 5
#: How many messages producers leave waiting. What is left at the end has to be drained.
ENOUGH = 100


def named(held: Reservation[Any]) -> str:
    """Return the payload and the token, which tells two claims of one message apart."""
    return f"{held.payload}|{held.token}"


def push(url: str, name: str, note: Note) -> NoReturn:
    """Push single messages and batches, for ever. A payload says its group and its number there."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("ordered", kind="ordered")
        numbers = [0] * GROUPS
        queue.peek(1)
        note("started", name)
        while True:
            # ``counts`` reads in a transaction, which a kill would leave open.
            if client.database["pyqueue"].estimated_document_count() > ENOUGH:
                time.sleep(0.002)
                continue
            groups = [rng.randrange(GROUPS) for _ in range(rng.choice([1, 1, 5, 40]))]
            payloads = []
            for group in groups:
                payloads.append(f"{name}.{group}:{numbers[group]}")
                numbers[group] += 1
            queue.push_many(payloads, groups=[f"{name}.{group}" for group in groups])
            note("pushed", *payloads)


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, and end each message in one of three ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("ordered", kind="ordered", lease=LEASE_S, max_tries=None)
        queue.paused()
        note("started", name)
        kills.consume(
            queue,
            note,
            rng,
            [1, 3, 50],
            named,
            rollback=partial(queue.rollback, delay=0),
            release=queue.release,
        )


if __name__ == "__main__":
    kill_again_and_again([push, consume, consume], sys.argv[1:])
