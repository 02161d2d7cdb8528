"""A program that kills processes which consume a queue with a limit, again and again.

The messages are those of two customers. In an ordered queue, each producer has a few groups.

``python -m tests.integration.slot_kills URL KILLS SEED LEDGER``
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

#: How many groups each producer has in an ordered queue.
GROUPS = 4
#: How many messages producers leave waiting. What is left at the end has to be drained.
ENOUGH = 60


def kind_of(client: Client) -> Any:
    """Return the kind of the queue, which the test made."""
    record = client.database["pyqueue"].find_one({"_id": "~queue:limited"})
    return None if record is None else record["kind"]


def named(held: Reservation[Any]) -> str:
    """Return the payload and the token, which tells two claims of one message apart."""
    return f"{held.payload}|{held.token}"


settle = partial(kills.settle, name=named)


def push(url: str, name: str, note: Note) -> NoReturn:
    """Push single messages and batches, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        kind = kind_of(client)
        queue = client.queue("limited", kind=kind)
        queue.peek(1)
        note("started", name)
        number = 0
        while True:
            # ``counts`` reads in a transaction, which a kill would leave open.
            if client.database["pyqueue"].estimated_document_count() > ENOUGH:
                time.sleep(0.002)
                continue
            numbers = range(number, number + rng.choice([1, 1, 5, 20]))
            payloads = [f"{name}.{each}" for each in numbers]
            number += len(payloads)
            groups = [f"{name}.{each % GROUPS}" for each in numbers] if kind == "ordered" else None
            customer = {"customer": rng.choice("aab")}
            queue.push_many(payloads, groups=groups, headers=customer)
            note("pushed", *payloads)


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, hold for a moment, and end each message in one of three ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("limited", kind=kind_of(client), lease=LEASE_S, max_tries=None)
        queue.paused()
        note("started", name)
        while True:
            held = queue.reserve_many(rng.choice([1, 2, 10]), timeout=0.05)
            began = time.time()
            time.sleep(rng.uniform(0, 0.005))
            end = time.time()
            for each in held:  # a lease that has ended is not held any more
                until = min(end, each.until.timestamp() - 0.1)
                note("held", f"{each.slot}|{began!r}|{until!r}")
            part = len(held) // 3
            settle(note, "commit", queue.commit, held[2 * part :])
            settle(note, "rollback", partial(queue.rollback, delay=0), held[:part])
            settle(note, "release", queue.release, held[part : 2 * part])


if __name__ == "__main__":
    kill_again_and_again([push, consume, consume, consume], sys.argv[1:])
