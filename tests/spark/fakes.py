"""Stages without Spark, and faults at a chosen command.

``Frame`` stands in for a DataFrame where a transform needs no session. ``meddled`` counts the
commands of a client, so a test can make something happen before each of them in turn: the process
dies, or another consumer takes a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from threading import Thread
from typing import Any, NoReturn
from uuid import uuid4

import pyarrow as pa
import pytest
from pymongo.client_session import ClientSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pyqueue import Backoff, Client, Message, Queue
from pyqueue.backends.contents import contents_of
from pyqueue.backends.kind import lookup
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import Connected, Connection, runner_of
from pyqueue.spark import batches, frames, models, sinks
from pyqueue.spark.batches import Batches
from pyqueue.spark.columns import columns
from pyqueue.spark.outputs import Report, Route
from tests.spark.processes import SLOW_S
from tests.support.eventually import eventually, waiters

OUTPUTS = ("move", "transaction")
outputs = pytest.mark.parametrize("output", OUTPUTS)


class Crash(BaseException):
    """The process ends here. Nothing handles this exception."""


class Frame:
    """The rows of a DataFrame."""

    def __init__(self, table: pa.Table, schema: StructType) -> None:
        self.table = table
        self.schema = schema

    def toArrow(self) -> pa.Table:  # noqa: N802
        """Return the table, as a DataFrame does."""
        return self.table

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows."""
        return list(self.table.to_pylist())

    def made_of(self, rows: Sequence[dict[str, Any]], *names: str) -> Frame:
        """Return a frame with other rows. It has the columns of these names, or else all."""
        schema = StructType([self.schema[name] for name in names]) if names else self.schema
        arrow = to_arrow_schema(schema, timezone="UTC")
        return Frame(
            pa.Table.from_pylist(
                [{name: row[name] for name in arrow.names} for row in rows], arrow
            ),
            schema,
        )


def passed(frame: Frame) -> Frame:
    """Return the rows unchanged."""
    return frame.made_of(frame.rows(), "id", "payload")


def numbers(frame: Frame) -> list[Any]:
    """Return the payloads."""
    return [json.loads(row["payload"]) for row in frame.rows()]


def counts(report: Report) -> tuple[int, ...]:
    """Return how many messages were claimed, written, dropped, failed and lost."""
    return report.claimed, report.written, report.dropped, report.failed, report.lost


def fake_frame(spark: Any, documents: Any, model: Any) -> Frame:
    """Stand in for the function that makes a DataFrame."""
    payload = models.payload_type(model)
    return Frame(pa.Table.from_batches([frames.batch(documents, payload)]), columns(payload))


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stages pass Frames to their transforms."""
    for module in (batches, sinks):
        monkeypatch.setattr(module, "frame", fake_frame)


def no_session() -> Any:
    """Stand in for the function that returns a session."""


class Flow:
    """Two new queues in the shared database, and stages between them."""

    def __init__(self, client: Client, **kind: Any) -> None:
        """Make the queues. ``kind``: the options of both that name their kind."""
        self.client, self._kind = client, kind
        name = uuid4().hex[:12]
        self.source, self.target = f"{name}-raw", f"{name}-clean"
        self.raw: Queue[Any] = client.queue(
            self.source, lease=600, backoff=Backoff(base=0), **self._kind
        )
        self.clean: Queue[Any] = client.queue(self.target, **self._kind)
        self._stages: list[Batches] = []

    def release(self) -> None:
        """End the runners' leases of the stages, so that nothing renews them after the test."""
        for stage in self._stages:
            stage.release()

    def stage(
        self,
        transform: Any = None,
        *,
        output: str = "move",
        most: int = 5000,
        members: int = 1,
        owner: str | None = None,
        to: Sequence[str] | None = None,
        **options: Any,
    ) -> Batches:
        """Return the batches of a stage. By default rolled-back messages are ready at once.

        Args:
            transform: The transform.
            output: "move" or "transaction".
            most: The largest size of a batch.
            members: How many processes share the work.
            owner: The label of the process. None: the label that all tests share, so the stage
                follows earlier stages without waiting.
            to: The targets among which the column ``queue`` chooses. None: the one target. Empty:
                there is none.
            options: Options of the source.
        """
        defaults: dict[str, Any] = {
            "lease": 600,
            "max_tries": 5,
            "backoff": Backoff(base=0),
        } | self._kind
        queue: Queue[Any] = self.client.queue(self.source, **(defaults | options))
        backend = backend_of(queue)
        if owner is not None:
            backend.terms = replace(backend.terms, owner=partial(str, owner))
        targets = [self.target] if to is None else to
        written = [backend_of(self.client.queue(name, **self._kind)) for name in targets]
        stage = Batches(
            runner_of(self.client),
            Route(backend, written, by_column=bool(to)),
            "g",
            transform,
            output=output,
            max_messages=most,
            members=members,
        )
        self._stages.append(stage)
        return stage

    def lapse(self) -> None:
        """Let time pass until the lease of every runner has ended."""
        tag = f"^~claim:{self.source}~"
        past = datetime.now(UTC) - timedelta(seconds=60)
        self.client.database["pyqueue"].update_many(
            {"_id": {"$regex": tag}}, {"$set": {"until": past}}
        )

    def rest_stages(self) -> None:
        """Let time pass in which no query writes into the target."""
        past = datetime.now(UTC) - timedelta(seconds=60)
        self.client.database["pyqueue"].update_many(
            {"_id": {"$regex": f"^~stage:{self.target}~"}}, {"$set": {"processed": past}}
        )

    def work(self, transform: Any = None, **options: Any) -> list[Report]:
        """Run a stage until nothing is ready; return its reports."""
        stage = self.stage(transform, **options)
        reports: list[Report] = []
        for _ in range(50):
            report = stage.run_once(no_session)
            if not report.claimed:
                self.release()
                return reports
            reports.append(report)
        raise AssertionError("the stage does not come to an end")

    def stored(self, queue: str, **match: Any) -> list[dict[str, Any]]:
        """Return the documents of the messages of a queue, in any state."""
        return list(
            self.client.database["pyqueue"].find(
                {"q": queue, "record": {"$exists": False}, **match}
            )
        )

    def messages(self, queue: str) -> dict[Any, Message[Any]]:
        """Return the messages of a queue by payload, also those that are scheduled."""
        found = [self.client.queue(queue).get(each["_id"]) for each in self.stored(queue)]
        return {each.payload: each for each in found if isinstance(each, Message)}

    def staged(self) -> int:
        """Return the number of staged messages of the target."""
        match = {"q": {"$regex": f"^~staged:{self.target}"}}
        count: int = self.client.database["pyqueue"].count_documents(match)
        return count

    def steal(self, *payloads: Any) -> None:
        """Let another consumer take messages of the source out of their claims, all at once."""
        match = {"q": self.source, "payload": {"$in": payloads}}
        taken = {"$set": {"token": "thief"}, "$unset": {"claim": ""}}
        stored = self.client.database["pyqueue"]
        # Otherwise the stage might read them between two updates, and miss only some of them.
        done = self.client.run_transaction(
            lambda session: stored.update_many(match, taken, session=session)
        )
        assert done.matched_count == len(payloads)

    def _payloads(self, queue: str) -> list[Any]:
        kind: Any = self._kind.get("kind", "standard")
        messages = contents_of(lookup(kind)).messages
        return sorted(one["payload"] for each in self.stored(queue) for one in messages(each))

    def left(self) -> list[Any]:
        """Return the payloads in the source."""
        return self._payloads(self.source)

    def written(self) -> list[Any]:
        """Return the payloads in the target."""
        return self._payloads(self.target)

    def buried(self) -> dict[Any, Message[Any]]:
        """Return the buried messages, by payload."""
        return {each.payload: each for each in self.client.queue(f"{self.source}.dead").peek(1000)}

    def check_released(self, count: int) -> None:
        """Check that nothing was written, and that all messages are back in the source, untried."""
        found = [(each.state, each.tries) for each in self.raw.peek(100)], self.written()
        assert found == ([("ready", 0)] * count, []), found
        assert not self.held()

    def check_moved(self, payloads: Iterable[Any], text: str = "") -> None:
        """Check that the target has these payloads, and that nothing is left or held."""
        found = self.written(), self.left(), self.held()
        assert found == ([*payloads], [], False), f"{text}: {found}"

    def held(self) -> bool:
        """Return whether a message has a token or a claim."""
        marks = {"$or": [{"token": {"$exists": True}}, {"claim": {"$exists": True}}]}
        return bool(self.stored(self.source, **marks) or self.stored(self.target, **marks))


@contextmanager
def waiting_consumer(flow: Flow, database: str) -> Iterator[list[Message[Any]]]:
    """Let a consumer wait for a message of the target; only a signal can wake it.

    The list contains the message at the end.
    """
    got: list[Any] = []
    with Client(database) as client:
        queue = client.queue(flow.target, poll=10 * SLOW_S)
        consumer = Thread(target=lambda: got.append(queue.pop()))
        consumer.start()
        eventually(lambda: waiters(client, flow.target), "a waiting consumer")
        yield got
        eventually(lambda: got, "a message", seconds=SLOW_S)
        consumer.join()


class Meddler:
    """Counts commands, and makes something happen before one of them."""

    def __init__(self, at: int, what: Callable[[], object]) -> None:
        self.count = 0
        self._at, self._what = at, what
        self._dead = False

    @property
    def happened(self) -> bool:
        """Whether there were enough commands for it to happen."""
        return self.count >= self._at

    def die(self) -> NoReturn:
        """End the process: no further command works."""
        self._dead = True
        raise Crash

    def step(self) -> None:
        """Count a command."""
        if self._dead:
            raise Crash
        self.count += 1
        if self.count == self._at:
            self._what()


@contextmanager
def meddled(
    client: Connected[Connection], at: int = 0, what: Callable[[], object] | None = None
) -> Iterator[Meddler]:
    """Make something happen before command number ``at`` of a client.

    Args:
        client: The client.
        at: The number of the command, from 1. With 0 nothing happens.
        what: Is called then; None means that the process dies.
    """
    meddler = Meddler(at, what or (lambda: meddler.die()))
    driver: Any = runner_of(client).open()
    send, commit = driver._send, ClientSession.commit_transaction

    def counted(request: Any) -> Any:
        meddler.step()
        return send(request)

    def committed(session: ClientSession) -> None:
        meddler.step()
        commit(session)

    driver._send = counted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ClientSession, "commit_transaction", committed)
        try:
            yield meddler
        finally:
            del driver._send
