"""Every interleaving of a few consumers, at the level of database commands: real plans against
documents in memory.

A state is what is stored, the time, and of each consumer what it holds, what it is doing, and all
answers it got for that. A plan cannot be copied, so it is run again from its answers whenever a
consumer goes on. In each state every consumer may have its next command carried out, crash before
or after it, or lose its answer; and time may pass, by a lease. States that differ by the names of
tokens or the dates of what has passed are one, so there is an end to them.

A step that breaks a promise raises ``Broken``, whose text is the way there: ``Explorer.replay``
goes it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import pytest

from pyqueue import UNCHANGED, LeaseLost, Reservation, Unavailable
from pyqueue.backends.options import Options
from pyqueue.backends.pushing import new_document
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.requests import Change, Coalesce, Command, EnsureQueue, ServerTime, Signal
from pyqueue.waiters import Waiters
from tests.plans.runner import NOW
from tests.plans.store import Process, World

__all__ = ["Broken", "Explorer"]

#: The queues, and where each moves to.
LOOP: Final = {"a": "b", "b": "c", "c": "a"}
PLACES: Final = {queue: place for place, queue in enumerate(LOOP)}
#: All leases are as long as a step of the time: so every instant is a whole number of them.
LEASE: Final = timedelta(seconds=10)
#: More than one act makes.
TOKENS: Final = 100


class Broken(AssertionError):
    """A promise was not kept."""


class Chosen(Exception):
    """The plan needs one more random number, below this."""

    def __init__(self, bound: int) -> None:
        self.bound = bound


class Act(NamedTuple):
    """What a consumer does: receive from a queue, or settle some of what it holds, or held."""

    name: str
    queue: str
    limit: int = 0
    held: tuple[Reservation[Any], ...] = ()

    def __repr__(self) -> str:
        what = (
            [str(self.limit)]
            if self.limit
            else [f"{each.id} by {each.token}" for each in self.held]
        )
        return f"{self.name} {self.queue} {', '.join(what)}"


class Consumer(NamedTuple):
    """One consumer, between two commands."""

    #: What it received, former reservations included; only so many of the last.
    held: tuple[Reservation[Any], ...] = ()
    act: Act | None = None
    #: All answers so far, the instants it was told and the errors included; and its random numbers.
    answers: tuple[Any, ...] = ()
    numbers: tuple[int, ...] = ()
    #: When it went on after the last of them, and what it asks for now.
    since: datetime = NOW
    instants: tuple[Any, ...] = ()
    asks: Any = None
    #: What its act did so far: the claims that it settled.
    done: tuple[tuple[Any, str], ...] = ()
    #: How many tokens it has made, before this act.
    tokens: int = 0


class State(NamedTuple):
    """All there is at a moment."""

    documents: dict[Any, dict[str, Any]]
    now: datetime
    consumers: tuple[Consumer, ...]
    finished: frozenset[Any] = frozenset()


class Explorer:
    """All states that can be reached.

    Args:
        acts: what consumers do: take, pop, move, commit, rollback, release.
        limits: how many they receive at most, each as an act of its own.
        memory: how many reservations a consumer remembers.
        faults: whether answers are lost; consumers crash anyway.
    """

    def __init__(
        self,
        *,
        acts: Sequence[str] = ("take", "move", "commit"),
        limits: Sequence[int] = (2,),
        memory: int = 3,
        consumers: int = 2,
        messages: int = 2,
        crashes: bool = True,
        faults: bool = False,
    ) -> None:
        self._acts, self._limits, self._memory, self._crashes, self._faults = (
            acts,
            limits,
            memory,
            crashes,
            faults,
        )
        options = Options(lease=LEASE.total_seconds(), max_tries=None)
        self._backends = {
            queue: QueuePlans(queue, options, command_timeout=LEASE.total_seconds())
            for queue in LOOP
        }
        self._asker = Process(World(0), "a")
        self._store = self._asker.world.store
        self._ids = frozenset(f"m{n}" for n in range(1, messages + 1))
        self._begin = State(
            {
                id: new_document("a", self._backends["a"].kind, None, NOW, NOW, 0, None, None, id)
                for id in sorted(self._ids)
            },
            NOW,
            (Consumer(),) * consumers,
        )
        self._made: Iterator[str] = iter(())
        self._drawn: Iterator[int] = iter(())
        self.states = 0
        self.steps = 0

    # ---- exploring

    def explore(self, depth: int | None = None, *opening: str) -> None:
        """Visit every state; ``depth``: at most so many steps from the beginning, or from where
        these steps led.
        """
        start = self.replay(*opening)[-1]
        with self._determined():
            way: dict[Any, tuple[Any, str] | None] = {self._mark(start): None}
            front = [(self._mark(start), start)]
            for left in itertools.count() if depth is None else reversed(range(depth)):
                further = []
                for mark, state in front:
                    try:
                        for label, after in self._after(state):
                            self.steps += 1
                            self._check(after, label)
                            reached = (
                                self._mark(after) if left or depth is None else None
                            )  # at the end it matters not
                            if reached is not None and reached not in way:
                                way[reached] = (mark, label)
                                further.append((reached, after))
                    except Broken as broken:
                        told = self._told(opening, way, mark, broken.args[1])
                        raise Broken(f"{broken.args[0]}\n{told}") from None
                self.states = len(way)
                front = further
                if not front:
                    return

    @staticmethod
    def _told(opening: Sequence[str], way: dict[Any, Any], mark: Any, last: str) -> str:
        labels = [last]
        while (step := way[mark]) is not None:
            mark, label = step
            labels.append(label)
        return "replay(" + ",\n  ".join(repr(each) for each in (*opening, *reversed(labels))) + ")"

    def replay(self, *labels: str) -> list[State]:
        """Go a way again; answers the states on it."""
        states = [self._begin]
        with self._determined():
            for label in labels:
                states.append(
                    next(after for each, after in self._after(states[-1]) if each == label)
                )
        return states

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Tokens and random numbers are told by the state."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pyqueue.backends.transitions.new_token", lambda: next(self._made))
            patch.setattr("pyqueue.backends.claiming.random.randrange", self._number)
            yield

    def _number(self, bound: int) -> int:
        for number in self._drawn:
            return number
        raise Chosen(bound)

    # ---- steps

    def _after(self, state: State) -> Iterator[tuple[str, State]]:
        """Every step from a state, with a label."""
        for which, consumer in enumerate(state.consumers):
            if consumer.act is None:
                for act in self._choices(consumer):
                    started = consumer._replace(act=act, since=state.now)
                    yield from self._on(f"{which}: {act}", state, which, started)
            else:
                yield from self._command(state, which, consumer)
        if any(each["when"] > state.now for each in state.documents.values()):
            yield from self._tick(state)

    def _choices(self, consumer: Consumer) -> Iterator[Act]:
        for name in self._acts:
            if name in ("take", "pop"):
                for queue, limit in itertools.product(LOOP, self._limits):
                    yield Act(name, queue, limit)
            else:
                for size in (1, 2):
                    for some in itertools.combinations(consumer.held, size):
                        if len({each.queue for each in some}) == 1:
                            yield Act(name, some[0].queue, held=some)

    def _tick(self, state: State) -> Iterator[tuple[str, State]]:
        """Time passes; who is between an answer and the next command may see it or not."""
        later = state._replace(now=state.now + LEASE)
        between = [which for which, each in enumerate(state.consumers) if each.act is not None]
        for seen in itertools.product((False, True), repeat=len(between)):
            states = [("time passes", later)]
            for which in itertools.compress(between, seen):
                states = [
                    on
                    for label, each in states
                    for on in self._on(
                        f"{label}, {which} sees it",
                        each,
                        which,
                        each.consumers[which]._replace(since=later.now),
                    )
                ]
            yield from states

    def _command(self, state: State, which: int, consumer: Consumer) -> Iterator[tuple[str, State]]:
        label = f"{which}: {type(consumer.asks).__name__}"
        after, answer, done = self._carry_out(state, which, consumer, label)
        answered = consumer._replace(done=consumer.done + done, since=state.now)
        told = consumer.answers + consumer.instants
        yield from self._on(label, after, which, answered._replace(answers=(*told, answer)))
        crashed = Consumer(tokens=consumer.tokens + TOKENS)
        if self._crashes:  # before a command is after the one before it
            yield f"{label}, and crashes", self._with(after, which, crashed)
        if self._faults:
            lost = (*told, Unavailable("cut off"))
            cut = consumer._replace(since=state.now, answers=lost)
            yield from self._on(f"{label} never arrives", state, which, cut)
            yield from self._on(
                f"{label}, answer lost", after, which, answered._replace(answers=lost)
            )

    @staticmethod
    def _with(state: State, which: int, consumer: Consumer) -> State:
        return state._replace(
            consumers=(*state.consumers[:which], consumer, *state.consumers[which + 1 :])
        )

    def _carry_out(
        self, state: State, which: int, consumer: Consumer, label: str
    ) -> tuple[State, Any, tuple[tuple[Any, str], ...]]:
        """Carry out what a consumer asks for, and watch what it does."""
        act = consumer.act
        assert act is not None
        done: list[tuple[Any, str]] = []
        finished = set(state.finished)
        held = {(each.id, each.token) for each in act.held}
        made = {f"{which}.{consumer.tokens + n}" for n in range(TOKENS)}
        to = LOOP[act.queue] if act.name == "move" else act.queue

        def watch(before: dict[str, Any], after: dict[str, Any] | None) -> None:
            id, token = before["_id"], before.get("token")
            if act.name in ("take", "pop") and after is not None:
                if before["when"] > state.now:
                    raise Broken(f"{id} is claimed under the live lease of {token}", label)
                if after.get("token") not in made or {before["q"], after["q"]} != {act.queue}:
                    raise Broken(
                        f"{id} is claimed from another queue, or not claimed but changed", label
                    )
                return
            if act.name == "pop":
                if token not in made and (act.limit > 1 or before["when"] > state.now):
                    raise Broken(f"{id} is held by {token}, and popped by another", label)
            elif (id, token) not in held:
                raise Broken(f"{id} is held by {token}, and settled by another", label)
            done.append((id, str(token)))
            if act.name in ("commit", "pop"):
                if after is not None:
                    raise Broken(f"{id} is not finished", label)
                finished.add(id)
            elif after is None or "token" in after or after["q"] != to:
                raise Broken(f"{id} is not where it should be: {after}", label)

        self._store.documents, self._store.on_change = dict(state.documents), watch
        answer = self._store.answer(self._asker, consumer.asks)
        after = state._replace(documents=self._store.documents, finished=frozenset(finished))
        return after, answer, tuple(done)

    # ---- a consumer goes on

    def _on(
        self, label: str, state: State, which: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Let a consumer go on to its next command, or the end of its act; for each random number
        if it needs one.
        """
        try:
            yield label, self._with(state, which, self._run(which, consumer, label))
        except Chosen as chosen:
            for number in range(min(chosen.bound, len(self._ids) + 1)):  # further on is as far
                more = consumer._replace(numbers=(*consumer.numbers, number))
                yield from self._on(f"{label}, {number}", state, which, more)

    def _run(self, which: int, consumer: Consumer, label: str) -> Consumer:
        assert consumer.act is not None
        self._made = (f"{which}.{n}" for n in itertools.count(consumer.tokens))
        self._drawn = iter(consumer.numbers)
        plan = self._plan(consumer.act)
        told = iter(consumer.answers)
        instants: list[datetime] = []
        stack = [plan]
        answer: Any = None
        while True:
            try:
                asks = (
                    stack[-1].throw(answer)
                    if isinstance(answer, Exception)
                    else stack[-1].send(answer)
                )
            except StopIteration as stop:
                stack.pop()
                if not stack:
                    return self._ended(which, consumer, label, stop.value)
                answer = stop.value[0]  # of a batch of one
                continue
            except (LeaseLost, Unavailable) as error:
                stack.pop()
                if not stack:
                    return self._ended(which, consumer, label, error)
                answer = error
                continue
            match asks:
                case Coalesce():
                    stack.append(asks.batch([asks.item]))
                    answer = None
                case EnsureQueue():
                    answer = asks.kind
                case Signal():
                    answer = None
                case _:
                    try:
                        answer = next(told)
                    except StopIteration:
                        if isinstance(asks, ServerTime):
                            answer = consumer.since
                            instants.append(answer)
                        else:
                            assert isinstance(asks, Command)
                            return consumer._replace(asks=asks, instants=tuple(instants))

    def _plan(self, act: Act) -> Any:
        backend = self._backends[act.queue]
        if act.name in ("take", "pop"):
            line = Waiters("t")
            line.scan.flag_read = NOW + timedelta(days=1000)  # nobody pauses here
            return backend.receive(line, act.limit, timeout=0, pop=act.name == "pop")
        if act.name == "move":
            return backend.move(
                [(each, UNCHANGED) for each in act.held], to=self._backends[LOOP[act.queue]]
            )
        plans: dict[str, Callable[[], Any]] = {
            "commit": lambda: backend.commit(act.held),
            "rollback": lambda: backend.rollback(act.held, delay=0),
            "release": lambda: backend.release(act.held),
        }
        return plans[act.name]()

    def _ended(self, which: int, consumer: Consumer, label: str, result: Any) -> Consumer:
        """An act is over: what it told must be what it did."""
        act, done = consumer.act, set(consumer.done)
        assert act is not None
        idle = Consumer(held=consumer.held, tokens=consumer.tokens + TOKENS)
        if isinstance(result, Unavailable):
            return idle
        if act.name == "take":
            return idle._replace(held=(*idle.held, *result)[-self._memory :])
        if act.name == "pop":
            popped = [each.id for each in result]
            if len(popped) != len(set(popped)) or not set(popped) <= {id for id, _ in done}:
                raise Broken(f"{popped} is handed out, but {done} was finished", label)
            return idle
        settled = {(each.id, each.token) for each in act.held}
        if isinstance(result, LeaseLost):
            lost, unknown = (
                {(each.id, each.token) for each in some} for some in (result.lost, result.unknown)
            )
            if lost & done:
                raise Broken(f"{lost} is told to be lost, but {done} was settled", label)
            if unknown and (unknown <= done or not unknown & done):
                raise Broken(
                    f"{unknown} is told to be unknown, and {done} was settled: that can be known",
                    label,
                )
            settled -= lost | unknown
        if not settled <= done:
            raise Broken(f"{settled} is told to be settled, but {done} was", label)
        return idle

    # ---- what holds in every state, and which states are one

    def _check(self, state: State, label: str) -> None:
        if set(state.documents) | state.finished != self._ids:
            raise Broken("a message is lost", label)
        if set(state.documents) & state.finished:
            raise Broken("a message is there again after it was finished", label)
        for each in state.documents.values():
            if each["q"] not in LOOP or each["when"] > state.now + LEASE or "processed" in each:
                raise Broken(f"{each['_id']} will never be received again: {each}", label)
        now = {(each["_id"], each.get("token")) for each in state.documents.values()}
        held = [
            each
            for consumer in state.consumers
            for each in consumer.held
            if (each.id, each.token) in now
        ]
        if len(held) != len({each.id for each in held}):
            raise Broken(f"one message is held twice: {held}", label)

    def _mark(self, state: State) -> Any:
        """What tells a state from others: neither the names of tokens, nor which of the consumers
        is which, nor which queue of the loop is the first, nor how long ago is what has passed.
        """
        now = state.now
        documents = [state.documents[id] for id in sorted(state.documents)]
        first = PLACES[documents[0]["q"]] if documents else 0
        past = {each["when"] for each in documents}
        for one in state.consumers:
            for answer in (*one.answers, *one.instants):
                if type(answer) is datetime:
                    past.add(answer)
                elif type(answer) is list:
                    past.update(each["when"] for each in answer)
                elif type(answer) is dict:
                    past.add(answer["when"])
        ranks = {each: place for place, each in enumerate(sorted(past))}
        passed = sum(each < now for each in past)
        names: dict[str | None, int] = {None: -1}

        def time(value: datetime) -> int:
            return ranks[value] - passed if value < now else (value - now) // LEASE

        def stored(each: dict[str, Any]) -> Any:
            queue = PLACES[each["q"]] - first if "q" in each else None
            token = each.get("token")
            return (
                each["_id"],
                queue and queue % 3,
                time(each["when"]),
                names.setdefault(token, len(names)),
            )

        def reservation(each: Any) -> Any:
            if type(each) is not Reservation:
                return each.id
            queue = (PLACES[each.queue] - first) % 3
            return each.id, queue, each.until > now, names.setdefault(each.token, len(names))

        def answered(value: Any) -> Any:
            kind = type(value)
            if kind is datetime:
                return time(value)
            if kind is dict:
                return stored(value)
            if kind is list:
                return tuple(map(stored, value))
            return (
                value
                if kind is int or value is None
                else value.matched
                if kind is Change
                else "error"
            )

        def rough(each: Consumer) -> Any:
            act = (
                (each.act.name, (PLACES[each.act.queue] - first) % 3, each.act.limit)
                if each.act
                else ("", 0, 0)
            )
            held = tuple(
                (it.id, (PLACES[it.queue] - first) % 3, it.until > now) for it in each.held
            )
            return (*act, len(each.answers), len(held), held)

        def exact(each: Consumer) -> Any:
            return (
                tuple(map(reservation, each.held)),
                tuple(map(reservation, each.act.held)) if each.act else None,
                tuple(map(answered, each.answers)),
                each.numbers,
                tuple(map(time, each.instants)),
                tuple((id, names.setdefault(token, len(names))) for id, token in each.done),
            )

        messages = tuple(map(stored, documents))
        consumers = sorted(
            ((rough(each), each) for each in state.consumers), key=lambda pair: pair[0]
        )
        return messages, tuple((about, exact(each)) for about, each in consumers), state.finished
