"""Keys that stay taken after their messages have finished, for the time that a push asked for.

Such a message keeps its ``key`` until the instant ``free``. The unique index on keys keeps other
messages out, as it does for live messages. A push that meets a finished message after ``free``
renames the key of that message to ``last_key``, and tries again. Bulk writes, moves and outputs
with a key, and messages that come back with their keys, do the same. The record of a queue shows
whether it may have such messages. Only then does a plan look for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from pyqueue.backends import inserting
from pyqueue.backends.inserting import Entries, Written
from pyqueue.backends.options import Options, QueueShape
from pyqueue.errors import ConfigurationError
from pyqueue.facts import Keep
from pyqueue.requests import Document, Find, Plan, ServerTime, Update

#: The shared option that the record of a queue has once finished messages may keep their keys.
UNIQUE: Final = "unique"
_FREEING: Final = {"$rename": {"key": "last_key"}, "$unset": {"free": ""}}


def check(keeps: Sequence[Keep | None], keys: Sequence[str | None]) -> None:
    """Refuse ``unique_for`` without a key.

    Raises:
        ConfigurationError: A message has ``unique_for``, but no key.
    """
    for keep, key in zip(keeps, keys, strict=True):
        if keep is not None and keep.unique is not None and key is None:
            raise ConfigurationError(
                "unique_for: requires a message key, but key is None; pass key=, a text that "
                "repeated pushes of the same message have in common"
            )


def noted(options: Options) -> Options:
    """Return options by which the record shows that finished messages may keep their keys."""
    return replace(options, shape={**options.shape, UNIQUE: True})


def is_used(queue: str) -> Plan[bool]:
    """Return whether finished messages of a queue may keep keys, as far as this client knows."""
    return bool((yield from QueueShape(queue)).get(UNIQUE))


def write(entries: Entries) -> Plan[Written]:
    """Write documents. Release keys that finished messages have kept long enough, and retry."""
    written = yield from inserting.write(entries)
    if not written.key_taken or not (yield from is_used(entries.queue)):
        return written
    documents, encoded = entries.documents, entries.encoded
    taken = {documents[at].get("key"): at for at in written.key_taken}
    freed = yield from _free(entries.queue, list(taken), entries.session)
    if places := [taken[key] for key in freed]:
        rest = entries._replace(
            documents=[documents[place] for place in places],
            encoded=[encoded[place] for place in places],
        )
        _merge(written, places, (yield from inserting.write(rest)))
    return written


def _merge(written: Written, places: Sequence[int], again: Written) -> None:
    """Add to ``written`` the outcome of writing the documents at these places again."""
    for index, place in enumerate(places):
        written.ids[place] = again.ids[index]
        if index not in again.key_taken:
            written.key_taken.remove(place)
    written.known += [places[index] for index in again.known]
    written.foreign += again.foreign


def keeps_out(queue: str, document: Document, session: object = None) -> Plan[bool]:
    """Return whether a finished message keeps a document's key. Release it if its time is over."""
    if "key" not in document:
        return False
    now = yield from ServerTime()
    match = {"q": queue, "key": document["key"], "processed": {"$exists": True}}
    for end in (yield from Find(match, {"free": 1}, limit=1, session=session)):
        free = end.get("free")
        if isinstance(free, datetime) and free > now:
            return True
        yield from Update({**match, "_id": end["_id"]}, _FREEING, session=session)
    return False


def release(queue: str, keys: Sequence[str], session: object = None) -> Plan[bool]:
    """Release keys that finished messages have kept long enough. Return whether there were any."""
    if not keys or not (yield from is_used(queue)):
        return False
    return bool((yield from _free(queue, keys, session)))


def _free(queue: str, keys: Sequence[str | None], session: object) -> Plan[list[str]]:
    """Release the keys of finished messages that have kept them long enough. Return these keys."""
    now = yield from ServerTime()
    over = {"q": queue, "key": {"$in": keys, "$exists": True}, "free": {"$lte": now}}
    found = yield from Find(over, {"key": 1}, session=session)
    if found:
        ids = [each["_id"] for each in found]
        yield from Update({**over, "_id": {"$in": ids}}, _FREEING, many=True, session=session)
    return [each["key"] for each in found]


def would_abort(queue: str, document: Document, session: object) -> Plan[bool]:
    """Return whether a finished message keeps the key, so that a replace would abort a transaction.

    If the retention period of the key has passed, the key is released, and the replace can go on.
    """
    return (yield from is_used(queue)) and (yield from keeps_out(queue, document, session))
