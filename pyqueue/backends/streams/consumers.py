"""The operations of one consumer group of a stream, and of all groups of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn, Unpack

from pyqueue import arguments
from pyqueue.backends.forms import RollbackOptions, each_part
from pyqueue.backends.invalid import Misfits
from pyqueue.backends.options import Options
from pyqueue.backends.settling import noted
from pyqueue.backends.streams import log, settling
from pyqueue.backends.streams.delivering import Terms
from pyqueue.backends.streams.ranges import Group, Step, group_id
from pyqueue.backends.streams.receiving import create, receive
from pyqueue.backends.streams.settling import GroupState, change, publish_left, reload
from pyqueue.carried import carrying
from pyqueue.errors import ConfigurationError
from pyqueue.messages import (
    MAX_RECEIVED_BYTES,
    UNCHANGED,
    ConsumerCounts,
    ConsumerInfo,
    StreamReservation,
    is_last_try,
)
from pyqueue.payloads import Codec
from pyqueue.requests import Delete, Document, Filter, Find, Plan, ServerTime, Signal

Duration = float | timedelta

#: Why a consumer group does not support an operation or argument, and the remedy, keyed by name.
_REFUSED: Final = {
    "move": "a message stays in its stream; push its payload to the queue, then commit",
    "progress": "a stream stores no progress; keep it in your own collection",
    "checkpoint": "a stream stores no checkpoints; keep them in your own collection",
    "session": "transactions are refused, because they would block the group; leave out session",
    "payload": "a message of a stream never changes; leave out payload",
    "result": "a stream stores no results, because its messages never change; leave out result",
    "pop": "a consumer group reserves messages; use reserve()",
}


def refusal(name: str) -> ConfigurationError:
    """Return the error for an operation or argument that a consumer group does not support."""
    return ConfigurationError(f"{name}: {_REFUSED[name]}")


class GroupPlans:
    """The operations of one consumer group. They have the same names as the operations of a queue.

    Args:
        stream: The name of the stream.
        group: The name of the group.
        options: How the group handles messages: lease, max_tries, dead_letter, backoff and poll.
        codec: How payloads are stored.
        start: Where the group begins if it does not exist yet.
        shape: The stream options that the caller gave. All users of the stream must agree on them.
        owner: Returns the label that reservations carry.
    """

    #: The kind, which is known without reading the record of the stream.
    kind_name: Final = "stream"

    def __init__(
        self,
        stream: str,
        group: str,
        options: Options,
        codec: Codec[Any],
        *,
        start: object,
        shape: Mapping[str, object],
        owner: Callable[[], str],
    ) -> None:
        self.stream = stream
        self.options = options
        self.codec = codec
        self.start = start
        self.shape = shape
        self.owner = owner
        self.state = GroupState(stream, group)
        self.queue = self.state.label

    # ---- received and settled

    def receive(
        self,
        waiting: Any,
        limit: int,
        *,
        timeout: Duration | None,
        max_bytes: int = MAX_RECEIVED_BYTES,
        pop: bool = False,
        lease: Duration | None = None,
        misfits: Misfits | None = None,
    ) -> Plan[list[Any]]:
        """Receive up to ``limit`` messages. Wait up to ``timeout`` for the first message."""
        if pop:
            raise refusal("pop")
        options = self.options
        lease_s = options.lease
        if lease is not None:
            lease_s = arguments.duration("lease", lease, positive=True)
        terms = Terms(
            state=self.state,
            start=self.start,
            codec=self.codec,
            lease_s=lease_s,
            max_tries=options.max_tries,
            dead_letter=options.dead_letter,
            owner=self.owner(),
            misfits=misfits or waiting.misfits,
            limit=waiting.scan.limit,
        )
        plan = receive(
            terms,
            waiting,
            limit,
            timeout=timeout,
            max_bytes=max_bytes,
            poll_s=options.poll,
            shape=self.shape,
        )
        return carrying(self, plan)

    def commit(
        self,
        held: Sequence[object],
        *,
        payload: Any = UNCHANGED,
        result: Any = UNCHANGED,
        session: object = None,
    ) -> Plan[None]:
        """Finish messages for this group. Other groups still receive them."""
        if session is not None:
            raise refusal("session")
        if payload is not UNCHANGED or result is not UNCHANGED:
            raise refusal("result" if payload is UNCHANGED else "payload")
        return settling.commit(self.state, held)

    def rollback(self, held: Sequence[object], **options: Unpack[RollbackOptions]) -> Plan[None]:
        """Return messages to the group for another try, or bury them if no try is left."""
        if options.get("session") is not None:
            raise refusal("session")
        given, own = settling.reservations(self.state, held), self.options
        delay_by_tries = settling.delay_by_tries(given, own.backoff, options.get("delay"))
        counted = arguments.flag("counted", options.get("counted", True))
        return self._roll_back(given, delay_by_tries, options.get("error"), counted)

    def _roll_back(
        self,
        given: Sequence[StreamReservation[Any]],
        delay_by_tries: Mapping[int, float],
        error: BaseException | str | None,
        counted: bool,
    ) -> Plan[None]:
        max_tries = self.options.max_tries if counted else None
        record = yield from noted(given, error)
        out_of_tries = [each for each in given if is_last_try(each, max_tries)]
        rest = [each for each in given if not is_last_try(each, max_tries)]
        returning = settling.rollback(self.state, rest, delay_by_tries, record, counted=counted)
        yield from each_part(
            (returning, rest), (self._bury(out_of_tries, "tries", error), out_of_tries)
        )

    def release(self, held: Sequence[object], *, seen: bool = True) -> Plan[None]:
        """Return messages to the group unprocessed. This try and this delivery do not count."""
        given = settling.reservations(self.state, held)
        delay_by_tries = {each.tries: 0.0 for each in given}
        yield from settling.rollback(self.state, given, delay_by_tries, None, counted=False)

    def bury(
        self, held: Sequence[object], *, error: BaseException | str | None = None
    ) -> Plan[None]:
        """Send messages to the dead-letter queue of the group now."""
        given = settling.reservations(self.state, held)
        yield from noted(given, error)
        yield from self._bury(given, "buried", error)

    def _bury(
        self, held: Sequence[Any], reason: str, error: BaseException | str | None
    ) -> Plan[None]:
        """Send messages to the dead-letter queue of the group, for this reason."""
        name = self.options.dead_letter
        yield from settling.bury(self.state, self.codec, name, held, reason, error=error)

    def extend(self, held: Sequence[object], *, lease: Duration | None = None) -> Plan[None]:
        """Renew the leases of messages, starting now."""
        return settling.extend(self.state, held, lease)

    @property
    def target(self) -> NoReturn:
        """Raise ConfigurationError, because a group cannot be the target of a move."""
        raise ConfigurationError(f"to: {self.queue!r} is a consumer group; name a queue")

    def move(self, *_: object, **options: object) -> NoReturn:
        """Raise ConfigurationError, because a message cannot leave its stream."""
        raise refusal("move")

    def progress(self, *_: object) -> NoReturn:
        """Raise ConfigurationError, because a stream stores no progress."""
        raise refusal("progress")

    def checkpoint(self, *_: object) -> NoReturn:
        """Raise ConfigurationError, because a stream stores no checkpoints."""
        raise refusal("checkpoint")

    # ---- the group

    def counts(self) -> Plan[ConsumerCounts]:
        """Count the messages that the group has not finished, by state."""
        first, end = yield from log.bounds(self.stream)
        group = yield from reload(self.state)
        if group is None:  # count as if the group were created now
            start = yield from log.position_at(self.stream, self.start)
            return ConsumerCounts(ready=max(0, end - start))
        return _counts(group, first, end, (yield from ServerTime()))

    def next_when(self) -> Plan[datetime | None]:
        """Return the earliest instant at which the group can receive a message.

        This may be the end of a lease. None means that the group has finished all messages.
        """
        found = yield from self.counts()  # this also reads the group
        group, now = self.state.seen, (yield from ServerTime())
        if found.ready or group is None:
            return now if found.ready else None
        return group.due()

    def pause(self, value: bool) -> Plan[None]:
        """Pause the consumers of the group in every process, or resume them."""
        yield from log.ensure(self.stream, self.shape)
        yield from create(self.state, self.start)
        yield from change(self.state, Step({}, {"$set": {"paused": value}}))
        yield from Signal(self.stream, None)

    def paused(self) -> Plan[bool]:
        """Return whether the group is paused."""
        group = yield from reload(self.state)
        return group is not None and group.paused

    def seek(self, position: object) -> Plan[int]:
        """Make the group continue at a position. All its leases end. Return the position."""
        yield from log.ensure(self.stream, self.shape)
        at = yield from log.position_at(self.stream, position)
        yield from create(self.state, at)
        put = {"next": at, "out": [], "back": []}
        if (yield from change(self.state, Step({}, {"$set": put}))) is None:
            yield from create(self.state, at)  # the group was just deleted
        yield from Signal(self.stream, None)
        return at


def _counts(group: Group, first: int, end: int, now: datetime) -> ConsumerCounts:
    """Count the messages of a group by state. ``first`` and ``end``: the bounds of the log."""
    held = sum(each.size for each in group.out if each.until > now)
    waiting = sum(each.size for each in group.back if each.until > now)
    retried = sum(each.size for each in (*group.out, *group.back) if each.until <= now)
    ready = max(0, end - max(first, group.next)) + retried
    skipped = group.skipped + max(0, first - group.next)
    return ConsumerCounts(ready=ready, scheduled=waiting, reserved=held, skipped=skipped)


# ---- all groups of a stream


def groups_filter(stream: str) -> Filter:
    """Return the filter that matches the consumer groups of a stream."""
    return {"_id": {"$gte": group_id(stream, ""), "$lt": f"~group:{stream}\x7f"}}


def groups(stream: str) -> Plan[list[ConsumerInfo]]:
    """Return the consumer groups of a stream, sorted by name."""
    first, end = yield from log.bounds(stream)
    now = yield from ServerTime()
    found = yield from Find(groups_filter(stream), sort=(("_id", 1),))
    return group_infos(stream, found, (first, end), now)


def group_infos(
    stream: str, documents: Sequence[Document], bounds: tuple[int, int], now: datetime
) -> list[ConsumerInfo]:
    """Return the consumer groups that these documents store."""
    infos: list[ConsumerInfo] = []
    for document in documents:
        group = Group.of(document)
        name = str(document["_id"]).removeprefix(group_id(stream, ""))
        infos.append(ConsumerInfo(name, group.next, _counts(group, *bounds, now), group.paused))
    return infos


def delete_group(stream: str, name: str) -> Plan[bool]:
    """Delete a group. Its holders get LeaseLost. Return whether the group existed."""
    state = GroupState(stream, arguments.group(name, "name"))
    while (group := (yield from reload(state))) is not None:
        if group.left:  # otherwise these dead letters would never be published
            yield from publish_left(state, group.left)
        elif (yield from Delete({"_id": state.id, "left": []})):
            yield from Signal(stream, None)
            return True
    return False
