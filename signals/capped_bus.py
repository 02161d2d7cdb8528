"""The buses that need only MongoDB: a small capped collection, and one tailable cursor per bus.

Every event is a document. The collection is a ring: a new document overwrites the oldest. A bus
that listens inserts a marker, reads from there on, and hears all topics of the collection.

- Reading begins at the position of the marker in the ring, because the order of ``_id`` depends on
  the clocks of processes. The server writes its own time into ``at``.
- A tailable cursor dies without an exception if the ring overtakes it or the collection is
  dropped, so every read checks that the cursor is alive.
- The collection must not grow, so every writer checks from time to time that it is capped.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from time import monotonic
from typing import Any, cast

import pymongo
from bson import ObjectId, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.cursor import CursorType
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from signals.api import BusError
from signals.runner import WAKE_SELF, AsyncFacade, BlockingFacade, Runner
from signals.transport import READ_TIMEOUT_S, Deliver, Procedure, TaskRuntime, ThreadRuntime

COMMAND_TIMEOUT_S = 5.0
"""How long a command may take, including the search for the server."""

MARKER_SLACK_S = 10
"""How many seconds before the marker to begin reading, so that the server skips older events."""

CHECK_INTERVAL_S = 60.0
"""How often a writer checks that the collection exists and is capped."""

_UNAUTHORIZED, _EXISTS = 13, 48

_READABLE: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True,
    tzinfo=UTC,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)
"""Decodes every document, so that a document that this module did not write can be skipped."""


class CappedTransport:
    """Talks to MongoDB; see ``signals.transport.Transport``.

    Args:
        database: A database of PyMongo, of its asyncio client, or of motor.
        prefix: The prefix of the collection, whose name is "<prefix>.signals".
        size: The size of the collection in bytes if this bus creates it.
        asynchronous: Whether the database is for asyncio.
    """

    def __init__(self, database: object, prefix: str, size: int, *, asynchronous: bool) -> None:
        given = f"{type(database).__module__.partition('.')[0]} {type(database).__name__}"
        allowed = ["pymongo Database"]
        if asynchronous:
            allowed = ["pymongo AsyncDatabase", "motor AsyncIOMotorDatabase"]
        if given not in allowed:
            raise BusError(f"a capped bus needs a database ({' or '.join(allowed)}), found {given}")
        self._database = cast(Any, database)
        self._collection, self._size = f"{prefix}.signals", size
        self._events = self._database.get_collection(
            self._collection,
            codec_options=_READABLE,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern(w=1),
            read_concern=ReadConcern("local"),
        )
        # The hash of a client depends only on the addresses that it was given, not on its type.
        client = getattr(self._database.client, "delegate", self._database.client)
        self.place = (hash(client), self._database.name, self._collection)
        self._checked: float | None = None  # when the collection was last seen to be capped
        self._cursor: Any = None

    def __str__(self) -> str:
        return f"{self._database.name}.{self._collection}"

    def explain(self, error: Exception) -> str:
        """Return the short text of an error, without the member states that PyMongo appends."""
        return f"{type(error).__name__}: {str(error)[:300]}"

    def publish(self, events: dict[str, datetime | None], origin: str) -> Procedure[None]:
        """Insert these events."""
        documents = [self._document(*event) | {"origin": origin} for event in events.items()]
        with pymongo.timeout(COMMAND_TIMEOUT_S):
            if self._checked is None or monotonic() - self._checked > CHECK_INTERVAL_S:
                yield from self._ensure()
            try:
                if len(documents) == 1:
                    yield self._events.insert_one(documents[0])
                else:
                    yield self._events.insert_many(documents, ordered=False)
            except Exception:
                self._checked = None
                raise

    def _document(self, topic: str, when: datetime | None) -> dict[str, Any]:
        # The server replaces an empty timestamp with its own time.
        return {"_id": ObjectId(), "at": Timestamp(0, 0), "topic": topic, "when": when}

    def _ensure(self) -> Procedure[None]:
        """Create the collection if it is missing, and convert it if it is not capped."""
        command, wanted = self._database.command, {"name": self._collection}
        for _ in range(3):
            try:
                reply = yield command({"listCollections": 1, "filter": wanted})
            except OperationFailure as error:
                if error.code != _UNAUTHORIZED:
                    raise
                # A user without this permission may still list the collections that it can read.
                reply = yield command(
                    {
                        "listCollections": 1,
                        "filter": wanted,
                        "nameOnly": True,
                        "authorizedCollections": True,
                    }
                )
            found = reply["cursor"]["firstBatch"]
            try:
                if not found:
                    yield command({"create": self._collection, "capped": True, "size": self._size})
                elif not found[0].get("options", {"capped": True}).get("capped"):
                    # An insert just after a drop creates a plain collection. Convert it only if
                    # it contains nothing but signals.
                    if (yield self._events.find_one({"topic": {"$exists": False}})) is not None:
                        raise BusError(
                            f"the collection {self} is not capped and holds other documents; "
                            "use another prefix, or rename the collection"
                        )
                    yield command({"convertToCapped": self._collection, "size": self._size})
                self._checked = monotonic()
                return
            except OperationFailure as error:
                if error.code == _UNAUTHORIZED:
                    raise BusError(
                        f"not permitted to create the capped collection {self}; "
                        "ask an administrator to run "
                        f'db.getSiblingDB("{self._database.name}")'
                        f'.createCollection("{self._collection}", '
                        f"{{capped: true, size: {self._size}}})"
                    ) from None
                if error.code != _EXISTS:
                    raise

    def _open(self) -> Procedure[Any]:
        """Insert a marker, and return a cursor that has read up to it."""
        marker = self._document(WAKE_SELF, None)
        with pymongo.timeout(COMMAND_TIMEOUT_S):
            yield from self._ensure()
            yield self._events.insert_one(marker)
            stored = yield self._events.find_one({"_id": marker["_id"]})
            since = (
                Timestamp(max(0, stored["at"].time - MARKER_SLACK_S), 0)
                if stored
                else Timestamp(0, 0)
            )
            cursor = self._events.find(
                {"at": {"$gte": since}}, cursor_type=CursorType.TAILABLE_AWAIT
            )
            cursor = cursor.max_await_time_ms(int(READ_TIMEOUT_S * 1000))
            while True:
                event = yield from self._next(cursor)
                if event is None or event["_id"] == marker["_id"]:
                    return cursor

    def _next(self, cursor: Any) -> Procedure[dict[str, Any] | None]:
        try:
            event: dict[str, Any] = yield cursor.next()
            return event
        except (StopIteration, StopAsyncIteration):
            if not cursor.alive:
                raise ConnectionError(
                    "the cursor died: newer events overwrote its position, or the collection was "
                    "dropped"
                ) from None
            return None

    def start(self) -> Procedure[bool]:
        """Open the cursor, which hears every topic."""
        self._cursor = yield from self._open()
        return True

    def subscribe(self, add: list[str], drop: list[str]) -> Procedure[None]:
        """Do nothing, because the cursor hears every topic."""
        yield from ()

    def read(self, deliver: Deliver, confirm: Callable[[str], None]) -> Procedure[None]:
        """Wait up to READ_TIMEOUT_S for one event, and pass it on."""
        event = yield from self._next(self._cursor)
        if event is not None:
            topic, when = event.get("topic"), event.get("when")
            if isinstance(topic, str) and (when is None or isinstance(when, datetime)):
                deliver(topic, when, event.get("origin", ""))

    def stop(self) -> Procedure[None]:
        """Close the cursor."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            yield cursor.close()

    def check(self) -> Procedure[None]:
        """Create the collection if it is missing, write to it, and read from it with a cursor."""
        cursor = yield from self._open()
        yield cursor.close()

    def close(self) -> Procedure[None]:
        """Do nothing, because the database was passed in and stays open."""
        yield from ()


class CappedBus(BlockingFacade):
    """Wakes listeners of every process that uses the same MongoDB database.

    Args:
        database: A database of PyMongo.
        prefix: The prefix of the collection, whose name is "<prefix>.signals".
        size: The size of the collection in bytes, if this bus creates it.
        window: The length of the time window in which events of one topic are merged, in seconds.

    Raises:
        BusError: ``database`` is not a database of PyMongo.
    """

    def __init__(
        self,
        database: object,
        *,
        prefix: str = "pyqueue",
        size: int = 1 << 20,
        window: float = 0.05,
    ) -> None:
        connect = partial(CappedTransport, database, prefix, size, asynchronous=False)
        super().__init__(Runner("CappedBus", connect, window, ThreadRuntime))


class AsyncCappedBus(AsyncFacade):
    """``CappedBus`` for asyncio: ``database`` is an AsyncDatabase or an AsyncIOMotorDatabase."""

    def __init__(
        self,
        database: object,
        *,
        prefix: str = "pyqueue",
        size: int = 1 << 20,
        window: float = 0.05,
    ) -> None:
        connect = partial(CappedTransport, database, prefix, size, asynchronous=True)
        super().__init__(Runner("AsyncCappedBus", connect, window, TaskRuntime))
