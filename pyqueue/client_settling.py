"""How a client settles reservations of any of its queues and consumer groups.

A reservation carries the options of its queue; see ``carried``. So each message is settled as the
``Queue`` that received it would settle it. Only reservations that an older release pickled carry no
options. For them, some of the options are read from the stored record of the queue.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from pyqueue import arguments, telling
from pyqueue.backends.applying import check_time_left
from pyqueue.backends.forms import RollbackOptions, each_part
from pyqueue.backends.moving import MoveOptions, check_key
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, found, plans_of
from pyqueue.backends.reading import options_of
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.carried import Carried, CarriedOptions
from pyqueue.documents import hashable_id
from pyqueue.errors import QueueError
from pyqueue.messages import Duration, Reservation, StreamReservation
from pyqueue.payloads import Codec
from pyqueue.queue_base import target_of, without_renewal
from pyqueue.requests import Plan, ServerTime
from pyqueue.runtime.connecting import BaseConnection

Held = Sequence[Reservation[Any]]
#: Returns the plan that settles reservations of one queue. Some verbs check arguments in this call.
Settle = Callable[[QueuePlans, Held], Plan[None]]


class Verb(NamedTuple):
    """One way to settle reservations, such as a commit or a move."""

    #: The name of the verb for hooks, or None if the messages stay held and hooks are not called.
    name: str | None
    settle: Settle
    session: object = None
    #: The target of a move, for hooks.
    to: str | None = None
    #: Called for each queue before any message is settled, to check the arguments.
    check: Settle | None = None


def commit(
    connection: BaseConnection[Any], given: Held, payload: Any, result: Any, session: Any
) -> Plan[None]:
    """Finish messages."""

    def settle(plans: QueuePlans, held: Held) -> Plan[None]:
        return plans.commit(held, payload=payload, result=result, session=session)

    return _settled(connection, given, Verb("commit", settle, session))


def rollback(connection: BaseConnection[Any], given: Held, how: RollbackOptions) -> Plan[None]:
    """Give messages back for another try, and bury messages that have no try left."""

    def settle(plans: QueuePlans, held: Held) -> Plan[None]:
        return plans.rollback(held, **how)

    name = "rollback" if how.get("counted", True) else telling.POSTPONE
    return _settled(connection, given, Verb(name, settle, how.get("session")))


def release(connection: BaseConnection[Any], given: Held) -> Plan[None]:
    """Return messages to their queues unprocessed."""
    return _settled(connection, given, Verb("release", lambda plans, held: plans.release(held)))


def extend(connection: BaseConnection[Any], given: Held, lease: Duration | None) -> Plan[None]:
    """Renew the leases of messages, starting now."""
    verb = Verb(None, lambda plans, held: plans.extend(held, lease=lease))
    return _settled(connection, given, verb)


def bury(
    connection: BaseConnection[Any], given: Held, error: BaseException | str | None
) -> Plan[None]:
    """Send messages to the dead-letter queues of their queues now."""
    verb = Verb("bury", lambda plans, held: plans.bury(held, error=error))
    return _settled(connection, given, verb)


def move(
    connection: BaseConnection[Any], given: Held, to: object, payload: Any, edits: MoveOptions
) -> Plan[None]:
    """Move messages to another queue."""
    target = target_of(to, connection)
    check_key(edits.get("key"), _unique(given))

    def moving(to: QueuePlans | str) -> Settle:
        return lambda plans, held: plans.move([(each, payload) for each in held], to=to, **edits)

    verb = Verb("move", moving(target), edits.get("session"))
    if isinstance(target, str):
        verb = verb._replace(to=target)
    else:
        # Plans without a kind check their arguments only once they know the kind.
        verb = verb._replace(to=target.queue, check=moving((yield from found(target))))
    yield from _settled(connection, given, verb)


# ---- the plans of a reservation's queue


def _settled(connection: BaseConnection[Any], given: Held, verb: Verb) -> Plan[None]:
    """Check the arguments for all queues, and then settle the reservations, queue by queue.

    Raises:
        LeaseLost: Some messages were no longer held; the other messages were settled.
    """
    arguments.session(verb.session)
    alike: dict[Hashable, list[Reservation[Any]]] = {}
    for each in _unique(given):
        carried: Carried | None = each.carried
        key = (each.queue, _group(each), None if carried is None else carried.key)
        alike.setdefault(key, []).append(each)
    parts: list[tuple[Plan[None], list[Reservation[Any]]]] = []
    for held in alike.values():
        plans = yield from _plans_of(connection, held[0])
        if verb.check is not None:
            verb.check(plans, held)
        parts.append((_told(connection, plans, held, verb), held))
    if len(parts) == 1:
        yield from parts[0][0]
        return
    if verb.session is not None:
        now = yield from ServerTime()
        for _, held in parts:
            for each in held:
                check_time_left(each, now)
    yield from each_part(*parts)


def _told(connection: BaseConnection[Any], plans: QueuePlans, held: Held, verb: Verb) -> Plan[None]:
    """Return the plan that settles reservations of one queue, and tells the hooks about it."""
    plan, session = verb.settle(plans, held), verb.session
    if verb.name is None:
        return plan
    if connection.hooks is not None:
        tells = telling.tells_of(plans, verb.name, held, session, verb.to)
        plan = telling.settling(plan, tells)
    return without_renewal(connection.renewer, held, session, plan)


def _unique(given: Sequence[object]) -> list[Reservation[Any]]:
    """Return the given reservations without repetitions."""
    unique: dict[Hashable, Reservation[Any]] = {}
    for each in given:
        held = arguments.reservation(each)
        unique[held.queue, _group(held), hashable_id(held.id), held.token] = held
    return list(unique.values())


def _group(held: Reservation[Any]) -> str | None:
    """Return the consumer group of a reservation, or None for a reservation of a queue."""
    return held.group if isinstance(held, StreamReservation) else None


def _plans_of(connection: BaseConnection[Any], held: Reservation[Any]) -> Plan[QueuePlans]:
    """Return the plans of the queue or the consumer group that a reservation belongs to."""
    carried: Carried | None = held.carried
    if carried is not None and carried.plans is not None:
        plans: QueuePlans = carried.plans
        return plans
    options = None if carried is None else carried.options
    if isinstance(held, StreamReservation):
        return _group_plans(connection, held, options)
    if options is None:
        known = _checked(held.queue, (yield from options_of(held.queue)))
        plans = _queue_plans(connection, held.queue, known)
        return (yield from found(plans))
    return _queue_plans(connection, held.queue, _options(options), options)


def _queue_plans(
    connection: BaseConnection[Any],
    queue: str,
    options: Options,
    carried: CarriedOptions | None = None,
) -> QueuePlans:
    """Return the plans of a queue. Without ``carried``, the kind of the queue is not known yet."""
    return plans_of(
        queue,
        options,
        None if carried is None else _codec(carried.model),
        kind=None if carried is None else carried.kind,
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )


def _group_plans(
    connection: BaseConnection[Any], held: StreamReservation[Any], carried: CarriedOptions | None
) -> QueuePlans:
    """Return the plans of a consumer group. Without ``carried``, they use the default options."""
    stream, group = held.queue, held.group
    options = Options(dead_letter=f"{stream}.{group}.dead")
    model = None
    if carried is not None:
        options, model = _options(carried), carried.model
    plans = StreamPlans(
        stream,
        _codec(model),
        {},
        owner=connection.owner,
        command_timeout=connection.command_timeout,
    )
    # The plans have the same names as the plans of a queue.
    return cast("QueuePlans", plans.group(group, options, "first"))


def _options(carried: CarriedOptions) -> Options:
    return Options(
        max_tries=carried.max_tries,
        dead_letter=carried.dead_letter,
        history=carried.history,
        backoff=carried.backoff,
    )


def _checked(queue: str, shown: Mapping[str, Any]) -> Options:
    """Return the options in the record of a queue, or the defaults if some of them are invalid."""
    most, history, name = shown.get("max_tries", 20), shown.get("history"), shown.get("dead_letter")
    try:
        return Options(
            max_tries=None if most is None else arguments.count("max_tries", most),
            dead_letter=arguments.dead_letter(queue, name or None),
            history=None if history is None else arguments.duration("history", history),
        )
    except QueueError:
        return Options(dead_letter=arguments.dead_letter(queue, None))


@lru_cache(maxsize=128)
def _codec(model: bytes | None) -> Codec[Any]:
    """Return a codec for a pickled model, or one without a model if the model cannot be loaded."""
    try:
        return Codec(None if model is None else pickle.loads(model))
    except Exception:  # this process lacks the model's module, or pydantic
        return Codec()
