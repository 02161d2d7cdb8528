"""A database whose collections store a field under another name, as some bridges to programs do.

Each command of pyqueue must pass through the collection. A command that does not finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from pymongo import DeleteOne, UpdateMany, UpdateOne
from pymongo.command_cursor import CommandCursor
from pymongo.cursor import Cursor
from pymongo.database import Database

from pyqueue.payloads import OPTIONS

#: A field of pyqueue, and its name in the collection.
FIELD, STORED = "when", "mature"


def _renamed(old: str, new: str, value: Any) -> Any:
    again: Callable[[Any], Any] = partial(_renamed, old, new)
    if isinstance(value, RawBSONDocument):
        value = bson.decode(value.raw, OPTIONS)
    if isinstance(value, Mapping):
        return {
            new if name == old else name: each if name == "payload" else again(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [again(each) for each in value]
    if isinstance(value, tuple):  # part of a sort, or of the keys of an index
        return tuple(new if each == old else again(each) for each in value)
    if isinstance(value, DeleteOne):
        return DeleteOne(again(value._filter))
    if isinstance(value, (UpdateOne, UpdateMany)):
        return type(value)(again(value._filter), again(value._doc))
    return f"${new}" if value == f"${old}" else value


to_stored = partial(_renamed, FIELD, STORED)
from_stored = partial(_renamed, STORED, FIELD)


class RenamingDatabase(Database[dict[str, Any]]):
    """A database whose collections rename a field."""

    def get_collection(self, *args: Any, **options: Any) -> Any:
        """Return a collection that renames the field."""
        return RenamingCollection(super().get_collection(*args, **options))


class RenamingCollection:
    """A collection that renames a field on the way in, and back on the way out."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._collection, name)
        return partial(self._call, found) if callable(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        options = {name: to_stored(value) for name, value in options.items()}
        result = method(*map(to_stored, args), **options)
        if isinstance(result, (Cursor, CommandCursor)):
            return _Found(result)
        return from_stored(result)

    def with_options(self, **options: Any) -> RenamingCollection:
        """Return the collection with other options."""
        return RenamingCollection(self._collection.with_options(**options))

    def limited(self, command: Any) -> Any:
        """Send an update that has a time limit, as pyqueue asks for."""
        for name, value in list(command.items()):
            command[name] = to_stored(value)
        database, options = self._collection.database, self._collection.codec_options
        return from_stored(database.command(command, codec_options=options))


class _Found:
    """The documents of a cursor."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __iter__(self) -> Iterator[Any]:
        return map(from_stored, self._cursor)

    def sort(self, *order: Any) -> _Found:
        """Sort the documents."""
        return _Found(self._cursor.sort(*to_stored(order)))
