"""The databases of ``memory:`` that programs use directly, with sessions and transactions.

mongomock has no sessions. Here, the first operation of a transaction copies the database, and the
transaction works on this copy. The commit writes the changed documents back. If one of them was
also changed outside the transaction, nothing is written: the commit fails with a write conflict,
as on a server, and retry loops repeat the transaction.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Final, Self

import bson
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError, InvalidOperation, OperationFailure, PyMongoError

from pyqueue.errors import ConfigurationError
from pyqueue.memory import (
    MemoryCollection,
    checked_session,
    is_memory,
    lock_of,
    memory_database,
)
from pyqueue.memory_bulk import bulk_write
from pyqueue.payloads import OPTIONS
from pyqueue.targets import is_memory_url

#: How many times ``with_transaction`` may run its function. PyMongo retries for two minutes.
_MAX_ATTEMPTS: Final = 100
#: How documents are stored: as mongomock stores them, with naive instants.
_STORED: Final[bson.CodecOptions[dict[str, Any]]] = bson.CodecOptions(
    datetime_conversion=OPTIONS.datetime_conversion
)
#: The error label of transactions that may be repeated.
_TRANSIENT: Final = "TransientTransactionError"
_DATABASE_METHODS: Final = frozenset(
    {"command", "create_collection", "drop_collection", "list_collection_names"}
)
#: The methods of cursors that return the cursor itself.
_CURSOR_OPTIONS: Final = frozenset({"batch_size", "hint", "limit", "max_time_ms", "skip", "sort"})


#: A change: the name of a collection, an id, and the document, or None if it was deleted.
_Change = tuple[str, Any, Any]


def _conflict(reason: str) -> OperationFailure:
    details = {"errorLabels": [_TRANSIENT], "code": 112, "codeName": "WriteConflict"}
    return OperationFailure(f"WriteConflict: {reason}; run the transaction again", 112, details)


class _Copy:
    """The copy of a database on which a transaction works."""

    def __init__(self, live: Any) -> None:
        self.live = live
        store = type(live._store)()
        #: The encoded documents at the beginning, keyed by collection and id.
        self._before: dict[str, dict[Any, bytes]] = {}
        with lock_of(live):
            for name, found in live._store._collections.items():
                raw = {id: bson.encode(each) for id, each in found._documents.items()}
                self._before[name] = raw
                copied = store[name]
                copied._documents.update(
                    (id, bson.decode(each, _STORED)) for id, each in raw.items()
                )
                copied.indexes = dict(found.indexes)
                copied._ttl_indexes = dict(found._ttl_indexes)
        self.database = type(live)(live.client, live.name, _store=store)
        self._collections: dict[str, MemoryCollection] = {}

    def collection(self, like: MemoryCollection) -> MemoryCollection:
        """Return the collection in this copy that corresponds to a collection of pyqueue."""
        found = self._collections.get(like.name)
        if found is None:
            found = self._collections[like.name] = like.on(self.database)
        return found

    def changes(self) -> list[_Change]:
        """Return the documents that the transaction changed.

        Raises:
            OperationFailure: A changed document was also changed outside the transaction.
        """
        changes = []
        for name, store in self.database._store._collections.items():
            before, documents = self._before.get(name, {}), store._documents
            raw = {id: bson.encode(each) for id, each in documents.items()}
            live = self.live._store[name]._documents
            for id in {**before, **raw}:
                if raw.get(id) != before.get(id):
                    now = live.get(id)
                    if (None if now is None else bson.encode(now)) != before.get(id):
                        raise _conflict(f"another writer changed {id!r} in {name!r}")
                    changes.append((name, id, documents.get(id)))
        return changes

    def write(self, changes: list[_Change], undo: ExitStack) -> None:
        """Write changed documents back, and add to ``undo`` a callback that restores the old state.

        Raises:
            OperationFailure: A unique index refuses a value, which another writer has already used.
        """
        stores = self.live._store
        undo.callback(
            self._put, [(name, id, stores[name]._documents.get(id)) for name, id, _ in changes]
        )
        self._put(changes)
        try:
            for name, _, document in changes:
                if document is not None:
                    self.live[name]._ensure_uniques(document)
        except DuplicateKeyError as error:
            raise _conflict("another writer has used a value that must be unique") from error

    def _put(self, documents: list[_Change]) -> None:
        for name, id, document in documents:
            stored = self.live._store[name]._documents
            if document is None:
                stored.pop(id, None)
            else:
                stored[id] = document


class _Transaction:
    """The context manager of a transaction: it commits, or aborts if the block raises an error."""

    def __init__(self, session: MemorySession) -> None:
        self._session = session

    def __enter__(self) -> MemorySession:
        return self._session

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._session.abort()
        elif self._session.in_transaction:
            self._session.commit()

    async def __aenter__(self) -> MemorySession:
        return self._session

    async def __aexit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.__exit__(kind)


class MemorySession:
    """A session with the methods of a pymongo ``ClientSession``."""

    def __init__(self) -> None:
        #: The copies in the open transaction, keyed by the id() of the store, or None outside one.
        self._copies: dict[int, _Copy] | None = None
        self.has_ended = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open."""
        return self._copies is not None

    def copy_of(self, database: Any) -> _Copy | None:
        """Return the transaction's copy of a mongomock database, or None outside a transaction."""
        if self._copies is None:
            return None
        found = self._copies.get(id(database._store))
        if found is None:
            found = self._copies[id(database._store)] = _Copy(database)
        return found

    def collection_like(self, like: MemoryCollection) -> MemoryCollection:
        """Return the given collection, or its copy in the open transaction."""
        copy = self.copy_of(like.database)
        return like if copy is None else copy.collection(like)

    def begin(self, *options: object, **more: object) -> _Transaction:
        """Start a transaction."""
        if self._copies is not None:
            raise InvalidOperation("Transaction already in progress")
        self._copies = {}
        return _Transaction(self)

    def commit(self) -> None:
        """Write the changes of the transaction back.

        Raises:
            OperationFailure: There is a write conflict. Nothing is written.
        """
        if self._copies is None:
            raise InvalidOperation("No transaction started")
        copies, self._copies = list(self._copies.values()), None
        with ExitStack() as locks:
            for each in sorted(copies, key=lambda each: id(each.live._store)):
                locks.enter_context(lock_of(each.live))
            changes = [each.changes() for each in copies]
            with ExitStack() as undo:
                for each, some in zip(copies, changes, strict=True):
                    each.write(some, undo)
                undo.pop_all()

    def abort(self) -> None:
        """Abort the transaction and drop its changes."""
        self._copies = None

    def end(self) -> None:
        """End the session, and abort its transaction."""
        self._copies, self.has_ended = None, True

    start_transaction: Any = begin
    commit_transaction: Any = commit
    abort_transaction: Any = abort
    end_session: Any = end

    def with_transaction(self, fn: Callable[[Self], Any], *options: object, **more: object) -> Any:
        """Run a function in a transaction, and repeat it after each write conflict."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                with self.begin():
                    return fn(self)
            except PyMongoError as error:
                if _is_last(error, attempt):
                    raise
        raise AssertionError("unreachable")


def _is_last(error: PyMongoError, attempt: int) -> bool:
    return attempt == _MAX_ATTEMPTS or not error.has_error_label(_TRANSIENT)


def _awaitable(call: Callable[..., Any]) -> Callable[..., Any]:
    async def awaited(*args: Any, **options: Any) -> Any:
        result = call(*args, **options)
        return AsyncMemoryCursor(result) if hasattr(result, "__next__") else result

    return awaited


class AsyncMemorySession(MemorySession):
    """A session with the methods of an ``AsyncClientSession``."""

    start_transaction = _awaitable(MemorySession.begin)
    commit_transaction = _awaitable(MemorySession.commit)
    abort_transaction = _awaitable(MemorySession.abort)
    end_session = _awaitable(MemorySession.end)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    async def with_transaction(
        self, fn: Callable[[Self], Any], *options: object, **more: object
    ) -> Any:
        """Await a function in a transaction, and repeat it after each write conflict."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                async with self.begin():
                    return await fn(self)
            except PyMongoError as error:
                if _is_last(error, attempt):
                    raise
        raise AssertionError("unreachable")


# ---- databases and collections as programs see them


class MemoryClient:
    """The client of a ``MemoryDatabase``, with some methods of a pymongo ``MongoClient``."""

    def __init__(self, kind: type[MemoryDatabase], raw: Any) -> None:
        self._kind = kind
        self._raw = raw

    def __getitem__(self, name: str) -> Any:
        return self._kind(self._raw[name])

    get_database = __getitem__

    def start_session(self, **options: object) -> Any:
        """Return a new session."""
        return self._kind.session_type()


class MemoryDatabase:
    """A database of ``memory:``, with the methods of a pymongo database that mongomock offers.

    Args:
        raw: The mongomock database.
    """

    session_type: type[MemorySession] = MemorySession

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.name: str = raw.name

    @classmethod
    def new(cls, name: str = "pyqueue") -> Self:
        """Return a new, empty database.

        Raises:
            ConfigurationError: mongomock is not installed.
        """
        return cls(memory_database(name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    @property
    def client(self) -> MemoryClient:
        """The client of this database."""
        return MemoryClient(type(self), self.raw.client)

    def get_collection(self, name: str, *args: Any, **options: Any) -> Any:
        """Return a collection."""
        return MemoryTable(self, name, args, options)

    def __getitem__(self, name: str) -> Any:
        return self.get_collection(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"use database[{name!r}] for this collection")
        return self._method(name) if name in _DATABASE_METHODS else self[name]

    def _method(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, session: Any = None, **options: Any) -> Any:
            database = _used(self.raw, session)
            with lock_of(database):
                result = _allowed(getattr(database, name), *args, **options)
            return self[args[0]] if name == "create_collection" else result

        return call


def names_memory(target: object) -> bool:
    """Return whether a target is a ``memory:`` URL or a ``MemoryDatabase``."""
    return is_memory_url(target) or isinstance(target, MemoryDatabase)


def in_memory(target: object) -> bool:
    """Return whether a target has no server: it names memory, or is a database of mongomock."""
    return names_memory(target) or is_memory(target)


def _used(raw: Any, session: Any) -> Any:
    """Return a mongomock database, or its copy in the open transaction of a session."""
    copy = None if session is None else checked_session(session).copy_of(raw)
    return raw if copy is None else copy.database


def _allowed(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a method of mongomock. Raise ConfigurationError if it lacks a feature of a server."""
    try:
        return call(*args, **options)
    except NotImplementedError as error:
        raise _refusal(str(error)) from error


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"memory: mongomock does not support this ({reason}); run the test on a MongoDB server"
    )


def _reading_under(lock: AbstractContextManager[Any], cursor: Any) -> Any:
    """Return a cursor that reads its documents under a lock.

    mongomock reads the documents when the first one is requested. Without the lock, another thread
    might then be in the middle of a write.
    """
    read = cursor._compute_results

    def read_locked(*args: Any, **options: Any) -> Any:
        with lock:
            return read(*args, **options)

    cursor._compute_results = read_locked
    return cursor


class MemoryTable:
    """A collection of a ``MemoryDatabase``. Its methods accept ``session=``."""

    def __init__(self, database: MemoryDatabase, name: str, args: Any, options: Any) -> None:
        self.database, self.name = database, name
        self._given = (args, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.database.name!r}, {self.name!r})"

    def with_options(self, *args: Any, **options: Any) -> Self:
        """Return the collection with other options."""
        return type(self)(self.database, self.name, args, options)

    @property
    def find_one_and_update(self) -> Callable[..., Any]:
        """The method of this name, by which ``targets.invalid`` recognizes a collection class."""
        return self._method("find_one_and_update")

    def __getitem__(self, name: str) -> Any:
        return type(self)(self.database, f"{self.name}.{name}", (), {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        offered = hasattr(type(self.database.raw[self.name]), name)
        if not offered and hasattr(Collection, name):
            raise _refusal(name)
        return self._method(name) if offered else self[name]

    def _method(self, name: str) -> Callable[..., Any]:
        args, options = self._given

        def call(*given: Any, session: Any = None, **more: Any) -> Any:
            database = _used(self.database.raw, session)
            lock = lock_of(database)
            with lock:
                found = database.get_collection(self.name, *args, **options)
                method = (
                    partial(bulk_write, found) if name == "bulk_write" else getattr(found, name)
                )
                result = _allowed(method, *given, **more)
            return _reading_under(lock, result) if name == "find" else result

        return call


class AsyncMemoryDatabase(MemoryDatabase):
    """A ``MemoryDatabase`` with awaitable methods, like PyMongo's ``AsyncDatabase``."""

    session_type = AsyncMemorySession

    def get_collection(self, name: str, *args: Any, **options: Any) -> Any:
        """Return a collection."""
        return AsyncMemoryTable(self, name, args, options)

    def _method(self, name: str) -> Callable[..., Any]:
        return _awaitable(super()._method(name))


class AsyncMemoryTable(MemoryTable):
    """A collection of an ``AsyncMemoryDatabase``."""

    def _method(self, name: str) -> Callable[..., Any]:
        call = super()._method(name)
        if name != "find":
            return _awaitable(call)
        return lambda *args, **options: AsyncMemoryCursor(call(*args, **options))


class AsyncMemoryCursor:
    """A cursor of an ``AsyncMemoryTable``."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

    def __getattr__(self, name: str) -> Any:
        if name not in _CURSOR_OPTIONS:
            raise AttributeError(name)
        option = getattr(self._cursor, name)

        def call(*args: Any, **options: Any) -> AsyncMemoryCursor:
            option(*args, **options)
            return self

        return call

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return next(self._cursor)
        except StopIteration:
            raise StopAsyncIteration from None

    async def to_list(self, length: int | None = None) -> list[Any]:
        """Return the next documents, up to ``length``."""
        return [each for _, each in zip(range(length or 2**31), self._cursor, strict=False)]

    async def close(self) -> None:
        """Close the cursor."""
        self._cursor.close()
