"""Duties of the plans towards a kind that does not claim in scan order."""

from __future__ import annotations

from typing import Any

from pyqueue.backends import kind
from pyqueue.backends.bulk.partitions import page, slices
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.runtime.waiters import Waiters
from tests.contract.newest import Newest
from tests.plans.runner import NOW, Runner, after

NOT_PAUSED: list[Any] = [{"_id": "~queue:t"}]


def test_empty_claim_forgets_a_due_time_that_has_passed() -> None:
    """Otherwise a waiting consumer scans again every millisecond."""
    waiters = Waiters("t")
    waiters.scan.due = after(-1)
    plans = plans_of("a", Options(dead_letter="a.dead"), kind="newest")
    assert Runner(NOT_PAUSED, None).run(plans.receive(waiters, 1, timeout=0)) == []
    assert waiters.scan.due is None


def test_slices_are_in_scan_order_for_every_kind() -> None:
    """The bounds of a slice are positions in scan order, whatever the order of claims."""
    newest = kind.lookup("newest")
    assert newest.order == Newest.order
    runner = Runner(2, 0, [{"_id": "m1", "when": NOW}], [], [])
    first, _ = runner.run(slices("a", newest, 2))
    runner.run(page("a", newest, first, 10))
    assert [command.sort for command in runner.commands[2:]] == [(("when", 1), ("_id", 1))] * 3
