"""Traces and metrics for OpenTelemetry: hooks that follow its conventions for messaging.

No other module imports ``opentelemetry``. Two headers of each message carry the trace context of
its push, in the form of W3C Trace Context. Nothing here waits for a server, except
``record_queues``.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, overload

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, MeterProvider
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    NoOpTracerProvider,
    ProxyTracerProvider,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    Tracer,
    TracerProvider,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pyqueue import arguments
from pyqueue.backends import all_queues
from pyqueue.backends.namespace import STREAM
from pyqueue.backends.streams import consumers
from pyqueue.delivery import Delivery
from pyqueue.errors import ConfigurationError, LeaseLost
from pyqueue.hooks import Hooks, Pushing, Uncommitted
from pyqueue.messages import Id, Message, Reservation, StreamReservation
from pyqueue.requests import MonotonicTime, Plan, ServerTime
from pyqueue.runtime.connecting import AsyncConnection, Connected, Connection, runner_of
from pyqueue.telemetry.counting import parted
from pyqueue.telemetry.figures import BOUNDS_S
from pyqueue.telemetry.prometheus import CAP, COUNTING_S, GROUP_STATES, MAX_QUEUES, states_of

Attributes = dict[str, str | int]

#: The name under which spans and metrics are made, and the value of ``messaging.system``.
_SYSTEM: Final = "pyqueue"
#: The headers of a message that have the context of its push.
_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
#: The types of operations, keyed by name. All other operations settle messages.
_TYPES: Final = {"push": "send", "receive": "receive", "process": "process"}
_SETTLE: Final = "settle"
#: Attributes of spans only. Metrics lack them, because there are too many ids.
_ID: Final = "messaging.message.id"
_COUNT: Final = "messaging.batch.message_count"
_ERROR: Final = "error.type"
#: The maximum number of pushes that a span links. Exporters drop further links by default.
_MAX_LINKS: Final = 128
#: The bounds of histograms that the conventions ask for, in seconds.
_CONVENTION_S: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
#: How many queues are counted by one command.
_PORTION: Final = 50

_W3C: Final = TraceContextTextMapPropagator()


class _Push:
    """A push that has begun. ``span`` is None if there is no provider of traces."""

    __slots__ = ("began", "number", "queue", "span")

    def __init__(self, queue: str, number: int, span: Span | None) -> None:
        self.queue, self.number, self.span = queue, number, span
        self.began = time.perf_counter()

    def end(self, ids: Sequence[Id | None] = (), error: BaseException | None = None) -> None:
        """End the span, unless it has already ended."""
        span, self.span = self.span, None
        if span is not None:
            if len(ids) == 1 and ids[0] is not None:
                span.set_attribute(_ID, str(ids[0]))
            _fail(span, error)
            span.end()


#: The push of this thread or task that has not been reported yet.
_begun: Final[ContextVar[_Push | None]] = ContextVar("pyqueue_push", default=None)


class OpenTelemetry(Hooks):
    """Hooks that give traces and metrics to OpenTelemetry.

    One object may serve any number of clients: ``Client(url, hooks=[OpenTelemetry()])``.

    Args:
        tracer_provider: Makes the spans. None means the provider of the process, as soon as it has
            one. Until then there are no spans, and messages get no headers.
        meter_provider: Makes the metrics. None means the provider of the process.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._provider = tracer_provider
        self._known: tuple[TracerProvider, Tracer] | None = None
        #: The queues whose messages were recorded, and their states.
        self._recorded: dict[str, tuple[str, ...]] = {}
        meter = metrics.get_meter(_SYSTEM, meter_provider=meter_provider)

        def histogram(name: str, about: str, bounds_s: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                name, "s", about, explicit_bucket_boundaries_advisory=bounds_s
            )

        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages that were pushed."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages that were received."
        )
        self._operations = histogram(
            "messaging.client.operation.duration", "Time of a push or a receive.", _CONVENTION_S
        )
        self._processing = histogram(
            "messaging.process.duration", "Time of a call of a handler.", _CONVENTION_S
        )
        self._waits = histogram(
            "pyqueue.message.wait", "Time from eligible until received.", BOUNDS_S
        )
        self._ends = histogram(
            "pyqueue.message.end_to_end", "Time from the first push until finished.", BOUNDS_S
        )
        self._messages = meter.create_gauge(
            "pyqueue.queue.messages", "{message}", f"Messages by state, up to {CAP}."
        )
        self._ages = meter.create_gauge(
            "pyqueue.queue.oldest_age", "s", "For how long the oldest message has waited."
        )

    def _tracer(self) -> Tracer | None:
        """Return the tracer, or None if there is no provider, so that nothing is traced."""
        provider = self._provider or trace.get_tracer_provider()
        if isinstance(provider, (NoOpTracerProvider, ProxyTracerProvider)):
            return None
        if self._known is None or self._known[0] is not provider:
            self._known = provider, provider.get_tracer(_SYSTEM)
        return self._known[1]

    # ---- hooks

    def pushing(self, queue: str, items: Sequence[Pushing]) -> None:
        """Begin the span of a push, and give its context to the messages."""
        if (former := _begun.get()) is not None:  # its transaction has not ended, or was aborted
            former.end()
        span = None
        if (tracer := self._tracer()) is not None:
            links = _links(each.headers for each in items)  # contexts that the program gave
            about = _about(queue, "push") | _about_messages([None] * len(items))
            name = _named("push", queue)
            span = tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=about, links=links)
            _carry(span, items)
        _begun.set(_Push(queue, len(items), span))

    def pushed(self, queue: str, ids: Sequence[Id | None], error: BaseException | None) -> None:
        """End the span of a push, and count its messages."""
        error = None if isinstance(error, Uncommitted) else error
        about = _about(queue, "push") | _about_error(error)
        number, push = len(ids), _begun.get()
        if push is not None and push.queue == queue:  # not the outputs of ``Many``
            _begun.set(None)
            number = push.number
            self._operations.record(time.perf_counter() - push.began, about)
            push.end(ids, error)
        if number and not isinstance(error, ValueError):  # refused messages were not sent
            self._sent.add(number, about)

    def received(self, queue: str, messages: Sequence[Message[Any]], waited: float) -> None:
        """Count received messages, and how long they waited."""
        about = _about(queue, "receive")
        self._consumed.add(len(messages), about)
        self._operations.record(waited, about)
        place, now = _place(queue), datetime.now(UTC)
        for each in messages:
            if isinstance(each, Reservation):
                _record(self._waits, each.when, each.reserved, place)
            else:
                _record(self._waits, each.when, now, place)
                _record(self._ends, each.pushed, now, place)

    @contextmanager
    def handling(self, deliveries: Sequence[Delivery[Any]]) -> Iterator[None]:
        """Trace and time a call of a handler. Its span is the current one in the handler."""
        messages = [each.message for each in deliveries]
        about = _about(_queue_of(messages[0]), "process")
        began = time.perf_counter()
        try:
            with self._process_span(messages, about) as span:
                try:
                    yield
                except BaseException as error:
                    about |= _about_error(error)
                    span.set_attribute(_ERROR, about[_ERROR])
                    raise
        finally:
            self._processing.record(time.perf_counter() - began, about)

    def _process_span(
        self, messages: Sequence[Reservation[Any]], about: Attributes
    ) -> AbstractContextManager[Span]:
        if (tracer := self._tracer()) is None:
            return nullcontext(trace.INVALID_SPAN)
        parent, links = _origin(messages)
        return tracer.start_as_current_span(
            _named("process", _queue_of(messages[0])),
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=about | _about_messages([each.id for each in messages]),
            links=links,
        )

    def settled(
        self,
        queue: str,
        verb: str,
        reservations: Sequence[Message[Any]],
        error: BaseException | None,
        to: str | None,
    ) -> None:
        """Trace a settlement. For finished messages, also record the time since the first push."""
        if verb == "lost":  # a renewal found it, and no operation was tried
            return
        error = None if isinstance(error, Uncommitted) else error
        if (tracer := self._tracer()) is not None:
            parent, links = _origin(reservations)
            about = _about(queue, verb) | _about_messages([each.id for each in reservations])
            if to is not None:
                about["messaging.pyqueue.target"] = to
            span = tracer.start_span(
                _named(verb, queue), parent, SpanKind.CLIENT, attributes=about, links=links
            )
            _fail(span, error)
            span.end()
        if verb == "commit" and (error is None or isinstance(error, LeaseLost)):
            done = reservations if error is None else parted(reservations, error)[0]
            place, now = _place(queue), datetime.now(UTC)
            for each in done:
                _record(self._ends, each.pushed, now, place)

    # ---- queues

    @overload
    def record_queues(self, client: Connected[Connection]) -> None: ...
    @overload
    def record_queues(self, client: Connected[AsyncConnection]) -> Awaitable[None]: ...
    def record_queues(self, client: Connected[Any]) -> Awaitable[None] | None:
        """Record how many messages each queue has, and the age of its oldest message.

        Call it in one process, about as often as metrics are exported. It counts up to 500
        queues and up to 10 001 messages in each state, and stops after about 5 s. With an
        AsyncClient, await it.

        Args:
            client: A Client or an AsyncClient.

        Raises:
            Unavailable: The server did not answer.
        """
        done: Awaitable[None] | None = runner_of(client).run(self._recording())
        return done

    def _recording(self) -> Plan[None]:
        names = (yield from all_queues.names())[:MAX_QUEUES]
        now, began = (yield from ServerTime()), (yield from MonotonicTime())
        before, self._recorded = self._recorded, {}
        for start in range(0, len(names), _PORTION):
            if (yield from MonotonicTime()) - began > COUNTING_S:
                self._recorded = {**before, **self._recorded}
                return
            portion = names[start : start + _PORTION]
            for info in (yield from all_queues.queues(CAP, held=True, only=portion)):
                self._record(info.name, states_of(info))
                if info.kind != STREAM:
                    age = now - (info.oldest or now)
                    self._ages.set(max(0.0, age.total_seconds()), _place(info.name))
                    continue
                for group in (yield from consumers.groups(info.name)):
                    counts = {state: getattr(group.counts, state) for state in GROUP_STATES}
                    self._record(f"{info.name}~{group.name}", counts)
        for name in before.keys() - self._recorded.keys():  # deleted since the last call
            self._record(name, dict.fromkeys(before[name], 0))
            if "ready" in before[name] and "~" not in name:
                self._ages.set(0.0, _place(name))
            del self._recorded[name]

    def _record(self, queue: str, counts: Mapping[str, int]) -> None:
        """Record how many messages a queue has in each state. A gauge keeps its last value."""
        self._recorded[queue] = tuple(counts)
        for state, number in counts.items():
            self._messages.set(number, _place(queue) | {"state": state})


# ---- attributes


def _place(queue: str) -> Attributes:
    """Return the attributes that name a queue, or a stream and its consumer group."""
    name, _, group = queue.partition("~")
    found: Attributes = {"messaging.system": _SYSTEM, "messaging.destination.name": name}
    if group:
        found["messaging.consumer.group.name"] = group
    return found


def _about(queue: str, operation: str) -> Attributes:
    """Return the attributes of an operation, for its span and for metrics."""
    kind = _TYPES.get(operation, _SETTLE)
    return _place(queue) | {
        "messaging.operation.name": operation,
        "messaging.operation.type": kind,
    }


def _about_messages(ids: Sequence[Id | None]) -> Attributes:
    """Return the attributes that describe the messages of a span. An unknown id is None."""
    if len(ids) != 1:
        return {_COUNT: len(ids)}
    return {} if ids[0] is None else {_ID: str(ids[0])}


def _about_error(error: BaseException | None) -> Attributes:
    return {} if error is None else {_ERROR: type(error).__name__}


def _named(operation: str, queue: str) -> str:
    """Return the name of a span."""
    return f"{operation} {queue.partition('~')[0]}"


def _queue_of(message: Message[Any]) -> str:
    """Return the name under which hooks know the queue, or the consumer group, of a message."""
    if isinstance(message, StreamReservation):
        return f"{message.queue}~{message.group}"
    return message.queue


def _fail(span: Span, error: BaseException | None) -> None:
    """Give a span the error with which its operation ended."""
    if error is not None:
        span.set_attribute(_ERROR, type(error).__name__)
        span.set_status(StatusCode.ERROR, str(error))


def _record(histogram: Histogram, start: datetime, end: datetime, about: Attributes) -> None:
    """Record the time between two instants, or 0 if it is negative, because clocks differ."""
    histogram.record(max(0.0, (end - start).total_seconds()), about)


# ---- contexts


def _carry(span: Span, items: Sequence[Pushing]) -> None:
    """Give the context of a span to messages that have none, if their headers have room for it."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    for each in items:
        if _PARENT not in each.headers and _fit({**each.headers, **carrier}):
            each.headers.update(carrier)


def _fit(headers: Mapping[str, Any]) -> bool:
    """Return whether a message may have these headers. Tracing must not make a push fail."""
    try:
        arguments.headers(headers)
    except ConfigurationError:
        return False
    return True


def _origin(messages: Sequence[Message[Any]]) -> tuple[Context | None, list[Link]]:
    """Return the parent and the links of a span about received messages.

    The parent of a span about one message is the push of that message. A span about several
    messages has links to their pushes instead.
    """
    links = _links(each.headers for each in messages)
    if len(messages) == 1 and links:
        return trace.set_span_in_context(NonRecordingSpan(links[0].context)), []
    return None, links


def _links(headers: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Return a link to each context in the headers. Messages of one push share a context."""
    found: dict[tuple[Any, Any], Link] = {}
    for each in headers:
        key = each.get(_PARENT), each.get(_STATE)
        if key in found or len(found) >= _MAX_LINKS:
            continue
        if (context := _context(*key)) is not None:
            found[key] = Link(context)
    return list(found.values())


def _context(parent: object, state: object) -> SpanContext | None:
    """Return the trace context in two headers, or None if they have no valid context."""
    if not isinstance(parent, str):
        return None
    carrier = {_PARENT: parent} | ({_STATE: state} if isinstance(state, str) else {})
    span = trace.get_current_span(_W3C.extract(carrier, Context()))
    context = span.get_span_context()
    return context if context.is_valid else None
