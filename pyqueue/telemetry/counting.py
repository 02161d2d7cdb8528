"""The hooks of telemetry that count messages, in memory. They do no I/O."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyqueue.documents import hashable_id
from pyqueue.errors import DuplicateKey, LeaseLost
from pyqueue.facts import ErrorInfo
from pyqueue.messages import Id, Message, PackedReservation, Reservation
from pyqueue.telemetry.figures import OTHER, Figures

#: How many queues, and how many error groups, are counted separately between two flushes.
MAX_QUEUES: Final = 2000
MAX_GROUPS: Final = 200
#: How many ids an error group shows.
SAMPLES: Final = 5

#: The counter for each verb of a settlement.
_COUNTED: Final = {
    "commit": "finished",
    "move": "moved",
    "rollback": "retried",
    "release": "released",
    "bury": "dead",
    "lost": "lost",
    "cancel": "cancelled",
    "expire": "expired",
}


class ErrorGroup:
    """The failed tries in one queue that have the same fingerprint."""

    __slots__ = ("dead", "error", "ids", "tries")

    def __init__(self) -> None:
        self.tries = self.dead = 0
        #: The ids of the last messages.
        self.ids: list[Id] = []
        #: The last error.
        self.error: ErrorInfo | None = None


class Counted(NamedTuple):
    """The figures since the last flush."""

    #: The figures, keyed by the queue's name, or by the stream's name, "~" and the group.
    figures: Mapping[str, Figures]
    #: The error groups, keyed by fingerprint and queue.
    errors: Mapping[tuple[str, str], ErrorGroup]


class Counting:
    """Counts the messages of each queue. Any number of threads may use it.

    Args:
        now: Returns the time of the primary.
        begin: Called when there is something to store.
    """

    def __init__(self, now: Callable[[], datetime], begin: Callable[[], object]) -> None:
        self._now, self._begin = now, begin
        #: Whether counting is off, because the figures cannot be stored.
        self.off = False
        self.reset()

    def reset(self) -> None:
        """In a forked child, forget all figures, and replace the lock, which may be held."""
        self._lock = threading.Lock()
        self._figures: dict[str, Figures] = {}
        self._errors: dict[tuple[str, str], ErrorGroup] = {}

    @property
    def empty(self) -> bool:
        """Whether nothing was counted since the last flush."""
        return not self._figures

    def take(self) -> Counted:
        """Return the figures, and count from zero."""
        with self._lock:
            counted = Counted(self._figures, self._errors)
            self._figures, self._errors = {}, {}
        return counted

    # ---- hooks

    def pushed(self, queue: str, ids: Sequence[Id | None], error: BaseException | None) -> None:
        """Count the messages that were written: those with an id in ``ids``."""
        if self.off or not (error is None or isinstance(error, DuplicateKey)):
            return
        if number := sum(each is not None for each in ids):
            with self._lock:
                self._count(queue, "pushed", number)

    def received(self, queue: str, messages: Sequence[Message[Any]], waited: float) -> None:
        """Count received messages. Popped messages also count as finished."""
        if self.off:
            return
        now = self._now()
        with self._lock:
            figures = self._count(queue, "received", len(messages))
            figures.times["waiting"].add_since((each.when for each in messages), now)
            if not isinstance(messages[0], Reservation):
                figures.counts["finished"] += len(messages)
                figures.times["end_to_end"].add_since((each.pushed for each in messages), now)

    def settled(
        self,
        queue: str,
        verb: str,
        reservations: Sequence[Message[Any]],
        error: BaseException | None,
        to: str | None,
    ) -> None:
        """Count the messages that were certainly settled or certainly lost."""
        if self.off or (counted := _COUNTED.get(verb)) is None:
            return
        lost: Sequence[Message[Any]] = ()
        if isinstance(error, LeaseLost):
            reservations, lost = parted(reservations, error)
        elif error is not None:
            return
        now = self._now()
        with self._lock:
            if lost:
                self._count(queue, "lost", len(lost))
            if reservations:
                self._count(queue, counted, len(reservations))
                self._settle(queue, verb, reservations, now)
                if verb == "move" and to is not None:
                    self._figures_of(queue).move(to, len(reservations))

    def _settle(
        self, queue: str, verb: str, messages: Sequence[Message[Any]], now: datetime
    ) -> None:
        """Record how long the work took, and why it failed."""
        times = self._figures_of(queue).times
        if verb not in ("release", "lost"):
            held = (each.reserved for each in messages if isinstance(each, Reservation))
            times["working"].add_since(held, now)
        if verb == "commit":
            times["end_to_end"].add_since((each.pushed for each in messages), now)
        elif verb in ("rollback", "bury"):
            for each in messages:
                if each.error is not None and each.error.fp is not None:
                    self._note(queue, verb, each, each.error)

    def _note(self, queue: str, verb: str, message: Message[Any], error: ErrorInfo) -> None:
        """Add a failed message to its error group."""
        is_new = isinstance(message, Reservation) and _is_of(error, message)
        key = (str(error.fp), queue)
        if not is_new and verb != "bury":
            return
        if (group := self._errors.get(key)) is None:
            if len(self._errors) >= MAX_GROUPS:
                return
            group = self._errors[key] = ErrorGroup()
        group.tries += is_new
        group.dead += verb == "bury"
        group.error = error
        group.ids = [*group.ids[1 - SAMPLES :], message.id]

    def _count(self, queue: str, name: str, number: int) -> Figures:
        figures = self._figures_of(queue)
        figures.counts[name] += number
        return figures

    def _figures_of(self, queue: str) -> Figures:
        """Return the figures of a queue. The caller holds the lock."""
        if (found := self._figures.get(queue)) is None:
            if len(self._figures) >= MAX_QUEUES:
                queue = OTHER
            found = self._figures.setdefault(queue, Figures())
            self._begin()
        return found


def parted(
    reservations: Sequence[Message[Any]], error: LeaseLost
) -> tuple[list[Message[Any]], list[Message[Any]]]:
    """Return the reservations that were settled in spite of an error, and the lost reservations."""
    lost, unknown = ({*map(_claim_of, some)} for some in (error.lost, error.unknown))
    return (
        [each for each in reservations if _claim_of(each) not in lost | unknown],
        [each for each in reservations if _claim_of(each) in lost],
    )


def _is_of(error: ErrorInfo, held: Reservation[Any]) -> bool:
    """Return whether an error belongs to the current try. Earlier errors are already counted.

    Stored times have a precision of milliseconds, so the previous try may have failed in the same
    millisecond as this claim. Packed messages store no errors.
    """
    if error.at == held.reserved:
        return isinstance(held, PackedReservation)
    return error.at is not None and error.at > held.reserved


def _claim_of(held: Any) -> object:
    return hashable_id(held.id), held.token
