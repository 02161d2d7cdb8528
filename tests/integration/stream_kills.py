"""A program that kills processes which append to a stream and consume it, again and again.

``python -m tests.integration.stream_kills URL KILLS SEED LEDGER``
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

settle = partial(kills.settle, name=attrgetter("position"))


def append(url: str, name: str, note: Note) -> NoReturn:
    """Append single messages and batches, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        log = client.stream("log")
        number = 0
        log.read(limit=1)
        note("started", name)
        while True:
            payloads = [f"{name}.{number + each}" for each in range(rng.choice([1, 1, 5, 1200]))]
            number += len(payloads)
            if len(payloads) == 1:
                note("appended", payloads[0], log.append(payloads[0]))
                continue
            for payload, position in zip(payloads, log.append_many(payloads), strict=True):
                note("appended", payload, position)


def consume(url: str, name: str, note: Note) -> NoReturn:
    """Receive, and end each message in one of four ways, for ever."""
    rng = random.Random(name)
    with Client(url) as client:
        group = client.stream("log").consumer("g", lease=LEASE_S, max_tries=None)
        group.counts()
        note("started", name)
        while True:
            held = group.reserve_many(rng.choice([1, 3, 50, 2000]), timeout=0.05)
            rng.shuffle(held)
            part = len(held) // 10
            settle(note, "commit", group.commit, held[3 * part :])
            settle(note, "rollback", lambda *each: group.rollback(*each, delay=0), held[:part])
            settle(note, "release", group.release, held[part : 2 * part])
            settle(note, "bury", group.bury, held[2 * part : min(3 * part, 2 * part + 3)])
            group.release(*held[min(3 * part, 2 * part + 3) : 3 * part])


if __name__ == "__main__":
    kill_again_and_again([append, consume], sys.argv[1:])
