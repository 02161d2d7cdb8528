"""Gathers: the checks of ``gather=``, and how a gather learns that a message has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from bson import ObjectId

from pyqueue.errors import ConfigurationError
from pyqueue.facts import Gather
from pyqueue.requests import Plan, Request

T = TypeVar("T")

#: The rename by which a message leaves its gather. A move keeps the field.
LAST_GATHER: Final = {"gather": "last_gather"}


@dataclass(slots=True)
class Look(Request[None]):
    """Check soon whether all messages of a gather have ended. The caller does not wait for this."""

    id: ObjectId | str
    #: The session of the caller's transaction, or None.
    session: Any = None


def ending_gather(
    update: dict[str, dict[str, Any]], gather: Gather | None
) -> dict[str, dict[str, Any]]:
    """Return the update that buries a message. The message leaves a gather with ``dead="end"``."""
    if gather is not None and gather.dead == "end":
        update["$rename"] = {**update.get("$rename", {}), **LAST_GATHER}
    return update


def checked(
    given: Sequence[object], home: tuple[str, object], session: object
) -> list[Gather | None]:
    """Return the gathers to which the messages of a push belong.

    Args:
        given: The ``gather=`` of each message.
        home: The namespace and the database of the client that pushes.
        session: The session of the caller's transaction, or None.

    Raises:
        ConfigurationError: A value is not a gather, or the gather accepts no messages of this push.
    """
    return [None if each is None else _checked(each, home, session) for each in given]


def _checked(given: object, home: tuple[str, object], session: object) -> Gather:
    if not isinstance(given, Gather):
        raise ConfigurationError(
            "gather: expected the value of client.gather() or the gather of a reservation, found "
            f"{type(given).__name__}; write `with client.gather(...) as g`, and pass gather=g"
        )
    if given.sealed:
        raise ConfigurationError(
            "gather: expected an open gather, found one whose block has ended; push inside the "
            "block"
        )
    if given.home is not None and given.home != home:
        raise ConfigurationError(
            "gather: expected a gather of this database and namespace, found a gather of "
            "another one; push with the client that created the gather"
        )
    if session is not None:
        raise ConfigurationError(
            "gather: cannot be combined with a session; push the messages of a gather outside the "
            "transaction"
        )
    return given


def marking_failures(plan: Plan[T], gathers: Sequence[Gather | None]) -> Plan[T]:
    """Run a plan that pushes messages. If it fails, mark their gathers as failed."""
    try:
        return (yield from plan)
    except BaseException:  # a cancellation, too
        for each in gathers:
            if each is not None:
                each.failed = True
        raise
