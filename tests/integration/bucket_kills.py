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
        kills.consume(
            queue,
            note,
            rng,
            [1, 3, 20, 50],
            attrgetter("payload"),
            rollback=partial(queue.rollback, delay=0),
            release=queue.release,
            bury=queue.bury,
            move=partial(queue.move, to="moved"),
        )


if __name__ == "__main__":
    kill_again_and_again([push, consume], sys.argv[1:])
