"""Samples of exhaustive tests: ``make test`` runs a few cases, and ``make test-slow`` the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

#: How many deaths ``make test`` tries, where a process may die at any point.
FEW = 3


def spread(count: int, few: int) -> list[int]:
    """Return the first and the last index, and further indexes at equal distances between them."""
    if count <= few:
        return list(range(count))
    if few == 1:
        return [0]
    return [round(step * (count - 1) / (few - 1)) for step in range(few)]


def sampled(cases: Iterable[Any], few: int = 3) -> list[Any]:
    """Return parameters of which ``make test`` runs a few.

    Args:
        cases: The parameters; a tuple holds a value for each of several arguments.
        few: How many it runs: the first, the last, and some between them.
    """
    every = list(cases)
    kept = spread(len(every), few)
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if index in kept else pytest.mark.slow,
        )
        for index, case in enumerate(every)
    ]


def sample(
    items: Iterable[pytest.Item], few: int | None, where: Callable[[Mapping[str, object]], bool]
) -> None:
    """Let ``make test`` run a few cases of each test in some place.

    Args:
        items: The collected tests.
        few: How many cases of a test it runs; None: a third of them.
        where: Returns whether a case with these parameters belongs to the place.
    """
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        params: Mapping[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if params and where(params) and item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for each in cases.values():
        kept = spread(len(each), few or max(1, len(each) // 3))
        for index, item in enumerate(each):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


#: The argument ``few`` of a test whose process dies at any point; see ``at_each``.
some_or_all = pytest.mark.parametrize(
    "few", [pytest.param(FEW, id="some"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)


def at_each(run: Callable[[int], int], few: int | None) -> int:
    """Run with a death at each point, after a run without one. Return how many points there are.

    Args:
        run: Runs with a death at this point, counted from 1. At 0 there is none. Returns how many
            points it met.
        few: How many points are tried; None: all of them.
    """
    points = run(0)
    for index in spread(points, points if few is None else few):
        run(index + 1)
    return points
