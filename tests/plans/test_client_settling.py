"""A client settles messages of several queues, and is disturbed at each command.

Each message is then settled, or held until its lease ends, and never in two places.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from pyqueue import Client, LeaseLost, QueueError, Reservation, Unavailable, client_settling
from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.messages import UNCHANGED, Backoff
from pyqueue.payloads import Codec
from pyqueue.runtime.connecting import Connection, runner_of
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import each_command
from tests.plans.steps import FAULT_AT, Cut, Steps

QUEUES = ("a", "b")
#: The queues of dead letters, and where their messages come from.
DEAD = {"a.dead": "a", "b.dead": "b", "log.g.dead": "log~g"}


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    """Return the connection whose options and renewer the plans use. It sends nothing."""
    with Client("memory:") as client:
        yield runner_of(client)


def options_of(name: str, max_tries: int | None = 1) -> Options:
    """Return the options of a queue or of the group: the first failure buries."""
    return Options(dead_letter=f"{name}.dead", max_tries=max_tries, backoff=Backoff(jitter=0))


def sources(max_tries: int | None = 1) -> list[Any]:
    """Return the plans of both queues and of the group, as a new process makes them."""
    queues = [plans_of(name, options_of(name, max_tries), owner="me") for name in QUEUES]
    stream = StreamPlans("log", Codec(), {}, owner="me")
    return [*queues, stream.group("g", options_of("log.g", max_tries), "first")]


def received(steps: Steps, plans: Any, limit: int = 9) -> list[Reservation[Any]]:
    """Receive the messages that are ready."""
    found: list[Reservation[Any]] = steps.run(plans.receive(Waiters(plans.queue), limit, timeout=0))
    return found


def scene() -> tuple[Steps, list[Reservation[Any]]]:
    """Return a store, and a held message of each source as another process gets it."""
    steps, held = Steps(), list[Reservation[Any]]()
    steps.run(StreamPlans("log", Codec(), {}).append(["log~g"]))
    for plans in sources():
        if plans.queue in QUEUES:
            steps.run(plans.push([plans.queue]))
        held += received(steps, plans)
    assert [each.payload for each in held] == ["a", "b", "log~g"]
    copies: list[Reservation[Any]] = pickle.loads(pickle.dumps(held))
    return steps, copies


def left(steps: Steps) -> list[str]:
    """Return where each message is that was not finished, after all leases have ended."""
    steps.seconds += 1000
    found = [plans.queue for plans in sources() for _ in received(steps, plans)]
    dead = steps.collection.find({"dead": {"$exists": True}, "q": {"$in": list(DEAD)}})
    return sorted([*found, *(each["q"] for each in dead)])


@pytest.mark.parametrize("fault", FAULT_AT)
def test_commit_is_disturbed_anywhere(connection: Connection, fault: str) -> None:
    at, ended, named = 0, False, list[int]()
    while not ended:
        steps, held = scene()
        plan = client_settling.commit(connection, held, UNCHANGED, UNCHANGED, None)
        unknown = {each.id for each in held}
        try:
            steps.run(plan, FAULT_AT[fault](at))
            ended = len(steps.commands) <= at
            unknown = set()
        except Cut:
            pass
        except Unavailable as error:
            unknown = set(error.ids)
            named.append(len(unknown))
        again = [each for each in held if each.id in unknown]
        with suppress(LeaseLost):  # those that were finished
            steps.run(client_settling.commit(connection, again, UNCHANGED, UNCHANGED, None))
        assert left(steps) == []
        at += 1
    assert at > 3
    assert set(named) <= {1}, "only the message of the command is unknown"


@each_command(3)
@pytest.mark.parametrize("fault", FAULT_AT)
def test_rollback_is_disturbed_anywhere(connection: Connection, fault: str, every: int) -> None:
    """It buries each message, and each is in one place at any moment."""
    at, ended = 0, False
    while not ended:
        steps, held = scene()
        plan = client_settling.rollback(connection, held, RollbackOptions(error="no"))
        try:
            steps.run(plan, FAULT_AT[fault](at))
            ended = len(steps.commands) <= at
        except (Cut, QueueError):
            pass
        found = left(steps)
        assert sorted(DEAD.get(each, each) for each in found) == ["a", "b", "log~g"], found
        if ended:
            assert found == sorted(DEAD)
        at += every
    assert at > 6


def test_another_process_takes_messages_while_one_sleeps(connection: Connection) -> None:
    """The sleeper finishes the rest, and names the messages that it lost."""
    at = 0
    while True:
        steps, held = scene()
        running = steps.stalled(
            client_settling.commit(connection, held, UNCHANGED, UNCHANGED, None), at
        )
        if running is None:
            break
        steps.seconds += 61
        taken = [each for plans in sources(None) for each in received(steps, plans)]
        lost: set[Any] = set()
        try:
            for _ in running:
                pass
        except LeaseLost as error:
            lost = {each.id for each in error.lost}
        assert {each.id for each in taken} == lost
        at += 1
    assert at > 2


def test_several_queues_take_no_more_commands(connection: Connection) -> None:
    """In the process that received the messages."""
    steps, alone, held = Steps(), 0, list[Reservation[Any]]()
    for plans in sources()[:2]:
        steps.run(plans.push([1, 2]))
        first, second = received(steps, plans)
        steps.run(plans.commit([first]))
        alone += len(steps.commands)
        held.append(second)
    steps.run(client_settling.commit(connection, held, UNCHANGED, UNCHANGED, None))
    assert len(steps.commands) == alone
