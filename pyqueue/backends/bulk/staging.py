"""Bulk writes from many processes: append messages, or stage them and publish them all at once.

A staged message is a document whose ``q`` is not the name of a queue, so no consumer sees it. If
its writer dies, the TTL index deletes it. A *place* is a named part of the staged messages. If a
write is for several queues, the name of a place contains the name of its queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from bson.raw_bson import RawBSONDocument

from pyqueue.backends import namespace, uniqueness
from pyqueue.backends.applying import MAX_BATCH
from pyqueue.backends.bulk.row_documents import documents_of, hidden_rows, without_packed
from pyqueue.backends.contents import SharedRows, contents_of, count
from pyqueue.backends.inserting import (
    Entries,
    id_taken,
    ids_of_this_queue,
    key_taken,
    raise_foreign_ids,
)
from pyqueue.backends.namespace import HOT
from pyqueue.backends.options import NewMessage, Target
from pyqueue.backends.pushing import enter, enter_by_id, replace
from pyqueue.documents import group_of, priority_of
from pyqueue.errors import DuplicateKey, QueueError, Unavailable, first_ten
from pyqueue.messages import HIGHEST_PRIORITY, Id
from pyqueue.requests import (
    CountEach,
    Delete,
    Filter,
    Find,
    Insert,
    Plan,
    ServerTime,
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

#: For how long staged messages can still be published.
STAGED_LIFETIME: Final = timedelta(days=7)
#: How many times rows are inserted while other messages with their ids come and go.
_TRIES: Final = 20
#: The argument of $unset that removes the fields that only hidden rows have.
_HIDDEN: Final = {"staged": "", "attempt": "", "processed": "", "expires": ""}
#: Precedes the queue in the name of a place whose rows are for the dead-letter queue.
_DEAD: Final = "!"


def place_of(part: str, queue: str | None, *, dead: bool = False) -> str:
    """Return the name of a place.

    Args:
        part: The name of the place within its queue. It contains no "@".
        queue: The queue that its rows are for, or None if the write has only one queue.
        dead: Whether its rows go to the dead-letter queue, because their queue cannot store them.
    """
    return part if queue is None else f"{part}@{_DEAD if dead else ''}{queue}"


def target_of(first: Target, place: str) -> Plan[Target]:
    """Return the queue that a place names, or the first queue if the place names none.

    Raises:
        ConfigurationError: The queue is of another kind than the first queue, and the place is not
            for dead letters.
    """
    _, named, queue = place.partition("@")
    if queue.startswith(_DEAD):
        name = queue.removeprefix(_DEAD)
        return (yield from namespace.dead_letter_target(first.queue, first.kind, name))
    if not named or queue == first.queue:
        return first
    yield from namespace.ensure(queue, first.kind, None)
    return first._replace(queue=queue, options=None)


def append(
    target: Target,
    messages: Iterable[NewMessage],
    on_duplicate: str = "ignore",
    *,
    by_id: bool = False,
    session: object = None,
) -> Plan[int]:
    """Write messages to a queue.

    A message whose id is already in the queue counts as written, unless ``by_id`` is true.

    Args:
        target: The queue to write to.
        messages: The messages to write.
        on_duplicate: The action if a key is taken, as for ``Queue.push_many``.
        by_id: Whether ``on_duplicate`` applies to ids, too. Then each message must have an id, and
            ``session`` must be None.
        session: The session of the caller's transaction, or None.

    Returns:
        How many of the messages are stored.

    Raises:
        DuplicateKey: An id belongs to a message that was never in this queue. Or ``on_duplicate``
            is "error", and a key is taken, or an id if ``by_id`` is true.
    """
    now = yield from ServerTime()
    rest, known = yield from without_packed(target, messages, on_duplicate if by_id else "ignore")
    shared = yield from contents_of(target.kind).share(target, rest, now, {})
    documents, encoded, given = documents_of(target, shared.rest, now)
    known += yield from _append_shared(target, shared, now, session)
    if not documents:
        return known
    levels = {document.get("priority") for document in documents}
    yield from namespace.ensure(target.queue, target.kind, target.options, levels)
    kind, entries = target.kind, Entries(target.queue, documents, encoded, given, session)
    if by_id and on_duplicate != "ignore":
        replacing = on_duplicate == "replace"
        ids = yield from enter_by_id(kind, entries, replacing=replacing)
    else:
        ids = yield from enter(kind, entries, on_duplicate)
    return known + sum(id is not None for id in ids)


def _append_shared(target: Target, shared: SharedRows, now: datetime, session: object) -> Plan[int]:
    """Write the documents that contain several rows each. Return the total number of rows."""
    if shared.documents:
        for failure in (yield from Insert(shared.documents, session=session)):
            raise failure.error
        yield from Signal(target.queue, now, session)
    return shared.number


def free_again(queue: str, refused: list[RawBSONDocument]) -> Plan[list[RawBSONDocument]]:
    """Return the refused rows whose ids are free again, because the other messages are gone.

    Raises:
        DuplicateKey: An id belongs to a message that was never in this queue.
    """
    ids: list[Id] = [each["_id"] for each in refused]
    stored = yield from ids_of_this_queue(queue, ids)
    raise_foreign_ids(queue, [id for id in ids if stored.get(id) is False])
    return [each for each in refused if each["_id"] not in stored]


def insert_until_known(
    queue: str,
    rows: list[RawBSONDocument],
    judge: Callable[[list[RawBSONDocument]], Plan[list[RawBSONDocument]]],
) -> Plan[int]:
    """Insert hidden rows for a queue. Return how many were written.

    A row is left out if another row of the same place has the same key, as in a push.

    Args:
        queue: The queue that the rows are for.
        rows: The documents of the rows.
        judge: Called with the rows whose ids are taken. It may free ids, and returns the rows to
            insert again.

    Raises:
        Unavailable: Other programs repeatedly take and free some of the ids.
    """
    written = 0
    for _ in range(_TRIES):
        failures = (yield from Insert(rows)) if rows else []
        for failure in failures:
            if failure.field is None:
                raise failure.error
        written += len(rows) - len(failures)
        refused = [rows[failure.place] for failure in failures if failure.field == "_id"]
        rows = (yield from judge(refused)) if refused else []
        if not rows:
            return written
    ids: list[Id] = [each["_id"] for each in rows]
    text = f"queue {queue!r}: other programs keep writing and finishing messages {first_ten(ids)}"
    raise Unavailable(f"{text}; try again", ids=ids)


def publish_rows(target: Target, hidden: str, now: datetime) -> Plan[int]:
    """Publish the messages whose ``q`` is ``hidden``. Return how many were published.

    A message stays hidden if its key is taken. A message scheduled for later keeps its time.
    """
    put = target.kind.entering(target.queue, now)
    if "priority" in target.kind.capabilities:
        every = range(HIGHEST_PRIORITY + 1)  # claims scan only the listed priorities
        counts = yield from CountEach([{"q": hidden, "priority": each} for each in every], 1)
        in_use = [each for each in every if counts[each]]
        yield from namespace.ensure(target.queue, target.kind, None, in_use)
        del put["priority"]  # each row has its own
    at_least: dict[str, Any] = {name: put.pop(name) for name in ("when", "due") if name in put}
    entering: UpdateDocument = {"$set": put, "$max": at_least, "$unset": _HIDDEN}
    here: dict[str, object] = {"q": hidden}
    # The updates count documents, and some documents contain several messages.
    done = yield from contents_of(target.kind).surplus(here)
    without_key = here | {"key": {"$exists": False}}
    done += (yield from Update(without_key, entering, many=True)).matched
    return done + (yield from _publish_keyed(target, here, entering))


def _publish_keyed(target: Target, here: Filter, entering: UpdateDocument) -> Plan[int]:
    """Publish hidden rows with keys one by one, because any key may be taken. Return how many.

    Args:
        target: The queue that the rows enter.
        here: The filter that matches the rows.
        entering: The update that publishes a row.
    """
    keyed = yield from Find({**here, "key": {"$exists": True}}, {"key": 1}, hint=HOT)
    done = 0
    for start in range(0, len(keyed), MAX_BATCH):
        some = keyed[start : start + MAX_BATCH]
        pairs: list[tuple[Filter, UpdateDocument]] = [
            ({"_id": each["_id"], **here}, entering) for each in some
        ]
        for again in (True, False):
            matched, failures = yield from UpdateEach(pairs)
            done += matched
            for failure in failures:
                if not isinstance(failure.error, DuplicateKey):
                    raise failure.error  # such a row must not count as left out, and be deleted
            taken = [some[failure.place]["key"] for failure in failures]
            if not (again and taken):
                break
            # The record shows whether finished messages may keep their keys.
            yield from namespace.ensure(target.queue, target.kind, None)
            if not (yield from uniqueness.release(target.queue, taken)):
                break
    return done


def _replace_live(target: Target, hidden: str, now: datetime) -> Plan[int]:
    """Publish hidden rows by overwriting the messages that have their keys. Return how many.

    ``hidden``: the ``q`` of the rows. All rows that still have this ``q`` have a key that is taken.
    """
    rows = yield from Find({"q": hidden}, hint=HOT)
    for row in rows:
        document = {name: value for name, value in row.items() if name not in _HIDDEN}
        entering = target.kind.entering
        when = max(now, row["when"])
        document |= entering(target.queue, when, priority_of(row), group_of(row))
        # Delete the row first, because if the other message has just finished, the row enters with
        # its own id. A crash in between loses the row, but the write then fails and is repeated.
        yield from Delete({"_id": row["_id"], "q": hidden})
        foreign: list[Id] = []
        yield from replace(target.kind, Entries(target.queue, [document], ()), foreign)
        raise_foreign_ids(target.queue, foreign)
    return len(rows)


def _one_for_each_key(messages: Iterable[NewMessage], on_duplicate: str) -> list[NewMessage]:
    """Return the messages, but only the last of those that share a key.

    Raises:
        DuplicateKey: Several messages have the same key, and ``on_duplicate`` is "error".
    """
    given = list(messages)
    keys = [each.key for each in given if each.key is not None]
    repeated = list(Counter(keys) - Counter(set(keys)))
    if repeated and on_duplicate == "error":
        text = f"key: the keys {first_ten(repeated)} occur in more than one row; use each key once"
        raise DuplicateKey(text, keys=repeated)
    last = {each.key: place for place, each in enumerate(given)}
    return [each for place, each in enumerate(given) if each.key is None or last[each.key] == place]


class Staging:
    """The operations of a job that writes messages in many processes, and publishes all or none.

    Objects of this class can be pickled.

    Args:
        target: The queue for places whose names contain no queue.
        job: A name that no other job has.
        on_duplicate: The action if a key is taken, as for ``Queue.push_many``. "error" applies to
            ids, too: if a key or id is taken before publishing begins, nothing is published.
    """

    __slots__ = ("_on_duplicate", "_prefix", "target")

    def __init__(self, target: Target, job: str, on_duplicate: str = "ignore") -> None:
        self.target = target
        self._on_duplicate = on_duplicate
        #: The beginning of the ``q`` of its rows. No name of a queue begins like this.
        self._prefix = f"~staged:{target.queue}:{job}:"

    def write(self, place: str, messages: Iterable[NewMessage]) -> Plan[int]:
        """Write messages where no consumer sees them.

        Rows that another attempt staged with the same ids are replaced. A message whose id is
        already in the queue counts as written, unless ``on_duplicate`` is "error".

        Args:
            place: The name of a place that only this attempt uses.
            messages: The messages to write.

        Returns:
            How many were written.

        Raises:
            DuplicateKey: An id belongs to a message that was never in this queue. Or
                ``on_duplicate`` is "error", and an id is taken or several messages share a key.
        """
        now = yield from ServerTime()
        target = yield from target_of(self.target, place)
        messages, on_duplicate = list(messages), self._on_duplicate
        if any(each.fault for each in messages):
            on_duplicate = "ignore"  # a dead letter that exists already is the same row
        if on_duplicate != "ignore":
            messages = _one_for_each_key(messages, on_duplicate)
        hidden = {
            "q": self._prefix + place,
            "staged": True,
            "processed": now,
            "expires": now + STAGED_LIFETIME,
        }
        # Some documents contain several messages: in total, ``surplus`` more than documents.
        rows, surplus = yield from hidden_rows(target, messages, hidden, on_duplicate)

        def judge(refused: list[RawBSONDocument]) -> Plan[list[RawBSONDocument]]:
            ids = [each["_id"] for each in refused]
            # Another attempt may have staged rows with these ids.
            if (yield from Delete({"_id": {"$in": ids}, "staged": True}, many=True)):
                return refused
            free = yield from free_again(target.queue, refused)
            if len(free) < len(refused) and on_duplicate == "error":
                known = set(ids) - {each["_id"] for each in free}
                raise id_taken(target.queue, list(known))
            return free

        return surplus + (yield from insert_until_known(target.queue, rows, judge))

    def publish(self, places: Mapping[str, int]) -> Plan[int]:
        """Publish the written messages, and delete the rows of other attempts of this job.

        Args:
            places: The places to publish, and how many messages each must have.

        Returns:
            How many messages are published.

        Raises:
            QueueError: Messages are missing, and none is published. Or another job deleted some
                messages during publishing.
            DuplicateKey: A key is taken, and ``on_duplicate`` is "error".
        """
        target = self.target
        yield from namespace.ensure(target.queue, target.kind, target.options)
        for place, expected in places.items():
            to = yield from target_of(target, place)
            present = yield from count(to.kind, {"q": self._prefix + place}, HOT)
            if present != expected:
                raise QueueError(
                    f"queue {target.queue!r}: {expected} messages were staged at {place}, but "
                    f"{present} are there; nothing was published. Either several rows have the "
                    "same id, or another job wrote the same ids at the same time, or this job took "
                    "more than a week"
                )
        if self._on_duplicate == "error":
            yield from self._refuse_taken_keys(places)
        now = yield from ServerTime()
        done: Counter[str] = Counter()
        deleted = 0  # other writes may delete rows after the count above
        clashing: dict[str, list[str]] = {}
        for place, expected in places.items():
            to, hidden = (yield from target_of(target, place)), self._prefix + place
            published = yield from publish_rows(to, hidden, now)
            if published < expected and self._on_duplicate == "replace":
                published += yield from _replace_live(to, hidden, now)
            done[to.queue] += published
            if published < expected:
                left = yield from Find({"q": hidden}, {"key": 1}, hint=HOT)
                deleted += expected - published - len(left)
                if self._on_duplicate == "error":  # taken after the check
                    clashing.setdefault(to.queue, []).extend(row["key"] for row in left)
        yield from self.discard()
        for queue, number in done.items():
            if number:
                yield from Signal(queue, now)
        if deleted:
            raise QueueError(
                f"queue {target.queue!r}: {deleted} of {sum(places.values())} staged messages were "
                "deleted during publishing, because another job wrote the same ids at the same "
                "time; the other messages were published. To write the missing messages, run one "
                'of the two jobs again, with .option("onDuplicate", "ignore")'
            )
        for queue, keys in clashing.items():
            raise key_taken(queue, keys)
        return done.total()

    def _refuse_taken_keys(self, places: Iterable[str]) -> Plan[None]:
        """Raise DuplicateKey if the key of a row belongs to a message or to another row."""
        known: dict[str, set[str]] = {}
        for place in places:
            to = yield from target_of(self.target, place)
            with_key = {"q": self._prefix + place, "key": {"$exists": True}}
            keys = [row["key"] for row in (yield from Find(with_key, {"key": 1}, hint=HOT))]
            if not keys:
                continue
            yield from uniqueness.release(to.queue, keys)
            live = yield from Find({"q": to.queue, "key": {"$in": keys}}, {"key": 1})
            earlier = known.setdefault(to.queue, set())  # the keys in earlier places
            taken = [row["key"] for row in live] + sorted(earlier.intersection(keys))
            if taken:
                raise key_taken(to.queue, taken)
            earlier.update(keys)

    def discard(self) -> Plan[None]:
        """Delete all rows that this job has staged."""
        end = self._prefix[:-1] + ";"  # ";" follows ":" in the order of characters
        yield from Delete({"q": {"$gte": self._prefix, "$lt": end}}, many=True)
