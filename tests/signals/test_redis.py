"""Faults that only the buses on Redis can have."""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

import signals
from signals import redis_bus
from signals.hub import Hub
from tests.signals.conftest import Kind
from tests.signals.portal import NOW, SECONDS, closing, expect
from tests.support.eventually import eventually
from tests.support.servers import RedisServer

both = pytest.mark.parametrize("kind", ["redis-blocking", "redis-async"], indirect=True)


@pytest.fixture
def admin(redis_server: RedisServer) -> Iterator[Any]:
    with redis.Redis(port=redis_server.port) as client:
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisServer]:
    """A server that the test may kill."""
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@given(
    st.datetimes(datetime(1600, 1, 1), datetime(7999, 1, 1)).map(
        lambda when: when.replace(tzinfo=UTC)
    )
)
def test_payloads_keep_milliseconds_and_are_never_late(when: datetime) -> None:
    decoded, origin = redis_bus.decode(redis_bus.encode(when, "me").encode())
    assert decoded is not None
    assert timedelta(0) <= when - decoded < timedelta(milliseconds=1)
    assert origin == "me"


def test_payloads_without_origin_are_read() -> None:
    """An older release sends them, and reads the first 20 characters of ours."""
    assert redis_bus.decode(b"1893553445678") == (NOW, "")
    assert redis_bus.decode(b"-") == (None, "")
    assert redis_bus.encode(None, "me") == "-"
    assert int(redis_bus.encode(NOW, "me")[:20]) == 1893553445678


@both
def test_foreign_payloads_are_skipped(kind: Kind, admin: Any) -> None:
    bus = kind.make()
    payloads = (b"\xff\xfe", "", "nan", "1e9", "9" * 40, b"x" * 1000)
    with bus.listen("a") as listener:
        pipe = admin.pipeline(transaction=False)
        for number in range(1200):
            pipe.publish(f"{kind.place}:a", payloads[number % 6])
        pipe.execute()
        kind.make().emit("a", NOW)
        expect(listener, NOW)
        assert bus.stats["heard"] == 1
        assert bus.stats["restarts"] == 0


@both
def test_fifty_idle_listeners_share_a_connection(kind: Kind, admin: Any) -> None:
    """They cost the server no commands."""
    before = len(admin.client_list(_type="pubsub"))
    bus = kind.make()
    with ExitStack() as stack:
        listeners = [stack.enter_context(bus.listen(f"topic-{number}")) for number in range(50)]
        assert len(admin.client_list(_type="pubsub")) == before + 1
        commands = admin.info("stats")["total_commands_processed"]
        assert not listeners[0].wait(0.5)
        assert admin.info("stats")["total_commands_processed"] - commands <= 2


@both
def test_topics_without_listeners_are_unsubscribed(
    kind: Kind, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.hub.UNSUBSCRIBE_DELAY_S", 0.1)
    monkeypatch.setattr("signals.redis_bus.READ_TIMEOUT_S", 0.1)
    bus = kind.make()
    with bus.listen("a") as listener:
        with bus.listen("b"):
            assert admin.pubsub_numsub(f"{kind.place}:b")[0][1] == 1
        eventually(lambda: admin.pubsub_numsub(f"{kind.place}:b")[0][1] == 0)
        kind.make().emit("a", NOW)
        assert listener.wait(SECONDS)
    eventually(lambda: not admin.pubsub_channels(f"{kind.place}:*"))  # also not the bus's channel


def make(server: RedisServer, kind: Kind) -> Any:
    return kind.make(url=f"redis://127.0.0.1:{server.port}/0")


@both
def test_restarted_server_wakes_every_listener_once(
    kind: Kind, own: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    bus, producer = make(own, kind), make(own, kind)
    with caplog.at_level(logging.INFO, "signals"), bus.listen("a") as one, bus.listen("b") as two:
        own.kill()
        producer.emit("a", NOW)
        eventually(lambda: producer.stats["failed"] > 0)
        assert not one.wait(0)
        own.start()
        for listener in (one, two):
            assert listener.wait(SECONDS)
        assert two.when is None
        eventually(lambda: producer.stats["published"] == 1)  # the event was kept and sent now
        assert not two.wait(0.1)  # the listener wakes once
        one.wait(0.1)
        producer.emit("b", NOW)
        expect(two, NOW)
        assert bus.stats["restarts"] == 1
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2  # one of each bus


@both
def test_server_that_starts_late_is_heard(
    kind: Kind, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signals.runner.ENTER_TIMEOUT_S", 0.1)
    own.kill()
    bus = make(own, kind)
    with bus.listen("a") as listener:
        with pytest.raises(signals.BusError, match=r"ConnectionError|refused"):
            bus.check()
        own.start()
        expect(listener, None)
        make(own, kind).emit("a", NOW)
        expect(listener, NOW)


@both
def test_broken_bus_does_not_retry_busily(
    kind: Kind, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The delay grows after each failure."""
    monkeypatch.setattr("signals.runner.ENTER_TIMEOUT_S", 0.1)
    tries: list[float] = []
    start = redis_bus.RedisTransport.start

    def counted(self: redis_bus.RedisTransport) -> Any:
        tries.append(time.monotonic())
        return start(self)

    own.kill()
    monkeypatch.setattr(redis_bus.RedisTransport, "start", counted)
    bus = make(own, kind)
    with bus.listen("a") as listener:
        eventually(lambda: len(tries) >= 4)
        assert tries[3] - tries[0] > 0.05 + 0.1 + 0.2  # half of the first three delays
        assert not listener.wait(0)


@both
def test_silent_server_counts_as_dead(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_bus, "READ_TIMEOUT_S", 0.1)
    bus = kind.make()
    with bus.listen("a") as listener:
        # The server answers, but no answer is soon enough.
        monkeypatch.setattr(redis_bus, "SILENCE_S", 0.0)
        eventually(lambda: bus.stats["restarts"] > 0)
        expect(listener, None)


@both
def test_quiet_server_is_pinged(
    kind: Kind, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_bus, "SILENCE_S", 0.5)
    monkeypatch.setattr(redis_bus, "READ_TIMEOUT_S", 0.1)
    bus = kind.make(url=own.url)

    def pings(admin: Any) -> int:
        return int(admin.info("commandstats").get("cmdstat_ping", {"calls": 0})["calls"])

    with bus.listen("a") as listener, redis.Redis(port=own.port) as admin:
        eventually(lambda: pings(admin) >= 2)
        assert not listener.wait(0)
        assert bus.stats["restarts"] == 0


@both
def test_wrong_password_is_reported_but_not_shown(kind: Kind, tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--requirepass", "right-secret")
    try:
        right = kind.make(url=f"redis://:right-secret@127.0.0.1:{server.port}/0")
        right.check()
        for url in (
            f"redis://:wr0ng-secret@127.0.0.1:{server.port}/0",
            f"redis://127.0.0.1:{server.port}/0?password=wr0ng-secret",
        ):
            wrong = kind.make(url=url)
            with pytest.raises(signals.BusError) as caught:
                wrong.check()
            chain = f"{caught.value} {caught.value.__cause__} {wrong!r}"
            assert "secret" not in chain
            assert caught.value.__suppress_context__
        anonymous = kind.make(url=f"redis://127.0.0.1:{server.port}/0")
        with pytest.raises(signals.BusError):
            anonymous.check()
    finally:
        server.kill()


@both
def test_missing_permission_is_reported(kind: Kind, own: RedisServer) -> None:
    needed = "+publish +subscribe +unsubscribe +ping +hello +client"
    rules = {
        "deaf": "&* +publish +hello +auth +client",
        "dumb": "&* +subscribe +hello +auth +client",
        "apart": "resetchannels &other:* +@all",
        "able": f"resetchannels &{kind.place}:* {needed}",
    }
    with redis.Redis(port=own.port) as admin:
        for user, rule in rules.items():
            admin.execute_command("ACL", "SETUSER", user, "on", ">pw", *rule.split())
    able = kind.make(url=f"redis://able:pw@127.0.0.1:{own.port}/0")
    able.check()
    with able.listen("a") as listener:
        kind.make(url=f"redis://able:pw@127.0.0.1:{own.port}/0").emit("a", NOW)
        assert listener.wait(SECONDS)
    for user in ("deaf", "dumb", "apart"):
        with pytest.raises(signals.BusError, match=r"(?i)permission"):
            kind.make(url=f"redis://{user}:pw@127.0.0.1:{own.port}/0").check()


@pytest.mark.parametrize(
    "url",
    [
        *("redis://:pa/ss@word@h:1:2/x", "redis://u:secret@h:port/0", "rediss://:secret@[/0"),
        "redis://:p@secret/word@h:6379/0",
    ],
)
def test_invalid_url_is_refused_but_not_shown(url: str) -> None:
    for opening in (signals.open, signals.open_async):
        with pytest.raises(signals.BusError) as caught:
            opening(url)
        assert "secret" not in str(caught.value)
        assert caught.value.__suppress_context__


def test_unix_socket_carries_events(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--unixsocket", "r.sock")
    try:
        bus = signals.open(f"unix://{tmp_path}/r.sock")
        producer = signals.open(f"unix://{tmp_path}/./r.sock")  # counts as another place
        with closing(bus, producer), bus.listen("a") as listener:
            producer.emit("a", NOW)
            assert listener.wait(SECONDS)
    finally:
        server.kill()


@pytest.mark.parametrize("decode", [True, False])
def test_client_of_the_user_stays_open(redis_server: RedisServer, decode: bool) -> None:
    with redis.Redis(port=redis_server.port, decode_responses=decode) as client:
        with signals.RedisBus(client, prefix=f"own{decode}") as bus, bus.listen("ä") as listener:
            bus.emit("ä", NOW)
            expect(listener, NOW)
        assert client.ping()
        with pytest.raises(signals.BusError, match="asyncio"):
            signals.AsyncRedisBus(client)

    async def asynchronous() -> None:
        async with redis.asyncio.Redis(port=redis_server.port, decode_responses=decode) as client:
            async with (
                signals.AsyncRedisBus(client, prefix=f"own{decode}") as bus,
                bus.listen("ä") as listener,
            ):
                bus.emit("ä", NOW)
                assert await listener.wait(SECONDS)
                assert listener.when == NOW
            assert await client.ping()
            with pytest.raises(signals.BusError, match=r"redis\.Redis"):
                signals.RedisBus(client)

    asyncio.run(asynchronous())


class Mute(redis.Redis):
    """A client of a server that accepts subscriptions and never answers."""

    closed = 0

    def pubsub(self, **options: Any) -> Any:
        pubsub = super().pubsub(**options)  # type: ignore[no-untyped-call]
        close = pubsub.close

        def counted() -> None:
            self.closed += 1
            close()

        pubsub.get_message = lambda *_, **__: None
        pubsub.close = counted
        return pubsub


def test_check_reports_a_server_that_does_not_answer(redis_server: RedisServer) -> None:
    with Mute(port=redis_server.port) as client, signals.RedisBus(client, prefix="mute") as bus:
        with pytest.raises(signals.BusError, match="Redis does not answer"):
            bus.check()
        assert client.closed == 1


@both
def test_break_without_listeners_is_not_repaired(
    kind: Kind, own: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[int] = []
    looks: list[bool] = []
    start, changes = redis_bus.RedisTransport.start, Hub.changes

    def counted(self: redis_bus.RedisTransport) -> Any:
        starts.append(1)
        return start(self)

    def looked(self: Hub, now: float) -> Any:
        answer = changes(self, now)
        looks.append(answer[0])
        return answer

    monkeypatch.setattr(redis_bus.RedisTransport, "start", counted)
    monkeypatch.setattr(Hub, "changes", looked)
    bus = make(own, kind)
    with bus.listen("a"):
        pass
    own.kill()  # while the topic is still subscribed
    eventually(lambda: looks[-1] is False)
    assert len(starts) == 1
    own.start()
    with bus.listen("a") as listener:
        make(own, kind).emit("a", NOW)
        while listener.when != NOW:
            assert listener.wait(SECONDS)


@both
def test_cut_connection_wakes_listeners(kind: Kind, own: RedisServer) -> None:
    bus = make(own, kind)
    with bus.listen("a") as listener, redis.Redis(port=own.port) as admin:
        admin.client_kill_filter(_type="pubsub")
        expect(listener, None)
        make(own, kind).emit("a", NOW)
        expect(listener, NOW)
