"""Every interleaving of two consumers and two messages in a loop of three queues.

The number of steps is limited, and there is no database. A step is one database command, the
beginning of an operation, or the passing of a lease. ``explorer`` states the promises: no message
is lost or in two places, none is claimed under a live lease, none is settled by a former holder,
and a settle reports its effect. Without the fence, the same exploration must fail.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pyqueue import Reservation
from pyqueue.backends import transitions
from pyqueue.backends.kind import ScanStart
from tests.model.explorer import Explorer, PromiseBroken

MOVES: dict[str, Any] = {"acts": ("take", "move", "rollback"), "limits": (2,)}
COMMITS: dict[str, Any] = {
    "acts": ("take", "commit", "release"),
    "limits": (1, 2),
    "failures": True,
}
POPS: dict[str, Any] = {"acts": ("take", "pop"), "limits": (2,)}
#: An opening: one consumer holds both messages by one claim.
HELD = ("0: take a 2", "0: Find", "0: Update", "0: Find")
#: An opening: the consumer has also given both messages back.
GIVEN_BACK = (*HELD, "0: rollback a m1 by 0.0, m2 by 0.0", "0: Update")


@dataclass
class Scenario:
    """The acts of consumers, the steps of the short and the long form, and the opening."""

    scenario: dict[str, Any]
    steps: int
    more: int
    opening: tuple[str, ...] = ()


SCENARIOS = {
    "moves": Scenario(MOVES, 8, 15),
    "moves of held messages": Scenario(MOVES, 6, 12, HELD),
    "commits with answers lost": Scenario(COMMITS, 5, 10),
    "pops": Scenario(POPS, 8, 18),
    "three consumers": Scenario(MOVES | {"consumers": 3}, 7, 12),
}
each_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS.keys())


@each_scenario
def test_every_interleaving(scenario: Scenario) -> None:
    explorer = Explorer(**scenario.scenario)
    explorer.explore(scenario.steps, *scenario.opening)
    assert explorer.steps > 1_000


@pytest.mark.slow
@each_scenario
def test_every_interleaving_in_the_long_run(scenario: Scenario) -> None:
    Explorer(**scenario.scenario).explore(scenario.more, *scenario.opening)


# ---- the purpose of each fence: without it, the exploration fails


def tokenless(members: Sequence[Reservation[Any]]) -> dict[str, Any]:
    """Settle by the id alone."""
    return {"_id": {"$in": [each.id for each in members]}, "processed": {"$exists": False}}


def crossed(members: Sequence[Reservation[Any]]) -> dict[str, Any]:
    """Settle any of these ids by any of these tokens."""
    return tokenless(members) | {"token": {"$in": [each.token for each in members]}}


def timeless(queue: str, now: Any, start: ScanStart | None) -> dict[str, Any]:
    """Claim any message."""
    return {"q": queue, "_id": {"$ne": transitions.record_id(queue)}}


@pytest.mark.parametrize(
    ("fence", "mutant", "scenario", "opening", "objection"),
    [
        ("holds_filter", tokenless, "moves", (), "settled by another"),
        ("holds_filter", crossed, "moves of held messages", GIVEN_BACK, "settled by another"),
        ("claimable", timeless, "commits with answers lost", (), "claimed under the live lease"),
    ],
)
def test_exploration_fails_without_the_fence(
    monkeypatch: pytest.MonkeyPatch,
    fence: str,
    mutant: Any,
    scenario: str,
    opening: tuple[str, ...],
    objection: str,
) -> None:
    monkeypatch.setattr(transitions, fence, mutant)
    explorer = Explorer(**SCENARIOS[scenario].scenario)
    with pytest.raises(PromiseBroken, match=objection) as caught:
        explorer.explore(SCENARIOS[scenario].steps, *opening)
    # The text gives the path to repeat the failure.
    path = ast.literal_eval(str(caught.value).partition("replay")[2])
    with pytest.raises(PromiseBroken, match=objection):
        explorer.replay(*path)
