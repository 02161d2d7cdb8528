"""The work of movers and consumers: receive, and settle in every way."""

from __future__ import annotations

import time
from typing import Any

from tests.chaos.limit_checker import METERED_QUEUE
from tests.chaos.names import BUCKETS, CRATES, MIXED, MIXED_QUEUES, RESULTS, ROWS, name_in
from tests.chaos.queues import BATCH, LONG_WAIT_S, NEXT, PACKED_NEXT, QUEUES
from tests.chaos.steps import (
    Held,
    Plan,
    Step,
    WorkloadState,
    by_claim,
    push_many_step,
    rollback_step,
    settle_step,
)

#: How many messages of a batch a consumer holds for too long. Each costs a command to settle.
HELD_TOO_LONG = 20
#: How many messages of a stream are rolled back one by one, how often, and their delay.
SINGLY, SINGLY_EVERY_S, SINGLY_DELAY_S = 1200, 60.0, 30.0


class Consumers(WorkloadState):
    """The generators of movers and consumers."""

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
                yield settle_step("rollback", group, held[:part], delay=0)
                yield settle_step("release", group, held[part : 2 * part])
            if held[2 * part :]:
                yield settle_step("commit", group, held[2 * part :])

    def wait_and_commit(self, queue: str) -> Plan:
        """Wait for each message and commit it."""
        while not self.stopping.is_set():
            timeout = 0.5 if self.draining else LONG_WAIT_S
            call = yield Step("reserve", queue, "reserve", (), {"timeout": timeout})
            yield from self.complete(queue, call.result or [])
            if call.outcome != "ok":
                yield 0.1

    def receive_from_several(self) -> Plan:
        """Receive from queues of several kinds at once, and settle their messages together."""
        while not self.stopping.is_set():
            queues = [self.queues[name] for name in MIXED_QUEUES]
            limit = self.dice.choice([1, 5, 20])
            receive = Step("reserve", MIXED, "receive", (queues, limit), {"timeout": 0.5})
            receive.on_client = True
            call = yield receive
            held: Held = list(call.result or [])
            part = 0 if self.draining else len(held) // 10
            steps = [
                rollback_step(MIXED, held[:part], counted=False, delay=0),
                settle_step("commit", MIXED, held[part:]),
            ]
            for step in steps:
                step.on_client = True
                if step.args:
                    yield step
            yield 0.1 if call.outcome != "ok" else self.dice.uniform(0, 1)

    def clean(self, queue: str) -> Plan:
        """Commit the rest of a queue at the end of the run."""
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
            if queue == METERED_QUEUE:
                limit = 4 * BATCH
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
            yield settle_step("extend", queue, held)
        yield self.dice.uniform(0, 0.05)  # the work
        if queue in BUCKETS and held:
            yield from self._settle_in_parts(queue, held)
            return
        ends: dict[str, Held] = {"rollback": [], "release": [], "complete": []}
        for each in held:
            chance = self.dice.random()
            end = "rollback" if chance < 0.02 else "release" if chance < 0.04 else "complete"
            ends[end].append(each)
        for token, members in by_claim(ends["rollback"]).items():
            delay = self.dice.choice([0, 0.5])
            # A message of ``rows`` that comes back has another place; its tries must show that.
            counted = queue == ROWS or self.dice.random() < 0.5
            error = f"by {token}"
            yield rollback_step(queue, members, counted=counted, delay=delay, error=error)
        if ends["release"]:
            yield settle_step("release", queue, ends["release"])
        yield from self.complete(queue, ends["complete"])

    def complete(self, queue: str, held: Held) -> Plan:
        """Move or commit reservations. Repeat some of the calls whose outcome is unknown."""
        if queue in BUCKETS:  # each pack has a claim for itself
            if held:
                yield from self.perhaps_again(settle_step("commit", queue, held))
            return
        for token, members in by_claim(held).items():
            mark = [queue, token]
            if queue in NEXT:
                target = self.dice.choice(NEXT[queue])
                update = {"$push": {"trail": mark}}
                step = settle_step("move", queue, members, to=target, update=update)
            elif "history" in QUEUES[queue]:
                # A batch gets one payload.
                before = members[0].payload if len(members) == 1 else {"trail": []}
                payload = {**before, "trail": [*before["trail"], mark]}
                step = settle_step("commit", queue, members, payload=payload)
            else:
                step = settle_step("commit", queue, members)
            yield from self.perhaps_again(step)

    def _settle_in_parts(self, queue: str, held: Held) -> Plan:
        """Settle a part of one claim of a bucket in some way, and commit the rest in two."""
        token, members = self.dice.choice(list(by_claim(held).items()))
        op = self.dice.choice(["rollback", "rollback", "release", "move", "bury", "commit"])
        few = 1 + len(members) // 10
        some = members if self.dice.random() < 0.2 else members[:few]
        yield from self._push_results(some[:few])
        if queue == CRATES:  # these fail alone
            some = some[:1]
        options: dict[str, dict[str, Any]] = {
            "rollback": {"delay": self.dice.choice([0, 0.5]), "error": f"by {token}"},
            "move": {"to": self.dice.choice(PACKED_NEXT[queue])},
        }
        yield from self.perhaps_again(settle_step(op, queue, some, **options.get(op, {})))
        rest = [each for each in held if each not in some]
        self.dice.shuffle(rest)
        middle = self.dice.randint(0, len(rest))
        for part in filter(None, (rest[:middle], rest[middle:])):
            yield from self.complete(queue, part)

    def _push_results(self, held: Held) -> Plan:
        """Push results under the ids of messages, and under ids that are derived from them."""
        ids: list[Any] = [each.id for each in held]
        contents, queue = [name_in(RESULTS, id) for id in ids], RESULTS
        if self.dice.random() < 0.5:
            queue, place = CRATES, self.dice.randrange(3)
            contents = ids = [f"{id}:{place}" for id in ids]
        yield push_many_step(queue, contents, ids=ids)

    def carry(self, queue: str) -> Plan:
        """Move messages of a bucket to the next queue, in the batches of their receipt."""
        while not self.stopping.is_set():
            call = yield Step("reserve", queue, "reserve_many", (BATCH,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            if held:
                yield self.dice.uniform(0, 0.05)  # the work
                yield from self.perhaps_again(
                    settle_step("move", queue, held, to=PACKED_NEXT[queue][0])
                )
            if call.outcome != "ok":
                yield 0.1
            yield self.dice.uniform(0, 0.2)

    def keep(self, queue: str) -> Plan:
        """Hold as much as a limit allows, and commit one message after the other."""
        while not self.stopping.is_set():
            call = yield Step("reserve", queue, "reserve_many", (BATCH,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            while held and not self.draining and not self.stopping.is_set():
                yield from self.complete(queue, [held.pop(self.dice.randrange(len(held)))])
                yield 1.5
                if held:
                    yield settle_step("extend", queue, held)
                    yield 1.0
            if held:
                yield from self.complete(queue, held)
            if call.outcome != "ok":
                yield 0.1

    def roll_back_singly(self, group: str) -> Plan:
        """Commit, and now and then roll back many messages one by one, each with a delay."""
        left, since = 0, time.monotonic()  # a short run must not wait for the delays
        while not self.stopping.is_set():
            call = yield Step("reserve", group, "reserve_many", (BATCH,), {"timeout": 0.5})
            held: Held = list(call.result or [])
            if left <= 0 and time.monotonic() - since > SINGLY_EVERY_S:
                left, since = SINGLY, time.monotonic()
            while held and left > 0 and not self.draining:
                left -= 1
                yield settle_step("rollback", group, [held.pop()], delay=SINGLY_DELAY_S)
            if held:
                yield settle_step("commit", group, held)
            if call.outcome != "ok":
                yield 0.1

    def return_in_parts(self, queue: str) -> Plan:
        """Reserve from a bucket, roll a part back, and release the rest."""
        while not (self.stopping.is_set() or self.draining):
            yield self.dice.uniform(0.5, 3)
            call = yield Step("reserve", queue, "reserve_many", (BATCH // 4,), {"timeout": 0.5})
            for token, members in by_claim(list(call.result or [])).items():
                part = self.dice.choice([1, len(members) // 2])
                error = f"by {token}"
                if members[:part]:
                    yield settle_step("rollback", queue, members[:part], delay=0, error=error)
                if members[part:]:
                    yield settle_step("release", queue, members[part:])

    def pop_and_cancel(self, queue: str) -> Plan:
        """Pop many, by a caller that does not always wait for the result."""
        while not self.stopping.is_set():
            limit = self.dice.randint(2, BATCH // 4)
            step = Step("pop", queue, "pop_many", (limit,), {"timeout": 0.5}, limit)
            if not self.draining:
                step.cancel_s = self.dice.uniform(0, 0.1)
            call = yield step
            if call.outcome != "ok" or not self.draining:
                yield self.dice.uniform(0.1, 0.5)

    def pop(self, queue: str) -> Plan:
        """Pop one or many."""
        while not self.stopping.is_set():
            limit = self.dice.choice([1, 1, BATCH // 2])
            name, args = ("pop", ()) if limit == 1 else ("pop_many", (limit,))
            call = yield Step("pop", queue, name, args, {"timeout": 0.5}, limit)
            if call.outcome != "ok":
                yield 0.1
