"""The load: processes that push, move, consume and pop, with blocking clients and async ones.

What a worker does is written once, as a generator that yields what it wants done: a ``Do`` for a call, a number for a pause in seconds. In a
process with a blocking client each runs in a thread, in one with an async client each is a task.

Messages are pushed to ``orders``, moved to ``parsed``, from there to ``billed`` or ``packed``, and committed. Those of ``events`` are popped, and
those of ``states`` have keys. Whoever settles a message writes its token into it by the same update, where the operation allows it: a move
and a commit with history into the payload's ``trail``, a rollback into the error. So the database has the evidence of who settled what.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyqueue import AsyncClient, Client, Delivery, Reservation, To
from tests.chaos import clock_skew as skew
from tests.chaos.ledger import Call, Ledger, by_token

__all__ = ["CREW", "QUEUES", "Role", "work"]

#: The options of each queue. Leases are short, so that they run out.
QUEUES: dict[str, dict[str, Any]] = {
    "orders": {"lease": 3},
    "parsed": {"lease": 4},
    "billed": {"lease": 2},
    "packed": {"lease": 5, "history": 86400},
    "events": {"lease": 2},
    "states": {"lease": 2},
}
NEXT = {"orders": ("parsed",), "parsed": ("billed", "packed")}
BATCH = 100
LATE = 20  # messages that a consumer holds for too long, of a batch: each is settled by a command of its own
KEYS = 50
COMMAND = 8.0  # seconds that a command may take
BACKLOG = 4000  # messages in a queue, from which on producers wait
STORM = 24  # tasks of a cancellation storm

Plan = Generator[Any, Any, None]


@dataclass(frozen=True)
class Role:
    """What a process does: whether its client is async, and its workers by name and arguments."""

    kind: str  # producer, mover or consumer
    asynchronous: bool
    workers: tuple[tuple[str, ...], ...]


CREW: dict[str, Role] = {
    "producer-1": Role("producer", False, (("produce", "orders"), ("produce", "events"))),
    "producer-2": Role(
        "producer", True, (("produce", "orders"), ("produce", "events"), ("keyed",), ("trickle",))
    ),
    "mover-1": Role("mover", False, (("settle", "orders"), ("settle", "parsed"))),
    "mover-2": Role("mover", True, (("pipeline",), ("settle", "parsed"))),
    "consumer-1": Role(
        "consumer", False, (("settle", "billed"), ("settle", "packed"), ("pop", "events"))
    ),
    "consumer-2": Role(
        "consumer",
        True,
        (("settle", "billed"), ("settle", "packed"), ("pop", "events"), ("settle", "states")),
    ),
    "consumer-3": Role(
        "consumer", False, (("settle", "orders"), ("settle", "billed"), ("settle", "states"))
    ),
}


@dataclass
class Do:
    """A call to be made, and noted."""

    op: str
    queue: str
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    #: What of it goes into the ledger.
    items: object = None

    def told(self, got: Any) -> Any:
        """What it returned, in a list where others return several."""
        if self.method == "push":
            return [got]
        return (
            [each for each in [got] if each is not None]
            if self.method in ("pop", "reserve")
            else got
        )


class Load:
    """What the workers of a process share."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.role = CREW[spec["crew"]]
        self.rate: float = spec["rate"]
        self.dice = random.Random(f"{spec['seed']}/{self.name}")
        self.ledger = Ledger(Path(spec["ledger"]))
        self.stopping = threading.Event()
        #: Whether everything is to be settled soon and well.
        self.hurrying = False
        #: Until when callers are cancelled, by the monotonic clock.
        self.storm_until = 0.0
        self._numbers = itertools.count()

    def ids(self, count: int) -> list[str]:
        """Ids that nobody else has."""
        return [f"{self.name}.{next(self._numbers)}" for _ in range(count)]

    def obey(self) -> None:
        """Do as the program says, until it is gone."""
        for line in sys.stdin:
            match json.loads(line):
                case ["hurry"]:
                    self.hurrying = True
                case ["stop"]:
                    self.stopping.set()
                case ["skew", ahead]:
                    skew.step(ahead)
                case ["storm", seconds]:  # one way only: there are no other orders
                    self.storm_until = time.monotonic() + seconds
        os._exit(1)

    # ---- workers: producers

    def produce(self, queue: str) -> Plan:
        """Push at a rate, mostly by the hundred. What nobody knows the outcome of is pushed again, with the same ids."""
        share = {"orders": 0.4, "events": 0.1}[queue]  # there are two of each
        due = time.monotonic()
        while not self.stopping.is_set():
            many = self.dice.random() < 0.8
            count = self.dice.randint(BATCH // 2, BATCH) if many else 1
            due = max(due, time.monotonic() - 10) + count / (self.rate * share)
            yield max(0.0, due - time.monotonic())
            ids = self.ids(count)
            payloads = [{"n": id, "trail": []} for id in ids]
            delay = self.dice.choice([None] * 9 + [1.5])
            if many:
                push = Do(
                    "push", queue, "push_many", (payloads,), {"ids": ids, "delay": delay}, ids
                )
            else:
                push = Do(
                    "push",
                    queue,
                    "push",
                    (payloads[0],),
                    {"id": ids[0], "delay": delay, "headers": {"one": True}},
                    ids,
                )
            while (yield push).outcome != "ok" and not self.stopping.is_set():
                yield 0.05
            if self.dice.random() < 0.1:
                yield from self._wait_for_room(queue)

    def _wait_for_room(self, queue: str) -> Plan:
        while not self.stopping.is_set():
            counted = yield Do("look", queue, "counts")
            if counted.got is not None and counted.got.total < BACKLOG:
                return
            yield 0.5

    def trickle(self) -> Plan:
        """Push one by one, each caller for itself: such calls are joined."""
        while not self.stopping.is_set():
            [id] = self.ids(1)
            push = Do("push", "orders", "push", ({"n": id, "trail": []},), {"id": id}, [id])
            while (yield push).outcome != "ok" and not self.stopping.is_set():
                yield 0.05
            yield self.dice.uniform(0, 0.2)

    def keyed(self) -> Plan:
        """Push with a few keys again and again."""
        while not self.stopping.is_set():
            [n] = self.ids(1)
            what = self.dice.choice(["ignore", "replace", "replace", "error"])
            key = f"key-{self.dice.randrange(KEYS)}"
            yield Do(
                "push",
                "states",
                "push",
                ({"n": n, "trail": []},),
                {"key": key, "on_duplicate": what},
                [n],
            )
            yield self.dice.uniform(0, 0.1)

    # ---- workers: movers and consumers

    def settle(self, queue: str) -> Plan:
        """Reserve, and settle in all the ways there are. Some hold what they got for longer than its lease, some never settle it."""
        late: list[tuple[float, list[Reservation[Any]]]] = []
        while not self.stopping.is_set():
            limit = self.dice.choice([1, BATCH // 2, BATCH])
            name = "reserve" if limit == 1 else "reserve_many"
            args = () if limit == 1 else (limit,)
            call = yield Do("reserve", queue, name, args, {"timeout": 0.5})
            yield from self._settled(queue, call.got or [], late)
            if call.outcome != "ok":
                yield 0.1
            while late and (self.hurrying or late[0][0] < time.monotonic()):
                yield from self._done(queue, late.pop(0)[1])

    def _settled(
        self,
        queue: str,
        held: list[Reservation[Any]],
        late: list[tuple[float, list[Reservation[Any]]]],
    ) -> Plan:
        if self.hurrying:
            yield from self._done(queue, held)
            return
        if not held:
            return
        lease = QUEUES[queue]["lease"]
        chance = self.dice.random()
        if chance < 0.02:
            return  # as if it had died
        if chance < 0.06:
            late.append((time.monotonic() + lease * self.dice.uniform(1.05, 1.5), held[:LATE]))
            late.sort(key=lambda pair: pair[0])
            held = held[LATE:]
        elif chance < 0.12:
            yield self._of("extend", queue, held)
        yield self.dice.uniform(0, 0.05)  # the work
        ends: dict[str, list[Reservation[Any]]] = {"rollback": [], "release": [], "done": []}
        for each in held:
            chance = self.dice.random()
            ends["rollback" if chance < 0.02 else "release" if chance < 0.04 else "done"].append(
                each
            )
        for token, members in _grouped(ends["rollback"]).items():
            yield self._of(
                "rollback", queue, members, delay=self.dice.choice([0, 0.5]), error=f"by {token}"
            )
        if ends["release"]:
            yield self._of("release", queue, ends["release"])
        yield from self._done(queue, ends["done"])

    def _done(self, queue: str, held: list[Reservation[Any]]) -> Plan:
        """Pass them on, or finish them; those whose settling has an unknown outcome once more, now and then."""
        for token, members in _grouped(held).items():
            mark = [queue, token]
            if queue in NEXT:
                target = self.dice.choice(NEXT[queue])
                step = self._of(
                    "move", queue, members, to=target, update={"$push": {"trail": mark}}
                )
            elif "history" in QUEUES[queue]:
                # One payload for all of a batch.
                before = members[0].payload if len(members) == 1 else {"trail": []}
                step = self._of(
                    "commit", queue, members, payload={**before, "trail": [*before["trail"], mark]}
                )
            else:
                step = self._of("commit", queue, members)
            call = yield step
            if call.outcome == "unknown" and self.dice.random() < 0.5:
                step.op += " again"
                yield step

    def _of(self, op: str, queue: str, held: list[Reservation[Any]], **options: Any) -> Do:
        return Do(op, queue, op, tuple(held), options, by_token(held))

    def pop(self, queue: str) -> Plan:
        """Pop, one or many."""
        while not self.stopping.is_set():
            limit = self.dice.choice([1, 1, BATCH // 2])
            name, args = ("pop", ()) if limit == 1 else ("pop_many", (limit,))
            call = yield Do("pop", queue, name, args, {"timeout": 0.5}, limit)
            if call.outcome != "ok":
                yield 0.1

    def worker(self, name: str, *args: str) -> Plan:
        """A worker of this process."""
        plan: Plan = getattr(self, name)(*args)
        return plan


def _grouped(held: list[Reservation[Any]]) -> dict[str, list[Reservation[Any]]]:
    found: dict[str, list[Reservation[Any]]] = {}
    for each in held:
        found.setdefault(each.token, []).append(each)
    return found


# ---- the two kinds of process


def _blocking(load: Load, client: Client) -> None:
    queues = {name: client.queue(name, **options) for name, options in QUEUES.items()}
    failed: list[BaseException] = []

    def run(plan: Plan) -> None:
        answer: Call | None = None
        try:
            with suppress(StopIteration):
                while not failed:
                    step = plan.send(answer)
                    answer = None
                    if isinstance(step, Do):
                        with load.ledger.noted(step.op, step.queue, step.items) as answer:
                            answer.got = step.told(
                                getattr(queues[step.queue], step.method)(*step.args, **step.options)
                            )
                    elif step:
                        load.stopping.wait(step)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(load.worker(*each),)) for each in load.role.workers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


class Tasks:
    """The workers of a process with an async client."""

    def __init__(self, load: Load, client: AsyncClient) -> None:
        self._load, self._client = load, client
        self._stopped = asyncio.Event()
        self._queues = {name: client.queue(name, **options) for name, options in QUEUES.items()}

    async def run(self) -> None:
        """Work until told to stop."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch())
                tasks.create_task(self._storms())
                for name, *args in self._load.role.workers:
                    if name == "pipeline":
                        tasks.create_task(self._pipeline())
                    else:
                        # A few callers for the trickle: they are what is joined.
                        for _ in range(8 if name == "trickle" else 1):
                            tasks.create_task(self._work(self._load.worker(name, *args)))
        finally:
            self._load.stopping.set()  # lets the thread of _watch end

    async def _watch(self) -> None:
        await asyncio.to_thread(self._load.stopping.wait)
        self._stopped.set()

    async def _work(self, plan: Plan) -> None:
        answer: Call | None = None
        with suppress(StopIteration):
            while True:
                step = plan.send(answer)
                answer = None
                if isinstance(step, Do):
                    answer = await self._do(step)
                else:
                    await self._pause(step)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _do(self, step: Do) -> Call:
        with self._load.ledger.noted(step.op, step.queue, step.items) as call:
            call.got = step.told(
                await getattr(self._queues[step.queue], step.method)(*step.args, **step.options)
            )
        return call

    async def _storms(self) -> None:
        """When told to: many callers that receive, and are cancelled at any point of it."""
        while not self._stopped.is_set():
            if time.monotonic() < self._load.storm_until:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed())
                    for _ in range(STORM):
                        tasks.create_task(self._be_cancelled())
            await self._pause(0.05)

    async def _feed(self) -> None:
        """Push what the storm's callers pop, lest they find nothing to lose."""
        while time.monotonic() < self._load.storm_until and not self._stopped.is_set():
            ids = self._load.ids(BATCH // 2)
            await self._do(
                Do(
                    "push",
                    "events",
                    "push_many",
                    ([{"n": id, "trail": []} for id in ids],),
                    {"ids": ids},
                    ids,
                )
            )

    async def _be_cancelled(self) -> None:
        dice = self._load.dice
        while time.monotonic() < self._load.storm_until and not self._load.stopping.is_set():
            queue = dice.choice(["events", "billed", "packed"])
            limit = dice.choice([1, 10])
            if queue == "events":
                step = Do("pop", queue, "pop_many", (limit,), {"timeout": 0.2}, limit)
            else:
                step = Do("reserve", queue, "reserve_many", (limit,), {"timeout": 0.2})
            receiving = asyncio.ensure_future(self._do(step))
            await asyncio.wait([receiving], timeout=dice.uniform(0, 0.03))
            receiving.cancel()
            with suppress(asyncio.CancelledError):
                call = await receiving
                if queue != "events":
                    await self._work(self._load._done(queue, call.got or []))

    async def _pipeline(self) -> None:
        """A pipeline over the queues that are moved from; its renewals, batches and settles are its own."""
        pipeline = self._client.pipeline("load")
        ledger, dice = self._load.ledger, self._load.dice

        def marked(payload: dict[str, Any], delivery: Delivery[Any]) -> dict[str, Any]:
            held = delivery.message
            with ledger.noted("reserve", held.queue, None) as call:
                call.got = [held]
            ledger.about_to(
                "move", held.queue, by_token([held])
            )  # what comes of it only the pipeline is told
            return {**payload, "trail": [*payload["trail"], [held.queue, held.token]]}

        async def parse(payload: dict[str, Any], delivery: Delivery[Any]) -> dict[str, Any]:
            return marked(payload, delivery)

        async def route(payload: dict[str, Any], delivery: Delivery[Any]) -> To[Any]:
            return To(dice.choice(NEXT["parsed"]), marked(payload, delivery))

        pipeline.link("orders", parse, to="parsed", **QUEUES["orders"])
        pipeline.choice("parsed", route, to=list(NEXT["parsed"]), **QUEUES["parsed"])

        async def stop() -> None:
            await self._stopped.wait()
            pipeline.stop()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stop())
            await pipeline.run(concurrency=32)


def work(spec: dict[str, Any]) -> None:
    """Be a process of the load, until told to stop."""
    skew.install()
    load = Load(spec)
    threading.Thread(target=load.obey, daemon=True).start()
    options: dict[str, Any] = {
        "namespace": spec["namespace"],
        "owner": load.name,
        "command_timeout": COMMAND,
    }

    async def main() -> None:
        client = AsyncClient(spec["url"], **options)
        try:
            await Tasks(load, client).run()
        finally:
            await client.close()

    if load.role.asynchronous:
        asyncio.run(main())
    else:
        client = Client(spec["url"], **options)
        try:
            _blocking(load, client)
        finally:
            client.close()
