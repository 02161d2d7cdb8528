"""Settle messages that share a document, and refuse arguments that need separate documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pyqueue.backends import forms
from pyqueue.backends.bucket import leaving, moving, settling
from pyqueue.backends.bucket.settling import Held, by_pack
from pyqueue.backends.forms import Extension, Failure, Failures, Form, Move, Outcomes
from pyqueue.backends.handover import Handover, Result
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.errors import ConfigurationError
from pyqueue.messages import PackedReservation
from pyqueue.requests import Document, Plan

#: Why a packed message does not support an argument, and the remedy, keyed by argument.
_REFUSED = {
    "payload": ", so commit cannot store a payload for it; leave out payload",
    "result": ", so it keeps no result; leave out result, or push the message with result=",
    "update": ", so it does not support update=; use payload= instead",
    "reservation": (
        ", so it cannot store progress or checkpoints; push it with a key, or to a queue of "
        "another kind"
    ),
}


class Packed(Form[PackedReservation[Any]]):
    """How messages that share their document with other messages are settled."""

    def refuse(self, held: Held, argument: str) -> NoReturn:
        """Raise ConfigurationError for an argument that needs a document for each message."""
        reason = _REFUSED[argument]
        raise ConfigurationError(
            f"{argument}: message {held[0].id} shares a document with other messages{reason}"
        )

    def commit(
        self, terms: QueueTerms, held: Held, put: Mapping[str, Any], session: object
    ) -> Plan[None]:
        """Finish messages."""
        return settling.commit(terms.queue, terms.kind, held, session)

    def roll_back(self, terms: QueueTerms, held: Held, failure: Failure) -> Plan[None]:
        """Return messages to their queue, or bury them as dead letters if no try is left."""
        return leaving.rollback(terms, held, failure)

    def release(self, terms: QueueTerms, held: Held, *, seen: bool) -> Plan[None]:
        """Return messages to their queue unprocessed. The delivery counts even if not ``seen``."""
        return leaving.release(terms, held)

    def bury(self, terms: QueueTerms, held: Held, failure: Failure) -> Plan[None]:
        """Send messages to the dead-letter queue."""
        return leaving.bury(terms, held, failure)

    def move(
        self,
        terms: QueueTerms,
        pairs: Sequence[tuple[PackedReservation[Any], Any]],
        move: Move,
        session: object,
    ) -> Plan[None]:
        """Move messages to another queue."""
        return moving.move(terms, pairs, move, session)

    def moves(
        self,
        terms: QueueTerms,
        target: Target,
        pairs: Sequence[tuple[PackedReservation[Any], NewMessage]],
    ) -> list[Plan[Outcomes]]:
        """Return a plan for each pack, which moves messages of the pack with their new contents."""
        return moving.moves(terms, target, pairs)

    def hand_over(
        self, terms: QueueTerms, held: PackedReservation[Any], copies: Sequence[Document]
    ) -> Plan[tuple[Handover, Result]]:
        """Finish a message, and publish documents in its place. Return the handover and result."""
        [(group, _)] = by_pack(terms.queue, terms.kind, [held])  # one message is in one pack
        handover = Handover(terms.queue, held.pack, held.token, copies, new=True)
        result = yield from leaving.hand_over_shared(group, handover)
        return handover, result

    def extend(self, held: Held, how: Extension) -> Plan[Failures]:
        """Extend leases. Return the reservations that were not extended, each with the reason."""
        return settling.extend(held, how)


forms.register(PackedReservation, Packed())
