"""The packs that a process holds.

A claim takes a whole pack, and the process hands out its messages one after the other. A process
holds at most one pack beyond the need of its callers, apart from packs with a command in flight.
Once all messages that were handed out are settled, the other messages of the pack go back, or the
pack *rests*: the process keeps it for a second, in case another call comes soon. In both cases, the
claim does not count as a try for those messages.

Threads of a process share a pack. Each method holds a lock, so it is one step for other threads.
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

#: How a settlement ends the claim of a pack: it deletes an empty pack, keeps the pack for a second
#: ("rest"), or gives it back to the queue ("return").
End = Literal["delete", "rest", "return"]
#: "busy": a command that ends or extends the claim is in flight. "gone": the process no longer
#: holds the pack.
State = Literal["held", "resting", "busy", "gone"]
#: Makes a message of a pack, from its place and its payload.
Make = Callable[[int, Any], Message[Any]]


#: The maximum number of documents that a claim takes.
_MAX_DOCUMENTS: Final = 100


class HeldPack:
    """One claim of a pack.

    Args:
        document: The pack, as the claim returned it.
        counted: Whether ``tries`` of the document includes this claim.
        only: A bit mask of the messages to hand out. None means a window: the first messages,
            fewer after each claim of the pack that lapsed.
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
        #: The level of the claim: each lapsed claim adds one, and 0 hands out the whole pack.
        self.level = packs.level_of(document)
        #: A bit mask of the messages that have left the pack.
        self.done = packs.done_of(document)
        #: The first place of the window.
        self.first = packs.first_place(self.alive) if self.alive else 0
        self.state: State = "held"
        #: Bit masks of messages still to hand out, and of messages handed out but not yet settled.
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
        """Pickle as None, because another process does not hold the other messages of the pack."""
        return type(None), ()

    @property
    def alive(self) -> int:
        """A bit mask of the messages that are still in the pack."""
        return packs.full(self.size) & ~self.done

    def draw(self, most: int) -> tuple[int, Document] | None:
        """Hand out up to ``most`` messages. Return their bit mask and the pack, or None."""
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
                self._document = None  # only ``put_back`` may need it, and gets it as an argument
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
        """How many messages can be handed out, now or once the command in flight has ended."""
        return self._free.bit_count()

    # ---- the lease

    def begin_extending(self) -> bool:
        """Record that an extension begins. Return False if the claim is busy, or not held."""
        with self._lock:
            if self.state not in ("held", "resting"):
                return False
            self.state = "busy"
            return True

    def extended(self, until: datetime, counted: bool) -> None:
        """Record the new end of the lease, and whether the claim counts as a try."""
        with self._lock:
            self.state, self.until, self.counted = "held", until, counted

    # ---- settling

    def begin_whole(self, bits: int, *, alone: bool) -> bool:
        """Record the start of an update that ends the claim. Return False if it must not be sent.

        Args:
            bits: A bit mask of the messages that the caller holds.
            alone: Whether ``bits`` must contain all messages left in the pack. If false, it is
                enough that no other message is handed out.
        """
        with self._lock:
            in_the_way = (self.alive if alone else self._out) & ~bits
            if self.state != "held" or self._busy or in_the_way:
                return False
            self.state = "busy"
            self._busy += 1
            return True

    def begin(self, bits: int | None) -> End | None:
        """Record that a settlement begins. Return how it ends the claim, or None if it does not.

        The claim ends if no other message of the pack is handed out or being settled.

        Args:
            bits: A bit mask of the messages to settle, or None if the claim must continue.
        """
        with self._lock:
            end: End | None = None
            idle = self.state == "held" and not self._busy
            if bits is not None and idle and not self._out & ~bits:
                if not self.alive & ~bits:
                    end = "delete"
                else:
                    # Above level 0, only the next claim determines the messages of the next window.
                    end = "rest" if self._free and not self.level else "return"
                self.state = "busy"
            self._busy += 1
            return end

    def settled(self, bits: int, end: End | None, *, matched: bool) -> None:
        """Record how a settlement went.

        Args:
            bits: A bit mask of the messages that left the pack by this or an earlier settlement.
            end: How the settlement was to end the claim: the result of ``begin``.
            matched: Whether the update matched. If not, the claim has not ended.
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
        """Record that the pack is no longer held, or that this is uncertain."""
        with self._lock:
            self.state = "gone"
            self._free, self._out, self._document = 0, 0, None

    @property
    def is_idle(self) -> bool:
        """Whether the claim should end now: all messages that were handed out are settled."""
        with self._lock:
            return self.state == "held" and not self._busy and not self._out


class Drawn(NamedTuple):
    """Messages of one pack that were handed out together."""

    hold: HeldPack
    bits: int
    document: Document


class Stock(Memory):
    """The packs of one queue from which a process can hand out messages."""

    def __init__(self) -> None:
        self._packs: list[HeldPack] = []
        self._lock = Lock()
        #: The maximum number of documents that the next claim takes.
        self._most = 1
        #: How many messages the largest document of the last claim had.
        self._largest = 1
        #: How receives claim from the queue, or None if no receive has begun.
        self.claims: Claims | None = None

    def wanted(self, need: int) -> int:
        """Return how many documents to claim for callers that need ``need`` messages."""
        return max(1, min(need // self._largest, self._most))

    def learn(self, largest: int, found: bool) -> None:
        """Set how many documents the next claim takes, given the result of the last claim.

        The number doubles as long as successive claims find the same sort of documents: either
        packs or ordinary messages.

        Args:
            largest: How many messages the largest claimed document had; 1 if none was a pack.
            found: Whether the claim found any document.
        """
        alike = found and (largest > 1) == (self._largest > 1)
        self._most = min(2 * self._most, _MAX_DOCUMENTS) if alike else 1
        self._largest = largest

    def add(self, hold: HeldPack) -> None:
        """Add a claimed pack."""
        with self._lock:
            self._packs.append(hold)

    def draw(self, most: int) -> Drawn | None:
        """Hand out up to ``most`` messages of the first pack that has any, or return None."""
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
            if drawn.hold not in self._packs:  # ``draw`` removes an exhausted pack
                self._packs.append(drawn.hold)

    def surplus(self, need: int) -> Sequence[HeldPack]:
        """Remove and return the idle packs that are not needed to serve ``need`` messages."""
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
        drawn: Messages of the pack, with its document.
        tries: How many tries the messages have had.
        lease: When the lease begins and ends, and its length in seconds; or None if the messages
            are popped.
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
