"""Whatever the API allows, in any order, beside the reference model: over documents in memory, on mongomock, and on a real mongod.

A failure prints its steps, which can be run as they stand on a ``Machine`` of that place, and a blob for ``@reproduce_failure``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pymongo
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pyqueue import Reservation
from pyqueue.backends.standard import Standard
from tests.model.machine import Machine
from tests.model.places import Cluster, Place, memory_place, plans_place, server_place, virtual_time
from tests.model.profiles import LONG, SHORT


def play(place: Place, options: settings, backend: type[Standard] = Standard) -> None:
    """Run the machine there."""
    with virtual_time() as time:

        class Here(Machine):
            make = staticmethod(lambda: Cluster(place, time, backend))

        run_state_machine_as_test(Here, settings=options)


@pytest.fixture
def server(url: str) -> Any:
    """A database of a real mongod."""
    with pymongo.MongoClient[dict[str, Any]](url) as mongo:
        yield server_place(mongo.get_default_database())


def test_plans() -> None:
    play(plans_place(), SHORT(max_examples=200, stateful_step_count=25))


def test_mongomock() -> None:
    play(memory_place(), SHORT(max_examples=20, stateful_step_count=25))


def test_mongod(server: Place) -> None:
    play(server, SHORT(max_examples=20, stateful_step_count=25))


# ---- what breaks a rule is seen


class Tokenless(Standard):
    """Settles by the id alone."""

    __slots__ = ()

    def _held(self, members: Sequence[Reservation[Any]]) -> dict[str, Any]:
        return {"_id": {"$in": [each.id for each in members]}, "processed": {"$exists": False}}


class Careless(Standard):
    """Leaves something as it was, in messages that move on."""

    __slots__ = ()

    kept: ClassVar[str]

    def leaving(self, *args: Any, **options: Any) -> dict[str, Any]:
        update = super().leaving(*args, **options)
        for fields in update.values():
            fields.pop(self.kept, None)
        # The backend takes the renaming of keys out itself where it does not belong.
        return {
            operator: fields
            for operator, fields in update.items()
            if fields or operator == "$rename"
        }


class KeepsTries(Careless):
    __slots__ = ()
    kept = "tries"


class KeepsToken(Careless):
    __slots__ = ()
    kept = "token"


class KeepsKey(Careless):
    __slots__ = ()
    kept = "key"


@pytest.mark.parametrize("backend", [Tokenless, KeepsTries, KeepsToken, KeepsKey])
def test_what_breaks_a_rule_is_seen(backend: type[Standard]) -> None:
    with pytest.raises(AssertionError):
        play(
            plans_place(),
            SHORT(max_examples=200, stateful_step_count=25, phases=[Phase.generate]),
            backend,
        )


# ---- at length


@pytest.mark.slow
def test_plans_at_length() -> None:
    play(plans_place(), LONG(max_examples=6_000, stateful_step_count=60))


@pytest.mark.slow
def test_mongomock_at_length() -> None:
    play(memory_place(), LONG(max_examples=500, stateful_step_count=60))


@pytest.mark.slow
def test_mongod_at_length(server: Place) -> None:
    play(server, LONG(max_examples=500, stateful_step_count=60))
