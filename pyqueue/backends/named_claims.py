"""Named claims: the n-th claim of a group, which outlives the process that made it. Plans only: no I/O, no client.

A claim is made of reservations like any other, which share one token, so all plans that settle reservations serve it. Beyond that, each
message carries ``claim: {g, n}``, and a state document of the group says how far it is::

    {_id: "~claim:QUEUE~GROUP", record: true, n: LAST ACKNOWLEDGED, claimed: LAST CLAIMED, token, former: [...]}

Whoever starts to run a group *adopts* it: puts a token of its own in place of the former runner's, in the state and then in whatever is
outstanding. So it goes on at once where the other stopped, and the other, if it still runs, matches nothing any more and is ``Fenced``.
All writes wait for the client's durability: what a restart must find may not be rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final

from bson import ObjectId

from pyqueue import arguments, tokens
from pyqueue.backends import namespace
from pyqueue.backends.namespace import CLAIMS, HOT
from pyqueue.backends.standard import Standard
from pyqueue.errors import Fenced, InvalidMessage, LeaseLost
from pyqueue.messages import Id, Reservation, message_of
from pyqueue.requests import Delete, Find, Insert, Plan, ServerTime, Update

__all__ = ["MOST", "ClaimProgress", "ClaimRange", "NamedClaims"]

#: How many messages one command marks.
STAMP: Final = 10_000
#: How many messages one claim has at most: what acknowledges it is one command, which must end in time.
MOST: Final = 100_000
#: How often a takeover is tried against others who take over at the same moment.
TRIES: Final = 20


#: What is no message: the filters of it.
_STRANGE: Final[Sequence[dict[str, Any]]] = [
    {"payload": {"$exists": False}},
    {"processed": {"$exists": True}},
    *(
        {name: {"$exists": True, "$not": {"$type": kind}}}
        for kind, names in {
            "date": ("due", "pushed"),
            "object": ("headers", "error", "dead"),
            "string": ("key",),
            "array": ("trail",),
        }.items()
        for name in names
    ),
]


@dataclass(frozen=True, slots=True)
class ClaimProgress:
    """How far a group is."""

    #: The last claim that was acknowledged, and all before it.
    acknowledged: int
    #: The last claim that was made; those in between are outstanding.
    claimed: int
    #: Who runs the group.
    token: str


@dataclass(frozen=True, slots=True)
class ClaimRange:
    """A part of the claims above ``after`` and up to ``upto``. The parts of a division have no message in common."""

    token: str
    after: int
    upto: int
    #: Both ends belong to it. A range compares within one type of id, so one that holds both types has two.
    ranges: tuple[tuple[Id, Id], ...]


def divided(ids: Iterable[Id], parts: int) -> list[tuple[tuple[Id, Id], ...]]:
    """The ranges of up to so many parts of nearly equal size."""
    ordered = sorted(ids, key=lambda id: (isinstance(id, ObjectId), id))
    pieces = min(parts, len(ordered))
    cuts = [len(ordered) * piece // pieces for piece in range(pieces + 1)] if pieces else []
    divisions = []
    for first, end in pairwise(cuts):
        kinds: dict[bool, list[Id]] = {}
        for id in ordered[first:end]:
            kinds.setdefault(isinstance(id, ObjectId), []).append(id)
        divisions.append(tuple((kind[0], kind[-1]) for kind in kinds.values()))
    return divisions


class NamedClaims:
    """The plans of one group of a queue. Plain data: it pickles."""

    __slots__ = ("backend", "group", "id", "tag")

    def __init__(self, backend: Standard, group: str) -> None:
        self.backend = backend
        self.group = arguments.group(group)
        #: What its messages carry: neither name has a "~", so this is no other group's of any queue.
        self.tag = f"{backend.queue}~{group}"
        self.id = f"~claim:{self.tag}"

    # ---- who runs the group

    def standing(self, token: str | None = None) -> Plan[ClaimProgress]:
        """How far the group is, if ``token`` runs it; None: whoever does.

        Raises:
            Fenced: another runs it by now.
        """
        found = yield Find({"_id": self.id}, limit=1)
        state: Mapping[str, Any] = found[0] if found else {"n": 0, "claimed": 0, "token": ""}
        if token is not None and state["token"] != token:
            raise self._fenced()
        return ClaimProgress(state["n"], state["claimed"], state["token"])

    def _fenced(self) -> Fenced:
        return Fenced(
            f"group {self.group!r} of queue {self.backend.queue!r} was taken over by another runner; this one has stopped. "
            "One runner at a time serves a group: give a second one a group of its own"
        )

    def adopt(self, lease: float) -> Plan[str]:
        """Take the group over, and what is outstanding with it: held for ``lease`` seconds from now, one more try. Answers the token."""
        yield from self.backend._enter()
        token = tokens.new()
        for _ in range(TRIES):
            found = yield Find({"_id": self.id}, limit=1)
            if not found:
                state = {
                    "_id": self.id,
                    "record": True,
                    "n": 0,
                    "claimed": 0,
                    "token": token,
                    "former": [],
                }
                if not (yield Insert([state])):
                    return token
                continue
            # Kept until all that they hold is ours: a takeover that is cut short is finished by the next one.
            former = [*found[0].get("former", ()), found[0]["token"]]
            taken = {"$set": {"token": token, "former": former}}
            if (yield Update({"_id": self.id, "token": found[0]["token"]}, taken)).matched:
                now = yield ServerTime()
                mine = {"claim.g": self.tag, "token": {"$in": former}}
                yield Update(mine, self._holding(now, lease, token), many=True)
                yield from self._advance(token, {"$set": {"former": []}})
                return token
        raise self._fenced()

    def _holding(self, now: datetime, lease: float, token: str) -> dict[str, Any]:
        update = self.backend._claiming(now, lease, count=True)
        del update["$unset"]
        update["$set"]["token"] = token
        return update

    def _advance(self, token: str, update: Mapping[str, Any], **known: int) -> Plan[None]:
        if not (yield Update({"_id": self.id, "token": token, **known}, update)).matched:
            raise self._fenced()

    # ---- claiming

    def claim(
        self, token: str, limit: int, lease: float, *, since: datetime | None = None
    ) -> Plan[int | None]:
        """Claim what is ready (``since`` an instant, if given), up to ``limit`` messages for ``lease`` seconds.

        Answers the claim's number; None: nothing is ready. What was claimed too often is buried on the way.

        Raises:
            Fenced: another runs the group by now; nothing is held.
        """
        while True:
            standing = yield from self.standing(token)
            if (yield from namespace.paused(self.backend.queue)):
                return None
            now = yield ServerTime()
            ready = now if since is None else min(now, since)
            found = yield Find(
                self.backend.claimable(ready),
                {"_id": 1},
                sort=self.backend.order,
                limit=min(limit, MOST),
                hint=HOT,
            )
            if not found:
                return None
            ids: list[Id] = []
            for each in found:
                id = each["_id"]
                if isinstance(id, (ObjectId, str)):
                    ids.append(id)
                else:  # others wrote it, and readers cannot divide such ids
                    one = {"_id": id, "q": self.backend.queue, "when": {"$lte": now}}
                    yield from self.backend._put_away(
                        one, InvalidMessage("its id is no id of a message"), now
                    )
            if not ids:
                continue
            n = standing.claimed + 1
            yield from self._advance(token, {"$set": {"claimed": n}}, claimed=standing.claimed)
            yield from self._stamp(ids, n, token, lease)
            yield from self._bury_unfit(token, n)
            if (yield Find(self._mine(token, n - 1, n), {"_id": 1}, limit=1, hint=CLAIMS)):
                return n
            yield from self._advance(
                token, {"$max": {"n": n}}
            )  # others were faster on all of them, or all were buried

    def begin(self, limit: int, lease: float) -> Plan[tuple[str, int, list[Id]]]:
        """Take the group over, with what is outstanding, or else claim anew. Answers the token, the last claim's number, and the ids."""
        token = yield from self.adopt(lease)
        standing = yield from self.standing(token)
        upto: int | None = None
        ids = yield from self.ids(token, standing.acknowledged, standing.claimed)
        if not ids:
            upto = yield from self.claim(token, limit, lease)
            if upto is not None:
                ids = yield from self.ids(token, upto - 1, upto)
        return token, standing.claimed if upto is None else upto, ids

    def _stamp(self, ids: Sequence[Id], n: int, token: str, lease: float) -> Plan[None]:
        for start in range(0, len(ids), STAMP):
            yield from self._stamp_some(ids[start : start + STAMP], n, token, lease)
        try:
            yield from self.standing(token)
        except Fenced:
            # Who took over meanwhile has not seen what was marked since: give it back.
            held = yield from self.reservations(token, n - 1, n)
            with suppress(LeaseLost):
                yield from self.backend.release(tuple(held))
            raise

    def _stamp_some(self, ids: Sequence[Id], n: int, token: str, lease: float) -> Plan[None]:
        now = yield ServerTime()
        still = {"_id": {"$in": ids}, "q": self.backend.queue, "when": {"$lte": now}}
        update = self._holding(now, lease, token)
        update["$set"]["claim"] = {"g": self.tag, "n": n}
        try:
            yield Update(still, update, many=True)
        except InvalidMessage as error:
            # The server refused it because of what somebody else wrote: find out which, and put that away.
            if len(ids) == 1:
                yield from self.backend._put_away(still, error, now)
                return
            half = len(ids) // 2
            yield from self._stamp_some(ids[:half], n, token, lease)
            yield from self._stamp_some(ids[half:], n, token, lease)

    def _bury_unfit(self, token: str, n: int) -> Plan[None]:
        """Bury what was claimed too often, and what is no message, as every claim does."""
        unfit, limit = list(_STRANGE), self.backend.options.max_tries
        if limit is not None:
            unfit.append({"tries": {"$gt": limit}, "dead": {"$exists": False}})
        now = yield ServerTime()
        for document in (yield Find(self._mine(token, n - 1, n) | {"$or": unfit}, hint=CLAIMS)):
            yield from self.backend._accept(document, now, None, worn=True)

    # ---- what is held

    def _mine(self, token: str, after: int, upto: int) -> dict[str, Any]:
        return {"claim.g": self.tag, "claim.n": {"$gt": after, "$lte": upto}, "token": token}

    def ids(self, token: str, after: int, upto: int) -> Plan[list[Id]]:
        """The ids of what the claims above ``after`` and up to ``upto`` hold."""
        found = yield Find(self._mine(token, after, upto), {"_id": 1}, hint=CLAIMS)
        return [each["_id"] for each in found]

    def reservations(
        self, token: str, after: int, upto: int, match: dict[str, Any] | None = None
    ) -> Plan[list[Reservation[Any]]]:
        """What they hold, to be settled like other reservations; without the payloads."""
        now = yield ServerTime()
        found = yield Find(
            self._mine(token, after, upto) | (match or {}), {"payload": 0}, hint=CLAIMS
        )
        held: list[Any] = [
            message_of(each, None, now, lease=max(0.001, (each["when"] - now).total_seconds()))
            for each in found
        ]
        return held

    def mark(self, token: str, ids: Sequence[Id], number: int) -> Plan[None]:
        """Note of some of what is held that it is about to be worked on; what becomes of it takes the note away."""
        for start in range(0, len(ids), STAMP):
            mine = {
                "_id": {"$in": list(ids[start : start + STAMP])},
                "claim.g": self.tag,
                "token": token,
            }
            yield Update(mine, {"$set": {"claim.tried": number}}, many=True)

    def marks(self, token: str, upto: int) -> Plan[dict[Id, int]]:
        """The numbers that were noted last of what is held."""
        marked = self._mine(token, 0, upto) | {"claim.tried": {"$exists": True}}
        found = yield Find(marked, {"claim": 1}, hint=CLAIMS)
        return {each["_id"]: each["claim"]["tried"] for each in found}

    def spans(self, token: str, after: int, upto: int, parts: int) -> Plan[list[ClaimRange]]:
        """Divide what they hold among up to so many readers, each in any process."""
        ids = yield from self.ids(token, after, upto)
        return [ClaimRange(token, after, upto, ranges) for ranges in divided(ids, parts)]

    def read(self, span: ClaimRange) -> Plan[list[dict[str, Any]]]:
        """The stored documents of a part.

        Raises:
            Fenced: another runs the group by now.
        """
        ranges: list[dict[str, Any]] = [
            {"_id": {"$gte": least, "$lte": most}} for least, most in span.ranges
        ]
        match = self._mine(span.token, span.after, span.upto) | (
            ranges[0] if len(ranges) == 1 else {"$or": ranges}
        )
        found: list[dict[str, Any]] = yield Find(match, hint=CLAIMS)
        yield from self.standing(span.token)  # or what was read may be less than all
        return found

    def renew(self, token: str, lease: float) -> Plan[None]:
        """Hold everything outstanding for another ``lease`` seconds, from now.

        Raises:
            Fenced: another runs the group by now.
        """
        now = yield ServerTime()
        held = {"claim.g": self.tag, "token": token}
        if not (
            yield Update(held, {"$set": {"when": now + timedelta(seconds=lease)}}, many=True)
        ).matched:
            yield from self.standing(token)

    # ---- settling

    def acknowledge(self, token: str, upto: int) -> Plan[int]:
        """Finish what is still held of all claims up to ``upto``. Answers how many messages it was.

        Raises:
            Fenced: another runs the group by now; what it holds is untouched.
        """
        standing = yield from self.standing(token)
        now = yield ServerTime()
        done = 0
        match = {"claim.g": self.tag, "claim.n": {"$lte": upto}, "token": token}
        if self.backend.finishing(now, "committed", keyed=False) is None:
            done = yield Delete(match, many=True)
        else:
            for keyed in (False, True):
                update = self.backend.finishing(now, "committed", keyed=keyed) or {}
                change = yield Update(match | {"key": {"$exists": keyed}}, update, many=True)
                done += change.matched
        # Numbers never go back: a checkpoint may know of more than a state that was lost, and two may acknowledge at once.
        if upto > standing.acknowledged:
            yield from self._advance(token, {"$max": {"n": upto, "claimed": upto}})
        return done

    def rollback(
        self, token: str, upto: int, error: BaseException | str | None = None
    ) -> Plan[None]:
        """Give back what is still held, each as ``Queue.rollback`` does."""
        held = yield from self.reservations(token, 0, upto)
        with suppress(LeaseLost):  # others took some in this very moment
            yield from self.backend.rollback(tuple(held), error=error)
        yield from self.acknowledge(token, upto)
