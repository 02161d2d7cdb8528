"""Calls of a handler: the messages that share a call, and the answer for each of them.

Without ``batch``, a call has one message. With ``batch``, it has up to that number of messages.
Each time a message is delivered again, its call is smaller, because one message may make
a whole call fail or kill its process. In its last try, a message is alone in its call, so that no
other message is buried with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import anyio

from pyqueue.delivery import BatchFailed, Delivery, Drop, Many, TakesNotes, To
from pyqueue.messages import Reservation
from pyqueue.pipeline.graph import Stage


class Call:
    """One call of a handler, and its messages.

    Args:
        messages: The messages of the call.
        stage: The stage whose handler is called.
        notes: Stores the handler's notes on the messages.
        loop: The event loop, for a handler that runs in a thread; None for an async handler.
        state: The value of the lifespan of the worker.
    """

    __slots__ = ("_awaited", "_left", "arguments", "cancelled", "deliveries", "messages", "scope")

    def __init__(
        self,
        messages: Sequence[Reservation[Any]],
        stage: Stage,
        notes: TakesNotes,
        loop: asyncio.AbstractEventLoop | None,
        state: object = None,
    ) -> None:
        self.messages = messages
        self.deliveries: list[Delivery[Any]] = [
            Delivery(each, notes, loop, state) for each in messages
        ]
        payloads = [each.payload for each in messages]
        #: The arguments of the handler.
        self.arguments: tuple[Any, ...] = (payloads, list(self.deliveries))
        if stage.batch is None:
            self.arguments = (payloads[0], self.deliveries[0])
        if not stage.delivery:
            self.arguments = self.arguments[:1]
        self.scope = anyio.CancelScope()
        #: Why the handler was cancelled: "lost" (all leases were lost), "late" (it exceeded its
        #: time limit), "cancelled" (its messages were cancelled) or "stopped".
        self.cancelled: str | None = None
        self._awaited = stage.awaited
        self._left = len(messages)

    def cancel(self, reason: str) -> None:
        """Cancel the handler. A handler in a thread is abandoned: its thread keeps running."""
        self.cancelled = self.cancelled or reason
        if reason != "cancelled":  # otherwise it holds its messages until they are settled
            for each in self.deliveries:
                each.lost = True
        self.scope.cancel()

    def lose_one(self, delivery: Delivery[Any]) -> None:
        """Note that the lease of a message was lost. Cancel the handler when no message is left."""
        if not delivery.cancelled:
            self._drop_one("lost")

    def cancel_one(self, delivery: Delivery[Any]) -> None:
        """Note that a message was cancelled. Cancel the handler when no message is left."""
        if not delivery.cancelled and not delivery.lost:
            delivery.cancelled = True
            self._drop_one("cancelled")

    def _drop_one(self, reason: str) -> None:
        self._left -= 1
        if not self._left and self._awaited:
            self.cancel(reason)


def grouped(
    stage: Stage, max_tries: int | None, messages: Sequence[Reservation[Any]]
) -> list[Sequence[Reservation[Any]]]:
    """Divide messages into calls: the more often messages were tried, the fewer share a call.

    The calls are sorted by their first messages. The messages of a call keep their order.
    """
    if stage.batch is None:
        return [[each] for each in messages]
    groups: dict[int, list[Reservation[Any]]] = {}
    for each in messages:
        last = max_tries is not None and each.tries >= max_tries
        size = 1 if last else max(1, stage.batch // 8 ** max(0, each.tries - 1))
        groups.setdefault(size, []).append(each)
    calls = [
        group[start : start + size]
        for size, group in groups.items()
        for start in range(0, len(group), size)
    ]
    places = {id(each): place for place, each in enumerate(messages)}
    return sorted(calls, key=lambda call: places[id(call[0])])


def answers_of(
    stage: Stage, number: int, answer: object, failed: BatchFailed | None = None
) -> list[object]:
    """Return one answer or exception for each message of a batch that a handler was called with.

    Args:
        stage: The stage of the handler.
        number: How many messages the handler was called with.
        answer: The return value of the handler.
        failed: The ``BatchFailed`` that the handler raised or returned instead, or None.

    Raises:
        ValueError: The handler did not give exactly one answer for each message.
    """
    errors = {} if failed is None else failed.errors
    if wrong := [index for index in errors if not 0 <= index < number]:
        raise ValueError(
            f"{stage.label} raised BatchFailed for index {wrong[0]} of a batch of {number} "
            f"messages; use indexes from 0 to {number - 1}"
        )
    answers = answer if failed is None else failed.results
    ignored = stage.kind == "sink" and not isinstance(answers, (To, Many, Drop))
    if not isinstance(answers, list) and (ignored or len(errors) == number):
        answers = [None] * number
    if not isinstance(answers, list) or len(answers) != number:
        found = f"a list of {len(answers)}" if isinstance(answers, list) else shown(answers)
        said = "returned " if failed is None else "raised BatchFailed with results="
        raise ValueError(
            f"{stage.label} {said}{found} for a batch of {number} messages; return a list with "
            "one answer for each message, in the same order"
        )
    return [errors.get(index, each) for index, each in enumerate(answers)]


def shown(answer: object) -> str:
    """Describe an answer for an error text. A payload may hold secrets, so it is left out."""
    return "None" if answer is None else f"a value of type {type(answer).__name__}"
