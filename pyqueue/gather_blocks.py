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
from pyqueue.runtime.plan_runner import AsyncPlanRunner, PlanRunner

log = logging.getLogger("pyqueue")


@contextmanager
def gathered(runner: PlanRunner, then: object, dead: object) -> Iterator[Gather]:
    """Gather the messages that a block of ``Client.gather`` pushes."""
    gather, begin = _begun(then, dead)
    runner.run(begin)
    gather.home = (runner.namespace, runner.store)  # of an embedded server, only known now
    try:
        yield gather
    except BaseException:
        gather.sealed = True
        try:
            runner.run(gathering.give_up(gather.id))
        except QueueError as failure:  # the exception of the block matters more
            _log_left(gather, failure)
        raise
    gather.sealed = True
    runner.run(_sealing(gather))


@asynccontextmanager
async def gathered_async(
    runner: AsyncPlanRunner, then: object, dead: object
) -> AsyncIterator[Gather]:
    """Gather the messages that a block of ``AsyncClient.gather`` pushes."""
    gather, begin = _begun(then, dead)
    await runner.run(begin)
    gather.home = (runner.namespace, runner.store)  # of an embedded server, only known now
    try:
        yield gather
    except BaseException:
        gather.sealed = True
        try:
            with anyio.CancelScope(shield=True):
                await runner.run(gathering.give_up(gather.id))
        except QueueError as failure:  # the exception of the block matters more
            _log_left(gather, failure)
        raise
    gather.sealed = True
    await runner.run(_sealing(gather))


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


def _sealing(gather: Gather) -> Plan[None]:
    """Seal a gather at the end of its block.

    Raises:
        Unavailable: A push to the gather failed, so some of its messages may be missing.
    """
    if not gather.failed:
        yield from gathering.seal(gather.id)
        return
    yield from gathering.give_up(gather.id)
    raise Unavailable(
        f"gather: a push to it failed, so its message {gather.id} is not sent; messages that were "
        "pushed stay in their queues",
        ids=[gather.id],
    )


def _log_left(gather: Gather, error: BaseException) -> None:
    text = "gather %s: its record stays for a day, and its message is not sent: %s"
    log.warning(text, gather.id, error)
