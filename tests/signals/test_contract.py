"""Behaviour of every bus, blocking or asyncio, whatever carries it."""

import logging
import string
import threading
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

import signals
from signals import capped_bus
from tests.signals.conftest import KINDS, Kind, served
from tests.signals.portal import NOW, SECONDS, expect
from tests.support.eventually import eventually

LATER = NOW + timedelta(minutes=1)
LONG_WINDOW = 60.0  # closes only when the bus is closed


def stats(**counts: int) -> dict[str, int]:
    return dict.fromkeys(signals.STATS, 0) | counts


def test_listener_hears_only_events_after_entering(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    with bus.listen("warm") as warm:  # the bus already listens when the second listener enters
        producer.emit("a", NOW)
        eventually(lambda: producer.stats["published"] == 1)
        producer.emit("warm", NOW)
        assert warm.wait(SECONDS)  # this event came after the other
        with bus.listen("a") as listener:
            assert not listener.wait(0)
            producer.emit("a", LATER)
            expect(listener, LATER)
            assert not listener.wait(0)


def test_buses_of_a_process_hear_each_other_directly(kind: Kind) -> None:
    """Each event, without the window, once, and when ``emit`` returns."""
    bus, second = (kind.make(together=True, window=LONG_WINDOW) for _ in "12")
    with bus.listen("a") as one, second.listen("a") as two:
        for emitter in (bus, second) * 5:
            emitter.emit("a", NOW)
            assert one.wait(SECONDS)
            assert two.wait(SECONDS)
        assert [dict(each.stats)["heard"] for each in (bus, second)] == [10, 10]


@served
def test_server_brings_no_event_back_to_its_process(kind: Kind) -> None:
    bus, second, elsewhere = kind.make(together=True), kind.make(together=True), kind.make()
    with bus.listen("a") as one, second.listen("a") as two, elsewhere.listen("a") as far:
        for _ in range(2):
            bus.emit("a", NOW)
            assert one.wait(SECONDS)
            assert two.wait(SECONDS)
        eventually(lambda: bus.stats["published"] + bus.stats["merged"] == 2)
        assert far.wait(SECONDS)
        elsewhere.emit("a", LATER)  # comes behind the events of ``bus``
        for listener in (one, two):
            expect(listener, LATER)
        assert [each.stats["heard"] for each in (bus, second)] == [3, 3]


def test_listener_remembers_events_between_waits(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    with bus.listen("a") as listener:
        producer.emit("a", NOW)
        eventually(lambda: bus.stats["heard"] == 1)
        assert listener.wait(0)
        assert not listener.wait(0)


def test_wait_times_out(kind: Kind) -> None:
    with kind.make().listen("a") as listener:
        began = time.monotonic()
        assert not listener.wait(0.05)
        assert 0.045 < time.monotonic() - began < SECONDS


@served
def test_merged_event_comes_when_the_window_closes(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make(window=0.1)
    with bus.listen("a") as listener:
        producer.emit("a", NOW)
        assert listener.wait(SECONDS)
        while not producer.stats["merged"]:  # on a slow machine the first window may have closed
            producer.emit("a", NOW)
        sent = producer.stats["emitted"] - producer.stats["merged"] + 1
        eventually(lambda: producer.stats["published"] == sent)
        eventually(lambda: bus.stats["heard"] == sent)
        assert listener.wait(SECONDS)


@served
def test_flood_is_merged_to_its_earliest_instant(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make(window=LONG_WINDOW)
    with bus.listen("a") as listener:
        producer.emit("a", LATER)
        assert listener.wait(SECONDS)
        for minutes in (5, 3, 4):
            producer.emit("a", NOW - timedelta(minutes=minutes))
        producer.close()
        expect(listener, NOW - timedelta(minutes=5))
        assert not listener.wait(0.05)
        counted = stats(emitted=4, published=2, merged=3)
        assert dict(producer.stats) | {"heard": 0} == counted


@served
def test_none_wins_when_events_are_merged(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make(window=LONG_WINDOW)
    with bus.listen("a") as listener:
        producer.emit("a", NOW)
        assert listener.wait(SECONDS)
        producer.emit("a", None)
        producer.emit("a", NOW)
        producer.close()
        expect(listener, None)


def test_topics_are_exact_names(kind: Kind) -> None:
    """No character is a wildcard or a separator."""
    topics = ["*", "?", "[ab]", "a*", "A", "a:", "a:b", "a>b", "~a", "ä", "a\\*"]
    topics += [string.ascii_letters + string.digits + "_-.:>"]
    bus, producer = kind.make(), kind.make(window=0)
    with ExitStack() as stack:
        listener = stack.enter_context(bus.listen("a"))
        near = {topic: stack.enter_context(bus.listen(topic)) for topic in topics}
        producer.emit("a", NOW)
        assert listener.wait(SECONDS)
        assert [topic for topic in topics if near[topic].wait(0)] == []
        for topic in topics:
            producer.emit(topic, LATER)
            assert near[topic].wait(SECONDS), topic
            assert near[topic].when == LATER
            heard = [name for name in topics if near[name].wait(0)]
            assert not listener.wait(0), topic
            assert heard == [], topic


def test_places_do_not_hear_each_other(kind: Kind) -> None:
    bus, elsewhere = kind.make(), kind.make(place=kind.place + "x")
    with (
        bus.listen("a") as listener,
        bus.listen("b") as last,
        elsewhere.listen("a") as there,
    ):
        elsewhere.emit("a", NOW)
        assert there.wait(SECONDS)
        bus.emit("b", NOW)  # takes the path that the event from elsewhere would take
        assert last.wait(SECONDS)
        assert not listener.wait(0)


def test_fifty_listeners_hear_one_event(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    with ExitStack() as stack:
        listeners = [stack.enter_context(bus.listen("a")) for _ in range(50)]
        producer.emit("a", NOW)
        assert all(listener.wait(SECONDS) for listener in listeners)
        assert bus.stats["heard"] == 1


def test_topic_is_heard_again_after_leaving(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    for _ in range(3):
        with bus.listen("a") as listener:
            producer.emit("a", NOW)
            assert listener.wait(SECONDS)
        assert not listener.wait(0)


@served
def test_close_sends_held_events_within_a_second(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make(window=LONG_WINDOW)
    with bus.listen("a") as listener:
        producer.emit("a", NOW)
        assert listener.wait(SECONDS)
        producer.emit("a", LATER)
        producer.close()
        assert producer.stats["published"] == 2  # sent when `close` returns, which joins
        expect(listener, LATER)


def waiting(listener: signals.Listener, heard: list[bool]) -> threading.Thread:
    thread = threading.Thread(target=lambda: heard.append(listener.wait()))
    thread.start()
    time.sleep(0.02)  # it most likely waits now; the test holds if it does not
    return thread


def test_closing_the_bus_wakes_waiters(kind: Kind) -> None:
    bus = kind.make()
    heard: list[bool] = []
    with bus.listen("a") as listener:
        thread = waiting(listener, heard)
        bus.close()
        thread.join(SECONDS)
        assert heard == [False]
        assert listener.closed
        assert not listener.wait(None)
        bus.close()  # a second time: nothing happens


def test_closing_a_listener_wakes_its_waiter(kind: Kind) -> None:
    """Another thread closes it."""
    bus, producer = kind.make(), kind.make()
    heard: list[bool] = []
    with bus.listen("a") as listener, bus.listen("a") as second:
        thread = waiting(listener, heard)
        listener.close()
        thread.join(SECONDS)
        assert heard == [False]
        assert listener.closed
        producer.emit("a", NOW)
        assert second.wait(SECONDS)
        assert not listener.wait(0)


def test_closed_bus_ignores_and_counts_events(kind: Kind) -> None:
    bus = kind.make()
    bus.emit("a", NOW)
    bus.close()
    bus.emit("a", NOW)
    assert dict(bus.stats) | {"heard": 0} == stats(emitted=2, published=1, failed=1)
    with bus.listen("a") as listener:
        assert listener.closed
        assert not listener.wait(None)


def test_check_passes(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    bus.check()
    with bus.listen("a") as listener:
        bus.check()  # it does not disturb a running listener
        producer.emit("a", NOW)
        expect(listener, NOW)


def test_emit_refuses_invalid_arguments(kind: Kind) -> None:
    bus = kind.make()
    wrong: list[tuple[Any, Any]] = [("", NOW), (b"a", NOW), ("a", NOW.replace(tzinfo=None))]
    for topic, when in wrong:
        with pytest.raises(signals.BusError, match="invalid"):
            bus.emit(topic, when)


def test_many_threads_emit_many_topics(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    with ExitStack() as stack:
        listeners = [stack.enter_context(bus.listen(f"topic-{number}")) for number in range(20)]

        def emit(offset: int) -> None:
            for number in range(20):
                producer.emit(f"topic-{(number + offset) % 20}", NOW)

        threads = [threading.Thread(target=emit, args=(offset,)) for offset in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(listener.wait(SECONDS) for listener in listeners)
        eventually(lambda: producer.stats["published"] + producer.stats["merged"] >= 80)


@served
def test_bus_that_is_down_delays_no_caller(
    kind: Kind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_bus, "COMMAND_TIMEOUT_S", 0.1)
    monkeypatch.setattr("signals.runner.ENTER_TIMEOUT_S", 0.2)
    bus = kind.make(down=True)
    with caplog.at_level(logging.WARNING, "signals"):
        for number in range(100):
            bus.emit(f"topic-{number}", NOW)  # no call reaches the network
        eventually(lambda: bus.stats["failed"] >= 100)
        began = time.monotonic()
        with bus.listen("a") as listener:
            assert 0.19 < time.monotonic() - began < SECONDS  # entering waits for a limited time
            assert not listener.wait(0.05)
        with pytest.raises(signals.BusError):
            bus.check()
        assert len(caplog.records) == 1
    assert bus.stats["emitted"] == 100
    assert bus.stats["published"] == 0
    began = time.monotonic()
    bus.close()
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "kind", [name for name in KINDS if name.endswith("-blocking")], indirect=True
)
def test_listener_alerts_of_an_event_and_of_its_end(kind: Kind) -> None:
    bus, producer = kind.make(), kind.make()
    alerted = threading.Event()
    with bus.listen("a") as listener:
        listener.alert = alerted.set
        producer.emit("a", NOW)
        assert alerted.wait(SECONDS)
        expect(listener, NOW)
        alerted.clear()
        listener.close()
        assert alerted.is_set()
