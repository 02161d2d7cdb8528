"""Commands to the other collections of a namespace, such as ``<namespace>.metrics``.

They go through the database and the driver of the client. A failure of such a command says
nothing about the queues, so the driver does not count it, nor assume that the primary changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pymongo import UpdateOne

from pyqueue.memory import MemoryCollection
from pyqueue.requests import Command, Filter, UpdateDocument

Answer = TypeVar("Answer", covariant=True)


@dataclass(slots=True)
class Beside(Command[Answer]):
    """A command to another collection of the namespace. Writes are acknowledged by the primary."""

    #: The collection is "<namespace>.<suffix>".
    suffix: str
    command: Command[Answer]

    def send(self, collection: Any) -> Any:
        """Send the command to the other collection."""
        return self.command.send(_beside(collection, self.suffix))

    def read(self, raw: Any) -> Answer:
        """Return the answer of the command."""
        return self.command.read(raw)


class BesideReads(Beside[Answer]):
    """A command to another collection of the namespace, if the command returns a cursor."""

    __slots__ = ()
    cursor: ClassVar[bool] = True


def aside(suffix: str, command: Command[Answer]) -> Beside[Answer]:
    """Return a request that sends a command to the collection ``<namespace>.<suffix>``."""
    kind = BesideReads if command.cursor else Beside
    return kind(suffix, command, w1=True)


@dataclass(slots=True)
class UpsertEach(Command[None]):
    """Update the document that each filter matches. If there is none, insert one."""

    pairs: Sequence[tuple[Filter, UpdateDocument]]

    def send(self, collection: Any) -> Any:
        """Send a bulk write."""
        updates = [UpdateOne(match, update, upsert=True) for match, update in self.pairs]
        return collection.bulk_write(updates, ordered=False, session=self.session)

    def read(self, raw: Any) -> None:
        """Return nothing."""


def _beside(collection: Any, suffix: str) -> Any:
    name = f"{collection.name}.{suffix}"
    if isinstance(collection, MemoryCollection):
        return MemoryCollection(collection.database, name)
    return collection.database.get_collection(
        name,
        codec_options=collection.codec_options,
        read_preference=collection.read_preference,
        write_concern=collection.write_concern,
    )
