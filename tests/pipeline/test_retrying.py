"""The delays of retry loops."""

from __future__ import annotations

from itertools import islice

from pyqueue import Backoff
from pyqueue.runtime.retrying import RetryDelays


def test_retry_delays_grow_to_the_maximum() -> None:
    delays = RetryDelays(Backoff(base=0.1, factor=2, maximum=1, jitter=0))
    assert list(islice(delays, 6)) == [0.1, 0.2, 0.4, 0.8, 1, 1]


def test_retry_delays_start_again_after_a_reset() -> None:
    delays = RetryDelays(Backoff(base=1, jitter=0))
    assert list(islice(delays, 3)) == [1, 2, 4]
    delays.reset()
    assert list(islice(delays, 2)) == [1, 2]


def test_retry_delays_never_end() -> None:
    """After many tries the delay is still computed at once: the power of the factor is bounded."""
    delays = RetryDelays(Backoff(base=1, maximum=60, jitter=0))
    assert list(islice(delays, 100_000))[-1] == 60


def test_retry_delays_are_spread_by_the_jitter() -> None:
    delays = RetryDelays(Backoff(base=10, factor=1, jitter=0.5))
    found = set(islice(delays, 50))
    assert len(found) > 1
    assert all(5 <= delay <= 15 for delay in found)
