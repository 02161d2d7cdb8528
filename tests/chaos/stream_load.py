"""The part of the workload that appends to a stream and consumes it, by three groups.

In the ledger a call has the name of the stream, or "STREAM~GROUP".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pymongo.collection import Collection

from pyqueue import AsyncClient, Backoff, Client
from pyqueue.backends.streams.ranges import group_id

STREAM: Final = "clicks"
GROUPS: Final = tuple(f"{STREAM}~{group}" for group in ("audit", "billing", "retries"))
#: The group whose messages are rolled back one by one now and then.
ROLLED_BACK: Final = GROUPS[-1]


def endpoints(client: Client | AsyncClient, **options: Any) -> dict[str, Any]:
    """Return the stream and its consumer groups, by their names in the ledger."""
    stream: Any = client.stream(STREAM)
    found = {STREAM: stream}
    for name in GROUPS:
        group = name.partition("~")[2]
        found[name] = stream.consumer(group, max_tries=None, backoff=Backoff(base=0), **options)
    return found


def is_of_streams(name: str) -> bool:
    """Return whether a call in the ledger is about a stream or a group."""
    return name == STREAM or name in GROUPS


def contents_of(messages: Collection[dict[str, Any]]) -> dict[int, str]:
    """Return the contents of the stream, by position."""
    packs = messages.find({"q": f"~log:{STREAM}"}).sort("_id", 1)
    return {pack["s"] + place: each["p"] for pack in packs for place, each in enumerate(pack["b"])}


def behind(messages: Collection[dict[str, Any]]) -> int:
    """Return how many messages some group has before it or in progress, as far as this is known."""
    last = messages.find_one({"q": f"~log:{STREAM}"}, {"s": 1, "n": 1}, sort=[("_id", -1)])
    end = last["s"] + last["n"] if last else 0
    return sum(_left(messages, name, end) for name in GROUPS)


def _left(messages: Collection[dict[str, Any]], name: str, end: int) -> int:
    stream, _, group = name.partition("~")
    found: Mapping[str, Any] | None = messages.find_one({"_id": group_id(stream, group)})
    if found is None:
        return end
    return int(end - found["next"] + len(found["out"]) + len(found["back"]))
