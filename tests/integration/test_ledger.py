"""Many processes on real queues: each message is settled once, and held by one at a time.

The consumers also roll back, release and abandon some messages, as if they had died.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from pyqueue import Client
from tests.integration.conftest import PROCESSES
from tests.support.ledger import Hold, Job, Page, audit, work
from tests.support.processes import spawn_pool

THREE = ("raw", "parsed", "sink")


def check(
    url: str,
    pool: ProcessPoolExecutor,
    *,
    processes: int,
    messages: int,
    queues: tuple[str, ...],
    batches: tuple[int, ...],
    faults: float = 0.01,
) -> None:
    """Run the processes, with the batch sizes in turn, and audit their ledgers."""
    jobs = [
        Job(url, worker, messages, queues, batches[worker % len(batches)], faults, seed=2)
        for worker in range(processes)
    ]
    # One job per process, because each job lasts until all work is done.
    pages = list(pool.map(work, jobs, timeout=600))
    assert audit(pages, queues) == []
    assert sum(len(page.pushed) for page in pages) == processes * messages
    ends = {hold.end for page in pages for hold in page.holds}
    assert ends >= {"commit", "rollback", "release", "abandon"}  # the run was not an easy one
    with Client(url) as client:
        for name in queues:
            counts = client.queue(name).counts()
            assert (counts.total, counts.history) == (0, 0)


def test_ledger_of_four_processes(url: str, processes: ProcessPoolExecutor) -> None:
    assert PROCESSES == 4
    check(url, processes, processes=4, messages=30, queues=THREE, batches=(20, 1), faults=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [(1,), (100,), (1, 7, 100)], ids=["single", "batch", "mixed"])
def test_ledger_of_sixteen_processes_on_one_queue(url: str, batches: tuple[int, ...]) -> None:
    with spawn_pool(16) as pool:
        check(url, pool, processes=16, messages=5000, queues=("jobs",), batches=batches)


@pytest.mark.slow
def test_ledger_of_sixteen_processes_on_three_queues(url: str) -> None:
    with spawn_pool(16) as pool:
        check(url, pool, processes=16, messages=5000, queues=THREE, batches=(1, 100))


# The audit itself

A = Hold("a", "jobs", 1.0, 2.0, "rollback", 1)
B = Hold("a", "jobs", 2.5, 3.0, "commit", 2)


@pytest.mark.parametrize(
    ("holds", "complaint"),
    [
        ([A, B], None),
        ([A, replace(B, got=1.5)], "held twice"),
        ([A, replace(B, tries=1)], "tries 1"),
        ([replace(A, end="commit"), B], "received after its commit"),
        ([A], "1 of 1 had no commit"),
        ([A, B, replace(B, id="b", tries=1)], "1 had too many"),
    ],
)
def test_audit_finds_each_fault(holds: list[Hold], complaint: str | None) -> None:
    wrong = audit([Page(["a"], holds[:1]), Page([], holds[1:])], ("jobs",))
    assert bool(wrong) == bool(complaint)
    assert complaint is None or any(complaint in each for each in wrong)
