"""Convert a stored document into a message, and find its invalid fields.

Any program may write to the collection, so a stored document is checked before it is used. This
module does no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from zlib import crc32

from bson import ObjectId

from pyqueue.facts import Attempt, Burial, ErrorInfo, Gather, Keep, Progress
from pyqueue.messages import (
    HIGHEST_PRIORITY,
    NEVER,
    TRAIL_LENGTH,
    Deferral,
    Finished,
    Message,
    Reservation,
    State,
)

#: Instants from this year on are reserved for pyqueue.
_RESERVED_YEAR: Final = 8000
#: How many combinations of names and types of fields are remembered, and how many characters their
#: names may have together: other programs may store documents with any number of fields.
MAX_LAYOUTS: Final = 100
_MAX_CHARACTERS: Final = 1000
#: Integers below this have an exact floating-point form.
_MAX_EXACT: Final = 1 << 53

#: The prefix of a stored group; see ``stored_group``.
GROUP_PREFIX: Final = re.compile("[0-9a-f]{3}:")
#: The fields that may hold the group of a message: while it waits, while it is held, and after it
#: has left its ordered queue.
STORED_GROUP: Final = ("group", "lock", "last_group")
#: The types of the fields that the code relies on. Other fields may have any value.
_FIELD_TYPES: Final[Mapping[str, type | tuple[type, ...]]] = {
    "_id": (ObjectId, str),
    "q": str,
    "when": datetime,
    "due": datetime,
    "pushed": datetime,
    "tries": (int, float),
    "deliveries": (int, float),
    "headers": dict,
    "key": str,
    "last_key": str,
    "token": str,
    "owner": str,
    "error": dict,
    "progress": dict,
    "trail": list,
    "attempts": list,
    "dead": dict,
    "processed": datetime,
    "outcome": str,
}


def invalid_fields(document: Mapping[str, Any]) -> list[str]:
    """Return the names of the fields of a stored message whose values pyqueue would not write."""
    layout = (*document, *map(type, document.values()))
    checks = _layouts.get(layout)
    if checks is None:
        checks = _checks_of(document, layout)
    for name, is_valid in checks:
        if not is_valid(document[name]):
            return [each for each, check in checks if not check(document[each])]
    return []


def _checks_of(document: Mapping[str, Any], layout: tuple[object, ...]) -> _Checks:
    """Return the checks of documents with these names and types of fields, and remember them."""
    wrong = [
        name
        for name, value in document.items()
        if not isinstance(value, _FIELD_TYPES.get(name, object))
    ]
    checks: _Checks = [(name, _is_never) for name in wrong]
    checks += [each for each in _VALUE_CHECKS if each[0] in document and each[0] not in wrong]
    if len(_layouts) < MAX_LAYOUTS and sum(map(len, document)) <= _MAX_CHARACTERS:
        _layouts[layout] = checks
    return checks


def _is_never(value: object) -> bool:
    return False


def _is_count(value: float) -> bool:
    return not isinstance(value, bool) and -_MAX_EXACT < value < _MAX_EXACT  # not NaN


def _is_due(value: datetime) -> bool:
    return value.year < _RESERVED_YEAR


def _are_headers(value: Mapping[str, object]) -> bool:
    return all(isinstance(each, (str, int, float)) for each in value.values())


def _is_trail(value: Sequence[object]) -> bool:
    return all(
        isinstance(stop, dict)
        and isinstance(stop.get("q"), str)
        and isinstance(stop.get("at"), datetime)
        for stop in value
    )


def _are_attempts(value: Sequence[object]) -> bool:
    return all(isinstance(each, dict) for each in value)


def _is_death(value: Mapping[str, object]) -> bool:
    return isinstance(value.get("from"), str) and isinstance(value.get("at"), datetime)


_Checks = list[tuple[str, Callable[[Any], bool]]]
_VALUE_CHECKS: Final[tuple[tuple[str, Callable[[Any], bool]], ...]] = (
    ("tries", _is_count),
    ("deliveries", _is_count),
    ("due", _is_due),
    ("headers", _are_headers),
    ("trail", _is_trail),
    ("attempts", _are_attempts),
    ("dead", _is_death),
)
#: The checks that documents with the same names and types of fields need. A queue has few of them.
_layouts: dict[tuple[object, ...], _Checks] = {}


def hashable_id(id: object) -> Hashable:
    """Return an id in a form that can be a key of a dict: foreign documents may have any id."""
    return id if isinstance(id, (ObjectId, str)) else repr(id)


def hashable_ids(ids: Iterable[object]) -> list[Hashable]:
    """Return ids as ``hashable_id`` does, quicker if none of them is foreign."""
    given: list[Any] = list(ids)
    return given if set(map(type, given)) <= {ObjectId, str} else [*map(hashable_id, given)]


def without_fields(document: Mapping[str, Any], invalid: Sequence[str]) -> dict[str, Any]:
    """Return a stored message without its invalid fields."""
    return {name: value for name, value in document.items() if name == "_id" or name not in invalid}


def priority_of(document: Mapping[str, Any]) -> int | None:
    """Return the priority of a stored message, or None if it has no valid priority."""
    value = document.get("priority")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return int(value) if value in range(HIGHEST_PRIORITY + 1) else None


def stored_group(group: str) -> str:
    """Return the stored form of a group. Its prefix, a short hash, spreads groups over an index."""
    return f"{crc32(group.encode()) & 0xFFF:03x}:{group}"


def group_of(document: Mapping[str, Any]) -> str | None:
    """Return the group of a stored message, or None if it has no valid group."""
    for name in STORED_GROUP:
        value = document.get(name)
        if isinstance(value, str):
            return value[4:] if GROUP_PREFIX.match(value) else value
    return None


def key_of(document: Mapping[str, Any]) -> str | None:
    """Return the key of a stored message or, if it is finished or dead, its last key."""
    key: str | None = document.get("key")
    if not key and ("processed" in document or "dead" in document):
        return document.get("last_key")
    return key


def state_of(document: Mapping[str, Any], now: datetime) -> State:
    """Return the state of a stored message at an instant."""
    if "processed" in document:
        return "finished"
    if document.get("when", NEVER) <= now:
        return "ready"
    return "reserved" if "token" in document else "scheduled"


def deferral_of(document: Mapping[str, Any], now: datetime) -> Deferral | None:
    """Return why a message waits although its time has come, or None if it does not wait.

    A consumer that finds a message blocked moves its ``when`` into the future, and keeps the
    original instant in ``due``; see ``turns``.
    """
    if "token" in document or "processed" in document:
        return None
    due, when = document.get("due"), document.get("when")
    if not isinstance(due, datetime) or not isinstance(when, datetime) or not due <= now < when:
        return None
    if "limited" in document:
        return "limit"
    return "group" if "group" in document else None


def is_cancelled(document: Mapping[str, Any]) -> bool:
    """Return whether a message was cancelled while a consumer held it."""
    return isinstance(document.get("cancel"), datetime) and "processed" not in document


def may_end(document: Mapping[str, Any]) -> bool:
    """Return quickly whether a claim might end a message. ``ends_at_claim`` decides it."""
    return "cancel" in document or "best_before" in document or "dies" in document


def may_expire(document: Mapping[str, Any], counted: bool) -> bool:
    """Return whether a claimed message is in its first try, and has an instant of expiry.

    ``counted`` says whether the claim counted as a try.
    """
    if "best_before" not in document and "dies" not in document:
        return False
    tries = document.get("tries", 0)
    return isinstance(tries, (int, float)) and tries - counted <= 0


def ends_at_claim(document: Mapping[str, Any], now: datetime, counted: bool) -> str | None:
    """Return the outcome with which a claim ends a message, or None if it delivers the message.

    Args:
        document: The stored message after the claim or, if a pop deletes it, before the deletion.
        now: The instant of the claim.
        counted: Whether the claim counted as a try.
    """
    if is_cancelled(document):
        return "cancelled"
    if "processed" in document or not may_expire(document, counted):
        return None
    best_before = document.get("best_before", document.get("dies"))
    expired = isinstance(best_before, datetime) and best_before <= now
    return "expired" if expired else None


def mark_dead(message: Message[Any]) -> Message[Any]:
    """Set the state of a message to "dead" if it waits in a dead-letter queue. Return the message.

    Such a message has the field ``dead`` from its burial until it leaves that queue.
    """
    if message.dead is not None and message.state in ("ready", "scheduled"):
        message.state = "dead"
    return message


def eligible_since(document: Mapping[str, Any]) -> datetime | None:
    """Return the instant since which a message is eligible, or None if no stored value shows it.

    Another program may have written the message without ``due``. Then ``when`` is used. For a held
    message, it is the time of the claim, because ``when`` is the end of the lease.
    """
    for name in ("due", "reserved" if "token" in document else "when"):
        value = document.get(name)
        if isinstance(value, datetime):
            return value
    return None


def trail_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the queues that a message passed through, each with the known facts about its stay.

    A message enters a queue when it leaves the previous queue. For the first entry of a full trail,
    this time is unknown, because earlier entries may have been dropped.
    """
    stored = document.get("trail") or ()
    came = document.get("pushed") if len(stored) < TRAIL_LENGTH else None
    stops: list[dict[str, Any]] = []
    for stop in stored:
        facts = {"in": came, "out": stop["at"]}
        stops.append({"tries": None, "waited": None, **stop, **facts})
        came = stop["at"]
    return stops


def message_of(
    document: Mapping[str, Any], payload: Any, now: datetime, *, lease: float | None = None
) -> Message[Any]:
    """Return the message of a stored document.

    Args:
        document: The document, without its invalid fields.
        payload: The payload, as the model loaded it.
        now: The current instant.
        lease: The length of the lease in seconds, for a ``Reservation``.

    Returns:
        A ``Reservation`` if ``lease`` is given, else a ``Finished`` or a ``Message``. A missing
        field becomes an empty value.
    """
    get = document.get
    when = get("when", NEVER)
    tries = int(get("tries", 0))
    # Most messages have none of these, and a claim makes many messages.
    error, progress, dead = get("error"), get("progress"), get("dead")
    common = (
        document["_id"],
        get("q", ""),
        payload,
        get("headers") or {},
        key_of(document),
        eligible_since(document) or when,
        get("pushed", when),
        tries,
        error if error is None else ErrorInfo.of(error),
        progress if progress is None else Progress.of(progress),
        get("checkpoint"),
        trail_of(document) if "trail" in document else [],
        state_of(document, now),
        dead if dead is None else Burial.of(dead),
    )
    # An older release counted no deliveries.
    more: dict[str, Any] = {"deliveries": max(tries, int(get("deliveries", 0)))}
    if "attempts" in document:
        more["attempts"] = tuple(map(Attempt.of, document["attempts"]))
    if "lock" in document or "group" in document or "last_group" in document:
        more["group"] = group_of(document)
    if "priority" in document:
        more["priority"] = priority_of(document)
    if lease is not None:
        if "keep" in document or "unique" in document:
            more["keep"] = Keep.of(document)
        if "gather" in document:
            more["gather"] = Gather.of(document["gather"])
        if type(slot := document.get("slot")) is str:
            more["slot"] = slot
        more["reserved"] = get("reserved", now)
        return Reservation(*common, document["token"], when, get("owner", ""), lease, **more)
    if "limited" in document or "group" in document:
        more["deferred"] = deferral_of(document, now)
    if "processed" in document:
        more["result"] = get("result")
        return Finished(*common, get("outcome", ""), document["processed"], **more)
    return Message(*common, **more)


def listed_levels(stored: object) -> tuple[int, ...]:
    """Return the valid priorities that the record of a queue lists, highest first."""
    values = stored if isinstance(stored, list) else []
    levels = {each for each in values if isinstance(each, int) and not isinstance(each, bool)}
    return tuple(sorted((each for each in levels if 0 <= each <= HIGHEST_PRIORITY), reverse=True))
