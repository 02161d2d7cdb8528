"""The buses on Redis: publish and subscribe, one connection for listening per bus.

Nothing is stored in Redis and nothing is read from it but what others publish. Channels are exact names, never
patterns. Whatever a channel carries is taken with suspicion: what is not one of our payloads is passed over. No
password may reach any text. The redis package is imported on making a bus, since it is optional.
"""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

from signals.api import BusError
from signals.ears import Steps
from signals.engine import NUDGE, ServedCore
from signals.fronts import AsyncFront, BlockingFront

SILENCE = 15.0
"""Seconds without a word after which the server is asked for one; after as many again the connection counts as dead."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def encode(when: datetime | None) -> str:
    """Write an event's instant: milliseconds since 1970, rounded down so that nobody looks late; "-" for None."""
    return "-" if when is None else str((when - _EPOCH) // _MILLISECOND)


def decode(data: Any) -> datetime | None:
    """Read what `encode` wrote. Raises ValueError or OverflowError for anything else."""
    text = data.decode() if isinstance(data, bytes) else str(data)
    return None if text == "-" else _EPOCH + int(text[:20]) * _MILLISECOND


class RedisWire:
    """What Redis is told: see `signals.engine.Wire`."""

    hears_all = False

    def __init__(self, target: Any, prefix: str, *, asynchronous: bool) -> None:
        self._target, self._prefix, self._asynchronous = target, prefix + ":", asynchronous
        self._client = self._connect()
        self._own = f"{self._prefix}~{uuid.uuid4().hex}"  # a channel that only this bus hears
        self._pubsub: Any = None
        self._asked = False
        self._last = 0.0

    def _connect(self) -> Any:
        try:
            import redis
            import redis.asyncio
            from redis.backoff import NoBackoff
        except ImportError:
            raise BusError(
                'this bus needs the redis package: pip install "pyqueue-mongo[redis]"'
            ) from None
        module: Any = redis.asyncio if self._asynchronous else redis
        if isinstance(self._target, module.Redis):
            return self._target
        if not isinstance(self._target, str):
            raise BusError(
                f"a URL or a {module.__name__}.Redis client is needed, not {type(self._target).__name__}"
            )
        try:
            # No retries inside the client: the engine holds off by itself, and has to know of every break.
            options = {
                "socket_connect_timeout": 2,
                "socket_timeout": 5,
                "retry": module.retry.Retry(NoBackoff(), 0),
            }
            if not self._target.startswith("unix:"):
                options["socket_keepalive"] = True
            return module.Redis.from_url(self._target, **options)
        except Exception:
            raise BusError(
                "not a Redis URL: redis://[user:password@]host[:port][/db], rediss:// or unix://"
            ) from None

    def __str__(self) -> str:
        given = self._client.connection_pool.connection_kwargs
        return str(
            given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
        )

    def explain(self, error: Exception) -> str:
        """Describe an error without the password."""
        secret = self._client.connection_pool.connection_kwargs.get("password")
        text = f"{type(error).__name__}: {error}"
        return text.replace(str(secret), "***") if secret else text

    def _channel(self, topic: str) -> str:
        return self._own if topic == NUDGE else self._prefix + topic

    def publish(self, events: dict[str, datetime | None]) -> Steps[None]:
        """Send these events, in one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for topic, when in events.items():
            pipe.publish(self._channel(topic), encode(when))
        yield pipe.execute()

    def start(self) -> Steps[None]:
        """Connect for listening."""
        self._pubsub = self._client.pubsub()
        self._last, self._asked = monotonic(), False
        yield self._pubsub.subscribe(self._own)

    def change(self, add: list[str], drop: list[str]) -> Steps[None]:
        """Subscribe and unsubscribe; the server's confirmations come by `read`."""
        if add:
            yield self._pubsub.subscribe(*map(self._channel, add))
        if drop:
            yield self._pubsub.unsubscribe(*map(self._channel, drop))

    def read(
        self, hear: Callable[[str, datetime | None], None], confirm: Callable[[str], None]
    ) -> Steps[None]:
        """Wait up to a second for one message."""
        message = yield self._pubsub.get_message(timeout=1.0)
        now = monotonic()
        if message is None:
            if now - self._last > 2 * SILENCE:
                raise ConnectionError("the server is silent")
            if now - self._last > SILENCE and not self._asked:
                self._asked = True
                yield self._pubsub.ping()
            return
        self._last, self._asked = now, False
        channel = message["channel"]
        if isinstance(channel, bytes):
            channel = channel.decode(errors="replace")
        if not channel or not channel.startswith(self._prefix) or channel == self._own:
            return
        topic = channel.removeprefix(self._prefix)
        if message["type"] == "subscribe":
            confirm(topic)  # again after the client library reconnected by itself
        elif message["type"] == "message":
            try:
                when = decode(message["data"])
            except (ValueError, OverflowError):
                return
            hear(topic, when)

    def stop(self) -> Steps[None]:
        """Give the connection up."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            yield pubsub.aclose() if self._asynchronous else pubsub.close()

    def check(self) -> Steps[None]:
        """Publish and subscribe once, on the bus's own channel."""
        yield self._client.publish(self._own, "-")
        pubsub = self._client.pubsub()
        try:
            yield pubsub.subscribe(self._own)
            if (yield pubsub.get_message(timeout=5.0)) is None:
                raise BusError("Redis does not answer")
        finally:
            yield pubsub.aclose() if self._asynchronous else pubsub.close()

    def close(self) -> Steps[None]:
        """Close the client, if it is ours."""
        if self._client is not self._target:
            yield self._client.aclose() if self._asynchronous else self._client.close()

    def after_fork(self) -> None:
        """Leave the parent's connections alone."""
        self._pubsub = None
        self._client = self._connect()


class RedisBus(BlockingFront):
    """Wakes listeners of every process that uses the same Redis.

    `target`: a URL (redis://, rediss://, unix://) or a redis.Redis, which stays yours to close. `prefix`: goes before
    every topic, as "prefix:topic"; Redis's pub/sub knows no database numbers, so the prefix alone keeps users apart.
    `window`: seconds in which events of a topic are merged. Raises BusError for anything else.
    """

    def __init__(self, target: Any, *, prefix: str = "pyqueue", window: float = 0.05) -> None:
        wire = RedisWire(target, prefix, asynchronous=False)
        name = f"RedisBus({wire})"
        super().__init__(name, ServedCore(name, wire, window, asynchronous=False))


class AsyncRedisBus(AsyncFront):
    """`RedisBus`, for asyncio: `target` is a URL or a redis.asyncio.Redis."""

    def __init__(self, target: Any, *, prefix: str = "pyqueue", window: float = 0.05) -> None:
        wire = RedisWire(target, prefix, asynchronous=True)
        name = f"AsyncRedisBus({wire})"
        super().__init__(name, ServedCore(name, wire, window, asynchronous=True))
