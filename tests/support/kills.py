"""Kill processes in the middle of their work, again and again, and read their notes.

Each child notes in the ledger each act that it begins, and each that was acknowledged. The program
that calls ``kill_again_and_again`` uses no client and no thread, so its forks are clean.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pyqueue import Client, LeaseLost
from pyqueue.backends.recovering import recover
from pyqueue.runtime.connecting import runner_of
from tests.support.eventually import eventually

#: The lease of each message that a child holds.
LEASE_S = 0.5
#: The longest time between two kills. A child lives through several of them.
LIFE_S = 0.12
#: Burials are slow. Of a batch, a child buries no more than this.
MAX_BURIED = 3

#: What a ledger calls a message.
Name = Callable[[Any], object]


class Child:
    """A process that works until it is killed.

    Args:
        url: The URL of the server.
        number: No other child has it.
        ledger: The file descriptor of the ledger.
        ready: A file descriptor, which the child closes once it has connected.
    """

    def __init__(self, url: str, number: int, ledger: int, ready: int) -> None:
        self.url, self.name = url, f"child-{number}"
        self.client = Client(url)
        self.rng = random.Random(number)
        self._ledger, self._ready = ledger, ready

    def started(self) -> None:
        """Say that this child has connected, and may be killed."""
        os.close(self._ready)

    def note(self, *words: object) -> None:
        """Write a line of words to the ledger."""
        os.write(self._ledger, (" ".join(map(str, words)) + "\n").encode())

    def queue(self, name: str, **options: Any) -> Any:
        """Connect, and return a queue."""
        queue = self.client.queue(name, lease=LEASE_S, max_tries=None, **options)
        queue.paused()
        self.started()
        return queue

    def batches(
        self, sizes: Sequence[int], *, marks: int = 1, enough: int | None = None
    ) -> Iterator[tuple[list[str], list[int]]]:
        """Generate batches of payloads for ever, each with the marks of its messages.

        A payload is ``NAME.MARK:NUMBER``. The numbers of a child grow.

        Args:
            sizes: How many messages a batch may have.
            marks: How many marks there are.
            enough: Generate none while more documents than this are stored.
        """
        number, documents = 0, self.client.database["pyqueue"]
        while True:
            # ``counts`` reads in a transaction, which a kill would leave open.
            if enough is not None and documents.estimated_document_count() > enough:
                time.sleep(0.002)
                continue
            some = [self.rng.randrange(marks) for _ in range(self.rng.choice(sizes))]
            yield [f"{self.name}.{mark}:{number + n}" for n, mark in enumerate(some)], some
            number += len(some)

    def consume(
        self,
        queue: Any,
        limits: Sequence[int],
        name: Name = attrgetter("payload"),
        *,
        share: int = 10,
        use: Callable[[list[Any]], object] | None = None,
        **ways: Callable[..., object],
    ) -> None:
        """Receive and settle, for ever.

        Args:
            queue: The queue, or the consumer group of a stream.
            limits: How many messages a call may ask for.
            name: Returns what the ledger calls a message.
            share: Each way gets one message of ``share``.
            use: Called with the messages while they are held.
            **ways: Further ways to settle. The rest is committed.
        """
        ways = {"rollback": partial(queue.rollback, delay=0), "release": queue.release, **ways}
        while True:
            held = queue.reserve_many(self.rng.choice(limits), timeout=0.05)
            self.rng.shuffle(held)
            if use is not None:
                use(held)
            part = len(held) // share
            self.settle("commit", queue.commit, held[len(ways) * part :], name)
            for place, (word, call) in enumerate(ways.items()):
                some = held[place * part : (place + 1) * part]
                if word == "bury":
                    self.settle("release", queue.release, some[MAX_BURIED:], name)
                    some = some[:MAX_BURIED]
                self.settle(word, call, some, name)

    def settle(
        self, word: str, call: Callable[..., object], held: Sequence[Any], name: Name
    ) -> None:
        """Settle reservations, and note it before and after."""
        if not held:
            return
        self.note(f"begin-{word}", *map(name, held))
        lost: set[object] = set()
        try:
            call(*held)
        except LeaseLost as error:  # a slow machine
            lost = set(map(name, error.lost))
        self.note(word, *(name(each) for each in held if name(each) not in lost))


#: The work of a child, for ever.
Work = Callable[[Child], object]


def kill_again_and_again(
    works: Sequence[Work], arguments: Sequence[str], *, words: Sequence[str]
) -> None:
    """Run a child for each work, and kill one of them by turns, and at last all of them.

    Args:
        works: The works of the children.
        arguments: The URL, the number of kills, the seed, and the path of the ledger.
        words: Before the end it waits until the ledger has a line for each of these words: on a
            slow machine the children do little between a few kills.
    """
    url, kills, seed, path = arguments
    rng = random.Random(int(seed))
    ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    children: list[tuple[int, Work]] = []

    def start(work: Work, number: int) -> int:
        """Start a child. Return a file descriptor that ends when the child has connected."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work(Child(url, number, ledger, writing))
            finally:
                os._exit(1)
        os.close(writing)
        children.append((child, work))
        return reading

    def wait(*started: int) -> None:
        for each in started:
            os.read(each, 1)
            os.close(each)

    wait(*[start(work, number) for number, work in enumerate(works)])
    for number in range(int(kills)):
        time.sleep(rng.uniform(0.01, LIFE_S))
        child, work = children.pop(0)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a child ended by itself"
        wait(start(work, number + len(works)))
    eventually(lambda: all(map(Ledger(Path(path)).lines, words)), f"lines of {words}")
    for child, _ in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class Ledger:
    """The notes of the killed processes: how often each word follows the first word of a line."""

    def __init__(self, path: Path) -> None:
        self._lines = [line.split() for line in path.read_text().splitlines()]

    def __getitem__(self, first: str) -> Counter[str]:
        return Counter(word for line in self.lines(first) for word in line)

    def lines(self, first: str) -> list[list[str]]:
        """Return the lines that begin so, without their first word."""
        return [rest for word, *rest in self._lines if word == first]


def recover_all(client: Client, queue: str) -> None:
    """Finish what killed processes have handed over from a queue, without waiting for a pass."""
    collection = client.database[client.namespace]

    def done() -> bool:
        runner_of(client).run(recover(queue, grace=timedelta()))
        return not collection.count_documents({"ended": {"$exists": True}})

    eventually(done, "no message that has ended and is not finished")
