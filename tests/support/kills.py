"""Kill processes in the middle of their work, again and again, and read what they noted.

Each child notes in the ledger what it begins and what was acknowledged. The program that calls
``kill_again_and_again`` makes no client and no thread, so its forks are clean.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pyqueue import Client, LeaseLost
from pyqueue.backends.recovering import recover
from pyqueue.runtime.connecting import runner_of
from tests.support.eventually import eventually
from tests.support.processes import program

#: The lease of what a killed consumer held.
LEASE_S = 1.0
#: The longest time between two kills. A child lives through two of them.
LIFE_S = 0.12

#: ``make test`` kills a few processes, ``make test-slow`` many.
few_or_many_kills = pytest.mark.parametrize(
    "kills", [pytest.param(5, id="some"), pytest.param(100, id="all", marks=pytest.mark.slow)]
)

#: Writes a line of words to the ledger. A child notes "started" once it has connected.
Note = Callable[..., None]
#: What a child does, for ever. It gets the URL of the server and its name.
Work = Callable[[str, str, Note], NoReturn]


def settle(
    note: Note,
    what: str,
    call: Callable[..., None],
    held: Sequence[Any],
    name: Callable[[Any], object],
) -> None:
    """Settle reservations, and note it before and after. ``name`` says what to note of each."""
    if not held:
        return
    note(f"begin-{what}", *map(name, held))
    lost: set[object] = set()
    try:
        call(*held)
    except LeaseLost as error:  # a slow machine
        lost = set(map(name, error.lost))
    note(what, *(name(each) for each in held if name(each) not in lost))


def consume(
    queue: Any,
    note: Note,
    rng: random.Random,
    limits: Sequence[int],
    name: Callable[[Any], object],
    **ways: Callable[..., None],
) -> NoReturn:
    """Receive, end a tenth in each of these ways, and commit the rest, for ever.

    Args:
        queue: the queue.
        note: writes to the ledger.
        rng: what decides.
        limits: how many messages a call may ask for.
        name: says what to note of each message.
        **ways: what ends messages, by the word that the ledger gets.
    """
    while True:
        held = queue.reserve_many(rng.choice(limits), timeout=0.05)
        rng.shuffle(held)
        part = len(held) // 10
        settle(note, "commit", queue.commit, held[len(ways) * part :], name)
        for place, (what, call) in enumerate(ways.items()):
            settle(note, what, call, held[place * part : (place + 1) * part], name)


def kill_again_and_again(works: Sequence[Work], arguments: Sequence[str]) -> None:
    """Run a child of each kind, and kill one of them by turns.

    Args:
        works: what the children do.
        arguments: the URL, the number of kills, the seed, and the path of the ledger.
    """
    url, kills, seed, ledger = arguments
    rng = random.Random(int(seed))
    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    children: list[tuple[int, Work]] = []

    def start(work: Work, number: int) -> None:
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

    for number, work in enumerate(works):
        start(work, number)
    for number in range(int(kills)):
        time.sleep(rng.uniform(0.01, LIFE_S))
        child, work = children.pop(0)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a child ended by itself"
        start(work, number + len(works))
    for child, _ in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Ledger:
    """What the killed processes noted: how often each word follows the first one of a line."""

    def __init__(self, path: Path) -> None:
        self._lines = [line.split() for line in path.read_text().splitlines()]

    def __getitem__(self, what: str) -> Counter[str]:
        return Counter(word for line in self.lines(what) for word in line)

    def lines(self, what: str) -> list[list[str]]:
        """Return the lines that begin so, without their first word."""
        return [rest for first, *rest in self._lines if first == what]


def ledger_of(module: str, url: str, kills: int, path: Path) -> Ledger:
    """Run a program that kills its children so often. Return its ledger."""
    with program("-m", module, url, str(kills), "7", str(path)) as killing:
        output, _ = killing.communicate(timeout=280)
        assert killing.returncode == 0, output
    return Ledger(path)


def recover_all(client: Client, queue: str) -> None:
    """Finish what killed processes have handed over from a queue, without waiting for a pass."""
    collection = client.database[client.namespace]

    def done() -> bool:
        runner_of(client).run(recover(queue, grace=timedelta()))
        return not collection.count_documents({"ended": {"$exists": True}})

    eventually(done, "no message that has ended and is not finished")
