"""Store, change, list and run schedules.

Each change is an update with majority write concern that matches the revision that was read. So it
never undoes a tick or another change.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import cast

from pyqueue.backends import namespace
from pyqueue.backends.handover import Handover, discard, finish_decided, hand_over
from pyqueue.backends.hidden import HANDED, NOTHING
from pyqueue.backends.inserting import unknown_outcome
from pyqueue.backends.namespace import HOT, MAX_RACES
from pyqueue.backends.naming_kind import GUESSED_KIND
from pyqueue.backends.recovering import SCHEDULES
from pyqueue.backends.schedules.definitions import (
    Definition,
    Schedule,
    check_target,
    read,
    schedule_id,
    timing_in,
)
from pyqueue.backends.transitions import new_token
from pyqueue.errors import ConfigurationError, Unavailable
from pyqueue.messages import NEVER, Id, ScheduleInfo
from pyqueue.payloads import encode
from pyqueue.requests import (
    Delete,
    Document,
    EnsureQueue,
    Find,
    FindAndModify,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
)

log = logging.getLogger("pyqueue")


def schedule(given: Definition) -> Plan[bool]:
    """Store a schedule, or change it to the given definition.

    If its times stay the same, the schedule keeps its next tick.

    Returns:
        Whether the schedule is new or was changed. An equal definition changes nothing.

    Raises:
        ConfigurationError: The queue is a stream, or does not offer an option.
        Unavailable: Other programs keep changing the schedule, or the server did not answer.
    """
    spec = given.spec
    check_target(spec, (yield from namespace.kind_of(spec["queue"])))
    for _ in range(MAX_RACES):
        stored = yield from _stored(given.name)
        if stored is None:
            done = yield from _insert(given)
        elif _is_same(stored.get("spec"), spec):
            return False
        else:
            done = yield from _redefine(stored, spec)
        if done:
            yield from Signal(SCHEDULES, None)
            return True
    raise _kept_changing(given.name)


def _stored(name: str) -> Plan[Document | None]:
    """Return a schedule's document, once a majority has stored it, or None if there is none."""
    return (yield from FindAndModify({"_id": schedule_id(name)}, NOTHING, majority=True))


def _is_same(former: object, spec: Document) -> bool:
    """Return whether two definitions are equal as BSON. Python takes True for 1, for example."""
    return encode({"spec": former}).raw == encode({"spec": spec}).raw


def _insert(given: Definition) -> Plan[bool]:
    """Insert a schedule. Return False if another program has already inserted it."""
    now = yield from ServerTime()
    new = {
        "_id": schedule_id(given.name),
        "q": SCHEDULES,
        "when": timing_in(given.spec).first(now) or NEVER,
        "token": new_token(),
        "spec": given.spec,
    }
    failures = yield from Insert([encode(new)], majority=True)
    for failure in failures:
        if failure.field is None:
            raise failure.error
    return not failures


def _redefine(stored: Document, spec: Document) -> Plan[bool]:
    """Change the definition of a schedule. Return False if it has changed since it was read."""
    put: Document = {"spec": spec, "token": new_token()}
    if "paused" not in stored and not _ticks_as(stored, spec):
        put["when"] = timing_in(spec).first((yield from ServerTime())) or NEVER
    encode({**stored, **put})  # raises InvalidMessage if it is too large
    return (yield from _update(stored, {"$set": put, "$unset": {"error": ""}}))


def _ticks_as(stored: Document, spec: Document) -> bool:
    """Return whether a stored schedule is readable and has the same times as a definition."""
    former = stored.get("spec")
    if not isinstance(former, dict) or not isinstance(stored.get("when"), datetime):
        return False
    return all(former.get(each) == spec.get(each) for each in ("cron", "every", "timezone"))


def _update(stored: Document, update: UpdateDocument) -> Plan[bool]:
    """Change a schedule. Return False if it has changed since it was read."""
    match = {"_id": stored["_id"], "token": stored.get("token")}
    return bool((yield from Update(match, update, majority=True)).matched)


def pause(name: str, value: bool) -> Plan[bool]:
    """Pause a schedule, or resume it from its next tick on. Return whether the schedule exists.

    Raises:
        ConfigurationError: This release cannot read the schedule.
        Unavailable: Other programs keep changing the schedule, or the server did not answer.
    """
    for _ in range(MAX_RACES):
        stored = yield from _stored(name)
        if stored is None:
            return False
        if ("paused" in stored) == value:
            return True
        update: UpdateDocument = {
            "$set": {"paused": True, "when": NEVER, "token": new_token()},
        }
        if not value:
            when = read(stored).timing.first((yield from ServerTime())) or NEVER
            put = {"when": when, "token": new_token()}
            update = {"$set": put, "$unset": {"paused": ""}}
        if (yield from _update(stored, update)):
            yield from Signal(SCHEDULES, None)
            return True
    raise _kept_changing(name)


def unschedule(name: str) -> Plan[bool]:
    """Delete a schedule, after publishing the messages of its ticks. Return whether it existed.

    Raises:
        Unavailable: The schedule keeps ticking, or the server did not answer.
    """
    for _ in range(MAX_RACES):
        stored = yield from _stored(name)
        if stored is None:
            return False
        yield from finish_decided(stored)
        unlisted = {"_id": stored["_id"], f"{HANDED}.h": {"$exists": False}}
        if (yield from Delete(unlisted, majority=True)):
            return True
    raise _kept_changing(name)


def run(name: str) -> Plan[Id | None]:
    """Push the message of a schedule now. Return its id, or None if the schedule does not exist.

    Raises:
        ConfigurationError: The queue refuses the message, or this release cannot read the schedule.
        Unavailable: Other programs keep changing the schedule, or the outcome is unknown.
    """
    for _ in range(MAX_RACES):
        stored = yield from _stored(name)
        if stored is None:
            return None
        yield from finish_decided(stored)
        schedule = read(stored)
        now = yield from ServerTime()
        messages = yield from messages_of(schedule, [now])
        try:
            if (yield from push(schedule, messages, {})):
                return cast("Id", messages[-1]["_id"])
        except Unavailable as error:
            raise unknown_outcome(error, messages) from error
    raise _kept_changing(name)


def messages_of(schedule: Schedule, ticks: Sequence[datetime]) -> Plan[list[Document]]:
    """Return the messages for these ticks. Create the record of their queue if it is missing.

    Raises:
        ConfigurationError: The queue is a stream, or does not offer an option.
    """
    queue, priorities = schedule.spec["queue"], [schedule.spec.get("priority")]
    stored = yield from EnsureQueue(queue, GUESSED_KIND, guessed=True)
    kind = check_target(schedule.spec, stored)
    if kind.levels(priorities):
        yield from namespace.ensure(queue, kind, None, priorities)
    return schedule.messages(kind, ticks, (yield from ServerTime()))


def push(schedule: Schedule, messages: Sequence[Document], put: Document) -> Plan[bool]:
    """Push messages, if the schedule has not changed since it was read.

    Args:
        schedule: The schedule, as it was read.
        messages: The messages, whose ids no other call uses.
        put: Further fields to set in the schedule.

    Returns:
        Whether they were pushed. If this raises Unavailable, read the schedule again.
    """
    last = {"last": messages[-1]["_id"], "token": new_token()}
    source = schedule.stored["_id"]
    handover = Handover(SCHEDULES, source, schedule.token, messages, shared=True)
    update: UpdateDocument = {"$set": {**last, **put}, "$unset": {"error": ""}}
    # "unknown" means that another process has published the messages, because their ids are new.
    if (yield from hand_over(handover, schedule.unchanged, update)) != "lost":
        return True
    yield from discard(handover)
    return False


def schedules() -> Plan[list[ScheduleInfo]]:
    """Return the schedules that this release can read, sorted by name."""
    infos: list[ScheduleInfo] = []
    for stored in (yield from Find({"q": SCHEDULES}, hint=HOT)):
        try:
            infos.append(read(stored).info())
        except ConfigurationError as error:
            log.warning("%s", error)
    return sorted(infos, key=lambda each: each.name)


def _kept_changing(name: str) -> Unavailable:
    return Unavailable(f"schedule {name!r}: other programs keep changing it; try again")
