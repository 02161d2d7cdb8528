"""A state machine that calls the API in any order and compares it with a model.

It uses several clients of one database. Each rule runs one operation on the package and the same
one on the model, and compares the results, errors included. After each rule, everything that is
stored is compared with the model. Every reservation is kept, so former holders also try to settle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pyqueue import (
    UNCHANGED,
    Backoff,
    ConfigurationError,
    DuplicateKey,
    Finished,
    LeaseLost,
    Message,
    QueueError,
    Reservation,
)
from tests.model.places import Cluster
from tests.model.reference import Clash, Held, Item, Lost, Model, Rules
from tests.plans.runner import NOW

#: The queues, their options, and their dead-letter queues.
RULES = {
    "a": Rules("a.dead", lease=10_000, max_tries=2),
    "b": Rules("a.dead", lease=10_000, max_tries=3, history=True),
    "c": Rules("b", lease=10_000),
    "a.dead": Rules("c", lease=10_000, max_tries=1, history=True),
}

clients = st.integers(0, 2)
queues = st.sampled_from(["a", "b", "a", "b", "a.dead", "c"])
keys = st.sampled_from([None, "k1", "k2"])
#: Positions in a list; the first entries are the most useful.
places = st.sampled_from([0, 0, 0, 1, 1, 2, 3, 5, 8])
many = st.lists(places, min_size=1, max_size=4)
leases = st.sampled_from([None, None, 1, 30, 0.25])
delays = st.sampled_from([None, 0, 0.001, 5, 12])
labels = st.sampled_from([None, {"h": 1}, {"i": "x"}])
#: In seconds. Most leases take 10 s.
steps = st.sampled_from([0.001, 0.25, 1, 4.5, 5, 10, 10, 12, 31, 100])
duplicates = st.sampled_from(["ignore", "replace", "replace", "error"])


@dataclass
class Handle:
    """A reservation, and the same reservation in the model."""

    reservation: Reservation[Any]
    held: Held


#: The facts of an error that depend on the code.
OF_CODE = ("where", "fp", "trace")


def millis(value: Any) -> Any:
    """Return a value with its dates as virtual milliseconds."""
    if isinstance(value, datetime):
        return (value - NOW) // timedelta(milliseconds=1)
    if isinstance(value, Mapping):
        return {name: millis(each) for name, each in value.items() if name not in OF_CODE}
    return [millis(each) for each in value] if isinstance(value, list) else value


#: Fields that a message and an item share.
FIELDS = (
    "id",
    "queue",
    "payload",
    "headers",
    "pushed",
    "tries",
    "deliveries",
    "error",
    "progress",
    "checkpoint",
    "dead",
    "trail",
    "priority",
)


def shown_fields(message: Message[Any]) -> dict[str, Any]:
    """Return the fields of a message."""
    fields = {name: millis(getattr(message, name)) for name in FIELDS}
    fields |= {"key": message.key, "due": millis(message.when)}
    fields["trail"] = [{"q": stop["q"], "at": millis(stop["at"])} for stop in message.trail]
    fields["attempts"] = [
        (each.number, millis(each.at), each.type, each.message) for each in message.attempts
    ]
    if isinstance(message, Finished):
        fields |= {"outcome": message.outcome, "processed": millis(message.processed)}
    return fields


def expected(item: Item) -> dict[str, Any]:
    """Return the expected fields of a message."""
    fields = {name: getattr(item, name) for name in (*FIELDS, "attempts")}
    fields |= {"key": item.shown, "due": item.due}
    if item.processed is not None:
        fields |= {"outcome": item.outcome, "processed": item.processed}
    return fields


def outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or the error that it raises."""
    try:
        return call()
    except (QueueError, Lost, Clash) as error:
        return error


class Machine(RuleBasedStateMachine):
    """Clients of one database, and the model of their expected results."""

    #: Creates an empty database with clients of it.
    make: Callable[[], Cluster]
    options: ClassVar[Mapping[str, Rules]] = RULES

    def __init__(self) -> None:
        super().__init__()
        self.cluster = type(self).make()
        self.model = Model(dict(self.options))
        self.handles: list[Handle] = []
        self.ids: list[Any] = ["m0"]
        self.count = 0

    def teardown(self) -> None:
        self.cluster.close()

    def queue(self, client: int, name: str) -> Any:
        """Return a queue of a client, with the options of the model."""
        rules = self.options[name]
        return self.cluster.clients[client].queue(
            name,
            lease=rules.lease / 1000,
            max_tries=rules.max_tries,
            dead_letter=rules.grave,
            history=timedelta(days=18_000) if rules.history else None,
            backoff=Backoff(jitter=0),
            kind="priority" if rules.priorities else "standard",
            strict=not rules.by_age if rules.priorities else None,
        )

    def payload(self) -> dict[str, Any]:
        """Return a payload that no other message has."""
        self.count += 1
        return {"n": self.count}

    def some(
        self, client: int, which: list[int], elsewhere: bool
    ) -> tuple[list[Handle], list[Held], list[Reservation[Any]], Any]:
        """Return some reservations of one queue, and that queue.

        Some have ended. ``elsewhere``: they are pickled, as if another process had them.
        """
        if which[0] == 0 and not any(self.model.holds(each.held) for each in self.handles):
            ready = [queue for queue in self.options if self.model.ready(queue)]
            for queue in ready[:1]:
                self.reserve(client, queue, 2, None)
        likely = sorted(self.handles, key=lambda each: self.model.holds(each.held), reverse=True)
        given = [likely[place] for place in dict.fromkeys(place % len(likely) for place in which)]
        given = [each for each in given if each.reservation.queue == given[0].reservation.queue]
        if elsewhere:
            given = [
                Handle(pickle.loads(pickle.dumps(each.reservation)), each.held) for each in given
            ]
        reservations = [each.reservation for each in given]
        return (
            given,
            [each.held for each in given],
            reservations,
            self.queue(client, reservations[0].queue),
        )

    def id(self, queue: str, place: int) -> Any:
        """Return the id of a message of this queue, or another id."""
        likely = [*(each.id for each in self.model.live(queue)), *reversed(self.ids)]
        return likely[place % len(likely)]

    # ---- time

    @rule(seconds=steps, client=clients, wall=st.sampled_from([0, 0, 0, 0.5, 40, -3_000]))
    def advance(self, seconds: float, client: int, wall: float) -> None:
        """Advance the time, and perhaps set the wall clock of a client's machine."""
        self.cluster.advance(round(seconds * 1000))
        self.cluster.set_wall(client, wall)
        self.model.now = self.cluster.now

    @initialize(queue=st.sampled_from(["a", "b"]), ends=st.booleans())
    def begin(self, queue: str, ends: bool) -> None:
        """Store some messages and hold some of them.

        ``ends``: bury some of them, and commit one.
        """
        keys = ("k1", None, "k2", None, None, None)
        self.push_many(0, queue, [(key, None) for key in keys], {"h": 0}, "ignore")
        self.reserve(0, queue, 5, None)
        if ends:
            self.finish(0, [2, 3], False, "bury")
            self.finish(0, [2], False, "commit")

    # ---- in

    @rule(
        client=clients,
        queue=queues,
        key=keys,
        id=st.sampled_from([None, None, "fresh", "known"]),
        known=places,
        delay=delays,
        at=st.booleans(),
        headers=labels,
        on_duplicate=duplicates,
    )
    def push(
        self,
        client: int,
        queue: str,
        key: str | None,
        id: str | None,
        known: int,
        delay: float | None,
        at: bool,
        headers: dict[str, Any] | None,
        on_duplicate: str,
    ) -> None:
        payload = self.payload()
        chosen = {"fresh": f"m{payload['n']}", "known": self.id(queue, known)}.get(str(id))
        instant = NOW + timedelta(milliseconds=self.model.now + round((delay or -7) * 1000))
        start = {"at": instant} if at else {"delay": delay}
        self._push(
            lambda: [
                self.queue(client, queue).push(
                    payload, key=key, id=chosen, headers=headers, on_duplicate=on_duplicate, **start
                )
            ],
            queue,
            [(payload, key, chosen)],
            delay=round((delay or 0) * 1000),
            headers=headers,
            on_duplicate=on_duplicate,
        )

    @rule(
        client=clients,
        queue=queues,
        entries=st.lists(
            st.tuples(keys, st.sampled_from([None, None, "fresh", "known", "double"])),
            min_size=2,
            max_size=4,
        ),
        headers=labels,
        on_duplicate=duplicates,
    )
    def push_many(
        self,
        client: int,
        queue: str,
        entries: list[tuple[str | None, str | None]],
        headers: dict[str, Any] | None,
        on_duplicate: str,
    ) -> None:
        payloads = [self.payload() for _ in entries]
        ids = [
            {
                "fresh": f"m{payload['n']}",
                "known": self.id(queue, payload["n"] % 5),
                "double": f"of {key}",
            }.get(str(id))
            for payload, (key, id) in zip(payloads, entries, strict=True)
        ]
        self._push(
            lambda: self.queue(client, queue).push_many(
                payloads,
                keys=[key for key, _ in entries],
                ids=ids,
                headers=headers,
                on_duplicate=on_duplicate,
            ),
            queue,
            [
                (payload, key, id)
                for payload, (key, _), id in zip(payloads, entries, ids, strict=True)
            ],
            headers=headers,
            on_duplicate=on_duplicate,
        )

    def _push(
        self, push: Callable[[], list[Any]], queue: str, given: list[Any], **options: Any
    ) -> None:
        answers = made = outcome(push)
        if isinstance(answers, DuplicateKey):
            # The payload identifies an id that pyqueue made, or the key if the payload was
            # replaced. None: the model must not store the message either.
            stored = [message for message, _ in self.cluster.stored().values()]
            ids = {each.payload["n"]: each.id for each in stored}
            if options["on_duplicate"] == "replace":
                ids |= {
                    each.key: each.id
                    for each in stored
                    if each.queue == queue and each.key is not None
                }
            made = [ids.get(payload["n"], ids.get(key)) for payload, key, _ in given]
        assert isinstance(made, list), repr(answers)
        given = [
            (*each[:2], id if each[2] is None else each[2])
            for each, id in zip(given, made, strict=True)
        ]
        should = outcome(lambda: self.model.push(queue, given, **options))
        if isinstance(should, Clash):
            assert isinstance(answers, DuplicateKey)
            assert (answers.keys, answers.ids) == (should.keys, should.ids), repr(answers)
            return
        assert answers == should
        self.ids += [id for id in answers if id is not None]

    # ---- out

    @rule(client=clients, queue=queues, limit=st.sampled_from([None, 1, 2, 3, 4]), lease=leases)
    def reserve(self, client: int, queue: str, limit: int | None, lease: float | None) -> None:
        source, length = self.queue(client, queue), None if lease is None else round(lease * 1000)
        single = limit is None
        found = (
            [source.reserve(0, lease=lease)]
            if single
            else source.reserve_many(limit, timeout=0, lease=lease)
        )
        items = self._received(found, self.model.reserve(queue, limit or 1, length))
        for each, item in zip(filter(None, found), items, strict=True):
            assert millis(each.until) == item.when
            assert (each.state, each.owner) == ("reserved", "me")
            self.handles.append(Handle(each, Held(each.id, item.claim)))

    @rule(client=clients, queue=queues, limit=st.sampled_from([None, 1, 2, 3]))
    def pop(self, client: int, queue: str, limit: int | None) -> None:
        source = self.queue(client, queue)
        found = [source.pop(0)] if limit is None else source.pop_many(limit, timeout=0)
        self._received(found, self.model.pop(queue, limit or 1))

    def _received(self, found: list[Message[Any] | None], items: list[Item]) -> list[Item]:
        given = [each for each in found if each is not None]
        assert [each.id for each in given] == [each.id for each in items], (
            "not these, or not in this order"
        )
        assert [shown_fields(each) for each in given] == [expected(each) for each in items]
        return items

    @rule(client=clients, queue=queues, ends=st.sampled_from(["commit", "raise", "release"]))
    def reserved(self, client: int, queue: str, ends: str) -> None:
        """Use a block. It is renewed in real time, which is too short to matter for any lease."""
        source = self.queue(client, queue)
        items = self.model.reserve(queue, 1, 3_600_000)
        held = [Held(each.id, each.claim) for each in items]
        try:
            with source.reserved(0, lease=3600) as found:
                self._received([found], items)
                if ends == "release" and found is not None:
                    source.release(found)
                elif ends == "raise":
                    raise KeyError("x")
        except KeyError:
            self.model.rollback(
                *held, error={"type": "KeyError", "message": "'x'", "at": self.model.now}
            )
        else:
            (self.model.release if ends == "release" else self.model.commit)(*held)

    # ---- settled by present and former holders

    def _settle(
        self, given: list[Handle], package: Callable[[], object], model: Callable[[], object]
    ) -> list[Handle]:
        """Return those that were settled."""
        should, answer = outcome(model), outcome(package)
        if isinstance(should, Clash):
            assert isinstance(answer, DuplicateKey)
            assert answer.keys == should.keys
            return []
        lost = set(should.held) if isinstance(should, Lost) else set()
        if not lost:
            assert answer is None, repr(answer)
            return given
        assert isinstance(answer, LeaseLost), f"{lost} held it no longer: {answer!r}"
        of = {id(each.reservation): each.held for each in given}
        surely, unknown = (
            {of[id(each)] for each in members} for members in (answer.lost, answer.unknown)
        )
        assert surely <= lost <= surely | unknown
        if unknown:
            assert len(given) > 1, "only of a batch is not all known"
            assert not self.options[given[0].reservation.queue].history
            assert not {each.id for each in unknown} & set(self.model.items), "they are still there"
        return [each for each in given if each.held not in lost]

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        which=many,
        elsewhere=st.booleans(),
        how=st.sampled_from(["commit", "payload", "bury"]),
    )
    def finish(self, client: int, which: list[int], elsewhere: bool, how: str) -> None:
        given, held, reservations, queue = self.some(client, which, elsewhere)
        if how == "commit":
            self._settle(
                given, lambda: queue.commit(*reservations), lambda: self.model.commit(*held)
            )
        elif how == "payload":
            payload = self.payload()
            self._settle(
                given,
                lambda: queue.commit(*reservations, payload=payload),
                lambda: self.model.commit(*held, payload=payload),
            )
        elif any(each.dead for each in reservations):
            assert isinstance(outcome(lambda: queue.bury(*reservations)), ConfigurationError)
        else:
            error = {"type": "error", "message": "why", "at": self.model.now}
            self._settle(
                given,
                lambda: queue.bury(*reservations, error="why"),
                lambda: self.model.bury(*held, error=error),
            )

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        which=many,
        elsewhere=st.booleans(),
        how=st.sampled_from(["rollback", "rollback", "release"]),
        delay=delays,
        error=st.sampled_from([None, "why"]),
    )
    def give_back(
        self,
        client: int,
        which: list[int],
        elsewhere: bool,
        how: str,
        delay: float | None,
        error: str | None,
    ) -> None:
        given, held, reservations, queue = self.some(client, which, elsewhere)
        if how == "release":
            self._settle(
                given, lambda: queue.release(*reservations), lambda: self.model.release(*held)
            )
            return
        why = error and {"type": "error", "message": error, "at": self.model.now}
        wait = None if delay is None else round(delay * 1000)
        self._settle(
            given,
            lambda: queue.rollback(*reservations, delay=delay, error=error),
            lambda: self.model.rollback(*held, delay=wait, error=why),
        )

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        which=many,
        elsewhere=st.booleans(),
        how=st.sampled_from(["extend", "extend", "progress", "checkpoint"]),
        lease=leases,
    )
    def go_on(
        self, client: int, which: list[int], elsewhere: bool, how: str, lease: float | None
    ) -> None:
        given, held, reservations, queue = self.some(
            client, which if how == "extend" else which[:1], elsewhere
        )
        first, payload = reservations[0], self.payload()
        if how == "extend":
            length = first.lease if lease is None else lease
            done = self._settle(
                given,
                lambda: queue.extend(*reservations, lease=length),
                lambda: self.model.extend(*held, lease=round(length * 1000)),
            )
            for each in done:
                assert millis(each.reservation.until) == self.model.items[each.held.id].when
        elif how == "progress":
            progress = {"fraction": 0.5, "note": "half", "at": self.model.now}
            self._settle(
                given,
                lambda: queue.progress(first, 0.5, "half"),
                lambda: self.model.note(held[0], "progress", progress),
            )
        else:
            self._settle(
                given,
                lambda: queue.checkpoint(first, payload),
                lambda: self.model.note(held[0], "checkpoint", payload),
            )

    @precondition(lambda self: self.handles)
    @rule(
        client=clients,
        which=many,
        elsewhere=st.booleans(),
        to=queues,
        named=st.booleans(),
        how=st.sampled_from(["as it is", "as it is", "payload", "update", "each its own"]),
        key=keys,
        delay=delays,
        headers=labels,
    )
    def move(
        self,
        client: int,
        which: list[int],
        elsewhere: bool,
        to: str,
        named: bool,
        how: str,
        key: str | None,
        delay: float | None,
        headers: dict[str, Any] | None,
    ) -> None:
        given, held, reservations, queue = self.some(client, which[:1] if key else which, elsewhere)
        options: dict[str, Any] = {
            "to": to if named else self.queue(client, to),
            "key": key,
            "delay": delay,
            "headers": headers,
        }
        payloads: list[Any] = [...] * len(given)
        if how == "payload":
            payloads = [self.payload()] * len(given)
            options["payload"] = payloads[0]
        elif how == "each its own":
            payloads = [self.payload() if place % 2 == 0 else ... for place in range(len(given))]
        elif how == "update":
            payloads = [
                self.model.items[each.id].payload | {"via": to}
                if each.id in self.model.items
                else ...
                for each in held
            ]
            options["update"] = {"$set": {"via": to}}

        def package() -> None:
            if how == "each its own":
                pairs = [
                    (each, UNCHANGED if payload is ... else payload)
                    for each, payload in zip(reservations, payloads, strict=True)
                ]
                queue.move_many(pairs, **options)
            else:
                queue.move(*reservations, **options)

        pairs = list(zip(held, payloads, strict=True))
        wait = round((delay or 0) * 1000)
        self._settle(
            given,
            package,
            lambda: self.model.move(pairs, to=to, headers=headers, delay=wait, key=key),
        )

    # ---- operations of any client

    def _where(self, queue: str, has: Callable[[str], object]) -> str:
        """Return the queue, or another one that has a wanted message."""
        return next((each for each in (queue, *self.options) if has(each)), queue)

    @rule(client=clients, queue=queues, limit=st.sampled_from([None, None, 1]))
    def redrive(self, client: int, queue: str, limit: int | None) -> None:
        queue = self._where(queue, lambda queue: any(each.dead for each in self.model.free(queue)))
        assert self.queue(client, queue).redrive(limit) == self.model.redrive(queue, limit)

    @rule(client=clients, queue=queues, which=many)
    def replay(self, client: int, queue: str, which: list[int]) -> None:
        queue = self._where(queue, self.model.history)
        done = self.model.history(queue)
        some = [done[place % len(done)] for place in which if done]
        # Of several messages with one key any may get it, so replay one for each key.
        ids = list({each.shown or each.id: each.id for each in some}.values())
        assert self.queue(client, queue).replay(*ids, *ids, "never pushed") == self.model.replay(
            queue, *ids
        )

    @rule(
        client=clients,
        queue=queues,
        how=st.sampled_from(["remove", "remove", "purge", "pause", "pause", "resume"]),
        place=places,
    )
    def tidy(self, client: int, queue: str, how: str, place: int) -> None:
        source, model = self.queue(client, queue), self.model
        if how == "remove":
            id = self.id(queue, place)
            assert source.remove(id) == model.remove(queue, id)
        elif how == "purge":
            assert source.purge() == model.purge(queue)
        elif how == "pause":
            source.pause()
            model.paused.add(queue)
        else:
            source.resume()
            model.paused.discard(queue)

    # ---- reads

    @rule(client=clients, queue=queues, place=places, limit=st.integers(1, 5))
    def read(self, client: int, queue: str, place: int, limit: int) -> None:
        source, model = self.queue(client, queue), self.model
        assert [shown_fields(each) for each in source.peek(limit)] == [
            expected(each) for each in model.ready(queue)[:limit]
        ]
        assert [shown_fields(each) for each in source.history(limit)] == [
            expected(each) for each in model.history(queue)[:limit]
        ]
        since = model.now - 5_000
        assert [each.id for each in source.history(since=NOW + timedelta(milliseconds=since))] == [
            each.id for each in model.history(queue) if (each.processed or 0) >= since
        ]
        assert source.paused() == (queue in model.paused)
        self._counted(source.counts(), queue)
        assert millis(source.next_when()) == model.next_when(queue)
        id = self.id(queue, place)
        found, item = source.get(id), model.items.get(id)
        if item is None or item.queue != queue:
            assert found is None
        else:
            assert (shown_fields(found), found.state) == (expected(item), model.state(item))
        listed = {each.name: each for each in self.cluster.clients[client].queues()}
        assert {each.queue for each in model.items.values()} <= set(listed) <= set(self.options)
        for name, each in listed.items():
            self._counted(each.counts, name)
            assert each.paused == (name in model.paused)

    def _counted(self, counts: Any, queue: str) -> None:
        assert (
            counts.ready,
            counts.scheduled,
            counts.reserved,
            counts.history,
        ) == self.model.counts(queue)
        assert counts.total == len(self.model.live(queue))

    # ---- checks after every step

    @invariant()
    def check(self) -> None:
        """Compare everything that is stored with the model."""
        stored = self.cluster.stored()
        assert set(stored) == set(self.model.items), "a message is lost, or stored again"
        holders = {each.held: each.reservation.token for each in self.handles}
        for id, (message, token) in stored.items():
            item = self.model.items[id]
            assert shown_fields(message) == expected(item)
            assert message.state == self.model.state(item)
            if item.claim:
                assert item.processed is not None or token == holders.get(
                    Held(id, item.claim), token
                )
            else:
                assert token is None or item.processed is not None, "a free message has a token"

        # No message is held twice, and a key has one live message in its queue.
        keyed = [
            (each.queue, each.key) for each in self.model.items.values() if each.key is not None
        ]
        assert len(keyed) == len(set(keyed))
        assert all(
            each.processed is None for each in self.model.items.values() if each.key is not None
        )
        holds = [each.held.id for each in self.handles if self.model.holds(each.held)]
        assert len(holds) == len(set(holds))
