"""The figures in memory: histograms, percentiles and the limit on targets."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from pyqueue.telemetry.figures import (
    BOUNDS_S,
    COUNTS,
    MAX_TARGETS,
    OTHER,
    Figures,
    Histogram,
    quantile,
)

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "place"),
    [(-3, 0), (0, 0), (0.001, 0), (0.0011, 1), (1.0, 9), (120, 15), (120.1, 16), (1e9, 16)],
)
def test_time_counts_in_the_bucket_below_its_bound(seconds: float, place: int) -> None:
    histogram = Histogram()
    histogram.add(seconds, 2)
    assert [place for place, number in enumerate(histogram.numbers) if number] == [place]
    assert histogram.numbers[place] == 2
    assert histogram.seconds == max(0, seconds) * 2


def test_bounds_are_sixteen_and_ascend() -> None:
    assert len(BOUNDS_S) == 16
    assert sorted(BOUNDS_S) == list(BOUNDS_S)
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.001, 120)


def test_neighbours_with_one_instant_are_all_added() -> None:
    early, late = NOW - timedelta(seconds=2), NOW - timedelta(seconds=1)
    histogram = Histogram()
    histogram.add_since([early, early, late, early], NOW)
    assert sum(histogram.numbers) == 4
    assert histogram.seconds == 7
    histogram.add_since([], NOW)
    assert sum(histogram.numbers) == 4


def test_targets_beyond_the_limit_are_one() -> None:
    figures = Figures()
    for number in range(MAX_TARGETS + 3):
        figures.move(f"q{number}", 2)
    figures.move("q1", 1)
    assert len(figures.moved) == MAX_TARGETS + 1
    assert (figures.moved[OTHER], figures.moved["q1"]) == (6, 3)


def test_no_queue_can_have_the_name_of_the_rest() -> None:
    assert OTHER.startswith("~")
    assert len(set(COUNTS)) == len(COUNTS)


def test_quantile_of_nothing_is_none() -> None:
    assert quantile([0] * 17, 0.5) is None
    assert quantile([], 0.5) is None


def test_quantile_is_interpolated() -> None:
    assert quantile([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4], 0.5) == pytest.approx(1.75)
    assert quantile([1, 1], 0.5) == pytest.approx(0.001)
    assert quantile([0] * 16 + [5], 0.5) == 120


@pytest.mark.parametrize("seed", range(20))
def test_share_of_the_values_lies_below_a_quantile(seed: int) -> None:
    rng = random.Random(seed)
    values = [rng.choice((0.0, 0.001, rng.random(), rng.uniform(0, 100))) for _ in range(50)]
    histogram = Histogram()
    for each in values:
        histogram.add(each)
    for share in (0.01, 0.5, rng.random(), 0.99, 1):
        found = quantile(histogram.numbers, share)
        assert found is not None
        bound = next(bound for bound in BOUNDS_S if bound >= found - 1e-9)
        assert sum(each <= bound for each in values) >= share * len(values) - 1e-6
