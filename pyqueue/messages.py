"""Messages, reservations, finished messages, counts and the options of a queue.

A message is a plain dataclass with slots. Creating a pydantic model takes about as long as a round
trip, so only payloads are validated. ``documents`` makes messages from stored documents.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Generic, Literal, TypedDict, TypeVar
from zoneinfo import ZoneInfo

from bson import ObjectId

from pyqueue.facts import Attempt, Burial, ErrorInfo, Gather, Keep, Progress, as_stored
from pyqueue.limits import Limit

T = TypeVar("T")

#: The id of a message: an ObjectId that the client made, or an id that the caller gave.
Id = ObjectId | str

#: The default maximum size of all messages that one call receives, in bytes.
MAX_RECEIVED_BYTES: Final = 48 * 2**20
#: The default maximum size of all messages of a claim, in bytes; see ``Queue.claim``.
MAX_BATCH_BYTES: Final = 64 * 2**20

#: The maximum number of messages in a pack, a document with many messages.
MAX_PACK: Final = 1000

#: Labels of a message. The values are str, int, float or bool. This is checked at run time, because
#: type checkers infer ``dict[str, object]`` for a literal with values of several types.
Headers = Mapping[str, object]

#: Seconds, or a timedelta.
Duration = float | timedelta

#: How an ordered group treats a failed message: the group waits for the next try, or continues.
OnFailure = Literal["block", "skip"]

#: The built-in kinds of queues. A program may register more.
KindName = Literal["standard", "priority", "ordered", "bucket"]

State = Literal["scheduled", "ready", "reserved", "finished", "dead"]

#: The result of ``Queue.cancel``: the message has ended, or its holder was asked to end it.
Cancelled = Literal["cancelled", "requested"]

#: The reason why a message waits although its time has come: a message of its group, or a limit.
Deferral = Literal["group", "limit"]

#: What a schedule does after ticks that no process handled in time: push one message for all of
#: them, none, or one for each.
Missed = Literal["once", "skip", "all"]

#: The time that is added to the ``when`` of a finished message. It moves the message out of the
#: range that claims scan, and keeps the order in which messages were finished.
KEPT: Final = timedelta(days=2_556_698)  # 7000 years
#: The same for a finished message that is kept for its message key only, above the history.
KEPT_BARE: Final = timedelta(days=2_739_319)  # 7500 years

#: The highest priority (the lowest is 0), and the default priority. Higher priorities go first.
HIGHEST_PRIORITY: Final = 9
DEFAULT_PRIORITY: Final = 4

#: How many past queues, and how many failed tries, are stored in a message.
TRAIL_LENGTH: Final = 20
MAX_ATTEMPTS: Final = 5

#: The ``when`` of a message whose stored ``when`` is missing.
NEVER: Final = datetime.max.replace(tzinfo=UTC)


class Unchanged:
    """The type of UNCHANGED, which means "keep the payload", because None is a valid payload."""

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __reduce__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged()


@dataclass(slots=True, eq=False)
class Message(Generic[T]):
    """A message, as it was when it was read."""

    id: Id
    #: The name of the queue that contains the message.
    queue: str
    payload: T
    #: The labels that the caller gave, or {}.
    headers: dict[str, str | int | float | bool]
    #: The message key. A finished or dead message shows the key that it had.
    key: str | None
    #: When the message became, or becomes, eligible.
    when: datetime
    #: When the message was first pushed.
    pushed: datetime
    #: How many times the message was reserved from this queue, this time included.
    tries: int
    #: The error of the most recent failed try, or None.
    error: ErrorInfo | None
    #: The last progress that a holder stored.
    progress: Progress | None
    #: The state that an earlier try stored with ``Queue.checkpoint``.
    checkpoint: Any
    #: The last 20 queues that the message passed through, each as a dict: ``q`` (its name), ``in``
    #: and ``out`` (the instants when the message came and left), ``tries``, and ``waited`` (seconds
    #: from eligible to the last claim there). Unknown values are None. ``at`` equals ``out``.
    trail: list[dict[str, Any]]
    #: "scheduled", "ready", "reserved" or "finished". For a message in a dead-letter queue,
    #: ``Client.find`` and ``Queue.browse`` show "dead" in place of "scheduled" and "ready".
    state: State
    #: Where and why the message was buried; None outside a dead-letter queue.
    dead: Burial | None
    #: The priority, from 0 to 9, or None if the message was never in a queue with priorities.
    priority: int | None = field(default=None, kw_only=True)
    #: The group that orders the message, or None. A finished or dead message shows its last group.
    group: str | None = field(default=None, kw_only=True)
    #: How many times consumers of this queue received the message. A release lowers ``tries``, but
    #: not this number. The messages of a pack share one number. In a stream, it equals ``tries``.
    deliveries: int = field(default=0, kw_only=True)
    #: The last 5 tries in which the holder gave an error, oldest first. A burial and a redrive keep
    #: them, and a move drops them. Messages of streams and packs have none.
    attempts: tuple[Attempt, ...] = field(default=(), kw_only=True)
    #: Why a scheduled message still waits although its ``when`` has passed: "group" if a message of
    #: its group comes first, or "limit". None if neither is the case.
    deferred: Deferral | None = field(default=None, kw_only=True)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restore a pickled message. Release 0.1 had fewer fields, and some of them were dicts."""
        for each in fields(self):
            if each.name in state[1] or each.default is not MISSING:
                setattr(self, each.name, state[1].get(each.name, each.default))
        self.error = ErrorInfo.of(as_stored(self.error))
        self.progress = Progress.of(as_stored(self.progress))
        self.dead = Burial.of(as_stored(self.dead))


@dataclass(slots=True, eq=False)
class Reservation(Message[T]):
    """A message held under a lease. It can be pickled, and settled in another process."""

    #: Identifies this claim. The message can only be settled while it is stored with this token.
    token: str
    #: The end of the lease; ``extend`` updates it.
    until: datetime
    #: The label of the client that holds the message.
    owner: str
    #: The length of the lease, in seconds.
    lease: float
    #: When the message was claimed, by the clock of the primary.
    reserved: datetime = field(kw_only=True)
    #: Its place under the queue's limit on concurrency, or None if the queue has no such limit.
    slot: str | None = field(default=None, kw_only=True, repr=False)
    #: How the message is kept once it has finished, for ``Client.wait`` or for its key, or None.
    keep: Keep | None = field(default=None, kw_only=True, repr=False)
    #: The options with which ``Client.commit`` settles the message; None from an older release.
    carried: Any = field(default=None, kw_only=True, repr=False)
    #: The gather that the message belongs to, or None; see ``Client.gather``.
    gather: Gather | None = field(default=None, kw_only=True, repr=False)

    def __setstate__(self, state: tuple[None, dict[str, Any]]) -> None:
        """Restore a pickled reservation."""
        Message.__setstate__(self, state)  # super() fails: slots=True replaces the class
        if "reserved" not in state[1]:  # pickled by release 0.1
            self.reserved = self.until - timedelta(seconds=self.lease)


@dataclass(slots=True, eq=False)
class PackedReservation(Reservation[T]):
    """A message that is held under a lease and stored in a pack, a document with many messages."""

    #: The id of the pack, and the message's place in it. With the token, they identify the claim.
    pack: Id
    place: int
    #: The state of the pack in this process, or None in another process.
    hold: object = field(default=None, repr=False)


def seconds_left(held: Reservation[Any], now: datetime) -> float:
    """Return the seconds until the lease of a reservation ends."""
    return (held.until - now).total_seconds()


def is_last_try(held: Reservation[Any], max_tries: int | None) -> bool:
    """Return whether a rollback of a reservation buries its message."""
    return held.dead is None and max_tries is not None and held.tries >= max_tries


@dataclass(slots=True, eq=False)
class Finished(Message[T]):
    """A finished message, as a history or ``Client.wait`` returns it."""

    #: "popped", "committed", "removed", "cancelled" or "expired".
    outcome: str
    #: When the message was finished.
    processed: datetime
    #: The result that the holder or the handler gave, or None; see ``Queue.commit``.
    result: Any = field(default=None, kw_only=True)


@dataclass(slots=True, eq=False)
class StreamMessage(Message[T]):
    """A message of a stream, as ``Stream.read`` returns it."""

    #: The place of the message in the stream: 0, 1, 2, ... It never changes.
    position: int


@dataclass(slots=True, eq=False)
class StreamReservation(Reservation[T]):
    """A message of a stream that a consumer group holds under a lease."""

    #: The place of the message in the stream: 0, 1, 2, ... It never changes.
    position: int
    #: The consumer group that holds the message.
    group: str = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page of messages, as ``Queue.browse`` returns it."""

    messages: list[Message[T]]
    #: The ``after=`` of the next page, or None if this is the last page.
    after: str | None
    #: How many messages were examined, including messages that did not match.
    looked: int

    @property
    def complete(self) -> bool:
        """Whether this is the last page."""
        return self.after is None


@dataclass(frozen=True, slots=True)
class BulkResult:
    """The result of a method of ``Selection`` that changes many messages."""

    #: How many messages were changed.
    done: int
    #: How many selected messages were left alone: a consumer held them, they changed after they
    #: were read, or they do not allow the change.
    passed: int


@dataclass(frozen=True, slots=True)
class Counts:
    """The number of messages of a queue by state. ``total`` does not include ``history``."""

    ready: int = 0
    scheduled: int = 0
    reserved: int = 0
    history: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.ready + self.scheduled + self.reserved)


@dataclass(frozen=True, slots=True)
class ConsumerCounts:
    """The messages that a consumer group of a stream has not finished yet, counted by state."""

    ready: int = 0
    scheduled: int = 0
    reserved: int = 0
    #: How many messages the retention of the stream deleted before the group had finished them.
    skipped: int = 0
    total: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.ready + self.scheduled + self.reserved)


@dataclass(frozen=True, slots=True)
class ConsumerInfo:
    """A consumer group, as ``Stream.consumers`` returns it."""

    name: str
    #: The position of the first message that the group has not claimed yet.
    position: int
    counts: ConsumerCounts
    paused: bool


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue, as ``Client.queues`` returns it."""

    name: str
    #: In a stream, the messages that can be read count as ready.
    counts: Counts
    paused: bool
    kind: str = "standard"
    limit: Limit | None = None
    #: How many messages its dead-letter queue has. None if several queues share that queue, or if
    #: this is a dead-letter queue or a stream.
    dead: int | None = None
    #: The instant since which its oldest waiting message has been eligible. Of messages that wait
    #: for their group or for a limit, only the first of each group or key counts, up to 1000 of
    #: each; and if that message waits for its next try, messages behind it, up to 1000. None if no
    #: message waits, or if this is a stream.
    oldest: datetime | None = None
    #: The options of the queue: ``lease``, ``max_tries``, ``dead_letter`` and ``history`` as last
    #: given, and the options that all users share, except the limit. Durations are in seconds.
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A schedule, as ``Client.schedules`` returns it."""

    name: str
    #: The name of the queue that gets its messages.
    queue: str
    #: The next tick, or None while the schedule is paused.
    next: datetime | None
    paused: bool
    #: The id of the last message that the schedule pushed, or None.
    last: Id | None
    #: How many ticks pushed no message, because the previous message was not finished, or because
    #: of an error.
    skipped: int
    #: The error that kept the last tick from pushing a message, or None.
    error: str | None
    #: The other arguments of ``Client.schedule``. Durations are in seconds.
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long a message waits after a failed try.

    After try n, it waits ``base * factor ** (n - 1)`` seconds, but no longer than ``maximum``.
    ``jitter`` is the fraction by which this time varies at random, so that messages that failed
    together do not come back together.
    """

    base: float = 1
    factor: float = 2
    maximum: float = 3600
    jitter: float = 0.1

    def delay(self, tries: int) -> float:
        """Return the seconds to wait after the failure of try number ``tries``."""
        try:
            wait = min(self.maximum, self.base * self.factor ** max(0, tries - 1))
        except OverflowError:
            wait = self.maximum
        return wait * (1 + self.jitter * random.uniform(-1, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lifetimes:
    """How long a message may wait, and how long its key stays taken; see ``Push``."""

    expires: Duration | None = None
    unique_for: Duration | None = None


@dataclass(frozen=True, slots=True)
class Push(_Lifetimes, Generic[T]):
    """A message to push with its own options, for ``Queue.push_many``.

    Args:
        payload: A BSON value, or a value of the model of the queue.
        delay: Seconds until the message can be received; not with ``at``.
        at: The instant from which the message can be received. A past instant means now.
        key: A message key; see ``Queue.push``.
        headers: Small labels, as a mapping {str: str | int | float | bool}.
        id: The id of the message; see ``Queue.push``. None means a new id.
        priority: 0 (lowest) to 9, or None for 4. Only with ``kind="priority"``.
        group: The name of a group. Only with ``kind="ordered"``.
        result: Seconds for which the finished message is kept with its result; see ``Queue.push``.
        expires: Seconds within which the first try must begin; see ``Queue.push``.
        unique_for: How long the key stays taken after a commit or a pop; see ``Queue.push``.
        gather: The gather that the message joins; see ``Queue.push``.
    """

    payload: T
    delay: Duration | None = None
    at: datetime | None = None
    key: str | None = None
    headers: Headers | None = None
    id: Id | None = None
    priority: int | None = None
    group: str | None = None
    result: Duration | None = None
    gather: Gather | None = None


class BatchOptions(TypedDict):
    """How a Spark stage makes its batches."""

    #: How the results are written: "move" or "transaction".
    output: str
    #: The maximum number of messages in one batch.
    max_messages: int
    #: How many processes share the work of the group.
    members: int


class QueueOptions(TypedDict, total=False):
    """The options of ``Client.queue``."""

    lease: Duration
    max_tries: int | None
    dead_letter: str | None
    history: Duration | None
    backoff: Backoff
    poll: Duration
    kind: KindName | None
    strict: bool | None
    on_failure: OnFailure | None
    pack: int | None
    limit: Limit | None
    auto_delete: Duration | None


class ScheduleOptions(TypedDict, total=False):
    """The options of ``Client.schedule`` other than its queue and its cron expression."""

    #: The time between two ticks, in place of a cron expression.
    every: Duration | None
    #: The time zone of the cron expression.
    timezone: str | ZoneInfo
    payload: Any
    headers: Headers | None
    key: str | None
    priority: int | None
    group: str | None
    missed: Missed
    #: Whether a tick pushes a message while the previous message is still in a queue.
    overlap: bool
    #: How late a tick may be before it counts as missed.
    grace: Duration
