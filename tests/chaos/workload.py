"""The workload: processes that push, move, consume and pop, with blocking and async clients.

The work of a process is written once for both kinds of client, as generators. A generator yields a
``Step`` for a call, or a number for a pause in seconds. A process with a blocking client runs each
generator in a thread, a process with an async client in a task.

Messages are pushed to ``orders``, moved to ``parsed``, moved from there to ``billed`` or
``packed``, and committed. Messages of ``events`` are popped. Messages of ``states`` have keys.
Each message of ``renewed`` is held for long, under a lease that is renewed. Those of ``urgent``
have priorities, those of ``turns`` have groups, and ``parcels`` is a bucket. The tenants of
``calls`` have a limit each, and ``paced`` has a rate; see ``limit_checker``. There are also many
queues with few messages, and with consumers that wait for them, and a stream with two consumer
groups; see ``stream_load``.

The client that settles a message also writes its token into it by the same update, if the operation
allows it: a move and a commit with history into ``trail`` of the payload, a rollback into the
error. So the database itself shows which claim settled a message.
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
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyqueue import AsyncClient, Client, Delivery, QueueError, Reservation, To
from tests.chaos import clock_skew, mutants
from tests.chaos.checker import PACKED_QUEUE
from tests.chaos.ledger import Call, Ledger, ids_by_token
from tests.chaos.limit_checker import KEYED_QUEUE, LIMITS, PACED_QUEUE
from tests.chaos.stream_load import GROUPS, STREAM, endpoints

__all__ = [
    "KEYS",
    "POLL_S",
    "QUEUES",
    "ROLES",
    "AsyncRunner",
    "Role",
    "Step",
    "Workload",
    "run_blocking",
    "work",
]

POLL_S = 4.0
MANY = [f"many-{number:02}" for number in range(100)]
#: The options of each queue. Leases are short, so that some of them lapse.
QUEUES: dict[str, dict[str, Any]] = {
    "orders": {"lease": 3, "poll": POLL_S},
    "parsed": {"lease": 4, "poll": POLL_S},
    "billed": {"lease": 2, "poll": POLL_S},
    "packed": {"lease": 5, "poll": POLL_S, "history": 86400},
    "events": {"lease": 2, "poll": POLL_S},
    "states": {"lease": 2, "poll": POLL_S},
    "renewed": {"lease": 5, "poll": POLL_S},
    "urgent": {"lease": 3, "poll": POLL_S, "kind": "priority"},
    "turns": {"lease": 3, "poll": POLL_S, "kind": "ordered"},
    PACKED_QUEUE: {"lease": 3, "poll": POLL_S, "kind": "bucket"},
    **{name: {"lease": 3, "poll": POLL_S, "limit": limit} for name, limit in LIMITS.items()},
    **{name: {"lease": 5, "poll": POLL_S} for name in MANY},
}
#: The options of the consumer groups.
OF_GROUPS: dict[str, Any] = {"lease": 3, "poll": POLL_S}
LEVELS = [None, 0, 4, 9]
#: Many groups with few messages, and one with many.
SMALL_GROUPS = [f"group-{number}" for number in range(40)]
LARGE_GROUP = "group-large"
TENANTS = 20
NEXT = {"orders": ("parsed",), "parsed": ("billed", "packed")}
#: Which part of the rate each of the two producers of a queue pushes.
PRODUCED = {"orders": 0.3, "events": 0.1, "urgent": 0.05, "turns": 0.05, PACED_QUEUE: 0.02}
PACKED_SHARE = 0.1
#: Where messages of the bucket are moved to.
PACKED_NEXT = "billed"
BATCH = 100
#: How many messages of a batch a consumer holds for too long. Each costs a command to settle.
HELD_TOO_LONG = 20
KEYS = 50
COMMAND_TIMEOUT_S = 8.0
BACKLOG = 4000  # messages in a queue and those after it at which producers wait
STORM_TASKS = 24
LONG_WAIT_S = 5.0

Plan = Generator[Any, Any, None]
Held = list[Reservation[Any]]


@dataclass(frozen=True)
class Role:
    """The work of a process: its kind, its client, and its generators with their arguments."""

    kind: str  # producer, mover, consumer or holder
    asynchronous: bool
    plans: tuple[tuple[str, ...], ...]


ROLES: dict[str, Role] = {
    "producer-1": Role(
        "producer",
        False,
        (*(("produce", queue) for queue in PRODUCED), ("pack",), ("append",), ("call",)),
    ),
    "producer-2": Role(
        "producer",
        True,
        (
            *(("produce", queue) for queue in PRODUCED),
            *(("push_with_keys",), ("push_one_by_one",), ("push_to_many",), ("append",)),
            *(("pack",), ("pack_one_by_one",), ("call",)),
        ),
    ),
    "mover-1": Role("mover", False, (("settle", "orders"), ("settle", "parsed"))),
    "mover-2": Role("mover", True, (("pipeline",), ("settle", "parsed"), ("settle", PACKED_QUEUE))),
    "consumer-1": Role(
        "consumer",
        False,
        (
            *(("settle", "billed"), ("settle", "packed"), ("pop", "events")),
            *(("settle", "urgent"), ("settle", "turns"), ("settle", PACKED_QUEUE)),
            *(("settle", KEYED_QUEUE), ("settle", PACED_QUEUE), ("consume", GROUPS[0])),
        ),
    ),
    "consumer-2": Role(
        "consumer",
        True,
        (
            *(("settle", "billed"), ("settle", "packed"), ("pop", "events"), ("settle", "states")),
            *(("settle", "urgent"), ("settle", "turns"), ("settle", PACKED_QUEUE)),
            *(("settle", KEYED_QUEUE), ("settle", PACED_QUEUE)),
            *(("consume", group) for group in GROUPS),
        ),
    ),
    "consumer-3": Role(
        "consumer",
        False,
        (
            *(("settle", "orders"), ("settle", "billed"), ("settle", "states")),
            *(("settle", "turns"), ("settle", KEYED_QUEUE), ("consume", GROUPS[1])),
        ),
    ),
    "consumer-4": Role("consumer", True, tuple(("wait_and_commit", name) for name in MANY)),
    "holder-1": Role("holder", True, (("clean", "renewed"),)),
}


@dataclass
class Step:
    """A call to make and to record."""

    op: str
    queue: str
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    #: The items of the call for the ledger.
    items: object = None

    def as_list(self, result: Any) -> Any:
        """Return the result in a list if the call handles one message."""
        if self.method == "push":
            return [result]
        if self.method in ("pop", "reserve"):
            return [] if result is None else [result]
        return result


class Workload:
    """The state and the generators of one process.

    Args:
        spec: ``name``, ``role``, ``rate`` (messages per second of all processes), ``seed`` and
            ``ledger`` (a path).
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.name: str = spec["name"]
        self.role = ROLES[spec["role"]]
        self.rate: float = spec["rate"]
        self.dice = random.Random(f"{spec['seed']}/{self.name}")
        self.ledger = Ledger(Path(spec["ledger"]))
        self.stopping = threading.Event()
        #: Whether to settle everything at once, without faults of consumers.
        self.draining = False
        #: When the current cancellation storm ends, on the monotonic clock.
        self.storm_until = 0.0
        #: How many messages to hold next, and for how many seconds.
        self.to_hold = (0, 0.0)
        self._numbers = itertools.count()

    def new_ids(self, count: int) -> list[str]:
        """Return ids that no other process uses."""
        return [f"{self.name}.{next(self._numbers)}" for _ in range(count)]

    def follow_orders(self) -> None:
        """Follow the orders of the program, and end the process when the program is gone."""
        for line in sys.stdin:
            match json.loads(line):
                case ["drain"]:
                    self.draining = True
                case ["stop"]:
                    self.stopping.set()
                case ["clock", offset]:
                    clock_skew.set_offset(offset)
                case ["sleep"]:
                    clock_skew.sleep_as_the_machine()
                case ["hold", count, seconds]:
                    self.to_hold = (count, seconds)
                case ["storm", seconds]:  # one way only: there are no other orders
                    self.storm_until = time.monotonic() + seconds
        os._exit(1)

    # ---- producers

    def produce(self, queue: str) -> Plan:
        """Push at the rate, mostly in batches. Repeat a push with its ids until it succeeds."""
        share = PRODUCED[queue]
        due = time.monotonic()
        while not self.stopping.is_set():
            many = self.dice.random() < 0.8
            count = self.dice.randint(BATCH // 2, BATCH) if many else 1
            due = max(due, time.monotonic() - 10) + count / (self.rate * share)
            yield max(0.0, due - time.monotonic())
            ids = self.new_ids(count)
            payloads = [new_payload(id) for id in ids]
            options: dict[str, Any] = {"delay": self.dice.choice([None] * 9 + [1.5])}
            if queue == "urgent":
                levels = [self.dice.choice(LEVELS) for _ in ids]
                options |= {"priorities": levels} if many else {"priority": levels[0]}
            if queue == "turns":
                groups = [self.dice.choice([*SMALL_GROUPS, LARGE_GROUP, LARGE_GROUP]) for _ in ids]
                options |= {"groups": groups} if many else {"group": groups[0]}
            if many:
                push = Step("push", queue, "push_many", (payloads,), {"ids": ids, **options}, ids)
            else:
                options |= {"id": ids[0], "headers": {"one": True}}
                push = Step("push", queue, "push", (payloads[0],), options, ids)
            yield from self._until_ok(push)
            if self.dice.random() < 0.1:
                yield from self.wait_for_room(queue)

    def call(self) -> Plan:
        """Push a few messages of one tenant after the other."""
        while not self.stopping.is_set():
            tenant = f"tenant-{self.dice.randrange(TENANTS)}"
            ids = [f"{id}@{tenant}" for id in self.new_ids(self.dice.randint(1, 12))]
            options = {"ids": ids, "headers": {"tenant": tenant}}
            payloads = [new_payload(id) for id in ids]
            yield from self._until_ok(
                Step("push", KEYED_QUEUE, "push_many", (payloads,), options, ids)
            )
            yield self.dice.uniform(0, 2)

    def _until_ok(self, push: Step) -> Plan:
        while (yield push).outcome != "ok" and not self.stopping.is_set():
            yield 0.05

    def wait_for_room(self, queue: str) -> Plan:
        """Wait while the queue and those after it hold too many messages."""
        while not self.stopping.is_set():
            total = 0
            for name in _with_next(queue):
                counted = yield Step("counts", name, "counts")
                total += BACKLOG if counted.result is None else counted.result.total
            if total < BACKLOG:
                return
            yield 0.5

    def push_one_by_one(self) -> Plan:
        """Push single messages. Concurrent pushes of an async client share a command."""
        while not self.stopping.is_set():
            [id] = self.new_ids(1)
            yield from self._until_ok(
                Step("push", "orders", "push", (new_payload(id),), {"id": id}, [id])
            )
            yield self.dice.uniform(0, 0.2)

    def pack(self) -> Plan:
        """Push to the bucket at the rate, in packs. Some messages are scheduled."""
        due = time.monotonic()
        while not self.stopping.is_set():
            count = self.dice.randint(2, BATCH)
            due = max(due, time.monotonic() - 10) + count / (self.rate * PACKED_SHARE)
            yield max(0.0, due - time.monotonic())
            delay = self.dice.choice([None] * 9 + [1.5])
            contents = self.new_ids(count)
            payloads = [new_payload(each) for each in contents]
            yield from self._push_to_bucket("push_many", payloads, contents, "ids", delay=delay)
            if self.dice.random() < 0.1:
                yield from self.wait_for_room(PACKED_QUEUE)

    def pack_one_by_one(self) -> Plan:
        """Push single messages to the bucket. Concurrent pushes share packs."""
        while not self.stopping.is_set():
            contents = self.new_ids(1)
            yield from self._push_to_bucket("push", new_payload(contents[0]), contents, "id")
            yield self.dice.uniform(0, 2)

    def _push_to_bucket(
        self, method: str, given: Any, contents: list[str], name: str, **options: Any
    ) -> Plan:
        """Push without ids. If all of it is unknown, repeat it with the ids of the error."""
        call = yield Step("push", PACKED_QUEUE, method, (given,), options, contents)
        ids = call.ids if len(call.ids) == len(contents) else []
        while ids and call.outcome == "unknown" and not self.stopping.is_set():
            yield 0.05
            options[name] = ids if name == "ids" else ids[0]
            call = yield Step("push", PACKED_QUEUE, method, (given,), options, contents)

    def push_with_keys(self) -> Plan:
        """Push with a few keys again and again."""
        while not self.stopping.is_set():
            [content] = self.new_ids(1)
            on_duplicate = self.dice.choice(["ignore", "replace", "replace", "error"])
            key = f"key-{self.dice.randrange(KEYS)}"
            options = {"key": key, "on_duplicate": on_duplicate}
            yield Step("push", "states", "push", (new_payload(content),), options, [content])
            yield self.dice.uniform(0, 0.1)

    def push_all(self, queue: str, payloads: list[dict[str, Any]], ids: list[str]) -> Plan:
        """Push a batch."""
        yield from self._until_ok(Step("push", queue, "push_many", (payloads,), {"ids": ids}, ids))

    def push_to_many(self) -> Plan:
        """Push single messages to queues that have few of them."""
        while not self.stopping.is_set():
            queue, [id] = self.dice.choice(MANY), self.new_ids(1)
            yield from self._until_ok(
                Step("push", queue, "push", (new_payload(id),), {"id": id}, [id])
            )
            yield self.dice.uniform(0, 0.1)

    def append(self) -> Plan:
        """Append to the stream, mostly in batches."""
        while not self.stopping.is_set():
            contents = self.new_ids(self.dice.choice([1, BATCH // 4, BATCH]))
            yield Step("append", STREAM, "append_many", (contents,), {}, contents)
            yield self.dice.uniform(0, 4 * BATCH / self.rate)

    # ---- movers and consumers

    def consume(self, group: str) -> Plan:
        """Reserve for a group, and commit. Give some back, and never settle some."""
        while not self.stopping.is_set():
            limit = self.dice.choice([1, BATCH // 2, 2 * BATCH])
            call = yield Step("reserve", group, "reserve_many", (limit,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            if call.outcome != "ok":
                yield 0.1
            if held and not self.draining and self.dice.random() < 0.05:
                continue  # as if the consumer had died
            part = 0 if self.draining else len(held) // 20
            self.dice.shuffle(held)
            if part:
                yield _step("rollback", group, held[:part], delay=0)
                yield _step("release", group, held[part : 2 * part])
            if held[2 * part :]:
                yield _step("commit", group, held[2 * part :])

    def wait_and_commit(self, queue: str) -> Plan:
        """Wait for each message and commit it."""
        while not self.stopping.is_set():
            timeout = 0.5 if self.draining else LONG_WAIT_S
            call = yield Step("reserve", queue, "reserve", (), {"timeout": timeout})
            yield from self.complete(queue, call.result or [])
            if call.outcome != "ok":
                yield 0.1

    def clean(self, queue: str) -> Plan:
        """Commit at the end of the run what was left in a queue."""
        yield Step("counts", queue, "counts")
        while not self.stopping.is_set():
            if self.draining:
                call = yield Step("reserve", queue, "reserve_many", (BATCH,), {"timeout": 0.5})
                yield from self.complete(queue, call.result or [])
            yield 0.2

    def settle(self, queue: str) -> Plan:
        """Reserve, and settle in every way. Hold some reservations too long, never settle some."""
        late: list[tuple[float, Held]] = []
        while not self.stopping.is_set():
            limit = self.dice.choice([1, BATCH // 2, BATCH])
            name = "reserve" if limit == 1 else "reserve_many"
            args = () if limit == 1 else (limit,)
            call = yield Step("reserve", queue, name, args, {"timeout": 0.5})
            yield from self._settle_batch(queue, call.result or [], late)
            if call.outcome != "ok":
                yield 0.1
            while late and (self.draining or late[0][0] < time.monotonic()):
                yield from self.complete(queue, late.pop(0)[1])

    def _settle_batch(self, queue: str, held: Held, late: list[tuple[float, Held]]) -> Plan:
        if self.draining:
            yield from self.complete(queue, held)
            return
        if not held:
            return
        lease = QUEUES[queue]["lease"]
        chance = self.dice.random()
        if chance < 0.02:
            return  # as if the consumer had died
        if chance < 0.06:
            at = time.monotonic() + lease * self.dice.uniform(1.05, 1.5)
            late.append((at, held[:HELD_TOO_LONG]))
            late.sort(key=lambda pair: pair[0])
            held = held[HELD_TOO_LONG:]
        elif chance < 0.12:
            yield _step("extend", queue, held)
        yield self.dice.uniform(0, 0.05)  # the work
        if queue == PACKED_QUEUE and held:
            yield from self._settle_in_parts(held)
            return
        ends: dict[str, Held] = {"rollback": [], "release": [], "complete": []}
        for each in held:
            chance = self.dice.random()
            end = "rollback" if chance < 0.02 else "release" if chance < 0.04 else "complete"
            ends[end].append(each)
        for token, members in _by_claim(ends["rollback"]).items():
            delay = self.dice.choice([0, 0.5])
            yield _step("rollback", queue, members, delay=delay, error=f"by {token}")
        if ends["release"]:
            yield _step("release", queue, ends["release"])
        yield from self.complete(queue, ends["complete"])

    def complete(self, queue: str, held: Held) -> Plan:
        """Move or commit reservations. Repeat some of the calls whose outcome is unknown."""
        if queue == PACKED_QUEUE:  # each pack has a claim for itself
            if held:
                yield from self._perhaps_again(_step("commit", queue, held))
            return
        for token, members in _by_claim(held).items():
            mark = [queue, token]
            if queue in NEXT:
                target = self.dice.choice(NEXT[queue])
                update = {"$push": {"trail": mark}}
                step = _step("move", queue, members, to=target, update=update)
            elif "history" in QUEUES[queue]:
                # A batch gets one payload.
                before = members[0].payload if len(members) == 1 else {"trail": []}
                payload = {**before, "trail": [*before["trail"], mark]}
                step = _step("commit", queue, members, payload=payload)
            else:
                step = _step("commit", queue, members)
            yield from self._perhaps_again(step)

    def _perhaps_again(self, step: Step) -> Plan:
        """Make a call, and repeat it perhaps if its outcome is unknown."""
        call = yield step
        if call.outcome == "unknown" and self.dice.random() < 0.5:
            step.op += " again"
            yield step

    def _settle_in_parts(self, held: Held) -> Plan:
        """Settle a part of one claim of the bucket in some way, and commit the rest in two."""
        token, members = self.dice.choice(list(_by_claim(held).items()))
        op = self.dice.choice(["rollback", "rollback", "release", "move", "bury", "commit"])
        few = 1 + len(members) // 10
        some = members if self.dice.random() < 0.2 else members[:few]
        options: dict[str, dict[str, Any]] = {
            "rollback": {"delay": self.dice.choice([0, 0.5]), "error": f"by {token}"},
            "move": {"to": PACKED_NEXT},
        }
        yield from self._perhaps_again(_step(op, PACKED_QUEUE, some, **options.get(op, {})))
        rest = [each for each in held if each not in some]
        self.dice.shuffle(rest)
        middle = self.dice.randint(0, len(rest))
        for part in filter(None, (rest[:middle], rest[middle:])):
            yield from self.complete(PACKED_QUEUE, part)

    def pop(self, queue: str) -> Plan:
        """Pop one or many."""
        while not self.stopping.is_set():
            limit = self.dice.choice([1, 1, BATCH // 2])
            name, args = ("pop", ()) if limit == 1 else ("pop_many", (limit,))
            call = yield Step("pop", queue, name, args, {"timeout": 0.5}, limit)
            if call.outcome != "ok":
                yield 0.1

    def plan(self, name: str, *args: str) -> Plan:
        """Return a generator by its name."""
        plan: Plan = getattr(self, name)(*args)
        return plan


def _with_next(queue: str) -> list[str]:
    """Return the queue and all that its messages can be moved to."""
    found = [queue]
    for name in found:
        targets = (PACKED_NEXT,) if name == PACKED_QUEUE else NEXT.get(name, ())
        found += (each for each in targets if each not in found)
    return found


def new_payload(content: str) -> dict[str, Any]:
    """Return a payload for the change log."""
    return {"n": content, "trail": []}


def _step(op: str, queue: str, held: Held, **options: Any) -> Step:
    return Step(op, queue, op, tuple(held), options, ids_by_token(held))


def _by_claim(held: Held) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for each in held:
        found.setdefault(each.token, []).append(each)
    return found


# ---- the two kinds of process


def run_blocking(workload: Workload, client: Client) -> None:
    """Run the generators of a process in threads until it stops, and raise the first error."""
    queues: dict[str, Any] = endpoints(client, **OF_GROUPS)
    queues |= {name: client.queue(name, **options) for name, options in QUEUES.items()}
    failed: list[BaseException] = []

    def run(plan: Plan) -> None:
        answer: Call | None = None
        try:
            with suppress(StopIteration):
                while not failed:
                    step = plan.send(answer)
                    answer = None
                    if isinstance(step, Step):
                        with workload.ledger.recorded(step.op, step.queue, step.items) as answer:
                            method = getattr(queues[step.queue], step.method)
                            answer.result = step.as_list(method(*step.args, **step.options))
                    elif step:
                        workload.stopping.wait(step)
        except BaseException as error:
            failed.append(error)

    threads = [
        threading.Thread(target=run, args=(workload.plan(*each),)) for each in workload.role.plans
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in failed:
        raise error


class AsyncRunner:
    """Runs the generators of a process in tasks.

    Args:
        workload: The process.
        client: Its client.
    """

    def __init__(self, workload: Workload, client: AsyncClient) -> None:
        self._workload, self._client = workload, client
        self._stopped = asyncio.Event()
        self._queues: dict[str, Any] = endpoints(client, **OF_GROUPS)
        self._queues |= {name: client.queue(name, **options) for name, options in QUEUES.items()}

    async def run(self) -> None:
        """Run until the process stops."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_for_stop())
                tasks.create_task(self._storms())
                tasks.create_task(self._hold_when_asked())
                for name, *args in self._workload.role.plans:
                    if name == "pipeline":
                        tasks.create_task(self._pipeline())
                        continue
                    # Several tasks push one by one at once, so that their calls share commands.
                    for _ in range(8 if name.endswith("_one_by_one") else 1):
                        tasks.create_task(self._run(self._workload.plan(name, *args)))
        finally:
            self._workload.stopping.set()  # ends the thread of _watch_for_stop

    async def _watch_for_stop(self) -> None:
        await asyncio.to_thread(self._workload.stopping.wait)
        self._stopped.set()

    async def _run(self, plan: Plan) -> None:
        answer: Call | None = None
        with suppress(StopIteration):
            while True:
                step = plan.send(answer)
                answer = None
                if isinstance(step, Step):
                    answer = await self._call(step)
                else:
                    await self._pause(step)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()

    async def _call(self, step: Step) -> Call:
        with self._workload.ledger.recorded(step.op, step.queue, step.items) as call:
            method = getattr(self._queues[step.queue], step.method)
            call.result = step.as_list(await method(*step.args, **step.options))
        return call

    async def _storms(self) -> None:
        """During a storm, run callers that receive and are cancelled at random points."""
        while not self._stopped.is_set():
            if time.monotonic() < self._workload.storm_until:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._feed_storm())
                    for _ in range(STORM_TASKS):
                        tasks.create_task(self._receive_and_cancel())
            await self._pause(0.05)

    async def _feed_storm(self) -> None:
        """Push messages for the callers of the storm to pop."""
        while time.monotonic() < self._workload.storm_until and not self._stopped.is_set():
            ids = self._workload.new_ids(BATCH // 2)
            payloads = [new_payload(id) for id in ids]
            await self._call(Step("push", "events", "push_many", (payloads,), {"ids": ids}, ids))

    async def _receive_and_cancel(self) -> None:
        dice, workload = self._workload.dice, self._workload
        while time.monotonic() < workload.storm_until and not workload.stopping.is_set():
            queue = dice.choice(["events", "billed", "packed", "turns", KEYED_QUEUE, PACKED_QUEUE])
            limit = dice.choice([1, 10])
            if queue == "events":
                step = Step("pop", queue, "pop_many", (limit,), {"timeout": 0.2}, limit)
            else:
                step = Step("reserve", queue, "reserve_many", (limit,), {"timeout": 0.2})
            receiving = asyncio.ensure_future(self._call(step))
            await asyncio.wait([receiving], timeout=dice.uniform(0, 0.03))
            receiving.cancel()
            with suppress(asyncio.CancelledError):
                call = await receiving
                if queue != "events":
                    await self._run(workload.complete(queue, call.result or []))

    async def _hold_when_asked(self) -> None:
        """Hold many messages at once, each in a task, under leases that are renewed."""
        while not self._stopped.is_set():
            count, seconds = self._workload.to_hold
            if count:
                self._workload.to_hold = (0, 0.0)
                ids = self._workload.new_ids(count)
                payloads = [new_payload(id) for id in ids]
                await self._run(self._workload.push_all("renewed", payloads, ids))
                end = asyncio.get_running_loop().time() + seconds
                async with asyncio.TaskGroup() as tasks:
                    for _ in ids:
                        tasks.create_task(self._hold(end))
            await self._pause(0.05)

    async def _hold(self, end: float) -> None:
        ledger = self._workload.ledger
        with suppress(QueueError):  # the ledger has what is needed, and the lease lapses
            async with AsyncExitStack() as stack:
                reserved = self._queues["renewed"].reserved(timeout=LONG_WAIT_S)
                held = await stack.enter_async_context(reserved)
                if held is None:
                    return
                with ledger.recorded("reserve", "renewed", None) as call:
                    call.result = [held]
                await self._pause(end - asyncio.get_running_loop().time())
                with ledger.recorded("commit", "renewed", ids_by_token([held])):
                    await stack.aclose()

    async def _pipeline(self) -> None:
        """Run a pipeline over the queues that are moved from.

        The pipeline reserves, renews and settles by itself, so the handlers record its calls.
        """
        pipeline = self._client.pipeline("load")
        ledger, dice = self._workload.ledger, self._workload.dice

        def marked(payload: dict[str, Any], delivery: Delivery[Any]) -> dict[str, Any]:
            held = delivery.message
            with ledger.recorded("reserve", held.queue, None) as call:
                call.result = [held]
            # Only the pipeline learns the outcome, so the ledger has no result for the move.
            ledger.about_to("move", held.queue, ids_by_token([held]))
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
    """Run a process of the workload until it is stopped.

    Args:
        spec: As of ``Workload``; also ``url``, ``namespace``, ``redis`` (the URL of that bus) and
            ``mutant`` (its name, or None).
    """
    clock_skew.install()
    if spec["mutant"] is not None:
        mutants.apply(spec["mutant"])
    workload = Workload(spec)
    threading.Thread(target=workload.follow_orders, daemon=True).start()
    options: dict[str, Any] = {
        "namespace": spec["namespace"],
        "owner": workload.name,
        "command_timeout": COMMAND_TIMEOUT_S,
        "signals": random.Random(f"{spec['seed']}/{workload.name}/bus").choice(
            ["capped:", spec["redis"], "none:"]
        ),
    }

    async def main() -> None:
        client = AsyncClient(spec["url"], **options)
        try:
            await AsyncRunner(workload, client).run()
        finally:
            await client.close()

    if workload.role.asynchronous:
        asyncio.run(main())
    else:
        client = Client(spec["url"], **options)
        try:
            run_blocking(workload, client)
        finally:
            client.close()
