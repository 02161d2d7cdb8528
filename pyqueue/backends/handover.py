"""Handover: one document ends or shrinks, and others begin, without a transaction.

A process that is killed inside a transaction leaves its message locked for up to a minute. A
handover locks nothing:

1. Insert the new documents hidden, at majority. They are *copies*, and no queue has them yet.
2. Decide, by one update of the *source* at majority, which only its holder can do. It lists the
   copies in the source. If the whole source ends, the same update takes it out of its queue.
3. Show the copies. Then take them off the list of the source, or end the source.

Any process can show what was decided, again and again: the holder does it at once, a claim of the
source does it first, and ``recovering`` does it after a crash. A copy carries the token of the
claim that made it, and is shown only under the token that the source lists. So a process that is a
day late shows nothing twice. A copy that is not listed is deleted when it is a day old and its
source has another token by then, because nothing can list it any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from pyqueue.backends.applying import MAX_BATCH, SettlementUpdate, update_with_key
from pyqueue.backends.kind import Kind
from pyqueue.backends.scan import FIRST
from pyqueue.backends.transitions import hidden_queue, unset
from pyqueue.errors import QueueError, Unavailable
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
    Signal,
    Update,
    UpdateDocument,
    UpdateEach,
)

__all__ = [
    "ENDED",
    "HANDED",
    "MARK",
    "NOTHING",
    "Handover",
    "Result",
    "discard",
    "finish",
    "finish_decided",
    "hand_over",
    "hand_over_whole",
    "is_copy",
    "is_source",
    "lists",
]

#: The field of a source that lists what it has handed over and may not be shown yet:
#: ``{h: token, ids: [...]}`` for each handover.
HANDED: Final = "handed"
#: The field of a copy while it is hidden: ``{to, source, token, key}``.
MARK: Final = "handover"
_TOKEN: Final = f"{MARK}.token"
#: The field of a source that has ended: ``{token, at, put}``. ``put`` sends it to the history.
ENDED: Final = "ended"
#: How large a copy is taken to be when calls share commands.
_TYPICAL_BYTES: Final = 1024
#: How often copies are written against concurrent changes of copies with the same ids.
_TRIES: Final = 5
#: An update that changes nothing. At majority it waits until all that it has seen is durable.
NOTHING: Final[UpdateDocument] = {"$unset": {MARK: ""}}

#: "done": the copies are shown. "lost": the source was not held, and nothing was decided.
#: "unknown": it is not held, and the copies are not hidden any more. If their ids were new, this
#: call repeated one that was done. Else another holder may have handed them over.
Result = Literal["done", "lost", "unknown"]


class Handover(NamedTuple):
    """What a holder hands over."""

    #: The queue of the source.
    queue: str
    #: The _id of the source.
    source: object
    #: The token of the claim that holds it.
    token: str
    #: What begins: complete documents, whose ``q`` names the queue that each enters.
    copies: Sequence[Document]

    @property
    def hidden(self) -> str:
        """The ``q`` of its copies, which is the name of no queue."""
        return hidden_queue(self.queue)

    @property
    def ids(self) -> list[Any]:
        """The ids of the copies."""
        return [each["_id"] for each in self.copies]

    @property
    def entry(self) -> Document:
        """What the source lists once this is decided."""
        return {"h": self.token, "ids": self.ids}


def hand_over(handover: Handover, match: Filter, update: UpdateDocument) -> Plan[Result]:
    """Let documents leave a source that stays.

    Args:
        handover: what begins. Its queues have records, and each copy can be stored.
        match: the filter of the source while the holder holds what it hands over.
        update: takes that out of the source.

    Returns:
        How it went. If it is unavailable, call it again with the same token and ids.
    """
    pushed = {**update.get("$push", {}), HANDED: handover.entry}
    decision = {**update, "$push": pushed}
    (result,) = yield from _hand_over([_Call(handover, match, decision)])
    return result


def hand_over_whole(
    handover: Handover, match: Filter, kind: Kind, finishing: SettlementUpdate = None
) -> Plan[Result]:
    """End a source, and let documents begin. Concurrent calls of a client share commands.

    Args:
        handover: what begins. Its queues have records, and each copy can be stored.
        match: the filter of the source while the holder holds all of it.
        kind: the kind of its queue.
        finishing: the update that finishes it; None: it is deleted.

    Returns:
        How it went. If it is unavailable, call it again with the same token and ids.
    """
    ended: Document = {"token": handover.token, "at": (yield from ServerTime())}
    # The queue in which it is hidden has no groups.
    unlocked = unset(*kind.lock_fields.values())
    update: dict[str, dict[str, Any]] = {"$rename": {"key": "last_key"}, "$unset": unlocked}
    if finishing is not None:
        ended["put"] = finishing["$set"]
        update = {name: each for name, each in finishing.items() if name != "$set"}
    # A former holder matches the token, so it must go, also if the history keeps one.
    gone = {**update.pop("$unset", {}), **unset(*kind.held_fields)}
    put = {"q": handover.hidden, "when": FIRST, ENDED: ended}
    update |= {"$set": put, "$unset": gone, "$push": {HANDED: handover.entry}}
    call = _Call(handover, match, update)
    key, size = ("hand over", handover.queue), len(handover.copies) * _TYPICAL_BYTES
    result = yield from Coalesce(key, call, _hand_over_for_callers, size=size)
    if result is None:
        (result,) = yield from _hand_over([call])
    return result


class _Call(NamedTuple):
    """A handover and how it is decided."""

    handover: Handover
    match: Filter
    decision: UpdateDocument

    @property
    def decided(self) -> Document:
        """What the source says of it after the decision."""
        source = {"_id": self.handover.source, HANDED: [self.handover.entry]}
        return {**source, **self.decision.get("$set", {})}


def _hand_over_for_callers(calls: Sequence[_Call]) -> Plan[Sequence[Result | None]]:
    """Hand over for several callers. None: something failed, and the caller tries again alone."""
    if len(calls) == 1:
        return (yield from _hand_over(calls))
    try:
        return (yield from _hand_over(calls, half_time=True))
    except QueueError:
        return [None] * len(calls)


def _hand_over(calls: Sequence[_Call], *, half_time: bool = False) -> Plan[list[Result]]:
    """Hand over documents of one queue."""
    now = yield from ServerTime()
    hidden = [
        [_hidden(call.handover, each, now) for each in call.handover.copies] for call in calls
    ]
    held = yield from _copy(calls, hidden)
    pairs = [(call.match, call.decision) for call, holds in zip(calls, held, strict=True) if holds]
    matched = 0
    if len(pairs) == 1:
        change = yield from Update(*pairs[0], majority=True)
        matched = change.matched
    elif pairs:
        matched, failures = yield from UpdateEach(pairs, majority=True, half_time=half_time)
        for failure in failures:
            raise failure.error
    if matched < len(calls):  # the answer only says how many
        results: list[Result] = []
        for call in calls:
            results += [(yield from _resolve(call.handover))]
        return results
    queue = calls[0].handover.queue
    yield from _show(queue, [copy for copies in hidden for copy in copies])
    yield from _end(queue, [call.decided for call in calls])
    return ["done"] * len(calls)


def _resolve(handover: Handover) -> Plan[Result]:
    """Find out what became of a decision. It may be that of an earlier call."""
    ids = handover.ids
    listing = {"$elemMatch": {"h": handover.token, "ids": {"$all": ids}}}
    match = {"_id": handover.source, HANDED: listing}
    decided = yield from FindAndModify(match, NOTHING, majority=True)
    if decided is not None:
        yield from finish_decided(handover.queue, decided)
        return "done"
    still = {"_id": {"$in": ids}, "q": handover.hidden}
    stored = yield from Find(still, {MARK: 1})
    mine = sum(each[MARK]["token"] == handover.token for each in stored)
    return "lost" if mine < len(stored) or mine == len(ids) else "unknown"


# ---- copies


def _hidden(handover: Handover, document: Document, now: datetime) -> Document:
    """Return the hidden form of a document."""
    mark = {"to": document["q"], "source": handover.source, "token": handover.token}
    copy = {**document, "q": handover.hidden, "when": max(document["when"], now), MARK: mark}
    if "key" in copy:  # keys are unique among hidden documents, too
        copy["last_key"] = mark["key"] = copy.pop("key")
    return copy


def _copy(calls: Sequence[_Call], hidden: Sequence[Sequence[Document]]) -> Plan[list[bool]]:
    """Insert copies. Return for each call whether its source may still be held.

    A call that is repeated finds its own copies. Ids that are made from the source may also belong
    to copies of former holders, who died before they decided.
    """
    places = [(place, copy) for place, copies in enumerate(hidden) for copy in copies]
    taken: dict[int, list[Document]] = {}
    for at in (yield from _insert([copy for _, copy in places])):
        place, copy = places[at]
        taken.setdefault(place, []).append(copy)
    held = [True] * len(calls)
    for place, copies in taken.items():
        held[place] = yield from _overwrite(calls[place], copies)
    return held


def _insert(copies: Sequence[Document]) -> Plan[list[int]]:
    """Insert copies. Return the places of those whose ids are taken."""
    failures = yield from Insert([encode(each) for each in copies], majority=True)
    for failure in failures:
        if failure.field != "_id":
            raise failure.error
    return [failure.place for failure in failures]


def _overwrite(call: _Call, copies: Sequence[Document]) -> Plan[bool]:
    """Overwrite hidden copies that have the same ids. A copy that is shown was handed over before.

    Returns:
        Whether the source may still be held.
    """
    handover = call.handover
    for _ in range(_TRIES):
        by_id = {each["_id"]: each for each in copies}
        stored = yield from Find({"_id": {"$in": list(by_id)}, "q": handover.hidden})
        # A holder whose claim a fail-over may still undo must not touch the copies of another one.
        # If the source is still held after these were read, they are not decided and never will be.
        if any(each[MARK]["token"] != handover.token for each in stored) and not (
            (yield from Update(call.match, NOTHING, majority=True)).matched
        ):
            return False
        pairs: list[tuple[Filter, UpdateDocument]] = []
        for old in stored:
            new = by_id[old["_id"]]
            same = {"_id": old["_id"], "q": handover.hidden, _TOKEN: old[MARK]["token"]}
            put = {name: value for name, value in new.items() if name != "_id"}
            gone = unset(*(name for name in old if name not in new))
            pairs.append((same, {"$set": put, "$unset": gone} if gone else {"$set": put}))
        if not pairs:
            return True
        matched, failures = yield from UpdateEach(pairs, majority=True)
        for failure in failures:
            raise failure.error
        if matched == len(pairs):
            return True
        copies = [copies[at] for at in (yield from _insert(copies))]  # some were deleted meanwhile
        if not copies:
            return True
    raise Unavailable("other processes change what is handed over: try it again")


def _show(queue: str, copies: Sequence[Document]) -> Plan[None]:
    """Show hidden copies that were decided on. It may run any number of times."""
    now = yield from ServerTime()
    # What is scheduled for later keeps its instant.
    raised = {"$max": {"when": now, "due": now}, "$unset": unset(MARK)}
    hidden = {"q": hidden_queue(queue)}
    pairs: list[tuple[Filter, UpdateDocument]] = []
    for to, members in _by(_target, (each for each in copies if "key" not in each[MARK])):
        for start in range(0, len(members), MAX_BATCH):
            of_token = _by(_token, members[start : start + MAX_BATCH])
            some = [
                {_TOKEN: token, "_id": {"$in": [each["_id"] for each in same]}}
                for token, same in of_token
            ]
            pairs.append(({"$or": some, **hidden}, {"$set": {"q": to}, **raised}))
    if pairs:
        _, failures = yield from UpdateEach(pairs, many=True, majority=True)
        for failure in failures:
            raise failure.error
    for each in copies:
        if "key" in each[MARK]:
            one = {"_id": each["_id"], _TOKEN: _token(each), **hidden}
            update = {"$set": {"q": _target(each)}, **raised}
            yield from update_with_key(one, update, each[MARK]["key"], majority=True)
    for to, members in _by(_target, copies):
        yield from Signal(to, max(now, min(each["when"] for each in members)))


def _target(copy: Document) -> str:
    return str(copy[MARK]["to"])


def _token(copy: Document) -> str:
    return str(copy[MARK]["token"])


def _by(
    name: Callable[[Document], str], copies: Iterable[Document]
) -> Iterable[tuple[str, list[Document]]]:
    """Return the copies grouped by a name."""
    groups: dict[str, list[Document]] = {}
    for each in copies:
        groups.setdefault(name(each), []).append(each)
    return groups.items()


def discard(handover: Handover) -> Plan[None]:
    """Delete copies that were not decided on, if no other call has the same token and ids."""
    match = {"_id": {"$in": handover.ids}, "q": handover.hidden}
    yield from Delete({**match, _TOKEN: handover.token}, many=True, w1=True)


# ---- sources


def finish(queue: str, document: Document) -> Plan[None]:
    """Finish what a former holder of a source has decided. A claim of a source does this first.

    Args:
        queue: the queue of the source.
        document: the source.
    """
    if not document.get(HANDED):
        return
    # A fail-over may undo what this document shows, unless a majority has it.
    stored = yield from FindAndModify({"_id": document["_id"]}, NOTHING, majority=True)
    if stored is not None:
        yield from finish_decided(queue, stored)


def finish_decided(queue: str, source: Document) -> Plan[None]:
    """Show what a source lists. ``source`` is as a majority stored it."""
    if not is_source(source):
        return
    ids = [id for entry in source[HANDED] for id in entry["ids"]]
    hidden = {"_id": {"$in": ids}, "q": hidden_queue(queue)}
    stored = yield from Find(hidden, {MARK: 1, "when": 1})
    yield from _show(queue, [each for each in stored if is_copy(each) and lists(source, each)])
    yield from _end(queue, [source])


def lists(source: Mapping[str, Any], copy: Document) -> bool:
    """Return whether a source lists this copy, under the token that it has."""
    token, id = copy[MARK]["token"], copy["_id"]
    return any(entry["h"] == token and id in entry["ids"] for entry in source[HANDED])


def is_copy(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document is a copy as this module writes it."""
    mark, when = document.get(MARK), document.get("when")
    names = ("to", "token")
    texts = isinstance(mark, dict) and all(isinstance(mark.get(name), str) for name in names)
    return texts and isinstance(when, datetime)


def is_source(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document lists copies as this module writes it."""
    entries, ended = document.get(HANDED), document.get(ENDED)
    if not isinstance(entries, list):
        return False
    for each in entries:
        ids = each.get("ids") if isinstance(each, dict) and isinstance(each.get("h"), str) else 0
        if not isinstance(ids, list) or not ids:
            return False
    if ended is None:
        return bool(entries)
    if not isinstance(ended, dict) or "token" not in ended:
        return False
    return isinstance(ended.get("at"), datetime) and isinstance(ended.get("put", {}), dict)


def _end(queue: str, sources: Sequence[Document]) -> Plan[None]:
    """Take what is shown off the lists of sources, or end them.

    If a fail-over undoes this, it is done again.
    """
    pairs: list[tuple[Filter, UpdateDocument]] = []
    deleted: list[Filter] = []
    for source in sources:
        match: Document = {"_id": source["_id"]}
        ended = source.get(ENDED)
        if ended is None:
            for entry in source[HANDED]:
                listed = {"h": entry["h"], "ids": entry["ids"][0]}
                pairs.append((match, {"$pull": {HANDED: listed}}))
            continue
        match |= {"q": hidden_queue(queue), f"{ENDED}.token": ended["token"]}
        if "put" in ended:
            put = {"$set": {"q": queue, **ended["put"]}, "$unset": unset(HANDED, ENDED)}
            pairs.append((match, put))
        else:
            deleted.append(match)
    if pairs:
        yield from UpdateEach(pairs, w1=True)
    if deleted:
        yield from Delete({"$or": deleted}, many=True, w1=True)
