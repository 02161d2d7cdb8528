"""The checker: compares the records of every process with the change log. It does no I/O.

The change log gives the claims of each message, each known by its token, and how each claim ended.
A result that a client got must appear there: an acknowledged push as a message that was stored, an
acknowledged settle as the end of exactly that claim. A call with an unknown outcome may appear or
not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from tests.chaos.cancel_checker import Cancels, Effects
from tests.chaos.group_checker import Groups
from tests.chaos.limit_checker import Limits
from tests.chaos.loop_checker import Bodies
from tests.chaos.names import (
    BUCKETS,
    DELETED_QUEUE,
    POPPED,
    PURGED_QUEUE,
    RESULTS,
    ROWS,
    SHIFTS,
)
from tests.chaos.order_checker import Entrances
from tests.chaos.pack_log import PackLog
from tests.chaos.pop_checker import Disturbances, Popped, Returned, UnknownPop, check_pops
from tests.chaos.removal_checker import Removal, miscounted
from tests.chaos.result_checker import Asked as AskedResults
from tests.chaos.result_checker import Results
from tests.chaos.stream_checker import StreamCalls
from tests.chaos.stream_load import GROUPS, is_of_streams
from tests.chaos.telemetry_checker import Process
from tests.chaos.tick_checker import Ticks
from tests.chaos.tries_checker import TRIED, Tries

#: The figures that must be 0. "undone" counts acknowledged settles that the database lacks.
MUST_BE_ZERO = (
    *("lost", "settled_twice", "fenced_effects", "undone", "out_of_order", "over_limit"),
    "errors",
)

#: How a claim ends when an operation has its effect.
_ENDS = {
    "commit": ("out",),
    "move": ("moved",),
    "rollback": ("back", "buried"),
    "postpone": ("back",),
    "release": ("back",),
    "bury": ("buried",),
}
#: Calls that say nothing about messages.
_OTHERS = ("counts", "reshape", "enter", "exit", "work", "schedule", "flush", "flushed")
_KEYED_QUEUE = "states"
_SHOWN = 10  # lines of each kind in the result
#: A receive that takes longer counts as a wait, even if it returns messages.
_LONG_RECEIVE_S = 2.0
#: A bucket is received document by document where packs and single messages take turns.
_EACH_PACKED_S = 0.05
#: How long the commands of a deletion or removal with an unknown outcome may still arrive.
_LATE_DELETE_S = 60.0
#: The precision of the times in the change log.
_CLOCK_ERROR_S = 0.1

Line = list[Any]
#: When a call began, when it returned, and its number of messages.
Done = tuple[float, float, int]
#: An operation on a message: its name, the queue, the id and the token.
Settled = tuple[str, str, str, str]


@dataclass(slots=True)
class StoredMessage:
    """A stored message: its queue and its claim."""

    queue: str
    token: str | None = None
    owner: str | None = None
    #: Whether it has ended, and its end is kept.
    finished: bool = False


class ChangeLog:
    """The run as the database saw it.

    Args:
        lines: The lines of the change log.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        #: The messages that are stored at the end.
        self.stored: dict[str, StoredMessage] = {}
        #: How often each id was stored. A popped message that was given back counts once.
        self.came: Counter[str] = Counter()
        #: The contents that a message had, except the one that equals its id.
        self.contents: dict[str, set[str]] = defaultdict(set)
        #: How each claim ended, as {token: {id: end}}. "held": not at all; "taken": by another
        #: claim; "lapsed": by a scan, after the lease.
        self.claims: dict[str, dict[str, str]] = defaultdict(dict)
        #: The messages that were popped and not given back, by queue.
        self.popped: dict[str, dict[str, list[Popped]]] = {
            queue: defaultdict(list) for queue in POPPED
        }
        #: The time of the last push of each message of the popped queues.
        self._pushed: dict[str, int] = {}
        #: The messages that were deleted while they had no claim.
        self.deleted_unclaimed: set[str] = set()
        #: When messages of the queue that is deleted now and then were deleted, and messages of
        #: the queue that is purged.
        self.deleted_at: dict[str, float] = {}
        self.purged_at: dict[str, float] = {}
        #: How messages came to the queue that keeps their order.
        self.entrances = Entrances()
        #: Messages and tokens, (id, token), that were settled by a claim that did not hold them.
        self.fenced: set[tuple[str, str]] = set()
        #: The ids under which each content of a bucket was stored.
        self.packed: dict[str, set[str]] = defaultdict(set)
        #: The groups of ordered queues.
        self.groups = Groups()
        #: The queues with limits.
        self.limits = Limits()
        #: The messages that are cancelled, changed in bulk, or asked for their results.
        self.effects, self.asked = Effects(), AskedResults()
        #: The schedules, and the tries of messages.
        self.ticks, self.tries = Ticks(), Tries()
        log = PackLog(lines)
        for line in log:
            self.groups.add(line)
            self.limits.add(line)
            for each in (self.entrances, self.effects, self.asked, self.tries):
                each.add(line)
            kind, id, *rest = line
            if kind == "limit" or self.ticks.add(line):
                continue
            if kind == "in":
                self._inserted(id, *rest)
            elif kind == "out":
                self._deleted(id, *rest)
            else:
                self._updated(id, *rest)
        #: The mistakes of packs, in words, by the figure that counts them.
        self.wrong_packs = log.wrong

    def _inserted(self, id: str, queue: str, content: str | None, pushed: int, *_: Any) -> None:
        self.stored[id] = StoredMessage(queue)
        if queue in POPPED:
            popped = self.popped[queue].get(id)
            if popped and self._pushed[id] == pushed:
                popped.pop()  # given back; a new push would have another time
                return
            self._pushed[id] = pushed
        self.came[id] += 1
        if content not in (None, id):
            self.contents[id].add(content)
        if queue in BUCKETS and content is not None:
            self.packed[content].add(id)

    def _deleted(self, id: str, at: float) -> None:
        message = self.stored.pop(id)
        if message.finished:  # its end is not kept any longer
            return
        if message.queue == DELETED_QUEUE:
            self.deleted_at[id] = at
        if message.queue == PURGED_QUEUE:
            self.purged_at[id] = at
        if message.queue in POPPED:
            # The pops of a pack end one by one, so they share no answer with other callers.
            claim = id if message.queue in BUCKETS else message.token
            self.popped[message.queue][id].append(Popped(at, claim, message.owner))
        elif message.token is None:
            self.deleted_unclaimed.add(id)
        else:
            self.claims[message.token][id] = "out"

    def _updated(self, id: str, put: Mapping[str, Any], *_: float) -> None:
        message = self.stored[id]
        if put.get("n", id) != id:
            self.contents[id].add(put["n"])
        if put.get("by", message.token) != message.token:
            self.fenced.add((id, put["by"]))
        if "token" in put:
            if message.token is not None:
                self.claims[message.token][id] = _end_of_claim(put)
            message.token = None if "processed" in put else put["token"]
            message.owner = put.get("owner")
            if message.token is not None:
                self.claims[message.token][id] = "held"
        message.queue = put.get("q", message.queue)
        message.finished = message.finished or "processed" in put

    def ended(self, id: str, token: str) -> str | None:
        """Return how a claim ended, or None if it never was or a fail-over rolled it back."""
        return self.claims[token].get(id) if token in self.claims else None


def _end_of_claim(put: Mapping[str, Any]) -> str:
    """Return how a claim ended, given the update that ended it."""
    if "processed" in put:
        return str(put.get("outcome", "out"))
    if put["token"] is not None:
        return "taken"
    if "q" in put:
        return "buried" if put.get("dead") else "moved"
    if not put.keys() & {"when", "by", "n"}:
        return "lapsed"  # a scan that needed the slot has ended it
    return "replaced" if "n" in put else "back"


@dataclass
class Times:
    """The times in the ledgers, in seconds of the machine's monotonic clock."""

    pushes: list[Done] = field(default_factory=list)
    settles: list[Done] = field(default_factory=list)
    #: When calls of each process succeeded, by its name.
    answered: dict[str, list[float]] = field(default_factory=dict)

    def recovered(self, at: float) -> dict[str, float | None]:
        """Return the seconds from ``at`` to the first success of a push and settle begun later.

        None stands for no such call.
        """
        return {"push": _first(self.pushes, at), "settle": _first(self.settles, at)}

    def outage(self, kinds: str, suspended: Mapping[str, Sequence[tuple[float, float]]]) -> float:
        """Return the longest time without a successful call of one process.

        Args:
            kinds: The kinds of processes, separated by spaces.
            suspended: The times, by process, that do not count because the process was suspended.
        """
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
    """Return the seconds from ``at`` to the first end of a call that began later.

    ``done`` is sorted by the beginning. A call that began later may end earlier.
    """
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
class RecordedCall:
    """A call in a ledger, and its result if there is one."""

    began: float
    op: str
    queue: str
    items: Any
    outcome: str = "unknown"
    result: Any = None
    ended: float = 0.0


class Asked(NamedTuple):
    """A call to receive that got nothing, or that took long."""

    began: float
    ended: float
    process: str


class UnavailableCall(NamedTuple):
    """A call that raised Unavailable. ``ids`` are the ids of its messages."""

    began: float
    ended: float
    process: str
    op: str
    queue: str
    ids: frozenset[str]
    text: str


def _is_expected(call: RecordedCall) -> bool:
    """Return whether a call may have this outcome without a fault that excuses it."""
    if call.outcome == "taken":  # by an earlier push, or by the message that has the id
        return call.queue in (_KEYED_QUEUE, RESULTS) or call.queue in BUCKETS
    if call.outcome in ("failed", "timeout"):  # see ``result_checker``
        return call.op in ("wait", "request")
    return call.outcome in ("cancelled", "late")


def _longest_receive(call: RecordedCall) -> float:
    """Return the seconds that a call to receive its messages may take without waiting."""
    many = len(_ids_of(call.result)) if call.queue in BUCKETS else 0
    return _LONG_RECEIVE_S + many * _EACH_PACKED_S


def _ids_of(items: Any) -> list[str]:
    """Return the ids in the items of a push or a settle."""
    if isinstance(items, dict):
        return [id for ids in items.values() for id in ids]
    return items if isinstance(items, list) else []


class Ledgers:
    """The records of the processes.

    Args:
        ledgers: The lines of each ledger, by the name of its process.
    """

    def __init__(self, ledgers: Mapping[str, Iterable[Line]]) -> None:
        self.times = Times()
        self.figures: Counter[str] = Counter()
        #: Errors that nothing explains, with their counts, and the first traceback of each.
        self.errors: Counter[str] = Counter()
        self.traces: dict[str, str] = {}
        #: When calls deleted a queue: the earliest and the latest time of each.
        self.deletions: list[tuple[float, float]] = []
        #: The calls that removed messages of the queue that is purged.
        self.removals: list[Removal] = []
        #: The malformed documents that were inserted, and their queues.
        self.planted: dict[str, str] = {}
        #: The receives that returned something, with the tries of each message.
        self.receives: list[dict[str, dict[str, int]]] = []
        #: The messages of ``shifts`` by the outcomes of their pushes.
        self.pushed: dict[str, list[str]] = defaultdict(list)
        #: The acknowledged pushes: (id, content).
        self.acknowledged: list[tuple[str, str]] = []
        #: The pops that returned each message, by queue.
        self.returned: dict[str, dict[str, list[Returned]]] = {
            queue: defaultdict(list) for queue in POPPED
        }
        #: The pops without a result, by queue.
        self.unknown_pops: dict[str, list[UnknownPop]] = defaultdict(list)
        #: The claims that clients received: {token: ids}.
        self.received: dict[str, set[str]] = defaultdict(set)
        #: When the last message of each of them was received, by token.
        self.received_at: dict[str, float] = {}
        #: The acknowledged settles.
        self.settled: list[Settled] = []
        #: The settles that were refused at the first try.
        self.refused: list[Settled] = []
        #: The messages, (token, id), of settles whose outcome the caller did not learn.
        self._unsettled: set[tuple[str, str]] = set()
        #: The ids that each claim asked to commit: {token: ids}.
        self.committing: dict[str, set[str]] = defaultdict(set)
        #: The calls to receive that got nothing or took long, by queue.
        self.asked: dict[str, list[Asked]] = defaultdict(list)
        #: The calls that raised Unavailable.
        self.unavailable: list[UnavailableCall] = []
        #: The calls that cancel and change messages, those that wait for results, and the bodies of
        #: loops.
        self.cancels, self.results, self.bodies = Cancels(), Results(), Bodies()
        #: The tries with which some messages were received, by id and token.
        self.tries: dict[tuple[str, str], int] = {}
        #: The calls on the stream and its groups.
        self.streams = StreamCalls()
        #: The calls and the flushes of each process, for telemetry.
        self.processes: list[Process] = []
        for name, lines in ledgers.items():
            self._read(name, lines)
        self.times.pushes.sort()
        self.times.settles.sort()

    def _read(self, name: str, lines: Iterable[Line]) -> None:
        calls: dict[int, RecordedCall] = {}
        answered = self.times.answered[name] = []
        process = Process()
        self.processes.append(process)
        for kind, number, at, *rest in lines:
            if kind == "call":
                calls[number] = RecordedCall(at, *rest)
                process.called(rest[0], at)
                continue
            if kind == "error":
                self._add_error(*rest)
                continue
            call = calls.pop(number)
            call.ended, (call.outcome, call.result) = at, rest
            process.add(call)
            if call.op == "flush":
                continue
            if call.outcome in ("ok", "refused") or (
                call.outcome == "taken" and call.queue == _KEYED_QUEUE
            ):
                answered.append(at)
            elif call.outcome == "unknown":
                ids = frozenset(_ids_of(call.items))
                about = (name, call.op, call.queue, ids, str(call.result))
                self.unavailable.append(UnavailableCall(call.began, at, *about))
            elif not _is_expected(call):
                self._add_error(f"{call.op} in {call.queue}: {call.outcome}", str(call.result))
            self._add(name, call)
            if call.op in ("reserve", "next", "pop") and (
                at - call.began > _longest_receive(call)
                if call.outcome == "ok" and call.result
                else call.outcome in ("ok", "unknown")
            ):
                self.asked[call.queue].append(Asked(call.began, at, name))
        for call in calls.values():
            process.add(call)
            self._add(name, call)

    def _add_error(self, text: str, trace: str) -> None:
        self.errors[text] += 1
        self.traces.setdefault(text, trace)

    def _add(self, name: str, call: RecordedCall) -> None:
        if self.cancels.add(call) or self.results.add(call):
            return
        if is_of_streams(call.queue):
            self.streams.add(call)
        elif call.op == "push":
            self._add_push(call)
        elif call.op == "pop":
            self._add_pop(name, call)
        elif call.op in ("reserve", "next"):
            self._add_receive(call)
        elif call.op in ("delete", "purge", "remove"):
            until = call.ended if call.outcome == "ok" else call.began + _LATE_DELETE_S
            if call.op == "delete":
                self.deletions.append((call.began, until))
            else:
                count = call.result if call.outcome == "ok" else None
                self.removals.append(Removal(call.began, until, count))
        elif call.op == "plant":
            self.planted |= dict.fromkeys(call.items, call.queue)
        elif call.op not in _OTHERS:
            self._add_settle(call)

    def _add_receive(self, call: RecordedCall) -> None:
        if call.op == "next":
            self.bodies.add(call)
            refused = call.result if call.outcome == "refused" else None
            self._add_settle(replace(call, op="commit", result=refused))
        for token, ids in call.result.items() if call.outcome == "ok" else ():
            self.received[token].update(ids)
            self.received_at[token] = max(call.ended, self.received_at.get(token, 0.0))
            self.figures["received"] += len(ids)
            self.figures["redelivered"] += sum(tries > 1 for tries in ids.values())
            if call.queue in TRIED:
                self.tries.update({(id, token): tries for id, tries in ids.items()})
        if call.queue == ROWS and call.outcome == "ok":
            self.receives.append(call.result)

    def _add_push(self, call: RecordedCall) -> None:
        self.figures["pushed"] += len(call.items)
        if call.queue == SHIFTS:
            for content in call.items:
                self.pushed[content].append(call.outcome)
        if call.outcome == "ok":
            pairs = zip(call.result, call.items, strict=True)
            self.acknowledged += [(id, content) for id, content in pairs if id is not None]
            self.times.pushes.append((call.began, call.ended, len(call.items)))

    def _add_pop(self, name: str, call: RecordedCall) -> None:
        single = call.items == 1
        if call.outcome == "ok":
            for id in call.result:
                self.returned[call.queue][id].append(Returned(call.ended, name, single))
            self.figures["received"] += len(call.result)
            self.figures["popped"] += len(call.result)
            return
        reason = "unknown"
        if not call.ended:
            reason = "killed"
        elif call.outcome == "cancelled":
            reason = "cancelled"
        ended = call.ended or float("inf")
        unknown = UnknownPop(name, call.began, call.items, reason, ended, single)
        self.unknown_pops[call.queue].append(unknown)

    def _add_settle(self, call: RecordedCall) -> None:
        op, _, again = call.op.partition(" ")
        if op == "commit":
            for token, ids in call.items.items():
                self.committing[token].update(ids)
        if call.outcome not in ("ok", "refused"):
            self._unsettled.update((token, id) for token, ids in call.items.items() for id in ids)
            return
        lost, unknown = call.result if call.outcome == "refused" else ({}, {})
        left = {token: {*lost.get(token, ()), *unknown.get(token, ())} for token in call.items}
        done = [
            (op, call.queue, id, token)
            for token, ids in call.items.items()
            for id in ids
            if id not in left[token]
        ]
        self.figures["refused"] += sum(map(len, left.values()))
        if not again:
            self.refused += [
                (op, call.queue, id, token)
                for token, ids in lost.items()
                for id in ids
                if (token, id) not in self._unsettled
            ]
        self.settled += done
        if done and op in ("commit", "move"):
            self.times.settles.append((call.began, call.ended, len(done)))


class _Check:
    """One comparison. ``wrong`` collects the mistakes, in words."""

    def __init__(self, ledgers: Ledgers, log: ChangeLog, known: Disturbances) -> None:
        self._ledgers, self._log, self._known = ledgers, log, known
        self.wrong: dict[str, list[str]] = defaultdict(list)
        #: How often each message left a queue by an acknowledged commit or move: (id, queue).
        self.finals: Counter[tuple[str, str]] = Counter()
        #: How many lost pops were excused, and how many could have been.
        self.excuses: dict[str, dict[str, int]] = {}

    def pushes(self) -> None:
        """Every acknowledged push must have stored its message."""
        for id, content in self._ledgers.acknowledged:
            known = content == id or content in self._log.contents[id]
            if not self._log.came[id] or not known:
                self.wrong["lost"].append(
                    f"{content}: its push was acknowledged, but it was never stored as {id}"
                )

    def messages(self, remaining: set[str]) -> None:
        """Every message must be stored at the end, or have left as a client asked."""
        self.wrong["lost"] += [
            f"{id}: not stored at the end, although nothing deleted it"
            for id, message in self._log.stored.items()
            if id not in remaining and not message.finished  # the server deletes old ends
        ]
        self.wrong["lost"] += [
            f"{id}: deleted while it had no claim"
            for id in sorted(self._log.deleted_unclaimed)
            if not (self._was_removed(id) or self._ledgers.cancels.asked(id))
        ]
        for token, ends in self._log.claims.items():
            for id, end in ends.items():
                asked = id in self._ledgers.committing.get(token, ())
                asked = asked or self._ledgers.cancels.asked(id)
                if end == "out" and not asked and not self._was_removed(id):
                    self.wrong["lost"].append(
                        f"{id}: finished, although its holder ({token}) had not asked for that"
                    )

    def _was_removed(self, id: str) -> bool:
        """Return whether a message went with its queue, by a purge or by a remove."""
        log, ledgers = self._log, self._ledgers
        at, calls = log.deleted_at.get(id), ledgers.deletions
        if at is None:
            at, calls = log.purged_at.get(id), [call[:2] for call in ledgers.removals]
        return at is not None and any(
            begin <= at + _CLOCK_ERROR_S and at <= end + _CLOCK_ERROR_S for begin, end in calls
        )

    def removals(self) -> None:
        """A purge must count the messages that it removed."""
        asked = {id for ids in self._ledgers.committing.values() for id in ids}
        known = self._log.purged_at
        sure = [at for id, at in known.items() if id not in asked]
        perhaps = [at for id, at in known.items() if id in asked]
        removals, broken = self._ledgers.removals, self._known.broken
        self.wrong["undone"] += miscounted(removals, sure, perhaps, broken)

    def misfits(self) -> None:
        """Every malformed document must be a dead letter at the end."""
        for id, queue in self._ledgers.planted.items():
            message = self._log.stored.get(id)
            if self._log.came[id] and (message is None or message.queue != f"{queue}.dead"):
                self.wrong["lost"].append(f"{id}: malformed, and not among the dead letters")

    def pops(self) -> None:
        """Every popped message must have reached one caller, as far as this can be known."""
        log, ledgers = self._log, self._ledgers
        for queue in POPPED:
            unknown = ledgers.unknown_pops[queue]
            lost, twice, excuses = check_pops(
                log.popped[queue], ledgers.returned[queue], unknown, self._known
            )
            self.wrong["lost"] += [f"{id}: popped, but no process got it" for id in lost]
            self.wrong["settled_twice"] += [
                f"{id}: returned by pop more often than it was popped" for id in twice
            ]
            for reason, counts in excuses.items():
                known = self.excuses.setdefault(reason, dict.fromkeys(counts, 0))
                self.excuses[reason] = {name: known[name] + counts[name] for name in counts}

    def settles(self) -> None:
        """Every acknowledged settle must be the end of its claim, and only once."""
        fenced = set(self._log.fenced)
        seen: set[tuple[str, str]] = set()
        for op, queue, id, token in self._ledgers.settled:
            end = self._log.ended(id, token)
            if op == "extend":
                if end is None:
                    self.wrong["undone"].append(
                        f"{id}: {op} in {queue} was acknowledged, but claim {token} does not exist"
                    )
                continue
            if op in ("commit", "move"):
                self.finals[id, queue] += 1
            if end in ("taken", "replaced"):
                fenced.add((id, token))
            elif end not in _ENDS[op]:
                self.wrong["undone"].append(
                    f"{id}: {op} in {queue} by {token} was acknowledged, "
                    f"but the claim is {end or 'missing'}"
                )
            elif (id, token) in seen:
                self.wrong["settled_twice"].append(
                    f"{id}: settled again by {op} in {queue} with {token}"
                )
            seen.add((id, token))
        for (id, queue), times in self.finals.items():
            if times > self._log.came[id]:
                self.wrong["settled_twice"].append(
                    f"{id}: stored {self._log.came[id]} times, but left {queue} {times} times"
                )
        self.wrong["fenced_effects"] += [
            f"{id}: settled by {token}, which did not hold it any more"
            for id, token in sorted(fenced)
        ]

    def kinds(self) -> None:
        """Groups must keep their order, limits must hold, and the counts of packs must be right."""
        groups, log = self._log.groups, self._log
        once = {id for id, outcomes in self._ledgers.pushed.items() if outcomes == ["ok"]}
        received = self._ledgers.received
        self.wrong["out_of_order"] += groups.together
        self.wrong["out_of_order"] += groups.out_of_order(received, log.ended, once)
        self.wrong["out_of_order"] += log.entrances.out_of_order(self._ledgers.receives)
        self.wrong["over_limit"] += log.limits.exceeded
        for name, lines in log.wrong_packs.items():
            self.wrong[name] += lines
        self.wrong["settled_twice"] += [
            f"{content}: stored as {' and as '.join(sorted(ids))}"
            for content, ids in log.packed.items()
            if len(ids) > 1
        ]

    def jobs(self) -> None:
        """Cancels, results, ticks, tries and loops must do what they say."""
        log, ledgers = self._log, self._ledgers
        every = [
            ledgers.cancels.check(log.effects, ledgers.received, self._known.broken),
            ledgers.results.check(log.asked, log.ended),
            log.ticks.check(),
            {"undone": log.tries.check(ledgers.settled, ledgers.tries)},
            {"settled_twice": ledgers.bodies.twice()},
        ]
        for found in every:
            for name, lines in found.items():
                self.wrong[name] += lines

    def errors(self) -> None:
        """Only lost leases, and errors that faults explain, may be raised or logged."""
        self.wrong["errors"] += [
            f"{times} times: {text}\n{self._ledgers.traces[text]}".strip()
            for text, times in self._ledgers.errors.most_common()
        ]

    def refusals(self) -> None:
        """A settle that raised LeaseLost at its first try should not have had its effect.

        A message that was removed looks like one that was committed.
        """
        self.wrong["refused_though_done"] += [
            f"{id}: {op} in {queue} by {token} was refused, but it was done"
            for op, queue, id, token in self._ledgers.refused
            if op in _ENDS
            and self._log.ended(id, token) in _ENDS[op]
            and not (op == "commit" and self._was_removed(id))
            and not self._ledgers.cancels.asked(id)
        ]


def check(
    ledgers: Ledgers,
    log: ChangeLog,
    stored: Iterable[str],
    known: Disturbances,
    contents: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Compare the ledgers with the change log.

    Args:
        ledgers: The records of the processes.
        log: The run as the database saw it.
        stored: The ids of the messages that are stored at the end.
        known: The faults that excuse a lost pop.
        contents: The contents of the stream at the end; None: not known.

    Returns:
        The figures, and under ``wrong`` the first lines of each kind that should be empty.
    """
    remaining = set(stored)
    found = _Check(ledgers, log, known)
    found.pushes()
    found.messages(remaining)
    found.pops()
    found.settles()
    found.kinds()
    found.removals()
    found.misfits()
    found.jobs()
    found.errors()
    found.refusals()
    streams = ledgers.streams
    if contents is not None:
        for kind, lines in streams.check(contents, GROUPS).items():
            found.wrong[kind] += lines
    figures, appended = ledgers.figures + streams.figures, len(streams.appended)
    return {
        "messages": len({id for id, _ in ledgers.acknowledged}) + appended,
        "pushed": figures["pushed"],
        "acknowledged": len(ledgers.acknowledged) + appended,
        "received": figures["received"],
        "settled": found.finals.total() + figures["popped"] + len(streams.committed),
        "redelivered": figures["redelivered"],
        "refused": figures["refused"],
        "claims_undone": sum(
            log.ended(id, token) is None for token, ids in ledgers.received.items() for id in ids
        ),
        "stored": len(remaining),
        "dead": sum(message.queue.endswith(".dead") for message in log.stored.values()),
        **{name: len(found.wrong[name]) for name in (*MUST_BE_ZERO, "refused_though_done")},
        "excuses": found.excuses,
        "errors": ledgers.errors.total(),
        "wrong": {name: lines[:_SHOWN] for name, lines in found.wrong.items() if lines},
    }
