"""The machine on three databases: documents in memory, mongomock, and a real mongod.

A failure prints its steps, which run unchanged on a ``Machine`` of that place, and a blob for
``@reproduce_failure``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pyqueue import Reservation
from pyqueue.backends import transitions
from tests.model.machine import Machine
from tests.model.places import Cluster, Place, memory_place, plans_place, virtual_time
from tests.model.profiles import LONG, SHORT

pytestmark = pytest.mark.xdist_group("hypothesis")


def play(place: Place, options: settings) -> None:
    """Run the machine on a place."""
    with virtual_time() as time:

        class Here(Machine):
            make = staticmethod(lambda: Cluster(place, time))

        run_state_machine_as_test(Here, settings=options)


def test_plans() -> None:
    play(plans_place(), SHORT(max_examples=15, stateful_step_count=25))


def test_mongomock() -> None:
    play(memory_place(), SHORT(max_examples=3, stateful_step_count=25))


def test_mongod(server: Place) -> None:
    play(server, SHORT(max_examples=2, stateful_step_count=25))


# ---- a broken rule is detected


def tokenless(members: Sequence[Reservation[Any]]) -> dict[str, Any]:
    """Settle by the id alone."""
    return {"_id": {"$in": [each.id for each in members]}, "processed": {"$exists": False}}


LEAVING = transitions.leaving


def keeping(kept: str) -> Callable[..., Any]:
    """Return a mutant that keeps this field in messages that move on."""

    def leaving(*args: Any, **options: Any) -> dict[str, Any]:
        update = LEAVING(*args, **options)
        for fields in update.values():
            fields.pop(kept, None)
        # A burial removes $rename itself.
        return {name: fields for name, fields in update.items() if fields or name == "$rename"}

    return leaving


@pytest.mark.parametrize(
    ("rule", "mutant"),
    [
        ("holds_filter", tokenless),
        ("leaving", keeping("tries")),
        ("leaving", keeping("token")),
        ("leaving", keeping("key")),
    ],
    ids=["tokenless", "keeps tries", "keeps token", "keeps key"],
)
def test_broken_rule_is_detected(
    monkeypatch: pytest.MonkeyPatch, rule: str, mutant: Callable[..., Any]
) -> None:
    monkeypatch.setattr(transitions, rule, mutant)
    with pytest.raises(AssertionError):
        play(
            plans_place(),
            SHORT(max_examples=200, stateful_step_count=25, phases=[Phase.generate]),
        )


# ---- long runs


@pytest.mark.slow
def test_plans_in_the_long_run() -> None:
    play(plans_place(), LONG(max_examples=6_000, stateful_step_count=60))


@pytest.mark.slow
def test_mongomock_in_the_long_run() -> None:
    play(memory_place(), LONG(max_examples=500, stateful_step_count=60))


@pytest.mark.slow
def test_mongod_in_the_long_run(server: Place) -> None:
    play(server, LONG(max_examples=500, stateful_step_count=60))
