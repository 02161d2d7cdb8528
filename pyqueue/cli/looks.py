"""Two looks that only people need. Plans: they read, and do no I/O of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pyqueue.backends.namespace import record_id
from pyqueue.messages import Id
from pyqueue.requests import Find, Now, Plan

__all__ = ["anywhere", "options_of"]


def options_of(queue: str) -> Plan[Mapping[str, Any]]:
    """The options that were last used with a queue; none if it has no record."""
    found = yield Find({"_id": record_id(queue)}, {"options": 1}, limit=1)
    options = found[0].get("options") if found else None
    return options if isinstance(options, Mapping) else {}


def anywhere(ids: Sequence[Id]) -> Plan[tuple[datetime, list[Mapping[str, Any]]]]:
    """The instant, and the messages with one of these ids, whatever queue they are in."""
    now = yield Now()
    return now, (yield Find({"_id": {"$in": list(ids)}}))
