"""The work of consumers that loop over ``each``, and of workers.

A loop is written once for both kinds of client, so it asks for each message by a step. It ends in
every way in which a ``for`` statement can end.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from functools import partial
from typing import Any

from pyqueue import Delivery, Worker
from tests.chaos.ledger import ids_by_token
from tests.chaos.queues import QUEUES
from tests.chaos.steps import Held, Plan, Step, WorkloadState, settle_step

#: How long a loop waits for a message before it ends.
_TIMEOUT_S = 0.5


class Loop:
    """One loop.

    Args:
        each: The result of ``each``.
    """

    def __init__(self, each: Any) -> None:
        #: Returns the next message, or None at the end. It alone refers to the iterator.
        self.next: Any
        if hasattr(each, "__aiter__"):
            self.enter, self.exit = each.__aenter__, each.__aexit__
            self.next = partial(anext, aiter(each), None)
        else:
            self.enter, self.exit = each.__enter__, each.__exit__
            self.next = partial(next, iter(each), None)


class Loops(WorkloadState):
    """The generators of loops and workers."""

    def loop(self, queue: str) -> Plan:
        """Receive by one loop after the other."""
        while not self.stopping.is_set():
            outcome = yield from self._loop_once(queue)
            if outcome != "ok":
                yield 0.1

    def _loop_once(self, queue: str) -> Generator[Any, Any, str]:
        """Loop until no message arrives, a call fails, or the loop is left. Return the outcome."""
        loop = Loop(self.queues[queue].each(timeout=_TIMEOUT_S))
        inside = self.dice.random() < 0.3  # a ``with`` block
        if inside:
            yield Step("enter", queue, "", function=loop.enter)
        held: Held = []
        outcome, left = "ok", False
        while not (left or self.stopping.is_set()):
            step = Step("next", queue, "", items=ids_by_token(held), function=loop.next)
            if not self.draining and self.dice.random() < 0.1:
                step.cancel_s = self.dice.uniform(0, 0.1)
            call = yield step
            del step
            outcome, held = call.outcome, list(call.result or [])
            if not held:
                break
            yield from self._work(queue)
            chance = 1.0 if self.draining else self.dice.random()
            left = chance < 0.06
            if 0.06 <= chance < 0.12:
                held = yield from self._settle_in_body(queue, held)
        if held:
            yield from self._leave(loop, queue, held, inside=inside)
        elif inside:
            yield Step("exit", queue, "", (None, None, None), function=loop.exit)
        return outcome

    def _work(self, queue: str) -> Plan:
        """Work for a moment, or for longer than the lease."""
        if self.draining or self.dice.random() > 0.03:
            yield self.dice.uniform(0, 0.05)
        else:
            yield QUEUES[queue]["lease"] * self.dice.uniform(1, 1.3)

    def _settle_in_body(self, queue: str, held: Held) -> Generator[Any, Any, Held]:
        """Settle the message of a body. Return it if the loop may still have to commit it."""
        op = self.dice.choice(["commit", "rollback", "release"])
        options = {"delay": 0} if op == "rollback" else {}
        call = yield settle_step(op, queue, held, **options)
        return held if call.outcome == "unknown" else []

    def _leave(self, loop: Loop, queue: str, held: Held, *, inside: bool) -> Plan:
        """Leave a loop in its body: by ``break``, or by an exception."""
        ids = ids_by_token(held)
        broken = inside and self.dice.random() < 0.5
        if not broken:
            # The rollback returns no outcome.
            self.ledger.about_to("rollback", queue, ids)
        loop.next = None  # drops the iterator, as a ``for`` statement does
        if broken:
            yield Step("commit", queue, "", (None, None, None), {}, ids, function=loop.exit)
        elif inside:
            error = ValueError(f"by {held[0].token}")
            yield Step("exit", queue, "", (ValueError, error, None), function=loop.exit)

    def work(self, queue: str) -> Plan:
        """Run a worker until the process stops.

        The worker reserves, renews and settles by itself, so its handler records its calls.
        """

        def handle(payload: Any, delivery: Delivery[Any]) -> None:
            held = delivery.message
            with self.ledger.recorded("reserve", held.queue, None) as call:
                call.result = [held]
            # Only the worker learns the outcome, so the ledger has no result for the commit.
            self.ledger.about_to("commit", held.queue, ids_by_token([held]))

        worker = Worker(self.client, concurrency=4)
        worker.on(queue, handle, **QUEUES[queue])
        ended = threading.Event()

        def stop() -> None:
            self.stopping.wait()
            worker.stop()
            while not ended.wait(1.0):  # the run had not begun
                worker.stop()

        threading.Thread(target=stop, daemon=True).start()
        try:
            while not self.stopping.is_set():
                yield Step("work", queue, "", (), {"handle_signals": False}, function=worker.run)
                yield 0.1
        finally:
            ended.set()
