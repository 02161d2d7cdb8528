"""Tests are distributed to workers in groups, and complete tests are forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.scheduling import Collected, GroupScheduling

TESTS = ["t.py::a@g", "t.py::b", "t.py::c@g", "t.py::d", "t.py::e", "t.py::f"]


class Node:
    """A worker that notes what it is to run."""

    shutting_down = False
    gateway = SimpleNamespace(id="gw0")

    def __init__(self) -> None:
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture
def nodes() -> list[Any]:
    return [Node(), Node()]


@pytest.fixture
def scheduling(nodes: list[Any]) -> GroupScheduling:
    """A scheduler of two workers, which have collected the same tests."""
    values = {"tx": ["popen", "popen"]}
    config: Any = SimpleNamespace(
        getvalue=values.__getitem__, option=SimpleNamespace(loadscopereorder=True)
    )
    scheduling = GroupScheduling(config)
    for node in nodes:
        scheduling.add_node(node)
        scheduling.add_node_collection(node, TESTS)
    scheduling.schedule()
    return scheduling


def test_each_test_runs_once_and_groups_stay_together(
    scheduling: GroupScheduling, nodes: list[Any]
) -> None:
    done: list[list[int]] = [[], []]
    while any(len(done[n]) < len(nodes[n].given) for n in range(2)):
        for n, node in enumerate(nodes):
            for index in node.given[len(done[n]) :][:1]:
                done[n].append(index)
                scheduling.mark_test_complete(node, index)
    assert sorted(done[0] + done[1]) == [*range(len(TESTS))]
    assert any({0, 2} <= set(each) for each in done)
    assert not scheduling.has_pending
    assert all(node.shutting_down for node in nodes)
    assert scheduling.assigned_work == {node: {} for node in nodes}


def test_tests_of_a_crashed_worker_run_elsewhere(
    scheduling: GroupScheduling, nodes: list[Any]
) -> None:
    first, second = nodes
    crashed = scheduling.remove_node(first)
    assert crashed == TESTS[first.given[0]]
    while scheduling.has_pending:
        [(_, work), *_] = scheduling.assigned_work[second].items()
        scheduling.mark_test_complete(second, TESTS.index(next(iter(work))))
    assert sorted(second.given) == [*range(len(TESTS))]


def test_index_of_a_collected_test_is_its_place() -> None:
    collected = Collected(TESTS)
    assert [collected.index(each) for each in TESTS] == [*range(len(TESTS))]
    assert collected == TESTS
