"""Every kind of queue under faults: at each command a process dies, sleeps, or meets a fail-over.

A world names the stored queue, the work of a process, and the judgement at the end: whatever
happens, each message is finished once, or is delivered again, or is in another queue.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.plans import test_keyed_rates as keyed_rates
from tests.plans import test_keyed_slots as keyed_slots
from tests.plans import test_pack_moves as pack_moves
from tests.plans import test_packed_claims as packed_claims
from tests.plans import test_packs as packs
from tests.plans import test_slots as slots
from tests.plans import test_stream_groups as stream_groups
from tests.plans.faults import DISTURBANCES, Faults, some_or_all

WORLDS: Final[dict[str, Faults[Any]]] = {
    "slots": slots.FAULTS["standard"],
    "slots and groups": slots.FAULTS["ordered"],
    "slots of a key": keyed_slots.FAULTS,
    "rate of a key": keyed_rates.FAULTS["rate"],
    "slots and rate of a key": keyed_rates.FAULTS["both"],
    "packs": packs.FAULTS,
    "moves of packs": pack_moves.FAULTS,
    "claims of packs": packed_claims.FAULTS,
    "stream": stream_groups.FAULTS,
}


@some_or_all
@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("world", WORLDS)
def test_fault_at_any_command_loses_no_message(
    request: pytest.FixtureRequest, world: str, disturbance: str, some: bool
) -> None:
    faults = WORLDS[world]
    if disturbance.startswith("dies") or "rate" in world:
        request.getfixturevalue("same_slots")
    DISTURBANCES[disturbance](faults, faults.stride if some else 1)


@some_or_all
@pytest.mark.parametrize(
    ("world", "stride", "again"),
    [
        ("packs", 2, (1, 7, 12)),
        ("moves of packs", 2, (1, 7, 12)),
        ("claims of packs", 2, (1, 7, 12)),
        ("stream", 1, (1, 4, 7)),
    ],
)
def test_fault_after_a_fault_is_survived(
    world: str, stride: int, again: tuple[int, ...], some: bool
) -> None:
    """The process that takes over dies, too: at these commands, in the midst of its recovery."""
    faults = WORLDS[world]
    faults.dies_twice(stride * (faults.stride if some else 1), again)
