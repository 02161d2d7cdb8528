"""The audit: who did what, in ``<namespace>.audit``. An entry is written before each action."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from bson import ObjectId

from pyqueue.aside import aside
from pyqueue.async_client import AsyncClient
from pyqueue.errors import NotPermitted, QueueError
from pyqueue.requests import Document, Filter, Find, Plan
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry.storing import write

log = logging.getLogger("pyqueue")

#: The suffix of the collection, and how long an entry is kept.
AUDIT: Final = "audit"
_KEPT: Final = timedelta(days=90)
#: How many entries a page shows.
_SHOWN: Final = 200


class Audit:
    """The audit of a namespace."""

    def __init__(self, client: AsyncClient) -> None:
        self._run = runner_of(client).run
        self._prepared: set[str] = set()

    async def begin(self, who: str, action: str, queue: str, details: Mapping[str, Any]) -> str:
        """Write an entry, and return its id.

        Args:
            who: The name of the person.
            action: The name of the action.
            queue: The queue or the stream; for a schedule, its queue.
            details: The fields of the form that say what to change.
        """
        id, now = ObjectId(), datetime.now(UTC)
        entry = {"who": who, "at": now, "action": action, "queue": queue, "details": dict(details)}
        await self._store(id, {**entry, "expires": now + _KEPT})
        return str(id)

    async def end(self, id: str, result: str) -> None:
        """Add the result of an action to its entry. Only log a failure: the action is done."""
        try:
            await self._store(ObjectId(id), {"result": result[:500]})
        except QueueError as error:
            log.warning("the result of an action is missing in the audit: %s", error)

    async def _store(self, id: ObjectId, fields: Mapping[str, Any]) -> None:
        await self._run(write(self._prepared, {AUDIT: [({"_id": id}, {"$set": dict(fields)})]}))

    async def last(self) -> list[Document]:
        """Return the last entries, newest first, or none if the database user may not read them."""
        return await self._run(_entries({}))

    async def entry(self, id: str) -> Document | None:
        """Return the entry with this id, or None if there is none."""
        if not ObjectId.is_valid(id):
            return None
        return next(iter(await self._run(_entries({"_id": ObjectId(id)}))), None)


def _entries(match: Filter) -> Plan[list[Document]]:
    try:
        return (yield from aside(AUDIT, Find(match, sort=(("_id", -1),), limit=_SHOWN)))
    except NotPermitted:
        return []
