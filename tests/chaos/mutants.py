"""Mutants: versions of pyqueue with one guarantee removed, which the fault suite must notice.

A mutant changes the modules of pyqueue in the processes of the workload only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from pymongo import WriteConcern

from pyqueue.backends import popping, transitions
from pyqueue.backends.bucket import packs
from pyqueue.backends.limits import indexes as limit_indexes
from pyqueue.backends.limits import permits
from pyqueue.backends.ordered import groups
from pyqueue.backends.ordered.kind import Ordered
from pyqueue.messages import Reservation
from pyqueue.runtime import base_driver, renewal


def _replace(owner: object, name: str, value: object) -> None:
    getattr(owner, name)  # an AttributeError if the product has changed
    setattr(owner, name, value)


def _no_undo_pop() -> None:
    def undo_pop(*_: object) -> Any:
        yield from ()

    _replace(popping, "undo_pop", undo_pop)


def _no_fence() -> None:
    def holds_filter(reservations: Iterable[Reservation[Any]]) -> dict[str, Any]:
        ids = [each.id for each in reservations]
        return {"_id": {"$in": ids}, "processed": {"$exists": False}}

    _replace(transitions, "holds_filter", holds_filter)


def _w1() -> None:
    _replace(base_driver, "WriteConcern", lambda w, **_: WriteConcern(w=1))


def _no_renewal() -> None:
    def add(self: Any, entry: Any, age_s: float = 0.0) -> bool:
        self.entries[id(entry.reservation)] = entry
        return False

    _replace(renewal.Schedule, "add", add)


def _no_locks() -> None:
    needed = Ordered().needs({})
    keys, options = needed[groups.LOCKS]
    alike = (keys, {name: options[name] for name in options if name != "unique"})
    _replace(Ordered, "needs", lambda *_: {**needed, groups.LOCKS: alike})


def _no_turns() -> None:
    def is_first(*_: object) -> bool:
        return True

    _replace(groups, "is_first", is_first)


def _no_bits() -> None:
    def having(bits: int) -> dict[str, Any]:
        return {}

    _replace(packs, "having", having)


def _no_slots() -> None:
    keys, options = limit_indexes.LIMIT_INDEXES[limit_indexes.SLOTS]
    alike = (keys, {name: options[name] for name in options if name != "unique"})
    changed = {**limit_indexes.LIMIT_INDEXES, limit_indexes.SLOTS: alike}
    _replace(limit_indexes, "LIMIT_INDEXES", changed)


def _no_rate() -> None:
    def ask(_: object, choose: Any, most: Any, __: object) -> Any:
        yield from ()
        return Counter(choose(most))

    def number(_: object, wanted: int, __: object) -> Any:
        yield from ()
        return wanted

    _replace(permits.Permits, "ask", ask)
    _replace(permits.Permits, "number", number)


class Mutant(NamedTuple):
    """A mutant, and the faults that show it."""

    change: Callable[[], None]
    kinds: tuple[str, ...]


MUTANTS = {
    "no-undo-pop": Mutant(_no_undo_pop, ("network slow", "cancellation storm")),
    "no-fence": Mutant(_no_fence, ("primary stepped down", "consumer suspended")),
    "w1": Mutant(_w1, ("primary cut off from the members", "consumer killed")),
    "no-renewal": Mutant(_no_renewal, ("network slow", "thousands of leases renewed")),
    "no-locks": Mutant(_no_locks, ("network slow", "consumer killed")),
    "no-turns": Mutant(_no_turns, ("network slow", "consumer killed")),
    "no-slots": Mutant(_no_slots, ("network slow", "consumer killed")),
    # A fault of the servers excuses starts for the next ten seconds.
    "no-rate": Mutant(_no_rate, ("producer killed", "mover killed")),
    "no-bits": Mutant(_no_bits, ("replies swallowed", "consumer suspended")),
}


def apply(name: str) -> None:
    """Change pyqueue in this process."""
    MUTANTS[name].change()
