"""Packs: how the holder of messages ends its claims and extends their leases.

One update settles the messages of one pack. Concurrent calls for one pack share their updates. Once
all messages that the process handed out are settled, the same update returns the other messages of
the pack to the queue. ``leaving`` contains the settlements that take a message out of its pack.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pyqueue.backends import transitions
from pyqueue.backends.applying import check_time_left, raise_lost
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.stock import End, HeldPack
from pyqueue.backends.extending import lost_lease
from pyqueue.backends.forms import Extension, Failures
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.kind import Kind
from pyqueue.errors import TimedOut, Unavailable
from pyqueue.messages import Id, PackedReservation
from pyqueue.requests import Coalesce, Delete, Filter, Find, Plan, ServerTime, Signal, Update

#: How long a process keeps a pack after it has settled all the messages it handed out.
REST: Final = timedelta(seconds=1)
#: The fields that show whether a pack is resting: it has a token, but its last claim has ended.
REST_FIELDS: Final = MappingProxyType(dict.fromkeys(("token", "c", "orderly", "due"), 1))
#: How many times a settlement is tried. Each retry means that another settlement came first.
_MAX_ROUNDS: Final = 20

Held = Sequence[PackedReservation[Any]]


class Group(NamedTuple):
    """Messages of one pack that the same claim holds."""

    queue: str
    kind: Kind
    pack: Id
    token: str
    #: A bit mask of the messages.
    bits: int
    hold: HeldPack | None

    @property
    def fence(self) -> dict[str, Any]:
        """The filter that matches the pack if the claim still holds these messages."""
        return {"_id": self.pack, "token": self.token, **packs.having(self.bits)}


def by_pack(queue: str, kind: Kind, held: Held) -> list[tuple[Group, Held]]:
    """Divide reservations by pack and claim. Return each ``Group`` with its reservations."""
    groups: list[tuple[Group, Held]] = []
    for (pack, token), some in _by_claim(held).items():
        bits = packs.bits_set([each.place for each in some])
        hold = some[0].hold
        known = hold if isinstance(hold, HeldPack) else None  # None after pickling
        groups.append((Group(queue, kind, pack, token, bits, hold=known), some))
    return groups


def _by_claim(held: Held) -> dict[tuple[Id, str], list[PackedReservation[Any]]]:
    """Divide reservations by pack and token."""
    members: dict[tuple[Id, str], list[PackedReservation[Any]]] = {}
    for each in held:
        claim = each.pack, each.token
        if claim in members:
            members[claim].append(each)
        else:
            members[claim] = [each]
    return members


def unknown_end(error: Unavailable, rest: Held) -> Unavailable:
    """Return the error for a call after which it is unknown whether these messages are settled."""
    text = str(error)
    if isinstance(error, TimedOut):
        text += (
            "; if a transaction has settled another message of the pack, the whole pack waits "
            "until the transaction ends, so settle packed messages of one claim in one transaction"
        )
    return Unavailable(text, ids=[each.id for each in rest])


def still_held(group: Group, session: object = None) -> Plan[int]:
    """Return a mask of the messages that the claim still holds. Note in ``hold`` if it is lost."""
    fields = {"token": 1, "done": 1}
    found = yield from Find({"_id": group.pack}, fields, limit=1, session=session)
    if not found or found[0].get("token") != group.token:
        if group.hold:
            group.hold.lose()
        return 0
    return group.bits & ~packs.done_of(found[0])


# ---- commit


def commit(queue: str, kind: Kind, held: Held, session: object = None) -> Plan[None]:
    """Finish messages.

    In a transaction, the other messages of the pack stay held until the lease ends, because the
    transaction may be aborted.
    """
    lost: list[PackedReservation[Any]] = []
    if session is not None:
        now = yield from ServerTime()
        for each in held:
            check_time_left(each, now)
    groups = by_pack(queue, kind, held)
    for number, (group, members) in enumerate(groups):
        try:
            if session is not None:
                missing = yield from _settle(group._replace(hold=None), session)
            elif len(groups) == 1:
                key = ("settle pack", queue, group.pack, group.token)
                batch = partial(_finish_each, group)
                missing = yield from Coalesce(key, group.bits, batch, max_in_flight=1, threads=True)
            else:
                missing = yield from finish(group)
        except Unavailable as error:
            rest = [each for _, some in groups[number:] for each in some]
            raise unknown_end(error, rest) from error
        if missing:
            lost += at_bits(members, missing)
    raise_lost(queue, len(held), lost)


def at_bits(members: Held, bits: int) -> list[PackedReservation[Any]]:
    """Return the reservations whose messages are set in the bit mask ``bits``."""
    return [each for each in members if bits >> each.place & 1]


def _finish_each(group: Group, calls: Sequence[int]) -> Plan[list[int]]:
    """Finish messages of one claim for several callers. ``calls``: the bit mask of each caller.

    Return a bit mask of the messages that each caller lost. If several callers finish the same
    message, it counts as lost for all but the first of them.
    """
    together = 0
    repeated: list[int] = []
    for bits in calls:
        repeated.append(together & bits)
        together |= bits
    lost = yield from finish(group._replace(bits=together))
    return [bits & lost | again for bits, again in zip(calls, repeated, strict=True)]


def finish(group: Group) -> Plan[int]:
    """Finish messages of one claim. Return a bit mask of the messages no longer held."""
    lost = yield from _settle(group, None)
    yield from end_claim(group)  # if concurrent settlements kept ``_settle`` from ending it
    return lost


def _settle(group: Group, session: object) -> Plan[int]:
    """Mark messages as done. Return a bit mask of the messages that were no longer held."""
    hold, lost = group.hold, 0
    for _ in range(_MAX_ROUNDS):
        end = hold.begin(group.bits) if hold else None
        try:
            matched = yield from _set_bits(group, end, session)
        except BaseException:
            if hold:
                hold.lose()  # the lease ends the claim
            raise
        if matched:
            if hold:
                hold.settled(group.bits, end, matched=True)
            return lost
        still = yield from still_held(group, session)
        if hold:
            hold.settled(group.bits & ~still, end, matched=False)
        lost |= group.bits & ~still
        group = group._replace(bits=still)
        if not still:
            return lost
    raise Unavailable(f"pack {group.pack} of queue {group.queue!r} keeps changing; try again")


def _set_bits(group: Group, end: End | None, session: object) -> Plan[bool]:
    """Send one update that settles messages. ``end`` says whether and how it ends the claim.

    Return False, and change nothing, if the claim no longer holds all these messages.
    """
    hold, fence = group.hold, group.fence
    if hold is not None and end == "delete":
        nothing_else = {"n": group.bits.bit_count(), HANDED: []}
        if (yield from Delete(fence | nothing_else)):
            return True
        end = None  # the pack may still list copies to publish
    if hold is None or end is None:
        update = packs.setting(group.bits)
        matched = (yield from Update(fence, update, session=session)).matched
        if matched and session is None:
            yield from _delete_empty(group, hold)
        return bool(matched)
    return (yield from _return_pack(group, hold, fence, group.bits, end))


def emptied(pack: Id, token: str) -> Filter:
    """Return the filter that matches a pack with no messages left and no copies left to publish."""
    return {"_id": pack, "token": token, "n": 0, HANDED: []}


def _delete_empty(group: Group, hold: HeldPack | None) -> Plan[None]:
    """Delete the pack if it has no message left. Skip the command if one is known to be left."""
    if hold is None or not hold.alive & ~group.bits:
        yield from Delete(emptied(group.pack, group.token))


# ---- the end of a claim


def end_claim(group: Group) -> Plan[None]:
    """End the claim of a pack if all messages that this process handed out are settled."""
    hold = group.hold
    while hold is not None and hold.is_idle:
        end = hold.begin(0)
        if end is None:
            hold.settled(0, None, matched=True)
            return
        try:
            if end == "delete":
                yield from Delete(emptied(group.pack, group.token))
                matched = True
            else:
                fence = group._replace(bits=0).fence
                matched = yield from _return_pack(group, hold, fence, 0, end)
        except Unavailable:
            return hold.lose()  # the lease ends the claim
        except BaseException:
            hold.lose()
            raise
        hold.settled(0, end, matched=matched)
        if not matched:
            hold.lose()


def _return_pack(
    group: Group, hold: HeldPack, match: Mapping[str, Any], bits: int, end: End
) -> Plan[bool]:
    """End the claim of a pack with one update. Return whether the update matched.

    Args:
        group: The messages of the pack that the claim holds.
        hold: This process's record of the claim.
        match: A filter that matches the pack as long as the claim holds it.
        bits: A bit mask of the messages that the same update settles.
        end: "rest" to keep the pack in this process for a second, "return" to free it at once.
    """
    now = yield from ServerTime()
    when = now + REST if end == "rest" else hold.due
    update = _ending(hold, bits, when, rests=end == "rest")
    if not (yield from Update(match, update)).matched:
        return False
    yield from Signal(group.queue, when)
    return True


def _ending(
    hold: HeldPack, bits: int, when: datetime, *, rests: bool, counts: bool = False
) -> dict[str, dict[str, Any]]:
    """Return the update that ends the claim of a pack, so that the claim never counts as lapsed.

    Args:
        hold: This process's record of the claim.
        bits: A bit mask of the messages that leave the pack.
        when: When the pack can be claimed again.
        rests: Whether this process keeps the pack until ``when``.
        counts: Whether the claim still counts as a try.
    """
    update = packs.setting(bits)
    update["$set"] = {"when": when, "orderly": hold.claim}
    if hold.counted and not counts:
        update["$inc"] = {**update.get("$inc", {}), "tries": -1}
    if not rests:
        alive = hold.alive & ~bits
        level = packs.next_level(hold.size, hold.first, alive, hold.level)
        update["$set"] |= {"level": level}
        update["$unset"] = transitions.unset(*transitions.HELD_FIELDS)
    return update


def end_rest(queue: str, document: Mapping[str, Any]) -> Plan[bool]:
    """Free a pack that a process keeps without holding any of its messages.

    Return whether this call freed the pack.

    Args:
        queue: The name of the queue of the pack.
        document: The pack. Only the fields in ``REST_FIELDS`` are read.
    """
    if "token" not in document or document.get("orderly") != document.get("c"):
        return False  # it does not rest
    resting = {name: document[name] for name in ("_id", "token", "c", "orderly")}
    put = {"$set": {"when": document["due"]}, "$unset": transitions.unset(*transitions.HELD_FIELDS)}
    if not (yield from Update(resting, put)).matched:
        return False
    yield from Signal(queue, document["due"])
    return True


def give_back(group: Group) -> Plan[bool]:
    """Return a whole pack to the queue, with these messages in place. Do not count the try.

    Return False if that is impossible, because the process holds other messages of the pack, or no
    longer holds these messages.
    """
    hold = group.hold
    if hold is None or not hold.begin_whole(group.bits, alone=False):
        return False
    try:
        matched = yield from _return_pack(group, hold, group.fence, 0, "return")
    except BaseException:
        hold.lose()
        raise
    hold.settled(0, "return", matched=matched)
    return matched


def roll_back_whole(
    group: Group, delay_s: float, error: Mapping[str, Any] | None, *, counted: bool
) -> Plan[bool]:
    """Return a whole pack to the queue, so that its messages wait in it for another try.

    Return False, and change nothing, unless the group contains all messages left in the pack and
    no other settlement of the pack is in flight.
    """
    now = yield from ServerTime()
    hold = group.hold
    if hold is None or not hold.begin_whole(group.bits, alone=True):
        return False
    when = now + timedelta(milliseconds=round(delay_s * 1000))
    update = _ending(hold, 0, when, rests=False, counts=counted)
    update["$set"] |= {"due": when} | ({} if error is None else {"error": error})
    try:
        match = group.fence | {"n": group.bits.bit_count()}
        matched = bool((yield from Update(match, update)).matched)
    except BaseException:
        hold.lose()
        raise
    hold.settled(0, "return", matched=matched)
    if matched:
        yield from Signal(group.queue, when)
    return matched


# ---- leases


def extend(held: Held, how: Extension) -> Plan[Failures]:
    """Extend leases, with one command per pack. Return each reservation that failed, and why.

    The stored lease of a pack is never shortened, because its other messages may be held, too.
    """
    try:
        lost = yield from _extend_each(held, how.lease_s, w1=how.w1)
    except Unavailable as error:
        named = unknown_end(error, held)
        return [(each, named) for each in held]
    return [(each, lost_lease(each)) for each in lost]


def _extend_each(held: Held, lease_s: float | None, *, w1: bool) -> Plan[Held]:
    """Extend leases, pack by pack. Return the reservations that were no longer held.

    ``lease_s``: the new length in seconds, or None if each lease keeps its length.
    """
    lost: list[PackedReservation[Any]] = []
    for (pack, token), some in _by_claim(held).items():
        now = yield from ServerTime()
        length_s = max(each.lease for each in some) if lease_s is None else lease_s
        until = now + timedelta(seconds=length_s)
        todo = some
        while todo:
            bits = packs.bits_set([each.place for each in todo])
            match = {"_id": pack, "token": token, **packs.having(bits)}
            if (yield from Update(match, {"$max": {"when": until}}, w1=w1)).matched:
                break
            found = yield from Find({"_id": pack}, {"token": 1, "done": 1}, limit=1)
            same = found and found[0].get("token") == token
            still = bits & ~packs.done_of(found[0]) if same else 0
            lost += at_bits(todo, bits & ~still)
            todo = at_bits(todo, still)
        for each in todo:
            each.lease = each.lease if lease_s is None else lease_s
            each.until = now + timedelta(seconds=each.lease)
    return lost
