"""The workload: processes that push, move, consume and pop, with blocking and async clients.

The work of a process is written once for both kinds of client, as generators; see ``steps``.
``drivers`` runs them: a process with a blocking client runs each in a thread, a process with an
async client in a task. ``queues`` describes the queues; ``producers``, ``consumers``, ``loops``,
``askers`` and ``managers`` have the generators.

The client that settles a message also writes its token into it by the same update, if the operation
allows it: a move and a commit with history into ``trail`` of the payload, a rollback into the
error. So the database itself shows which claim settled a message.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.chaos import clock_skew
from tests.chaos.askers import Askers
from tests.chaos.consumers import Consumers
from tests.chaos.limit_checker import KEYED_QUEUE, METERED_QUEUE, NARROW_QUEUE, PACED_QUEUE
from tests.chaos.loops import Loops
from tests.chaos.managers import Managers
from tests.chaos.names import (
    CRATES,
    DELETED_QUEUE,
    JARS,
    LOOPS,
    PACKED_QUEUE,
    PURGED_QUEUE,
    RESULTS,
    ROWS,
    SHEAVES,
    SHIFTS,
    TICKS,
)
from tests.chaos.producers import PRODUCED, Producers
from tests.chaos.queues import MANY
from tests.chaos.steps import Plan
from tests.chaos.stream_load import GROUPS, ROLLED_BACK


@dataclass(frozen=True)
class Role:
    """The work of a process: its kind, its client, and its generators with their arguments."""

    kind: str  # producer, mover, consumer or holder
    asynchronous: bool
    plans: tuple[tuple[str, ...], ...]


def _settle(*queues: str) -> tuple[tuple[str, str], ...]:
    return tuple(("settle", queue) for queue in queues)


_PRODUCE = tuple(("produce", queue) for queue in PRODUCED)
ROLES: dict[str, Role] = {
    "producer-1": Role(
        "producer",
        False,
        (
            *_PRODUCE,
            *(("pack", PACKED_QUEUE), ("append",), ("call",), ("schedule",)),
            *(("pack", DELETED_QUEUE), ("delete", DELETED_QUEUE), ("reshape", NARROW_QUEUE)),
            *(("fork", "turns"), ("plant", "states"), ("purge", PURGED_QUEUE)),
            *(("push_to_loops",), ("cancel",), ("sort_out",), ("ask",), ("keep_time",)),
        ),
    ),
    "producer-2": Role(
        "producer",
        True,
        (
            *_PRODUCE,
            *(("push_with_keys",), ("push_one_by_one",), ("push_to_many",), ("append",)),
            *(("pack", PACKED_QUEUE), ("pack_one_by_one",), ("call",), ("schedule",)),
            *(("meter_one_by_one",), ("hurry",), ("pack", JARS), ("pack", SHEAVES)),
            *(("cancel",), ("ask",), ("ask",), ("keep_time",)),
        ),
    ),
    "mover-1": Role(
        "mover",
        False,
        (
            *_settle("orders", "parsed"),
            *(("carry", PACKED_QUEUE), ("carry", SHEAVES), ("hurry",), ("return_in_parts", JARS)),
        ),
    ),
    "mover-2": Role(
        "mover",
        True,
        (
            *(("pipeline",), *_settle("parsed", PACKED_QUEUE), ("carry", DELETED_QUEUE)),
            *(("return_in_parts", SHEAVES), ("receive_from_several",)),
        ),
    ),
    "consumer-1": Role(
        "consumer",
        False,
        (
            *_settle("billed", "packed", "urgent", "turns", PACKED_QUEUE, CRATES),
            *_settle(KEYED_QUEUE, PACED_QUEUE, SHIFTS, ROWS),
            *(("pop", "events"), ("pop", JARS), ("consume", GROUPS[0]), ("keep", NARROW_QUEUE)),
            *(("loop", LOOPS), ("answer",), ("work", TICKS)),
        ),
    ),
    "consumer-2": Role(
        "consumer",
        True,
        (
            *_settle("billed", "packed", "states", "urgent", "turns", PACKED_QUEUE, CRATES),
            *_settle(KEYED_QUEUE, PACED_QUEUE, METERED_QUEUE, NARROW_QUEUE, RESULTS, PURGED_QUEUE),
            *(
                ("pop", "events"),
                ("pop_and_cancel", JARS),
                *(("loop", LOOPS), ("answer",), ("tend",), ("work", TICKS)),
                *(("consume", group) for group in GROUPS[:2]),
            ),
        ),
    ),
    "consumer-3": Role(
        "consumer",
        False,
        (
            *_settle("orders", "billed", "states", "turns", KEYED_QUEUE, METERED_QUEUE),
            *(("consume", GROUPS[1]), ("roll_back_singly", ROLLED_BACK)),
            *(("loop", "turns"), ("tend",), ("receive_from_several",)),
        ),
    ),
    "consumer-4": Role("consumer", True, tuple(("wait_and_commit", name) for name in MANY)),
    "holder-1": Role("holder", True, (("clean", "renewed"),)),
}


class Workload(Producers, Consumers, Managers, Loops, Askers):
    """The state and the generators of one process.

    Args:
        spec: As of ``WorkloadState``; also ``role``.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        super().__init__(spec)
        self.role = ROLES[spec["role"]]
        #: When the current cancellation storm ends, on the monotonic clock.
        self.storm_until = 0.0
        #: How many messages to hold next, and for how many seconds.
        self.to_hold = (0, 0.0)

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

    def plan(self, name: str, *args: str) -> Plan:
        """Return a generator by its name."""
        plan: Plan = getattr(self, name)(*args)
        return plan
