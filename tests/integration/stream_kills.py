"""A program that kills processes which append to a stream and consume it, again and again.

``python -m tests.integration.stream_kills URL KILLS SEED LEDGER``

Each child notes in the ledger what it begins and what was acknowledged. The program makes no client
and no thread, so its forks are clean.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from pyqueue import Client, LeaseLost, StreamReservation
from pyqueue.streams import Consumer

#: The lease of what a killed consumer held.
LEASE_S = 1.0
#: The longest time between two kills. A child lives through two of them.
LIFE_S = 0.12

Note = Callable[..., None]


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
            bury(note, group, held[2 * part : min(3 * part, 2 * part + 3)])
            group.release(*held[min(3 * part, 2 * part + 3) : 3 * part])


def bury(note: Note, group: Consumer[object], held: list[StreamReservation[object]]) -> None:
    settle(note, "bury", group.bury, held)


def settle(
    note: Note, what: str, call: Callable[..., None], held: list[StreamReservation[object]]
) -> None:
    """Settle, and note it before and after."""
    if not held:
        return
    note(f"begin-{what}", *(each.position for each in held))
    lost: set[int] = set()
    try:
        call(*held)
    except LeaseLost as error:  # a slow machine
        lost = {each.position for each in error.lost}
    note(what, *(each.position for each in held if each.position not in lost))


def main(url: str, kills: int, seed: int, ledger: str) -> None:
    """Run two children at a time, and kill one of them by turns."""
    rng = random.Random(seed)
    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    children: list[tuple[int, Callable[..., NoReturn]]] = []

    def start(work: Callable[..., NoReturn], number: int) -> None:
        ready, begun = os.pipe()
        child = os.fork()
        if child == 0:
            name = f"{work.__name__}-{number}"

            def note(*words: object) -> None:
                if words[0] == "started":
                    os.close(begun)
                os.write(file, (" ".join(map(str, words)) + "\n").encode())

            try:
                work(url, name, note)
            finally:
                os._exit(1)
        os.close(begun)
        children.append((child, work))
        os.read(ready, 1)  # it ends when the child has connected
        os.close(ready)

    start(append, 0)
    start(consume, 1)
    for number in range(kills):
        time.sleep(rng.uniform(0.01, LIFE_S))
        child, work = children.pop(0)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a child ended by itself"
        start(work, number + 2)
    for child, _ in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
