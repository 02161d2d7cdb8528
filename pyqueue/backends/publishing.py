"""Publish the hidden copies of a committed handover: they become messages, or records of gathers.

Any process may do this, any number of times; see ``handover``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

from pyqueue.backends.applying import MAX_BATCH, update_with_key
from pyqueue.backends.hidden import (
    CALL,
    GATHERS,
    MARK,
    TOKEN,
    copy_filter,
    gather_of,
    is_new,
    old_when_of,
    origin_of,
    target_of,
)
from pyqueue.backends.transitions import unset
from pyqueue.gathers import Look
from pyqueue.hooks import Tell
from pyqueue.requests import (
    Document,
    Filter,
    Plan,
    ServerTime,
    Signal,
    UpdateDocument,
    UpdateEach,
)

Name = TypeVar("Name", bound=Hashable)


def publish(copies: Sequence[Document]) -> Plan[int]:
    """Publish the hidden copies of committed handovers. Return how many were still hidden.

    The record of a gather is published after the messages that it waits for.
    """
    now = yield from ServerTime()
    records = [each for each in copies if target_of(each) == GATHERS]
    messages = [each for each in copies if target_of(each) != GATHERS] if records else copies
    published = yield from _enter(messages, now)
    for to, members in grouped(target_of, messages):
        yield from Signal(to, min(_when_of(each, now) for each in members))
        new = [each["_id"] for each in members if is_new(each)]
        if new and published == len(messages):  # otherwise another process reports some
            yield from Tell("pushed", to, new)
    if records:
        published += yield from _enter(records, now)
        for each in records:
            yield from Look(each["_id"])
    return published


def _enter(copies: Sequence[Document], now: datetime) -> Plan[int]:
    """Move hidden copies into their queues. Return how many were still hidden."""
    # A copy gets its key only now, and only if the key is free in its queue.
    keyed = [each for each in copies if "key" in each[MARK]]
    rest = [each for each in copies if "key" not in each[MARK]]
    pairs = [
        (_any_of(members[start : start + MAX_BATCH]), _entering(members[0], now))
        for _, members in grouped(_alike, rest)
        for start in range(0, len(members), MAX_BATCH)
    ]
    published = yield from update_each(pairs, many=True)
    for each in keyed:
        key, update = each[MARK]["key"], _entering(each, now)
        published += yield from update_with_key(copy_filter(each), update, key, majority=True)
    return published


def _when_of(copy: Document, now: datetime) -> datetime:
    """Return when the message of a copy becomes ready if the copy is published now."""
    old = old_when_of(copy)
    return max(now, copy["when"]) if old is None else old


def _alike(copy: Document) -> tuple[str, datetime | None, Any, Any]:
    """Return a value that is equal for copies that one update can move into their queue."""
    gather = gather_of(copy) or {}
    return target_of(copy), old_when_of(copy), gather.get("id"), gather.get("dead")


def _entering(copy: Document, now: datetime) -> Mapping[str, Mapping[str, Any]]:
    """Return the update that moves a hidden copy into its queue."""
    put: dict[str, Any] = {"q": target_of(copy)}
    if (gather := gather_of(copy)) is not None:
        put["gather"] = gather
    if (old := old_when_of(copy)) is not None:  # because of the signal, scans begin there again
        return {"$set": put | {"when": old}, "$unset": unset(MARK)}
    # Messages scheduled for later keep their instant.
    return {"$set": put, "$max": {"when": now, "due": now}, "$unset": unset(MARK)}


def update_each(
    pairs: Sequence[tuple[Filter, UpdateDocument]], *, many: bool = False, half_time: bool = False
) -> Plan[int]:
    """Apply each update with majority write concern. Return how many documents matched.

    Raises:
        QueueError: The server refused one of the updates.
    """
    if not pairs:
        return 0
    matched, failures = yield from UpdateEach(pairs, many=many, majority=True, half_time=half_time)
    for failure in failures:
        raise failure.error
    return matched


def _any_of(copies: Sequence[Document]) -> Filter:
    """Return the filter that matches all of these hidden copies."""
    some = [
        {"q": q, TOKEN: token, CALL: call, "_id": {"$in": [each["_id"] for each in same]}}
        for (q, token, call), same in grouped(origin_of, copies)
    ]
    return {"$or": some}


def grouped(
    name: Callable[[Document], Name], copies: Iterable[Document]
) -> Iterable[tuple[Name, list[Document]]]:
    """Group copies by the value that ``name`` returns for them."""
    groups: dict[Name, list[Document]] = {}
    for each in copies:
        groups.setdefault(name(each), []).append(each)
    return groups.items()
