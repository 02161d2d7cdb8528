"""A program that kills processes which push to a bucket and consume it.

``python -m tests.integration.bucket_kills URL KILLS SEED LEDGER``
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

settle = partial(kills.settle, name=attrgetter("payload"))


def push(url: str, name: str, note: Note) -> NoReturn:
    """Push single messages and batches, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("jobs", kind="bucket", pack=20)
        number = 0
        queue.paused()
        note("started", name)
        while True:
            count = rng.choice([1, 5, 20, 200])
            payloads = [f"{name}.{number + n}" for n in range(count)]
            number += count
            queue.push_many(payloads)
            note("pushed", *payloads)


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, and end each message in one of five ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue("jobs", kind="bucket", pack=20, lease=LEASE_S, max_tries=None)
        queue.paused()
        note("started", name)
        while True:
            held = queue.reserve_many(rng.choice([1, 3, 20, 50]), timeout=0.05)
            rng.shuffle(held)
            part = len(held) // 10
            settle(note, "commit", queue.commit, held[4 * part :])
            settle(note, "rollback", partial(queue.rollback, delay=0), held[:part])
            settle(note, "release", queue.release, held[part : 2 * part])
            settle(note, "bury", queue.bury, held[2 * part : 3 * part])
            settle(note, "move", partial(queue.move, to="moved"), held[3 * part : 4 * part])


if __name__ == "__main__":
    kill_again_and_again([push, consume], sys.argv[1:])
