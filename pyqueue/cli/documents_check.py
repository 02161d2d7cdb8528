"""The checks of ``pyqueue doctor`` on documents: whether consumers can find them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bson import MaxKey, MinKey
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.datetime_ms import DatetimeMS

from pyqueue import Client
from pyqueue.backends.namespace import HOT
from pyqueue.cli.streams_check import first_ids
from pyqueue.clock import BARE_BAND

MIN_KEY, MAX_KEY = MinKey(), MaxKey()
MAX_HIDDEN_PER_RANGE = 10
#: The parts of a queue's range in the index that no receive reads: values that are not dates, and
#: dates after the live messages and before the finished messages, which lie 7000 years ahead, or
#: 7500 years if they are kept for their message keys only.
HIDDEN_RANGES: list[tuple[Any, Any]] = [
    (MIN_KEY, DatetimeMS(-(1 << 63))),
    (datetime(8000, 1, 1, tzinfo=UTC), datetime(9020, 1, 1, tzinfo=UTC)),
    (BARE_BAND, datetime(9520, 1, 1, tzinfo=UTC)),
    (datetime(9700, 1, 1, tzinfo=UTC), MAX_KEY),
]


def hidden_documents(client: Client) -> list[str]:
    """Return a text for each queue with documents that no consumer finds, with their first ids.

    Reading the index is enough, so the cost does not grow with the number of messages.
    """
    options = CodecOptions[dict[str, Any]](datetime_conversion=DatetimeConversion.DATETIME_AUTO)
    collection = client.database[client.namespace].with_options(codec_options=options)

    def ids_between(*ends: tuple[Any, Any]) -> list[Any]:
        least, most = (
            [("q", q), ("when", when), ("_id", MAX_KEY if when == MAX_KEY else MIN_KEY)]
            for q, when in ends
        )
        not_a_record = {"_id": {"$not": {"$regex": "^~"}}}
        found = collection.find(not_a_record, {"_id": 1}, limit=MAX_HIDDEN_PER_RANGE, hint=HOT)
        return [each["_id"] for each in found.min(least).max(most)]

    names = [name for name in collection.distinct("q") if isinstance(name, str)]
    hidden = {
        f"queue {name!r}": [
            id for first, last in HIDDEN_RANGES for id in ids_between((name, first), (name, last))
        ]
        for name in names
    }
    hidden["no queue"] = [
        *ids_between((MIN_KEY, MIN_KEY), ("", MIN_KEY)),
        *ids_between(({}, MIN_KEY), (MAX_KEY, MAX_KEY)),
    ]
    return [f"of {where}: {first_ids(ids)}" for where, ids in hidden.items() if ids]
