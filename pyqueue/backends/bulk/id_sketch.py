"""A small sample of many ids, which proves for some other ids that they are not among them.

The sample is a bottom-k sketch: the smallest hashes of the ids, up to a fixed number (Cohen and
Kaplan, "Summarizing data using bottom-k sketches", 2007). An id whose hash would be one of the
smallest, but is missing, was not among the ids. Larger hashes tell nothing.
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
    """Return a hash that is equal in every process."""
    digest = blake2b(str(id).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)  # BSON has no unsigned integers


class IdSketch(NamedTuple):
    """How many ids there are, and the smallest hashes of them in order."""

    number: int = 0
    least: tuple[int, ...] = ()

    @classmethod
    def of(cls, ids: Iterable[Id]) -> Self:
        """Return the sketch of different ids."""
        hashes = [_hash_of(each) for each in ids]
        return cls(len(hashes), tuple(nsmallest(_SIZE, hashes)))

    @classmethod
    def union(cls, sketches: Iterable[IdSketch]) -> Self:
        """Return the sketch of all ids of some sketches that have no id in common."""
        given = list(sketches)
        hashes = chain.from_iterable(each.least for each in given)
        return cls(sum(each.number for each in given), tuple(nsmallest(_SIZE, hashes)))

    @classmethod
    def stored(cls, document: Any) -> Self | None:
        """Return the sketch that ``to_document`` made, or None if this is not one."""
        if not isinstance(document, dict) or not {"n", "least"} <= document.keys():
            return None
        return cls(document["n"], tuple(document["least"]))

    def to_document(self) -> dict[str, Any]:
        """Return the stored form."""
        return {"n": self.number, "least": [Int64(each) for each in self.least]}

    def missing(self, ids: Iterable[Id]) -> list[Id]:
        """Return each given id that this sketch certainly lacks."""
        known = set(self.least)
        # The sketch has every hash below its largest. If None, it has the hashes of all ids.
        bound = self.least[-1] if self.number > len(self.least) else None
        hashes = ((each, _hash_of(each)) for each in ids)
        return [id for id, hash in hashes if hash not in known and (bound is None or hash < bound)]
