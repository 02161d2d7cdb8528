"""Consumers and producers of one queue that compete in virtual time. Consumers die now and then."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest

from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import LeaseLost
from pyqueue.requests import Plan
from pyqueue.runtime.waiters import Waiters
from tests.plans.store import Process, Task, World

#: How the claim of a message ends. Most messages are finished.
ENDS: Final = ("commit", "commit", "commit", "release", "rollback", "later")

#: Pushes some messages of a producer, which has this number.
Push = Callable[[random.Random, int], Plan[list[Any]]]


def seeds(few: int, many: int) -> pytest.MarkDecorator:
    """Return the parameter ``seed``: ``make test`` runs a few, ``make test-slow`` many."""
    slow = (pytest.param(number, marks=pytest.mark.slow) for number in range(few, many))
    return pytest.mark.parametrize("seed", [*range(few), *slow])


def compete(
    world: World, seed: int, queue: QueuePlans, push: Push, pushed: list[Any], *, mortal: bool
) -> None:
    """Start three consumers, and two producers that record their pushes in ``pushed``."""
    processes = [Process(world, queue.queue) for _ in range(5)]
    for number, process in enumerate(processes[:3]):
        world.spawn(_consume(process, queue, random.Random(seed * 10 + number), mortal), 300)
    for number, process in enumerate(processes[3:]):
        world.spawn(_produce(process, push, seed * 10 + 5 + number, pushed))


def _consume(process: Process, queue: QueuePlans, choose: random.Random, mortal: bool) -> Task:
    """Receive for ever, and end messages in several ways. Die now and then."""
    while True:
        limit = choose.choice((1, 1, 4, 10))
        plan = process.run(queue.receive(process.waiters, limit, timeout=timedelta(seconds=5)))
        if mortal and choose.random() < 0.05:
            for _ in range(choose.randrange(40)):
                try:
                    yield next(plan)
                except StopIteration:
                    break
            process.waiters = Waiters(queue.queue)  # a new process; the old one holds its messages
            yield process.world.sleep(100)
            continue
        held = yield from plan
        yield process.world.sleep(choose.uniform(0, 20))
        for each in held:
            end = choose.choice(ENDS)
            with contextlib.suppress(LeaseLost):
                if end == "commit":
                    yield from process.run(queue.commit([each]))
                elif end == "release":
                    yield from process.run(queue.release([each]))
                else:
                    delay = 0 if end == "rollback" else 0.2
                    yield from process.run(queue.rollback([each], delay=delay))


def _produce(process: Process, push: Push, number: int, pushed: list[Any]) -> Task:
    choose = random.Random(number)
    for _ in range(20):
        yield process.world.sleep(choose.uniform(0, 150))
        pushed += yield from process.run(push(choose, number))
