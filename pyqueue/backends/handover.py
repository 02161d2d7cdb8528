"""Handover: one document ends or shrinks, and new documents enter queues, without a transaction.

A process that is killed inside a transaction leaves its message locked for up to a minute. A
handover locks nothing:

1. Insert the new documents hidden, with majority write concern ("at majority"). They are *copies*,
   and no queue has them yet.
2. Decide: update the *source* at majority, which only its holder can do. The update lists the
   copies in the source. If the whole source ends, it also takes the source out of its queue.
3. Publish the copies. Then remove them from the list of the source, or end the source.

Any process can publish decided copies, any number of times: the holder does it at once, a claim of
the source does it first, and ``recovering`` does it after a crash. A copy carries the token of the
claim that made it, and is published only under the token that the source lists. So a process that
is a day late publishes nothing twice. An unlisted copy is deleted when it is a day old and its
source has another token by then, because nothing can list it any more.

If no message is to end, ``enter_together`` inserts a new source for the copies. It is *open* until
the decision. An open source that is a day old is deleted, and then its copies.

Another document may have the id of a copy. ``overwrite`` handles this case.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from pyqueue.backends.applying import SettlementUpdate
from pyqueue.backends.hidden import (
    ENDED,
    HANDED,
    MARK,
    NOTHING,
    TOKEN,
    WRITER,
    call_of,
    copy_filter,
    is_copy,
    is_source,
    lists,
    open_filter,
    token_of,
)
from pyqueue.backends.kind import Kind
from pyqueue.backends.publishing import publish, update_each
from pyqueue.backends.scan import FIRST
from pyqueue.backends.transitions import HIDDEN, hidden_queue, lock_removal, new_token, unset
from pyqueue.errors import DuplicateKey, QueueError, Unavailable, first_ten
from pyqueue.gathers import LAST_GATHER
from pyqueue.payloads import encode
from pyqueue.requests import (
    Coalesce,
    Delete,
    Document,
    Filter,
    Find,
    FindAndModify,
    Insert,
    Plan,
    ServerTime,
    Update,
    UpdateDocument,
    UpdateEach,
)

log = logging.getLogger("pyqueue")

#: A handover that was decided or copied more recently than this is left to its process.
GRACE: Final = timedelta(seconds=5)
#: How many times copies are written while other processes change copies with the same ids.
_TRIES: Final = 5

#: "done": the copies are published. "lost": the source was not held, and nothing was decided.
#: "unknown": the source is not held, and the copies are no longer hidden. If their ids were new,
#: this call repeated a completed call. Otherwise another holder may have handed them over.
Result = Literal["done", "lost", "unknown"]


class Handover(NamedTuple):
    """The documents that the holder of a message hands over to queues."""

    #: The queue of the source.
    queue: str
    #: The _id of the source.
    source: object
    #: The token of the claim that holds the source.
    token: str
    #: The new, complete documents. The ``q`` of each names the queue that it enters. Each may have
    #: a part of its mark, if it returns to its old place; see ``hidden.returning``.
    copies: Sequence[Document]
    #: Distinguishes calls that hand over the same documents in different ways, or None if there is
    #: only one way, so that a repeated call makes equal copies.
    call: str | None = None
    #: Whether the documents are new messages, and not messages that leave the source.
    new: bool = False
    #: Whether other processes may publish the copies as soon as they are decided.
    shared: bool = False
    #: The id of a new message that the caller reports to hooks, or None.
    told: object = None

    @property
    def hidden(self) -> str:
        """The ``q`` that the copies have while they are hidden. No queue has this name."""
        return hidden_queue(self.queue)

    @property
    def ids(self) -> list[Any]:
        """The ids of the copies."""
        return [each["_id"] for each in self.copies]

    @property
    def entry(self) -> Document:
        """The entry for this handover that the decision adds to the list in the source."""
        return {"h": self.token, "ids": self.ids}


def hand_over(handover: Handover, match: Filter, update: UpdateDocument) -> Plan[Result]:
    """Hand over documents from a source that stays in its queue.

    Args:
        handover: The handover. Its queues must have records, and each copy must be storable.
        match: Matches the source while the holder holds the messages to hand over.
        update: Removes these messages from the source.

    Returns:
        The result. If this raises Unavailable, call it again with the same token and ids.

    Raises:
        DuplicateKey: Other documents have some of the ids, and nothing was decided.
    """
    pushed = {**update.get("$push", {}), HANDED: handover.entry}
    decision = {**update, "$push": pushed}
    (result,) = yield from _hand_over([_Call(handover, match, decision)])
    return result


def hand_over_whole(
    handover: Handover, match: Filter, kind: Kind, finishing: SettlementUpdate = None
) -> Plan[Result]:
    """End a source, and publish its copies. Concurrent calls of a client share commands.

    Args:
        handover: The handover. Its queues must have records, and each copy must be storable.
        match: Matches the source while the holder holds the whole source.
        kind: The kind of the source's queue.
        finishing: The update that finishes the source, or None to delete the source.

    Returns:
        The result. If this raises Unavailable, call it again with the same token and ids.
    """
    ended: Document = {"token": handover.token, "at": (yield from ServerTime())}
    # The queue in which it is hidden has no groups.
    unlocked = lock_removal(kind)
    update: dict[str, dict[str, Any]] = {"$rename": {"key": "last_key"}, "$unset": unlocked}
    if finishing is not None:
        ended["put"] = finishing["$set"]
        update = {name: each for name, each in finishing.items() if name not in ("$set", "$rename")}
        # The source stays in its gather until its copies are published.
        old = finishing.get("$rename", {})
        renamed = {name: to for name, to in old.items() if name != "gather"}
        if renamed:
            update["$rename"] = renamed
    # A former holder would match the token, so the token must go, even if the history keeps one.
    gone = {**update.pop("$unset", {}), **unset(*kind.held_fields)}
    put = {"q": handover.hidden, "when": FIRST, ENDED: ended}
    update |= {"$set": put, "$unset": gone, "$push": {HANDED: handover.entry}}
    call = _Call(handover, match, update)
    key, size = ("hand over", handover.queue), len(handover.copies) * 1024  # assumed
    result = yield from Coalesce(key, call, _hand_over_for_callers, size=size)
    if result is None:
        (result,) = yield from _hand_over([call])
    return result


def enter_together(handover: Handover) -> Plan[bool]:
    """Publish either all of these new documents or none. No message ends: the source is new, too.

    This inserts a hidden source along with the hidden copies. The update that ends the source
    decides that the copies are published. If a process deletes the source first, none is published.

    Args:
        handover: The handover, with a new id for the source and a new token. Its queues must have
            records, and each copy must be storable.

    Returns:
        Whether the documents were published. If not, an id is taken, or another process has deleted
        the source, and no document of this call will ever be published.

    Raises:
        Unavailable: The outcome is unknown. A second call would insert the source again.
    """
    now = yield from ServerTime()
    source = {"_id": handover.source, "q": handover.hidden, "when": now, "token": handover.token}
    copies = _hidden(handover, now, handover.token)
    if (yield from _insert([source, *copies])):
        yield from Delete(open_filter(source), majority=True)
        yield from discard(handover)
        return False
    ended = {"token": handover.token, "at": (yield from ServerTime())}
    put = {"q": handover.hidden, "when": FIRST, ENDED: ended}
    # The source holds a gather open until the copies are published, as the source of a holder does.
    put |= next(({"gather": each["gather"]} for each in handover.copies if "gather" in each), {})
    update = {"$set": put, "$unset": unset("token"), "$push": {HANDED: handover.entry}}
    call = _Call(handover, open_filter(source), update)
    if not (yield from _decide([(call.match, call.decision)], False)):
        yield from discard(handover)
        return False
    yield from _publish([call], copies, now)
    return True


class _Call(NamedTuple):
    """A handover, and the update of the source that decides it."""

    handover: Handover
    match: Filter
    decision: UpdateDocument

    def decision_of(self, writer: str) -> UpdateDocument:
        """Return the update that decides the handover and names the writer of the copies."""
        pushed = self.decision["$push"]
        return {**self.decision, "$push": {**pushed, HANDED: {**pushed[HANDED], "by": writer}}}

    @property
    def decided(self) -> Document:
        """The fields of the source after the decision."""
        source = {"_id": self.handover.source, HANDED: [self.handover.entry]}
        return {**source, **self.decision.get("$set", {})}

    @property
    def ended_at(self) -> datetime | None:
        """The time at which the decision ends the source, or None if the source stays."""
        ended = self.decision.get("$set", {}).get(ENDED)
        return None if ended is None else ended["at"]


def _hand_over_for_callers(calls: Sequence[_Call]) -> Plan[Sequence[Result | None]]:
    """Run calls with shared commands. If that fails, return None for each, to be run alone."""
    if len(calls) == 1:
        return (yield from _hand_over(calls))
    try:
        return (yield from _hand_over(calls, half_time=True))
    except QueueError:
        return [None] * len(calls)


def _hand_over(calls: Sequence[_Call], *, half_time: bool = False) -> Plan[list[Result]]:
    """Hand over documents of one queue."""
    now = yield from ServerTime()
    writer = new_token()
    hidden = [_hidden(call.handover, now, writer) for call in calls]
    held, taken = yield from _insert_copies(calls, hidden)
    holding = [call for call, holds in zip(calls, held, strict=True) if holds]
    pairs = [(call.match, call.decision_of(writer)) for call in holding]
    if (yield from _decide(pairs, half_time)) < len(calls):  # the reply only says how many
        results: list[Result] = []
        for call in calls:
            results += [(yield from _resolve(call.handover, taken, writer))]
        return results
    result = yield from _publish(calls, [copy for some in hidden for copy in some], now)
    return [result] * len(calls)


def _publish(calls: Sequence[_Call], copies: Sequence[Document], began: datetime) -> Plan[Result]:
    """Publish the copies of decided calls, and end their sources."""
    if (yield from publish(copies)) < len(copies):
        decided = min([began, *(call.ended_at for call in calls if call.ended_at is not None)])
        shared = any(call.handover.shared for call in calls)
        if not shared and (yield from ServerTime()) - decided < GRACE:
            yield from _report_missing(calls[0].handover.queue, copies)
        if any(map(call_of, copies)):  # another call may have put its copies in their place
            return "unknown"
    yield from _end_sources([call.decided for call in calls])
    return "done"


def _decide(pairs: Sequence[tuple[Filter, UpdateDocument]], half_time: bool) -> Plan[int]:
    """Update the sources that may be held. Return how many were held."""
    if len(pairs) == 1:
        return (yield from Update(*pairs[0], majority=True)).matched
    return (yield from update_each(pairs, half_time=half_time))


def _report_missing(queue: str, copies: Sequence[Document]) -> Plan[None]:
    """Log copies that are missing, although it is too early for another process to publish them."""
    ids = [each["_id"] for each in copies]
    tokens, calls = set(map(token_of, copies)), set(map(call_of, copies))
    found = yield from Find({"_id": {"$in": ids}}, {MARK: 1, "q": 1, "when": 1})
    # Another call of the same holder has replaced some copies, and publishes its own.
    there = [
        each["_id"]
        for each in found
        if MARK not in each
        or (is_copy(each) and token_of(each) in tokens and call_of(each) not in calls)
    ]
    if missing := [id for id in ids if id not in there]:
        text = "queue %r: %d of %d messages that left their documents cannot be published: %s"
        log.error(text, queue, len(missing), len(ids), missing)


def _resolve(handover: Handover, taken: Sequence[Any], writer: str) -> Plan[Result]:
    """Find out the outcome of a decision. ``taken``: the ids that this call did not insert."""
    ids = handover.ids
    listing = {"$elemMatch": {"h": handover.token, "ids": {"$all": ids}}}
    match = {"_id": handover.source, HANDED: listing}
    decided = yield from FindAndModify(match, NOTHING, majority=True)
    if decided is not None:
        yield from _delete_repeated(decided, {"$in": ids, "$nin": taken}, writer)
        if handover.call is None:  # there is only one way to decide
            yield from finish_decided(decided)
            return "done"
    stored = yield from Find({"_id": {"$in": ids}, "q": handover.hidden}, {MARK: 1})
    if decided is None:
        mine = [*map(token_of, stored)].count(handover.token)
        # Copies of another holder, or all of ours, show that ours were never decided.
        return "lost" if mine < len(stored) or mine == len(ids) else "unknown"
    own = [*map(call_of, stored)].count(handover.call)
    if not own:
        return "lost" if stored else "unknown"  # the other call publishes its copies
    yield from finish_decided(decided)
    return "done" if own == len(stored) else "unknown"


def _delete_repeated(decided: Document, inserted: Filter, writer: str) -> Plan[None]:
    """Delete copies that a repeated call inserted again after they had been published."""
    if writer not in [each.get("by") for each in decided[HANDED]]:
        yield from Delete({"_id": inserted, WRITER: writer}, many=True, majority=True)


# ---- copies


def _hidden(handover: Handover, now: datetime, writer: str) -> list[Document]:
    """Return the documents of a handover in their hidden form."""
    hidden = []
    for document in handover.copies:
        mark = {"to": document["q"], "source": handover.source, "token": handover.token}
        mark |= {"by": writer, **document.get(MARK, {})}
        if handover.call is not None:
            mark["call"] = handover.call
        if handover.new and document["_id"] != handover.told:
            mark["new"] = True
        copy = {**document, "q": handover.hidden, "when": max(document["when"], now), MARK: mark}
        if "gather" in copy:  # an undecided copy is not in the gather of its source
            mark["gather"] = copy.pop("gather")
        if "key" in copy:  # keys are unique among hidden documents, too
            copy["last_key"] = mark["key"] = copy.pop("key")
        hidden.append(copy)
    return hidden


def _insert_copies(
    calls: Sequence[_Call], hidden: Sequence[Sequence[Document]]
) -> Plan[tuple[list[bool], list[Any]]]:
    """Insert the hidden copies.

    Return for each call whether its source may still be held, and the ids that were taken.

    A repeated call finds its own copies. Ids derived from the source may also belong to copies of
    former holders that died before the decision.
    """
    places = [(place, copy) for place, copies in enumerate(hidden) for copy in copies]
    taken: dict[int, list[Document]] = {}
    for at in (yield from _insert([copy for _, copy in places])):
        place, copy = places[at]
        taken.setdefault(place, []).append(copy)
    held = [True] * len(calls)
    for place, copies in taken.items():
        held[place] = yield from overwrite(copies, calls[place].match)
    return held, [each["_id"] for copies in taken.values() for each in copies]


def _insert(documents: Sequence[Document]) -> Plan[list[int]]:
    """Insert documents. Return the places of documents whose ids are already in use."""
    failures = yield from Insert([encode(each) for each in documents], majority=True)
    for failure in failures:
        if failure.field != "_id":
            raise failure.error
    return [failure.place for failure in failures]


def overwrite(documents: Sequence[Document], fence: Filter | None) -> Plan[bool]:
    """Store documents whose ids are already in use, and replace the hidden copies with these ids.

    An id in use does not show whether an earlier call completed the handover; the fence does. If
    the fence still matches after the stored documents were read, the handover was not completed.
    No former holder can then complete its handover, even after a fail-over. Hidden copies may
    therefore be replaced, whichever queue they are in. Other documents are messages, and stay.

    Args:
        documents: The documents to store.
        fence: A filter that matches the source for as long as the caller holds the source, or None
            if no other process has the documents.

    Returns:
        Whether the fence matched.

    Raises:
        DuplicateKey: Documents other than hidden copies have some of the ids. No message changed.
    """
    for _ in range(_TRIES):
        found = yield from Find({"_id": {"$in": [each["_id"] for each in documents]}})
        stored = {each["_id"]: each for each in found}
        if fence is not None and not (yield from Update(fence, NOTHING, majority=True)).matched:
            return False
        if others := [id for id, each in stored.items() if not is_copy(each)]:
            raise DuplicateKey(f"other documents have the ids {first_ten(others)}", ids=others)
        documents = yield from _overwrite_copies(documents, stored)
        if not documents:
            return True
    raise Unavailable("other processes keep changing the handed-over messages; try again")


def _overwrite_copies(
    documents: Sequence[Document], stored: Mapping[object, Document]
) -> Plan[list[Document]]:
    """Replace the copies that were read by documents. Return the documents to write again.

    ``stored`` has the copies, keyed by id. A document without such a copy is inserted.
    """
    present = [each for each in documents if each["_id"] in stored]
    missing = [each for each in documents if each["_id"] not in stored]
    pairs = [_replacing(stored[each["_id"]], each) for each in present]
    again = present if (yield from update_each(pairs)) < len(pairs) else []
    if missing:
        again = again + [missing[at] for at in (yield from _insert(missing))]
    return again


def _replacing(old: Document, new: Document) -> tuple[Filter, UpdateDocument]:
    """Return the filter that matches a copy as it was read, and the update that replaces it."""
    update = {"$set": {name: value for name, value in new.items() if name != "_id"}}
    if gone := unset(*(name for name in old if name not in new)):
        update["$unset"] = gone
    return copy_filter(old), update


def discard(handover: Handover) -> Plan[None]:
    """Delete the copies of an undecided handover. No other call may have its token and ids."""
    match = {"_id": {"$in": handover.ids}, "q": handover.hidden}
    yield from Delete({**match, TOKEN: handover.token}, many=True, w1=True)


# ---- sources


def finish(document: Document) -> Plan[None]:
    """Finish the handovers that a document still lists. A claim of the document does this first."""
    if not document.get(HANDED):
        return
    # A fail-over may undo the state of this document, unless a majority has it.
    stored = yield from FindAndModify({"_id": document["_id"]}, NOTHING, majority=True)
    if stored is not None:
        yield from finish_decided(stored)


def finish_decided(source: Document) -> Plan[None]:
    """Publish the copies that a source lists. ``source``: the source as a majority stored it.

    The copies are found by id and token, in the hidden documents of any queue: a copy of another
    holder, in another queue, may have led the caller to this source.
    """
    if not is_source(source):
        return
    ids = [id for entry in source[HANDED] for id in entry["ids"]]
    match = {"_id": {"$in": ids}, MARK: {"$exists": True}}
    stored = yield from Find(match, {MARK: 1, "q": 1, "when": 1})
    yield from publish([each for each in stored if is_copy(each) and lists(source, each)])
    yield from _end_sources([source])


def _end_sources(sources: Sequence[Document]) -> Plan[None]:
    """Remove published copies from the lists of sources, or end the sources.

    If a fail-over undoes this, a later recovery does it again.
    """
    pairs: list[tuple[Filter, UpdateDocument]] = []
    deleted: list[Filter] = []
    for source in sources:
        match: Document = {"_id": source["_id"]}
        ended = source.get(ENDED)
        if ended is None:
            for entry in source[HANDED]:
                listed = {"h": entry["h"], "ids": entry["ids"][0]}  # one id identifies it
                pairs.append((match, {"$pull": {HANDED: listed}}))
            continue
        match |= {"q": source["q"], f"{ENDED}.token": ended["token"]}
        if "put" in ended:
            put = {"q": source["q"].removeprefix(HIDDEN), **ended["put"]}
            update = {"$set": put, "$unset": unset(HANDED, ENDED), "$rename": LAST_GATHER}
            pairs.append((match, update))
        else:
            deleted.append(match)
    if pairs:
        yield from UpdateEach(pairs, w1=True)
    if deleted:
        yield from Delete({"$or": deleted}, many=True, w1=True)
