"""The changes that a call can make to selected messages that no consumer holds.

Each message is changed by one update, which matches the message as it was read; see
``managing.as_read``. Only a holder can change a message that shares a document with other messages,
so the call holds such a message for a moment, as a consumer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, NamedTuple, Protocol

from pyqueue.backends import forms, namespace, results, transitions
from pyqueue.backends.applying import update_with_key
from pyqueue.backends.browsing import Found
from pyqueue.backends.contents import Contents
from pyqueue.backends.ending import Ending, ending_free
from pyqueue.backends.forms import Move
from pyqueue.backends.kind import UpdateFields, require
from pyqueue.backends.managing import REDRIVE_FIELDS, WayHome, as_read, way_home
from pyqueue.backends.moving import move_update, ready_target
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.options import QueueTerms, Target
from pyqueue.backends.queue_plans import QueuePlans, found_target
from pyqueue.backends.requeueing import brought_forward
from pyqueue.documents import eligible_since, group_of, invalid_fields, priority_of
from pyqueue.errors import ConfigurationError, DuplicateKey, InvalidMessage, TargetRefused
from pyqueue.messages import UNCHANGED, Message, Reservation
from pyqueue.requests import Document, Filter, Plan, Signal, UpdateEach


@dataclass(slots=True)
class Tally:
    """How many messages a call has changed, and how many it has left alone."""

    done: int = 0
    passed: int = 0


class Step(NamedTuple):
    """One step of a call, which changes up to a thousand messages."""

    terms: QueueTerms
    contents: Contents
    #: Filters that match every selected message.
    filters: Sequence[Filter]
    now: datetime
    tally: Tally

    def match(self, document: Document) -> dict[str, object]:
        """Return the filter that matches a message as it was read."""
        more = {"$and": self.filters} if self.filters else {}
        return {**as_read(self.terms.queue, document, self.now), **more}

    def write(self, pairs: Sequence[tuple[Document, UpdateFields]]) -> Plan[None]:
        """Change documents, each by its own update. An empty update deletes the document."""
        if not pairs:
            return
        matches = [(self.match(document), update) for document, update in pairs]
        done, failures = yield from UpdateEach(matches)
        self.tally.done += done
        for each in failures:
            if not isinstance(each.error, (DuplicateKey, InvalidMessage)):
                raise each.error  # it does not depend on the message


class Change(Protocol):
    """A change that a call can make to the selected messages."""

    @property
    def name(self) -> str:
        """The name of the method that makes the change, for errors."""

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Refuse a queue that does not support the change.

        Raises:
            ConfigurationError: The queue, or the target, does not support the change.
        """

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return whether a selected message needs the change."""

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Change messages that have their own documents, and were not held when they were read."""

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Change messages that share one document, while this call holds them.

        Raises:
            LeaseLost: Some messages were no longer held; the other messages are changed.
        """


class Remove:
    """The change that removes messages. If the queue has a history, the messages move there."""

    name = "remove"

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Do nothing, because queues of every kind can remove messages."""
        yield from ()

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return True."""
        return True

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Remove messages that have their own documents."""
        kind, ending = step.terms.kind, Ending("removed", step.terms.options.history)
        documents = [each.document for each in found]
        yield from step.write(
            [(each, ending_free(kind, each, ending, step.now) or {}) for each in documents]
        )
        yield from kind.ended(step.terms.queue, documents)
        yield from results.announce(chain.from_iterable(map(results.end_facts, documents)))

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Remove messages of one shared document."""
        return forms.form_of(held[0]).commit(step.terms, held, {}, None)


class Redrive:
    """The change that sends dead messages back to the queues that they came from."""

    name = "redrive"

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Refuse a queue of a kind without dead letters."""
        require(terms.kind, terms.queue, "dead_letter")
        yield from ()

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return whether the message is dead."""
        return "dead" in document

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Send dead messages back to their queues."""
        return _send_home(step, [each.document for each in found], None)

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Change nothing: a dead message has its own document."""
        yield from ()


class MoveTo:
    """The change that moves messages to another queue.

    Args:
        to: The plans of the other queue, or its name.
    """

    name = "move"

    def __init__(self, to: QueuePlans | str) -> None:
        self._to = to

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Refuse a target that is the same queue, is a stream, or is not of the given kind."""
        require(terms.kind, terms.queue, "move")
        to = self._to
        name = to if isinstance(to, str) else to.queue
        if name == terms.queue:
            raise ConfigurationError(
                f"to: the messages are already in {name!r}; name another queue"
            )
        if isinstance(to, str):
            namespace.target_kind(to, (yield from namespace.kind_of(to)) or GUESSED_KIND)
        else:
            target = yield from found_target(to)
            yield from namespace.check_kind(target.queue, target.kind)

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return True."""
        return True

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Move messages that have their own documents."""
        valid = [each for each in found if not invalid_fields(each.document)]
        if not valid:
            return
        target = yield from self._target([each.message for each in valid])
        move = Move(target, {})
        yield from step.write(
            [
                (each.document, move_update(step.terms, each.message, UNCHANGED, move, step.now))
                for each in valid
            ]
        )
        yield from Signal(target.queue, step.now)
        yield from step.terms.kind.ended(step.terms.queue, [each.document for each in valid])

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Move messages of one shared document."""
        move = Move((yield from self._target(held)), {})
        pairs = [(each, UNCHANGED) for each in held]
        yield from forms.form_of(held[0]).move(step.terms, pairs, move, None)

    def _target(self, messages: Sequence[Message[Any]]) -> Plan[Target]:
        to = self._to if isinstance(self._to, str) else (yield from found_target(self._to))
        return (yield from ready_target(to, messages, None, None))


class Requeue:
    """The change that makes messages ready now or later. Dead messages go back to their queues.

    Args:
        at: When the messages become ready, or None for now.
    """

    name = "requeue"

    def __init__(self, at: datetime | None) -> None:
        self._at = at

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Do nothing, because queues of every kind can requeue messages."""
        yield from ()

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return whether the message is dead, or requeueing it would change when it is due."""
        since = eligible_since(document)
        if "dead" in document or since is None:
            return True
        at = self._in_future(now)
        return since > now if at is None else since != at

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Requeue messages that have their own documents."""
        at = self._in_future(step.now)
        documents = [each.document for each in found]
        yield from _send_home(step, [each for each in documents if "dead" in each], at)
        yield from _reschedule(step, [each for each in documents if "dead" not in each], at)

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Requeue messages of one shared document."""
        return step.contents.requeue(step.terms, held, self._in_future(step.now))

    def _in_future(self, now: datetime) -> datetime | None:
        """Return the instant at which messages become ready, or None if it has passed."""
        return self._at if self._at is not None and self._at > now else None


class Reprioritize:
    """The change that gives messages another priority.

    Args:
        priority: The new priority.
    """

    name = "reprioritize"

    def __init__(self, priority: int) -> None:
        self._priority = priority

    def check(self, terms: QueueTerms) -> Plan[None]:
        """Refuse a queue of a kind without priorities."""
        require(terms.kind, terms.queue, "priority")
        yield from ()

    def concerns(self, document: Document, now: datetime) -> bool:
        """Return whether the message has another priority."""
        return priority_of(document) != self._priority

    def write(self, step: Step, found: Sequence[Found]) -> Plan[None]:
        """Give messages the new priority."""
        queue, kind = step.terms.queue, step.terms.kind
        yield from namespace.ensure(queue, kind, None, [self._priority])
        put: UpdateFields = {"$set": {"priority": self._priority}}
        yield from step.write([(each.document, put) for each in found])
        yield from Signal(queue, min(each.document["when"] for each in found))

    def settle(self, step: Step, held: Sequence[Reservation[Any]]) -> Plan[None]:
        """Change nothing: messages with priorities have their own documents."""
        yield from ()


def _reschedule(step: Step, documents: Sequence[Document], at: datetime | None) -> Plan[None]:
    """Make messages ready at ``at``, or now if it is None."""
    valid = [each for each in documents if not invalid_fields(each)]
    if not valid:
        return
    yield from step.write([(each, _at(step, each, at)) for each in valid])
    yield from Signal(step.terms.queue, at or step.now)
    if at is not None:  # otherwise they keep their places
        yield from step.terms.kind.ended(step.terms.queue, valid)


def _at(step: Step, document: Document, at: datetime | None) -> UpdateFields:
    """Return the update that makes a message ready at ``at``, or now if it is None.

    With ``at``, the update also ends a lapsed claim, gives a grouped message a new place, and takes
    a cancellation back.
    """
    if at is None:
        return brought_forward(document, step.now)
    kind = step.terms.kind
    entering = kind.entering(step.terms.queue, at, priority_of(document), group_of(document))
    names = ("when", "due", *kind.place_fields)
    put = {name: entering[name] for name in names if name in entering}
    update = transitions.lapsing(kind)
    ends = transitions.unset(*transitions.ENDS)
    return {**update, "$unset": {**update["$unset"], **ends}, "$set": put}


def _send_home(step: Step, documents: Sequence[Document], at: datetime | None) -> Plan[None]:
    """Send dead messages back to their queues. Messages without a valid origin stay.

    Args:
        step: The step of the call that sends them back.
        documents: The dead messages.
        at: When they become ready in their queues, or None for now.

    Raises:
        ConfigurationError: A message came from a stream. None of these messages was sent back.
    """
    ways = yield from _ways_home(step, documents, at)
    yield from step.write([(document, way.update) for document, way in ways if way.key is None])
    for document, way in ways:
        if way.key is not None:
            done = yield from update_with_key(step.match(document), way.update, way.key)
            step.tally.done += done
    for home in {way.home for _, way in ways}:
        yield from Signal(home, at or step.now)
    yield from step.terms.kind.ended(step.terms.queue, [document for document, _ in ways])


def _ways_home(
    step: Step, documents: Sequence[Document], at: datetime | None
) -> Plan[list[tuple[Document, WayHome]]]:
    """Return the dead messages that can go back, and how each goes back; see ``_send_home``."""
    queue, kind = step.terms.queue, step.terms.kind
    ways: list[tuple[Document, WayHome]] = []
    for document in documents:
        seen = {name: document[name] for name in ("_id", *REDRIVE_FIELDS) if name in document}
        try:
            way = yield from way_home(queue, kind, seen, step.now, at)
        except TargetRefused:
            raise ConfigurationError(_refusal(document, step.tally.done)) from None
        if way is not None:
            ways.append((document, way))
    return ways


def _refusal(document: Document, done: int) -> str:
    """Return the error text for a stream's dead message. ``done``: how many messages went back."""
    stream = document["dead"]["from"]
    before = f" ({done} messages were sent back before)" if done else ""
    return (
        f"redrive: message {document['_id']} came from the stream {stream!r}, and messages cannot "
        f"go back to a stream; move() such messages to a queue, or select other messages by "
        f"dead.from{before}"
    )
