"""Describe a run for people: its stages, with the options of their queues, and its messages."""

from __future__ import annotations

from typing import Any, Final

from pyqueue.pipeline.engine import Run
from pyqueue.pipeline.graph import Graph, Stage
from pyqueue.queue_base import backend_of

#: The maximum number of messages in progress that a description names.
_MAX_NAMED: Final = 20


def described(graph: Graph, run: Run | None) -> dict[str, Any]:
    """Return a graph's stages, and its run's counters and messages, as BSON values.

    Args:
        graph: The stages, and how they are connected.
        run: The run, or None if it has not begun.
    """
    messages = [] if run is None else [each for call in run.in_flight for each in call.messages]
    return {
        "stages": [_stage(each) for each in graph.stages.values()],
        "counters": {} if run is None else _listed(run.counters),
        "in_progress": [
            {"q": each.queue, "id": each.id, "since": each.reserved}
            for each in messages[:_MAX_NAMED]
        ],
        "messages": len(messages),
    }


def _listed(counters: dict[str, dict[str, int]]) -> list[dict[str, Any]]:
    """Return the counters as a list, because a queue name with dots cannot be a field name."""
    return [{"q": queue, **numbers} for queue, numbers in counters.items()]


def _stage(stage: Stage) -> dict[str, Any]:
    """Return a stage and the options of its queue."""
    plans = backend_of(stage.queue)
    options = plans.options
    described: dict[str, Any] = {
        "q": stage.name,
        "kind": stage.kind,
        "to": list(stage.to),
        "handler": stage.label,
        "queue_kind": plans.kind_name,
        "concurrency": stage.concurrency,
        "batch": stage.batch,
        **options.listed(),
        **options.shape,
    }
    if stage.spark is not None:
        described |= {"group": stage.spark.group, "members": stage.spark.batches["members"]}
    return described
