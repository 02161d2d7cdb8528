"""Streams: what a consumer group has in progress. Everything here is pure.

A group is one document::

    _id      "~group:NAME~GROUP";  q: "~group:NAME"
    next     the first position that was never claimed
    out      the ranges that are held, or whose lease has lapsed
    back     the ranges that were given back: they wait for their next try
    left     copies in the dead-letter queue that were decided and must still be shown
    skipped  how many messages the retention took before they were finished
    paused   true while the group is paused
    changes  how often it was changed

Each message from the group's start on is in one of these places: at ``next`` or above it, in one
range, or finished. A range is an entry of ``out`` or ``back``::

    t        the token of the claim; in ``back`` it only tells the entries apart
    s, e     the first position, and the one after the last
    d        bits: which of its positions have left it. The lowest bit of the first byte is s
    u        the end of the lease; in ``back`` when the next try may begin
    k        how often it was claimed;  x: how many of these claims lapsed
    r        the error of the last try

Every change is one update that matches the entry as it was read: its token, its bits and, where
the lease counts, its end. So a change that another process made in between is never overwritten,
and a former holder changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final, NamedTuple

from pyqueue.backends.transitions import new_token
from pyqueue.requests import Document

__all__ = [
    "MAX_BACK",
    "MAX_HELD",
    "MAX_RANGE",
    "Back",
    "Ending",
    "Group",
    "Range",
    "Settled",
    "Step",
    "Taken",
    "claim_step",
    "group_id",
    "settle_steps",
    "skip_steps",
]

#: The most messages of one range.
MAX_RANGE: Final = 1000
#: No further range is claimed while so many are held, or so many were given back.
MAX_HELD: Final = 100
MAX_BACK: Final = 1000


def group_id(stream: str, group: str) -> str:
    """Return the _id of a group's document."""
    return f"~group:{stream}~{group}"


@dataclass(frozen=True, slots=True)
class Range:
    """A range of positions, of which some may have left it."""

    token: str
    start: int
    end: int
    #: Bit i is set if position ``start + i`` has left it.
    done: int
    until: datetime
    tries: int
    lapses: int = 0
    error: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Range:
        """Return the range of a stored entry."""
        return cls(
            entry["t"],
            int(entry["s"]),
            int(entry["e"]),
            int.from_bytes(entry["d"], "little"),
            entry["u"],
            int(entry["k"]),
            int(entry.get("x", 0)),
            entry.get("r"),
        )

    def stored(self) -> dict[str, Any]:
        """Return the entry that stores it."""
        entry = {"t": self.token, "s": self.start, "e": self.end, "d": bits(self.done)}
        entry |= {"u": self.until, "k": self.tries}
        if self.lapses:
            entry["x"] = self.lapses
        if self.error is not None:
            entry["r"] = self.error
        return entry

    @property
    def alive(self) -> int:
        """The bits of the positions that it still has."""
        return ((1 << (self.end - self.start)) - 1) & ~self.done

    @property
    def size(self) -> int:
        """How many positions it still has."""
        return self.alive.bit_count()

    def positions(self) -> Iterator[int]:
        """Yield the positions that it still has, in order."""
        alive = self.alive
        return (self.start + bit for bit in range(self.end - self.start) if alive >> bit & 1)

    def mask(self, positions: Iterable[int]) -> int:
        """Return the bits of those positions that lie between its ends."""
        found = 0
        for each in positions:
            if self.start <= each < self.end:
                found |= 1 << (each - self.start)
        return found

    def part(self, mask: int, **changes: Any) -> Range:
        """Return a range of the positions in ``mask``, with narrow ends."""
        low = (mask & -mask).bit_length() - 1
        width = mask.bit_length() - low
        done = ~(mask >> low) & ((1 << width) - 1)
        start = self.start + low
        return replace(self, start=start, end=start + width, done=done, **changes)

    def held(self) -> dict[str, Any]:
        """Return the filter of the entry, whatever the end of its lease is."""
        return {"t": self.token, "d": bits(self.done)}

    def same(self) -> dict[str, Any]:
        """Return the filter of the entry as it was read."""
        return {**self.held(), "u": self.until}


def bits(done: int) -> bytes:
    """Return bits as they are stored, without zeros at the end."""
    return done.to_bytes((done.bit_length() + 7) // 8, "little")


@dataclass(frozen=True, slots=True)
class Group:
    """What the document of a group says."""

    next: int
    out: Sequence[Range]
    back: Sequence[Range]
    left: Sequence[Any]
    skipped: int
    paused: bool
    changes: int

    @classmethod
    def of(cls, document: Document) -> Group:
        """Return what a document says."""
        return cls(
            int(document["next"]),
            [Range.of(each) for each in document["out"]],
            [Range.of(each) for each in document["back"]],
            document.get("left", []),
            int(document.get("skipped", 0)),
            bool(document.get("paused")),
            int(document.get("changes", 0)),
        )

    def held(self, token: str) -> Range | None:
        """Return the range that a claim holds."""
        return next((each for each in self.out if each.token == token), None)

    def due(self) -> datetime | None:
        """Return the earliest instant at which a range can be claimed."""
        return min((each.until for each in (*self.out, *self.back)), default=None)


class Step(NamedTuple):
    """One update of the document of a group."""

    match: dict[str, Any]
    update: dict[str, dict[str, Any]]


# ---- claim


class Taken(NamedTuple):
    """A range that a claim takes."""

    #: Which of several callers gets it.
    place: int
    range: Range
    #: Whether it was a single message whose lease had lapsed.
    alone: bool = False


def claim_step(
    group: Group,
    now: datetime,
    until: datetime,
    tail: int,
    wanted: Sequence[int],
    served: Sequence[bool] = (),
) -> tuple[Step, list[Taken]] | None:
    """Return the update of a claim, and what it takes.

    Args:
        group: the group as it was read.
        now: the instant.
        until: the end of the lease.
        tail: the tail of the log, as a majority stored it.
        wanted: how many messages each caller wants.
        served: which callers have messages already. They get none whose lease has lapsed: if such
            a message ends its consumer, the rest would seem guilty, too.

    Returns:
        None if there is nothing to claim.
    """
    if group.paused or not any(wanted):
        return None
    lapsed = [(each, True) for each in group.out if each.until <= now]
    ready = lapsed + [(each, False) for each in group.back if each.until <= now]
    if ready:
        found, held = min(ready, key=lambda each: next(each[0].positions(), each[0].start))
        apart = held or found.lapses > 0
        free = [
            place
            for place, number in enumerate(wanted)
            if number > 0 and not (apart and served and served[place])
        ]
        if not free:
            return None
        first = free[0]
        step, taken = _again(found, held, until, wanted[first])
        return step, [Taken(first, taken, held and found.size == 1)]
    return _new(group, until, tail, wanted)


def _again(found: Range, held: bool, until: datetime, wanted: int) -> tuple[Step, Range]:
    """Claim positions that were claimed before.

    What lapsed is divided by ten each time. So a message that ends its consumers is soon alone, and
    its tries cost the other messages nothing.
    """
    lapses = found.lapses + held
    most = max(1, MAX_RANGE // 10**lapses) if lapses else MAX_RANGE
    mask, alive = 0, found.alive
    for _ in range(min(wanted, most, alive.bit_count())):
        mask |= alive & -alive
        alive &= alive - 1
    new = {"token": new_token(), "until": until, "tries": found.tries + 1, "lapses": lapses}
    taken = found.part(mask, **new)
    place = "out" if held else "back"
    # $set comes first: mongomock knows the matched entry only until another operator ran.
    match = {place: {"$elemMatch": found.same()}}
    update: dict[str, dict[str, Any]] = {}
    # With a new token, so that it does not match what another process read before.
    rest = found.part(alive, token=new_token(), lapses=lapses).stored() if alive else None
    if held:
        update["$set"] = {"out.$": taken.stored()}
        if rest:
            update["$push"] = {"back": {"$each": [rest]}}
    else:
        if rest:
            update["$set"] = {"back.$": rest}
        else:
            update["$pull"] = {"back": {"t": found.token}}
        update["$push"] = {"out": {"$each": [taken.stored()]}}
    return Step(match, update), taken


def _new(
    group: Group, until: datetime, tail: int, wanted: Sequence[int]
) -> tuple[Step, list[Taken]] | None:
    """Claim positions that were never claimed."""
    taken: list[Taken] = []
    position = group.next
    if len(group.back) >= MAX_BACK:
        return None
    for place, number in enumerate(wanted):
        left = number
        while left > 0 and position < tail and len(group.out) + len(taken) < MAX_HELD:
            end = min(position + min(left, MAX_RANGE), tail)
            taken.append(Taken(place, Range(new_token(), position, end, 0, until, 1)))
            left -= end - position
            position = end
    if not taken:
        return None
    match = {"next": group.next, f"out.{MAX_HELD - len(taken)}": {"$exists": False}}
    pushed = {"$each": [each.range.stored() for each in taken]}
    return Step(match, {"$set": {"next": position}, "$push": {"out": pushed}}), taken


def skip_steps(group: Group, first: int, now: datetime) -> list[tuple[int, Step]]:
    """Return the updates that pass over what lies below ``first`` and is not held.

    Each comes with the number of messages that it passes over.
    """
    steps: list[tuple[int, Step]] = []
    lapsed = [("out", each) for each in group.out if each.until <= now]
    for place, each in (*lapsed, *(("back", each) for each in group.back)):
        if each.end <= first:
            update: dict[str, dict[str, Any]] = {"$pull": {place: {"t": each.token}}}
            update["$inc"] = {"skipped": each.size}
            steps.append((each.size, Step({place: {"$elemMatch": each.same()}}, update)))
    if group.next < first:
        gap = first - group.next
        jump = {"$set": {"next": first}, "$inc": {"skipped": gap}}
        steps.append((gap, Step({"next": group.next}, jump)))
    return steps


# ---- settle


class Back(NamedTuple):
    """How positions are given back."""

    when: datetime
    #: Whether the try counts.
    counted: bool
    error: Mapping[str, Any] | None = None


class Ending(NamedTuple):
    """How the claim of some positions ends: they are finished, unless ``back`` is given."""

    token: str
    positions: frozenset[int]
    back: Back | None = None
    #: The copy in the dead-letter queue that takes the place of the message.
    copy: Any = None
    #: Whether the retention of the stream took the messages.
    skipped: bool = False


class Settled(NamedTuple):
    """An update that ends claims, and the endings that it carries out, each with what was lost."""

    step: Step
    endings: list[tuple[int, frozenset[int]]]


def settle_steps(
    group: Group, endings: Mapping[int, Ending]
) -> tuple[list[Settled], dict[int, frozenset[int]]]:
    """Return the updates that end claims.

    Args:
        group: the group as it was read.
        endings: the endings by number.

    Returns:
        The updates, and the endings of which nothing is held any more.
    """
    held = {each.token: each for each in group.out}
    of_token: dict[str, list[int]] = {}
    lost: dict[int, frozenset[int]] = {}
    masks: dict[int, int] = {}
    alive = {token: each.alive for token, each in held.items()}
    for number, ending in endings.items():
        mask = 0
        if ending.token in held:
            mask = held[ending.token].mask(ending.positions) & alive[ending.token]
        if not mask:
            lost[number] = ending.positions
            continue
        alive[ending.token] &= ~mask
        masks[number] = mask
        of_token.setdefault(ending.token, []).append(number)
    whole = [token for token in of_token if not alive[token]]
    portions = [whole[at : at + 50] for at in range(0, len(whole), 50)]
    portions += [[token] for token in of_token if alive[token]]
    steps = []
    for tokens in portions:
        ranges = [held[token] for token in tokens]
        numbers = [number for token in tokens for number in of_token[token]]
        update: dict[str, dict[str, Any]]
        if alive[tokens[0]]:
            (one,) = ranges
            done = one.done | sum(masks[number] for number in numbers)
            update = {"$set": {"out.$.d": bits(done)}}
            match: dict[str, Any] = {"out": {"$elemMatch": one.held()}}
        else:
            update = {"$pull": {"out": {"t": {"$in": tokens}}}}
            match = {"$and": [{"out": {"$elemMatch": each.held()}} for each in ranges]}
        update |= _ending(held, endings, masks, numbers)
        done_of = [(number, _missing(held, endings[number], masks[number])) for number in numbers]
        steps.append(Settled(Step(match, update), done_of))
    return steps, lost


def _missing(held: Mapping[str, Range], ending: Ending, mask: int) -> frozenset[int]:
    start = held[ending.token].start
    return frozenset(
        each for each in ending.positions if each < start or not mask >> (each - start) & 1
    )


def _ending(
    held: Mapping[str, Range],
    endings: Mapping[int, Ending],
    masks: Mapping[int, int],
    numbers: Iterable[int],
) -> dict[str, dict[str, Any]]:
    """Return the part of an update that says where the positions go."""
    back: list[dict[str, Any]] = []
    copies: list[Any] = []
    skipped = 0
    for number in numbers:
        ending, mask = endings[number], masks[number]
        one = held[ending.token]
        if ending.back is not None:
            tries = one.tries if ending.back.counted else one.tries - 1
            error = ending.back.error if ending.back.error is not None else one.error
            new = {"token": new_token(), "until": ending.back.when, "tries": tries}
            back.append(one.part(mask, **new, error=error).stored())
        if ending.copy is not None:
            copies.append(ending.copy)
        if ending.skipped:
            skipped += mask.bit_count()
    update: dict[str, dict[str, Any]] = {}
    pushed = {"back": back, "left": copies}
    if back or copies:
        update["$push"] = {name: {"$each": new} for name, new in pushed.items() if new}
    if skipped:
        update["$inc"] = {"skipped": skipped}
    return update
