"""Report the calls of a program to the hooks of its client.

Each function here wraps the plan of one call. The wrapper runs as part of the call, not in a batch
that calls share, so hooks are called in the caller's thread or task. Plans report the events that
they discover themselves, such as the burial of an invalid message, with ``Tell``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from pyqueue import arguments
from pyqueue.backends.also import AlsoPlans
from pyqueue.backends.pushing import PushOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.documents import hashable_id
from pyqueue.errors import ConfigurationError, DuplicateKey, InvalidName
from pyqueue.hooks import HookCalls, Pushing, Tell
from pyqueue.messages import Id, Reservation, is_last_try
from pyqueue.requests import MonotonicTime, Plan

M = TypeVar("M")

#: The internal verb of a rollback that does not count the try, and so buries no message. Hooks see
#: the verb "rollback".
POSTPONE: Final = "postpone"


def receiving(queue: str, plan: Plan[list[M]]) -> Plan[list[M]]:
    """Run a plan that receives messages, and report these messages."""
    began = yield from MonotonicTime()
    messages = yield from plan
    if messages:
        waited = (yield from MonotonicTime()) - began
        yield from Tell("received", queue, messages, waited=waited)
    return messages


# ---- pushes


def push(
    hooks: HookCalls, plans: QueuePlans | AlsoPlans, payloads: Sequence[Any], how: PushOptions
) -> Plan[list[Id | None]]:
    """Push messages, and call the hooks before and after."""
    own = how.get("labels") or [how.get("headers")] * len(payloads)
    if labels := _labels(hooks, plans.queue, payloads, own):
        how = {**how, "labels": labels}
    plan = plans.push(payloads, **how)
    return (yield from pushed(plans.queue, plan, how.get("session")))


def pushed(queue: str, plan: Plan[list[M]], session: Any = None) -> Plan[list[M]]:
    """Run a plan that pushes messages, and report these messages."""
    try:
        ids = yield from plan
    except GeneratorExit:  # the plan was dropped, and may yield no more requests
        raise
    except BaseException as error:
        yield _failed(queue, error, session)
        raise
    if ids:
        yield Tell("pushed", queue, ids, session=session)
    return ids


def append(
    hooks: HookCalls, plans: StreamPlans, payloads: Iterable[Any], headers: Any
) -> Plan[list[int]]:
    """Append messages to a stream, and call the hooks before and after."""
    given = arguments.payloads(payloads, "append()")
    labels = _labels(hooks, plans.stream, given, [headers] * len(given))
    try:
        positions = yield from plans.append(given, headers, labels)
    except GeneratorExit:  # the plan was dropped, and may yield no more requests
        raise
    except BaseException as error:
        yield _failed(plans.stream, error)
        raise
    if positions:
        yield Tell("pushed", plans.stream, [f"{plans.stream}~{each}" for each in positions])
    return positions


def _labels(
    hooks: HookCalls, queue: str, payloads: Sequence[Any], headers: Sequence[Any]
) -> list[Mapping[str, Any]] | None:
    """Let hooks change the headers of each message.

    Returns:
        The headers of each message, or None if no hook can change them.
    """
    if not payloads or not hooks.takes("pushing"):
        return None
    items = [
        Pushing(each, dict(arguments.headers(own) or {}))
        for each, own in zip(payloads, headers, strict=True)
    ]
    hooks.pushing(queue, items)
    return [each.headers for each in items]


def _failed(queue: str, error: BaseException, session: Any = None) -> Tell:
    """Return the event that reports a failed push."""
    written = error.written if isinstance(error, DuplicateKey) else []
    return Tell("pushed", queue, written, error=error, session=session)


# ---- settlements


def settling(plan: Plan[None], tells: Sequence[Tell], *, repeated: bool = False) -> Plan[None]:
    """Run a plan that settles messages, and report the settlement, with its error if it failed.

    A call that refuses its arguments has changed nothing, and is not reported.

    Args:
        plan: The plan that settles messages.
        tells: The events to report.
        repeated: Whether a cancelled caller runs the plan again. If so, only the repetition is
            reported.
    """
    try:
        yield from plan
    except (ConfigurationError, InvalidName, GeneratorExit):
        raise
    except BaseException as error:
        if repeated and not isinstance(error, Exception):
            raise
        for each in tells:
            each.error = error
            yield each
        raise
    for each in tells:
        yield each


def tells_of(
    plans: QueuePlans,
    verb: str,
    given: Iterable[object],
    session: Any = None,
    to: str | None = None,
) -> list[Tell]:
    """Return the events to report to hooks once reservations are settled.

    Args:
        plans: The plans of the queue or of the consumer group.
        verb: The verb of the settlement, such as "commit" or "rollback".
        given: The reservations, as the caller gave them.
        session: The session of the caller's transaction, or None.
        to: The name of the target of a move, or None.
    """
    held = {
        (hashable_id(each.id), each.token): each for each in given if isinstance(each, Reservation)
    }
    options = plans.options
    kinds: dict[str, list[Reservation[Any]]] = {}
    for each in held.values():
        last = verb == "rollback" and is_last_try(each, options.max_tries)
        kinds.setdefault("bury" if last else verb, []).append(each)
    return [
        Tell(
            "settled",
            plans.queue,
            some,
            verb="rollback" if kind == POSTPONE else kind,
            to=options.dead_letter if kind == "bury" else to,
            session=session,
        )
        for kind, some in kinds.items()
    ]


def tell_lost(hooks: HookCalls | None, queue: str, held: Sequence[Reservation[Any]]) -> None:
    """Report reservations that cannot be settled, because a renewal found their leases lost."""
    if hooks is not None and held:
        hooks.tell(Tell("settled", queue, held, verb="lost"))
