"""The table of contents: which plan is which operation of a queue.

``QueuePlans`` is plain data. It pickles, and a Spark executor can use it. Each operation passes the
values that its plan needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack

from pyqueue.backends import (
    extending,
    managing,
    moving,
    namespace,
    pack_managing,
    pack_pushing,
    pushing,
    reading,
    receiving,
    settling,
)
from pyqueue.backends import kind as kinds
from pyqueue.backends.invalid import Misfits
from pyqueue.backends.kind import Kind, ScanStart
from pyqueue.backends.moving import MoveOptions
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options, Target
from pyqueue.backends.pack_receiving import claims_of
from pyqueue.backends.pushing import PushOptions
from pyqueue.backends.receiving import Waiting
from pyqueue.backends.taking_kind import again_in_kind, await_kind, recorded_kind
from pyqueue.errors import ConfigurationError
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
from pyqueue.requests import EnsureQueue, Plan

__all__ = ["QueuePlans", "found", "found_target", "in_kind", "in_recorded_kind"]

P = ParamSpec("P")
T = TypeVar("T")


class ReceiveOptions(TypedDict, total=False):
    """The options of a receive; see ``Queue.reserve_many``."""

    max_bytes: int
    pop: bool
    lease: Duration | None
    misfits: Misfits | None


def _takes_kind(
    operation: Callable[Concatenate[QueuePlans, P], Plan[T]],
) -> Callable[Concatenate[QueuePlans, P], Plan[T]]:
    """Run an operation in the kind of the record if the plans have none."""

    @wraps(operation)
    def run(plans: QueuePlans, /, *args: P.args, **options: P.kwargs) -> Plan[T]:
        if plans.kind_name is not None:
            return operation(plans, *args, **options)
        # It may run again, so it must not use up what it is given.
        given: Any = tuple(map(_kept, args))
        named: Any = {name: _kept(value) for name, value in options.items()}
        return in_recorded_kind(plans, lambda found: operation(found, *given, **named))

    return run


def _kept(argument: object) -> object:
    return list(argument) if isinstance(argument, Iterator) else argument


class QueuePlans:
    """The plans of one queue.

    Args:
        queue: the name of the queue.
        options: what the Queue object does with its messages.
        codec: how payloads are stored; None: as they are.
        kind: the name of the kind of queue; None: the kind that its record has.
        owner: the label that claims carry, or a function that returns it: a fork may change it.
        command_timeout: the time limit of one command, in seconds. A pop that has to check its
            messages first claims them for that long.

    Raises:
        ConfigurationError: the kind is unknown, or does not offer a history and one is asked for.
    """

    __slots__ = ("codec", "command_timeout", "in_kinds", "kind_name", "options", "owner", "queue")

    def __init__(
        self,
        queue: str,
        options: Options,
        codec: Codec[Any] | None = None,
        *,
        kind: str | None = "standard",
        owner: str | Callable[[], str] = "",
        command_timeout: float = 30,
    ) -> None:
        self.queue = queue
        self.options = options
        self.codec: Codec[Any] = Codec() if codec is None else codec
        #: Returns the label that claims of this process carry.
        self.owner = partial(str, owner) if isinstance(owner, str) else owner
        self.command_timeout = command_timeout
        #: These plans in each kind that the record had, if they have none.
        self.in_kinds: dict[str, QueuePlans] = {}
        #: The name of the kind, or None.
        self.kind_name = None if kind is None else kinds.lookup(kind).name
        if self.kind_name is None:
            return  # the options are checked with the kind of the record
        if options.history is not None:
            kinds.require(self.kind, queue, "history")
        if (limit := options.shape.get("limit")) is not None:
            kinds.require_limit(self.kind, queue, stored_limit(limit))
        for name in options.shape:
            if name not in self.kind.shape and name != "limit":
                fits = [repr(each.name) for each in kinds.known().values() if name in each.shape]
                remedy = f": for a new queue, give kind={' or '.join(fits)}" if fits else ""
                raise ConfigurationError(
                    f"{name}: queue {queue!r} is of kind {kind!r}, which has no such option{remedy}"
                )

    @property
    def kind(self) -> Kind:
        """The kind; of plans without one, the kind of a new queue. See ``found``."""
        return kinds.lookup(self.kind_name or GUESSED_KIND)

    @property
    def target(self) -> Target:
        """This queue as the target of a move."""
        return Target(self.queue, self.kind, self.codec, self.options)

    # ---- in

    @_takes_kind
    def push(
        self, payloads: Iterable[Any], **options: Unpack[PushOptions]
    ) -> Plan[list[Id | None]]:
        """Push messages. Return their ids, with None for each that a taken key kept out."""
        push = pack_pushing.push if _packs(self.kind) else pushing.push
        return push(self.queue, self.kind, self.codec, self.options, payloads, **options)

    # ---- out

    def receive(
        self,
        waiting: Waiting,
        limit: int,
        *,
        timeout: Duration | None,
        **how: Unpack[ReceiveOptions],
    ) -> Plan[list[Any]]:
        """Receive up to ``limit`` messages; wait for the first one up to ``timeout``."""
        if self.kind_name is None:
            return again_in_kind(
                [self.queue], lambda: _await_and_receive(self, waiting, limit, timeout, how)
            )
        if how.get("pop"):
            kinds.require(self.kind, self.queue, "pop")
        return receiving.receive(
            self.queue,
            self.kind,
            self.codec,
            self.options,
            waiting,
            limit,
            owner=self.owner(),
            command_timeout_s=self.command_timeout,
            timeout=timeout,
            claims=claims_of(waiting.stock) if _packs(self.kind) else None,
            **how,
        )

    # ---- settled by the holder

    @_takes_kind
    def commit(
        self, held: Sequence[object], *, payload: Any = UNCHANGED, session: object = None
    ) -> Plan[None]:
        """Finish messages."""
        history_s = self.options.history
        return settling.commit(
            self.queue, self.kind, self.codec, history_s, held, payload=payload, session=session
        )

    @_takes_kind
    def rollback(
        self,
        held: Sequence[object],
        *,
        delay: Duration | None = None,
        error: BaseException | str | None = None,
        session: object = None,
    ) -> Plan[None]:
        """Give messages back for another try, and bury those that had their last try."""
        return settling.rollback(
            self.queue, self.kind, self.options, held, delay=delay, error=error, session=session
        )

    def extend(self, held: Sequence[object], *, lease: Duration | None = None) -> Plan[None]:
        """Hold messages for another lease, from now."""
        return extending.extend(self.queue, held, self.command_timeout, lease=lease)

    @_takes_kind
    def release(self, held: Sequence[object]) -> Plan[None]:
        """Give messages back unprocessed."""
        return settling.release(self.queue, self.kind, held)

    @_takes_kind
    def move(
        self,
        pairs: Sequence[tuple[object, Any]],
        *,
        to: QueuePlans | str,
        **options: Unpack[MoveOptions],
    ) -> Plan[None]:
        """Pass messages on to another queue. ``pairs``: a reservation and its payload."""
        if isinstance(to, str):
            return moving.move(self.queue, self.kind, pairs, to=to, **options)

        def move_into() -> Plan[None]:
            target = yield from found_target(to)
            yield from moving.move(self.queue, self.kind, pairs, to=target, **options)

        return move_into() if to.kind_name else again_in_kind([to.queue], move_into)

    @_takes_kind
    def bury(
        self, held: Sequence[object], *, error: BaseException | str | None = None
    ) -> Plan[None]:
        """Send messages to the dead-letter queue now."""
        return settling.bury(self.queue, self.kind, self.options.dead_letter, held, error=error)

    def progress(self, held: object, fraction: float, note: str | None = None) -> Plan[None]:
        """Store how far the work on a message is."""
        return settling.progress(self.queue, held, fraction, note)

    def checkpoint(self, held: object, state: Any) -> Plan[None]:
        """Store a state for the next try."""
        return settling.checkpoint(self.queue, held, state)

    # ---- by anyone

    @_takes_kind
    def redrive(self, limit: int | None = None) -> Plan[int]:
        """Send dead messages back to the queues that they came from."""
        return managing.redrive(self.queue, self.kind, limit)

    @_takes_kind
    def remove(self, id: Id) -> Plan[bool]:
        """Remove a message that is not held."""
        if _packs(self.kind):
            return pack_managing.remove(self.queue, self.kind, id)
        return managing.remove(self.queue, self.kind, self.options.history, id)

    @_takes_kind
    def purge(self) -> Plan[int]:
        """Delete the messages that are ready or scheduled."""
        if _packs(self.kind):
            return pack_managing.purge(self.queue, self.kind)
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
        return namespace.paused(self.queue)

    @_takes_kind
    def get(self, id: Id) -> Plan[Message[Any] | None]:
        """Return the message with this id, in any state."""
        if _packs(self.kind):
            return pack_managing.get(self.queue, self.codec, id)
        return reading.get(self.queue, self.codec, id)

    @_takes_kind
    def peek(self, limit: int = 10) -> Plan[list[Message[Any]]]:
        """Return the messages that would be received next."""
        if _packs(self.kind):
            return pack_managing.peek(self.queue, self.kind, self.codec, limit)
        return reading.peek(self.queue, self.kind, self.codec, limit)

    @_takes_kind
    def counts(self, cap: int | None = None) -> Plan[Counts]:
        """Count the messages by state."""
        if _packs(self.kind):
            return pack_managing.counts(self.queue, cap)
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


# ---- in the kind of the record


def found(plans: QueuePlans, *, names: bool = False) -> Plan[QueuePlans]:
    """Return plans in the kind that the queue has; without a record it is guessed. Make no record.

    Args:
        plans: the plans of a queue.
        names: whether the result counts as plans whose kind was named.

    Raises:
        ConfigurationError: it is a stream, or the kind does not offer an option.
    """
    if plans.kind_name is not None:
        return plans
    stored = yield from recorded_kind(plans.queue)
    return in_kind(plans, stored or GUESSED_KIND, names)


def found_target(plans: QueuePlans) -> Plan[Target]:
    """Return a queue as the target of a move, in the kind that it has.

    Raises:
        TargetRefused: it is a stream.
    """
    if plans.kind_name is not None:
        return plans.target
    stored = yield from EnsureQueue(plans.queue, None)
    kind = namespace.target_kind(plans.queue, stored or GUESSED_KIND)
    return in_kind(plans, kind.name).target


def in_kind(plans: QueuePlans, kind: str, names: bool = False) -> QueuePlans:
    """Return plans that have no kind as plans of a kind. ``names`` as in ``found``."""
    known = None if names else plans.in_kinds.get(kind)
    if known is not None:
        return known
    options = replace(plans.options, names_kind=names)
    owner, timeout_s = plans.owner, plans.command_timeout
    made = QueuePlans(
        plans.queue, options, plans.codec, kind=kind, owner=owner, command_timeout=timeout_s
    )
    if not names:
        plans.in_kinds[kind] = made
    return made


def in_recorded_kind(plans: QueuePlans, operation: Callable[[QueuePlans], Plan[T]]) -> Plan[T]:
    """Run an operation in the kind that the queue has."""

    def run() -> Plan[T]:
        return (yield from operation((yield from found(plans))))

    return run() if plans.kind_name is not None else again_in_kind([plans.queue], run)


def _await_and_receive(
    plans: QueuePlans,
    waiting: Waiting,
    limit: int,
    timeout: Duration | None,
    how: ReceiveOptions,
) -> Plan[list[Any]]:
    """Receive in the kind of the record. Without a record, wait for one first."""
    most = how.get("max_bytes", MAX_RECEIVED_BYTES)
    timeout_s, _ = receiving.checked(limit, most, timeout, how.get("lease"))
    kind, left_s = yield from await_kind(plans.queue, plans.options, waiting, timeout_s)
    if not kind:
        return []
    return (yield from in_kind(plans, kind).receive(waiting, limit, timeout=left_s, **how))


def _packs(kind: Kind) -> bool:
    """Return whether messages of a queue may share documents."""
    return "packs" in kind.capabilities
