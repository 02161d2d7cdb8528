"""Packs: hold some messages of a pack for a moment, as a consumer does, to change them.

The pack is claimed as a consumer claims it, but the try is not counted. When the messages are
settled, the other messages of the pack go back to the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, cast

from pyqueue.backends import transitions
from pyqueue.backends.applying import raise_lost
from pyqueue.backends.bucket import packs
from pyqueue.backends.bucket.leaving import Make, leave
from pyqueue.backends.bucket.settling import Group, Held, at_bits, by_pack, end_claim, end_rest
from pyqueue.backends.bucket.stock import Drawn, HeldPack, maker
from pyqueue.backends.handover import finish
from pyqueue.backends.hidden import HANDED
from pyqueue.backends.managing import as_read
from pyqueue.backends.options import QueueTerms
from pyqueue.facts import as_stored
from pyqueue.messages import PackedReservation
from pyqueue.requests import Document, FindAndModify, Plan, ServerTime

#: How long the pack is held, in seconds. If the process dies, its messages wait that long.
_LEASE_S: Final = 30.0


def hold(terms: QueueTerms, pack: Document, places: Sequence[int]) -> Plan[Held]:
    """Claim messages of a pack. Return [] if the pack has changed or a consumer holds it.

    Args:
        terms: The queue, its options, and the label that its claims carry.
        pack: The pack document as it was read. Its ``token`` is removed if its claim has ended.
        places: The places of the messages. Messages that have left the pack are skipped.
    """
    if (yield from end_rest(terms.queue, pack)):  # a process kept it, but held no message
        del pack["token"]
    now = yield from ServerTime()
    if transitions.is_held(pack, now):
        return []
    claim = transitions.claiming(now, _LEASE_S, terms.owner(), count=False)
    match = as_read(terms.queue, pack, now)
    claimed = yield from FindAndModify(match, terms.kind.claiming(claim))
    if claimed is None:
        return []
    pack.pop("token", None)
    if claimed.get(HANDED):
        yield from finish(claimed)  # publishes copies that a former holder handed over
    held = HeldPack(claimed, False, only=packs.bits_set(places))
    if (drawn := held.draw(held.size)) is None:  # all these messages have left the pack
        yield from end_claim(Group(terms.queue, terms.kind, held.id, held.token, 0, hold=held))
        return []
    lease = (now, now + timedelta(seconds=_LEASE_S), _LEASE_S)
    make = maker(Drawn(held, *drawn), held.before, lease)
    made = [make(place, None) for place in packs.places(drawn[0])]
    return cast("list[PackedReservation[Any]]", made)  # because there is a lease


def requeue(terms: QueueTerms, held: Held, at: datetime | None) -> Plan[None]:
    """Take messages out of their pack. They become ready at ``at``, or now if ``at`` is None.

    Raises:
        LeaseLost: Some messages were no longer held; the other messages are requeued.
    """
    [(group, _)] = by_pack(terms.queue, terms.kind, held)

    def make(each: PackedReservation[Any]) -> Make:
        more: Document = {"tries": each.tries, "deliveries": each.deliveries}
        if each.error is not None:
            more["error"] = as_stored(each.error)

        def waiting(stored: Document, now: datetime) -> Document:
            return stored | terms.kind.entering(terms.queue, at or now) | more

        return waiting

    leavers = [(each.place, make(each)) for each in held]
    lost, unknown = yield from leave(group, leavers, together=True)
    raise_lost(terms.queue, len(held), at_bits(held, lost), at_bits(held, unknown))
