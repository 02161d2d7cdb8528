"""The table of contents: which plan is which operation of a queue.

``QueuePlans`` is plain data. It pickles, and a Spark executor can use it. Each operation passes the
values that its plan needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Unpack

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
from pyqueue.backends.options import Options, Target
from pyqueue.backends.pack_receiving import claims_of
from pyqueue.backends.pushing import PushOptions
from pyqueue.backends.receiving import Waiting
from pyqueue.errors import ConfigurationError
from pyqueue.limits import stored_limit
from pyqueue.messages import MAX_RECEIVED_BYTES, UNCHANGED, Counts, Finished, Id, Message
from pyqueue.payloads import Codec
from pyqueue.requests import Plan

__all__ = ["QueuePlans"]

Duration = float | timedelta


class QueuePlans:
    """The plans of one queue.

    Args:
        queue: the name of the queue.
        options: what the Queue object does with its messages.
        codec: how payloads are stored; None: as they are.
        kind: the name of the kind of queue.
        owner: the label that claims carry, or a function that returns it: a fork may change it.
        command_timeout: the time limit of one command, in seconds. A pop that has to check its
            messages first claims them for that long.

    Raises:
        ConfigurationError: the kind is unknown, or does not offer a history and one is asked for.
    """

    __slots__ = ("_kind", "codec", "command_timeout", "options", "owner", "queue")

    def __init__(
        self,
        queue: str,
        options: Options,
        codec: Codec[Any] | None = None,
        *,
        kind: str = "standard",
        owner: str | Callable[[], str] = "",
        command_timeout: float = 30,
    ) -> None:
        self.queue = queue
        self.options = options
        self.codec: Codec[Any] = Codec() if codec is None else codec
        #: Returns the label that claims of this process carry.
        self.owner = partial(str, owner) if isinstance(owner, str) else owner
        self.command_timeout = command_timeout
        self._kind = kinds.lookup(kind).name
        if options.history is not None:
            kinds.require(self.kind, queue, "history")
        if (limit := options.shape.get("limit")) is not None:
            kinds.require_limit(self.kind, queue, stored_limit(limit))
        for name in options.shape:
            if name not in self.kind.shape and name != "limit":
                raise ConfigurationError(
                    f"{name}: queue {queue!r} is of kind {kind!r}, which has no such option"
                )

    @property
    def kind(self) -> Kind:
        """The kind of the queue."""
        return kinds.lookup(self._kind)

    @property
    def target(self) -> Target:
        """This queue as the target of a move."""
        return Target(self.queue, self.kind, self.codec, self.options)

    # ---- in

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
        max_bytes: int = MAX_RECEIVED_BYTES,
        pop: bool = False,
        lease: Duration | None = None,
        misfits: Misfits | None = None,
    ) -> Plan[list[Any]]:
        """Receive up to ``limit`` messages; wait for the first one up to ``timeout``."""
        if pop:
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
            max_bytes=max_bytes,
            pop=pop,
            lease=lease,
            misfits=misfits,
            claims=claims_of(waiting.stock) if _packs(self.kind) else None,
        )

    # ---- settled by the holder

    def commit(
        self, held: Sequence[object], *, payload: Any = UNCHANGED, session: object = None
    ) -> Plan[None]:
        """Finish messages."""
        history_s = self.options.history
        return settling.commit(
            self.queue, self.kind, self.codec, history_s, held, payload=payload, session=session
        )

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

    def release(self, held: Sequence[object]) -> Plan[None]:
        """Give messages back unprocessed."""
        return settling.release(self.queue, self.kind, held)

    def move(
        self,
        pairs: Sequence[tuple[object, Any]],
        *,
        to: QueuePlans | str,
        **options: Unpack[MoveOptions],
    ) -> Plan[None]:
        """Pass messages on to another queue. ``pairs``: a reservation and its payload."""
        target = to if isinstance(to, str) else to.target
        return moving.move(self.queue, self.kind, pairs, to=target, **options)

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

    def redrive(self, limit: int | None = None) -> Plan[int]:
        """Send dead messages back to the queues that they came from."""
        return managing.redrive(self.queue, self.kind, limit)

    def remove(self, id: Id) -> Plan[bool]:
        """Remove a message that is not held."""
        if _packs(self.kind):
            return pack_managing.remove(self.queue, self.kind, id)
        return managing.remove(self.queue, self.kind, self.options.history, id)

    def purge(self) -> Plan[int]:
        """Delete the messages that are ready or scheduled."""
        if _packs(self.kind):
            return pack_managing.purge(self.queue, self.kind)
        return managing.purge(self.queue, self.kind)

    def replay(self, ids: Sequence[Id]) -> Plan[int]:
        """Make finished messages ready again."""
        return managing.replay(self.queue, self.kind, ids)

    def pause(self, value: bool) -> Plan[None]:
        """Pause the consumers of every process, or resume them."""
        return managing.pause(self.queue, self.kind, self.options, value)

    def paused(self) -> Plan[bool]:
        """Return whether the queue is paused."""
        return namespace.paused(self.queue)

    def notify(self) -> Plan[None]:
        """Wake waiting consumers."""
        return managing.notify(self.queue)

    def get(self, id: Id) -> Plan[Message[Any] | None]:
        """Return the message with this id, in any state."""
        if _packs(self.kind):
            return pack_managing.get(self.queue, self.codec, id)
        return reading.get(self.queue, self.codec, id)

    def peek(self, limit: int = 10) -> Plan[list[Message[Any]]]:
        """Return the messages that would be received next."""
        if _packs(self.kind):
            return pack_managing.peek(self.queue, self.kind, self.codec, limit)
        return reading.peek(self.queue, self.kind, self.codec, limit)

    def counts(self, cap: int | None = None) -> Plan[Counts]:
        """Count the messages by state."""
        if _packs(self.kind):
            return pack_managing.counts(self.queue, cap)
        return reading.counts(self.queue, cap)

    def next_when(self, start: ScanStart | None = None) -> Plan[datetime | None]:
        """Return the earliest ``when`` of the live messages."""
        return reading.next_when(self.queue, start)

    def history(
        self, limit: int = 100, *, since: datetime | None = None
    ) -> Plan[list[Finished[Any]]]:
        """Return the finished messages, newest first."""
        return reading.history(self.queue, self.kind, self.codec, limit, since)


def _packs(kind: Kind) -> bool:
    """Return whether messages of a queue may share documents."""
    return "packs" in kind.capabilities
