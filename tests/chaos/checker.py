"""The audit: what every process says it did, held against what the witness saw happen. Pure: lines in, figures out.

The witness's lines give the life of each message: its claims, each known by its token, and how each of them ended. What a client was told must be
there: an acknowledged push as a message that came into being, an acknowledged settle as the end of that very claim. What nobody was told
the outcome of may be there or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.chaos.pop_checker import Circumstances, Got, Popped, Unheard, judge

__all__ = ["MUST_BE_ZERO", "Ledgers", "Times", "Witnessed", "audit"]

#: What must not happen. Undone: settles that were acknowledged, and of which the database has nothing.
MUST_BE_ZERO = ("lost", "settled_twice", "fenced_effects", "undone")

#: How a claim ends when an operation has its effect.
_ENDS = {
    "commit": ("out",),
    "move": ("moved",),
    "rollback": ("back", "buried"),
    "release": ("back",),
}
_POPPED, _KEYED = "events", "states"

Line = list[Any]
#: When a call began, when it was answered, and how many messages it was about.
Done = tuple[float, float, int]


@dataclass(slots=True)
class Life:
    """A message that is stored."""

    queue: str
    token: str | None = None
    owner: str | None = None


class Witnessed:
    """What really happened, from the lines of the witness."""

    def __init__(self, lines: Iterable[Line]) -> None:
        #: The messages that are stored in the end.
        self.stored: dict[str, Life] = {}
        #: How often each came into being; what was popped and given back came only once.
        self.came: Counter[str] = Counter()
        #: The contents that a message had other than the one it is named after.
        self.contents: dict[str, set[str]] = defaultdict(set)
        #: How each claim ended, {token: {id: how}}: "held" if it did not, "taken" if another claim took over.
        self.claims: dict[str, dict[str, str]] = defaultdict(dict)
        #: What was popped, and not given back.
        self.popped: dict[str, list[Popped]] = defaultdict(list)
        #: When those that are popped were pushed last.
        self._pushed: dict[str, int] = {}
        #: What was deleted though nobody held it.
        self.vanished: set[str] = set()
        #: What was settled by (id, token) though that claim did not hold it.
        self.fenced: set[tuple[str, str]] = set()
        for kind, id, *rest in lines:
            if kind == "in":
                self._came(id, *rest)
            elif kind == "out":
                self._went(id, *rest)
            else:
                self._changed(id, *rest)

    def _came(self, id: str, queue: str, content: str | None, pushed: int) -> None:
        self.stored[id] = Life(queue)
        if self.popped.get(id) and self._pushed[id] == pushed:
            self.popped[id].pop()  # given back; another push has another time
            return
        self.came[id] += 1
        if queue == _POPPED:
            self._pushed[id] = pushed
        if content not in (None, id):
            self.contents[id].add(content)

    def _went(self, id: str, at: float) -> None:
        life = self.stored.pop(id)
        if life.queue == _POPPED:
            self.popped[id].append(Popped(at, life.token, life.owner))
        elif life.token is None:
            self.vanished.add(id)
        else:
            self.claims[life.token][id] = "out"

    def _changed(self, id: str, put: Mapping[str, Any]) -> None:
        life = self.stored[id]
        if put.get("n", id) != id:
            self.contents[id].add(put["n"])
        if put.get("by", life.token) != life.token:
            self.fenced.add((id, put["by"]))
        if "token" in put:
            if life.token is not None:
                self.claims[life.token][id] = _how(put)
            life.token, life.owner = None if "processed" in put else put["token"], put.get("owner")
            if life.token is not None:
                self.claims[life.token][id] = "held"
        life.queue = put.get("q", life.queue)

    def ended(self, id: str, token: str) -> str | None:
        """How a claim ended; None: there was none, or a fail-over undid it."""
        return self.claims[token].get(id) if token in self.claims else None


def _how(put: Mapping[str, Any]) -> str:
    """How a claim ended, by the change that ended it."""
    if "processed" in put:
        return "out"
    if put["token"] is not None:
        return "taken"
    if "q" in put:
        return "buried" if "dead" in put else "moved"
    return "replaced" if "n" in put else "back"


@dataclass
class Times:
    """What the ledgers say of time, on the machine's monotonic clock, in seconds."""

    pushes: list[Done] = field(default_factory=list)
    settles: list[Done] = field(default_factory=list)
    #: When calls of a process were answered well, by its name.
    answered: dict[str, list[float]] = field(default_factory=dict)

    def recovered(self, at: float) -> dict[str, float | None]:
        """How long after an instant the first push and the first settle that began after it were answered; None: none was."""
        return {"push": _first(self.pushes, at), "settle": _first(self.settles, at)}

    def outage(self, kinds: str, suspended: Mapping[str, Sequence[tuple[float, float]]]) -> float:
        """The longest time for which a process of a kind had no call answered well. Not counted: while it was itself suspended."""
        return max(
            (
                after - before
                for name, times in self.answered.items()
                if name.startswith(tuple(kinds.split()))
                for before, after in pairwise(sorted(times))
                if not any(start < after and before < end for start, end in suspended.get(name, ()))
            ),
            default=0.0,
        )


def _first(done: list[Done], at: float) -> float | None:
    """``done`` is sorted. Calls that began later may be answered earlier; none takes longer than some seconds."""
    later = done[bisect_left(done, (at, 0.0, 0)) :]
    if not later:
        return None
    soonest = later[0][1]
    for began, ended, _ in later:
        if began > soonest:
            break
        soonest = min(soonest, ended)
    return soonest - at


@dataclass(slots=True)
class Said:
    """A call as a ledger has it, and what was heard of it."""

    began: float
    op: str
    queue: str
    about: Any
    outcome: str = "unknown"
    items: Any = None
    ended: float = 0.0


class Ledgers:
    """What the processes say, from the lines of their ledgers, by the names of the processes."""

    def __init__(self, ledgers: Mapping[str, Iterable[Line]]) -> None:
        self.times = Times()
        self.figures: Counter[str] = Counter()
        #: Other errors than those that faults bring about, how often each.
        self.errors: Counter[str] = Counter()
        #: The pushes that were acknowledged: (id, content).
        self.acknowledged: list[tuple[str, str]] = []
        #: Who got what was popped.
        self.got: dict[str, list[Got]] = defaultdict(list)
        #: The pops of which nobody heard what they took.
        self.unheard: list[Unheard] = []
        #: The claims that were received: {token: ids}.
        self.received: dict[str, set[str]] = defaultdict(set)
        #: The settles that were acknowledged, and those that were refused at the first try: (op, queue, id, token).
        self.settled: list[tuple[str, str, str, str]] = []
        self.refused: list[tuple[str, str, str, str]] = []
        #: Who may have committed what: {token: ids}.
        self.committing: dict[str, set[str]] = defaultdict(set)
        for name, lines in ledgers.items():
            self._read(name, lines)
        self.times.pushes.sort()
        self.times.settles.sort()

    def _read(self, name: str, lines: Iterable[Line]) -> None:
        calls: dict[int, Said] = {}
        answered = self.times.answered[name] = []
        for kind, number, at, *rest in lines:
            if kind == "call":
                calls[number] = Said(at, *rest)
                continue
            said = calls.pop(number)
            said.ended, (said.outcome, said.items) = at, rest
            if said.outcome in ("ok", "refused") or (
                said.outcome == "taken" and said.queue == _KEYED
            ):
                answered.append(at)
            elif said.outcome not in ("unknown", "cancelled"):
                self.errors[f"{said.op}: {said.outcome}"] += 1
            self._take(name, said)
        for said in calls.values():
            self._take(name, said)

    def _take(self, name: str, said: Said) -> None:
        good = said.outcome == "ok"
        if said.op == "push":
            self.figures["pushed"] += len(said.about)
            if good:
                pairs = zip(said.items, said.about, strict=True)
                self.acknowledged += [(id, content) for id, content in pairs if id is not None]
                self.times.pushes.append((said.began, said.ended, len(said.about)))
        elif said.op == "pop":
            if good:
                for id in said.items:
                    self.got[id].append(Got(said.ended, name, said.about == 1))
                self.figures["received"] += len(said.items)
                self.figures["popped"] += len(said.items)
            else:
                why = (
                    "killed"
                    if not said.ended
                    else "cancelled"
                    if said.outcome == "cancelled"
                    else "unknown"
                )
                ended = said.ended or float("inf")
                self.unheard.append(
                    Unheard(name, said.began, said.about, why, ended, said.about == 1)
                )
        elif said.op == "reserve":
            for token, ids in said.items.items() if good else ():
                self.received[token].update(ids)
                self.figures["received"] += len(ids)
                self.figures["redelivered"] += sum(tries > 1 for tries in ids.values())
        elif said.op != "look":
            self._settle(said)

    def _settle(self, said: Said) -> None:
        op, _, again = said.op.partition(" ")
        if op == "commit":
            for token, ids in said.about.items():
                self.committing[token].update(ids)
        if said.outcome not in ("ok", "refused"):
            return
        lost, unknown = said.items if said.outcome == "refused" else ({}, {})
        left = {token: {*lost.get(token, ()), *unknown.get(token, ())} for token in said.about}
        done = [
            (op, said.queue, id, token)
            for token, ids in said.about.items()
            for id in ids
            if id not in left[token]
        ]
        self.figures["refused"] += sum(map(len, left.values()))
        if not again:
            self.refused += [
                (op, said.queue, id, token) for token, ids in lost.items() for id in ids
            ]
        self.settled += done
        if done and op in ("commit", "move"):
            self.times.settles.append((said.began, said.ended, len(done)))


def audit(
    ledgers: Ledgers, witnessed: Witnessed, stored: Iterable[str], known: Circumstances
) -> dict[str, Any]:
    """Hold one against the other, and against the ids of what is stored in the end. The figures, and some of what is wrong, in words."""
    wrong: dict[str, list[str]] = defaultdict(list)
    remaining = set(stored)

    acknowledged: set[str] = set()
    for id, content in ledgers.acknowledged:
        acknowledged.add(id)
        if not witnessed.came[id] or (content != id and content not in witnessed.contents[id]):
            wrong["lost"].append(
                f"{content}: its push was acknowledged, and it was never stored as {id}"
            )
    wrong["lost"] += [
        f"{id}: it is stored no longer" for id in witnessed.stored if id not in remaining
    ]
    wrong["lost"] += [
        f"{id}: it was deleted though nobody held it" for id in sorted(witnessed.vanished)
    ]
    for token, ends in witnessed.claims.items():
        for id, how in ends.items():
            if how == "out" and id not in ledgers.committing.get(token, ()):
                wrong["lost"].append(
                    f"{id}: it was finished, and its holder, of {token}, had not asked for that"
                )
    nobodys, twice = judge(witnessed.popped, ledgers.got, ledgers.unheard, known)
    wrong["lost"] += [f"{id}: it was popped, and no process got it" for id in nobodys]

    finals: Counter[tuple[str, str]] = Counter()
    fenced = set(witnessed.fenced)
    seen: set[tuple[str, str]] = set()
    for op, queue, id, token in ledgers.settled:
        end = witnessed.ended(id, token)
        if op == "extend":
            if end is None:
                wrong["undone"].append(
                    f"{id}: {op} in {queue} was acknowledged, and there is no such claim: {token}"
                )
            continue
        if op in ("commit", "move"):
            finals[id, queue] += 1
        if end in ("taken", "replaced"):
            fenced.add((id, token))
        elif end not in _ENDS[op]:
            wrong["undone"].append(
                f"{id}: {op} in {queue} by {token} was acknowledged; that claim is {end or 'not there'}"
            )
        elif (id, token) in seen:
            wrong["settled_twice"].append(f"{id}: settled again, by {op} in {queue} with {token}")
        seen.add((id, token))
    for (id, queue), times in finals.items():
        if times > witnessed.came[id]:
            wrong["settled_twice"].append(
                f"{id}: it came {witnessed.came[id]} times and left {queue} {times} times"
            )
    wrong["settled_twice"] += [
        f"{id}: it was received by pop more often than it was popped" for id in twice
    ]
    wrong["fenced_effects"] += [
        f"{id}: it was settled by {token}, whose claim held it no longer"
        for id, token in sorted(fenced)
    ]

    wrong["refused_though_done"] += [
        f"{id}: {op} in {queue} by {token} was refused, and was done"
        for op, queue, id, token in ledgers.refused
        if op in _ENDS and witnessed.ended(id, token) in _ENDS[op]
    ]
    undone_claims = sum(
        witnessed.ended(id, token) is None for token, ids in ledgers.received.items() for id in ids
    )
    figures = ledgers.figures
    return {
        "messages": len(acknowledged),
        "pushed": figures["pushed"],
        "acknowledged": len(ledgers.acknowledged),
        "received": figures["received"],
        "settled": finals.total() + figures["popped"],
        "redelivered": figures["redelivered"],
        "refused": figures["refused"],
        "claims_undone": undone_claims,
        "stored": len(remaining),
        "dead": sum(life.queue.endswith(".dead") for life in witnessed.stored.values()),
        **{name: len(wrong[name]) for name in (*MUST_BE_ZERO, "refused_though_done")},
        "errors": dict(ledgers.errors.most_common()),
        "wrong": {name: lines[:10] for name, lines in wrong.items() if lines},
    }
