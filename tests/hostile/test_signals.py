"""Foreign data on a bus: a listener hears the signals and skips the rest, without a restart."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta, timezone
from typing import Any

import bson
import pytest
from bson import ObjectId, Timestamp
from bson.datetime_ms import DatetimeMS
from bson.raw_bson import RawBSONDocument
from hypothesis import HealthCheck, given, settings
from redis import Redis

from pyqueue.payloads import OPTIONS
from signals import BusError, MemoryBus
from tests.hostile.values import ODD, Given, anything
from tests.signals.conftest import Kind, kind, redis_server
from tests.signals.portal import NOW
from tests.support.eventually import eventually
from tests.support.servers import RedisServer

__all__ = ["kind", "redis_server"]  # fixtures

capped = pytest.mark.parametrize(
    "kind", ["capped-blocking", "capped-async", "capped-motor"], indirect=True
)
on_redis = pytest.mark.parametrize("kind", ["redis-blocking", "redis-async"], indirect=True)


@capped
def test_capped_bus_ignores_foreign_documents(kind: Kind, mongo: Any) -> None:
    bus = kind.make()
    ring = mongo[kind.place]["pyqueue.signals"].with_options(codec_options=OPTIONS)
    with bus.listen("topic") as listener:
        bus.emit("topic", NOW)
        assert listener.wait(30)
        for field in ("topic", "when", "at"):
            for value in ODD.values():
                document = {
                    "_id": ObjectId(),
                    "at": Timestamp(0, 0),
                    "topic": "other",
                    "when": NOW,
                } | {field: value}
                ring.insert_one(document)
        for bad in (b"POISO\xff", b"\xff\xff\xff\xff\xff\xff"):
            document = {"_id": ObjectId(), "at": Timestamp(0, 0), "topic": "POISON", "when": NOW}
            ring.insert_one(RawBSONDocument(bson.encode(document).replace(b"POISON", bad)))
        # A valid topic, with an instant outside Python's range, or without one.
        ring.insert_one(
            {
                "_id": ObjectId(),
                "at": Timestamp(0, 0),
                "topic": "topic",
                "when": DatetimeMS(1 << 62),
            }
        )
        ring.insert_one({"_id": ObjectId(), "at": Timestamp(0, 0), "topic": "topic"})
        heard = bus.stats["heard"]
        bus.emit("topic", NOW)
        eventually(lambda: bus.stats["heard"] > heard)
        assert listener.wait(30)
    assert bus.stats["restarts"] == 0


@on_redis
def test_redis_bus_ignores_foreign_payloads(kind: Kind, redis_server: RedisServer) -> None:
    bus = kind.make()
    with Redis.from_url(redis_server.url) as raw, bus.listen("topic") as listener:
        bus.emit("topic", NOW)
        assert listener.wait(30)
        payloads = [
            b"",
            b"\xff\xfe",
            b"x",
            b"--",
            b"1e5",
            b"9" * 5000,
            b"-" + b"9" * 30,
            b"NaN",
            b"{}",
            b"\x00",
            "٣".encode(),
        ]
        for payload in payloads:
            raw.publish(f"{kind.place}:topic", payload)
            raw.publish(f"{kind.place}:", payload)
            raw.publish(f"{kind.place}:\xff", payload)
        bus.emit("topic", NOW)
        eventually(lambda: bus.stats["heard"] >= 2)
        assert listener.wait(30)
    assert bus.stats["restarts"] == 0


@given(anything(), anything())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bus_survives_any_argument(topic: Given, when: Given) -> None:
    with MemoryBus("hostile") as bus:
        for call in (
            lambda: bus.emit(topic.value, NOW),
            lambda: bus.emit("a", when.value),
            lambda: bus.listen(topic.value),
        ):
            with suppress(BusError):
                call()


@pytest.mark.parametrize(
    "kind", ["redis-blocking", "redis-async", "capped-blocking", "capped-async"], indirect=True
)
def test_unsendable_signal_is_refused_at_once(kind: Kind) -> None:
    bus = kind.make()
    early = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))
    late = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))
    with bus.listen("topic") as listener:
        for topic, when in (
            ("\ud800", NOW),
            ("", NOW),
            ("topic", early),
            ("topic", late),
            ("topic", datetime(2030, 1, 1)),
        ):
            with pytest.raises(BusError):
                bus.emit(topic, when)
        bus.emit("topic", NOW)
        assert listener.wait(30)
        assert listener.when == NOW
    assert bus.stats["failed"] == 0
