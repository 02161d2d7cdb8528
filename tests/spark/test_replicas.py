"""Replicas of one stage or query: one works, the rest stand by, and one takes over.

No test here needs Spark: a function stands in for it. The last tests start real processes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pyqueue import Client, ConfigurationError, Fenced
from pyqueue.backends.bulk import epochs
from pyqueue.backends.claims.groups import hold
from pyqueue.errors import Occupied
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import SparkStage, idle, runners, writers
from pyqueue.spark import stage as module
from tests.spark.engine import Checkpoint, Deaths, Engine, nothing, seen, to_queue
from tests.spark.fakes import Crash, Flow, Frame, no_session
from tests.spark.processes import SLOW_S
from tests.support.eventually import eventually
from tests.support.processes import program
from tests.support.samples import at_each, sampled, some_or_all

pytestmark = pytest.mark.usefixtures("faked")


def state(flow: Flow, member: int | None = None) -> dict[str, Any]:
    """Return the state of the group."""
    tag = "g" if member is None else f"g#{member}"
    (found,) = flow.client.database["pyqueue"].find({"_id": f"~claim:{flow.source}~{tag}"})
    return dict(found)


# ---- stages


def test_replica_stands_by_while_a_batch_runs(flow: Flow) -> None:
    """It leaves the batch alone, and the stage that works is not fenced."""
    flow.raw.push_many(range(3))
    second = flow.stage(owner="two")

    def transform(frame: Frame) -> Frame:
        before = flow.stored(flow.source)
        with pytest.raises(Occupied, match="is run by another runner, one; this runner stands by"):
            second.run_once(no_session)
        assert flow.stored(flow.source) == before
        return frame

    first = flow.stage(transform, owner="one")
    assert first.run_once(no_session).written == 3
    with pytest.raises(Occupied):  # between two batches it keeps the group
        second.run_once(no_session)
    flow.raw.push(3)
    first.release()
    assert second.run_once(no_session).written == 1


def dying(frame: Frame) -> Frame:
    """End the process."""
    raise Crash


def test_replica_takes_over_the_batch_of_a_dead_one(flow: Flow) -> None:
    flow.raw.push_many(range(3))
    first, second = flow.stage(dying, owner="one"), flow.stage(owner="two")
    with pytest.raises(Crash):
        first.run_once(no_session)
    with pytest.raises(Occupied):
        second.run_once(no_session)
    flow.lapse()
    report = second.run_once(no_session)
    assert (report.claimed, report.written) == (3, 3)


def test_restarted_stage_with_its_owner_does_not_wait(flow: Flow) -> None:
    flow.raw.push_many(range(3))
    with pytest.raises(Crash):
        flow.stage(dying, owner="one").run_once(no_session)
    assert flow.stage(owner="one").run_once(no_session).written == 3


def test_stages_with_one_owner_do_not_fight(flow: Flow) -> None:
    """The newest one runs the group, and the former one stands by."""
    flow.raw.push_many(range(4))
    first, second = (flow.stage(most=1, owner="one") for _ in range(2))
    assert first.run_once(no_session).written == 1
    assert second.run_once(no_session).written == 1
    with pytest.raises(Fenced):
        first.run_once(no_session)
    for _ in range(2):
        with pytest.raises(Occupied):
            first.run_once(no_session)
        assert second.run_once(no_session).written == 1
    flow.lapse()
    assert first.run_once(no_session).claimed == 0


def test_stage_renews_its_lease_between_batches(flow: Flow) -> None:
    stage = flow.stage(lease=2)
    assert stage.run_once(no_session).claimed == 0
    first = state(flow)["until"]
    eventually(lambda: state(flow)["until"] > first, "a renewed lease")
    stage.release()


def test_claim_by_hand_keeps_a_stage_away(flow: Flow) -> None:
    flow.raw.push_many(range(3))
    with flow.raw.claim("g", limit=2) as claim:
        with pytest.raises(Occupied):
            flow.stage(owner="two").run_once(no_session)
        claim.commit()
    flow.lapse()
    assert flow.stage(owner="two").run_once(no_session).written == 1


def test_members_share_the_work(flow: Flow) -> None:
    flow.raw.push_many(range(5))
    stages = [flow.stage(members=2, most=2, owner=owner) for owner in ("one", "two")]
    inner: list[Any] = []

    def transform(frame: Frame) -> Frame:
        inner.append(stages[1].run_once(no_session))
        return frame

    stages[0] = flow.stage(transform, members=2, most=2, owner="one")
    assert stages[0].run_once(no_session).written == 2
    assert inner[0].written == 2
    with pytest.raises(Occupied):
        flow.stage(members=2, owner="three").run_once(no_session)
    assert [state(flow, member)["n"] for member in (1, 2)] == [1, 1]
    flow.lapse()
    assert flow.stage(members=2, owner="three").run_once(no_session).written == 1
    assert flow.written() == [*range(5)]


# ---- SparkStage


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], object]]]:
    """Replace the sleeps of stages: each calls the next of these functions."""
    calls: list[Callable[[], object]] = []

    def sleep(seconds: float) -> None:
        assert seconds >= 0
        calls.pop(0)()

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    yield calls
    assert calls == []


def spark_stage(flow: Flow, database: str, **options: Any) -> SparkStage:
    return SparkStage(uri=database, source=flow.source, to=flow.target, group="g", **options)


def test_run_once_waits_for_a_dead_runner(
    flow: Flow, database: str, sleeps: list[Callable[[], object]]
) -> None:
    flow.raw.push_many(range(3))
    flow.stage(owner="dead", most=2).run_once(no_session)
    sleeps.append(flow.lapse)
    assert spark_stage(flow, database).run_once(None).written == 1
    flow.stage(owner="next").run_once(no_session)  # run_once has released the group


def test_run_once_says_that_another_process_runs_the_group(
    flow: Flow, database: str, sleeps: list[Callable[[], object]]
) -> None:
    other = flow.stage(owner="alive")
    other.run_once(no_session)
    sleeps.append(lambda: other.run(hold(other.claims, state(flow)["token"], 600)))
    with pytest.raises(Fenced, match=r"is run by another runner, alive; .* set the members option"):
        spark_stage(flow, database).run_once(None)


def test_run_stands_by_until_the_other_process_ends(
    flow: Flow, database: str, sleeps: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    other = flow.stage(owner="alive")
    other.run_once(no_session)
    sleeps += [lambda: flow.raw.push(1), lambda: None, other.release]
    with caplog.at_level(logging.INFO, "pyqueue"):
        reports = spark_stage(flow, database).run(None)
        assert next(reports).written == 1
    assert caplog.text.count("stands by") == 1
    reports.close()  # type: ignore[attr-defined]
    flow.stage(owner="next").run_once(no_session)


def test_run_until_empty_ends_on_standby_if_nothing_is_ready(
    flow: Flow, database: str, sleeps: list[Callable[[], object]]
) -> None:
    """First it waits: the other process may be dead, and its batch unfinished."""
    flow.raw.push_many(range(2))
    other = flow.stage(owner="alive", most=1)
    other.run_once(no_session)
    sleeps += [lambda: None, lambda: other.run_once(no_session)]
    assert [*spark_stage(flow, database).run(None, until_empty=True)] == []
    assert flow.written() == [0, 1]


def test_fenced_run_stands_by_and_goes_on(
    flow: Flow, database: str, sleeps: list[Callable[[], object]], caplog: pytest.LogCaptureFixture
) -> None:
    flow.raw.push_many(range(3))
    run, backend = runner_of(flow.client).run, backend_of(flow.raw)
    taken: list[Any] = []

    def transform(frame: Frame) -> Frame:
        if not taken:
            other = flow.stage(owner="other")
            backend.terms = replace(backend.terms, owner=other.source.terms.owner)
            taken.append(run(other.claims.begin(5, 600)))
        return frame

    sleeps.append(flow.lapse)
    (report,) = spark_stage(flow, database, transform=transform).run(None, until_empty=True)
    assert (report.claimed, report.written) == (3, 3)
    assert flow.written() == [*range(3)]
    assert "was taken over by another runner" in caplog.text


def test_stage_with_members_refuses_foreach_batch(flow: Flow, database: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^members: a stage with members cannot settle"):
        spark_stage(flow, database, members=2).foreach_batch(None, 0)  # type: ignore[arg-type]


# ---- streams


class Drivers:
    """The drivers of queries, and their clock: a test sets the time, and the driver that acts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.now = "", 0.0
        monkeypatch.setattr(runners, "gethostname", lambda: self.host)
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(runners, "time", clock)
        monkeypatch.setattr(idle, "time", clock)
        #: Called when a query waits.
        self.on_wait: Callable[[], object] = lambda: None

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_wait()

    def on(self, host: str) -> None:
        """Let the queries of this host act, after a time in which each may check again."""
        self.host = host
        self.now += 60


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Drivers:
    return Drivers(monkeypatch)


Rows = Counter[int]


def read_options(flow: Flow, database: str) -> dict[str, str]:
    """Return the options of a query that never waits."""
    given = {"uri": database, "queue": flow.source, "group": "g"}
    return given | {"maxMessagesPerBatch": "2", "maxWaitMs": "0"}


@pytest.fixture
def engine(flow: Flow, database: str) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes a query of the group. All of them stop at the end."""
    with ExitStack() as stack:

        def make(
            rows: Rows,
            checkpoint: Checkpoint | None = None,
            step: Callable[[str], object] = nothing,
            *,
            now: bool = False,
            of: Flow = flow,
            **options: str,
        ) -> Engine:
            given = read_options(of, database) | options
            made = Engine(given, seen(rows), checkpoint, step, now=now)
            stack.callback(made.reader.stop)
            return made

        yield make


def test_second_query_stands_by_and_takes_over(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    flow.raw.push_many(range(5))
    first, second = Rows(), Rows()
    drivers.on("a")
    former = engine(first)
    assert former.batch()
    drivers.on("b")
    standby = engine(second)
    for _ in range(3):
        assert not standby.batch()
        drivers.on("b")
    drivers.on("a")
    assert former.batch()
    former.reader.stop()
    flow.lapse()
    drivers.on("b")
    assert standby.run() == 2  # the last batch of the first query was not acknowledged
    assert first == Rows(range(4))
    assert second == Rows([2, 3, 4])
    assert flow.left() == []


@some_or_all
def test_second_query_at_any_step_disturbs_nothing(
    shared: Client, engine: Callable[..., Engine], drivers: Drivers, few: int | None
) -> None:
    """It starts before each step of the first query in turn."""

    def run(at: int) -> int:
        flow, rows, standby = Flow(shared), Rows(), Rows()
        flow.raw.push_many(range(5))
        steps: list[str] = []
        second: list[Engine] = []

        def step(name: str) -> None:
            steps.append(name)
            if len(steps) == at:
                drivers.on("b")
                second.append(engine(standby, of=flow))
                second[-1].batch()
                drivers.on("a")

        drivers.on("a")
        first = engine(rows, step=step, of=flow)
        if at in (1, 2):  # the second query is the first to take the group
            assert not first.batch()
            rows = standby
            drivers.on("b")
            second[0].run()
        else:
            first.run()
        assert rows == Rows(range(5)), f"the other query started before step {at}"
        assert flow.left() == []
        return len(steps)

    assert at_each(run, few) > 10


def test_query_twice_in_one_application_is_refused(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    """It would wait for the first query for ever. A query that has ended is no reason."""
    flow.raw.push_many(range(3))
    rows, standby = Rows(), Rows()
    first, second, third = engine(rows), engine(standby), engine(standby)
    assert first.batch()
    assert not second.batch()
    drivers.on("")
    before = state(flow)["until"]
    run = runner_of(flow.client).run
    run(hold(first.reader._runner.claims, state(flow)["token"], 600))
    assert state(flow)["until"] > before
    with pytest.raises(ConfigurationError, match=r"^group: another query of this application"):
        second.batch()
    assert first.batch()
    assert not third.batch()
    first.reader.stop()
    flow.lapse()
    drivers.on("")
    assert third.batch()
    assert (rows, standby) == (Rows(range(3)), Rows([2]))


def test_available_now_waits_for_a_dead_query(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    flow.raw.push_many(range(3))
    rows = Rows()
    drivers.on("a")
    engine(rows).batch()
    drivers.on("b")
    drivers.on_wait = flow.lapse
    assert engine(rows, now=True).run() == 2
    assert rows == Rows([0, 0, 1, 1, 2])


def test_available_now_fails_if_another_query_lives(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    """It must not end as if there were no messages."""
    flow.raw.push_many(range(3))
    drivers.on("a")
    engine(Rows()).batch()
    drivers.on("b")
    with pytest.raises(Fenced, match="is run by another runner"):
        engine(Rows(), now=True).run()


def test_fenced_query_stands_by(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    flow.raw.push_many(range(5))
    query = engine(Rows())
    assert query.batch()
    with flow.raw.claim("g", limit=5) as claim:
        before = flow.stored(flow.source)
        for _ in range(3):
            assert not query.batch()
            drivers.on("")
        assert flow.stored(flow.source) == before
        claim.commit()


def test_query_fenced_within_its_batch_ends(flow: Flow, engine: Callable[..., Engine]) -> None:
    """It must not take the batch for an empty one: its checkpoint would be wrong."""
    flow.raw.push_many(range(5))
    run, token = runner_of(flow.client).run, []

    def step(name: str) -> None:
        if name == "partitions":
            token.append(run(query.reader._runner.claims.adopt(600)))

    query = engine(Rows(), step=step)
    with pytest.raises(Fenced):
        query.batch()
    assert token
    with pytest.raises(Fenced):
        query.batch()


def lived(query: Engine, *, batches: int = 100) -> bool:
    """Run some batches of a query; return False if it died. A dead process renews nothing."""
    with suppress(Crash):
        for _ in range(batches):
            if not query.batch():
                return True
        return True
    query.reader.stop()
    return False


def handed_over(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers, first: int, second: int
) -> tuple[bool, bool]:
    """Let a query die at a step, then another one, and continue with the first checkpoint."""
    rows, checkpoints = Rows(), (Checkpoint(), Checkpoint())
    flow.raw.push_many(range(5))
    ends: list[bool] = []
    for checkpoint, at in zip(checkpoints, (first, second), strict=True):
        drivers.on(f"host{len(ends)}")
        ends.append(lived(engine(rows, checkpoint, Deaths(at), of=flow), batches=2))
        flow.lapse()
    for checkpoint in checkpoints:
        drivers.on("last")
        query = engine(rows, checkpoint, of=flow)
        lived(query)
        query.reader.stop()
        flow.lapse()
    assert {*rows} == {*range(5)}, f"died at steps {first} and {second}"
    assert flow.left() == []
    return ends[0], ends[1]


def test_handover_between_queries_loses_nothing(
    shared: Client, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    """The first checkpoint comes back after another query has run the group."""
    for first, second in ((1, 8), (3, 5), (5, 8), (7, 5), (9, 8), (12, 5)):
        assert handed_over(Flow(shared), engine, drivers, first, second) == (False, False)


@pytest.mark.slow
def test_handover_at_any_two_steps_loses_nothing(
    shared: Client, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    for first in range(1, 30):
        for second in range(1, 30):
            ends = handed_over(Flow(shared), engine, drivers, first, second)
            if ends[1]:
                break
        if ends[0]:
            break
    assert min(first, second) > 8


def test_query_comes_back_as_another_member(
    flow: Flow, engine: Callable[..., Engine], drivers: Drivers
) -> None:
    """Its checkpoint has the numbers of the first member, which another query runs."""
    flow.raw.push_many(range(9))
    rows, checkpoint = Rows(), Checkpoint()
    drivers.on("a")
    first = engine(rows, checkpoint, Deaths(20), members="2")
    assert lived(first, batches=2)
    drivers.on("b")
    second = engine(rows, members="2")
    assert lived(second, batches=1)
    assert rows == Rows(range(6))
    first.reader.stop()
    flow.lapse()
    run = runner_of(flow.client).run
    run(hold(second.reader._runner.claims, state(flow, 2)["token"], 600))
    drivers.on("c")
    third = engine(rows, members="2")
    assert lived(third)  # takes over the first member
    assert state(flow, 1)["owner"].startswith("spark:c")
    second.reader.stop()
    flow.lapse()
    run(hold(third.reader._runner.claims, state(flow, 1)["token"], 600))
    drivers.on("a")
    again = engine(rows, checkpoint, members="2")
    flow.raw.push_many(range(9, 12))
    assert lived(again)
    assert state(flow, 2)["owner"].startswith("spark:a")
    assert {*rows} == {*range(12)}
    again.listen()
    assert flow.left() == []


def test_stream_into_a_queue_is_written_once_across_replicas(
    flow: Flow, database: str, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids are made from the source's ids, so a batch that runs again writes nothing.

    Each query waits until the former one has not written the stage for a while.
    """
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        flow.rest_stages()

    monkeypatch.setattr(writers, "time", SimpleNamespace(sleep=rest))
    flow.raw.push_many(range(7))
    given = read_options(flow, database)
    to = {"uri": database, "queue": flow.target, "stage": "s"}
    for host in ("a", "b", "c"):
        drivers.on(host)
        query = Engine(given, to_queue(to, query=host))
        query.batch()
        query.reader.stop()
        flow.lapse()
    query = Engine(given, to_queue(to, query="d"))
    query.run()
    flow.check_moved(range(7))
    assert len(rests) == 3
    assert all(0 < each <= epochs.FRESH.total_seconds() for each in rests)


def test_second_query_of_a_stage_is_refused_if_both_live(
    shared: Client, database: str, drivers: Drivers, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Flow(shared), Flow(shared)
    queries = []
    for flow in (first, second):
        flow.raw.push_many(range(4))
        given = {"uri": database, "queue": flow.source, "group": "g", "maxMessagesPerBatch": "2"}
        to = {"uri": database, "queue": first.target, "stage": "s"}
        queries.append(Engine(given, to_queue(to, query=flow.source)))
    drivers.on("a")
    queries[0].batch()
    monkeypatch.setattr(writers, "time", SimpleNamespace(sleep=lambda _: queries[0].batch()))
    with pytest.raises(ConfigurationError, match=r"^stage: .*a different stage name"):
        queries[1].batch()
    assert first.written() == [*range(4)]
    for query in queries:
        query.reader.stop()
    for flow in (first, second):
        flow.release()


# ---- real processes


@pytest.mark.spark_long
@pytest.mark.parametrize(("members", "count"), sampled([(1, 2), (1, 3), (2, 3)], few=1))
def test_killed_replica_is_followed_by_another(url: str, members: int, count: int) -> None:
    """Processes of a pipeline with a Python stage and a Spark stage; all but one are killed.

    The lease of the messages is 4 s, so a runner's lease is 1 s.
    """
    with ExitStack() as stack, Client(url, signals="none:") as client:
        replicas = [
            stack.enter_context(program("-m", "tests.spark.replica", url, str(members)))
            for _ in range(count)
        ]
        alive = {each.pid: each for each in replicas}
        states, out = client.database["pyqueue"], client.queue("c")

        def runner() -> int | None:
            """Return the process that holds a batch."""
            for each in states.find({"_id": {"$regex": "^~claim:b~"}, "token": {"$exists": True}}):
                pid = int(each["owner"].rpartition(":")[2])
                if pid in alive and each["claimed"] > each["n"]:
                    return pid
            return None

        for wave in range(count):
            client.queue("a").push_many([{"n": 100 * wave + number} for number in range(100)])
            if wave < count - 1:
                found: list[int] = []

                def working(found: list[int] = found) -> bool:
                    found.extend(each for each in [runner()] if each is not None)
                    return bool(found)

                eventually(working, "a replica with a batch", seconds=SLOW_S)
                psutil.Process(found[0]).kill()
                alive.pop(found[0]).wait()
            eventually(
                lambda wave=wave: out.counts().ready == 100 * (wave + 1),  # type: ignore[misc]
                "all messages moved",
                seconds=SLOW_S,
                alive=lambda: all(each.poll() is None for each in alive.values()),
            )
        assert sorted(each.payload["n"] for each in out.peek(1000)) == [*range(100 * count)]
        assert client.queue("a").counts().total == client.queue("b").counts().total == 0
        assert [each.poll() for each in alive.values()] == [None]
