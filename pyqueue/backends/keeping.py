"""How long a finished message is kept: for the history, for its result, or for its key."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, NamedTuple

from pyqueue.backends.applying import SettlementUpdate
from pyqueue.backends.kind import Kind
from pyqueue.facts import Keep, kept_s
from pyqueue.messages import KEPT_BARE

#: The outcomes which mean that the work succeeded. Only with these may a message keep its key.
SUCCESS: Final = ("committed", "popped")


class Finish(NamedTuple):
    """How a message finishes. Messages whose values are equal share one update."""

    #: The outcome that the history shows.
    outcome: str
    #: For how many seconds the finished message is kept, or None to delete it.
    kept_s: float | None
    #: Whether the message has a message key.
    keyed: bool
    #: For how many seconds the finished message keeps its key, or None if it does not.
    unique_s: float | None = None
    #: Whether the finished message is kept for its key only, without the payload.
    bare: bool = False


def finish_of(outcome: str, history_s: float | None, keep: Keep | None, *, keyed: bool) -> Finish:
    """Return how a message finishes, as its queue and its producer ask.

    Args:
        outcome: The outcome that the history shows.
        history_s: For how many seconds the queue keeps finished messages; None without a history.
        keep: What the producer of the message asked to keep, or None.
        keyed: Whether the message has a message key.
    """
    if keep is None:
        return Finish(outcome, history_s, keyed)
    stay_s = kept_s(history_s, keep)
    if keep.unique is None or not keyed or outcome not in SUCCESS:
        return Finish(outcome, stay_s, keyed)
    until_s = max(stay_s or 0.0, keep.unique)
    return Finish(outcome, until_s, keyed, keep.unique, bare=stay_s is None)


def finishing(kind: Kind, finish: Finish, now: datetime) -> SettlementUpdate:
    """Return the update that finishes a message, or None if the message is deleted.

    If the message is kept for its key only, the update removes the payload, and sets a ``when``
    after all messages of the history.
    """
    update = kind.finishing(now, finish.outcome, finish.kept_s, keyed=finish.keyed)
    if update is None or finish.unique_s is None:
        return update
    put = update["$set"]
    put["free"] = now + timedelta(seconds=finish.unique_s)
    names = {old: new for old, new in update.pop("$rename", {}).items() if old != "key"}
    if names:
        update["$rename"] = names
    if finish.bare:
        put["when"] = now + KEPT_BARE
        update["$unset"]["payload"] = ""
    return update
