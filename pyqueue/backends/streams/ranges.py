"""Streams: the messages that a consumer group has in progress. Everything here is pure.

A group is one document::

    _id      "~group:NAME~GROUP";  q: "~group:NAME"
    next     the first position that was never claimed
    out      the ranges that are held, or whose lease has lapsed
    back     the ranges that were given back and wait for their next try
    left     the ids of buried messages' copies that may still be hidden; see ``settling``
    skipped  how many messages the retention deleted before they were finished
    paused   true while the group is paused
    changes  how many times it was changed
    made     when it was created, which tells it from a former group with its name

Each message from the group's start on is in exactly one state: at ``next`` or above it, in one
range, or finished. A range is an entry of ``out`` or ``back``::

    t        the token of the claim; in ``back`` it only distinguishes the entries
    s, e     the first position, and the position after the last
    d        a bit for each position that has left the range. The lowest bit of the first byte is s
    u        the end of the lease; in ``back``, when the next try may begin
    k        how many times the range was claimed;  x: how many of these claims lapsed
    r        the error of the last try

Every change is one update that matches the entry as it was read: its token, its bits and, if the
lease matters, the end of the lease. So an update never overwrites a change that another process has
made since then, and a former holder cannot change anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends.streams.entries import (
    MAX_BACK,
    MAX_BACK_SPAN,
    MAX_RANGE,
    Merged,
    Range,
    merged,
    stored_bits,
)
from pyqueue.backends.transitions import new_token
from pyqueue.requests import Document

#: While ``out`` has this many ranges, no new positions are claimed, but ranges in ``back`` are.
MAX_HELD: Final = 100
#: After this many tries, a message that was given back lets new messages pass for a while. So these
#: do not starve if the message always fails without a delay between its tries.
PATIENCE: Final = 10
RETRY_PAUSE: Final = timedelta(seconds=1)


def group_id(stream: str, group: str) -> str:
    """Return the _id of a group's document."""
    return f"~group:{stream}~{group}"


@dataclass(frozen=True, slots=True)
class Group:
    """The state of a group, read from its document."""

    next: int
    out: Sequence[Range]
    back: Sequence[Range]
    left: Sequence[Any]
    skipped: int
    paused: bool
    changes: int
    made: datetime | None = None

    @classmethod
    def of(cls, document: Document) -> Group:
        """Return the state that the document of a group stores."""
        return cls(
            int(document["next"]),
            [Range.of(each) for each in document["out"]],
            [Range.of(each) for each in document["back"]],
            document.get("left", []),
            int(document.get("skipped", 0)),
            paused=bool(document.get("paused")),
            changes=int(document.get("changes", 0)),
            made=document.get("made"),
        )

    def held(self, token: str) -> Range | None:
        """Return the range that the claim with this token holds, or None if it holds none."""
        return next((each for each in self.out if each.token == token), None)

    def due(self) -> datetime | None:
        """Return the earliest instant at which a range can be claimed, or None if there is none."""
        return min((each.until for each in (*self.out, *self.back)), default=None)


class Step(NamedTuple):
    """One update of the document of a group. If ``update`` is a list, it is a pipeline."""

    match: dict[str, Any]
    update: dict[str, dict[str, Any]] | list[dict[str, Any]]


# ---- claim


class Taken(NamedTuple):
    """A range that a claim takes."""

    #: The number of the caller that gets the range.
    place: int
    range: Range
    #: Whether the last claim had lapsed while the range had only this message.
    alone: bool = False


def claim_step(
    group: Group,
    now: datetime,
    until: datetime,
    tail: int,
    wanted: Sequence[int],
    served: Sequence[bool] = (),
) -> tuple[Step, list[Taken]] | None:
    """Return the update that claims messages, and the ranges that it takes.

    Args:
        group: The group as it was read.
        now: The current instant.
        until: The end of the lease.
        tail: The tail of the log, as a majority stored it.
        wanted: How many messages each caller wants.
        served: For each caller, whether it already has messages. If so, it gets no lapsed message,
            because a crash due to that message would also count against its other messages.

    Returns:
        The update and the ranges, or None if there is nothing to claim.
    """
    if group.paused or not any(wanted):
        return None
    lapsed = [(each, True) for each in group.out if each.until <= now]
    ready = lapsed + [(each, False) for each in group.back if each.until <= now]
    if not ready:
        return _claim_new(group, until, tail, wanted)
    found, has_lapsed = min(ready, key=_turn)
    if found.tries > PATIENCE and found.until > now - RETRY_PAUSE:
        new = _claim_new(group, until, tail, wanted)  # let new messages pass for a while
        if new is not None:
            return new
    place = _first_caller(wanted, served if has_lapsed or found.lapses else ())
    if place is None:
        return None
    taken, rest = _divided(found, has_lapsed, until, wanted[place])
    merge = merged(group.back, [rest], now) if has_lapsed and rest else None
    if merge is None:
        step = _claim_again(found, taken, rest, has_lapsed)
    else:
        step = _merge([(found, taken)], merge)
    return step, [Taken(place, taken, has_lapsed and found.size == 1)]


def _first_caller(wanted: Sequence[int], served: Sequence[bool]) -> int | None:
    """Return the first caller that wants messages and has none yet, or None.

    ``served``: for each caller, whether it already has messages, or () if that does not matter.
    """
    for place, number in enumerate(wanted):
        if number > 0 and not (served and served[place]):
            return place
    return None


def _turn(ready: tuple[Range, bool]) -> tuple[datetime, int]:
    """Return the sort key of a range among the ranges that were claimed before.

    The longest wait comes first. In order of position, a failing message could block later ones.
    """
    one, _ = ready
    return one.until, next(one.positions(), one.start)


def _divided(
    found: Range, has_lapsed: bool, until: datetime, wanted: int
) -> tuple[Range, Range | None]:
    """Divide a range that was claimed before into the part that a claim takes and the remainder.

    Each lapse divides the maximum size of the part by ten. So a message that crashes its consumers
    is soon alone, and its tries no longer affect other messages.

    Args:
        found: The range to divide.
        has_lapsed: Whether the last claim of the range has lapsed. If not, it was given back.
        until: The end of the lease of the part.
        wanted: The maximum number of messages in the part.
    """
    lapses = found.lapses + has_lapsed
    most = max(1, MAX_RANGE // 10**lapses) if lapses else MAX_RANGE
    alive = found.alive
    lowest = (alive & -alive).bit_length() - 1
    near = alive & ((1 << (lowest + MAX_RANGE)) - 1)  # a claim also reads the positions in between
    mask = 0
    for _ in range(min(wanted, most, near.bit_count())):
        mask |= near & -near  # moves the lowest bit from ``near`` to ``mask``
        near &= near - 1
    new = {"token": new_token(), "until": until, "tries": found.tries + 1, "lapses": lapses}
    alive &= ~mask
    # It gets a new token, so that updates by processes that read the entry earlier do not match.
    rest = found.part(alive, token=new_token(), lapses=lapses) if alive else None
    return found.part(mask, **new), rest


def _claim_again(found: Range, taken: Range, rest: Range | None, has_lapsed: bool) -> Step:
    """Return the update that claims positions which were claimed before.

    Args:
        found: The stored range.
        taken: The part that the claim takes.
        rest: The other positions, which wait in ``back``, or None if there are none.
        has_lapsed: Whether the stored range is in ``out``, because its last claim has lapsed.
    """
    # $set comes first, because mongomock forgets the matched entry after another operator.
    match = {"out" if has_lapsed else "back": {"$elemMatch": found.same_filter()}}
    update: dict[str, dict[str, Any]] = {}
    if has_lapsed:
        update["$set"] = {"out.$": taken.stored()}
        if rest:
            update["$push"] = {"back": {"$each": [rest.stored()]}}
    else:
        if rest:
            update["$set"] = {"back.$": rest.stored()}
        else:
            update["$pull"] = {"back": {"t": found.token}}
        update["$push"] = {"out": {"$each": [taken.stored()]}}
    return Step(match, update)


def _claim_new(
    group: Group, until: datetime, tail: int, wanted: Sequence[int]
) -> tuple[Step, list[Taken]] | None:
    """Return the update that claims new positions, and their ranges; see ``claim_step``."""
    taken: list[Taken] = []
    position = group.next
    if len(group.back) >= MAX_BACK:
        lowest = min(each.start for each in group.back)
        if position - lowest >= MAX_BACK_SPAN:
            return None  # the document could grow too large for the server
    for place, number in enumerate(wanted):
        left = number
        while left > 0 and position < tail and len(group.out) + len(taken) < MAX_HELD:
            end = min(position + min(left, MAX_RANGE), tail)
            taken.append(Taken(place, Range(new_token(), position, end, 0, until, tries=1)))
            left -= end - position
            position = end
    if not taken:
        return None
    # The second condition means that ``out`` still has room for these ranges.
    match = {"next": group.next, f"out.{MAX_HELD - len(taken)}": {"$exists": False}}
    pushed = {"$each": [each.range.stored() for each in taken]}
    return Step(match, {"$set": {"next": position}, "$push": {"out": pushed}}), taken


def skip_steps(group: Group, first: int, now: datetime) -> list[tuple[int, Step]]:
    """Return the updates that skip the messages below ``first`` that no consumer holds.

    Each update comes with the number of messages that it skips.
    """
    steps: list[tuple[int, Step]] = []
    lapsed = [("out", each) for each in group.out if each.until <= now]
    for field, each in (*lapsed, *(("back", each) for each in group.back)):
        if each.end <= first:
            update: dict[str, dict[str, Any]] = {"$pull": {field: {"t": each.token}}}
            update["$inc"] = {"skipped": each.size}
            match = {field: {"$elemMatch": each.same_filter()}}
            steps.append((each.size, Step(match, update)))
    if group.next < first:
        number = first - group.next
        jump = {"$set": {"next": first}, "$inc": {"skipped": number}}
        steps.append((number, Step({"next": group.next}, jump)))
    return steps


# ---- settle


class Back(NamedTuple):
    """How messages go back to the group for their next try."""

    when: datetime  # of the next try
    #: Whether the last try counts.
    counted: bool
    error: Mapping[str, Any] | None = None


class Ending(NamedTuple):
    """How a claim of messages ends: the messages are finished, unless ``back`` is given."""

    token: str
    positions: frozenset[int]
    back: Back | None = None
    #: The _id of the copy for the dead-letter queue, if the message is buried.
    copy: Any = None
    #: Whether the retention of the stream deleted the messages.
    skipped: bool = False


class Settled(NamedTuple):
    """An update that ends claims, and for each ending, its number and the positions not held."""

    step: Step
    endings: list[tuple[int, frozenset[int]]]


def settle_step(
    group: Group, endings: Mapping[int, Ending], now: datetime
) -> tuple[Settled | None, dict[int, frozenset[int]]]:
    """Return the next update that ends claims as ``endings`` say.

    The update ends up to 50 ranges of which no position stays held, or else a part of one range.
    The other endings need further updates.

    Args:
        group: The group as it was read.
        endings: How each claim is to end, keyed by a number.
        now: The current instant.

    Returns:
        The update, or None if no position is held; and the positions of each ending that has no
        held position, keyed by the number of the ending.
    """
    held = {each.token: each for each in group.out}
    numbers_of: dict[str, list[int]] = {}  # the endings of each range
    lost: dict[int, frozenset[int]] = {}
    masks: dict[int, int] = {}  # by ending: a bit mask of the positions that it ends
    staying = {token: each.alive for token, each in held.items()}
    for number, ending in endings.items():
        mask = 0
        if ending.token in held:
            mask = held[ending.token].mask(ending.positions) & staying[ending.token]
        if not mask:
            lost[number] = ending.positions
            continue
        staying[ending.token] &= ~mask
        masks[number] = mask
        numbers_of.setdefault(ending.token, []).append(number)
    whole = [token for token in numbers_of if not staying[token]]
    tokens = whole[:50] or list(numbers_of)[:1]
    if not tokens:
        return None, lost
    numbers = [number for token in tokens for number in numbers_of[token]]
    given = _given_back(held, endings, masks, numbers)
    rests: dict[str, Range | None] = dict.fromkeys(tokens)
    if not whole:
        one = held[tokens[0]]
        done = one.done | sum(masks[number] for number in numbers)
        rests[one.token] = replace(one, done=done)
    ranges = [(held[token], rest) for token, rest in rests.items()]
    merge = merged(group.back, given.back, now)
    step = _end(ranges, given) if merge is None else _merge(ranges, merge, given)
    settled = [(number, _not_held(held, endings[number], masks[number])) for number in numbers]
    return Settled(step, settled), lost


def _not_held(held: Mapping[str, Range], ending: Ending, mask: int) -> frozenset[int]:
    """Return the positions that an ending names although they are not held."""
    start = held[ending.token].start
    return frozenset(
        each for each in ending.positions if each < start or not mask >> (each - start) & 1
    )


class _Given(NamedTuple):
    """Where the positions of ended claims go, unless they are finished."""

    back: list[Range]
    copies: list[Any]
    skipped: int


def _given_back(
    held: Mapping[str, Range],
    endings: Mapping[int, Ending],
    masks: Mapping[int, int],
    numbers: Iterable[int],
) -> _Given:
    """Return the ranges to give back, the copies to publish, and how many messages are skipped.

    Args:
        held: The held ranges, keyed by token.
        endings: How each claim ends, keyed by a number.
        masks: For each ending, by its number, a bit mask of the positions that it covers.
        numbers: The numbers of the endings to consider.
    """
    back: list[Range] = []
    copies: list[Any] = []
    skipped = 0
    for number in numbers:
        ending, mask = endings[number], masks[number]
        one = held[ending.token]
        if ending.back is not None:
            tries = one.tries if ending.back.counted else one.tries - 1
            error = ending.back.error if ending.back.error is not None else one.error
            new = {"token": new_token(), "until": ending.back.when, "tries": tries}
            back.append(one.part(mask, **new, error=error))
        if ending.copy is not None:
            copies.append(ending.copy)
        if ending.skipped:
            skipped += mask.bit_count()
    return _Given(back, copies, skipped)


_NOTHING: Final = _Given([], [], 0)
#: Entries of ``out``, each with the range that remains of it, or None.
_Outs = Sequence[tuple[Range, Range | None]]


def _end(ranges: _Outs, given: _Given) -> Step:
    """Return the update that ends claims and appends the ranges that are given back."""
    update: dict[str, dict[str, Any]]
    ((before, rest), *_) = ranges
    if rest is not None:  # in this case it is the only range
        update = {"$set": {"out.$.d": stored_bits(rest.done)}}
        match: dict[str, Any] = {"out": {"$elemMatch": before.held_filter()}}
    else:
        tokens = [each.token for each, _ in ranges]
        update = {"$pull": {"out": {"t": {"$in": tokens}}}}
        match = {"$and": [{"out": {"$elemMatch": each.held_filter()}} for each, _ in ranges]}
    pushed = {"back": [each.stored() for each in given.back], "left": given.copies}
    if given.back or given.copies:
        update["$push"] = {name: {"$each": new} for name, new in pushed.items() if new}
    if given.skipped:
        update["$inc"] = {"skipped": given.skipped}
    return Step(match, update)


def _merge(ranges: _Outs, merge: Merged, given: _Given = _NOTHING) -> Step:
    """Return the update that changes entries of ``out`` and merges ranges in ``back``.

    It is a pipeline, because only a pipeline can both remove and add entries of an array. It
    matches every entry that it removes. The token suffices for an entry of ``back``, which never
    changes under one token. Entries that another process has added since are kept.
    """
    match: dict[str, Any] = {
        "$and": [{"out": {"$elemMatch": before.same_filter()}} for before, _ in ranges]
    }
    if merge.removed:
        match["back.t"] = {"$all": [each.token for each in merge.removed]}
    outs = [before for before, _ in ranges]
    put = {
        "out": _exchanged("out", outs, [rest for _, rest in ranges if rest is not None]),
        "back": _exchanged("back", merge.removed, merge.added),
    }
    if given.copies:
        put["left"] = {"$concatArrays": ["$left", {"$literal": given.copies}]}
    if given.skipped:
        put["skipped"] = {"$add": ["$skipped", given.skipped]}
    return Step(match, [{"$set": put}])


def _exchanged(name: str, removed: Sequence[Range], added: Sequence[Range]) -> dict[str, Any]:
    """Return the expression that removes entries of an array and appends new entries."""
    gone = {"$in": ["$$one.t", [each.token for each in removed]]}
    kept = {"$filter": {"input": f"${name}", "as": "one", "cond": {"$not": gone}}}
    return {"$concatArrays": [kept, {"$literal": [each.stored() for each in added]}]}
