"""What every bus does, blocking or asyncio, whatever carries it."""

import logging
import string
import threading
import time
from datetime import timedelta

import pytest

import signals
from signals import capped_bus
from tests.signals.conftest import Kind, served
from tests.signals.servers import NOW, eventually

LATER = NOW + timedelta(minutes=1)


def test_hears_what_is_emitted_after_entering_and_nothing_before(kind: Kind) -> None:
    bus, other = kind.make(), kind.make()
    with bus.listen("warm") as warm:  # the bus hears already when the second listener comes
        other.emit("a", NOW)
        other.emit("warm", NOW)
        assert warm.wait(5)
        eventually(lambda: other.stats["published"] == 2)
        time.sleep(0.02)  # let what was published arrive, if it can
        with bus.listen("a") as listener:
            assert not listener.wait(0)
            other.emit("a", LATER)
            assert listener.wait(5)
            assert listener.when == LATER
            assert not listener.wait(0)


def test_hears_itself(kind: Kind) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(5)
        assert listener.when == NOW


def test_remembers_what_came_while_nobody_waited(kind: Kind) -> None:
    bus = kind.make()
    with bus.listen("a") as listener:
        bus.emit("a", NOW)
        eventually(lambda: bus.stats["heard"] == 1)
        assert listener.wait(0)


def test_times_out(kind: Kind) -> None:
    with kind.make().listen("a") as listener:
        began = time.monotonic()
        assert not listener.wait(0.05)
        assert 0.045 < time.monotonic() - began < 2


def test_the_second_of_two_events_is_heard_when_the_window_closes(kind: Kind) -> None:
    bus, other = kind.make(window=0.3), kind.make(window=0.3)
    with bus.listen("a") as listener:
        other.emit("a", NOW)
        assert listener.wait(5)
        began = time.monotonic()
        other.emit("a", NOW)
        assert listener.wait(5)
        assert time.monotonic() - began < 1
        eventually(
            lambda: dict(other.stats) | {"heard": 0} == stats(emitted=2, published=2, merged=1)
        )


def test_a_burst_is_merged_to_its_earliest(kind: Kind) -> None:
    bus = kind.make(window=0.3)
    with bus.listen("a") as listener:
        bus.emit("a", LATER)
        assert listener.wait(5)
        for minutes in (5, 3, 4):
            bus.emit("a", NOW - timedelta(minutes=minutes))
        assert listener.wait(5)
        assert listener.when == NOW - timedelta(minutes=5)
        assert not listener.wait(0.4)


def test_none_wins(kind: Kind) -> None:
    bus = kind.make(window=0.3)
    with bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(5)
        bus.emit("a", None)
        bus.emit("a", NOW)
        assert listener.wait(5)
        assert listener.when is None


@pytest.mark.parametrize(
    "topic", ["*", "?", "[ab]", "a*", "A", "a:", "a:b", "a>b", "~a", "ä", "a\\*"]
)
def test_topics_are_exact_names(kind: Kind, topic: str) -> None:
    bus = kind.make()
    with bus.listen(topic) as other, bus.listen("a") as listener:
        bus.emit("a", NOW)
        assert listener.wait(5)
        assert not other.wait(0)
        bus.emit(topic, LATER)
        assert other.wait(5)
        assert other.when == LATER
        assert not listener.wait(0)


def test_every_character_of_a_queue_name_is_part_of_the_topic(kind: Kind) -> None:
    bus = kind.make()
    topic = string.ascii_letters + string.digits + "_-.:>"
    with bus.listen(topic) as listener:
        bus.emit(topic, NOW)
        assert listener.wait(5)


def test_two_places_do_not_hear_each_other(kind: Kind) -> None:
    bus, elsewhere = kind.make(), kind.make(place=kind.place + "x")
    with bus.listen("a") as listener, elsewhere.listen("a") as there:
        elsewhere.emit("a", NOW)
        assert there.wait(5)
        bus.emit("b", NOW)  # goes the same way as what must not come
        assert not listener.wait(0.05)


def test_fifty_listeners_hear_one_event(kind: Kind) -> None:
    bus = kind.make()
    listeners = [bus.listen("a") for _ in range(50)]
    for listener in listeners:
        listener.__enter__()
    bus.emit("a", NOW)
    assert all(listener.wait(5) for listener in listeners)
    assert bus.stats["heard"] == 1
    for listener in listeners:
        listener.__exit__(None, None, None)


def test_a_topic_left_and_entered_again_is_heard(kind: Kind) -> None:
    bus = kind.make()
    for _ in range(3):
        with bus.listen("a") as listener:
            bus.emit("a", NOW)
            assert listener.wait(5)
        assert not listener.wait(0)


def test_close_sends_what_is_held_back(kind: Kind) -> None:
    bus, other = kind.make(), kind.make(window=60)
    with bus.listen("a") as listener:
        other.emit("a", NOW)
        assert listener.wait(5)
        other.emit("a", LATER)
        began = time.monotonic()
        other.close()
        assert listener.wait(5)
        assert listener.when == LATER
        assert time.monotonic() - began < 1.5


def waiting(listener: signals.Listener, heard: list[bool]) -> threading.Thread:
    thread = threading.Thread(target=lambda: heard.append(listener.wait()))
    thread.start()
    time.sleep(0.02)  # most likely it waits by now; the test holds if it does not
    return thread


def test_closing_the_bus_wakes_whoever_waits(kind: Kind) -> None:
    bus = kind.make()
    heard: list[bool] = []
    with bus.listen("a") as listener:
        thread = waiting(listener, heard)
        began = time.monotonic()
        bus.close()
        thread.join(5)
        assert heard == [False]
        assert listener.closed
        assert not listener.wait(None)
        assert time.monotonic() - began < 1.5
        bus.close()  # again: nothing


def test_closing_a_listener_from_another_thread_wakes_whoever_waits(kind: Kind) -> None:
    bus = kind.make()
    heard: list[bool] = []
    with bus.listen("a") as listener, bus.listen("a") as other:
        thread = waiting(listener, heard)
        listener.close()
        thread.join(5)
        assert heard == [False]
        assert listener.closed
        bus.emit("a", NOW)
        assert other.wait(5)
        assert not listener.wait(0)


def test_a_closed_bus_ignores_and_counts(kind: Kind) -> None:
    bus = kind.make()
    bus.emit("a", NOW)
    bus.close()
    bus.emit("a", NOW)
    assert dict(bus.stats) | {"heard": 0} == stats(emitted=2, published=1, failed=1)
    with bus.listen("a") as listener:
        assert listener.closed
        assert not listener.wait(None)


def test_check_passes(kind: Kind) -> None:
    bus = kind.make()
    bus.check()
    with bus.listen("a") as listener:
        bus.check()  # beside a running listener it disturbs nothing
        bus.emit("a", NOW)
        assert listener.wait(5)
        assert listener.when == NOW


@pytest.mark.parametrize(
    ("topic", "when"), [("", NOW), (b"a", NOW), ("a", NOW.replace(tzinfo=None))]
)
def test_wrong_arguments_are_refused(kind: Kind, topic: str, when: None) -> None:
    with pytest.raises(signals.BusError):
        kind.make().emit(topic, when)


def test_many_topics_from_many_threads(kind: Kind) -> None:
    bus, other = kind.make(), kind.make()
    listeners = [bus.listen(f"topic-{number}") for number in range(20)]
    for listener in listeners:
        listener.__enter__()

    def emit(offset: int) -> None:
        for number in range(20):
            other.emit(f"topic-{(number + offset) % 20}", NOW)

    threads = [threading.Thread(target=emit, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(listener.wait(5) for listener in listeners)
    eventually(lambda: other.stats["published"] + other.stats["merged"] >= 80)
    for listener in listeners:
        listener.__exit__(None, None, None)


@served
def test_a_bus_that_is_down_delays_nobody(
    kind: Kind, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capped_bus, "COMMAND_TIMEOUT_S", 0.3)
    bus = kind.make(down=True)
    with caplog.at_level(logging.WARNING, "signals"):
        began = time.monotonic()
        for number in range(100):
            bus.emit(f"topic-{number}", NOW)
        assert time.monotonic() - began < 1
        eventually(lambda: bus.stats["failed"] >= 100)
        began = time.monotonic()
        with bus.listen("a") as listener:
            assert 0.9 < time.monotonic() - began < 3  # the bound of waiting to be heard
            assert not listener.wait(0.05)
        with pytest.raises(signals.BusError):
            bus.check()
        assert len(caplog.records) == 1
    assert bus.stats["emitted"] == 100
    assert bus.stats["published"] == 0
    began = time.monotonic()
    bus.close()
    assert time.monotonic() - began < 3


def stats(**counts: int) -> dict[str, int]:
    return dict.fromkeys(signals.STATS, 0) | counts
