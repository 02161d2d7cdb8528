"""Cancel a message by its id, in one queue or in any queue. ``ending`` then ends the message."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal

from pyqueue import arguments
from pyqueue.backends import finding, namespace, transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.managing import find_packed
from pyqueue.backends.bucket.managing import remove as remove_packed
from pyqueue.backends.ending import CANCELLATIONS, Ending, end_free, end_held, recorded
from pyqueue.backends.hidden import NOTHING
from pyqueue.backends.kind import Kind
from pyqueue.backends.options import QueueTerms
from pyqueue.clock import BAND
from pyqueue.errors import ConfigurationError, Unavailable
from pyqueue.messages import Cancelled, Id
from pyqueue.requests import Document, Filter, Find, Plan, ServerTime, Signal, Update

#: How many times a message is read again because another process has changed it.
_TRIES: Final = 20


def cancel(id: Id, force: bool, terms: QueueTerms | None = None) -> Plan[Cancelled | None]:
    """Cancel a message.

    Args:
        id: The id of the message.
        force: Whether a held message ends at once, too. Its holder then gets LeaseLost.
        terms: The queue to search, or None for any queue.

    Returns:
        "cancelled" if the message has ended; "requested" if a consumer holds it, so that it ends
        unless that consumer commits it; None if no queue has it, or if it had finished before.

    Raises:
        ConfigurationError: The message is held and shares a document with other messages, or it is
            in a stream.
        Unavailable: Other processes keep changing the message.
    """
    arguments.flag("force", force)
    scope: Filter = finding.IN_QUEUES
    if terms is not None:
        scope = {"q": terms.queue}
        yield from namespace.check_kind(terms.queue, terms.kind)
    outcome = yield from _cancel(id, force, scope, terms)
    if outcome is None:
        # A former primary may show an end that the fail-over undoes. This waits until what was read
        # is as durable as the client's writes.
        yield from Update({"_id": {"$in": arguments.spellings(id)}, **scope}, NOTHING)
        outcome = yield from _cancel(id, force, scope, terms)
    return outcome


def _cancel(id: Id, force: bool, scope: Filter, terms: QueueTerms | None) -> Plan[Cancelled | None]:
    spellings = arguments.spellings(id)
    for _ in range(_TRIES):
        found = yield from Find({"_id": {"$in": spellings}, **scope})
        document = finding.first_of(spellings, found)
        if document is None:
            return (yield from _cancel_shared(id, scope, terms))
        now = yield from ServerTime()
        if not _is_live(document):
            return None
        held = transitions.is_held(document, now)
        if held and not force:
            if (yield from _request(document, now)):
                return "requested"
        elif (yield from _end(document, terms, now, held=held)):
            return "cancelled"
    raise _changing(id)


def _is_live(document: Document) -> bool:
    when = document.get("when")
    return isinstance(when, datetime) and when < BAND and "processed" not in document


def _changing(id: Id) -> Unavailable:
    return Unavailable(f"other processes keep changing message {id}; try again", ids=[id])


def _how(queue: str, terms: QueueTerms | None) -> Plan[tuple[Kind, Ending]]:
    """Return the kind of a queue and how its messages end, from ``terms`` or from its record."""
    if terms is not None:
        return terms.kind, Ending("cancelled", terms.options.history)
    return (yield from recorded(queue, "cancelled"))


def _end(document: Document, terms: QueueTerms | None, now: datetime, *, held: bool) -> Plan[bool]:
    """End a message. Return False if it changed in the meantime."""
    kind, ending = yield from _how(document["q"], terms)
    end = end_held if held else end_free
    return (yield from end(document["q"], kind, document, ending, now))


def _request(document: Document, now: datetime) -> Plan[bool]:
    """Ask the holder of a message to end it. Return False if the message is no longer held."""
    match: Filter = {
        **{name: document[name] for name in ("_id", "q", "token")},
        "processed": {"$exists": False},
    }
    if not (yield from Update(match, {"$set": {"cancel": now}})).matched:
        return False
    yield from Signal(CANCELLATIONS, None)
    return True


def _cancel_shared(
    id: Id, scope: Filter, terms: QueueTerms | None
) -> Plan[Literal["cancelled"] | None]:
    """Cancel a message that shares a document (a pack) with other messages, unless it is held.

    Raises:
        ConfigurationError: The pack is held, or the message is in a stream.
    """
    if (place := packs.place_of(id)) is None:
        if terms is None and (yield from finding.in_stream(id)) is not None:
            raise ConfigurationError(
                f"cancel: {id} is a message of a stream, which each consumer group receives; "
                "delete messages with the stream's trim(), or skip them with a consumer's seek()"
            )
        return None
    for tried in range(_TRIES):
        found = yield from find_packed(scope, place)
        if not found:
            return None
        # The pack may only look held at first: a process keeps it for a second without using it.
        if tried and transitions.is_held(found[0], (yield from ServerTime())):
            raise ConfigurationError(
                f"cancel: message {id} shares a document with other messages, which its holder "
                "also holds; wait until the lease ends, and pass id= when you push messages that "
                "you may want to cancel"
            )
        kind, _ = yield from _how(found[0]["q"], terms)
        if (yield from remove_packed(found[0]["q"], kind, id)):
            return "cancelled"
    raise _changing(id)
