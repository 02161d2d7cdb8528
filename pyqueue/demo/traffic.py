"""``pyqueue demo --web``: traffic for the pages of the dashboard, in addition to the flights.

The flights pass through standard queues. This module pushes messages to other queues, a few times a
second: an ordered queue, a bucket, a stream with two groups, and a queue with a limit, whose
handler fails for some messages. After the figures of the flights are checked, this module also
sends the flights through their pipeline again, slowly, but does not store them.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from pyqueue import Backoff, Client, Delivery, Limit, Queue, QueueError, Stream, Worker
from pyqueue.demo.consumer import POLL_S
from pyqueue.demo.flights import Flight, pipeline
from pyqueue.demo.rows import Line

#: The seconds between two pushes.
EVERY_S = 0.5
#: How many flights, departures, passengers and reports are pushed at once.
FLIGHTS, DEPARTURES, PASSENGERS, REPORTS = 8, 3, 2, 20
#: Every 10 s there are many mails of one carrier, so that the limit holds some of them back.
MAILS, MAILS_EVERY = 8, 20
#: One of these many mails has no address, and one of these many fails at first.
NO_ADDRESS, BUSY = 25, 6
#: How long boarding, archiving and the handling of some flights take, in seconds.
BOARDING_S, ARCHIVING_S, STORING_S = 0.5, 2.0, 0.4
#: How long the stream keeps departures, in seconds.
KEPT_S = 3600


class Queues(NamedTuple):
    """The queues that the flights do not use."""

    boarding: Queue[Any]
    positions: Queue[Any]
    mails: Queue[Any]
    departures: Stream[Any]

    @classmethod
    def of(cls, client: Client) -> Queues:
        """Return the queues of a client."""
        limit = Limit(rate=1, period=2, burst=2, per="headers.carrier")
        retried = Backoff(base=2)
        return cls(
            client.queue("boarding", kind="ordered", poll=POLL_S),
            client.queue("positions", kind="bucket", poll=POLL_S),
            client.queue("mails", limit=limit, max_tries=3, backoff=retried, poll=POLL_S),
            client.stream("departures", retention=KEPT_S),
        )


@contextmanager
def traffic(client: Client, read: Callable[[], Iterator[Line]]) -> Iterator[Callable[[], None]]:
    """Use the other kinds of queues until the block ends.

    Args:
        client: A client with telemetry.
        read: A function that returns the lines of the file.

    Yields:
        A function that begins to send the flights again.
    """
    queues = Queues.of(client)
    ended, again = threading.Event(), threading.Event()
    ground, flights = _ground(client, queues), pipeline(client, store=stored, poll=POLL_S)
    works, passes = (
        threading.Thread(target=each.run, kwargs={"handle_signals": False}, daemon=True)
        for each in (ground, flights)
    )
    raw = client.queue("raw")

    def push() -> None:
        lines = itertools.chain.from_iterable(read() for _ in itertools.count())
        for number in itertools.count():
            some = list(itertools.islice(lines, FLIGHTS))
            with suppress(QueueError):
                _push(queues, number, some)
                if again.is_set():
                    raw.push_many(some)
            if ended.wait(EVERY_S):
                return

    def begin() -> None:
        passes.start()
        again.set()

    pushes = threading.Thread(target=push, daemon=True)
    works.start()
    pushes.start()
    try:
        yield begin
    finally:
        ended.set()
        pushes.join()
        for thread, run in ((works, ground), (passes, flights)):
            while thread.is_alive():  # a run that is about to begin ignores the first call
                run.stop()
                thread.join(1)


def _push(queues: Queues, number: int, lines: list[Line]) -> None:
    """Push some messages to each queue."""
    seats = [
        {name: each[name] for name in ("carrier", "flight", "origin", "dest")} for each in lines
    ]
    gates = [f"{each['origin']}-{int(each['flight']) % 3 + 1}" for each in lines]
    queues.boarding.push_many(seats[:PASSENGERS], groups=gates[:PASSENGERS])
    queues.positions.push_many([{"round": number, "report": each} for each in range(REPORTS)])
    queues.departures.append_many(seats[:DEPARTURES])
    mails = [
        {"number": number + each, **seats[0]}
        for each in range(1 if number % MAILS_EVERY else MAILS)
    ]
    queues.mails.push_many(mails, headers={"carrier": seats[0]["carrier"]})


def _ground(client: Client, queues: Queues) -> Worker[Any]:
    """Return a worker that handles the messages of these queues."""
    worker = Worker(client, name="ground")
    worker.on(queues.boarding, _board, concurrency=4)
    worker.on(queues.positions, _locate, batch=100)
    worker.on(queues.mails, _mail, reject_on=(ValueError,))
    worker.on(queues.departures.consumer("board"), _show)
    worker.on(queues.departures.consumer("archive"), _archive, batch=200, concurrency=1)
    return worker


# ---- handlers


def _board(seat: Mapping[str, Any]) -> None:
    """Let a passenger board. At each gate, passengers board one after another."""
    time.sleep(BOARDING_S)


def _locate(reports: list[Any]) -> None:
    """Receive position reports, and do nothing."""


def _mail(mail: Mapping[str, Any], delivery: Delivery[Any]) -> None:
    """Write to passengers. Some addresses are missing, and the mail server is busy at times.

    Raises:
        ValueError: There is no address, so that another try will not help.
        ConnectionError: The server refused the mail.
    """
    number = mail["number"]
    if number % NO_ADDRESS == 0:
        raise ValueError(f"passenger {number} has no address")
    if number % BUSY == 0 and delivery.message.tries == 1:
        raise ConnectionError("the mail server is busy; try again later")


def _show(seat: Mapping[str, Any]) -> None:
    """Show a departure on the board."""


def _archive(seats: list[Any]) -> None:
    """Archive departures, more slowly than they come, but many at once."""
    time.sleep(ARCHIVING_S)


def stored(flights: list[Flight]) -> None:
    """Take flights that were stored and checked before, without storing them again."""
    time.sleep(STORING_S)
