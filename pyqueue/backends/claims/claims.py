"""Named claims: many messages under one lease, for a group that claims, reads and finishes them.

A group is the durable name of one consumer, such as a Spark query. Its claims are numbered. Each
document of claim n stores the group, n and the token of the runner, so that readers in any process
can find their part, and a restarted runner finds the messages it claimed. ``groups`` stores the
runner and the progress of the group. A runner that takes over the group writes a new token. From
then on, the former runner writes nothing, and its calls raise ``Fenced``.

A document is one message or contains several; see ``contents``. A claim takes whole documents.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Final, Literal, overload

from bson import ObjectId

from pyqueue.backends import managing, namespace, reading, transitions
from pyqueue.backends.bulk.raw_documents import FindEncoded
from pyqueue.backends.claims import acknowledging
from pyqueue.backends.claims.admitting import (
    admit,
    bury_unclaimable,
    check_limit,
    first_ready,
    valid_ids,
)
from pyqueue.backends.claims.groups import Candidate, ClaimGroup, holding
from pyqueue.backends.contents import NOTE, TRIED
from pyqueue.backends.limits.permits import Permits
from pyqueue.backends.namespace import CLAIMS
from pyqueue.concurrently import concurrently
from pyqueue.errors import Fenced, InvalidMessage, LeaseLost
from pyqueue.limits import WHOLE_QUEUE, FollowedLimit, limit_or_none
from pyqueue.messages import Id, Reservation
from pyqueue.requests import Document, Find, Plan, ServerTime, Update

#: The maximum number of documents that one command claims or marks.
STAMP: Final = 5000


@dataclass(frozen=True, slots=True)
class ClaimRange:
    """A part of the documents that the claims ``after + 1`` to ``upto`` hold, for one reader."""

    token: str
    after: int
    upto: int
    #: The ids of its documents, as ranges that include both ends; no ranges mean all ids. A range
    #: contains only ids of one type, so ids of both types need two ranges.
    ranges: tuple[tuple[Id, Id], ...]


def id_order(id: Id) -> tuple[bool, Any]:
    """Return the sort key that puts ids in the order of the server."""
    return isinstance(id, ObjectId), id


def divided(ids: Iterable[Id], parts: int) -> list[tuple[tuple[Id, Id], ...]]:
    """Divide ids into up to ``parts`` parts of nearly equal size. Return each part as ranges."""
    ordered = sorted(ids, key=id_order)
    pieces = min(parts, len(ordered))
    cuts = [len(ordered) * piece // pieces for piece in range(pieces + 1)] if pieces else []
    divisions = []
    for first, end in pairwise(cuts):
        types: dict[bool, list[Id]] = {}
        for id in ordered[first:end]:
            types.setdefault(isinstance(id, ObjectId), []).append(id)
        divisions.append(tuple((same[0], same[-1]) for same in types.values()))
    return divisions


class NamedClaims(ClaimGroup):
    """The operations of one claim group of a queue. Instances can be pickled.

    Args:
        backend: Builds the plans (sequences of commands) for the queue.
        group: The name of the group.
        member: The number of the member, or None if the group has no members.
    """

    __slots__ = ()

    # ---- claiming

    def adopt(
        self, lease_s: float, candidate: Candidate | None = None, *, count: bool = True
    ) -> Plan[str]:
        """Take over the group and its outstanding messages; see ``ClaimGroup.adopt``.

        Also bury invalid documents of the last claim, in case the last runner died before it could.
        """
        token = yield from super().adopt(lease_s, candidate, count=count)
        yield from admit(self.backend, {"claim.g": self.tag, "token": token}, lease_s)
        return token

    def has_work(self) -> Plan[bool]:
        """Return whether messages are outstanding, or ready in a queue that is not paused."""
        queue = self.backend.queue
        progress = yield from self.progress()
        if progress.claimed > progress.acknowledged:
            return True
        return (yield from reading.due_in(queue)) == 0 and not (yield from managing.paused(queue))

    def claim(
        self,
        token: str,
        limit: int,
        lease_s: float,
        *,
        since: datetime | None = None,
        max_bytes: int | None = None,
    ) -> Plan[int | None]:
        """Claim ready messages for ``lease_s`` seconds, up to ``limit`` of them.

        The messages of the last document may exceed the limit. Messages that were claimed too often
        are buried instead.

        Args:
            token: The token of the runner.
            limit: The maximum number of messages to claim.
            lease_s: The length of the lease, in seconds.
            since: Claim only messages that were ready at this instant; None means now.
            max_bytes: The maximum size of all documents in bytes, or None. The first document
                may exceed it.

        Returns:
            The number of the claim, or None if the queue is paused or no message can be claimed.

        Raises:
            Fenced: Another process runs the group now, and this claim holds no message.
        """
        backend, followed = self.backend, FollowedLimit()
        while True:
            progress = yield from self.progress(token)
            flags = yield from namespace.flags(backend.queue)
            if flags.get("paused"):
                return None
            followed.limit = limit_or_none(backend.queue, flags.get("shape"))
            check_limit(backend.queue, backend.kind, followed.limit)
            now = yield from ServerTime()
            upto = now if since is None else min(now, since)
            found = yield from first_ready(backend, limit, upto, max_bytes)
            if not found:
                return None
            ids = yield from valid_ids(backend, found, now)
            if not ids:
                continue
            permits = Permits(backend.queue, followed)
            ids = ids[: (yield from permits.number(len(ids), now))]
            if not ids:
                return None
            n = progress.claimed + 1
            next_claim = {"$set": {"claimed": n, "adopted": 0}}  # no takeover has counted yet
            yield from self._advance(token, next_claim, claimed=progress.claimed)
            stamped = yield from self._stamp(ids, n, token, lease_s, permits.until)
            yield from permits.give_back_unused({WHOLE_QUEUE: stamped})
            mine = self._mine(token, n - 1, n)
            yield from admit(backend, mine, lease_s, backend.options.max_tries, new=True)
            if (yield from Find(mine, {"_id": 1}, limit=1, hint=CLAIMS)):
                return n
            # All of them were claimed by other processes or buried, or the permits had expired.
            if progress.claimed == progress.acknowledged:
                yield from self._advance(token, {"$max": {"n": n}})  # acknowledges the empty claim

    def begin(
        self, limit: int, lease_s: float, *, max_bytes: int | None = None
    ) -> Plan[tuple[str, int, list[Id]]]:
        """Take over the group and its outstanding messages. If there are none, claim new messages.

        Returns:
            The token, the number of the last claim, and the ids of its messages.
        """
        token = yield from self.adopt(lease_s)
        return token, *(yield from self.proceed(token, limit, lease_s, max_bytes=max_bytes))

    def proceed(
        self, token: str, limit: int, lease_s: float, *, max_bytes: int | None = None
    ) -> Plan[tuple[int, list[Id]]]:
        """Return the outstanding messages. If there are none, claim new messages.

        Returns:
            The number of the last claim, and the ids of its messages.

        Raises:
            Fenced: Another process runs the group now.
        """
        progress = yield from self.progress(token)
        if progress.done > progress.acknowledged:  # the last ``finish`` was cut short
            yield from self.acknowledge(token, progress.done)
            progress = yield from self.progress(token)
        if progress.claimed > progress.acknowledged:  # some claims are outstanding
            ids = yield from self.ids(token, progress.acknowledged, progress.claimed)
            if ids:
                return progress.claimed, ids
            # Other processes took all outstanding messages, or this group has settled all of them.
            yield from self.acknowledge(token, progress.claimed)
        n = yield from self.claim(token, limit, lease_s, max_bytes=max_bytes)
        if n is None:
            return progress.claimed, []
        return n, (yield from self.ids(token, n - 1, n))

    def _stamp(
        self, ids: Sequence[Id], n: int, token: str, lease_s: float, until: datetime | None
    ) -> Plan[int]:
        """Claim the documents that are still free, as claim ``n``, with concurrent commands.

        Args:
            ids: The ids of documents that were free.
            n: The number of the claim.
            token: The token of the runner.
            lease_s: The length of the lease, in seconds.
            until: When the permits to start messages expire, or None if no permit is needed.

        Returns:
            An upper bound on the number of claimed documents.

        Raises:
            Fenced: Another process runs the group now, and this claim holds no message.
        """
        stamped = yield from concurrently(
            [
                self._stamp_some(ids[start : start + STAMP], n, token, lease_s, until)
                for start in range(0, len(ids), STAMP)
            ]
        )
        try:
            yield from self.progress(token)  # raises Fenced if another process has taken over
        except Fenced:
            # The new runner does not know of messages claimed after its takeover: give them back.
            held = yield from self.reservations(token, n - 1, n)
            with suppress(LeaseLost):
                yield from self.backend.release(tuple(held))
            raise
        return sum(stamped)

    def _stamp_some(
        self, ids: Sequence[Id], n: int, token: str, lease_s: float, until: datetime | None
    ) -> Plan[int]:
        """Claim the documents that are still free, with one command; see ``_stamp``."""
        now = yield from ServerTime()
        still = transitions.still_claimable(self.backend.queue, ids, now, until)
        update = self.backend.kind.claiming(
            holding(self.backend.terms.owner(), token, now, lease_s)
        )
        update["$set"]["claim"] = {"g": self.tag, "n": n}  # readers find the documents by these
        try:
            return (yield from Update(still, update, many=True)).matched
        except InvalidMessage as error:
            # The server refused a document of another program. Divide the ids to find and bury it.
            if len(ids) == 1:
                yield from bury_unclaimable(self.backend, {**still, "_id": ids[0]}, error, now)
                return 0
            half = len(ids) // 2
            yield from self._stamp_some(ids[:half], n, token, lease_s, until)
            yield from self._stamp_some(ids[half:], n, token, lease_s, until)
            return len(ids)  # the refused command may have claimed some of them

    # ---- held messages

    def _mine(self, token: str, after: int, upto: int) -> dict[str, object]:
        """Return the filter that matches documents of claims ``after + 1`` to ``upto``."""
        return {"claim.g": self.tag, "claim.n": {"$gt": after, "$lte": upto}, "token": token}

    def ids(self, token: str, after: int, upto: int) -> Plan[list[Id]]:
        """Return the ids of the messages held by the claims ``after + 1`` to ``upto``."""
        contents = self.contents
        found = yield from Find(self._mine(token, after, upto), contents.named, hint=CLAIMS)
        return [id for each in found for id in contents.ids(each)]

    def sizes(self, token: str, after: int, upto: int) -> Plan[dict[Id, int]]:
        """Return the number of messages in each document that claims in this range hold."""
        contents = self.contents
        found = yield from Find(self._mine(token, after, upto), contents.sized, hint=CLAIMS)
        return {each["_id"]: contents.size(each) for each in found}

    def reservations(
        self, token: str, after: int, upto: int, *, noted: bool = True
    ) -> Plan[list[Reservation[Any]]]:
        """Return the messages held by claims in this range, as reservations without payloads.

        If ``noted`` is false, messages that are noted as bad are left out.
        """
        contents = self.contents
        found = yield from Find(self._mine(token, after, upto), contents.bare, hint=CLAIMS)
        now = yield from ServerTime()
        return [one for each in found for one in contents.reservations(each, now, noted=noted)]

    def mark(self, token: str, ids: Sequence[Id], number: int) -> Plan[None]:
        """Note in held messages that work on them begins. The end of the claim removes the note.

        ``number``: the number to note, which identifies the part of the batch with the messages.
        """
        mine = {"claim.g": self.tag, "token": token}
        shared = yield from self.contents.find_shared(mine, ids)
        alone = [id for id in ids if id not in shared]
        for start in range(0, len(alone), STAMP):
            some = {"_id": {"$in": alone[start : start + STAMP]}, **mine}
            yield from Update(some, {"$set": {TRIED: number}}, many=True)
        notes: dict[Id, dict[str, int]] = {}
        for spot in shared.values():
            notes.setdefault(spot.document, {})[spot.field(TRIED)] = number
        for document, fields in notes.items():
            yield from Update({"_id": document, **mine}, {"$set": fields})

    def marks(self, token: str, upto: int) -> Plan[dict[Id, int]]:
        """Return the number that ``mark`` last noted in each held message, by message id."""
        contents = self.contents
        marked = self._mine(token, 0, upto) | {TRIED: {"$exists": True}}
        found = yield from Find(marked, {**contents.named, "claim": 1}, hint=CLAIMS)
        marks: dict[Id, int] = {}
        for each in found:
            marks |= contents.by_id(each, each["claim"]["tried"])
        return marks

    def begin_work(self, token: str, n: int) -> Plan[None]:
        """Store that a stage begins to work on claim ``n`` of a streaming query.

        If the stage had already begun work on this claim, this counts as one more try and removes
        the notes of bad records.
        """
        not_begun = {"_id": self.id, "token": token, "begun": {"$ne": n}}
        if not (yield from Update(not_begun, {"$set": {"begun": n}})).matched:
            one_more_try: dict[str, dict[str, object]] = {
                "$inc": dict.fromkeys(transitions.COUNTS, 1),
                "$unset": {NOTE: ""},
            }
            yield from Update(self._mine(token, 0, n), one_more_try, many=True)

    def note_bad(self, token: str, n: int, reasons: Mapping[Id, str | None]) -> Plan[None]:
        """Note which messages of claims up to ``n`` a reader cannot convert, with the reasons.

        The acknowledgement buries these messages. A reason of None removes an earlier note.

        Raises:
            Fenced: Another process runs the group now.
        """
        held = {"claim.g": self.tag, "token": token}
        if (yield from acknowledging.note(self.contents, held, reasons)):
            yield from self._advance(token, {"$max": {"bad": n}})

    def ranges(self, token: str, after: int, upto: int, parts: int) -> Plan[list[ClaimRange]]:
        """Divide the documents held by claims in this range among up to ``parts`` readers."""
        documents = yield from self.sizes(token, after, upto)
        return [ClaimRange(token, after, upto, ranges) for ranges in divided(documents, parts)]

    @overload
    def read(self, part: ClaimRange) -> Plan[list[Document]]: ...

    @overload
    def read(self, part: ClaimRange, *, encoded: Literal[True]) -> Plan[list[bytes]]: ...

    def read(
        self, part: ClaimRange, *, encoded: bool = False
    ) -> Plan[list[Document]] | Plan[list[bytes]]:
        """Return the stored documents of a part.

        Args:
            part: Which of the documents to return; see ``ranges``.
            encoded: Whether to return them in BSON.

        Raises:
            Fenced: Another process runs the group now.
        """
        ids: list[dict[str, object]] = [
            {"_id": {"$gte": least, "$lte": most}} for least, most in part.ranges
        ]
        match = self._mine(part.token, part.after, part.upto)
        if ids:
            match |= ids[0] if len(ids) == 1 else {"$or": ids}
        find = Find(match, hint=CLAIMS)
        found = (yield from FindEncoded(find)) if encoded else (yield from find)
        yield from self.progress(part.token)  # after a takeover, some documents may be missing
        return found

    def renew(self, token: str, lease_s: float) -> Plan[None]:
        """Hold all outstanding messages for ``lease_s`` seconds from now.

        Raises:
            Fenced: Another process runs the group now.
        """
        now = yield from ServerTime()
        held = {"claim.g": self.tag, "token": token}
        until = {"$set": {"when": now + timedelta(seconds=lease_s)}}
        if not (yield from Update(held, until, many=True)).matched:
            yield from self.progress(token)  # raises Fenced, unless the group holds no message

    # ---- settling

    def finish(self, token: str, upto: int) -> Plan[int]:
        """Acknowledge the claims up to ``upto``, after all work on their messages is done.

        This first stores that the work is done. If the process then dies while the server deletes
        the messages, the next runner deletes the remaining messages and does not repeat the work.

        Raises:
            Fenced: Another process runs the group now. Its messages are unchanged.
        """
        yield from self._advance(token, {"$max": {"done": upto}})
        return (yield from self.acknowledge(token, upto))

    def acknowledge(self, token: str, upto: int, held: int | None = None) -> Plan[int]:
        """Finish the messages that claims up to ``upto`` still hold, and bury those noted as bad.

        Args:
            token: The token of the runner.
            upto: The number of the last claim.
            held: How many messages the runner has read since the last acknowledged claim, or None
                if that is unknown. Messages that are no longer held count as lost.

        Returns:
            How many messages were finished or buried. If an earlier call acknowledged these claims,
            this is 0, and nothing is written.

        Raises:
            Fenced: Another process runs the group now. Its messages are unchanged.
        """
        progress = yield from self.progress(token)
        if upto <= progress.acknowledged:
            return 0
        terms = self.backend.terms
        now = yield from ServerTime()
        match = {"claim.g": self.tag, "claim.n": {"$lte": upto}, "token": token}
        buried = 0
        if progress.bad > progress.acknowledged:
            buried = yield from acknowledging.bury_noted(terms, match, now)
        settled = buried + (yield from acknowledging.finish(terms, match, now))
        # Messages that were taken and not settled count as lost. A stage of a streaming query
        # settles its messages one by one, so for a stage, no message counts as lost.
        taken = settled if held is None or progress.begun >= upto else held
        # Numbers never go back, because a checkpoint may know later claims than a state that was
        # lost. Two processes may acknowledge at once. Each counts the messages that it settled, but
        # only one of them counts the messages that were taken.
        counts = {"settled": settled, "buried": buried}
        advance = {"$max": {"n": upto, "claimed": upto}, "$inc": counts | {"taken": taken}}
        behind = {"_id": self.id, "token": token, "n": {"$lt": upto}}
        if not (yield from Update(behind, advance)).matched:
            yield from self._advance(token, {"$inc": counts})
        return settled

    def rollback(
        self,
        token: str,
        upto: int,
        error: BaseException | str | None = None,
        *,
        tried: bool = True,
        pieces: int = 1,
    ) -> Plan[list[Reservation[Any]]]:
        """Return the messages that are still held to the queue, as ``Queue.rollback`` does.

        Args:
            token: The token of the runner.
            upto: The number of the last claim.
            error: The error that the messages store, or None to store no new error.
            tried: Whether work on them was tried. If not, release them as ``Queue.release`` does.
            pieces: How many parts to divide the messages into. Messages of different parts then no
                longer share a document, so that the next claims can be smaller.

        Returns:
            The messages that went back to the queue, as reservations without payloads.
        """
        every = yield from self.reservations(token, 0, upto)
        size, taken = max(1, -(-len(every) // pieces)), set[Id]()
        for start in range(0, len(every), size):
            held = tuple(every[start : start + size])
            try:
                if tried:
                    yield from self.backend.rollback(held, error=error)
                else:
                    yield from self.backend.release(held)
            except LeaseLost as lost:  # another process took some of them just now
                taken.update(each.id for each in (*lost.lost, *lost.unknown))
        yield from self.acknowledge(token, upto)
        return [each for each in every if each.id not in taken]


def forget_tries(claims: NamedClaims, token: str) -> Plan[None]:
    """Set the number of tries of a runner's messages to 1, as if this try were the first."""
    held = {"claim.g": claims.tag, "token": token}
    yield from Update(held, {"$set": {"tries": 1}}, many=True)
