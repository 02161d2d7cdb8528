"""Extending leases: ``Queue.extend``, and the renewals of a client's renewer.

An extension may be repeated: it only writes a later end of the lease. Therefore one command extends
many leases. If that command times out, a message is locked, or the server is busy. Then the command
is split, and the parts are sent at once, until each locked message is alone. So a locked message
costs no other message its lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends import forms, transitions
from pyqueue.backends.ending import CANCELLED
from pyqueue.backends.forms import Extension, Failures, Held
from pyqueue.backends.options import QueueTerms
from pyqueue.concurrently import SHORT_AT_ONCE, concurrently
from pyqueue.documents import hashable_id, is_cancelled
from pyqueue.errors import LeaseLost, QueueError, Unavailable, first_ten
from pyqueue.messages import Reservation, seconds_left
from pyqueue.requests import Find, Plan, ServerTime, Update

#: How many leases one command may extend. An update of 1000 messages with a token each takes the
#: server 50 times as long as an update of 100.
MAX_GROUP: Final = 100
#: How many parts a timed-out group is divided into. So 100 messages take two divisions, and a
#: locked message costs the other messages up to three time limits.
_PARTS: Final = 10
#: The shortest time limit, in seconds, of the last try for one of several messages in ``extend``.
LAST_TRY_S: Final = 2.0


class _Limits(NamedTuple):
    """A command's time limits in seconds; None is the usual limit. See ``requests.Command``."""

    max_time_s: float | None
    server_limit_s: float | None


_NO_LIMITS: Final = _Limits(None, None)


def extend(
    terms: QueueTerms, given: Sequence[object], *, lease: float | timedelta | None = None
) -> Plan[None]:
    """Renew the leases of messages, starting now.

    Raises:
        LeaseLost: Some messages were no longer held; the other leases are extended.
        Unavailable: The outcome is unknown for the messages in the exception's ``ids``; each other
            lease was extended or lost.
    """
    held = arguments.reservations(terms.queue, tuple(given))
    lease_s = None if lease is None else arguments.duration("lease", lease, positive=True)
    how = Extension(lease_s, terms.command_timeout_s, patient=len(held) == 1)
    failures = yield from _extend(held, how)
    failed = [(each, error) for each, error in failures if isinstance(error, Unavailable)]
    if failed:
        error = failed[0][1]
        raise Unavailable(str(error), ids=[each.id for each, _ in failed]) from error
    if failures:
        raise LeaseLost(
            f"{len(failures)} of {len(held)} reservations of queue {terms.queue!r} are no longer "
            f"held: messages {first_ten([each.id for each, _ in failures])}",
            lost=[each for each, _ in failures],
        )


def age_s(held: Reservation[Any]) -> Plan[float]:
    """Return for how many seconds a lease has been running."""
    return held.lease - seconds_left(held, (yield from ServerTime()))


def renew(
    held: Held, told: Callable[[Reservation[Any]], object] | None = None
) -> Plan[list[QueueError | None]]:
    """Extend each lease by its own length.

    This waits for the primary only. A fail-over may undo a renewal, but the former lease then still
    lasts until after the next renewal.

    Args:
        held: The reservations whose leases are extended.
        told: Called for each message that was cancelled. If there are such messages, this takes
            further commands.

    Returns:
        One entry per lease: None, or the error of its extension.
    """
    budget_s = min(each.lease for each in held) / 2
    failures = yield from _extend(held, Extension(None, budget_s, w1=True, told=told))
    errors = {id(each): error for each, error in failures}
    return [errors.get(id(each)) for each in held]


def _extend(held: Held, how: Extension) -> Plan[Failures]:
    failures: Failures = []
    for form, some in forms.by_form(held):
        failures += yield from form.extend(some, how)
    return failures


def extend_documents(held: Held, how: Extension) -> Plan[Failures]:
    """Extend the leases of messages that have their own documents. Return the failures."""
    groups = list(_groups(held, how.lease_s))
    end = (yield from ServerTime()) + timedelta(seconds=how.budget_s)
    failures: Failures = []
    troubles: list[Unavailable] = []
    while groups:
        tries = [_try_group(each, how, end, troubles) for each in groups]
        outcomes = yield from concurrently(tries, SHORT_AT_ONCE)
        tried, groups = groups, []
        for group, outcome in zip(tried, outcomes, strict=True):
            if not isinstance(outcome, Unavailable):
                failures += [(each, lost_lease(each)) for each in outcome]
            elif len(group) == 1 or (yield from ServerTime()) >= end:
                failures += [(each, outcome) for each in group]
            else:
                groups += _divided(group, _PARTS)
    return failures


def _try_group(
    group: Held, how: Extension, end: datetime, troubles: list[Unavailable]
) -> Plan[Held | Unavailable]:
    """Extend the leases of a group with one command.

    Args:
        group: Reservations with leases of the same length.
        how: How the leases are extended.
        end: When to stop trying if commands fail.
        troubles: The errors of commands since the last success, from all groups.

    Returns:
        The reservations that are no longer held, or the error of the command.
    """
    now = yield from ServerTime()
    if troubles and now >= end:
        return troubles[-1]
    length_s = group[0].lease if how.lease_s is None else how.lease_s
    until = now + timedelta(seconds=length_s)
    limits = _NO_LIMITS if how.patient else _limits(group, how.budget_s, w1=how.w1)
    try:
        lost = yield from _extend_group(group, until, how, limits)
    except Unavailable as error:
        troubles.append(error)
        return error
    troubles.clear()
    missing = {id(each) for each in lost}
    for each in group:
        if id(each) not in missing:
            each.until, each.lease = until, length_s
    return lost


def _limits(group: Held, budget_s: float, *, w1: bool) -> _Limits:
    """Return the time limits of one command, in seconds.

    They are long enough for a slow link, and three consecutive commands fit into the budget.
    The driver refuses a command whose limit is shorter than the last round trip that it measured,
    which may have been long on a busy machine. So the server enforces the limit of a renewal. The
    server cannot do so if the command also waits for other members. The last try of a message then
    gets more time.
    """
    limit_s = min(max(min(each.lease for each in group) / 8, 0.5), budget_s / 4)
    if w1:
        return _Limits(max(limit_s, budget_s / 2), limit_s)
    return _Limits(limit_s if len(group) > 1 else max(limit_s, LAST_TRY_S), None)


def _groups(held: Held, lease_s: float | None) -> Iterable[Held]:
    """Divide reservations into groups with leases of equal length."""
    by_length: dict[float, list[Reservation[Any]]] = {}
    for each in held:
        by_length.setdefault(each.lease if lease_s is None else lease_s, []).append(each)
    for same in by_length.values():
        for start in range(0, len(same), MAX_GROUP):
            yield same[start : start + MAX_GROUP]


def _divided(group: Held, parts: int) -> Iterable[Held]:
    size = -(-len(group) // parts)
    return (group[start : start + size] for start in range(0, len(group), size))


def _extend_group(group: Held, until: datetime, how: Extension, limits: _Limits) -> Plan[Held]:
    """Extend a group with one command. Return the reservations that are no longer held.

    If the caller wants to be told of cancelled messages, the command leaves them out, and a second
    update extends them. Without cancelled messages, no second update is needed.
    """
    match = transitions.holds_filter(group)
    if how.told is not None:
        match = {**match, "cancel": {"$not": CANCELLED["cancel"]}}
    change = {"$set": {"when": until}}
    many = len(group) > 1
    found = yield from Update(
        match,
        change,
        many=many,
        w1=how.w1,
        max_time_s=limits.max_time_s,
        server_limit_s=limits.server_limit_s,
    )
    if found.matched == len(group):
        return []
    if not many and how.told is None:
        return group
    lost, others = yield from _not_extended(group, how.told)
    if others:
        lost += yield from _extend_group(others, until, how._replace(told=None), limits)
    return lost


def _not_extended(
    group: Held, told: Callable[[Reservation[Any]], object] | None
) -> Plan[tuple[list[Reservation[Any]], list[Reservation[Any]]]]:
    """Find out which leases a command did not extend, and report cancelled messages.

    Returns:
        The reservations that are no longer held, and the reservations that are still held although
        the command did not match them.
    """
    live = {"_id": {"$in": [each.id for each in group]}, "processed": {"$exists": False}}
    documents = yield from Find(live, {"token": 1} if told is None else {"token": 1, "cancel": 1})
    stored = {(hashable_id(each["_id"]), str(each.get("token"))): each for each in documents}
    lost: list[Reservation[Any]] = []
    others: list[Reservation[Any]] = []
    for each in group:
        document = stored.get((hashable_id(each.id), each.token))
        if document is None:
            lost.append(each)
        elif told is not None and "cancel" in document:
            others.append(each)
            if is_cancelled(document):
                told(each)
    return lost, others


def lost_lease(held: Reservation[Any]) -> LeaseLost:
    """Return the error for an extension of a lease that is no longer held."""
    return LeaseLost(
        f"message {held.id} of queue {held.queue!r} is no longer held: its lease ended, "
        "or it was settled",
        lost=[held],
    )
