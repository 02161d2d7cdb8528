"""Run a Spark stage: one batch after the other, each in a thread.

``pyqueue.spark.batches`` does the work. It is imported when the stage starts, because a pipeline
without a Spark stage must run without PySpark.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import anyio

from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import ConfigurationError, QueueClosed
from pyqueue.messages import Backoff
from pyqueue.pipeline.graph import Stage
from pyqueue.runtime.connecting import Connection
from pyqueue.runtime.retrying import RetryDelays
from pyqueue.runtime.thread_pool import DaemonThreadPool

if TYPE_CHECKING:
    from pyqueue.spark.batches import Batches
    from pyqueue.spark.outputs import Report

log = logging.getLogger("pyqueue")

#: The seconds between two scans of an empty queue.
_IDLE: Final = Backoff(base=0.02, maximum=0.5, jitter=0)
#: The seconds to wait after a batch failed.
_FAILED_BATCH_DELAY_S: Final = 5.0
#: The longest time for which the end of a run waits for the release of the group, in seconds.
_RELEASE_S: Final = 2.0


async def run_batches(
    stage: Stage, batches: Batches, threads: DaemonThreadPool, count: Callable[[str, int], None]
) -> None:
    """Transform batch after batch until the caller is cancelled.

    A batch that has begun is finished even if the caller is cancelled. While other processes do
    the work of the consumer group, this stage stands by.

    Args:
        stage: A Spark stage.
        batches: The result of ``batches_of`` for the stage.
        threads: The threads that run the batches.
        count: Takes the name of a counter, and the number to add to it.

    Raises:
        ConfigurationError: The result of the transform cannot be used.
        QueueClosed: The client was closed.
    """
    idle = RetryDelays(_IDLE)
    try:
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    report, delay_s = await threads.run(batches.step, _session)
            except (ConfigurationError, QueueClosed):
                raise
            except Exception as error:
                delay_s = _FAILED_BATCH_DELAY_S
                text = "queue %r: a batch failed, trying again in %g s: %s"
                log.warning(text, stage.name, delay_s, error)
            else:
                if report is not None:
                    _count(report, count)
                    if report.claimed:
                        idle.reset()
                    delay_s = next(idle)
            await anyio.sleep(delay_s)
    finally:
        with anyio.move_on_after(_RELEASE_S, shield=True):
            await threads.run(batches.release)


def batches_of(
    stage: Stage, source: QueuePlans, targets: Sequence[QueuePlans], connection: Connection
) -> Batches:
    """Return the object that processes the batches of a Spark stage.

    Args:
        stage: A Spark stage.
        source: The queue that the stage reads.
        targets: The queues that the stage writes.
        connection: The connection to the database of these queues.

    Raises:
        ConfigurationError: PySpark is not installed, or the stage cannot run.
    """
    try:
        from pyqueue.spark.batches import Batches
        from pyqueue.spark.outputs import Route
    except ImportError as error:
        raise ConfigurationError(
            f"spark: the stage of queue {stage.name!r} needs PySpark; "
            'pip install "pyqueue-mongo[spark]"'
        ) from error
    assert stage.spark is not None
    route = Route(source, targets, stage.spark.by_column)
    return Batches(connection, route, stage.spark.group, stage.handler, **stage.spark.batches)


def _session() -> Any:
    from pyqueue.spark.session import session

    return session("pyqueue")


def _count(report: Report, count: Callable[[str, int], None]) -> None:
    count("in", report.claimed)
    count("dropped", report.dropped)
    count("retried", report.failed)
    count("lost", report.lost)
    count("out", report.claimed - report.dropped - report.failed - report.lost)
