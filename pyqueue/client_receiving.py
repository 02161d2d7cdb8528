"""How a client receives from several of its queues and consumer groups in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pyqueue.backends import receiving, receiving_any
from pyqueue.backends.giving_back import give_back
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.receiving_any import Source
from pyqueue.backends.streams import receiving as stream_receiving
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Duration, PackedReservation, Reservation
from pyqueue.queue_base import QueueBase, backend_of, runs_on
from pyqueue.requests import Plan, ServerTime
from pyqueue.runtime.plan_runner import RunnerBase
from pyqueue.runtime.waiters import Waiters
from pyqueue.stream_base import StreamBase


def receive(
    runner: RunnerBase, queues: object, limit: int, timeout: Duration | None
) -> Plan[list[Reservation[Any]]]:
    """Receive up to ``limit`` messages; wait up to ``timeout`` for the first one.

    Raises:
        ConfigurationError: ``queues`` is not a list of queues and consumer groups of this client.
    """
    sources = [_source(runner, each) for each in _checked(runner, queues)]
    return receiving_any.receive(sources, limit, timeout)


def _checked(runner: RunnerBase, queues: object) -> list[QueueBase[Any, Any]]:
    if isinstance(queues, (str, QueueBase)) or not isinstance(queues, Iterable):
        raise ConfigurationError(
            "queues: expected a list of queues and consumer groups, found "
            f"{type(queues).__name__}; pass a list, such as [queue]"
        )
    listed: list[QueueBase[Any, Any]] = []
    for each in queues:
        if not isinstance(each, QueueBase):
            stream = isinstance(each, StreamBase)
            remedy = "; pass a group of the stream: stream.consumer(name)" if stream else ""
            raise ConfigurationError(
                f"queues: expected queues and consumer groups, found {type(each).__name__}{remedy}"
            )
        if not runs_on(each, runner):
            raise ConfigurationError(
                f"queues: {each.name!r} belongs to another client; create it with this client"
            )
        if each.name in [one.name for one in listed]:
            raise ConfigurationError(f"queues: {each.name!r} is listed twice; list it once")
        listed.append(each)
    if not listed:
        raise ConfigurationError("queues: the list is empty; pass at least one queue")
    return listed


def _source(runner: RunnerBase, queue: QueueBase[Any, Any]) -> Source:
    plans: Any = backend_of(queue)
    waiting = runner.waiters(queue.name)

    def receive(limit: int) -> Plan[list[Reservation[Any]]]:
        received: Plan[list[Reservation[Any]]] = plans.receive(waiting, limit, timeout=0)
        return received

    if isinstance(plans, GroupPlans):
        return Source(
            queue.name,
            waiting,
            receive,
            give_back=plans.release,
            wake_time=lambda: stream_receiving.wake_time(
                plans.state, waiting, waiting.scan.limit, plans.options.poll
            ),
        )
    return Source(
        queue.name,
        waiting,
        receive,
        give_back=_give_back,
        wake_time=lambda: _wake_time(plans, waiting),
    )


def _wake_time(plans: QueuePlans, waiting: Waiters) -> Plan[datetime]:
    now = yield from ServerTime()
    poll_s = plans.options.poll * waiting.poll_share
    return (yield from receiving.wake_time(plans.queue, waiting.scan, now, poll_s))


def _give_back(held: Sequence[Reservation[Any]]) -> Plan[None]:
    """Return messages of a queue to their places, as if they had never been claimed."""
    plans: QueuePlans = held[0].carried.plans  # in the kind that the queue has
    packed = [each for each in held if isinstance(each, PackedReservation)]
    alone = [
        {"_id": each.id, "token": each.token, "due": each.when}
        for each in held
        if not isinstance(each, PackedReservation)
    ]
    if alone:
        yield from give_back(plans.queue, plans.kind, alone)
    if packed:
        yield from plans.release(packed)
