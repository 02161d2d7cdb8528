"""A small sample of a set of ids, which can prove that another id is not in the set.

The sample is a bottom-k sketch: the smallest hashes of the ids, up to a fixed number (Cohen and
Kaplan, "Summarizing data using bottom-k sketches", 2007). If the hash of an id is missing, although
it is smaller than the largest hash of the sketch, the id is not in the set. A larger hash proves
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from heapq import nsmallest
from itertools import chain
from typing import Any, Final, NamedTuple, Self

from bson import Int64

from pyqueue.messages import Id

#: How many hashes are kept.
_SIZE: Final = 1024


def _hash_of(id: Id) -> int:
    """Return a hash of an id that is the same in every process."""
    digest = blake2b(str(id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)  # BSON has no unsigned integers


class IdSketch(NamedTuple):
    """The number of ids in a set, and a sorted tuple of the smallest hashes of these ids."""

    number: int = 0
    least: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[Id]) -> Self:
        """Return the sketch of these ids, which must all be different."""
        hashes = [_hash_of(each) for each in ids]
        return cls(len(hashes), tuple(nsmallest(_SIZE, hashes)))

    @classmethod
    def union(cls, sketches: Iterable[IdSketch]) -> Self:
        """Return the sketch of the union of several sets of ids, which must be disjoint."""
        given = list(sketches)
        hashes = chain.from_iterable(each.least for each in given)
        return cls(sum(each.number for each in given), tuple(nsmallest(_SIZE, hashes)))

    @classmethod
    def stored(cls, document: Any) -> Self | None:
        """Return the sketch that ``to_document`` stored, or None if ``document`` is no sketch."""
        if not isinstance(document, dict) or not {"n", "least"} <= document.keys():
            return None
        return cls(document["n"], tuple(document["least"]))

    def to_document(self) -> dict[str, Any]:
        """Return the sketch in its stored form."""
        return {"n": self.number, "least": [Int64(each) for each in self.least]}

    def missing(self, ids: Iterable[Id]) -> list[Id]:
        """Return the given ids that are certainly not in the set."""
        known = set(self.least)
        # The sketch has all hashes below the bound, or the hashes of all ids if the bound is None.
        bound = self.least[-1] if self.number > len(self.least) else None
        hashes = ((each, _hash_of(each)) for each in ids)
        return [id for id, hash in hashes if hash not in known and (bound is None or hash < bound)]
