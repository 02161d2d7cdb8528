"""Expiring messages: from a given instant on, no consumer receives them for a first try.

A push with ``expires`` stores the instant in ``dies``. A claim renames this field to
``best_before``, and ends the message if it has expired; see ``ending``. A release of the first try
renames the field back. So ``dies`` shows that work on a message has not begun.

Messages that no consumer claims end in a pass over ``dies``. Each client that receives, and each
worker that ticks schedules, makes such a pass about once a minute. ``pyqueue doctor`` makes one,
too; see ``recovering``. If no process makes a pass, the server deletes the messages a day later.

The record of a queue shows that some of its messages expire, so that its users create the index. A
separate document shows the same for the namespace; without this document, no pass is made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from pyqueue import arguments
from pyqueue.backends import namespace
from pyqueue.backends.ending import Ending, end_free, recorded, tell_end
from pyqueue.backends.kind import IndexTerms, Kind
from pyqueue.backends.options import Options, QueueShape
from pyqueue.errors import ConfigurationError
from pyqueue.requests import Document, Find, Plan, ServerTime, Update

log = logging.getLogger("pyqueue")

#: The ``_id`` and the ``q`` of the document that shows that a namespace has expiring messages.
EXPIRING: Final = "~expiring"
#: The shared option that the record of a queue with expiring messages has.
EXPIRES: Final = "expires"
#: The index of messages whose first try has not begun, and how many seconds after their expiry the
#: server deletes them. Its filter has ``tries``, since releases without ``dies`` do not rename it.
_DIES: Final = "dies"
_KEPT_S: Final = 86_400
EXPIRY_INDEXES: Final[Mapping[str, IndexTerms]] = {
    _DIES: (
        [(_DIES, 1)],
        {
            "expireAfterSeconds": _KEPT_S,
            "partialFilterExpression": {_DIES: {"$exists": True}, "tries": 0},
        },
    ),
}
#: How many expired messages a pass reads at once.
PAGE_SIZE: Final = 100


def length(value: Any) -> float:
    """Check the ``expires`` of a message, and return it in seconds."""
    return arguments.duration("expires", value, positive=True)


def instant(now: datetime, when: datetime, expires_s: float) -> datetime:
    """Return the instant at which a message expires.

    Args:
        now: The instant of the push.
        when: The instant from which the message can be received.
        expires_s: The number of seconds after the push at which the message expires.

    Raises:
        ConfigurationError: The message would expire before it can be received.
    """
    dies = now + timedelta(milliseconds=math.ceil(expires_s * 1000))
    if dies <= when:
        raise ConfigurationError(
            f"expires: expected more than the {(when - now).total_seconds():g} s until the message "
            f"can be received, found {expires_s:g}; use a longer time, or a shorter delay"
        )
    return dies


def noted(queue: str, kind: Kind, options: Options) -> Plan[Options]:
    """Note that a queue has expiring messages, before the first of them enters.

    Returns:
        The options to pass when the record of the queue is created or checked.

    Raises:
        ConfigurationError: The queue is of another kind.
    """
    if not (yield from QueueShape(queue)).get(EXPIRES):
        yield from namespace.check_kind(queue, kind)
        note = {"$setOnInsert": {"q": EXPIRING}}
        yield from Update({"_id": EXPIRING}, note, upsert=True)
    return replace(options, shape={**options.shape, EXPIRES: True})


def end_expired() -> Plan[int]:
    """End expired messages that no consumer has claimed, in all queues, as a claim would.

    Returns:
        How many messages ended.
    """
    done, passed = 0, 0
    endings: dict[str, tuple[Kind, Ending] | None] = {}
    while True:
        now = yield from ServerTime()
        page = yield from Find(
            {_DIES: {"$lte": now}, "tries": 0},
            {"payload": 0},
            sort=((_DIES, 1),),
            limit=PAGE_SIZE,
            skip=passed,
            hint=_DIES,
        )
        for document in page:
            ended = yield from _end(document, endings, now)
            done += ended
            passed += not ended
        if len(page) < PAGE_SIZE:
            return done


def _end(
    document: Document, endings: dict[str, tuple[Kind, Ending] | None], now: datetime
) -> Plan[bool]:
    """End an expired message. Return False if the message is left alone.

    ``endings`` caches how the messages of each queue end, or None if this release cannot end them.
    """
    queue = document.get("q")
    if not isinstance(queue, str) or queue.startswith("~"):  # another program wrote it
        return False
    if queue not in endings:
        endings[queue] = yield from _ending(queue)
    if (how := endings[queue]) is None:
        return False
    kind, ending = how
    if not (yield from end_free(queue, kind, document, ending, now)):
        return False
    yield from tell_end(queue, document, ending.outcome, now)
    return True


def _ending(queue: str) -> Plan[tuple[Kind, Ending] | None]:
    """Return how the expired messages of a queue end, or None if this release cannot end them."""
    try:
        return (yield from recorded(queue, "expired"))
    except ConfigurationError as error:
        log.warning("queue %r: cannot end its expired messages: %s", queue, error)
        return None
