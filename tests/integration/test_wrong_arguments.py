"""Wrong arguments of schedules, workers, gathers, results and tests: errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

import pyqueue
from pyqueue import Client, QueueError, testing

#: The public names. A type checker would refuse most of the calls.
pq: Any = pyqueue
kit: Any = testing
NAIVE = datetime(2026, 1, 1)


def job(payload: object) -> None:
    """A handler that is never called."""


def every(client: Any, **options: Any) -> object:
    """Schedule something every minute, with these options in addition."""
    return client.schedule(**{"name": "n", "queue": "a", "every": 60, **options})


def working(client: Any) -> Any:
    """Return a worker with one handler."""
    return pq.Worker(client).on("a", job)


#: Each case: the beginning of the error, which names the argument; a part of it that says what to
#: do; and the call.
Case = tuple[str, str, Callable[[Any], object]]

SCHEDULES: list[Case] = [
    ("name: invalid name 5", "use 1-110 of", lambda c: every(c, name=5)),
    ("name: invalid name ''", "use 1-110 of", lambda c: c.pause_schedule("")),
    ("name: invalid name 'a b'", "use 1-110 of", lambda c: c.resume_schedule("a b")),
    ("name: invalid name ['n']", "use 1-110 of", lambda c: c.run_schedule(["n"])),
    ("name: invalid name None", "use 1-110 of", lambda c: c.unschedule(None)),
    ("queue: expected the name", "found Queue", lambda c: every(c, queue=c.queue("a"))),
    ("cron, every: ", "pass one of the two", lambda c: c.schedule("n", queue="a")),
    ("cron: '0 3 * *' is not", "use five fields", lambda c: every(c, cron="0 3 * *", every=None)),
    ("every: expected seconds", "found bool", lambda c: every(c, every=True)),
    ("every: inf is not allowed", "at most 100 years", lambda c: every(c, every=math.inf)),
    ("timezone: None is not allowed", 'such as "UTC"', lambda c: every(c, timezone=None)),
    ("missed: 1 is not allowed", "use one of 'once'", lambda c: every(c, missed=1)),
    ("grace: expected seconds", "found str", lambda c: every(c, grace="1m")),
    ("overlap: expected True or False", "found 'no'", lambda c: every(c, overlap="no")),
    ("key: '' is not allowed", "use a str of 1-512", lambda c: every(c, key="")),
    ("group: 5 is not allowed", "use a str of 1-512", lambda c: every(c, group=5)),
    ("headers: expected a mapping", "found str", lambda c: every(c, headers="a")),
    ("priorty: a schedule has no", "mean 'priority'?", lambda c: every(c, priorty=1)),
    ("colour: a schedule has no", "use one of every, ", lambda c: every(c, colour=1)),
    ("cron: expected five fields", '@worker.cron("0 3 ', lambda c: pq.Worker(c).cron(job)),
    ("cron, every: ", "pass one", lambda c: pq.Worker(c).cron("0 3 * * *", every=60)(job)),
    (
        "queue: invalid queue name",
        "use 1-110",
        lambda c: pq.Worker(c).cron(every=60, queue="a b")(job),
    ),
]

WORKERS: list[Case] = [
    ("client: expected a Client", "or an AsyncClient", lambda c: pq.Worker(5)),
    ("concurrency: '8' is not", "use a whole number", lambda c: pq.Worker(c, concurrency="8")),
    ("queue: expected the name of a", "found int", lambda c: pq.Worker(c).on(5, job)),
    ("queue: expected the name of a", '@worker.on("NAME")', lambda c: pq.Worker(c).on(job)),
    ("handler of queue 'a': expected a function", "int", lambda c: pq.Worker(c).on("a", 5)),
    ("to: the stage of queue 'a'", "a list", lambda c: pq.Worker(c).on("a", job, to="b")),
    ("to: the link of queue 'a'", "use choice()", lambda c: c.pipeline().link("a", job, to=["b"])),
    (
        "to: the stage of queue 'a'",
        "the next queue",
        lambda c: c.pipeline().choice("a", job, to=[]),
    ),
    ("to: the stage", "each target once", lambda c: pq.Worker(c).on("a", job, to=["b", "b"])),
    ("time_limit: 0 is not", "more than 0", lambda c: pq.Worker(c).on("a", job, time_limit=0)),
    ("concurrency: 0 is not", "from 1 to", lambda c: pq.Worker(c).on("a", job, concurrency=0)),
    ("grace: expected seconds", "found str", lambda c: working(c).run(grace="30s")),
    ("delay: expected seconds", "found str", lambda c: pq.RetryLater("1m")),
    ("at: datetime", "use an aware datetime", lambda c: pq.To("a", at=NAIVE)),
    ("delay, at: ", "not both", lambda c: pq.To("a", delay=1, at=NAIVE)),
    ("priority: 10 is not allowed", "from 0 to 9", lambda c: pq.To("a", priority=10)),
    ("outputs: expected a list", "found To", lambda c: pq.Many(pq.To("a"))),
]

ENDS: list[Case] = [
    (
        "then: expected the name",
        "a str",
        lambda c: c.gather(pq.To(pq.QueueSpec("a"), 1)).__enter__(),
    ),
    ("then: expected a To", "then=To(queue", lambda c: c.gather(None).__enter__()),
    ("gather: expected the value", "gather=g", lambda c: c.queue("a").push(1, gather="g")),
    (
        "gather: expected the value",
        "as g",
        lambda c: c.queue("a").push_many([pq.Push(1, gather=5)]),
    ),
    ("result: 0 is not allowed", "more than 0", lambda c: c.queue("a").push(1, result=0)),
    ("result: -1 is not allowed", "at most 30 days", lambda c: c.queue("a").push(1, result=-1)),
    ("result: expected at most", "30 days", lambda c: c.queue("a").push(1, result=31 * 86400)),
    ("result: expected seconds", "found bool", lambda c: c.queue("a").push(1, result=True)),
    ("expires: expected seconds", "found str", lambda c: c.queue("a").push(1, expires="1m")),
    (
        "unique_for: requires a message key",
        "pass key=",
        lambda c: c.queue("a").push(1, unique_for=60),
    ),
    ("id: 5 is not allowed", "use an ObjectId", lambda c: c.wait(5, 0)),
    ("timeout: expected seconds", "found str", lambda c: c.wait("id", "10")),
    ("timeout: expected seconds", "found NoneType", lambda c: c.request("a", 1, timeout=None)),
    ("queue: expected a Queue", "client.queue(...)", lambda c: c.request(pq.QueueSpec("a"), 1)),
]

TESTS: list[Case] = [
    (
        "client: expected a Client",
        "or an AsyncClient",
        lambda c: kit.assert_enqueued("memory:", "a"),
    ),
    ("queue: expected the name", "as a str", lambda c: kit.refute_enqueued(c, c.queue("a"))),
    ("queue: invalid queue name", "use 1-110", lambda c: kit.assert_enqueued(c, "a b")),
    ("worker: expected a Worker", "has the handlers", lambda c: kit.drain(c)),
    ("worker: expected a Worker", "or a Pipeline", lambda c: kit.perform(job, "a", 1)),
    ("horizon: expected seconds", "found str", lambda c: kit.drain(working(c), horizon="1d")),
    ("queue: ['a'] has no handler", "are: 'a'", lambda c: kit.perform(working(c), ["a"], 1)),
    ("tries: 0 is not allowed", "from 1", lambda c: kit.perform(working(c), "a", 1, tries=0)),
    (
        "headers: expected a mapping",
        "list",
        lambda c: kit.perform(working(c), "a", 1, headers=["x"]),
    ),
]

CASES = [*SCHEDULES, *WORKERS, *ENDS, *TESTS]


@pytest.mark.parametrize(
    ("start", "remedy", "call"), CASES, ids=[f"{start}{remedy}" for start, remedy, _ in CASES]
)
def test_error_names_the_argument_and_a_remedy(
    start: str, remedy: str, call: Callable[[Any], object]
) -> None:
    with Client("memory:", signals="none:") as client:
        with pytest.raises(QueueError) as refused:
            call(client)
        text = str(refused.value)
        assert text.startswith(start)
        assert remedy in text
        assert client.schedules() == []
        testing.refute_enqueued(client, "a")
