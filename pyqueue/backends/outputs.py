"""The messages that a finished message leaves behind; ``settling.fan_out`` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from pyqueue import arguments
from pyqueue.backends.gathering import Route, sealed_record
from pyqueue.backends.options import Target
from pyqueue.backends.pushing import Content, new_document
from pyqueue.facts import Gather, WhenDead
from pyqueue.messages import Id, Reservation
from pyqueue.requests import Document


class Output(NamedTuple):
    """A new message that a finished message leaves behind."""

    #: A new id. A repeated call passes the same id.
    id: Id
    target: Target
    payload: Any
    priority: int | None
    group: str | None = None
    #: Merged into the headers of the finished message.
    headers: Mapping[str, Any] | None = None
    key: str | None = None
    #: When the message becomes ready: a delay in seconds, or an instant.
    delay: float | timedelta | None = None
    at: datetime | None = None

    def content(self, held: Reservation[Any], value: Any, gather: Gather | None) -> Content:
        """Return the content of the new message.

        Args:
            held: The finished message.
            value: The stored payload.
            gather: The gather that the output belongs to, or None.
        """
        headers = {**(arguments.headers(held.headers) or {}), **(self.headers or {})}
        return Content(
            self.target.codec.name,
            value,
            headers,
            self.key,
            self.id,
            priority=self.priority,
            group=self.group,
            gather=gather,
        )


class Then(NamedTuple):
    """The message that enters its queue once all outputs have ended; see ``gathering``."""

    output: Output
    #: Whether an output that is buried counts as ended ("end"), or still holds the message back.
    dead: WhenDead = "hold"


def documents(
    held: Reservation[Any],
    outputs: Sequence[Output],
    then: Then | None,
    values: Sequence[Any],
    now: datetime,
) -> list[Document]:
    """Return the documents that store the outputs of a message.

    Args:
        held: The finished message. Without ``then``, the outputs belong to its gather.
        outputs: The messages that the finished message leaves behind.
        then: The message that waits until all outputs have ended, or None.
        values: The stored payloads of the outputs, and of ``then``.
        now: The current instant.
    """
    gather = held.gather if then is None else Gather(then.output.id, then.dead)
    copies: list[Document] = []
    for each, value in zip(outputs, values, strict=False):
        target, when = each.target, arguments.starting(now, each.delay, each.at)
        content = each.content(held, value, gather)
        copies.append(new_document(target.queue, target.kind, now, when, content))
    if then is not None:
        last = then.output
        content = last.content(held, values[-1], held.gather)
        copies.append(sealed_record(content, Route(last.target.queue, last.delay, last.at), now))
    return copies
