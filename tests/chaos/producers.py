"""The work of producers: push at the rate, in every way, and append to the stream."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tests.chaos.clock_skew import true_now
from tests.chaos.forked import push_in_child
from tests.chaos.limit_checker import KEYED_QUEUE, METERED_QUEUE, PACED_QUEUE
from tests.chaos.misfits import insert, misfits
from tests.chaos.names import DELETED_QUEUE, JARS, LOOPS, MISFIT, PACKED_QUEUE, SHEAVES, SHIFTS
from tests.chaos.queues import BATCH, KEYS, MANY, with_next
from tests.chaos.steps import Plan, Step, WorkloadState, push_many_step, push_step
from tests.chaos.stream_load import STREAM

LEVELS = [None, 0, 4, 9]
#: Many groups with few messages, and one with many.
SMALL_GROUPS = [f"group-{number}" for number in range(40)]
LARGE_GROUP = "group-large"
TENANTS = 20
#: Which part of the rate each of the two producers of a queue pushes.
PRODUCED = {
    "orders": 0.3,
    "events": 0.1,
    "urgent": 0.05,
    "turns": 0.05,
    PACED_QUEUE: 0.02,
}
#: The same for the buckets.
PACKED_SHARE = {PACKED_QUEUE: 0.04, DELETED_QUEUE: 0.02, JARS: 0.02, SHEAVES: 0.02}
#: The largest pack of buckets with small packs, which get a pack every few seconds.
SMALL_PACKS = {JARS: 30, SHEAVES: 30}
#: How many tenants have a rate each, and how often their messages become due together.
METERED_TENANTS, METERED_EVERY_S = 200, 8.0
#: How many messages a new tenant gets at once: too many to start at once within its rate, and few
#: enough that none has to wait for long.
METERED_BURST = 5
#: How many instants of other messages pass between two pushes for one instant.
INSTANTS = 70
#: How far ahead they are scheduled: all of them are pushed by then, also on a busy machine.
SCHEDULED_S = (6.0, 10.0)
BACKLOG = 4000  # messages in a queue and those after it at which producers wait


class Producers(WorkloadState):
    """The generators of producers."""

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
            options: dict[str, Any] = {"delay": self.dice.choice([None] * 9 + [1.5])}
            if queue == "urgent":
                levels = [self.dice.choice(LEVELS) for _ in ids]
                options |= {"priorities": levels} if many else {"priority": levels[0]}
            if queue == "turns":
                groups = [self.dice.choice([*SMALL_GROUPS, LARGE_GROUP, LARGE_GROUP]) for _ in ids]
                options |= {"groups": groups} if many else {"group": groups[0]}
            if many:
                push = push_many_step(queue, ids, ids=ids, **options)
            else:
                push = push_step(queue, ids[0], id=ids[0], headers={"one": True}, **options)
            yield from self.until_ok(push)
            if self.dice.random() < 0.1:
                yield from self.wait_for_room(queue)

    def call(self) -> Plan:
        """Push a few messages of one tenant after the other."""
        while not self.stopping.is_set():
            tenant = f"tenant-{self.dice.randrange(TENANTS)}"
            ids = [f"{id}@{tenant}" for id in self.new_ids(self.dice.randint(1, 12))]
            push = push_many_step(KEYED_QUEUE, ids, ids=ids, headers={"tenant": tenant})
            yield from self.until_ok(push)
            yield self.dice.uniform(0, 2)

    def wait_for_room(self, queue: str) -> Plan:
        """Wait while the queue and those after it hold too many messages."""
        while not self.stopping.is_set():
            total = 0
            for name in with_next(queue):
                counted = yield Step("counts", name, "counts")
                total += BACKLOG if counted.result is None else counted.result.total
            if total < BACKLOG:
                return
            yield 0.5

    def push_one_by_one(self) -> Plan:
        """Push single messages. Concurrent pushes of an async client share a command."""
        while not self.stopping.is_set():
            [id] = self.new_ids(1)
            yield from self.until_ok(push_step("orders", id, id=id))
            yield self.dice.uniform(0, 0.25)

    def pack(self, queue: str) -> Plan:
        """Push to a bucket at the rate, in packs. Some messages are scheduled, some have keys."""
        due = time.monotonic()
        while not self.stopping.is_set():
            count = self.dice.randint(2, SMALL_PACKS.get(queue, BATCH))
            share = PACKED_SHARE[queue]
            due = max(due, time.monotonic() - 10) + count / (self.rate * share)
            yield max(0.0, due - time.monotonic())
            delay = self.dice.choice([None] * 9 + [1.5])
            contents = self.new_ids(count)
            push = push_many_step(queue, contents, delay=delay)
            if self.dice.random() < 0.1:
                push.options["keys"] = [self.dice.choice([None, each]) for each in contents]
            yield from self._push_to_bucket(push, "ids")
            if self.dice.random() < 0.1:
                yield from self.wait_for_room(queue)

    def pack_one_by_one(self) -> Plan:
        """Push single messages to the bucket. Concurrent pushes share packs."""
        while not self.stopping.is_set():
            [content] = self.new_ids(1)
            yield from self._push_to_bucket(push_step(PACKED_QUEUE, content), "id")
            yield self.dice.uniform(0, 2)

    def _push_to_bucket(self, push: Step, name: str) -> Plan:
        """Push without ids. If all of it is unknown, repeat it with the ids of the error."""
        contents: Any = push.items
        call = yield push
        ids = call.ids if len(call.ids) == len(contents) else []
        while ids and call.outcome == "unknown" and not self.stopping.is_set():
            yield 0.05
            push.options[name] = ids if name == "ids" else ids[0]
            call = yield push

    def fork(self, queue: str) -> Plan:
        """Fork while other threads push. The child pushes to an ordered queue, and ends."""
        while not self.stopping.is_set():
            yield self.dice.uniform(2, 5)
            ids = self.new_ids(self.dice.randint(1, 8))
            groups = [self.dice.choice(SMALL_GROUPS) for _ in ids]
            push = push_many_step(queue, ids, ids=ids, groups=groups)
            push.function = partial(push_in_child, self.spec, queue)
            yield push

    def plant(self, queue: str) -> Plan:
        """Insert documents that are no messages as pyqueue writes them."""
        while not self.stopping.is_set():
            yield self.dice.uniform(1, 5)
            ids = [f"{MISFIT}{id}" for id in self.new_ids(self.dice.randint(2, 4))]
            documents = misfits(queue, ids, self.dice)
            step = Step("plant", queue, "insert", (documents,), {}, ids)
            step.function = partial(insert, self.spec)
            yield step

    def push_to_loops(self) -> Plan:
        """Push a few messages for loops."""
        while not self.stopping.is_set():
            ids = self.new_ids(self.dice.randint(1, 4))
            yield from self.until_ok(push_many_step(LOOPS, ids, ids=ids))
            yield self.dice.uniform(0, 2)

    def push_with_keys(self) -> Plan:
        """Push with a few keys again and again."""
        while not self.stopping.is_set():
            [content] = self.new_ids(1)
            on_duplicate = self.dice.choice(["ignore", "replace", "replace", "error"])
            key = f"key-{self.dice.randrange(KEYS)}"
            yield push_step("states", content, key=key, on_duplicate=on_duplicate)
            yield self.dice.uniform(0, 0.1)

    def schedule(self) -> Plan:
        """Push for one instant to one group, before and after pushes for many other instants."""
        while not self.stopping.is_set():
            yield self.dice.uniform(2, 6)
            at = true_now() + timedelta(seconds=self.dice.uniform(*SCHEDULED_S))
            group = f"shift-{self.dice.randrange(5)}"
            yield from self._schedule(5, at, group)
            for number in range(self.dice.choice([2, INSTANTS])):
                if self.stopping.is_set():
                    return
                other = at + timedelta(milliseconds=1 + number)
                yield from self._schedule(1, other, f"other-{number}")
            yield from self._schedule(2, at, group)

    def _schedule(self, count: int, at: datetime, group: str) -> Plan:
        ids = [f"{id}@{at.timestamp():.3f}" for id in self.new_ids(count)]
        push = push_many_step(SHIFTS, ids, ids=ids, at=at, groups=[group] * count)
        yield from self.until_ok(push)

    def meter_one_by_one(self) -> Plan:
        """Push for many tenants, so that their messages become due together."""
        while not self.stopping.is_set():
            now = true_now()
            at = now + timedelta(seconds=METERED_EVERY_S - now.timestamp() % METERED_EVERY_S)
            names = self.new_ids(self.dice.choice([1] * 9 + [METERED_BURST]))
            number = self.dice.randrange(METERED_TENANTS)
            tenant = f"tenant-{number if len(names) == 1 else names[0]}"
            ids = [f"{each}@{tenant}" for each in names]
            push = push_many_step(METERED_QUEUE, ids, ids=ids, headers={"tenant": tenant}, at=at)
            yield from self.until_ok(push)
            yield self.dice.uniform(0, 3)

    def hurry(self) -> Plan:
        """Push under a deadline that often passes. It must not end the calls of other callers."""
        while not (self.stopping.is_set() or self.draining):
            [id] = self.new_ids(1)
            push = push_step("orders", id, id=id)
            push.deadline_s = self.dice.choice([0.002, 0.005, 0.02])
            yield push
            yield self.dice.uniform(0, 0.1)

    def push_to_many(self) -> Plan:
        """Push single messages to queues that have few of them."""
        while not self.stopping.is_set():
            queue, [id] = self.dice.choice(MANY), self.new_ids(1)
            yield from self.until_ok(push_step(queue, id, id=id))
            yield self.dice.uniform(0, 0.1)

    def append(self) -> Plan:
        """Append to the stream, mostly in batches."""
        while not self.stopping.is_set():
            contents = self.new_ids(self.dice.choice([1, BATCH // 4, BATCH]))
            yield Step("append", STREAM, "append_many", (contents,), {}, contents)
            yield self.dice.uniform(0, 4 * BATCH / self.rate)
