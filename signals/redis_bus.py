"""The buses on Redis: publish and subscribe, with one connection for listening per bus.

Nothing is stored in Redis, and events are read only by subscriptions. Channels are exact names,
never patterns. A payload that this module did not write is skipped. No password may appear in a log
or an error. The redis package is optional, so it is imported when a bus is created.
"""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from time import monotonic
from typing import Any

from signals.api import BusError
from signals.runner import WAKE_SELF, AsyncFacade, BlockingFacade, Runner
from signals.transport import READ_TIMEOUT_S, Deliver, Procedure, TaskRuntime, ThreadRuntime

SILENCE_S = 15.0
"""After this time without a message the server is pinged; after twice this time the connection
counts as dead."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def encode(when: datetime | None, origin: str) -> str:
    """Return the payload of an event: milliseconds since 1970 in 20 digits, then the origin.

    The milliseconds are rounded down, so that no consumer checks its queue too late. For None, the
    payload is only "-". Older releases, which have no origin, can read both forms.
    """
    return "-" if when is None else f"{(when - _EPOCH) // _MILLISECOND:020d}{origin}"


def decode(data: object) -> tuple[datetime | None, str]:
    """Return the instant and the origin that ``encode`` wrote. A missing origin becomes "".

    Raises:
        ValueError: ``encode`` did not write the data.
        OverflowError: The number is not a time between the years 1 and 9999.
    """
    text = data.decode() if isinstance(data, bytes) else str(data)
    return None if text == "-" else _EPOCH + int(text[:20]) * _MILLISECOND, text[20:]


class RedisTransport:
    """Talks to Redis; see ``signals.transport.Transport``.

    Args:
        target: A URL, or a client, which this class never closes.
        prefix: The prefix of every topic.
        asynchronous: Whether to use the asyncio client of the redis package.
    """

    def __init__(self, target: object, prefix: str, *, asynchronous: bool) -> None:
        self._target, self._prefix, self._asynchronous = target, prefix + ":", asynchronous
        self._client = self._connect()
        self.place = (target if isinstance(target, str) else id(target), prefix)
        self._own = f"{self._prefix}~{uuid.uuid4().hex}"  # a channel that only this bus hears
        self._pubsub: Any = None
        self._pinged = False
        self._last = 0.0  # when the last message came, or when listening began

    def _connect(self) -> Any:
        try:
            import redis
            import redis.asyncio
            from redis.backoff import NoBackoff
        except ImportError:
            raise BusError(
                'the redis package is not installed; pip install "pyqueue-mongo[redis]"'
            ) from None
        module: Any = redis.asyncio if self._asynchronous else redis
        if isinstance(self._target, module.Redis):
            return self._target
        if not isinstance(self._target, str):
            given = type(self._target).__name__
            raise BusError(f"expected a URL or a {module.__name__}.Redis client, found {given}")
        try:
            path = self._target.partition("://")[2].partition("?")[0].partition("/")[2]
            if "@" in path and not self._target.startswith("unix:"):
                raise ValueError  # else a part of the password counts as the host, and is shown
            # The client must not retry, because the runner retries and has to learn of every break.
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
                "invalid Redis URL; use redis://[user:password@]host[:port][/db], rediss:// "
                "or unix://, and quote the user and the password with urllib.parse.quote_plus"
            ) from None

    def __str__(self) -> str:
        given = self._client.connection_pool.connection_kwargs
        return str(
            given.get("path") or f"{given.get('host', 'localhost')}:{given.get('port', 6379)}"
        )

    def explain(self, error: Exception) -> str:
        """Return the text of an error, with the password replaced."""
        secret = self._client.connection_pool.connection_kwargs.get("password")
        text = f"{type(error).__name__}: {error}"
        return text.replace(str(secret), "***") if secret else text

    def _channel(self, topic: str) -> str:
        return self._own if topic == WAKE_SELF else self._prefix + topic

    def publish(self, events: dict[str, datetime | None], origin: str) -> Procedure[None]:
        """Send these events, in one round trip."""
        pipe = self._client.pipeline(transaction=False)
        for topic, when in events.items():
            pipe.publish(self._channel(topic), encode(when, origin))
        yield pipe.execute()

    def start(self) -> Procedure[bool]:
        """Connect for listening."""
        self._pubsub = self._client.pubsub()
        self._last, self._pinged = monotonic(), False
        yield self._pubsub.subscribe(self._own)
        return False

    def subscribe(self, add: list[str], drop: list[str]) -> Procedure[None]:
        """Subscribe to the topics in ``add``, and unsubscribe from the topics in ``drop``."""
        if add:
            yield self._pubsub.subscribe(*map(self._channel, add))
        if drop:
            yield self._pubsub.unsubscribe(*map(self._channel, drop))

    def read(self, deliver: Deliver, confirm: Callable[[str], None]) -> Procedure[None]:
        """Wait up to READ_TIMEOUT_S for one message, and pass it on."""
        message = yield self._pubsub.get_message(timeout=READ_TIMEOUT_S)
        now = monotonic()
        if message is None:
            if now - self._last > 2 * SILENCE_S:
                raise ConnectionError("the server does not respond")
            if now - self._last > SILENCE_S and not self._pinged:
                self._pinged = True
                yield self._pubsub.ping()
            return
        self._last, self._pinged = now, False
        channel = message["channel"]
        if isinstance(channel, bytes):
            channel = channel.decode(errors="replace")
        if not channel or not channel.startswith(self._prefix) or channel == self._own:
            return
        topic = channel.removeprefix(self._prefix)
        if message["type"] == "subscribe":
            confirm(topic)  # called again if the client library has reconnected by itself
        elif message["type"] == "message":
            try:
                when, origin = decode(message["data"])
            except (ValueError, OverflowError):
                return
            deliver(topic, when, origin)

    def stop(self) -> Procedure[None]:
        """Close the connection for listening."""
        pubsub, self._pubsub = self._pubsub, None
        if pubsub is not None:
            yield pubsub.aclose() if self._asynchronous else pubsub.close()

    def check(self) -> Procedure[None]:
        """Publish one event on a channel that only this bus uses, and receive the event."""
        pubsub = self._client.pubsub()
        try:
            yield pubsub.subscribe(self._own)
            yield self._client.publish(self._own, "-")
            for _ in ("the confirmation", "the event"):
                if (yield pubsub.get_message(timeout=5.0)) is None:
                    raise BusError("Redis does not answer; check the server and its address")
        finally:
            yield pubsub.aclose() if self._asynchronous else pubsub.close()

    def close(self) -> Procedure[None]:
        """Close the client, unless it was passed in."""
        if self._client is not self._target:
            yield self._client.aclose() if self._asynchronous else self._client.close()


class RedisBus(BlockingFacade):
    """Wakes listeners of every process that uses the same Redis.

    Args:
        target: A URL (redis://, rediss://, unix://), or a ``redis.Redis``, which stays open.
        prefix: The prefix of every topic, as in "prefix:topic". Redis has the same channels in all
            of its numbered databases, so only the prefix separates buses.
        window: The length of the time window in which events of one topic are merged, in seconds.

    Raises:
        BusError: The target is neither a valid URL nor a client, or the redis package is missing.
    """

    def __init__(self, target: object, *, prefix: str = "pyqueue", window: float = 0.05) -> None:
        connect = partial(RedisTransport, target, prefix, asynchronous=False)
        super().__init__(Runner("RedisBus", connect, window, ThreadRuntime))


class AsyncRedisBus(AsyncFacade):
    """``RedisBus`` for asyncio: ``target`` is a URL or a ``redis.asyncio.Redis``."""

    def __init__(self, target: object, *, prefix: str = "pyqueue", window: float = 0.05) -> None:
        connect = partial(RedisTransport, target, prefix, asynchronous=True)
        super().__init__(Runner("AsyncRedisBus", connect, window, TaskRuntime))
