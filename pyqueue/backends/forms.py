"""The forms of reservations, and how a call with several forms is carried out.

By default, a message is one document, and its reservation settles that document. A kind may store
messages in another way, and give them reservations of another class. A *form* says how the
reservations of one class are settled. One call may settle reservations of several classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple, Protocol, TypedDict, TypeVar

from pyqueue.backends.applying import SettlementResult
from pyqueue.backends.handover import Handover, Result
from pyqueue.backends.options import NewMessage, QueueTerms, Target
from pyqueue.errors import LeaseLost, QueueError, Unavailable
from pyqueue.messages import Id, Reservation, is_last_try
from pyqueue.requests import Document, Plan

#: A class of reservations.
R = TypeVar("R", bound=Reservation[Any], contravariant=True)
Held = Sequence[Reservation[Any]]
#: The reservations whose leases were not extended, each with the reason.
Failures = list[tuple[Reservation[Any], QueueError]]
#: Reservations, each with the result of its settlement.
Outcomes = list[tuple[Reservation[Any], SettlementResult]]


class RollbackOptions(TypedDict, total=False):
    """The options of a rollback; see ``Queue.rollback``."""

    delay: float | timedelta | None
    error: BaseException | str | None
    counted: bool
    session: object


class Failure(NamedTuple):
    """Why messages go back to their queue or into the dead-letter queue, and how."""

    #: The error that the messages store, or None if they keep their current error.
    error: Mapping[str, Any] | None
    #: How long the messages wait for another try, in seconds, or None if the backoff decides.
    delay_s: float | None = None
    session: object = None
    #: Whether the try counts. If not, it is never the last one.
    counted: bool = True

    def is_last(self, held: Reservation[Any], max_tries: int | None) -> bool:
        """Return whether a message has no try left, so that it is buried."""
        return self.counted and is_last_try(held, max_tries)


class Move(NamedTuple):
    """How messages are moved to another queue."""

    target: Target
    #: Headers to merge into the headers of a message.
    labels: Mapping[str, Any]
    #: The key in the target.
    key: str | None = None
    #: When a message can be received there: after these seconds, or at this instant.
    delay: float | timedelta | None = None
    at: datetime | None = None
    #: The priority and the group in the target, or None if a message keeps its own.
    priority: int | None = None
    group: str | None = None
    #: Further update operators, on parts of the payload.
    edits: Mapping[str, Mapping[str, Any]] | None = None


class Extension(NamedTuple):
    """How leases are extended."""

    #: The new length in seconds, or None if each lease keeps its length.
    lease_s: float | None
    #: After this time, in seconds, leases that could not be extended are not tried again.
    budget_s: float
    #: Whether a command may take as long as the client allows.
    patient: bool = False
    #: Whether only the primary acknowledges the command.
    w1: bool = False
    #: Called for each message that was cancelled, or None if the caller does not ask.
    told: Callable[[Reservation[Any]], object] | None = None


class Form(Protocol[R]):
    """How the reservations of one class are settled."""

    def refuse(self, held: Sequence[R], argument: str) -> None:
        """Refuse an argument if this form cannot store it.

        The argument is "payload", "result", "update" or "reservation".
        """

    def commit(
        self, terms: QueueTerms, held: Sequence[R], put: Mapping[str, Any], session: object
    ) -> Plan[None]:
        """Finish messages. If they are kept, ``put`` has their new payload or their result."""

    def roll_back(self, terms: QueueTerms, held: Sequence[R], failure: Failure) -> Plan[None]:
        """Make messages wait for another try, and bury messages that have no try left."""

    def release(self, terms: QueueTerms, held: Sequence[R], *, seen: bool) -> Plan[None]:
        """Put messages back unprocessed. ``seen``: whether a caller has received them."""

    def bury(self, terms: QueueTerms, held: Sequence[R], failure: Failure) -> Plan[None]:
        """Send messages to the dead-letter queue."""

    def move(
        self, terms: QueueTerms, pairs: Sequence[tuple[R, Any]], move: Move, session: object
    ) -> Plan[None]:
        """Move reserved messages, each with its new payload in stored form, or with UNCHANGED."""

    def moves(
        self, terms: QueueTerms, target: Target, pairs: Sequence[tuple[R, NewMessage]]
    ) -> list[Plan[Outcomes]]:
        """Return plans that together move messages, each with its new content.

        The plans can run concurrently. A payload may be UNCHANGED. Headers are merged into the
        headers of the message.
        """

    def hand_over(
        self, terms: QueueTerms, held: R, copies: Sequence[Document]
    ) -> Plan[tuple[Handover, Result]]:
        """Finish a message, and publish new ones instead. Return the handover and its result."""

    def extend(self, held: Sequence[R], how: Extension) -> Plan[Failures]:
        """Extend leases. Return the failures."""


_forms: dict[type, Form[Any]] = {}


def register(reservation: type[R], form: Form[R]) -> None:
    """Register how the reservations of a class are settled."""
    _forms[reservation] = form
    # Calls run in this order: subclasses come first, whatever the order of imports.
    some = sorted(_forms.items(), key=lambda each: len(each[0].__mro__), reverse=True)
    _forms.clear()
    _forms.update(some)


def form_of(held: Reservation[Any]) -> Form[Any]:
    """Return the form that settles a reservation."""
    return _forms.get(type(held)) or next(
        _forms[each] for each in type(held).__mro__ if each in _forms
    )


def by_form(held: Held) -> Collection[tuple[Form[Any], Held]]:
    """Divide reservations by their forms. Reservations of ordinary documents come last."""
    found: dict[int, list[Reservation[Any]]] = {id(form): [] for form in _forms.values()}
    for each in held:
        found[id(form_of(each))].append(each)
    return [(form, some) for form in _forms.values() if (some := found[id(form)])]


def settle(held: Held, plan_for: Callable[[Form[Any], Held], Plan[None]]) -> Plan[None]:
    """Settle reservations with one plan per form; see ``each_part``.

    Args:
        held: The reservations to settle.
        plan_for: Returns the plan that settles the given reservations of one form.

    Raises:
        LeaseLost: Some messages were no longer held; the other messages are settled.
        Unavailable: The outcome is unknown for the messages in the exception's ``ids``; each other
            message was settled or was no longer held.
    """
    if len(held) == 1:
        return plan_for(form_of(held[0]), held)
    parts = [(plan_for(form, some), some) for form, some in by_form(held)]
    return parts[0][0] if len(parts) == 1 else each_part(*parts)


def each_part(*parts: tuple[Plan[None], Held]) -> Plan[None]:
    """Run plans one after the other, each of which settles some reservations of a call.

    A lost lease or an unknown outcome does not stop the plans that follow. At the end, one error
    reports all such failures. Any other error is raised at once, and no further plan runs.

    Args:
        parts: The plans, each with the reservations that it settles.
    """
    lost: list[LeaseLost] = []
    unknown: list[Id] = []
    trouble: Unavailable | None = None
    for part, held in parts:
        try:
            yield from part
        except LeaseLost as error:
            lost.append(error)
        except Unavailable as error:
            trouble = trouble or error
            unknown += error.ids or [each.id for each in held]
    if trouble is not None:
        raise Unavailable(str(trouble), ids=unknown) from trouble
    if len(lost) == 1:
        raise lost[0]
    if lost:
        raise LeaseLost(
            "; ".join(map(str, lost)),
            lost=[each for error in lost for each in error.lost],
            unknown=[each for error in lost for each in error.unknown],
        )
