"""The bound: joined calls of many tasks, without the rest of pyqueue.

It sends the commands that pyqueue sends: fenced claims that are read by token, at w:1, and commits
by id and token. It has no cancellation, no signals, no validation, no retries and no history, and
one index instead of four, so pyqueue cannot be faster. ``by_hand`` is the same client on the
documents and indexes of pyqueue. ``test_pinned`` notices changes of both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

from bson import ObjectId
from pymongo import WriteConcern

T = TypeVar("T")
R = TypeVar("R")

#: The most messages of one push or settle, and of one claim.
MAX_BATCH = 256
MAX_CLAIM = 100
LEASE = timedelta(seconds=60)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HOT = [("q", 1), ("when", 1), ("_id", 1)]
ORDER = [("when", 1), ("_id", 1)]

Document = dict[str, Any]


def new_document(queue: str, payload: Any) -> Document:
    """Return a message as pyqueue stores it."""
    now = datetime.now(UTC)
    document = {"q": queue, "when": now, "due": now, "payload": payload, "tries": 0, "pushed": now}
    return {"_id": ObjectId(), **document}


def claim_update(now: datetime) -> Document:
    """Return the update of a claim, with a new token."""
    changed = {"when": now + LEASE, "token": ObjectId(), "owner": "bound", "reserved": now}
    return {"$set": changed, "$inc": {"tries": 1}}


def claimed_filter(ids: Sequence[Any], update: Document) -> Document:
    """Return a filter for the documents that this update claimed."""
    return {"_id": {"$in": ids}, "token": update["$set"]["token"]}


def held_filter(claimed: Sequence[Document]) -> Document:
    """Return a filter for claimed documents that are still held: one group for each token."""
    groups: dict[Any, list[Any]] = {}
    for each in claimed:
        groups.setdefault(each["token"], []).append(each["_id"])
    pairs = [{"_id": {"$in": ids}, "token": token} for token, ids in groups.items()]
    return pairs[0] if len(pairs) == 1 else {"$or": pairs}


def in_order(documents: Sequence[Document], ids: Sequence[Any]) -> list[Document]:
    by_id = {document["_id"]: document for document in documents}
    return [by_id[each] for each in ids if each in by_id]


class Joiner(Generic[T, R]):
    """Runs calls together: those that come while a batch runs are the next batch.

    Args:
        run: Processes the items of a batch and returns their results.
        in_flight: How many batches run at a time.
        limit: The most calls of a batch.
    """

    def __init__(
        self, run: Callable[[list[T]], Awaitable[Sequence[R]]], in_flight: int, limit: int
    ) -> None:
        self._run = run
        self._free = in_flight
        self._limit = limit
        self._calls: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, item: T) -> R:
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._calls.append((item, future))
        if self._free:
            self._free -= 1
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _work(self) -> None:
        try:
            while self._calls:
                count = min(len(self._calls), self._limit)
                batch = [self._calls.popleft() for _ in range(count)]
                try:
                    results = await self._run([item for item, _ in batch])
                except Exception as error:
                    for _, future in batch:
                        future.set_exception(error)
                else:
                    for (_, future), result in zip(batch, results, strict=True):
                        future.set_result(result)
        finally:
            self._free += 1


class Sketch:
    """One queue of an async process.

    Args:
        collection: A collection of AsyncMongoClient, with the write concern of pushes and commits.
        queue: The name of the queue.
    """

    #: The most messages of one claim.
    claim_size = MAX_CLAIM

    def __init__(self, collection: Any, queue: str) -> None:
        self._queue = queue
        self._sure = collection
        self._quick = collection.with_options(write_concern=WriteConcern(1))
        #: Where the next claim begins, so that it does not walk over deleted index entries.
        self._start = EPOCH
        self.push = Joiner[Any, Any](self.push_many, 2, MAX_BATCH)
        self._claims = Joiner[None, Document | None](self._claim_for, 1, self.claim_size)
        self.commit = Joiner[Document, None](self.commit_many, 2, MAX_BATCH)

    @staticmethod
    def claiming(now: datetime) -> Document:
        """Return the update of a claim, with a new token."""
        return claim_update(now)

    async def push_many(self, payloads: Sequence[Any]) -> list[Any]:
        documents = [new_document(self._queue, payload) for payload in payloads]
        await self._sure.insert_many(documents, ordered=False)
        return [document["_id"] for document in documents]

    async def take(self) -> int | None:
        """Reserve a message and commit it. Return its number, or None if there is none."""
        document = await self.reserve()
        if document is None:
            return None
        await self.commit(document)
        return int(document["payload"]["n"])

    async def reserve(self) -> Document | None:
        """Return a claimed document, or None if there is none."""
        return await self._claims(None)

    async def _claim_for(self, callers: list[None]) -> list[Document | None]:
        claimed = await self.reserve_many(len(callers))
        return [*claimed, *[None] * (len(callers) - len(claimed))]

    async def reserve_many(self, limit: int) -> list[Document]:
        now = datetime.now(UTC)
        eligible = {"q": self._queue, "when": {"$gte": self._start, "$lte": now}}
        update = self.claiming(now)
        if limit == 1:
            found = await self._quick.find_one_and_update(
                eligible, update, sort=ORDER, return_document=True
            )
            return [] if found is None else [found]
        first = self._quick.find(eligible, {"when": 1}, sort=ORDER, limit=limit)
        candidates = await first.to_list()
        if not candidates:
            self._start = EPOCH
            return []
        ids = [document["_id"] for document in candidates]
        again = {"_id": {"$in": ids}, "q": self._queue, "when": {"$lte": now}}
        await self._quick.update_many(again, update)
        claimed = await self._quick.find(claimed_filter(ids, update)).to_list()
        self._start = candidates[-1]["when"]
        return in_order(claimed, ids)

    async def commit_many(self, claimed: Sequence[Document]) -> list[None]:
        done = await self._sure.delete_many(held_filter(claimed))
        if done.deleted_count != len(claimed):
            raise RuntimeError("a lease was lost")
        return [None] * len(claimed)


class BlockingSketch:
    """The commands of batches on a blocking collection."""

    def __init__(self, collection: Any, queue: str) -> None:
        self._queue = queue
        self._sure = collection
        self._quick = collection.with_options(write_concern=WriteConcern(1))
        self._start = EPOCH

    def push_many(self, payloads: Sequence[Any]) -> None:
        self._sure.insert_many(
            [new_document(self._queue, each) for each in payloads], ordered=False
        )

    def reserve_many(self, limit: int) -> list[Document]:
        now = datetime.now(UTC)
        eligible = {"q": self._queue, "when": {"$gte": self._start, "$lte": now}}
        candidates = list(self._quick.find(eligible, {"when": 1}, sort=ORDER, limit=limit))
        if not candidates:
            return []
        ids = [document["_id"] for document in candidates]
        again = {"_id": {"$in": ids}, "q": self._queue, "when": {"$lte": now}}
        update = claim_update(now)
        self._quick.update_many(again, update)
        self._start = candidates[-1]["when"]
        return in_order(list(self._quick.find(claimed_filter(ids, update))), ids)

    def commit_many(self, claimed: Sequence[Document]) -> None:
        done = self._sure.delete_many(held_filter(claimed))
        if done.deleted_count != len(claimed):
            raise RuntimeError("a lease was lost")
