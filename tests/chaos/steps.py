"""The steps that the generators of the workload yield, and the state of one process.

A generator yields a ``Step`` for a call, or a number for a pause in seconds.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyqueue import Reservation
from tests.chaos.ledger import Ledger, ids_by_token

Plan = Generator[Any, Any, None]
Held = list[Reservation[Any]]


@dataclass
class Step:
    """A call to make and to record."""

    op: str
    #: The queue, stream or group of the call. ``on_client``: the client is called.
    queue: str
    method: str
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    #: The items of the call for the ledger.
    items: object = None
    on_client: bool = False
    #: The deadline of this caller alone, in seconds, by ``pymongo.timeout``.
    deadline_s: float | None = None
    #: After how many seconds the caller cancels the call, if the client is async.
    cancel_s: float | None = None
    #: The arguments of ``select``, if the method belongs to its result.
    selected: dict[str, Any] | None = None
    #: Called in place of the method.
    function: Callable[..., Any] | None = None

    def called_on(self, called: Any) -> Callable[..., Any]:
        """Return the function of this call.

        Args:
            called: The queue, stream, group or client of the call.
        """
        if self.function is not None:
            return self.function
        if self.selected is not None:
            called = called.select(**self.selected)
        function: Callable[..., Any] = getattr(called, self.method)
        return function

    def as_list(self, result: Any) -> Any:
        """Return the result in a list if the call handles one message."""
        if self.method == "push":
            return [result]
        if self.method in ("pop", "reserve") or self.op == "next":
            return [] if result is None else [result]
        return result


class WorkloadState:
    """The state that the generators of one process share.

    Args:
        spec: ``name``, ``rate`` (messages per second of all processes), ``seed`` and ``ledger`` (a
            path); and, for connections without this client, ``url`` and ``namespace``.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.rate: float = spec["rate"]
        self.dice = random.Random(f"{spec['seed']}/{self.name}")
        self.ledger = Ledger(Path(spec["ledger"]))
        #: The client, and its queues, streams and groups by their names in the ledger.
        self.client: Any = None
        self.queues: dict[str, Any] = {}
        self.stopping = threading.Event()
        #: Whether to settle everything at once, without faults of consumers.
        self.draining = False
        self._numbers = itertools.count()

    def new_ids(self, count: int) -> list[str]:
        """Return ids that no other process uses."""
        return [f"{self.name}.{next(self._numbers)}" for _ in range(count)]

    def until_ok(self, push: Step) -> Plan:
        """Repeat a push until it succeeds."""
        while (yield push).outcome != "ok" and not self.stopping.is_set():
            yield 0.05

    def perhaps_again(self, step: Step) -> Plan:
        """Make a call, and repeat it perhaps if its outcome is unknown."""
        call = yield step
        if call.outcome == "unknown" and self.dice.random() < 0.5:
            step.op += " again"
            yield step


def new_payload(content: str) -> dict[str, Any]:
    """Return a payload for the change log."""
    return {"n": content, "trail": []}


def push_step(queue: str, content: str, **options: Any) -> Step:
    """Return the step that pushes one message."""
    return Step("push", queue, "push", (new_payload(content),), options, [content])


def push_many_step(queue: str, contents: list[str], **options: Any) -> Step:
    """Return the step that pushes several messages."""
    payloads = [new_payload(each) for each in contents]
    return Step("push", queue, "push_many", (payloads,), options, contents)


def settle_step(op: str, queue: str, held: Held, **options: Any) -> Step:
    """Return the step that settles reservations of a queue."""
    return Step(op, queue, op, tuple(held), options, ids_by_token(held))


def by_claim(held: Held) -> dict[str, Held]:
    """Return reservations by the token of their claim."""
    found: dict[str, Held] = {}
    for each in held:
        found.setdefault(each.token, []).append(each)
    return found


def rollback_step(queue: str, held: Held, *, counted: bool, **options: Any) -> Step:
    """Return the step that rolls reservations back. In the ledger, one that does not count differs.

    Args:
        queue: Their queue.
        held: The reservations.
        counted: Whether the try counts.
        options: Other options of ``rollback``.
    """
    step = settle_step("rollback", queue, held, **options)
    if not counted:
        step.op = "postpone"
        step.options["counted"] = False
    return step
