"""Streams: the entries of a consumer group, which are ranges of positions, and how they are merged.

Messages that fail one by one are given back one by one. Each of them would be an entry of ``back``
until its next try, and every update of the group reads all entries. So entries that are alike are
merged into one, whenever that halves their number. Entries are alike if they have the same number
of tries, become due at nearly the same time, and cover positions that one claim can read. All
functions here are pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from pyqueue.backends.transitions import new_token

#: The maximum number of messages of one range that a claim takes.
MAX_RANGE: Final = 1000
#: The maximum number of ranges that ``back`` of a group is to contain.
MAX_BACK: Final = 1000
#: Up to this number, ranges are not merged. So processes that give messages back do not compete.
MERGE_ABOVE: Final = 64
#: Due times are alike if they differ by less than the delay divided by this number.
_PART_OF_DELAY: Final = 16
#: How many times the window of positions may double. This limits the bits of an entry to 8 KB.
_MOST_DOUBLED: Final = 6
#: The span of positions over which merging always leaves fewer than ``MAX_BACK`` ranges.
MAX_BACK_SPAN: Final = MAX_BACK // 2 * (MAX_RANGE << _MOST_DOUBLED)
#: A cell of this many bits of milliseconds contains all instants up to the year 9999.
_ALL_TIME_BITS: Final = 48
#: From this coarseness on, ranges with different numbers of tries are merged, too.
_MIX_TRIES: Final = 8
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Range:
    """A range of positions of a group, some of which may have left the range."""

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
        """Return the range that an entry stores."""
        return cls(
            token=entry["t"],
            start=int(entry["s"]),
            end=int(entry["e"]),
            done=int.from_bytes(entry["d"], "little"),
            until=entry["u"],
            tries=int(entry["k"]),
            lapses=int(entry.get("x", 0)),
            error=entry.get("r"),
        )

    def stored(self) -> dict[str, Any]:
        """Return the entry that stores this range."""
        entry = {"t": self.token, "s": self.start, "e": self.end, "d": stored_bits(self.done)}
        entry |= {"u": self.until, "k": self.tries}
        if self.lapses:
            entry["x"] = self.lapses
        if self.error is not None:
            entry["r"] = self.error
        return entry

    @property
    def alive(self) -> int:
        """A bit mask of the positions that the range still has."""
        return ((1 << (self.end - self.start)) - 1) & ~self.done

    @property
    def size(self) -> int:
        """How many positions the range still has."""
        return self.alive.bit_count()

    def positions(self) -> Iterator[int]:
        """Yield the positions that the range still has, in order."""
        alive = self.alive
        while alive:
            lowest = alive & -alive  # only the lowest bit
            yield self.start + lowest.bit_length() - 1
            alive ^= lowest

    def mask(self, positions: Iterable[int]) -> int:
        """Return a bit mask of the given positions, without positions outside the range."""
        found = 0
        for each in positions:
            if self.start <= each < self.end:
                found |= 1 << (each - self.start)
        return found

    def part(self, mask: int, **changes: Any) -> Range:
        """Return a range with the positions in the bit mask ``mask``, and with changed fields."""
        low = (mask & -mask).bit_length() - 1  # the lowest bit: a range starts with a position
        width = mask.bit_length() - low
        done = ~(mask >> low) & ((1 << width) - 1)
        start = self.start + low
        return replace(self, start=start, end=start + width, done=done, **changes)

    def held_filter(self) -> dict[str, Any]:
        """Return the filter that matches the entry, even if its lease was extended."""
        return {"t": self.token, "d": stored_bits(self.done)}

    def same_filter(self) -> dict[str, Any]:
        """Return the filter that matches the entry as it was read."""
        return {**self.held_filter(), "u": self.until}


def stored_bits(done: int) -> bytes:
    """Return the stored form of a bit mask: lowest byte first, without zero bytes at the end."""
    return done.to_bytes((done.bit_length() + 7) // 8, "little")


class Merged(NamedTuple):
    """The entries that merging removes from the array ``back``, and the entries that it adds."""

    removed: list[Range]
    added: list[Range]


def merged(back: Sequence[Range], new: Sequence[Range], now: datetime) -> Merged | None:
    """Return the entries that merging removes and adds, or None to append ``new`` unmerged.

    Merging never makes a message due earlier. It makes a message wait longer by less than a tenth
    of its delay. Only if there would be more than ``MAX_BACK`` entries may it add a longer wait.

    Args:
        back: The ranges that are stored.
        new: The ranges to add.
        now: The current instant.
    """
    every = [*back, *new]
    if len(every) <= MERGE_ABOVE:
        return None
    # Let ranges that are merged differ more and more, until merging halves their number.
    for coarse in range(_ALL_TIME_BITS + 1):
        alike: dict[tuple[object, ...], list[int]] = {}
        for number, each in enumerate(every):
            alike.setdefault(_likeness(each, now, coarse), []).append(number)
        if len(alike) <= len(every) // 2:
            break
        if len(every) <= MAX_BACK:
            return None
    result = Merged([], [])
    for numbers in alike.values():
        members = [every[number] for number in numbers]
        if len(members) > 1:
            # Only the first ``len(back)`` ranges are stored and can be removed.
            result.removed.extend(every[number] for number in numbers if number < len(back))
            result.added.append(_union(members))
        elif numbers[0] >= len(back):
            result.added.append(members[0])
    return result


def _likeness(one: Range, now: datetime, coarse: int) -> tuple[object, ...]:
    """Return a key: ranges with equal keys are merged. ``coarse``: how much they may differ."""
    window = one.start // (MAX_RANGE << min(coarse, _MOST_DOUBLED))
    ignored_bits = max(0, coarse - _MIX_TRIES)
    tries = one.tries >> ignored_bits, one.lapses >> ignored_bits
    error_type = None if coarse or one.error is None else one.error.get("type")
    left_ms = (one.until - now) // _MS
    if left_ms <= 0:
        return (window, tries, error_type)
    # Cells of time have fixed bounds. So a range that is merged repeatedly stays in its cell, and
    # its wait ends. Sizes are powers of two, so that delays with a jitter get the same cells.
    cell_bits = max(0, (left_ms // _PART_OF_DELAY).bit_length() - 1) + coarse
    cell_bits = min(cell_bits, _ALL_TIME_BITS)
    cell = (one.until - _EPOCH) // _MS >> cell_bits
    return (window, tries, error_type, cell_bits, cell)


def _union(members: Sequence[Range]) -> Range:
    """Return one range with all positions of these ranges."""
    start, end = min(each.start for each in members), max(each.end for each in members)
    alive = 0
    for each in members:
        alive |= each.alive << (each.start - start)
    errors = [each.error for each in members if each.error is not None]
    return Range(
        token=new_token(),
        start=start,
        end=end,
        done=((1 << (end - start)) - 1) & ~alive,
        until=max(each.until for each in members),
        # The smallest number of tries, because a larger one could bury a message too early.
        tries=min(each.tries for each in members),
        lapses=max(each.lapses for each in members),
        error=max(errors, key=lambda error: error["at"], default=None),
    )
