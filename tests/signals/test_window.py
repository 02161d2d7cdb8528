"""The window loses no event, sends none too late, and sends none too often."""

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from signals import Window, earliest
from tests.signals.portal import NOW

LENGTH = 50  # whole numbers, so that times compare exactly
WHENS = st.none() | st.integers(0, 5).map(lambda minutes: NOW + timedelta(minutes=minutes))
EVENTS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from("abc"), WHENS), max_size=60)
Event = tuple[float, str, datetime | None]


def play(
    events: Sequence[tuple[float, str, datetime | None]], burst: int = 8
) -> tuple[list[Event], list[Event]]:
    """Drive a window on time. Return the events offered and sent, with times."""
    window = Window(LENGTH, burst)
    offered: list[Event] = []
    sent: list[Event] = []
    now = 0.0

    def wait(until: float) -> None:
        at = now
        while (pause := window.next(at)) is not None and at + pause <= until:
            at += pause
            sent.extend((at, topic, when) for topic, when in window.due(at))

    for gap, topic, when in events:
        wait(now + gap)
        now += gap
        offered.append((now, topic, when))
        if window.offer(topic, when, now):
            sent.append((now, topic, when))
    wait(now + 10 * LENGTH)
    assert window.next(now + 10 * LENGTH) is None
    assert len(window) == 0
    return offered, sent


def times(sent: list[Event], topic: str) -> list[float]:
    return [time for time, its, _ in sent if its == topic]


@given(EVENTS)
def test_window_sends_after_every_event(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    offered, sent = play(events)
    for at, topic, when in offered:
        assert any(
            topic == its and at <= time <= at + LENGTH and earliest(merged, when) == merged
            for time, its, merged in sent
        )


@given(EVENTS)
def test_window_sends_only_what_was_offered(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    offered, sent = play(events)
    assert {(topic, when) for _, topic, when in sent} <= {
        (topic, when) for _, topic, when in offered
    }


@given(EVENTS)
def test_window_without_a_burst_sends_once_per_window(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    _, sent = play(events, burst=1)
    for topic in "abc":
        gaps = itertools.pairwise(times(sent, topic))
        assert all(later - sooner >= LENGTH for sooner, later in gaps)


@given(EVENTS)
def test_window_bursts_again_only_after_a_window_without_merging(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    offered, sent = play(events, burst=3)
    for topic in "abc":
        offers, all_sent = times(offered, topic), times(sent, topic)
        # An event not sent when offered was merged until then. Windows touch at their ends.
        merged = [each for each in offers if each not in all_sent]
        for each in merged:
            trailing = next(time for time in all_sent if time > each)
            following = [time for time in all_sent if trailing < time < trailing + LENGTH]
            assert not following, "the window after a trailing event has no burst"
        for time in all_sent:
            assert len([each for each in all_sent if time <= each < time + LENGTH]) <= 2 * 3


def test_burst_of_eight_passes_and_the_ninth_waits() -> None:
    window = Window(LENGTH)
    assert [window.offer("a", NOW, 0) for _ in range(9)] == [True] * 8 + [False]
    assert window.due(LENGTH) == [("a", NOW)]
    assert not window.offer("a", NOW, LENGTH + 1), "something was merged in the last window"
    assert window.due(2 * LENGTH) == [("a", NOW)]
    assert window.due(3 * LENGTH) == []
    assert [window.offer("a", NOW, 3 * LENGTH) for _ in range(9)] == [True] * 8 + [False]


@pytest.mark.parametrize("gap", [20, 30, 50, 80])
def test_spaced_events_are_never_held_back(gap: int) -> None:
    offered, sent = play([(gap, "a", NOW)] * 200)
    assert sent == offered


def test_flood_sends_as_often_as_without_a_burst() -> None:
    """10 000 events a second for 10 s, in virtual time. Only the first burst is more."""
    flood = [(LENGTH / 500, "a", NOW)] * 100_000
    (_, with_burst), (_, without) = play(flood), play(flood, burst=1)
    assert 195 < len(without) < 205, "one for each window"
    assert len(with_burst) <= len(without) + 7
    after = [[time for time, _, _ in sent if time > LENGTH / 2] for sent in (with_burst, without)]
    assert len(after[0]) <= len(after[1])


@given(EVENTS)
def test_window_flush_returns_every_held_event(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    window = Window(LENGTH, 2)
    held = {topic for _, topic, when in events if not window.offer(topic, when, 0)}
    assert {topic for topic, _ in window.flush()} == held
    assert window.next(0) is None
    assert window.due(1000) == []


def test_window_merges_into_overdue_events() -> None:
    window = Window(LENGTH, 1)
    assert window.offer("a", NOW, 0)
    assert not window.offer("a", None, 10)
    assert not window.offer("a", NOW, 500)  # `due` was not called for a long time
    assert window.next(500) == 0
    assert window.due(500) == [("a", None)]


def test_window_forgets_idle_topics() -> None:
    window = Window(LENGTH)
    for number in range(1000):
        window.offer(str(number), NOW, number)
    assert len(window._open) <= LENGTH + 1
