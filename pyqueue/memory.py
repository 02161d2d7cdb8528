"""mongomock as a database for one process: ``memory:``, or a database object of mongomock.

mongomock is not atomic across threads, stores Python values instead of BSON, and supports neither
hints nor sessions. ``MemoryCollection`` adds the guarantees of a server that pyqueue relies on: a
lock around each operation, documents converted through BSON, cursors read at once, and updates that
are applied entirely or not at all. Use it to test programs; it proves nothing about concurrency.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import bson
from bson.binary import UuidRepresentation
from bson.raw_bson import RawBSONDocument
from pymongo.errors import DuplicateKeyError, WriteError

from pyqueue.errors import ConfigurationError
from pyqueue.memory_bulk import bulk_write
from pyqueue.payloads import OPTIONS

#: One lock for each store, which holds the data of a mongomock database. Clients may share it.
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_guard = threading.Lock()


def _forked() -> None:
    """Give a forked child new locks, because threads of the parent may hold the old locks."""
    global _guard, _locks
    _guard = threading.Lock()
    _locks = weakref.WeakKeyDictionary()


os.register_at_fork(after_in_child=_forked)


def memory_database(name: str) -> Any:
    """Return a new, empty mongomock database.

    Raises:
        ConfigurationError: mongomock is not installed.
    """
    try:
        import mongomock
    except ImportError as error:
        raise ConfigurationError(
            'target: "memory:" needs mongomock, which is not installed; pip install mongomock'
        ) from error
    return mongomock.MongoClient()[name]


def is_memory(database: object) -> bool:
    """Return whether a database is a mongomock database."""
    return type(database).__module__.startswith("mongomock")


def lock_of(database: Any) -> threading.RLock:
    """Return the lock that guards the data of a mongomock database."""
    with _guard:
        return _locks.setdefault(database._store, threading.RLock())


def checked_session(session: Any) -> Any:
    """Check that a session was started on ``memory:``, and return it; see ``memory_sessions``.

    Raises:
        ConfigurationError: The object is not such a session.
    """
    if hasattr(session, "collection_like"):
        return session
    raise ConfigurationError(
        f'session: {type(session).__name__} is not a session of "memory:"; start one with '
        "client.transaction(), client.run_transaction() or client.database.client.start_session()"
    )


def _wall_clock() -> datetime:
    return datetime.now(UTC)


class Found(list[Any]):
    """The documents that a ``find`` has read, with the methods of a cursor.

    Args:
        read: Reads the documents with the options of ``find``.
        options: The options of ``find``, such as ``sort``.
    """

    def __init__(self, read: Callable[..., list[Any]], options: dict[str, Any]) -> None:
        self._read, self._options = read, options
        super().__init__(read(**options))

    def _with(self, **options: Any) -> Found:
        return Found(self._read, self._options | options)

    def sort(self, key_or_list: Any, direction: int = 1) -> Found:  # type: ignore[override]
        """Return the documents in this order."""
        keys = key_or_list
        if isinstance(keys, str):
            keys = [(keys, direction)]
        elif isinstance(keys, dict):
            keys = list(keys.items())
        return self._with(sort=[(each, 1) if isinstance(each, str) else each for each in keys])

    def limit(self, limit: int) -> Found:
        """Return at most this number of documents."""
        return self._with(limit=limit)

    def skip(self, skip: int) -> Found:
        """Return the documents after the first ``skip`` documents."""
        return self._with(skip=skip)

    def batch_size(self, size: int) -> Found:
        """Return the documents. They have been read, so there are no batches."""
        return self

    def to_list(self, length: int | None = None) -> list[Any]:
        """Return the documents, up to ``length``."""
        return self[:length]

    def close(self) -> None:
        """Do nothing: the documents have been read."""


class MemoryCollection:
    """A mongomock collection that is safe to use from several threads."""

    def __init__(self, database: Any, name: str, now: Callable[[], datetime] = _wall_clock) -> None:
        self.database, self.name, self._now = database, name, now
        shared = database.get_collection(name, codec_options=bson.CodecOptions(tz_aware=True))
        # This is a second collection object over the same store, because the change below must not
        # affect the program that passed in this database.
        self._collection = type(shared)(
            database,
            name,
            database._store,
            codec_options=shared.codec_options,
            read_preference=shared.read_preference,
        )
        self._collection._apply_update_document = _all_or_nothing(
            self._collection._apply_update_document
        )
        self._lock = lock_of(database)

    def on(self, database: Any) -> MemoryCollection:
        """Return the collection of this name in another database, with the same clock."""
        return MemoryCollection(database, self.name, self._now)

    def _within(self, session: Any) -> MemoryCollection:
        """Return the collection to use with a session: this one, or its copy in a transaction."""
        if session is None:
            return self
        found: MemoryCollection = checked_session(session).collection_like(self)
        return found

    def create_index(self, keys: Any, *, name: str | None = None, **options: Any) -> str:
        """Create an index unless it exists. Return its name.

        mongomock would check every document for duplicates, even those that a partial index omits.
        """
        given = [keys] if isinstance(keys, str) else list(keys)
        pairs = [(each, 1) if isinstance(each, str) else tuple(each) for each in given]
        name = name or "_".join(str(part) for pair in pairs for part in pair)
        with self._lock:
            if name in self._collection.index_information():
                return name
            if options.get("unique") and "partialFilterExpression" in options:
                self._check_unique([key for key, _ in pairs], options["partialFilterExpression"])
                self._collection._store.create_index(name, {"key": pairs, **options})
            else:
                self._collection.create_index(pairs, name=name, **options)
        return name

    def _check_unique(self, keys: list[str], indexed: Any) -> None:
        seen: list[Any] = []
        for each in self._collection.find(indexed, dict.fromkeys(keys, 1)):
            values = [each.get(key) for key in keys]
            if values in seen:
                raise DuplicateKeyError(f"E11000 duplicate key: {values}", 11000)
            seen.append(values)

    def bulk_write(self, operations: Any, ordered: bool = True, *, session: Any = None) -> Any:
        """Run writes one by one; see ``memory_bulk``."""
        return bulk_write(self, operations, ordered, self._update_by_pipeline, session=session)

    def aggregate(self, pipeline: list[dict[str, Any]], **options: Any) -> list[Any]:
        """Run a pipeline that may end with $unionWith, which mongomock lacks."""
        collection = self._within(options.get("session"))._collection
        own = [stage for stage in pipeline if "$unionWith" not in stage]
        more = [stage["$unionWith"]["pipeline"] for stage in pipeline if "$unionWith" in stage]
        with self._lock:
            return [
                document
                for part in (own, *more)
                for document in collection.aggregate([_given(stage) for stage in part])
            ]

    def find_one_and_update(self, filter: Any, update: Any, **options: Any) -> Any:
        """Update a document and return it. mongomock would apply ".$" to the wrong element."""
        if (session := options.pop("session", None)) is not None:
            return self._within(session).find_one_and_update(filter, update, **options)
        if isinstance(update, list):
            return self._update_by_pipeline(filter, update, **options)
        call = self.__getattr__("find_one_and_update")
        if not any(".$" in name for fields in update.values() for name in fields):
            return call(filter, update, **options)
        with self._lock:
            if not self.update_one(filter, update).matched_count:
                return None
            return next(iter(self.find({"_id": filter["_id"]})))

    def _update_by_pipeline(
        self, filter: Any, pipeline: list[Any], *, upsert: bool = False, **options: Any
    ) -> Any:
        """Update one document with a pipeline. mongomock supports pipelines only in aggregates."""
        id = filter["_id"]
        with self._lock:
            found = self._collection.find_one(_given(filter))
            if found is None and not upsert:
                return None
            scratch = memory_database("scratch")["one"]
            scratch.insert_one(found or {"_id": id})
            now = self._now().replace(tzinfo=None)
            (updated,) = scratch.aggregate(replaced(_naive(pipeline), "$$NOW", now))
            if found is not None:
                self._collection.delete_one({"_id": id})
            self._collection.insert_one(updated)
            return _plain(updated)

    def find(self, filter: Any = None, projection: Any = None, **options: Any) -> Found:
        """Find documents. A projection may ask for document sizes, which mongomock lacks."""
        return Found(partial(self._found, filter or {}, projection), options)

    def _found(self, filter: Any, projection: Any, **options: Any) -> list[Any]:
        find = self.__getattr__("find")
        if not isinstance(projection, dict) or all(
            isinstance(each, int) for each in projection.values()
        ):
            found: list[Any] = find(filter, projection, **options)
            return found
        return [
            {
                name: document[name]
                if wanted == 1
                else len(bson.encode(document, codec_options=OPTIONS))
                for name, wanted in projection.items()
                if wanted != 1 or name in document
            }
            for document in find(filter, None, **options)
        ]

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._collection, method)

        def locked(*args: Any, hint: Any = None, session: Any = None, **options: Any) -> Any:
            if session is not None:
                return getattr(self._within(session), method)(*args, **options)
            given = [_given(self._at_this_instant(each)) for each in args[:1]]
            given += [_given(each) for each in args[1:]]
            with self._lock:
                try:
                    if method in _WITH_BITS:
                        given = self._without_bits(given)
                    result = call(*given, **options)
                except (NotImplementedError, ValueError) as error:
                    raise ConfigurationError(
                        f"memory: mongomock does not support this ({error}); use a MongoDB server"
                    ) from error
                if method == "find":
                    return [_plain(document) for document in result]
                return _plain(result)

        return locked

    def _at_this_instant(self, match: Any) -> Any:
        """Return a filter with the time in place of "$$NOW", which mongomock does not support."""
        if not isinstance(match, dict):
            return match
        if "$and" in match:
            return {**match, "$and": [self._at_this_instant(each) for each in match["$and"]]}
        if "$expr" not in match:
            return match
        return {**match, "$expr": replaced(match["$expr"], "$$NOW", self._now())}

    def _without_bits(self, given: list[Any]) -> list[Any]:
        """Return the arguments of an update or a delete, with bitwise operators replaced."""
        match, *rest = given
        masks = {
            name: value["$bitsAllClear"]
            for name, value in match.items()
            if isinstance(value, dict) and "$bitsAllClear" in value
        }
        bits = rest[0].get("$bit", {}) if rest and isinstance(rest[0], dict) else {}
        if not masks and not bits:
            return given
        match = {name: value for name, value in match.items() if name not in masks}
        for document in self._collection.find(match):
            if all(not _value_at(document, name) & mask for name, mask in masks.items()):
                break
        else:
            return [{"_id": {"$in": []}}, *([_WITHOUT_EFFECT] if rest else [])]
        match = {"_id": document["_id"]}
        if not bits:
            return [match, *rest]
        put = {name: bson.Int64(_value_at(document, name) | by["or"]) for name, by in bits.items()}
        update = {name: fields for name, fields in rest[0].items() if name != "$bit"}
        return [match, {**update, "$set": {**update.get("$set", {}), **put}}, *rest[1:]]


#: The methods whose bitwise operators are replaced, because mongomock lacks these operators.
_WITH_BITS = frozenset({"update_one", "find_one_and_update", "delete_one", "delete_many"})
_WITHOUT_EFFECT = {"$unset": {"~": ""}}


def _value_at(document: Any, path: str) -> int:
    """Return the number at a path, such as "done.0"."""
    for name in path.split("."):
        document = document[int(name)] if isinstance(document, list) else document[name]
    return int(document)


def _all_or_nothing(apply: Callable[..., None]) -> Callable[..., None]:
    """Wrap the function of mongomock that updates a document in place.

    If the update fails, restore the document, and raise the error that a server would raise.
    """

    def applied(document: dict[str, Any], match: Any, update: Any, inserts: bool) -> None:
        before = copy.deepcopy(document)
        try:
            # Documents that one command updates must not share values.
            given = copy.deepcopy(update)
            own = {name: given.pop(name) for name in _LACKING if name in given}
            if given or not own:
                apply(document, match, given, inserts)
            for path, factor in own.get("$mul", {}).items():
                _multiply(document, path, factor)
            for path, to in own.get("$rename", {}).items():
                _rename(document, path, to)
        except Exception as error:
            document.clear()
            document.update(before)
            if isinstance(error, (ArithmeticError, AttributeError, LookupError, TypeError)):
                raise WriteError(f"the update cannot be applied to a document ({error})") from error
            raise

    return applied


#: The operators of updates that mongomock lacks, or supports only for top-level fields.
_LACKING = ("$mul", "$rename")


def _holder(document: dict[str, Any], path: str, *, make: bool) -> tuple[Any, Any]:
    """Return the object that contains the field at a path, and the name of the field in it.

    Args:
        document: The document to search.
        path: The path, such as "payload.size".
        make: Whether to create the documents that are missing along the path.

    Raises:
        WriteError: A value along the path is not a document.
    """
    *names, last = path.split(".")
    found: Any = document
    for name in names:
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found.setdefault(name, {}) if make else found.get(name, {})
        else:
            break
    if isinstance(found, list) and last.isdecimal() and int(last) < len(found):
        return found, int(last)
    if not isinstance(found, dict):
        raise WriteError(f"cannot create the field {last!r} at {path!r}", 28)
    return found, last


def _multiply(document: dict[str, Any], path: str, factor: Any) -> None:
    holder, name = _holder(document, path, make=True)
    value = holder[name] if isinstance(holder, list) else holder.get(name, 0)
    if any(isinstance(each, bool) or not isinstance(each, _NUMBERS) for each in (value, factor)):
        raise WriteError(f"cannot multiply {path!r}: a value is not a number", 14)
    if bson.Decimal128 in (type(value), type(factor)):
        one, two = (_decimal(each) for each in (value, factor))
        holder[name] = bson.Decimal128(one * two)
    else:
        product = value * factor
        is_long = bson.Int64 in (type(value), type(factor)) and isinstance(product, int)
        holder[name] = bson.Int64(product) if is_long else product


_NUMBERS = (int, float, bson.Decimal128)


def _decimal(value: Any) -> Decimal:
    return value.to_decimal() if isinstance(value, bson.Decimal128) else Decimal(value)


def _rename(document: dict[str, Any], path: str, to: str) -> None:
    holder, name = _holder(document, path, make=False)
    if isinstance(holder, list):
        raise WriteError(f"cannot rename {path!r}, which is an item of an array", 2)
    if name in holder:
        value = holder.pop(name)
        target, new = _holder(document, to, make=True)
        if isinstance(target, list):
            raise WriteError(f"cannot rename to {to!r}, which is an item of an array", 2)
        target.pop(new, None)
        target[new] = value


#: Decodes UUIDs as Binary, because mongomock stores a Binary but refuses a UUID.
_STORED = OPTIONS.with_options(uuid_representation=UuidRepresentation.UNSPECIFIED)


def _given(value: Any) -> Any:
    """Return an argument with its documents converted to BSON and back, as a server gets them."""
    if isinstance(value, RawBSONDocument):
        return bson.decode(value.raw, _STORED)
    if isinstance(value, dict):
        return bson.decode(bson.encode(value, codec_options=OPTIONS), _STORED)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], RawBSONDocument):
        return [_given(each) for each in value]
    return value


def replaced(value: Any, name: str, by: Any) -> Any:
    """Return a nested value in which each ``name`` is replaced by another value."""
    if isinstance(value, dict):
        return {key: replaced(each, name, by) for key, each in value.items()}
    if isinstance(value, list):
        return [replaced(each, name, by) for each in value]
    return by if value == name else value


def _naive(value: Any) -> Any:
    """Return a pipeline with naive datetimes, as mongomock stores them."""
    if isinstance(value, dict):
        return {key: _naive(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_naive(each) for each in value]
    return value.replace(tzinfo=None) if isinstance(value, datetime) else value


def _plain(value: Any) -> Any:
    """Return a result with its document converted to BSON and back, as a server returns it."""
    return (
        bson.decode(bson.encode(value, codec_options=OPTIONS), OPTIONS)
        if isinstance(value, dict)
        else value
    )
