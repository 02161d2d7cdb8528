"""The context managers of ``Client.gather``: they seal a gather when their block ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import anyio
from bson import ObjectId

from pyqueue import arguments
from pyqueue.backends import gathering
from pyqueue.backends.gathering import Route
from pyqueue.backends.moving import dump
from pyqueue.backends.pushing import Content
from pyqueue.delivery import To
from pyqueue.errors import ConfigurationError, QueueError, Unavailable
from pyqueue.facts import Gather
from pyqueue.messages import UNCHANGED
from pyqueue.payloads import Codec
from pyqueue.requests import Plan
from pyqueue.runtime.plan_runner import AsyncPlanRunner, PlanRunner, RunnerBase

log = logging.getLogger("pyqueue")


@contextmanager
def gathered(runner: PlanRunner, then: object, dead: object) -> Iterator[Gather]:
    """Gather the messages that a block of ``Client.gather`` pushes."""
    gather, begin = _begun(then, dead)
    runner.run(begin)
    try:
        yield _at_home(gather, runner)
    except BaseException:
        with _failed(gather) as plan:
            runner.run(plan)
        raise
    runner.run(_ended(gather))


@asynccontextmanager
async def gathered_async(
    runner: AsyncPlanRunner, then: object, dead: object
) -> AsyncIterator[Gather]:
    """Gather the messages that a block of ``AsyncClient.gather`` pushes."""
    gather, begin = _begun(then, dead)
    await runner.run(begin)
    try:
        yield _at_home(gather, runner)
    except BaseException:
        with _failed(gather) as plan, anyio.CancelScope(shield=True):
            await runner.run(plan)
        raise
    await runner.run(_ended(gather))


def _begun(then: object, dead: object) -> tuple[Gather, Plan[None]]:
    """Check the arguments of ``Client.gather``. Return the gather, and the plan that stores it."""
    if not isinstance(then, To):
        raise ConfigurationError(
            f"then: expected a To, found {type(then).__name__}; write then=To(queue, payload)"
        )
    if then.payload is UNCHANGED:
        raise ConfigurationError(
            "then: expected a To with a payload, found none; write then=To(queue, payload)"
        )
    arguments.queue_name(then.queue, "then")
    how: Any = arguments.one_of("dead", dead, ("hold", "end"))
    gather = Gather(ObjectId(), how)
    content = Content(
        None,
        dump(Codec[Any](), then.payload),
        then.headers,
        then.key,
        gather.id,
        priority=then.priority,
        group=then.group,
    )
    return gather, gathering.begin(content, Route(then.queue, then.delay, then.at))


# ---- shared by both


def _at_home(gather: Gather, runner: RunnerBase) -> Gather:
    """Bind a gather to the namespace and the database of its client, and return it."""
    gather.home = (runner.namespace, runner.store)  # of an embedded server, only known now
    return gather


@contextmanager
def _failed(gather: Gather) -> Iterator[Plan[None]]:
    """Close a gather whose block raised an exception, and yield the plan that deletes its record.

    If the plan fails, the error is only logged, because the exception of the block matters more.
    """
    gather.sealed = True
    try:
        yield gathering.give_up(gather.id)
    except QueueError as error:
        text = "gather %s: its record stays for a day, and its message is not sent: %s"
        log.warning(text, gather.id, error)


def _ended(gather: Gather) -> Plan[None]:
    """Close a gather to further messages, and return the plan that seals it in the database.

    Raises:
        Unavailable: A push to the gather failed, so some of its messages may be missing.
    """
    gather.sealed = True
    return gathering.seal(gather.id) if not gather.failed else _refused(gather)


def _refused(gather: Gather) -> Plan[None]:
    yield from gathering.give_up(gather.id)
    raise Unavailable(
        f"gather: a push to it failed, so its final message {gather.id} is not sent; the messages "
        "that were pushed stay in their queues",
        ids=[gather.id],
    )
