"""The form of packed messages: how to settle them, and which arguments they refuse."""

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

#: Why a packed message refuses an argument, and the remedy, by argument.
_REFUSED = {
    "payload": ", and its queue keeps no history; leave payload out",
    "result": ", so it keeps no result; leave result out, or push the message with result=",
    "update": "; use payload= instead",
    "reservation": (
        ", which cannot store progress or checkpoints; push it with a key, or to a queue of "
        "another kind"
    ),
}


class Packed(Form[PackedReservation[Any]]):
    """The form of a message that shares its document with other messages."""

    def refuse(self, held: Held, argument: str) -> NoReturn:
        """Refuse an argument that needs a document for each message."""
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
        """Give messages back for another try, and bury messages that have no try left."""
        return leaving.rollback(terms, held, failure)

    def release(self, terms: QueueTerms, held: Held, *, seen: bool) -> Plan[None]:
        """Give messages back unprocessed. A pack counts its deliveries in any case."""
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
        """Return plans that together move messages, each with its new content."""
        return moving.moves(terms, target, pairs)

    def hand_over(
        self, terms: QueueTerms, held: PackedReservation[Any], copies: Sequence[Document]
    ) -> Plan[tuple[Handover, Result]]:
        """Finish a message and publish documents instead. Return the handover and its result."""
        [(group, _)] = by_pack(terms.queue, terms.kind, [held])  # one message is in one pack
        handover = Handover(terms.queue, held.pack, held.token, copies, new=True)
        result = yield from leaving.hand_over_shared(group, handover)
        return handover, result

    def extend(self, held: Held, how: Extension) -> Plan[Failures]:
        """Extend leases. Return the failures."""
        return settling.extend(held, how)


forms.register(PackedReservation, Packed())
