"""The packs that a process holds.

A claim takes a whole pack, and the process hands out its messages one after the other. So a process
never holds more than one pack beyond the need of its callers, apart from packs with a command in
flight. Once none of the handed-out messages is held, the rest of the pack goes back, or *rests*:
the process keeps it for a second, in case the next call comes soon. The claim then does not count
as a try.

Threads of a process share a pack. Each method is one step under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from threading import Lock, RLock
from typing import Any, Final, Literal, NamedTuple

from pyqueue.backends.bucket import packs
from pyqueue.backends.receiving import Claims
from pyqueue.backends.scan import Memory
from pyqueue.documents import trail_of
from pyqueue.facts import ErrorInfo
from pyqueue.messages import Id, Message, PackedReservation
from pyqueue.requests import Document

#: How a settlement ends the claim of a pack. "delete": nothing is left of it. "rest" and "return":
#: see above.
End = Literal["delete", "rest", "return"]
#: "busy": a command that ends or extends the claim is in flight. "gone": the process no longer
#: holds the pack.
State = Literal["held", "resting", "busy", "gone"]
#: Makes a message of a pack, from its place and its payload.
Make = Callable[[int, Any], Message[Any]]


#: The most documents that a claim takes.
_MAX_DOCUMENTS: Final = 100


class HeldPack:
    """One claim of a pack.

    Args:
        document: the pack, as the claim returned it.
        counted: whether ``tries`` of the document includes this claim.
        only: the bits of the messages to hand out. If None, the claim hands out a window, which is
            smaller after each claim that lapsed.
    """

    __slots__ = (
        "_busy",
        "_document",
        "_free",
        "_lock",
        "_out",
        "before",
        "claim",
        "counted",
        "done",
        "due",
        "first",
        "id",
        "level",
        "message_id",
        "size",
        "state",
        "token",
        "until",
    )

    def __init__(self, document: Document, counted: bool, *, only: int | None = None) -> None:
        self.id: Id = document["_id"]
        #: Makes the id of a message from its place.
        self.message_id: Callable[[int], str] = packs.naming(document)
        self.token: str = document["token"]
        self.claim = int(document["c"])
        self.size = len(document["b"])
        #: How many tries were counted before this claim.
        self.before = int(document["tries"]) - counted
        self.due: datetime = document["due"]
        self.until: datetime = document["when"]
        self.counted = counted
        #: The size of the window: 0 is the whole pack. It grows when claims lapse.
        self.level = packs.level_of(document)
        #: The bits of the messages that have left the pack.
        self.done = packs.done_of(document)
        #: The first place of the window.
        self.first = packs.first_place(self.alive) if self.alive else 0
        self.state: State = "held"
        #: The bits of messages to hand out, and of messages handed out but not settled.
        window = packs.window(self.size, self.alive, self.level)
        if only is not None:
            window = self.alive & only
        self._free = window or 0
        self._out = 0
        #: How many settlements are in flight.
        self._busy = 0
        self._document: Document | None = document
        self._lock = RLock()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: another process knows nothing of the rest of the pack."""
        return type(None), ()

    @property
    def alive(self) -> int:
        """A bit mask of the messages that are still in the pack."""
        return packs.full(self.size) & ~self.done

    def draw(self, most: int) -> tuple[int, Document] | None:
        """Hand out the first messages. Return their bits and the document of the pack."""
        with self._lock:
            if not self._free or self.state not in ("held", "resting") or self._document is None:
                return None
            rest = self._free
            for _ in range(min(most, rest.bit_count())):
                rest &= rest - 1  # clears the lowest bit
            taken = self._free & ~rest
            self._out |= taken
            self._free = rest
            document = self._document
            if not rest:
                self._document = None  # only ``put_back`` may need it again, and brings it along
            return taken, document

    def put_back(self, bits: int, document: Document) -> None:
        """Take back messages that no caller has seen."""
        with self._lock:
            if self.state != "gone":
                self._out &= ~bits
                self._free |= bits
                self._document = document

    @property
    def is_changing(self) -> bool:
        """Whether settlements are in flight."""
        return self._busy > 0

    @property
    def available(self) -> int:
        """How many messages there are to hand out, now or after a command in flight."""
        return self._free.bit_count()

    # ---- the lease

    def begin_extending(self) -> bool:
        """Record that an extension begins. Return False if another command is in flight."""
        with self._lock:
            if self.state not in ("held", "resting"):
                return False
            self.state = "busy"
            return True

    def extended(self, until: datetime, counted: bool) -> None:
        """Record the new end of the lease, and whether the claim counts a try."""
        with self._lock:
            self.state, self.until, self.counted = "held", until, counted

    # ---- settling

    def begin_whole(self, bits: int, *, alone: bool) -> bool:
        """Record the start of an update that ends the claim. Return False if it must not be sent.

        Args:
            bits: the messages that the caller holds.
            alone: whether these must be all messages left in the pack. If false, it is enough that
                no other message is handed out.
        """
        with self._lock:
            in_the_way = (self.alive if alone else self._out) & ~bits
            if self.state != "held" or self._busy or in_the_way:
                return False
            self.state = "busy"
            self._busy += 1
            return True

    def begin(self, bits: int | None) -> End | None:
        """Record that a settlement begins. Return how it ends the claim of the pack, if it does.

        It ends the claim if no other message of the pack is handed out or being settled.

        Args:
            bits: the messages, or None if new documents replace them and the claim continues.
        """
        with self._lock:
            end: End | None = None
            idle = self.state == "held" and not self._busy
            if bits is not None and idle and not self._out & ~bits:
                if not self.alive & ~bits:
                    end = "delete"
                else:
                    # With a level, only the next claim decides which messages are handed out.
                    end = "rest" if self._free and not self.level else "return"
                self.state = "busy"
            self._busy += 1
            return end

    def settled(self, bits: int, end: End | None, *, matched: bool) -> None:
        """Record how a settlement went.

        Args:
            bits: the messages that have left the pack, by this settlement or an earlier one.
            end: how it was to end the claim; the result of ``begin``.
            matched: whether its update matched. If not, the claim has not ended.
        """
        with self._lock:
            self._busy -= 1
            self.done |= bits
            self._out &= ~bits
            if end is None or self.state != "busy":
                return
            if not matched:
                self.state = "held"
            elif end == "rest":
                self.state = "resting"
            else:
                self.lose()

    def lose(self) -> None:
        """Record that the pack is no longer held, or perhaps no longer held."""
        with self._lock:
            self.state = "gone"
            self._free, self._out, self._document = 0, 0, None

    @property
    def is_idle(self) -> bool:
        """Whether the claim should end now: all messages that were handed out are settled."""
        with self._lock:
            return self.state == "held" and not self._busy and not self._out


class Drawn(NamedTuple):
    """Messages of one pack that a claim hands out."""

    hold: HeldPack
    bits: int
    document: Document


class Stock(Memory):
    """The packs of one queue from which a process can hand out messages."""

    def __init__(self) -> None:
        self._packs: list[HeldPack] = []
        self._lock = Lock()
        #: The most documents that the next claim takes.
        self._most = 1
        #: How many messages the largest document of the last claim had.
        self._largest = 1
        #: How receives claim from the queue, or None if no receive has begun.
        self.claims: Claims | None = None

    def wanted(self, need: int) -> int:
        """Return how many documents to claim for callers who need ``need`` messages."""
        return max(1, min(need // self._largest, self._most))

    def learn(self, largest: int, found: bool) -> None:
        """Learn from a claim how many documents the next claim takes.

        Claims grow as long as the next documents are likely to be of the same sort: packs, or
        ordinary messages.

        Args:
            largest: how many messages its largest document had; 1 if none was a pack.
            found: whether it found any document.
        """
        alike = found and (largest > 1) == (self._largest > 1)
        self._most = min(2 * self._most, _MAX_DOCUMENTS) if alike else 1
        self._largest = largest

    def add(self, hold: HeldPack) -> None:
        """Add a claimed pack."""
        with self._lock:
            self._packs.append(hold)

    def draw(self, most: int) -> Drawn | None:
        """Hand out messages of the first pack that has any."""
        with self._lock:
            for hold in list(self._packs):
                drawn = hold.draw(most)
                if not hold.available:
                    self._packs.remove(hold)
                if drawn is not None:
                    return Drawn(hold, *drawn)
        return None

    def put_back(self, drawn: Drawn) -> None:
        """Take back messages that no caller has seen."""
        with self._lock:
            drawn.hold.put_back(drawn.bits, drawn.document)
            if drawn.hold not in self._packs:  # ``draw`` removes a pack that has nothing left
                self._packs.append(drawn.hold)

    def surplus(self, need: int) -> Sequence[HeldPack]:
        """Remove and return idle packs, but keep enough for ``need`` messages."""
        with self._lock:
            kept: list[HeldPack] = []
            for hold in self._packs:
                if need <= 0 and hold.is_idle:
                    continue
                kept.append(hold)
                if hold.state != "busy":  # its command may wait for a transaction
                    need -= hold.available
            surplus = [hold for hold in self._packs if hold not in kept]
            self._packs = kept
            return surplus


def maker(drawn: Drawn, tries: int, lease: tuple[datetime, datetime, float] | None) -> Make:
    """Return the function that makes a message of a pack from its place and its payload.

    Args:
        drawn: the pack.
        tries: how many tries its messages have had.
        lease: the beginning, the end and the length of the lease of the reservations, or None if
            the messages are popped.
    """
    document, hold = drawn.document, drawn.hold
    entries, queue, owner = document["b"], document["q"], document.get("owner", "")
    due, pushed = document["due"], document["pushed"]
    error = ErrorInfo.of(document.get("error"))
    trail, token, pack = trail_of(document), hold.token, hold.id
    message_id, deliveries = hold.message_id, max(tries, int(document.get("deliveries", 0)))

    def make(place: int, payload: Any) -> Message[Any]:
        id = message_id(place)
        headers = entries[place].get("h") or {}
        own = list(trail)
        # By position, which is faster. The message has no key, no progress and no checkpoint.
        common = (id, queue, payload, headers, None, due, pushed, tries, error, None, None, own)
        if lease is None:
            return Message(*common, "ready", None, deliveries=deliveries)
        reserved, until, lease_s = lease
        held = (token, until, owner, lease_s, pack, place, hold)
        return PackedReservation(
            *common, "reserved", None, *held, deliveries=deliveries, reserved=reserved
        )

    return make
