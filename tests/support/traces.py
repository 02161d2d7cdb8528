"""What a program gives to OpenTelemetry, kept in memory."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pyqueue.telemetry.otel import OpenTelemetry


class Seen:
    """Hooks, and the spans and metrics that they make."""

    def __init__(self) -> None:
        self._spans = InMemorySpanExporter()
        self._reader = InMemoryMetricReader()
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        meters = MeterProvider([self._reader], shutdown_on_exit=False)
        self.hooks = OpenTelemetry(self.tracers, meters)

    def take(self, *operations: str) -> list[ReadableSpan]:
        """Return the ended spans of these operations, or of all, and forget everything."""
        found = self._spans.get_finished_spans()
        self._spans.clear()
        return [each for each in found if not operations or each.name.split()[0] in operations]

    def points(self) -> dict[str, list[Any]]:
        """Return the values of each metric."""
        data = self._reader.get_metrics_data()
        return {
            metric.name: list(metric.data.data_points)
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
