"""The kind of a queue for an object that names none: the object takes it from the record.

The kind is read before each operation, or remembered. Another program may name another kind before
the operation compares its kind with the record. The operation writes nothing before it compares, so
it can run again. An operation that only receives or reads makes no record, so a mistyped name
leaves no record behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from functools import lru_cache
from typing import Final, TypeVar

from pyqueue.backends import kind as kinds
from pyqueue.backends.namespace import wrong_kind
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import Options
from pyqueue.backends.receiving import Waiting
from pyqueue.errors import OtherKind
from pyqueue.requests import (
    EnsureQueue,
    Find,
    ForgetQueue,
    Listen,
    MonotonicTime,
    Plan,
    ServerTime,
    Wait,
)

T = TypeVar("T")

#: How many times an operation runs if the kind changes each time. A kind is named only once.
_TRIES: Final = 3


@lru_cache(maxsize=1024)
def asking_for_kind(queue: str) -> EnsureQueue:
    """Return the request for the kind of a queue. Calls share one object for each queue."""
    return EnsureQueue(queue, None)


def recorded_kind(queue: str) -> Plan[str]:
    """Return the kind of a queue, or "" if it has no record. The driver may remember the kind.

    Raises:
        ConfigurationError: The queue is a stream, or of a kind that this release does not know.
    """
    stored = yield from asking_for_kind(queue)
    if stored and stored not in kinds.known():
        # The error names the kind that a queue without a named kind would have.
        raise (yield from wrong_kind(queue, kinds.lookup(GUESSED_KIND), stored))
    return stored


def again_in_kind(queues: Collection[str], operation: Callable[[], Plan[T]]) -> Plan[T]:
    """Run an operation; run it again if another program named the kind of a queue in between.

    Args:
        queues: The names of the queues whose kinds the operation reads.
        operation: Returns the plan, which must write nothing before it has compared the kinds.
    """
    for _ in range(_TRIES - 1):
        try:
            return (yield from operation())
        except OtherKind as error:
            if error.queue not in queues:
                raise
            yield from ForgetQueue(error.queue)
    return (yield from operation())


def await_kind(
    queue: str, options: Options, waiting: Waiting, timeout_s: float | None
) -> Plan[tuple[str, float | None]]:
    """Wait until a queue has a record.

    Args:
        queue: The name of the queue.
        options: The options of the Queue object. If they have a ``shape``, this does not wait.
        waiting: The consumers of the queue that wait in this client.
        timeout_s: How long to wait, in seconds, or None for no limit.

    Returns:
        The kind, or "" if the time ran out, and the seconds that are left, or None for no limit.
    """
    if kind := (yield from _usable_kind(queue, options)):
        return kind, timeout_s
    deadline = None if timeout_s is None else (yield from MonotonicTime()) + timeout_s
    try:
        while not kind:
            if deadline is not None and (yield from MonotonicTime()) >= deadline:
                return "", 0.0
            now = yield from ServerTime()
            if not (yield from Listen(waiting)):
                # Any event will do: even a message that is ready later comes with a record.
                yield from Wait(waiting, now + timedelta(seconds=options.poll), deadline)
            kind = yield from _usable_kind(queue, options)
    finally:
        waiting.wake_next(False)
    if deadline is None:
        return kind, None
    return kind, max(0.0, deadline - (yield from MonotonicTime()))


def _usable_kind(queue: str, options: Options) -> Plan[str]:
    """Return the kind to receive with, or "" if there is nothing to receive from."""
    if kind := (yield from recorded_kind(queue)):
        return kind
    # The record may be lost, or a program that knew it may have pushed after its deletion.
    messages = {"q": queue, "record": {"$exists": False}}
    used = options.shape or (yield from Find(messages, {"_id": 1}, limit=1))
    return GUESSED_KIND if used else ""
