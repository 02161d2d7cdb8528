"""The window loses no event, sends none too late, and sends none too often."""

import itertools
from datetime import datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from signals import Window, earliest
from tests.signals.portal import NOW

LENGTH = 50  # whole numbers, so that times compare exactly
WHENS = st.none() | st.integers(0, 5).map(lambda minutes: NOW + timedelta(minutes=minutes))
EVENTS = st.lists(st.tuples(st.integers(0, 70), st.sampled_from("abc"), WHENS), max_size=60)
Event = tuple[float, str, datetime | None]


def play(events: list[tuple[int, str, datetime | None]]) -> tuple[list[Event], list[Event]]:
    """Drive a window on time. Return what was offered and what was sent, with times."""
    window = Window(LENGTH)
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
def test_window_sends_a_topic_once_and_only_what_was_offered(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    offered, sent = play(events)
    for topic in "abc":
        times = [time for time, its, _ in sent if its == topic]
        assert all(later - sooner >= LENGTH for sooner, later in itertools.pairwise(times))
    assert {(topic, when) for _, topic, when in sent} <= {
        (topic, when) for _, topic, when in offered
    }


@given(EVENTS)
def test_window_flush_returns_every_held_event(
    events: list[tuple[int, str, datetime | None]],
) -> None:
    window = Window(LENGTH)
    held = {topic for _, topic, when in events if not window.offer(topic, when, 0)}
    assert {topic for topic, _ in window.flush()} == held
    assert window.next(0) is None
    assert window.due(1000) == []


def test_window_merges_into_overdue_events() -> None:
    window = Window(LENGTH)
    assert window.offer("a", NOW, 0)
    assert not window.offer("a", None, 10)
    assert not window.offer("a", NOW, 500)  # `due` was not called for a long time
    assert window.next(500) == 0
    assert window.due(500) == [("a", None)]


def test_window_forgets_idle_topics() -> None:
    window = Window(LENGTH)
    for number in range(1000):
        window.offer(str(number), NOW, number)
    assert len(window._ends) <= LENGTH + 1
