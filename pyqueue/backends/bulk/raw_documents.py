"""Find documents without decoding them, for readers that need a few fields of many documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pyqueue.requests import Command, Find


@dataclass(slots=True)
class FindEncoded(Command[list[bytes]]):
    """Find documents, and return them in BSON. A ``skip`` of ``find`` is ignored."""

    find: Find
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send a find whose result the driver does not decode."""
        find = self.find
        return collection.find_raw_batches(
            find.filter,
            find.projection,
            sort=find.sort,
            # If the limit is negative, the server sends one batch and closes the cursor.
            limit=-find.limit if find.one_batch else find.limit,
            **({"batch_size": find.limit} if find.one_batch else {}),
            hint=find.hint,
            session=self.session,
        )

    def read(self, raw: Iterable[bytes]) -> list[bytes]:
        """Return the documents in the batches that the server sent."""
        return [document for batch in raw for document in _divided(batch)]


def _divided(batch: bytes) -> Iterator[bytes]:
    """Yield the documents of a batch. Each document begins with its size, in four bytes."""
    start, end = 0, len(batch)
    while start < end:
        stop = start + int.from_bytes(batch[start : start + 4], "little")
        yield batch[start:stop]
        start = stop
