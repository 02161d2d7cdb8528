"""Every interleaving of two consumers and two messages in a loop of three queues, up to a number of
steps. No database.

A step is one database command, the beginning of an operation, or the passing of a lease.
``explorer`` says what must hold: no message is lost or in two places, none is claimed under a live
lease, none is settled by a former holder, and a settle reports what it did. Without the fence, the
same exploration must object.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pyqueue import Reservation
from pyqueue.backends import transitions
from pyqueue.backends.scan import ScanStart
from tests.model.explorer import Broken, Explorer

MOVES: dict[str, Any] = {"acts": ("take", "move", "rollback"), "limits": (2,)}
COMMITS: dict[str, Any] = {"acts": ("take", "commit", "release"), "limits": (1, 2), "faults": True}
POPS: dict[str, Any] = {"acts": ("take", "pop"), "limits": (2,)}
#: Where it may begin: with one who holds both messages by one claim.
HELD = ("0: take a 2", "0: Find", "0: Update", "0: Find")


@dataclass
class Scene:
    """What consumers do, from where, and how many steps are gone here and at length."""

    scene: dict[str, Any]
    steps: int
    more: int
    opening: tuple[str, ...] = ()


SCENES = {
    "moves": Scene(MOVES, 10, 15),
    "moves of what is held": Scene(MOVES, 8, 12, HELD),
    "commits with answers lost": Scene(COMMITS, 7, 10),
    "pops": Scene(POPS, 11, 18),
    "three consumers": Scene(MOVES | {"consumers": 3}, 7, 12),
}
each_scene = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES.keys())


@each_scene
def test_every_interleaving(scene: Scene) -> None:
    explorer = Explorer(**scene.scene)
    explorer.explore(scene.steps, *scene.opening)
    assert explorer.steps > 1_000


@pytest.mark.slow
@each_scene
def test_every_interleaving_at_length(scene: Scene) -> None:
    Explorer(**scene.scene).explore(scene.more, *scene.opening)


# ---- what each fence is for: without it, the exploration objects


def tokenless(members: Sequence[Reservation[Any]]) -> dict[str, Any]:
    """Settle by the id alone."""
    return {"_id": {"$in": [each.id for each in members]}, "processed": {"$exists": False}}


def crossed(members: Sequence[Reservation[Any]]) -> dict[str, Any]:
    """Settle any of these ids by any of these tokens."""
    return tokenless(members) | {"token": {"$in": [each.token for each in members]}}


def timeless(queue: str, now: Any, start: ScanStart | None) -> dict[str, Any]:
    """Claim whatever there is."""
    return {"q": queue, "_id": {"$ne": transitions.record_id(queue)}}


@pytest.mark.parametrize(
    ("fence", "mutant", "scene", "objection"),
    [
        ("holds_filter", tokenless, "moves", "settled by another"),
        ("holds_filter", crossed, "moves of what is held", "settled by another"),
        ("claimable", timeless, "commits with answers lost", "claimed under the live lease"),
    ],
)
def test_without_its_fence_it_breaks(
    monkeypatch: pytest.MonkeyPatch, fence: str, mutant: Any, scene: str, objection: str
) -> None:
    monkeypatch.setattr(transitions, fence, mutant)
    explorer = Explorer(**SCENES[scene].scene)
    with pytest.raises(Broken, match=objection) as caught:
        explorer.explore(SCENES[scene].steps, *SCENES[scene].opening)
    # And it says how to get there again.
    way = ast.literal_eval(str(caught.value).partition("replay")[2])
    with pytest.raises(Broken, match=objection):
        explorer.replay(*way)
