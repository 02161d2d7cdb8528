"""Extending leases: ``Queue.extend``, and the renewals of a client's renewer.

An extension may be repeated: it only writes a later end of the lease. Therefore one command extends
many leases. If it times out, it is split and sent again until each locked message is alone. A
locked message then costs no other message its lease.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue import arguments
from pyqueue.backends import forms, transitions
from pyqueue.backends.ending import CANCELLED
from pyqueue.backends.forms import Extension, Failures, Held
from pyqueue.backends.options import QueueTerms
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
    """The time limits of a command in seconds, or None for the usual; see ``requests.Command``."""

    max_time_s: float | None
    server_limit_s: float | None


_NO_LIMITS: Final = _Limits(None, None)


def extend(
    terms: QueueTerms, given: Sequence[object], *, lease: float | timedelta | None = None
) -> Plan[None]:
    """Renew the leases of messages, starting now.

    Raises:
        LeaseLost: some messages were no longer held; the other leases are extended.
        Unavailable: the outcome is unknown for the messages in the exception's ``ids``; each other
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
    """Return how many seconds a lease has run."""
    return held.lease - seconds_left(held, (yield from ServerTime()))


def renew(
    held: Held, told: Callable[[Reservation[Any]], object] | None = None
) -> Plan[list[QueueError | None]]:
    """Extend each lease by its own length.

    This waits for the primary only. A fail-over that undoes the renewal leaves the former end of
    the lease, which is later than the next renewal.

    Args:
        held: the reservations whose leases are extended.
        told: called for each message that was cancelled. This takes a further command only if there
            are such messages.

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
    failures: Failures = []
    groups = deque(_groups(held, how.lease_s))
    trouble: Unavailable | None = None
    end = (yield from ServerTime()) + timedelta(seconds=how.budget_s)
    while groups:
        length_s, group = groups.popleft()
        now = yield from ServerTime()
        if trouble is not None and now >= end:
            failures += [(each, trouble) for each in group]
            continue
        limits = _NO_LIMITS if how.patient else _limits(group, how.budget_s, w1=how.w1)
        until = now + timedelta(seconds=length_s)
        try:
            lost = yield from _extend_group(group, until, how, limits)
        except Unavailable as error:
            trouble = error
            if len(group) == 1:
                failures.append((group[0], error))
            else:
                # The parts come after all other groups, which may meet no lock.
                groups += [(length_s, part) for part in _divided(group, _PARTS)]
            continue
        trouble = None
        missing = {id(each) for each in lost}
        for each in group:
            if id(each) not in missing:
                each.until, each.lease = until, length_s
        failures += [(each, lost_lease(each)) for each in lost]
    return failures


def _limits(group: Held, budget_s: float, *, w1: bool) -> _Limits:
    """Return the time limits of one command, in seconds.

    They are long enough for a slow link, and three consecutive commands fit into the budget.
    The driver sends no command whose limit is shorter than the round trip that it last measured,
    perhaps on a busy machine. So the server enforces the limit of a renewal. It cannot enforce a
    limit if the command also waits for other members; then the last try of a message gets more
    time.
    """
    limit_s = min(max(min(each.lease for each in group) / 8, 0.5), budget_s / 4)
    if w1:
        return _Limits(max(limit_s, budget_s / 2), limit_s)
    return _Limits(limit_s if len(group) > 1 else max(limit_s, LAST_TRY_S), None)


def _groups(held: Held, lease_s: float | None) -> Iterable[tuple[float, Held]]:
    """Divide reservations into groups with leases of equal length."""
    by_length: dict[float, list[Reservation[Any]]] = {}
    for each in held:
        by_length.setdefault(each.lease if lease_s is None else lease_s, []).append(each)
    for length_s, same in by_length.items():
        for start in range(0, len(same), MAX_GROUP):
            yield length_s, same[start : start + MAX_GROUP]


def _divided(group: Held, parts: int) -> Iterable[Held]:
    size = -(-len(group) // parts)
    return (group[start : start + size] for start in range(0, len(group), size))


def _extend_group(group: Held, until: datetime, how: Extension, limits: _Limits) -> Plan[Held]:
    """Extend a group with one command. Return the reservations that are no longer held.

    If the caller asks for cancelled messages, the command does not match them. A second command
    extends them, so the question costs a command only if there are cancelled messages.
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
        The reservations that are no longer held, and the held reservations that the command did
        not match.
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
    """Return the error for an extension that came after the end of the lease."""
    return LeaseLost(
        f"message {held.id} of queue {held.queue!r} is no longer held: its lease ended, "
        "or it was settled",
        lost=[held],
    )
