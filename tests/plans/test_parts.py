"""Tests of parts that need no plan: Clock, Backoff, Codec, arguments, Schedule, messages.

There is no database. The time is an argument or a patched clock.
"""

from __future__ import annotations

import math
import pickle
import time
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import bson
import pytest
from bson import Decimal128, ObjectId, Timestamp
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from pyqueue import (
    UNCHANGED,
    Backoff,
    ConfigurationError,
    Counts,
    InvalidMessage,
    InvalidName,
    LeaseLost,
    Unavailable,
)
from pyqueue import arguments as check
from pyqueue.clock import Clock
from pyqueue.documents import message_of, state_of
from pyqueue.payloads import LIMIT, OPTIONS, Codec, encode
from pyqueue.runtime.renewal import Entry, Schedule
from tests.plans.runner import NOW, after, reservation

# ---- Clock


class Hands:
    """The two clocks of a machine, set by the test."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.wall = 1_356_998_400.0  # 2013-01-01

    def move(self, seconds: float) -> None:
        self.monotonic += seconds
        self.wall += seconds


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    hands = Hands()
    monkeypatch.setattr(time, "monotonic", lambda: hands.monotonic)
    monkeypatch.setattr(time, "time", lambda: hands.wall)
    return hands


def stale(clock: Clock) -> bool:
    """Return ``clock.stale``. A type checker assumes that a property keeps its value."""
    return clock.stale


def at(seconds: float) -> datetime:
    return datetime(2013, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)


class TestClock:
    def test_clock_starts_with_the_machine_time(self, hands: Hands) -> None:
        clock = Clock()
        assert clock.now() == at(0)
        assert stale(clock)
        hands.move(1.5)
        assert clock.now() == at(1.5)
        assert clock.now().tzinfo is UTC

    def test_clock_uses_the_quickest_sample(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(990.0, 996.0, at(50)), (998.0, 998.2, at(99)), (999.0, 1000.0, at(10))])
        assert clock.now() == at(99 + 1.9)  # half of the round trip is over
        assert clock.skew == pytest.approx(100.9)
        assert not stale(clock)

    def test_clock_runs_on_the_monotonic_clock(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(1000.0, 1000.0, at(7))])
        hands.wall += 3600  # the wall clock of the machine is set
        assert clock.now() == at(7)
        assert stale(clock)  # and new samples are due
        hands.wall -= 3600
        assert not stale(clock)
        hands.wall -= 0.9
        assert not stale(clock)
        hands.wall -= 0.2
        assert stale(clock)

    def test_samples_are_due_at_random_times_and_on_request(self, hands: Hands) -> None:
        clock = Clock()
        ages = set()
        for _ in range(20):
            clock.sample([(hands.monotonic, hands.monotonic, at(hands.monotonic - 1000))])
            ages.add(clock.fresh_s)
            hands.move(clock.fresh_s - 0.1)
            assert not stale(clock)
            hands.move(0.2)
            assert stale(clock)
        assert 10 <= min(ages) < max(ages) <= 15
        clock.touch()
        assert not stale(clock)
        clock.expire()
        assert stale(clock)

    def test_clock_knows_which_samples_agree(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(1000.0, 1000.0, at(0))])
        hands.move(20)
        for sent, received, instant, agrees in (
            (1019.5, 1019.7, 19.6, True),
            (1019.5, 1019.7, 19.499, True),  # instants are in whole milliseconds
            (1019.5, 1019.7, 19.49, False),
            (1019.5, 1019.7, 19.71, False),
            (1018.0, 1019.7, 19.0, False),  # it took so long that it says little
        ):
            assert clock.agrees((sent, received, at(instant))) == agrees

    def test_steps_of_the_primary_are_counted(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(1000.0, 1000.0, at(0))])
        assert clock.changes == 0
        for instant, steps in ((0.9, 0), (3, 1), (1, 2), (0.1, 2)):
            clock.sample([(1000.0, 1000.0, at(instant))])
            assert clock.changes == steps

    def test_clock_stays_ahead_of_the_primary(self, hands: Hands) -> None:
        clock = Clock()
        clock.advance(3600)
        assert (clock.now(), clock.changes) == (at(3600), 1)
        clock.sample([(1000.0, 1000.0, at(0.5))])
        assert (clock.now(), clock.changes) == (at(3600.5), 1)
        assert clock.agrees((1000.0, 1000.0, at(0.5)))
        assert not clock.agrees((1000.0, 1000.0, at(3600.5)))
        assert clock.skew == pytest.approx(0.5)

    def test_small_backward_correction_stops_the_clock(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(1000.0, 1000.0, at(10))])
        assert clock.now() == at(10)
        clock.sample([(1000.0, 1000.0, at(9.2))])
        assert clock.now() == at(10)
        hands.move(0.5)
        assert clock.now() == at(10)
        hands.move(0.5)
        assert clock.now() == at(10.2)

    def test_large_correction_is_followed(self, hands: Hands) -> None:
        clock = Clock()
        clock.sample([(1000.0, 1000.0, at(100))])
        assert clock.now() == at(100)
        clock.sample([(1000.0, 1000.0, at(40))])
        assert clock.now() == at(40)

    @pytest.mark.xdist_group("hypothesis")
    def test_clock_never_steps_back_by_less_than_a_second(self, hands: Hands) -> None:
        @given(st.lists(st.tuples(st.floats(0, 0.3), st.floats(-0.9, 0.9)), max_size=30))
        def holds(steps: list[tuple[float, float]]) -> None:
            clock = Clock()
            clock.sample([(hands.monotonic, hands.monotonic, at(0))])
            start = hands.monotonic
            last = clock.now()
            for passed, error in steps:
                hands.move(passed)
                clock.sample(
                    [(hands.monotonic, hands.monotonic, at(hands.monotonic - start + error / 2))]
                )
                now = clock.now()
                assert now >= last
                last = now

        holds()


# ---- Backoff


def test_backoff_grows_to_its_maximum() -> None:
    backoff = Backoff(base=2, factor=3, maximum=50, jitter=0)
    assert [backoff.delay(tries) for tries in (1, 2, 3, 4, 100_000)] == [2, 6, 18, 50, 50]
    assert Backoff().base == 1
    assert (Backoff().factor, Backoff().maximum, Backoff().jitter) == (2, 3600, 0.1)


@given(st.integers(0, 10**6))
def test_backoff_is_spread_by_its_jitter(tries: int) -> None:
    plain, spread = Backoff(jitter=0).delay(tries), Backoff(jitter=0.1).delay(tries)
    assert 0.9 * plain <= spread <= 1.1 * plain + 1e-9
    assert math.isfinite(spread)


def test_backoff_differs_from_call_to_call() -> None:
    assert len({Backoff(jitter=0.5).delay(5) for _ in range(20)}) > 1


# ---- Codec


class Colour(Enum):
    RED = "red"


class Row(BaseModel):
    price: Decimal
    day: date
    ident: UUID
    tags: set[int]
    colour: Colour = Colour.RED


ROW = Row(price=Decimal("1.50"), day=date(2013, 1, 1), ident=UUID(int=1), tags={1})


class TestCodec:
    def test_dump_keeps_bson_types_and_converts_the_rest(self) -> None:
        assert Codec(Row).dump(ROW) == {
            "price": Decimal128("1.50"),
            "day": "2013-01-01",
            "ident": UUID(int=1),
            "tags": [1],
            "colour": "red",
        }
        assert Codec(bytes).dump(b"\x00") == b"\x00"
        assert Codec(datetime).dump(NOW) == NOW
        assert Codec(timedelta).dump(timedelta(seconds=90)) == "PT1M30S"
        assert Codec(dict[int, float]).dump({1: 0.5}) == {"1": 0.5}
        assert Codec(list[Any]).dump([Timestamp(1, 2)]) == [Timestamp(1, 2)]

    def test_load_reverses_dump(self) -> None:
        stored = bson.decode(
            bson.encode({"p": Codec(Row).dump(ROW)}, codec_options=OPTIONS), OPTIONS
        )["p"]
        assert Codec(Row).load(stored) == ROW

    @given(
        st.decimals(
            allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20, places=10
        )
    )
    def test_decimals_round_trip(self, value: Decimal) -> None:
        codec: Codec[Decimal] = Codec(Decimal)
        assert codec.load(codec.dump(value)) == value

    def test_decimal_digits_beyond_bson_are_refused_or_rounded(
        self,
    ) -> None:
        value = Decimal("1." + "123456789" * 5)
        try:
            stored = Codec(Decimal).dump(value)
        except InvalidMessage:
            return
        assert abs(stored.to_decimal() - value) < Decimal("1e-30")

    def test_invalid_payload_error_names_the_model(self) -> None:
        with pytest.raises(InvalidMessage, match="Row"):
            Codec(Row).dump({"price": "x"})
        with pytest.raises(InvalidMessage, match="Row"):
            Codec(Row).load({"price": "x"})

    def test_codec_without_a_model_keeps_values(self) -> None:
        value, codec = object(), Codec[Any]()
        assert codec.dump(value) is value
        assert codec.load(value) is value
        assert codec.name is None

    def test_codec_pickles_with_its_model(self) -> None:
        copy = pickle.loads(pickle.dumps(Codec(Row)))
        assert copy.name == "Row"
        assert copy.dump(ROW) == Codec(Row).dump(ROW)

    def test_invalid_model_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="model"):
            Codec(object())


def test_encode_checks_the_document() -> None:
    assert encode({"a": [1, None]}).raw == bson.encode({"a": [1, None]})
    room = LIMIT - len(bson.encode({"a": ""}))
    assert len(encode({"a": "x" * room}).raw) == LIMIT
    with pytest.raises(InvalidMessage, match=str(LIMIT)):
        encode({"a": "x" * (room + 1)})
    with pytest.raises(InvalidMessage, match="BSON"):
        encode({"a": object()})


# ---- arguments


@pytest.mark.parametrize(
    "name", ["a", "A-z_0.9:b>c", "x" * 110, "x" * 110 + ".dead", "a.dead", ".dead", "a.dead.dead"]
)
def test_names_that_are_allowed(name: str) -> None:
    assert check.queue_name(name) == name


@given(st.text(max_size=5))
def test_only_these_characters_are_allowed(name: str) -> None:
    allowed = bool(name) and all(
        each.isascii() and (each.isalnum() or each in "_-.:>") for each in name
    )
    if allowed:
        assert check.queue_name(name) == name
    else:
        with pytest.raises(InvalidName, match="name"):
            check.queue_name(name)


def test_durations() -> None:
    assert check.duration("d", 5) == check.duration("d", timedelta(seconds=5)) == 5.0
    assert check.duration("d", 0) == 0
    for bad in (-1, math.nan, math.inf, "5", None, True, timedelta(days=-1), 1e12):
        with pytest.raises(ConfigurationError, match=r"^d:"):
            check.duration("d", bad)
    for bad in (0, 0.0001, timedelta(0)):
        with pytest.raises(ConfigurationError, match="more than 0"):
            check.duration("d", bad, positive=True)


def test_instants() -> None:
    zone = timezone(timedelta(hours=-5))
    given = datetime(2013, 1, 1, 0, 0, 0, 999_999, tzinfo=zone)
    assert check.instant("at", given) == datetime(2013, 1, 1, 5, 0, 0, 999_000, tzinfo=UTC)
    assert check.instant("at", given).tzinfo is UTC
    assert check.instant("at", datetime(7999, 12, 31, tzinfo=UTC)).year == 7999
    for bad in (
        datetime(2013, 1, 1),
        datetime(8000, 1, 1, tzinfo=UTC),
        datetime.max.replace(tzinfo=zone),
        5,
        "now",
    ):
        with pytest.raises(ConfigurationError, match=r"^at:"):
            check.instant("at", bad)


def test_start_follows_from_at_and_delay() -> None:
    assert check.starting(NOW, None, None) == NOW
    assert check.starting(NOW, 1.5, None) == after(1.5)
    assert check.starting(NOW, 0.0001, None) == after(0.001)  # never before the delay is over
    assert check.starting(NOW, None, after(9)) == after(9)
    assert check.starting(NOW, None, after(-9)) == NOW
    with pytest.raises(ConfigurationError, match="delay, at"):
        check.starting(NOW, 0, after(9))


def test_reservations_are_of_this_queue_and_each_once() -> None:
    one, two = reservation("m1"), reservation("m1", "t2")
    assert check.reservations("a", (one, two, one)) == [one, two]
    for bad in (None, "m1", ObjectId()):
        with pytest.raises(ConfigurationError, match="reservations"):
            check.reservations("a", (bad,))
    with pytest.raises(ConfigurationError, match="'b'"):
        check.reservations("a", (reservation("m1", queue="b"),))


# ---- messages


def test_state_follows_from_the_document_and_the_time() -> None:
    assert state_of({"when": NOW}, NOW) == "ready"
    assert state_of({"when": after(1)}, NOW) == "scheduled"
    assert state_of({"when": after(1), "token": "t"}, NOW) == "reserved"
    assert state_of({"when": after(1), "token": "t"}, after(1)) == "ready"
    assert state_of({"when": after(1), "token": "t", "processed": NOW}, NOW) == "finished"


def test_shown_key_follows_from_the_document() -> None:
    live = {"_id": 1, "q": "a", "when": NOW, "last_key": "old"}
    assert message_of(live, None, NOW).key is None
    assert message_of(live | {"key": "k"}, None, NOW).key == "k"
    assert message_of(live | {"dead": {}}, None, NOW).key == "old"
    assert message_of(live | {"processed": NOW}, None, NOW).key == "old"


def test_counts_have_a_total() -> None:
    assert Counts(ready=1, scheduled=2, reserved=3, history=100).total == 6


def test_unchanged_stays_itself() -> None:
    assert pickle.loads(pickle.dumps(UNCHANGED)) is UNCHANGED


# ---- Schedule


class TestSchedule:
    def entry(self, lease: float = 60, group: str | None = None) -> Entry[Any]:
        return Entry(reservation("m1", lease=lease), lambda: None, lambda: None, group)

    def test_renewal_is_due_after_a_third_of_the_lease(self, hands: Hands) -> None:
        schedule, entry = Schedule[Any](), self.entry()
        assert schedule.pause() is None
        schedule.add(entry)
        assert schedule.pause() == pytest.approx(20)
        hands.move(19.9)
        assert schedule.take() == []
        hands.move(0.2)
        assert schedule.pause() == 0
        assert schedule.take() == [entry]
        assert schedule.take() == [], "it is in progress"
        assert not schedule.renewed(entry, None)
        assert schedule.take() == []
        assert schedule.pause() == pytest.approx(20)

    def test_failure_is_repeated_a_tenth_of_the_lease_later(self, hands: Hands) -> None:
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        hands.move(20)
        assert schedule.take() == [entry]
        assert not schedule.renewed(entry, Unavailable("gone"))
        assert schedule.pause() == pytest.approx(6)
        assert schedule.discard(entry.reservation) == "renewed"

    def test_lease_runs_from_the_beginning_of_its_renewal(self, hands: Hands) -> None:
        """A renewal that took long must not delay the next one as well."""
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        hands.move(20)
        assert schedule.take() == [entry]
        hands.move(30)
        schedule.renewed(entry, None)
        assert schedule.pause() == pytest.approx(6)

    def test_lost_lease_is_reported_once_and_not_renewed(self, hands: Hands) -> None:
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        hands.move(20)
        assert schedule.take() == [entry]
        assert schedule.renewed(entry, LeaseLost("gone"))
        assert not schedule.renewed(entry, LeaseLost("gone"))
        hands.move(1000)
        assert schedule.take() == []
        assert schedule.pause() is None
        assert schedule.discard(entry.reservation) == "lost"

    def test_suspended_reservation_is_not_renewed(self, hands: Hands) -> None:
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        schedule.suspend(entry.reservation)
        hands.move(1000)
        assert schedule.take() == []
        schedule.renewed(entry, None)  # a renewal that was in progress
        assert schedule.take() == []
        assert schedule.discard(entry.reservation) == "suspended"

    def test_discarded_reservation_stays_discarded(self, hands: Hands) -> None:
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        assert schedule.discard(entry.reservation) == "renewed"
        assert schedule.discard(entry.reservation) is None
        assert not schedule.renewed(entry, LeaseLost("settled by another process"))
        assert schedule.take() == []

    def test_settlement_in_progress_is_not_a_lost_lease(self, hands: Hands) -> None:
        """The answer to a commit may arrive after that to a renewal which found nothing."""
        schedule, entry = Schedule[Any](), self.entry()
        schedule.add(entry)
        hands.move(20)
        assert schedule.take() == [entry]
        schedule.settling(entry.reservation, True)
        assert not schedule.renewed(entry, LeaseLost("committed, or lost"))
        schedule.settling(entry.reservation, False)  # it failed, so the next renewal tells
        hands.move(6)
        assert schedule.take() == [entry]
        assert schedule.renewed(entry, LeaseLost("lost"))

    def test_batch_is_a_hundred_of_one_group(self, hands: Hands) -> None:
        schedule = Schedule[Any]()
        for number in range(300):
            schedule.add(self.entry(group="b" if number % 6 == 0 else "a"))
        schedule.add(self.entry())
        schedule.add(self.entry())
        hands.move(20)
        batches = []
        while batch := schedule.take():
            assert len({each.group for each in batch}) == 1
            batches.append((batch[0].group or "", len(batch)))
        assert sorted(batches) == [("", 1), ("", 1), ("a", 50), ("a", 100), ("a", 100), ("b", 50)]

    def test_leases_that_are_due_soon_are_taken_along(self, hands: Hands) -> None:
        schedule = Schedule[Any]()
        for _ in range(10):
            schedule.add(self.entry(group="a"))
            hands.move(0.5)
        hands.move(15)
        assert len(schedule.take()) == 5
        assert schedule.take() == []

    def test_failed_leases_are_tried_again_apart(self, hands: Hands) -> None:
        """One of them may be locked, and would delay the rest."""
        schedule, failed, sound = Schedule[Any](), self.entry(group="a"), self.entry(group="a")
        schedule.add(failed)
        schedule.add(sound)
        hands.move(20)
        for entry in schedule.take():
            schedule.renewed(entry, Unavailable("locked") if entry is failed else None)
        hands.move(20)
        assert sorted(map(len, (schedule.take(), schedule.take()))) == [1, 1]

    def test_schedule_wakes_for_the_earliest(self, hands: Hands) -> None:
        schedule, long, short = Schedule[Any](), self.entry(300), self.entry(3)
        schedule.add(long)
        schedule.add(short)
        assert schedule.pause() == pytest.approx(1)
        hands.move(1)
        assert schedule.take() == [short]
