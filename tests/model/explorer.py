"""Explore every interleaving of a few consumers, one database command at a time.

Real plans run against documents in memory. A state holds the documents, the time, and for each
consumer its reservations, its present act and all answers of that act. A plan cannot be copied, so
it runs again from its answers whenever a consumer continues. In each state, every consumer may have
its next command carried out, crash before or after it, or lose its answer; and the time may advance
by a lease. States that differ only in the names of tokens or in past dates count as one, so the
number of states is finite.

A step that breaks a promise raises ``PromiseBroken``. Its text is the path to that step, for
``Explorer.replay``.
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
from pyqueue.backends.pushing import Content, new_document
from pyqueue.backends.queue_plans import plans_of
from pyqueue.hooks import Tell
from pyqueue.requests import (
    Change,
    Coalesce,
    Command,
    EnsureQueue,
    Latecomers,
    MonotonicTime,
    ServerTime,
    Signal,
)
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW
from tests.plans.store import Process, World

#: The queues, each with the target of its moves.
LOOP: Final = {"a": "b", "b": "c", "c": "a"}
PLACES: Final = {queue: place for place, queue in enumerate(LOOP)}
#: Every lease is as long as one step of the time, so every date is a whole number of leases.
LEASE: Final = timedelta(seconds=10)
#: More tokens than one act makes.
TOKENS: Final = 100


class PromiseBroken(AssertionError):
    """A promise was not kept."""


class Chosen(Exception):
    """The plan needs one more random number, below this bound."""

    def __init__(self, bound: int) -> None:
        self.bound = bound


class Act(NamedTuple):
    """An act of a consumer: receive from a queue, or settle present or former reservations."""

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

    #: Its latest reservations, also former reservations.
    held: tuple[Reservation[Any], ...] = ()
    act: Act | None = None
    #: All answers so far, with the dates that it received, errors, and its random numbers.
    answers: tuple[Any, ...] = ()
    numbers: tuple[int, ...] = ()
    #: When it last continued, and its next request.
    since: datetime = NOW
    instants: tuple[Any, ...] = ()
    asks: Any = None
    #: The claims that its act has settled so far.
    done: tuple[tuple[Any, str], ...] = ()
    #: How many tokens it made before this act.
    tokens: int = 0


class State(NamedTuple):
    """All of a moment: documents, time and consumers."""

    documents: dict[Any, dict[str, Any]]
    now: datetime
    consumers: tuple[Consumer, ...]
    finished: frozenset[Any] = frozenset()


class Explorer:
    """All states that can be reached.

    Args:
        acts: The operations of consumers: take, pop, move, commit, rollback, release.
        limits: The limits of receives; each limit is a separate act.
        memory: How many reservations a consumer remembers.
        failures: Whether answers are lost. Consumers crash in any case.
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
        failures: bool = False,
    ) -> None:
        self._acts, self._limits, self._memory, self._crashes, self._failures = (
            acts,
            limits,
            memory,
            crashes,
            failures,
        )
        options = Options(lease=LEASE.total_seconds(), max_tries=None)
        self._backends = {
            queue: plans_of(queue, options, command_timeout=LEASE.total_seconds()) for queue in LOOP
        }
        self._asker = Process(World(0), "a")
        self._store = self._asker.world.store
        self._ids = frozenset(f"m{n}" for n in range(1, messages + 1))
        self._begin = State(
            {
                id: new_document("a", self._backends["a"].kind, NOW, NOW, Content(None, 0, id=id))
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
        """Visit every state within ``depth`` steps of the opening; None: without a limit."""
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
                            # At the last step the key is not needed.
                            reached = self._mark(after) if left or depth is None else None
                            if reached is not None and reached not in way:
                                way[reached] = (mark, label)
                                further.append((reached, after))
                    except PromiseBroken as broken:
                        path = self._path(opening, way, mark, broken.args[1])
                        raise PromiseBroken(f"{broken.args[0]}\n{path}") from None
                self.states = len(way)
                front = further
                if not front:
                    return

    @staticmethod
    def _path(opening: Sequence[str], way: dict[Any, Any], mark: Any, last: str) -> str:
        labels = [last]
        while (step := way[mark]) is not None:
            mark, label = step
            labels.append(label)
        return "replay(" + ",\n  ".join(repr(each) for each in (*opening, *reversed(labels))) + ")"

    def replay(self, *labels: str) -> list[State]:
        """Repeat a path and return the states on it."""
        states = [self._begin]
        with self._determined():
            for label in labels:
                states.append(
                    next(after for each, after in self._after(states[-1]) if each == label)
                )
        return states

    @contextmanager
    def _determined(self) -> Iterator[None]:
        """Take tokens and random numbers from the state."""
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
        """Generate every step from a state, with a label."""
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
        """Advance the time; a consumer between two commands may notice the new time or not."""
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
        answers = consumer.answers + consumer.instants
        yield from self._on(label, after, which, answered._replace(answers=(*answers, answer)))
        crashed = Consumer(tokens=consumer.tokens + TOKENS)
        if self._crashes:  # before a command is after the one before it
            yield f"{label}, and crashes", self._with(after, which, crashed)
        if self._failures:
            lost = (*answers, Unavailable("cut off"))
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
        """Carry out the request of a consumer, and check its changes."""
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
                    raise PromiseBroken(f"{id} is claimed under the live lease of {token}", label)
                if after.get("token") not in made or {before["q"], after["q"]} != {act.queue}:
                    raise PromiseBroken(
                        f"{id} is claimed from another queue, or not claimed but changed", label
                    )
                return
            if act.name == "pop":
                if token not in made and (act.limit > 1 or before["when"] > state.now):
                    raise PromiseBroken(f"{id} is held by {token}, and popped by another", label)
            elif (id, token) not in held:
                raise PromiseBroken(f"{id} is held by {token}, and settled by another", label)
            done.append((id, str(token)))
            if act.name in ("commit", "pop"):
                if after is not None:
                    raise PromiseBroken(f"{id} is not finished", label)
                finished.add(id)
            elif after is None or "token" in after or after["q"] != to:
                raise PromiseBroken(f"{id} is not where it should be: {after}", label)

        self._store.documents, self._store.on_change = dict(state.documents), watch
        answer = self._store.answer(self._asker, consumer.asks)
        after = state._replace(documents=self._store.documents, finished=frozenset(finished))
        return after, answer, tuple(done)

    # ---- the next step of a consumer

    def _on(
        self, label: str, state: State, which: int, consumer: Consumer
    ) -> Iterator[tuple[str, State]]:
        """Continue a consumer to its next command, or to the end of its act.

        If the plan needs a random number, continue once for each number.
        """
        try:
            yield label, self._with(state, which, self._run(which, consumer, label))
        except Chosen as chosen:
            for number in range(min(chosen.bound, len(self._ids) + 1)):  # higher numbers act alike
                more = consumer._replace(numbers=(*consumer.numbers, number))
                yield from self._on(f"{label}, {number}", state, which, more)

    def _run(self, which: int, consumer: Consumer, label: str) -> Consumer:
        assert consumer.act is not None
        self._made = (f"{which}.{n}" for n in itertools.count(consumer.tokens))
        self._drawn = iter(consumer.numbers)
        plan = self._plan(consumer.act)
        answers = iter(consumer.answers)
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
                answer = stop.value[0]  # of a batch with one item
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
                case Signal() | Latecomers() | Tell():
                    answer = None
                case MonotonicTime():
                    answer = 0.0
                case _:
                    try:
                        answer = next(answers)
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
            waiters = Waiters("t")
            # No queue is paused or limited here.
            waiters.scan.flag_read = NOW + timedelta(days=1000)
            waiters.scan.limit.known = True
            return backend.receive(waiters, act.limit, timeout=0, pop=act.name == "pop")
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
        """End an act, and check that its result agrees with its effect."""
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
                raise PromiseBroken(f"{popped} is handed out, but {done} was finished", label)
            return idle
        settled = {(each.id, each.token) for each in act.held}
        if isinstance(result, LeaseLost):
            lost, unknown = (
                {(each.id, each.token) for each in some} for some in (result.lost, result.unknown)
            )
            if lost & done:
                raise PromiseBroken(f"{lost} is reported as lost, but {done} was settled", label)
            if unknown and (unknown <= done or not unknown & done):
                raise PromiseBroken(
                    f"{unknown} is reported as unknown, but {done} was settled: this can be known",
                    label,
                )
            settled -= lost | unknown
        if not settled <= done:
            raise PromiseBroken(f"{settled} is reported as settled, but {done} was", label)
        return idle

    # ---- checks of every state, and equal states

    def _check(self, state: State, label: str) -> None:
        if set(state.documents) | state.finished != self._ids:
            raise PromiseBroken("a message is lost", label)
        if set(state.documents) & state.finished:
            raise PromiseBroken("a message is there again after it was finished", label)
        for each in state.documents.values():
            if each["q"] not in LOOP or each["when"] > state.now + LEASE or "processed" in each:
                raise PromiseBroken(f"{each['_id']} will never be received again: {each}", label)
        now = {(each["_id"], each.get("token")) for each in state.documents.values()}
        held = [
            each
            for consumer in state.consumers
            for each in consumer.held
            if (each.id, each.token) in now
        ]
        if len(held) != len({each.id for each in held}):
            raise PromiseBroken(f"one message is held twice: {held}", label)

    def _mark(self, state: State) -> Any:
        """Return a key that is equal for equivalent states.

        The key ignores the names of tokens, the order of consumers, the queue of the loop that
        comes first, and how long ago a past date was.
        """
        now = state.now
        documents = [state.documents[id] for id in sorted(state.documents)]
        first = PLACES[documents[0]["q"]] if documents else 0
        dates = _dates(state)
        ranks = {each: place for place, each in enumerate(sorted(dates))}
        passed = sum(each < now for each in dates)
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


def _dates(state: State) -> set[datetime]:
    """Return the dates in the documents of a state and in the answers of its consumers."""
    dates = {each["when"] for each in state.documents.values()}
    for consumer in state.consumers:
        for answer in (*consumer.answers, *consumer.instants):
            if type(answer) is datetime:
                dates.add(answer)
            elif type(answer) is list:
                dates.update(each["when"] for each in answer)
            elif type(answer) is dict:
                dates.add(answer["when"])
    return dates
