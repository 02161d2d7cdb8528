"""Convert the return values of handlers to payloads, to results and to error texts."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import is_dataclass
from typing import Any, Final

from pydantic import BaseModel

from pyqueue.backends import results
from pyqueue.delivery import To
from pyqueue.messages import UNCHANGED, Reservation
from pyqueue.payloads import Codec, error_text
from pyqueue.pipeline.calls import shown

log = logging.getLogger("pyqueue")

#: Dumps values of pydantic models and dataclasses by their own type.
_ANY_TYPE: Final = Codec[Any](Any)


class Results:
    """Prepares the results that one stage stores with its messages."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        #: Whether it was logged that a result could not be stored.
        self._noted = False

    def of(self, message: Reservation[Any], answer: object) -> Any:
        """Convert the return value of a handler to the result that is stored with its message.

        If the value cannot be stored, the message gets no result.
        """
        try:
            return results.checked(dumped(answer))
        except Exception as error:  # raised by the answer itself, for instance
            if not self._noted:
                self._noted = True
                text = "queue %r: the result of message %s was left out: %s"
                log.warning(text, self._stage, message.id, error_text(error))
            return UNCHANGED


def dumped(payload: Any) -> Any:
    """Return a payload in the form in which a queue without a known model stores it."""
    if isinstance(payload, BaseModel) or is_dataclass(payload):
        return _ANY_TYPE.dump(payload)
    return payload


def alike(answer: To[Any]) -> Hashable:
    """Return a key. Moves with the same key share a command; with None, a move shares none."""
    if answer.key is not None:  # a key belongs to one message
        return None
    # The headers as text, because 1 and True are equal.
    when, labels = (answer.delay, answer.at), repr(answer.headers)
    return ("move", answer.queue, when, labels, answer.priority, answer.group)


def shown_answer(answer: object) -> str:
    """Describe an answer for an error text. A payload may hold secrets, so it is left out."""
    if isinstance(answer, To):
        return f"To({answer.queue!r})"
    return shown(answer)
