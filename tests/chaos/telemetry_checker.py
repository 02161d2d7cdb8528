"""The check of telemetry: the stored counts of messages agree with the ledgers.

A call counts its messages at some time between its two lines in the ledger. The next flush takes
the counts and stores them, or they are lost. So the stored counts are never above the ledgers, and
they have every call that was surely in a flush that was surely stored. A fail-over may undo a
flush, because flushes wait for the primary only.

Figures that the ledgers do not have are left out: how often a pipeline, a worker or a loop received
a message that no handler got.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tests.chaos.names import LOOPS, MIXED, MIXED_QUEUES, TICKS
from tests.chaos.windows import Spans

#: How the messages of an operation are counted. Of failed messages, the ledgers do not know which
#: were buried.
_SETTLED: Final = {
    "commit": "finished",
    "move": "moved",
    "release": "released",
    **dict.fromkeys(("rollback", "postpone", "bury"), "failed"),
}
_STORED: Final = ("pushed", "received", "finished", "moved", "released", "retried", "dead")
#: The queues from which messages are fetched that no handler, or no body, may get.
_FETCHED: Final = ("orders", "parsed", "renewed", TICKS, LOOPS, MIXED)
#: How long after a flush a fail-over may undo it, and how long before it a fault matters.
_UNDONE_S, _BEFORE_S = 5.0, 1.0

#: A queue, and the name of a count.
Key = tuple[str, str]


class Number(NamedTuple):
    """How many messages a call counts: at least, and at most."""

    name: str
    least: int
    most: int


def _numbers_of(call: Any) -> Iterator[Number]:
    op, known = call.op.partition(" ")[0], call.outcome == "ok"
    if op in ("push", "append"):
        number = sum(each is not None for each in call.result) if known else 0
        most = len(call.items) if call.outcome == "taken" else number
        yield Number("pushed", number, most)
    elif op == "request":
        yield Number("pushed", int(call.outcome in ("ok", "failed", "timeout")), 1)
    elif op == "pop" and known:
        number = len(call.result)
        yield Number("received", number, number)
        yield Number("finished", number, number)
    elif op in ("reserve", "next") and known:
        number = sum(map(len, call.result.values()))
        yield Number("received", number, number)
    if op == "next":
        op = "commit"
    if op in _SETTLED and call.items:
        every = sum(map(len, call.items.values()))
        settled = _settled(call, every)
        certain = call.outcome in ("ok", "refused")
        yield Number(_SETTLED[op], settled, settled if certain else every)


def _settled(call: Any, every: int) -> int:
    """Return how many messages a call has surely settled."""
    if call.outcome != "refused":
        return every if call.outcome == "ok" else 0
    lost, unknown = call.result
    return every - sum(len({*lost.get(token, ()), *unknown.get(token, ())}) for token in call.items)


def _queue(name: str) -> str:
    return MIXED if name in MIXED_QUEUES else name


@dataclass
class _Flush:
    """A flush: when it began, and when it had taken the counts.

    ``stored``: when they were stored; None: they were lost, as far as the ledger shows.
    """

    began: float
    took: float
    stored: float | None = None
    #: The counts of calls that are surely in it, or in earlier flushes since this time.
    counts: dict[float, Counter[Key]] = field(default_factory=dict)


class Process:
    """The calls and the flushes of one process, in the order of its ledger."""

    def __init__(self) -> None:
        #: The most that each count may be.
        self.most: Counter[Key] = Counter()
        self.flushes: list[_Flush] = []
        #: The calls since the last flush: when each began, and what it counts at least.
        self._since: list[tuple[float, Key, int]] = []

    def called(self, op: str, at: float) -> None:
        """Learn from the first line of a call."""
        if op == "flush":  # it takes the counts of all calls that have ended
            self.flushes.append(_Flush(at, at))
            for began, key, number in self._since:
                first = self._first(began)
                if first is not None:
                    self.flushes[-1].counts.setdefault(first, Counter())[key] += number
            self._since.clear()
        elif op == "flushed":
            self.flushes[-1].stored = at

    def _first(self, began: float) -> float | None:
        """Return when the first flush began that may have a call; None: such a flush was lost."""
        place = len(self.flushes) - 1
        while place and self.flushes[place - 1].took >= began:
            place -= 1
            if self.flushes[place].stored is None:
                return None
        return self.flushes[place].began

    def add(self, call: Any) -> None:
        """Learn from a call that has ended, or that never will."""
        if call.op == "flush":
            if call.ended:
                self.flushes[-1].took = call.ended
            return
        for name, least, most in _numbers_of(call):
            key = (_queue(call.queue), name)
            self.most[key] += most
            # The child of a fork has no telemetry.
            if least and (call.queue, name) != ("turns", "pushed"):
                self._since.append((call.began, key, least))


def check_telemetry(
    processes: Iterable[Process],
    documents: Iterable[Mapping[str, Any]],
    broken: Iterable[tuple[float, float]],
) -> list[str]:
    """Return the stored counts that do not agree with the ledgers, in words.

    Args:
        processes: The calls of each process.
        documents: The stored counts of each queue, stream and group, of all time.
        broken: When faults of the servers or the network began and ended.
    """
    faults = Spans(broken)
    least, most = Counter[Key](), Counter[Key]()
    queues = set[str]()
    for process in processes:
        queues.update(queue for queue, _ in process.most)
        most += process.most
        for flush in process.flushes:
            for began, counts in flush.counts.items():
                if flush.stored is not None and not faults.within(
                    began - _BEFORE_S, flush.stored + _UNDONE_S
                ):
                    least += counts
    stored = Counter[Key]()
    for document in documents:
        for name in _STORED:
            shown = "failed" if name in ("retried", "dead") else name
            stored[_queue(document["q"]), shown] += document.get(name, 0)
    return [
        f"{queue}: {stored[queue, name]} {name} in telemetry, and {least[queue, name]} to "
        f"{most[queue, name]} in the ledgers"
        for queue, name in sorted(stored.keys() | least.keys())
        if queue in queues
        and not (name == "received" and queue in _FETCHED)
        and (
            stored[queue, name] < least[queue, name]
            or (stored[queue, name] > most[queue, name] and _is_known(queue, name))
        )
    ]


def _is_known(queue: str, name: str) -> bool:
    """Return whether the ledgers have everything that is counted."""
    if name in ("released", "failed"):
        # Malformed documents of "states" are buried.
        return queue not in (*_FETCHED, "states")
    return (queue, name) != (TICKS, "pushed")
