"""Select: count or change the messages of a queue that meet conditions, in portions.

A call walks over the queue as ``browsing`` does, and changes the messages that it finds, up to a
thousand at a time; see ``changing``. Messages that came into the queue after the call began are not
selected. So the call ends, even if other programs keep pushing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, get_args

from pyqueue import arguments
from pyqueue.backends import namespace, transitions
from pyqueue.backends.browsing import Found, Walk, all_live, kind_of_queue, walk_on
from pyqueue.backends.changing import Change, Step, Tally
from pyqueue.backends.contents import contents_of
from pyqueue.backends.matching import Clause, Where, conditions
from pyqueue.backends.options import QueueTerms
from pyqueue.concurrently import Sleep
from pyqueue.errors import ConfigurationError, LeaseLost, Unavailable
from pyqueue.limits import shown
from pyqueue.messages import BulkResult, Duration, State
from pyqueue.payloads import Codec
from pyqueue.requests import MonotonicTime, Plan, ServerTime
from pyqueue.where import Condition

#: The maximum number of messages in one portion.
_PORTION: Final = 1000
#: The clocks of the programs that push may differ by this.
_SLACK: Final = timedelta(seconds=1)
_STATES: Final = tuple(each for each in get_args(State) if each != "finished")

#: A function that is called after each portion, with the numbers so far.
OnProgress = Callable[[BulkResult], object]


class Selected(NamedTuple):
    """The checked arguments of ``Queue.select``."""

    where: Where
    state: State | None
    older_s: float | None


class Pace(NamedTuple):
    """How many messages a call may change, how fast, and the function that it reports to."""

    limit: int | None
    #: Messages per second.
    rate: float | None
    progress: OnProgress | None


def selected(
    where: Mapping[str, object] | None,
    state: State | None,
    older: Duration | None,
    error: str | type[BaseException] | None,
) -> Selected:
    """Check the arguments of ``Queue.select``.

    Raises:
        ConfigurationError: An argument is not allowed.
    """
    if state is not None:
        arguments.one_of("state", state, _STATES)
    clauses = conditions(where).clauses
    if error is not None:
        clauses += conditions({"error.type": _type_name(error)}).clauses
    older_s = None if older is None else arguments.duration("older", older)
    return Selected(Where(clauses), state, older_s)


def _type_name(error: object) -> str:
    """Return the name by which messages store the type of an error."""
    if isinstance(error, type) and issubclass(error, BaseException):
        return error.__name__
    if not isinstance(error, str):
        raise ConfigurationError(
            "error: expected an exception class, or its name as a str, found "
            f"{type(error).__name__}"
        )
    return error


def paced(limit: int | None, rate: float | None, progress: OnProgress | None) -> Pace:
    """Check the limit, the rate and the progress function of a call.

    Raises:
        ConfigurationError: One of the arguments is not allowed.
    """
    if limit is not None:
        arguments.count("limit", limit)
    if rate is not None:
        number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if not number or not 0 < rate < math.inf:
            raise ConfigurationError(
                f"rate: {shown(rate)} is not allowed; use a number of messages per second above 0"
            )
    if progress is not None and not callable(progress):
        raise ConfigurationError(f"progress: expected a function, found {type(progress).__name__}")
    return Pace(limit, rate, progress)


def refuse_stream(queue: str) -> Plan[None]:
    """Refuse a stream, whose messages belong to all its consumer groups.

    Raises:
        ConfigurationError: The name belongs to a stream, or this release does not know the kind.
    """
    remedy = (
        f"use trim() of client.stream({queue!r}) to delete messages, and seek() of a consumer "
        "group to read them again"
    )
    yield from kind_of_queue(queue, "select", remedy)


def count(terms: QueueTerms, chosen: Selected, limit: int | None) -> Plan[int]:
    """Return how many messages match, but at most ``limit``."""
    walk = yield from _begin(terms, chosen)
    number = 0
    while True:
        complete = yield from _find_more(walk, _PORTION)
        number += len(walk.found)
        walk.found = []
        if complete or (limit is not None and number >= limit):
            return number if limit is None else min(number, limit)


def change(terms: QueueTerms, chosen: Selected, how: Change, pace: Pace) -> Plan[BulkResult]:
    """Change the messages that match.

    Raises:
        ConfigurationError: The queue does not support the change.
        Unavailable: The server did not answer. The error text has the number of changed messages.
    """
    yield from how.check(terms)
    walk = yield from _begin(terms, chosen)
    yield from walk.contents.end_rests(terms)
    began_s = yield from MonotonicTime()
    tally, complete = Tally(), False
    try:
        while True:
            size = _size(pace, tally)
            if not complete and len(walk.found) < size:
                complete = yield from _find_more(walk, size)
            some, walk.found = walk.found[:size], walk.found[size:]
            step = Step(
                terms, walk.contents, walk.wanted.where.filter(), (yield from ServerTime()), tally
            )
            yield from _change_some(step, how, some)
            if pace.progress is not None:
                pace.progress(BulkResult(tally.done, tally.passed))
            if (complete and not walk.found) or tally.done == pace.limit:
                return BulkResult(tally.done, tally.passed)
            yield from _slow_down(pace, tally, began_s)
    except Unavailable as error:
        raise Unavailable(
            f"{error}; {tally.done} messages were changed; call {how.name}() again for the rest",
            ids=error.ids,
        ) from error


# ---- the walk


def _begin(terms: QueueTerms, chosen: Selected) -> Plan[Walk]:
    """Return a walk over the messages that are in the queue now."""
    queue = terms.queue
    yield from namespace.check_kind(queue, terms.kind)
    now = yield from ServerTime()
    where = chosen.where
    if chosen.older_s is not None:
        pushed = now - timedelta(milliseconds=round(chosen.older_s * 1000))
        where = Where((*where.clauses, Clause("pushed", Condition("lt", pushed))))
    wanted = all_live(chosen.state, where)
    contents, until = contents_of(terms.kind), now + _SLACK
    return Walk(queue, contents, Codec[Any](), wanted, now, whole=True, until=until)


def _find_more(walk: Walk, size: int) -> Plan[bool]:
    """Find up to ``size`` messages. Return whether the walk came to the end of the queue.

    All messages of a document are found together, because a change may move the document to another
    place in the order.
    """
    walk.wanted = walk.wanted._replace(limit=size)
    walk.looked = 0
    return (yield from walk_on(walk))


# ---- a portion


def _size(pace: Pace, tally: Tally) -> int:
    """Return the size of the next portion: with a rate, the messages of one second."""
    size = _PORTION if pace.rate is None else max(1, min(_PORTION, int(pace.rate)))
    return size if pace.limit is None else min(size, pace.limit - tally.done)


def _change_some(step: Step, how: Change, some: Sequence[Found]) -> Plan[None]:
    """Change the messages of a portion, and count the messages that stay unchanged."""
    contents, tally = step.contents, step.tally
    before = tally.done
    todo = [each for each in some if how.concerns(each.part, step.now)]
    shared: dict[int, list[Found]] = {}
    alone: list[Found] = []
    for each in todo:
        if each.part is not each.document:
            shared.setdefault(id(each.document), []).append(each)
        elif contents.is_message(each.document):
            alone.append(each)
    free = [each for each in alone if not transitions.is_held(each.document, step.now)]
    if free:
        yield from how.write(step, free)
    for members in shared.values():
        yield from _change_shared(step, how, members)
    tally.passed += len(todo) - (tally.done - before)


def _change_shared(step: Step, how: Change, members: Sequence[Found]) -> Plan[None]:
    """Change messages that share one document, unless a consumer holds the document."""
    document, numbers = members[0].document, [each.number for each in members]
    held = yield from step.contents.hold(step.terms, document, numbers)
    if not held:
        return
    lost = 0
    try:
        yield from how.settle(step, held)
    except LeaseLost as error:
        lost = len(error.lost) + len(error.unknown)
    step.tally.done += len(held) - lost


def _slow_down(pace: Pace, tally: Tally, began_s: float) -> Plan[None]:
    """Wait until the rate allows the next messages. ``began_s``: when the call began."""
    if pace.rate is None:
        return
    wait_s = began_s + tally.done / pace.rate - (yield from MonotonicTime())
    if wait_s > 0:
        yield from Sleep(wait_s)
