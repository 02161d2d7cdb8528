"""Documents in BSON, for readers that need a few fields of many documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from pyqueue.requests import Command, Find


@dataclass(slots=True)
class FindEncoded(Command[list[bytes]]):
    """Find documents on a server, without any ``skip``. The answer is a list of them in BSON."""

    find: Find
    cursor: ClassVar[bool] = True

    def send(self, collection: Any) -> Any:
        """Send a find whose answers are not decoded."""
        find = self.find
        return collection.find_raw_batches(
            find.filter,
            find.projection,
            sort=find.sort,
            # The server sends one batch, and closes the cursor, if the limit is negative.
            limit=-find.limit if find.one_batch else find.limit,
            **({"batch_size": find.limit} if find.one_batch else {}),
            hint=find.hint,
            session=self.session,
        )

    def read(self, raw: Iterable[bytes]) -> list[bytes]:
        """Divide the batches of the server into documents."""
        return [document for batch in raw for document in _divided(batch)]


def _divided(batch: bytes) -> Iterator[bytes]:
    """Yield the documents of a batch. Each begins with its size, in four bytes."""
    start, end = 0, len(batch)
    while start < end:
        stop = start + int.from_bytes(batch[start : start + 4], "little")
        yield batch[start:stop]
        start = stop
