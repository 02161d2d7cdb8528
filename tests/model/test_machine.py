"""Whatever the API allows, beside the reference model: on plans over documents in memory, on mongomock, and on a real mongod."""

from __future__ import annotations

from typing import Any

import os

import pymongo
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from pyqueue.backends.standard import Standard
from tests.model.machine import Machine
from tests.model.places import Cluster, Place, memory_place, plans_place, server_place, virtual_time

if os.environ.get('NOSHRINK'): PH=[Phase.explicit,Phase.generate]
else: PH=list(Phase)
SHORT = settings(phases=PH,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    report_multiple_bugs=False,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)
LONG = settings(SHORT, derandomize=False, stateful_step_count=80)


def play(place: Place, options: settings, examples: int, backend: type[Standard] = Standard) -> None:
    """Run the machine; a failure prints the steps, and a blob for ``@reproduce_failure``."""
    with virtual_time() as time:

        class Here(Machine):
            make = staticmethod(lambda: Cluster(place, time, backend))

        run_state_machine_as_test(Here, settings=settings(options, max_examples=examples))  # type: ignore[no-untyped-call]


def test_plans() -> None:
    play(plans_place(), settings(SHORT, derandomize=not os.environ.get("EX")), int(os.environ.get("EX", 100)))
