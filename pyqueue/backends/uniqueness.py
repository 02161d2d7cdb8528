"""Keys that stay taken after their messages have finished, for the time that a push asked for.

The end of such a message keeps its ``key``, until ``free``. The unique index on keys keeps other
messages out, as it does for live messages. A push that meets an end after ``free`` renames its key
to ``last_key``, and tries again. Only pushes to queues whose record shows such messages look for
ends.
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

#: The shared option that the record of a queue has once an end may keep its key there.
UNIQUE: Final = "unique"
_FREEING: Final = {"$rename": {"key": "last_key"}, "$unset": {"free": ""}}


def check(keeps: Sequence[Keep | None], keys: Sequence[str | None]) -> None:
    """Refuse a time without a key.

    Raises:
        ConfigurationError: a message has a time, and no key.
    """
    for keep, key in zip(keeps, keys, strict=True):
        if keep is not None and keep.unique is not None and key is None:
            raise ConfigurationError(
                "unique_for: expected a key beside it, found None; pass key=, the name of what "
                "must not be pushed again"
            )


def noted(options: Options) -> Options:
    """Return the options by which the record shows that ends may keep their keys."""
    return replace(options, shape={**options.shape, UNIQUE: True})


def is_used(queue: str) -> Plan[bool]:
    """Return whether ends may keep their keys in a queue, as far as this client knows."""
    return bool((yield from QueueShape(queue)).get(UNIQUE))


def write(entries: Entries) -> Plan[Written]:
    """Write the documents that the unique indexes accept, once ends have freed their keys."""
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
    """Add the outcome of writing the documents at some places again."""
    for index, place in enumerate(places):
        written.ids[place] = again.ids[index]
        if index not in again.key_taken:
            written.key_taken.remove(place)
    written.known += [places[index] for index in again.known]
    written.foreign += again.foreign


def keeps_out(queue: str, document: Document, session: object = None) -> Plan[bool]:
    """Return whether an end keeps the key of a document. If its time is over, free the key."""
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


def _free(queue: str, keys: Sequence[str | None], session: object) -> Plan[list[str]]:
    """Free the keys of ends whose time is over. Return these keys."""
    now = yield from ServerTime()
    over = {"q": queue, "key": {"$in": keys, "$exists": True}, "free": {"$lte": now}}
    found = yield from Find(over, {"key": 1}, session=session)
    if found:
        ids = [each["_id"] for each in found]
        yield from Update({**over, "_id": {"$in": ids}}, _FREEING, many=True, session=session)
    return [each["key"] for each in found]


def would_abort(queue: str, document: Document, session: object) -> Plan[bool]:
    """Return whether a replace in a transaction meets an end: a duplicate key would abort it.

    If the time of the end is over, its key is freed, and the replace can go on.
    """
    return (yield from is_used(queue)) and (yield from keeps_out(queue, document, session))
