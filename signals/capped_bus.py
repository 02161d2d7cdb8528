"""The buses on MongoDB alone: a small capped collection, and one tailable cursor per bus.

Every event is a document; the ring overwrites the oldest. A listening bus reads on from its own marker and hears all
topics of the collection. It must not rely on the order of `_id`, since clocks of processes differ: the server puts its
own time into `at`, and the place to begin is where the marker stands in the ring. A tailable cursor dies without an
exception when the ring overtakes it or the collection goes, so that is looked for after every read. This module must
never make the collection grow: whoever writes to it looks now and then that it is capped.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import pymongo
from bson import ObjectId, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from pymongo.cursor import CursorType
from pymongo.errors import OperationFailure
from pymongo.read_concern import ReadConcern
from pymongo.read_preferences import ReadPreference
from pymongo.write_concern import WriteConcern

from signals.api import BusError
from signals.ears import Steps
from signals.engine import NUDGE, ServedCore
from signals.fronts import AsyncFront, BlockingFront

TIMEOUT = 5.0
"""Seconds that a command to the server may take, finding the server included."""

SLACK = 10
"""Seconds before the marker from which the server looks through the ring; what is older need not be sent to us."""

LOOK = 60.0
"""Seconds after which a writer looks again that the collection is there and capped."""

_UNAUTHORIZED, _EXISTS = 13, 48

_READABLE: CodecOptions[dict[str, Any]] = CodecOptions(
    tz_aware=True,
    tzinfo=UTC,
    datetime_conversion=DatetimeConversion.DATETIME_AUTO,
    unicode_decode_error_handler="replace",
)
"""Whatever others put into the ring can be read, and so passed over."""


class CappedWire:
    """What MongoDB is told: see `signals.engine.Wire`. The same for PyMongo, its asyncio client, and motor."""

    hears_all = True

    def __init__(self, database: Any, prefix: str, size: int, *, asynchronous: bool) -> None:
        kind = f"{type(database).__module__.partition('.')[0]} {type(database).__name__}"
        fitting = (
            ("pymongo AsyncDatabase", "motor AsyncIOMotorDatabase")
            if asynchronous
            else ("pymongo Database",)
        )
        if kind not in fitting:
            raise BusError(f"a capped bus needs a database: {' or '.join(fitting)}, not {kind}")
        self._database, self._collection, self._size = database, f"{prefix}.signals", size
        self._events = database.get_collection(
            self._collection,
            codec_options=_READABLE,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern(w=1),
            read_concern=ReadConcern("local"),
        )
        self._looked: float | None = None
        self._cursor: Any = None

    def __str__(self) -> str:
        return f"{self._database.name}.{self._collection}"

    def explain(self, error: Exception) -> str:
        """Describe an error, shortly: PyMongo adds the state of every member."""
        return f"{type(error).__name__}: {str(error)[:300]}"

    def publish(self, events: dict[str, datetime | None]) -> Steps[None]:
        """Insert these events."""
        documents = [self._document(topic, when) for topic, when in events.items()]
        with pymongo.timeout(TIMEOUT):
            if self._looked is None or monotonic() - self._looked > LOOK:
                yield from self._ensure()
            try:
                if len(documents) == 1:
                    yield self._events.insert_one(documents[0])
                else:
                    yield self._events.insert_many(documents, ordered=False)
            except Exception:
                self._looked = None
                raise

    def _document(self, topic: str, when: datetime | None) -> dict[str, Any]:
        # The server replaces an empty timestamp by its own time.
        return {"_id": ObjectId(), "at": Timestamp(0, 0), "topic": topic, "when": when}

    def _ensure(self) -> Steps[None]:
        """Make the collection, and make it capped, if it is not."""
        command, wanted = self._database.command, {"name": self._collection}
        for _ in range(3):
            try:
                reply = yield command({"listCollections": 1, "filter": wanted})
            except OperationFailure as error:
                if error.code != _UNAUTHORIZED:
                    raise
                # Those who may not list collections may still see which of their own exist.
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
                    # An insert just after a drop made it anew. Only if it holds nothing but signals is it ours to mend.
                    if (yield self._events.find_one({"topic": {"$exists": False}})) is not None:
                        raise BusError(
                            f"the collection {self} exists, is not capped, and holds other things"
                        )
                    yield command({"convertToCapped": self._collection, "size": self._size})
                self._looked = monotonic()
                return
            except OperationFailure as error:
                if error.code == _UNAUTHORIZED:
                    raise BusError(
                        f"not permitted to make the capped collection {self}; an administrator can, by "
                        f'db.getSiblingDB("{self._database.name}").createCollection("{self._collection}", '
                        f"{{capped: true, size: {self._size}}})"
                    ) from None
                if error.code != _EXISTS:
                    raise

    def _open(self) -> Steps[Any]:
        """Open a cursor, and read on to its place: the marker inserted just before."""
        marker = self._document(NUDGE, None)
        with pymongo.timeout(TIMEOUT):
            yield from self._ensure()
            yield self._events.insert_one(marker)
            stored = yield self._events.find_one({"_id": marker["_id"]})
            since = Timestamp(max(0, stored["at"].time - SLACK), 0) if stored else Timestamp(0, 0)
            cursor = self._events.find(
                {"at": {"$gte": since}}, cursor_type=CursorType.TAILABLE_AWAIT
            )
            cursor = cursor.max_await_time_ms(1000)
            while True:
                event = yield from self._next(cursor)
                if event is None or event["_id"] == marker["_id"]:
                    return cursor

    def _next(self, cursor: Any) -> Steps[dict[str, Any] | None]:
        try:
            return (yield cursor.next())  # type: ignore[no-any-return]
        except (StopIteration, StopAsyncIteration):
            if not cursor.alive:
                raise ConnectionError(
                    "the cursor died: ring overrun, or collection dropped"
                ) from None
            return None

    def start(self) -> Steps[None]:
        """Begin to hear."""
        self._cursor = yield from self._open()

    def change(self, add: list[str], drop: list[str]) -> Steps[None]:
        """Every topic comes anyway."""
        yield from ()

    def read(
        self, hear: Callable[[str, datetime | None], None], confirm: Callable[[str], None]
    ) -> Steps[None]:
        """Wait up to a second for one event."""
        event = yield from self._next(self._cursor)
        if event is not None:
            topic, when = event.get("topic"), event.get("when")
            if isinstance(topic, str) and (when is None or isinstance(when, datetime)):
                hear(topic, when)

    def stop(self) -> Steps[None]:
        """Close the cursor."""
        cursor, self._cursor = self._cursor, None
        if cursor is not None:
            yield cursor.close()

    def check(self) -> Steps[None]:
        """Make the collection, write to it and tail it, once."""
        cursor = yield from self._open()
        yield cursor.close()

    def close(self) -> Steps[None]:
        """Nothing here is ours to close: the database was given."""
        yield from ()

    def after_fork(self) -> None:
        """Leave the parent's cursor alone. PyMongo's clients themselves do not survive a fork: use a new one."""
        self._cursor = None


class CappedBus(BlockingFront):
    """Wakes listeners of every process that uses the same MongoDB database; it needs no other server.

    `database`: of PyMongo. `prefix`: names the collection, "<prefix>.signals". `size`: its bytes, when it is made here.
    `window`: seconds in which events of a topic are merged. Raises BusError for any other kind of database.
    """

    def __init__(
        self, database: Any, *, prefix: str = "pyqueue", size: int = 1 << 20, window: float = 0.05
    ) -> None:
        wire = CappedWire(database, prefix, size, asynchronous=False)
        name = f"CappedBus({wire})"
        super().__init__(name, ServedCore(name, wire, window, asynchronous=False))


class AsyncCappedBus(AsyncFront):
    """`CappedBus`, for asyncio: `database` is an AsyncDatabase of PyMongo or an AsyncIOMotorDatabase."""

    def __init__(
        self, database: Any, *, prefix: str = "pyqueue", size: int = 1 << 20, window: float = 0.05
    ) -> None:
        wire = CappedWire(database, prefix, size, asynchronous=True)
        name = f"AsyncCappedBus({wire})"
        super().__init__(name, ServedCore(name, wire, window, asynchronous=True))
