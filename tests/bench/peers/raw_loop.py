"""The loop that a user of raw pymongo would write, and with MORE "sketch" the upper bound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from bson import ObjectId
from pymongo import AsyncMongoClient, ReturnDocument, WriteConcern

from tests.bench.peers.program import Handle, Open, looping, serve
from tests.bench.sketch import HOT, ORDER, Sketch, new_document

#: Neither of them is woken, so they look again after this pause.
POLL_S = 0.005
LEASE = timedelta(seconds=60)


async def nothing() -> list[Any]:
    await asyncio.sleep(POLL_S)
    return []


class Raw:
    def __init__(self, collection: Any, name: str) -> None:
        self._collection = collection
        self._name = name

    async def push(self, body: dict[str, Any]) -> None:
        await self._collection.insert_one(new_document(self._name, body))

    async def push_many(self, bodies: Sequence[dict[str, Any]]) -> None:
        documents = [new_document(self._name, body) for body in bodies]
        await self._collection.insert_many(documents, ordered=False)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        if batch > 1:
            return Bound(self._collection, self._name).consume(callers, batch, handle)

        async def receive() -> Any:
            now = datetime.now(UTC)
            lease = {"$set": {"when": now + LEASE, "token": ObjectId()}, "$inc": {"tries": 1}}
            eligible = {"q": self._name, "when": {"$lte": now}}
            found = await self._collection.find_one_and_update(
                eligible, lease, sort=ORDER, return_document=ReturnDocument.AFTER
            )
            return found or await nothing()

        async def work(held: dict[str, Any]) -> None:
            await handle(held["payload"])
            await self._collection.delete_one({"_id": held["_id"], "token": held["token"]})

        return looping(callers, receive, work)

    async def delete(self) -> None:
        await self._collection.delete_many({"q": self._name})


class Bound(Raw):
    """The sketch: the same commands for many callers."""

    def __init__(self, collection: Any, name: str) -> None:
        super().__init__(collection, name)
        self._sketch = Sketch(collection, name)

    async def push(self, body: dict[str, Any]) -> None:
        await self._sketch.push(body)

    def consume(
        self, callers: int, batch: int, handle: Handle
    ) -> AbstractAsyncContextManager[None]:
        sketch = self._sketch

        async def one() -> Any:
            return await sketch.reserve() or await nothing()

        async def many() -> Any:
            return await sketch.reserve_many(batch) or await nothing()

        async def work(held: dict[str, Any]) -> None:
            await handle(held["payload"])
            await sketch.commit(held)

        async def work_on_many(held: list[dict[str, Any]]) -> None:
            for each in held:
                await handle(each["payload"])
            await sketch.commit_many(held)

        return looping(callers, many, work_on_many) if batch > 1 else looping(callers, one, work)


@asynccontextmanager
async def peer(url: str, form: str = "raw") -> AsyncIterator[Open]:
    async with AsyncMongoClient[dict[str, Any]](url, tz_aware=True) as mongo:
        sure = WriteConcern("majority", j=True)
        collection = mongo.get_default_database().get_collection(form, write_concern=sure)
        await collection.create_index(HOT)

        async def opened(name: str) -> Raw:
            return (Bound if form == "sketch" else Raw)(collection, name)

        yield opened


if __name__ == "__main__":
    serve(peer)
