"""mongomock as a database for one process: ``memory:``, and mongomock databases that are passed in.

mongomock is not atomic across threads, keeps what is given to it instead of BSON, and knows neither hints nor sessions. This makes
it keep to the rules of a server as far as pyqueue relies on them: one lock around each operation, documents through BSON, cursors
read at once, updates whole or not at all. It is the stand-in for tests of what uses a queue, never a proof of concurrency.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.raw_bson import RawBSONDocument
from pymongo.errors import BulkWriteError, WriteError
from pymongo.results import BulkWriteResult

from pyqueue.errors import ConfigurationError
from pyqueue.payloads import OPTIONS

__all__ = ["MemoryCollection", "memory_database"]

#: One lock for each store, however many clients use it.
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def memory_database(name: str) -> Any:
    """A new, empty mongomock database.

    Raises:
        ConfigurationError: mongomock is not installed.
    """
    try:
        import mongomock
    except ImportError as error:
        raise ConfigurationError(
            'target: "memory:" needs mongomock: pip install mongomock'
        ) from error
    return mongomock.MongoClient()[name]


class MemoryCollection:
    """A mongomock collection, made safe for threads."""

    def __init__(self, database: Any, name: str) -> None:
        self.database = database
        shared = database.get_collection(name, codec_options=bson.CodecOptions(tz_aware=True))
        # One of our own, over the same store: others who use this database have theirs as mongomock made it.
        self._collection = type(shared)(
            database,
            name,
            database._store,
            codec_options=shared.codec_options,
            read_preference=shared.read_preference,
        )
        self._collection._apply_update_document = _whole(self._collection._apply_update_document)
        store = database._store
        with _guard:
            self._lock = _locks.setdefault(store, threading.RLock())

    def create_index(self, keys: Any, *, name: str, **options: Any) -> None:
        """As a server does: one that is there already is left alone. mongomock would check the documents again, wrongly."""
        with self._lock:
            if name not in self._collection.index_information():
                self._collection.create_index(keys, name=name, **options)

    def bulk_write(self, operations: Any, *, ordered: bool, session: Any = None) -> Any:
        """UpdateOne operations, one by one: mongomock's own refuses those of a current pymongo."""
        matched, errors = 0, []
        for place, operation in enumerate(operations):
            try:
                matched += self.update_one(
                    operation._filter, operation._doc, session=session
                ).matched_count
            except WriteError as error:
                errors.append(
                    {
                        "index": place,
                        "code": error.code,
                        "errmsg": str(error),
                        **(error.details or {}),
                    }
                )
        if errors:
            raise BulkWriteError({"writeErrors": errors, "nMatched": matched})
        return BulkWriteResult({"nMatched": matched}, acknowledged=True)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._collection, method)

        def locked(*args: Any, hint: Any = None, session: Any = None, **options: Any) -> Any:
            if session is not None:
                raise ConfigurationError(
                    "session: mongomock has no sessions; use a MongoDB replica set"
                )
            given = [_given(each) for each in args]
            if "update" in method and (
                "$mul" in given[1] or any("." in name for name in given[1].get("$rename", ()))
            ):
                # It says nothing that a user could make something of.
                raise ConfigurationError(
                    "update: mongomock has no $mul, and no $rename of nested fields; MongoDB has both"
                )
            with self._lock:
                try:
                    result = call(*given, **options)
                except (NotImplementedError, ValueError) as error:
                    raise ConfigurationError(
                        f"mongomock does not do what MongoDB does here: {error}"
                    ) from error
                if method == "find":
                    return [_plain(document) for document in result]
                return _plain(result)

        return locked


def _whole(apply: Callable[..., None]) -> Callable[..., None]:
    """mongomock's way to update a document in place, made to leave it as it was if it fails, and to fail as a server does."""

    def applied(document: dict[str, Any], *rest: Any) -> None:
        before = copy.deepcopy(document)
        try:
            apply(document, *rest)
        except Exception as error:
            document.clear()
            document.update(before)
            if isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
                raise WriteError(f"the update does not fit the document: {error}") from error
            raise

    return applied


#: mongomock keeps a Binary as it is, and refuses a UUID.
_STORED = OPTIONS.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)


def _given(value: Any) -> Any:
    """Documents, with all that is in them, as BSON would store them."""
    if isinstance(value, RawBSONDocument):
        return bson.decode(value.raw, _STORED)
    if isinstance(value, dict):
        return bson.decode(bson.encode(value, codec_options=OPTIONS), _STORED)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], RawBSONDocument):
        return [_given(each) for each in value]
    return value


def _plain(value: Any) -> Any:
    """A document as BSON would give it back."""
    return (
        bson.decode(bson.encode(value, codec_options=OPTIONS), OPTIONS)
        if isinstance(value, dict)
        else value
    )
