"""Take a held message of any queue from its holder, so that it becomes ready again."""

from __future__ import annotations

from datetime import datetime

from pyqueue import arguments
from pyqueue.backends import finding, namespace, transitions
from pyqueue.backends import kind as kinds
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.managing import find_packed
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.errors import ConfigurationError
from pyqueue.messages import Id
from pyqueue.requests import Document, Find, Plan, ServerTime, Signal, Update


def force_release(id: Id) -> Plan[bool]:
    """Put a held message back into its queue. Its holder gets LeaseLost. The try still counts.

    Returns:
        Whether the message was held.

    Raises:
        ConfigurationError: The message shares a document with other messages.
    """
    spellings = arguments.spellings(id)
    now = yield from ServerTime()
    found = yield from Find({"_id": {"$in": spellings}, **finding.IN_QUEUES})
    if (document := finding.first_of(spellings, found)) is not None:
        return (yield from _free(document, now))
    yield from _refuse_shared(id, now)
    return False


def _free(document: Document, now: datetime) -> Plan[bool]:
    if not {"when", "token"} <= document.keys() or "processed" in document:
        return False
    if not transitions.is_held(document, now):
        return False
    queue, due = document["q"], document.get("due")
    kind = kinds.lookup((yield from namespace.kind_of(queue)) or GUESSED_KIND)
    back = due if isinstance(due, datetime) else now
    update = transitions.releasing(kind, back, now, uncounted=())
    match = {"_id": document["_id"], "q": queue, "token": document["token"]}
    if not (yield from Update({**match, "when": {"$gt": now}}, update)).matched:
        return False
    yield from kind.ended(queue, [document])
    yield from Signal(queue, update["$set"]["when"])  # scans must begin there
    return True


def _refuse_shared(id: Id, now: datetime) -> Plan[None]:
    """Refuse a held message that shares a document, and a message of a stream.

    Raises:
        ConfigurationError: The message shares a held document, or is in a stream.
    """
    if (place := packs.place_of(id)) is not None:
        found = yield from find_packed(finding.IN_QUEUES, place)
        if any(transitions.is_held(each, now) for each in found):
            raise ConfigurationError(
                f"force_release: message {id} shares a document with other messages, which would "
                "be released with it; wait until the lease ends, and pass id= when you push such "
                "messages, so that each gets its own document"
            )
    if (yield from finding.in_stream(id)) is not None:
        raise ConfigurationError(
            f"force_release: {id} is a message of a stream, which each consumer group "
            "holds separately; call seek() on a consumer group to end all of its leases"
        )
