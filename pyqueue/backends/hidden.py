"""Hidden documents: the fields of a handover's copies and sources, and predicates for both.

``handover`` writes these documents. Each module that may read them uses these predicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from pyqueue.backends.transitions import HIDDEN
from pyqueue.requests import Document, Filter, UpdateDocument

#: The field of a source that lists handed-over copies that may not be published yet:
#: ``{h: token, ids: [...], by: writer}`` for each handover.
HANDED: Final = "handed"
#: The field of a hidden copy: ``{to, source, token, by, key, call, new, gather, when}``.
MARK: Final = "handover"
#: Which call wrote a copy last. Repeated calls write equal copies, except for this field.
WRITER: Final = f"{MARK}.by"
#: An update that changes nothing. At majority it waits until everything it has seen is durable.
NOTHING: Final[UpdateDocument] = {"$unset": {MARK: ""}}
TOKEN: Final = f"{MARK}.token"
#: The field of a source that has ended: ``{token, at, put}``. ``put`` sends it to history.
ENDED: Final = "ended"
CALL: Final = f"{MARK}.call"
#: The ``q`` of the records of gathers; see ``gathering``. No queue has this name.
GATHERS: Final = "~gather"


def token_of(copy: Document) -> str:
    """Return the token of the claim that made a copy."""
    return str(copy[MARK]["token"])


def call_of(copy: Document) -> str | None:
    """Return the label of the call that made a copy. The holder's other calls have other labels."""
    call: str | None = copy[MARK].get("call")
    return call


def origin_of(copy: Document) -> tuple[str, str, str | None]:
    """Return where a copy comes from: its hidden queue, its token and the label of its call."""
    return copy["q"], token_of(copy), call_of(copy)


def target_of(copy: Document) -> str:
    """Return the queue that a copy enters."""
    return str(copy[MARK]["to"])


def is_new(copy: Document) -> bool:
    """Return whether the process that publishes a copy reports it to hooks, as a new message."""
    return "new" in copy[MARK]


def gather_of(copy: Document) -> Document | None:
    """Return the stored gather that a copy joins once it is published, or None if it joins none."""
    gather: Document | None = copy[MARK].get("gather")
    return gather


def returning(when: datetime) -> Document:
    """Return the part of a copy's mark that sends its message back to its old ``when``."""
    return {MARK: {"when": when}}


def old_when_of(copy: Document) -> datetime | None:
    """Return the ``when`` to which a copy returns, or None if it enters its queue anew."""
    when = copy[MARK].get("when")
    return when if isinstance(when, datetime) else None


def open_filter(source: Document) -> Filter:
    """Return the filter that matches a source as it was read, until its handover is decided."""
    return {"_id": source["_id"], "q": source["q"], "token": source["token"]}


def copy_filter(copy: Document) -> Filter:
    """Return the filter that matches a hidden copy as it was read."""
    return {"_id": copy["_id"], "q": copy["q"], TOKEN: token_of(copy), CALL: call_of(copy)}


def lists(source: Mapping[str, Any], copy: Document) -> bool:
    """Return whether a source lists this copy, with the copy's token."""
    token, id = copy[MARK]["token"], copy["_id"]
    return any(entry["h"] == token and id in entry["ids"] for entry in source[HANDED])


def is_copy(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document is a hidden copy as this release writes it.

    An ended source is hidden, too, but is not a copy.
    """
    mark, q = document.get(MARK), document.get("q")
    if not isinstance(mark, dict) or not isinstance(q, str) or ENDED in document:
        return False
    texts = isinstance(mark.get("to"), str) and isinstance(mark.get("token"), str)
    return texts and q.startswith(HIDDEN) and isinstance(document.get("when"), datetime)


def is_source(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document is a source as this release writes it."""
    entries, ended = document.get(HANDED), document.get(ENDED)
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        return False
    if ended is None:
        return bool(entries)
    return _is_end(ended) and isinstance(document["q"], str)


def is_open(document: Mapping[str, Any]) -> bool:
    """Return whether a stored document is a source whose handover has not been decided yet.

    ``handover.enter_together`` inserts it for documents that no holder hands over.
    """
    q, token = document.get("q"), document.get("token")
    if not isinstance(q, str) or not isinstance(token, str) or not q.startswith(HIDDEN):
        return False
    return not {MARK, HANDED, ENDED} & document.keys()


def _is_entry(entry: object) -> bool:
    """Return whether this is a source's entry for a handover."""
    if not isinstance(entry, dict) or not isinstance(entry.get("h"), str):
        return False
    ids = entry.get("ids")
    return isinstance(ids, list) and bool(ids)


def _is_end(ended: object) -> bool:
    """Return whether this is the mark of an ended source."""
    if not isinstance(ended, dict) or "token" not in ended:
        return False
    return isinstance(ended.get("at"), datetime) and isinstance(ended.get("put", {}), dict)
