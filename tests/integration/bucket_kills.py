"""A program that kills processes which push to a bucket and consume it and a second one behind it.

Some results are pushed under the ids of their messages, and some under ids that are made of them.

``python -m tests.integration.bucket_kills URL KILLS SEED LEDGER``
"""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn

from pyqueue import Client, DuplicateKey
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
    """Receive from the first bucket."""
    work(url, name, note, "jobs", "further")


def consume_further(url: str, name: str, note: Note) -> NoReturn:
    """Receive from the second bucket."""
    work(url, name, note, "further", "moved")


def work(url: str, name: str, note: Note, source: str, to: str) -> NoReturn:
    """Receive, and end each message in one of six ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        queue = client.queue(source, kind="bucket", pack=20, lease=LEASE_S, max_tries=None)
        results = client.queue("results")
        client.queue("further", kind="bucket", pack=20).paused()
        queue.paused()
        note("started", name)

        def answer(*held: Any) -> None:
            """Push results, and fail all the same."""
            ids = [each.id if n % 2 else f"{each.id}:{n}" for n, each in enumerate(held)]
            with suppress(DuplicateKey):  # a slow machine: another process moved one of them on
                results.push_many(ids, ids=ids)
            for each in held:
                queue.rollback(each, delay=0)

        kills.consume(
            queue,
            note,
            rng,
            [1, 3, 20, 50],
            attrgetter("payload"),
            rollback=partial(queue.rollback, delay=0),
            release=queue.release,
            bury=queue.bury,
            answer=answer,
            move=partial(queue.move, to=to),
        )


if __name__ == "__main__":
    kill_again_and_again([push, consume, consume_further], sys.argv[1:])
