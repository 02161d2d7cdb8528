"""The kind "bucket": messages that are pushed together share a document, called a pack.

A message that cannot be packed is a document of the same queue. Claims take packs and such
documents in one common order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pyqueue.backends.bucket.packed_ids import in_stored_packs
from pyqueue.backends.kind import IndexTerms, UpdateFields, register
from pyqueue.backends.standard import Standard
from pyqueue.messages import Id
from pyqueue.requests import Plan

#: The maximum number of messages in a pack, unless the queue sets another number.
DEFAULT_PACK: Final = 500
#: The name of the index that is used to count the messages of packs.
PACKS: Final = "packs"
_INDEXES: Final[Mapping[str, IndexTerms]] = {
    PACKS: (
        [("q", 1), ("when", 1), ("n", 1), ("token", 1)],
        {"partialFilterExpression": {"n": {"$exists": True}}},
    )
}


@register
class Bucket(Standard):
    """A queue that stores many messages in one document. It keeps no finished messages."""

    name = "bucket"
    capabilities = frozenset({"claim", "dead_letter", "keys", "move", "packs", "pop", "rate"})
    shape: Mapping[str, object] = MappingProxyType({"pack": DEFAULT_PACK})
    held_fields = (*Standard.held_fields, "c", "orderly")
    bare_pop = False

    def needs(self, shape: Mapping[str, object] | None) -> Mapping[str, IndexTerms]:
        """Return the indexes, including the index that is used to count the messages of packs."""
        return {**super().needs(shape), **_INDEXES}

    def claiming(self, update: UpdateFields) -> UpdateFields:
        """Return the update that claims a document. It also counts the claim of a pack in ``c``."""
        counted = {**update.get("$inc", {}), "c": 1}
        return super().claiming({**update, "$inc": counted})

    def packed_ids(
        self, queue: str, ids: Sequence[Id], session: object = None
    ) -> Plan[tuple[frozenset[Id], list[Id]]]:
        """Find the ids of messages in stored packs. Block late inserts of all other packs."""
        return in_stored_packs(queue, ids, session)
