"""The operations of a queue, each as a plan: a sequence of requests to the server.

``QueuePlans`` is plain data: it can be pickled, and a Spark executor can use it. A kind may
register a class with other plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from pyqueue.backends import (
    extending,
    managing,
    moving,
    namespace,
    popping,
    pushing,
    reading,
    receiving,
    settling,
)
from pyqueue.backends import kind as kinds
from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.kind import Kind, ScanStart
from pyqueue.backends.moving import MoveOptions
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options, QueueTerms, Target
from pyqueue.backends.pushing import PushOptions
from pyqueue.backends.receiving import Claims, ReceiveOptions, Waiting
from pyqueue.backends.taking_kind import (
    again_in_kind,
    asking_for_kind,
    await_kind,
    recorded_kind,
)
from pyqueue.backends.uses import AUTO_DELETE
from pyqueue.carried import carrying
from pyqueue.errors import ConfigurationError, OtherKind
from pyqueue.limits import stored_limit
from pyqueue.messages import (
    MAX_RECEIVED_BYTES,
    UNCHANGED,
    Counts,
    Duration,
    Finished,
    Id,
    Message,
)
from pyqueue.payloads import Codec
from pyqueue.requests import ForgetQueue, Plan

P = ParamSpec("P")
T = TypeVar("T")


def _takes_kind(
    operation: Callable[Concatenate[QueuePlans, P], Plan[T]],
) -> Callable[Concatenate[QueuePlans, P], Plan[T]]:
    """Let an operation use the kind in the queue's record if the plans name no kind."""

    @wraps(operation)
    def run(plans: QueuePlans, /, *args: P.args, **options: P.kwargs) -> Plan[T]:
        if plans.kind_name is not None:
            return operation(plans, *args, **options)
        # The operation may run again, so it must not use up its arguments.
        given: Any = [_kept(each) for each in args]
        named: Any = {name: _kept(each) for name, each in options.items()}
        # The class of the kind may override the operation.
        return _in_known_kind(plans, lambda found: getattr(found, row)(*given, **named))

    row = operation.__name__
    return run


def _kept(argument: Any) -> Any:
    # Not isinstance with an ABC, which takes ten times as long.
    return list(argument) if hasattr(argument, "__next__") else argument


class QueuePlans:
    """The operations of one queue, each as a plan. ``plans_of`` creates an instance.

    Args:
        terms: The queue of a Queue object, with its options and its codec.
        names_kind: Whether the terms name the kind; if false, the kind is taken from the record.

    Raises:
        ConfigurationError: The kind does not support an option.
    """

    __slots__ = ("in_kinds", "kind_name", "terms")

    def __init__(self, terms: QueueTerms, *, names_kind: bool = True) -> None:
        self.terms = terms
        #: The plans for each kind that the record had, if these plans have no kind.
        self.in_kinds: dict[str, QueuePlans] = {}
        #: The name of the kind, or None.
        self.kind_name = terms.kind_name if names_kind else None
        if names_kind:  # otherwise the options are checked with the kind of the record
            _check_options(terms)

    @property
    def queue(self) -> str:
        """The name of the queue."""
        return self.terms.queue

    @property
    def options(self) -> Options:
        """The options of the Queue object."""
        return self.terms.options

    @property
    def codec(self) -> Codec[Any]:
        """How payloads are stored."""
        return self.terms.codec

    @property
    def kind(self) -> Kind:
        """The kind; if the plans name no kind, the kind of a new queue. See ``found``."""
        return self.terms.kind

    @property
    def target(self) -> Target:
        """This queue as the target of a move."""
        return Target(self.queue, self.kind, self.codec, self.options)

    # ---- in

    @_takes_kind
    def push(
        self, payloads: Iterable[Any], **options: Unpack[PushOptions]
    ) -> Plan[list[Id | None]]:
        """Push messages. Return their ids, with None for each message that a taken key kept out."""
        if not options and isinstance(payloads, list) and len(payloads) == 1:
            return pushing.push_one(self.terms, payloads[0])
        return pushing.push(self.queue, self.kind, self.codec, self.options, payloads, **options)

    # ---- out

    def receive(
        self,
        waiting: Waiting,
        limit: int,
        **how: Unpack[ReceiveOptions],
    ) -> Plan[list[Any]]:
        """Receive up to ``limit`` messages; wait up to ``timeout`` for the first one."""
        if self.kind_name is None:
            return _in_known_kind(
                self,
                lambda found: found.receive(waiting, limit, **how),
                lambda: _await_and_receive(self, waiting, limit, how),
            )
        if how.get("pop"):
            kinds.require(self.kind, self.queue, "pop")
        claims = self.claims(waiting, pop=how.get("pop", False))
        plan = receiving.receive(self.terms, waiting, claims, limit, **how)
        return plan if how.get("pop") else carrying(self, plan)

    def claims(self, waiting: Waiting, *, pop: bool) -> Claims:
        """Return the functions that claim messages. ``waiting``: the client's waiting consumers."""
        return popping.POPS if pop else receiving.CLAIMS

    # ---- settled by the holder
    # These refuse invalid arguments when they are called, before the plan begins.

    @_takes_kind
    def commit(
        self,
        held: Sequence[object],
        *,
        payload: Any = UNCHANGED,
        result: Any = UNCHANGED,
        session: object = None,
    ) -> Plan[None]:
        """Finish messages."""
        return settling.commit(self.terms, held, payload=payload, result=result, session=session)

    @_takes_kind
    def rollback(self, held: Sequence[object], **options: Unpack[RollbackOptions]) -> Plan[None]:
        """Give messages back for another try, and bury messages that have no try left."""
        return settling.rollback(self.terms, held, **options)

    def extend(self, held: Sequence[object], *, lease: Duration | None = None) -> Plan[None]:
        """Renew the leases of messages, starting now."""
        return extending.extend(self.terms, held, lease=lease)

    @_takes_kind
    def release(self, held: Sequence[object], *, seen: bool = True) -> Plan[None]:
        """Give messages back unprocessed. ``seen``: whether a caller has received them."""
        return settling.release(self.terms, held, seen=seen)

    @_takes_kind
    def move(
        self,
        pairs: Sequence[tuple[object, Any]],
        *,
        to: QueuePlans | str,
        **options: Unpack[MoveOptions],
    ) -> Plan[None]:
        """Move messages to another queue. ``pairs``: reservations and payloads."""
        if isinstance(to, str):
            return moving.move(self.terms, pairs, to=to, **options)
        if to.kind_name is not None:
            return moving.move(self.terms, pairs, to=to.target, **options)

        def move_into() -> Plan[None]:
            target = yield from found_target(to)
            yield from moving.move(self.terms, pairs, to=target, **options)

        return again_in_kind([to.queue], move_into)

    @_takes_kind
    def bury(
        self, held: Sequence[object], *, error: BaseException | str | None = None
    ) -> Plan[None]:
        """Send messages to the dead-letter queue now."""
        return settling.bury(self.terms, held, error=error)

    def progress(self, held: object, fraction: float, note: str | None = None) -> Plan[None]:
        """Store the progress of the work on a message."""
        return settling.progress(self.queue, held, fraction, note)

    def checkpoint(self, held: object, state: Any) -> Plan[None]:
        """Store the state of the work on a message for its next try."""
        return settling.checkpoint(self.queue, held, state)

    # ---- by anyone

    @_takes_kind
    def redrive(self, limit: int | None = None) -> Plan[int]:
        """Send dead messages back to the queues that they came from."""
        return managing.redrive(self.queue, self.kind, limit)

    @_takes_kind
    def remove(self, id: Id) -> Plan[bool]:
        """Remove a message that is not held."""
        return managing.remove(self.queue, self.kind, self.options.history, id)

    @_takes_kind
    def purge(self) -> Plan[int]:
        """Delete the messages that are ready or scheduled."""
        return managing.purge(self.queue, self.kind)

    @_takes_kind
    def replay(self, ids: Sequence[Id]) -> Plan[int]:
        """Make finished messages ready again."""
        return managing.replay(self.queue, self.kind, ids)

    @_takes_kind
    def pause(self, value: bool) -> Plan[None]:
        """Pause the consumers of every process, or resume them."""
        return managing.pause(self.queue, self.kind, self.options, value)

    def paused(self) -> Plan[bool]:
        """Return whether the queue is paused."""
        return managing.paused(self.queue)

    @_takes_kind
    def get(self, id: Id) -> Plan[Message[Any] | None]:
        """Return the message with this id, in any state."""
        return reading.get(self.queue, self.codec, id)

    @_takes_kind
    def peek(self, limit: int = 10) -> Plan[list[Message[Any]]]:
        """Return the messages that would be received next."""
        return reading.peek(self.queue, self.kind, self.codec, limit)

    @_takes_kind
    def counts(self, cap: int | None = None) -> Plan[Counts]:
        """Count the messages by state."""
        return reading.counts(self.queue, cap)

    def next_when(self, start: ScanStart | None = None) -> Plan[datetime | None]:
        """Return the earliest ``when`` of the live messages."""
        return reading.next_when(self.queue, start)

    @_takes_kind
    def history(
        self, limit: int = 100, *, since: datetime | None = None
    ) -> Plan[list[Finished[Any]]]:
        """Return the finished messages, newest first."""
        return reading.history(self.queue, self.kind, self.codec, limit, since)


# ---- the tables of the kinds

_tables: dict[str, type[QueuePlans]] = {}


def register(kind: str, table: type[QueuePlans]) -> None:
    """Register the class that a kind uses in place of ``QueuePlans``."""
    _tables[kind] = table


def plans_of(
    queue: str,
    options: Options,
    codec: Codec[Any] | None = None,
    *,
    kind: str | None = "standard",
    owner: str | Callable[[], str] = "",
    command_timeout: float = 30,
) -> QueuePlans:
    """Return the plans of a queue.

    Args:
        queue: The name of the queue.
        options: How the Queue object handles its messages.
        codec: How payloads are stored, or None to store them unchanged.
        kind: The name of the kind of queue, or None for the kind in the queue's record.
        owner: The label that claims carry, or a function that returns the label, because a fork
            may change it.
        command_timeout: The time limit of one command, in seconds. A pop that must check its
            messages claims them for that long.

    Raises:
        ConfigurationError: The kind is unknown, or does not support an option.
    """
    name = GUESSED_KIND if kind is None else kinds.lookup(kind).name
    label = partial(str, owner) if isinstance(owner, str) else owner
    terms = QueueTerms(
        queue, name, codec or Codec(), options, label, command_timeout_s=command_timeout
    )
    return _in_terms(terms) if kind is not None else QueuePlans(terms, names_kind=False)


def _in_terms(terms: QueueTerms) -> QueuePlans:
    return _tables.get(terms.kind_name, QueuePlans)(terms)


def _check_options(terms: QueueTerms) -> None:
    """Refuse options that the kind does not support.

    Raises:
        ConfigurationError: The kind does not support one of the options.
    """
    queue, kind, shape = terms.queue, terms.kind, terms.options.shape
    if terms.options.history is not None:
        kinds.require(kind, queue, "history")
    if (limit := shape.get("limit")) is not None:
        kinds.require_limit(kind, queue, stored_limit(limit))
    for name in shape:
        if name not in kind.shape and name not in ("limit", AUTO_DELETE):
            fits = [repr(each.name) for each in kinds.known().values() if name in each.shape]
            remedy = f"; for a new queue, set kind={' or '.join(fits)}" if fits else ""
            raise ConfigurationError(
                f"{name}: queue {queue!r} is of kind {kind.name!r}, which has no such "
                f"option{remedy}"
            )


# ---- in the kind of the record


def found(plans: QueuePlans, *, names: bool = False) -> Plan[QueuePlans]:
    """Return the plans for the recorded or guessed kind of the queue. Create no record.

    Args:
        plans: The plans of a queue.
        names: Whether the returned plans count as if the caller had named the kind.

    Raises:
        ConfigurationError: The queue is a stream, or the kind does not support an option.
    """
    if plans.kind_name is not None:
        return plans
    stored = yield from recorded_kind(plans.queue)
    return in_kind(plans, stored or GUESSED_KIND, names)


def found_target(plans: QueuePlans) -> Plan[Target]:
    """Return a queue as the target of a move, with the kind in its record.

    Raises:
        TargetRefused: The queue is a stream.
    """
    if plans.kind_name is not None:
        return plans.target
    stored = yield from asking_for_kind(plans.queue)
    kind = namespace.target_kind(plans.queue, stored or GUESSED_KIND)
    return in_kind(plans, kind.name).target


def in_kind(plans: QueuePlans, kind: str, names: bool = False) -> QueuePlans:
    """Return plans with this kind, given plans that name no kind. ``names``: as for ``found``."""
    known = None if names else plans.in_kinds.get(kind)
    if known is not None:
        return known
    options = replace(plans.options, names_kind=names)
    made = _in_terms(replace(plans.terms, kind_name=kinds.lookup(kind).name, options=options))
    if not names:
        plans.in_kinds[kind] = made
    return made


def in_recorded_kind(plans: QueuePlans, operation: Callable[[QueuePlans], Plan[T]]) -> Plan[T]:
    """Run an operation with plans for the kind that the queue has."""
    return operation(plans) if plans.kind_name is not None else _in_known_kind(plans, operation)


def _in_known_kind(
    plans: QueuePlans,
    operation: Callable[[QueuePlans], Plan[T]],
    otherwise: Callable[[], Plan[T]] | None = None,
) -> Plan[T]:
    """Run an operation of plans that name no kind. This is faster if the kind is remembered.

    Args:
        plans: The plans without a kind.
        operation: Returns the plan of the operation, given the plans for a kind.
        otherwise: Returns the plan to run if the kind is unknown or has changed. If None, the
            kind is found first, and then ``operation`` runs.
    """
    same = None
    if plans.in_kinds:  # else the kind would be asked for twice
        same = plans.in_kinds.get((yield asking_for_kind(plans.terms.queue)))
    if same is not None:
        try:
            return (yield from operation(same))
        except OtherKind as error:
            if error.queue != plans.queue:
                raise
            yield from ForgetQueue(error.queue)
    run = otherwise or partial(_in_found_kind, plans, operation)
    return (yield from again_in_kind([plans.queue], run))


def _in_found_kind(plans: QueuePlans, operation: Callable[[QueuePlans], Plan[T]]) -> Plan[T]:
    """Find the kind of the queue, and run an operation with plans for that kind."""
    return (yield from operation((yield from found(plans))))


def _await_and_receive(
    plans: QueuePlans, waiting: Waiting, limit: int, how: ReceiveOptions
) -> Plan[list[Any]]:
    """Receive with plans for the kind in the record. If there is no record, first wait for it."""
    most = how.get("max_bytes", MAX_RECEIVED_BYTES)
    timeout_s, _ = receiving.checked(limit, most, how["timeout"], how.get("lease"))
    kind, left_s = yield from await_kind(plans.queue, plans.options, waiting, timeout_s)
    if not kind:
        return []
    rest: ReceiveOptions = {**how, "timeout": left_s}
    return (yield from in_kind(plans, kind).receive(waiting, limit, **rest))
