"""Writes by epoch: each batch appears once, wherever a run of it ends, stops or is repeated.

They run on a blocking client, as Spark's tasks do. Every message that appears is consumed at once,
so no id that is still stored can hide a second write.
"""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import bson
import pytest

from pyqueue import (
    Client,
    ConfigurationError,
    DuplicateKey,
    Fenced,
    Message,
    Queue,
    QueueError,
    Unavailable,
)
from pyqueue.backends.bulk import epochs as module
from pyqueue.backends.bulk import stages
from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.bulk.id_sketch import IdSketch
from pyqueue.backends.bulk.staging import Staging, place_of
from pyqueue.backends.options import NewMessage
from pyqueue.errors import Occupied
from pyqueue.queue_base import backend_of
from pyqueue.requests import Plan, Request, Signal, UpdateEach, WriteFailure
from pyqueue.runtime.connecting import runner_of
from tests.support.samples import at_each, some_or_all, spread

#: The rows of an epoch, in two tasks. One has a key.
TASKS = [
    [NewMessage("s~1", 1), NewMessage("s~2", 2, None, "k")],
    [NewMessage("s~3", 3)],
]
ONCE = Counter({1: 1, 2: 1, 3: 1})


@pytest.fixture
def client(blocking_client: Client) -> Client:
    """Return a client of an empty database."""
    return blocking_client


@pytest.fixture
def scene(client: Client) -> Scene:
    """Return a query that writes to a new queue."""
    return Scene(client)


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a query take a stage over without waiting for the end of another query."""
    monkeypatch.setattr(module, "FRESH", timedelta(0))


class Scene:
    """A query that writes to a new queue, or to two, and a consumer."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.queue: Queue[Any] = client.queue(f"q{uuid4().hex[:8]}")
        self.other: Queue[Any] = client.queue(f"{self.queue.name}-other")
        self.writes = self.query("query-1")
        self.seen: Counter[Any] = Counter()

    def query(self, id: str, stage: str = "s", run: str = "") -> EpochWrites:
        return EpochWrites(backend_of(self.queue).target, stage, id, run)

    def record(self, writes: EpochWrites) -> dict[str, Any]:
        """Return the stored record of a query; empty if there is none."""
        return self.client.database["pyqueue"].find_one({"_id": f"~stage:{writes.name}"}) or {}

    def run(self, plan: Plan[Any]) -> Any:
        """Run a plan to its end."""
        return runner_of(self.client).run(plan)

    def steps(self, plan: Plan[Any]) -> Generator[None, None, None]:
        """Run a plan. This stops before each request, and consumes after it."""

        def one(request: Request[Any]) -> Plan[Any]:
            return (yield request)

        request = next(plan)
        while True:
            yield
            try:
                answer = self.run(one(request))
            except QueueError as error:
                request = plan.throw(error)
                continue
            finally:
                self.consume()
            try:
                request = plan.send(answer)
            except StopIteration:
                return

    def consume(self) -> None:
        """Finish all messages that are visible."""
        collection = self.client.database["pyqueue"]
        both = {"$in": [self.queue.name, self.other.name]}
        for each in list(collection.find({"q": both, "record": {"$exists": False}})):
            collection.delete_one({"_id": each["_id"]})
            self.seen[each["payload"]] += 1

    def decide(self, job: str, epoch: int) -> None:
        """Run an epoch until it is decided, and stop there."""
        steps = self.steps(run_of(self.writes, job, epoch))
        while self.record(self.writes).get("epoch") != epoch:
            next(steps)

    def write(self, writes: EpochWrites, job: str, *rows: NewMessage, at: str = "x") -> int:
        """Join epoch 0 and write rows. Return the number of the attempt."""
        attempt: int = self.run(writes.join(job, 0))
        assert self.run(writes.write(0, attempt, 1, at, rows)) == len(rows)
        return attempt

    def hidden(self) -> int:
        count: int = self.client.database["pyqueue"].count_documents({"staged": {"$exists": True}})
        return count


def run_of(writes: EpochWrites, job: str, epoch: int = 7, other: str | None = None) -> Plan[int]:
    """Run an epoch like Spark: the tasks, and then the commit.

    The second task may write to another queue.
    """
    counts, attempt, ids = {}, None, list[str]()
    for task, rows in enumerate(TASKS):
        attempt = yield from writes.join(job, epoch)
        if attempt is not None:
            place = place_of(f"{attempt}:{task}:0", other if task else None)
            counts[place] = yield from writes.write(epoch, attempt, task, place, rows)
            ids += [str(row.id) for row in rows]
    if attempt is None:
        return (yield from writes.resume(epoch))
    return (yield from writes.commit(job, epoch, attempt, counts, IdSketch.of(ids)))


def advance(steps: Generator[None, None, None], count: int) -> bool:
    """Do a number of steps; return whether there are more."""
    for _ in range(count):
        try:
            next(steps)
        except StopIteration:
            return False
        except (Fenced, QueueError):
            return False  # another run has taken over
    return True


def length(scene: Scene) -> int:
    return sum(1 for _ in scene.steps(run_of(scene.writes, "a")))


@some_or_all
def test_epoch_appears_once_wherever_a_run_ends(client: Client, few: int | None) -> None:
    """The driver is killed before each command in turn, and runs the epoch again."""
    partly = 0

    def run(at: int) -> int:
        nonlocal partly
        if at == 0:
            return length(Scene(client)) + 1
        scene = Scene(client)
        advance(scene.steps(run_of(scene.writes, "a")), at)
        partly += 0 < scene.seen.total() < 3
        assert not advance(scene.steps(run_of(scene.writes, "b")), 1000)
        assert scene.seen == ONCE, f"killed before command {at}"
        assert scene.run(run_of(scene.writes, "c")) == 0
        assert scene.seen == ONCE
        assert scene.hidden() == 0
        return at

    assert at_each(run, few and few + 2) > 12
    assert partly, "no kill came while the epoch was shown"


@some_or_all
def test_epoch_of_two_queues_appears_once_wherever_a_run_ends(
    client: Client, few: int | None
) -> None:
    """Also if the driver is killed between the two."""
    between = list[int]()

    def run(at: int) -> int:
        scene = Scene(client)
        other = scene.other.name
        steps = scene.steps(run_of(scene.writes, "a", other=other))
        if at == 0:
            number = 0
            for number, _ in enumerate(steps, 1):
                if scene.seen == Counter({1: 1, 2: 1}):
                    between.append(number)
            return number + 1
        advance(steps, at)
        assert not advance(scene.steps(run_of(scene.writes, "b", other=other)), 1000)
        assert scene.seen == ONCE, f"killed before command {at}"
        assert scene.run(run_of(scene.writes, "c", other=other)) == 0
        assert scene.hidden() == 0
        return at

    at_each(run, few)
    run(between[0])


def test_epoch_appears_in_its_queues_and_signals_both(client: Client, scene: Scene) -> None:
    signalled: set[str] = set()

    def noted(plan: Plan[int]) -> Plan[int]:
        answer = None
        while True:
            try:
                request = plan.send(answer)
            except StopIteration as stop:
                return int(stop.value)
            if isinstance(request, Signal):
                signalled.add(request.queue)
            answer = yield request

    assert scene.run(noted(run_of(scene.writes, "a", other=scene.other.name))) == 3
    assert sorted(each.payload for each in scene.queue.peek(5)) == [1, 2]
    assert [each.payload for each in scene.other.peek(5)] == [3]
    assert signalled == {scene.queue.name, scene.other.name}
    assert {each.name for each in client.queues()} == signalled


def test_epoch_keeps_the_instants_of_its_messages(client: Client, scene: Scene) -> None:
    """A message without one is as old as its appearance, so that consumers find it."""
    now, hour = datetime.now(UTC), timedelta(hours=1)
    rows = [
        NewMessage("s~1", 1, None, None, None, now + hour),
        NewMessage("s~2", 2, None, "k", 600),
        NewMessage("s~3", 3),
    ]
    attempt = scene.write(scene.writes, "a", *rows)
    past = {"$set": {"when": now - hour, "due": now - hour}}
    client.database["pyqueue"].update_one({"_id": "s~3"}, past)
    assert scene.run(scene.writes.commit("a", 0, attempt, {"x": 3})) == 3
    found = [scene.queue.get(f"s~{number}") for number in (1, 2, 3)]
    first, second, third = (each for each in found if isinstance(each, Message))
    assert [each.state for each in (first, second, third)] == ["scheduled", "scheduled", "ready"]
    assert abs(first.when - (now + hour)) < timedelta(milliseconds=1)
    assert second.when > now + timedelta(minutes=5)
    assert third.when > now - hour / 2


def test_id_in_two_queues_of_an_epoch_is_refused(scene: Scene) -> None:
    """Otherwise the second row would be left out silently."""
    attempt = scene.run(scene.writes.join("a", 0))
    for place, fits in (("x", True), (place_of("x", scene.other.name), False), ("y", False)):
        plan = scene.writes.write(0, attempt, 1, place, [NewMessage("s~1", 1)])
        if fits:
            assert scene.run(plan) == 1
        else:
            with pytest.raises(ConfigurationError, match="several rows have the id 's~1'"):
                scene.run(plan)


def interleaved(client: Client, first: int, second: int) -> None:
    """Stop one run, run a part of the next one, then the rest of both, and then a third one."""
    scene = Scene(client)
    one, two = (scene.steps(run_of(scene.writes, job)) for job in ("a", "b"))
    advance(one, first)
    advance(two, second)
    advance(one, 1000)
    advance(two, 1000)
    assert not advance(scene.steps(run_of(scene.writes, "c")), 1000)
    assert scene.seen == ONCE, f"{first} and {second} commands"
    assert scene.run(run_of(scene.writes, "d")) == 0
    assert scene.hidden() == 0


def test_epoch_appears_once_beside_a_run_that_goes_on(client: Client) -> None:
    dice, most = random.Random(3), length(Scene(client)) + 1
    for _ in range(5):
        interleaved(client, dice.randint(1, most), dice.randint(1, most))


@pytest.mark.slow
def test_epoch_appears_once_in_all_interleavings(client: Client) -> None:
    most = length(Scene(client)) + 1
    for first in range(1, most):
        for second in range(1, most):
            interleaved(client, first, second)


def test_ids_alone_let_an_epoch_appear_twice(scene: Scene) -> None:
    """This shows that the tests above can fail."""
    for job in ("a", "b"):
        staging = Staging(scene.writes.target, job)
        counts = {"0": scene.run(staging.write("0", TASKS[1]))}
        scene.run(staging.publish(counts))
        scene.consume()
    assert scene.seen == Counter({3: 2})


def test_later_task_replaces_the_rows_of_an_earlier_one(scene: Scene) -> None:
    """A task that is repeated may write its rows in another order, and in other chunks."""
    writes = scene.writes
    attempt = scene.run(writes.join("a", 0))
    rows = [NewMessage(f"s~{n}", n) for n in range(4)]
    assert scene.run(writes.write(0, attempt, 5, "early", rows[:3])) == 3
    assert scene.run(writes.write(0, attempt, 6, "late", rows[::-1])) == 4
    assert scene.run(writes.write(0, attempt, 5, "early2", rows[3:])) == 0
    assert scene.run(writes.commit("a", 0, attempt, {"late": 4})) == 4
    scene.consume()
    assert scene.seen == Counter(range(4))


def without_primary(plan: Plan[Any]) -> Plan[Any]:
    """Run a plan whose first bulk update reaches a server that is no longer the primary."""
    request = next(plan)
    while not isinstance(request, UpdateEach):
        request = plan.send((yield request))
    return plan.send((0, [WriteFailure(0, None, Unavailable("not primary"))]))


def test_fail_over_leaves_the_row_of_an_epoch_hidden(scene: Scene) -> None:
    """It is no reason to take its key for taken, and to delete the row."""
    attempt = scene.write(scene.writes, "a", NewMessage("s~1", 1, None, "k"))
    with pytest.raises(Unavailable, match="not primary"):
        scene.run(without_primary(scene.writes.commit("a", 0, attempt, {"x": 1})))
    assert scene.hidden() == 1
    assert scene.run(scene.writes.join("b", 0)) is None
    assert [scene.run(scene.writes.resume(0)) for _ in range(2)] == [1, 0]
    scene.consume()
    assert scene.seen == Counter({1: 1})


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace", "error"])
def test_fail_over_leaves_a_staged_row_hidden(scene: Scene, on_duplicate: str) -> None:
    staging = Staging(scene.writes.target, "job", on_duplicate)
    counts = {"0": scene.run(staging.write("0", [NewMessage(None, 1, None, "k")]))}
    with pytest.raises(Unavailable, match="not primary"):
        scene.run(without_primary(staging.publish(counts)))
    assert scene.hidden() == 1
    assert scene.run(staging.publish(counts)) == 1


def test_second_copy_of_a_task_keeps_committed_rows(scene: Scene) -> None:
    """It writes them again after the driver has counted and committed them."""
    row = NewMessage("s~1", 1)
    attempt = scene.write(scene.writes, "a", row)
    steps = scene.steps(scene.writes.commit("a", 0, attempt, {"x": 1}))
    while scene.record(scene.writes)["epoch"] != 0:
        next(steps)
    with pytest.raises(Fenced, match="batch 0 is committed, so this copy of a task stops"):
        scene.run(scene.writes.write(0, attempt, 2, "y", [row]))
    advance(steps, 1000)
    assert scene.seen == Counter({1: 1})
    assert scene.hidden() == 0


def test_commit_without_all_rows_shows_nothing(scene: Scene) -> None:
    attempt = scene.write(scene.writes, "a", *TASKS[0])
    with pytest.raises(QueueError, match="3 messages were written at x, but 2 are there"):
        scene.run(scene.writes.commit("a", 0, attempt, {"x": 3}))
    scene.consume()
    assert not scene.seen
    assert scene.hidden() == 2


def test_decided_epoch_with_rows_missing_is_an_error(client: Client, scene: Scene) -> None:
    scene.decide("a", 7)
    client.database["pyqueue"].delete_many({"_id": "s~3", "staged": {"$exists": True}})
    with pytest.raises(QueueError, match="epoch 7: 1 messages were written"):
        scene.run(run_of(scene.writes, "b"))


def test_epochs_continue_and_old_numbers_are_refused(scene: Scene) -> None:
    """A query that counts from another beginning has other rows, which must not be dropped."""
    for epoch in (0, 1, 2):
        assert scene.run(run_of(scene.writes, f"job{epoch}", epoch)) == 3
        scene.consume()
    forget = f"`pyqueue stage forget {scene.queue.name} s`"
    with pytest.raises(ConfigurationError, match="than batch 2, which .*" + forget):
        scene.run(run_of(scene.writes, "old", 1))
    assert scene.seen == Counter({1: 3, 2: 3, 3: 3})
    assert scene.run(stages.forget(scene.queue.name, "s")) == 1
    assert scene.run(run_of(scene.writes, "old", 1)) == 3


@pytest.mark.parametrize("count", [0, 3, 5000])
def test_repeated_epoch_with_other_rows_is_refused(scene: Scene, count: int) -> None:
    """Of many rows only a sample is known, so a single other row may not be noticed."""
    ids = [f"s~{number}" for number in range(count)]
    attempt = scene.run(scene.writes.join("a", 4))
    scene.run(scene.writes.commit("a", 4, attempt, {}, IdSketch.of(ids)))
    assert scene.run(scene.writes.join("b", 4)) is None
    for same in (ids, ids[:1], []):
        scene.run(scene.writes.check_repeated(4, same))
    with pytest.raises(ConfigurationError, match=r"batch 4 of .* has been written with different"):
        scene.run(scene.writes.check_repeated(4, [f"s~{count + 1 + each}" for each in range(200)]))


def test_sketch_of_many_tasks_knows_what_is_missing() -> None:
    ids = [f"id-{number}" for number in range(3000)]
    whole = IdSketch.union(IdSketch.of(ids[start : start + 100]) for start in range(0, 3000, 100))
    assert whole == IdSketch.of(ids)
    assert IdSketch.stored(bson.decode(bson.encode(whole.to_document()))) == whole
    assert whole.missing(ids) == []
    others = [f"other-{number}" for number in range(3000)]
    assert 900 < len(whole.missing(others)) < 1150  # about the size of the sketch, 1024
    few = IdSketch.of(ids[:3])
    assert few.missing([*ids[:2], *others[:4]]) == others[:4]


# ---- runs of queries


@some_or_all
@pytest.mark.usefixtures("stale")
def test_replica_that_sleeps_before_it_decides_shows_nothing(
    client: Client, few: int | None
) -> None:
    """Another query writes the same batch in between. A new run of the first may continue later."""

    def run(at: int) -> int:
        if at == 0:
            return length(Scene(client))
        scene = Scene(client)
        client.database["pyqueue"].delete_many({"staged": {"$exists": True}})
        first = scene.query("query-a", run="run-a")
        scene.run(first.commit("z", 6, scene.run(first.join("z", 6)), {}))
        steps = scene.steps(run_of(first, "a"))
        advance(steps, at)
        if scene.record(first).get("epoch") == 7:
            return at  # a decided epoch is published, also by the other query
        scene.run(run_of(scene.query("query-b", run="run-b"), "b"))
        scene.consume()
        goes_on = advance(steps, 1000)
        assert not goes_on
        assert scene.seen == ONCE, f"slept before command {at}"
        with pytest.raises(Fenced):
            scene.run(first.join("a2", 7))
        again = scene.query("query-a", run="run-a2")
        assert scene.run(again.join("a3", 8)) is not None
        with pytest.raises(Fenced):
            scene.run(scene.query("query-b", run="run-b").join("b2", 8))
        return at

    assert at_each(run, few) > 12


@some_or_all
@pytest.mark.usefixtures("stale")
@pytest.mark.parametrize("new", [True, False])
def test_of_two_runs_that_begin_at_once_one_is_out(
    client: Client, new: bool, few: int | None
) -> None:
    """Only one may continue, wherever each of them stops. Both may have written before."""
    one_of_them = 0
    seconds = (1, 9, 100) if few else (*range(1, 16, 4), 100)
    for first in spread(15, 3 if few else 15):
        for second in seconds:
            scene = Scene(client)
            for name in "" if new else "ab":
                scene.run(scene.query(f"query-{name}", run="before").join("j", 0))
            queries = [scene.query(f"query-{name}", run=f"run-{name}") for name in "ab"]
            one, two = (scene.steps(each.join("j", 0)) for each in queries)
            for steps, count in ((one, first + 1), (two, second), (one, 100), (two, 100)):
                advance(steps, count)
            attempts = {}
            for writes in queries:
                with suppress(Fenced):
                    if scene.record(writes).get("run") == writes._run:
                        attempts[writes] = scene.run(writes.join("j", 0))
            decided = 0
            for writes, attempt in attempts.items():
                with suppress(Fenced):
                    scene.run(writes.commit("j", 0, attempt, {}))
                    decided += 1
            assert decided <= 1, f"{first + 1} and {second} commands"
            one_of_them += decided
            again = scene.query("query-a", run="later")
            assert scene.run(again.join("k", 1)) is not None, "a new start is admitted"
    assert one_of_them


@pytest.mark.usefixtures("stale")
def test_writes_of_a_former_release_continue_in_one_query(client: Client, scene: Scene) -> None:
    """It kept one record for all queries of a stage. The first that begins takes it over."""
    unnamed = scene.query("")
    scene.run(run_of(unnamed, "a", 5))
    gone = dict.fromkeys(("run", "out", "ids"), "")
    client.database["pyqueue"].update_one({"_id": f"~stage:{unnamed.name}"}, {"$unset": gone})
    scene.consume()
    assert scene.run(run_of(scene.query("query-1", run="run-1"), "b", 5)) == 0
    with pytest.raises(ConfigurationError, match="than batch 5, which has been written"):
        scene.run(run_of(scene.query("query-1", run="run-1"), "b", 4))
    with pytest.raises(Fenced):
        scene.run(run_of(unnamed, "c", 6))
    assert scene.run(scene.query("query-2", run="run-2").join("d", 0)) is not None


@some_or_all
@pytest.mark.usefixtures("stale")
def test_takeover_of_a_former_record_may_end_anywhere(client: Client, few: int | None) -> None:
    def run(at: int) -> int:
        scene = Scene(client)
        scene.run(run_of(scene.query(""), "a", 5))
        scene.consume()
        steps = scene.steps(run_of(scene.query("query-1", run="run-1"), "b", 5))
        if at == 0:
            return sum(1 for _ in steps) + 1
        advance(steps, at)
        scene.run(run_of(scene.query("query-1", run="run-2"), "c", 5))
        scene.consume()
        assert scene.seen == ONCE, f"ended before command {at}"
        return at

    assert at_each(run, few) > 5


def test_stages_end_with_their_queue(client: Client, scene: Scene) -> None:
    """Their decided rows are published first, and then belong to the queue."""
    scene.decide("a", 7)
    hidden = NewMessage("batch", 1)
    place = f"{'2' * 32}:0"
    scene.run(Staging(scene.writes.target, "0" * 32).write(place, [hidden]))
    neighbour = client.queue(f"{scene.queue.name}:more")
    kept = Staging(backend_of(neighbour).target, "1" * 32)
    scene.run(kept.write(place, [NewMessage("kept", 1)]))
    with pytest.raises(ConfigurationError, match="3 ready"):
        client.delete_queue(scene.queue.name)
    assert scene.record(scene.writes)
    assert client.delete_queue(scene.queue.name, force=True) == 3
    assert not scene.record(scene.writes)
    assert scene.hidden() == 1, "the row of another queue, whose name only begins like this one"
    assert scene.run(run_of(scene.writes, "b", 0)) == 3, "a new queue begins with any epoch"


def test_stages_are_listed_and_forgotten(scene: Scene) -> None:
    name = scene.queue.name
    scene.run(run_of(scene.writes, "a"))
    scene.run(scene.query("query-2", "").join("b", 0))
    found = scene.run(stages.stages(name))
    assert [(each.stage, each.query, each.epoch) for each in found] == [
        ("", "query-2", -1),
        ("s", "query-1", 7),
    ]
    assert {each.queue for each in scene.run(stages.stages())} >= {name}
    attempt = scene.run(scene.writes.join("c", 8))
    scene.run(scene.writes.write(8, attempt, 1, "x", [NewMessage("s~9", 9)]))
    assert scene.run(stages.forget(name, "other")) == 0
    assert scene.run(stages.forget(name, "s")) == 1
    assert scene.hidden() == 0
    assert [each.stage for each in scene.run(stages.stages(name))] == [""]
    assert scene.run(stages.forget(name, "")) == 1


def test_decision_that_is_gone_is_an_error(scene: Scene) -> None:
    """A task may have read it from a primary whose last writes were rolled back."""
    scene.run(run_of(scene.writes, "a", 1))
    with pytest.raises(Fenced):
        scene.run(scene.writes.resume(2))
    assert scene.run(scene.writes.resume(0)) == 0


def test_former_run_cannot_join_again(scene: Scene) -> None:
    assert scene.run(scene.writes.join("a", 0)) == 1
    assert scene.run(scene.writes.join("b", 0)) == 2
    with pytest.raises(Fenced, match="another run has taken over"):
        scene.run(scene.writes.join("a", 0))
    assert scene.run(scene.writes.commit("b", 0, 2, {})) == 0
    assert scene.run(scene.writes.join("c", 0)) is None, "there is nothing to write"


@some_or_all
def test_two_processes_may_show_an_epoch(client: Client, few: int | None) -> None:
    """Each stops after every command in turn, while the other one continues."""

    def run(at: int) -> int:
        if at == 0:
            return length(Scene(client))
        scene = Scene(client)
        one, two = (scene.steps(run_of(scene.writes, "a")) for _ in range(2))
        advance(one, at)
        while advance(two, 1) and advance(one, 1):
            pass
        for steps in (one, two):
            for _ in steps:
                pass
        assert scene.seen == ONCE
        return at

    assert at_each(run, few) > 10


def test_skipped_epoch_that_was_decided_is_shown_first(scene: Scene) -> None:
    scene.decide("a", 1)
    assert scene.run(run_of(scene.writes, "b", 2)) == 0  # the ids are in the queue
    scene.consume()
    assert scene.seen == ONCE


def test_second_query_of_a_stage_is_refused_while_fresh(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.run(run_of(scene.writes, "a"))
    with pytest.raises(Occupied, match=r"another query is writing to .* stage 's'") as other:
        scene.run(run_of(scene.query("query-2"), "b"))
    assert 0 < other.value.wait_s <= 20
    scene.run(run_of(scene.query("query-2", "other"), "b"))
    monkeypatch.setattr(module, "FRESH", timedelta(0))
    scene.run(run_of(scene.query("query-2"), "b"))
    monkeypatch.undo()
    for query in ("query-3", "query-4"):  # queries without a stage
        scene.run(run_of(scene.query(query, ""), "c"))


@pytest.mark.usefixtures("stale")
def test_rows_that_no_record_claims_are_removed(
    client: Client, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = scene.query("query-0"), scene.query("query-1")
    for writes in (gone, kept):
        scene.write(writes, "a", NewMessage(f"s~{writes.name}", 1))
    client.database["pyqueue"].delete_one({"_id": f"~stage:{gone.name}"})
    scene.run(scene.query("query-2").join("b", 0))
    assert scene.hidden() == 2, "rows of today may belong to a query that begins just now"
    monkeypatch.setattr(module, "ABANDONED", timedelta(0))
    scene.run(scene.query("query-3").join("b", 0))
    assert scene.hidden() == 1
    attempt = scene.run(kept.join("a", 0))
    assert scene.run(kept.commit("a", 0, attempt, {"x": 1})) == 1


def test_rows_of_other_queries_give_way_unless_decided(client: Client, scene: Scene) -> None:
    row = NewMessage("id", 1)
    dead, live = scene.query("dead", ""), scene.query("live", "")
    attempt = scene.write(dead, "a", row)
    scene.write(live, "b", row)
    with pytest.raises(QueueError, match="1 messages were written at x, but 0 are there"):
        scene.run(dead.commit("a", 0, attempt, {"x": 1}))
    with pytest.raises(Fenced):
        scene.run(dead.join("a", 0))
    decided = {"$set": {"epoch": 0, "places": [{"at": "x", "n": 1}]}}
    client.database["pyqueue"].update_one({"_id": f"~stage:{live.name}"}, decided)
    assert scene.run(dead.write(1, attempt, 1, "y", [row])) == 0, "the other one shows it"
    assert scene.queue.get("id") is not None
    assert scene.hidden() == 0


@some_or_all
def test_row_of_a_query_that_is_deciding_is_kept(client: Client, few: int | None) -> None:
    """The other query writes the same id, stops between its commands, and decides nothing."""
    scene, decided = Scene(client), 0
    seconds = (4, 7, 10, 100) if few else (*range(4, 12), 100)
    for first in range(1, 4):
        for second in seconds:
            id, row = f"{first}-{second}", [NewMessage(f"{first}-{second}", 1)]
            one, two = scene.query(f"one-{id}", ""), scene.query(f"two-{id}", "")
            attempts = [scene.run(each.join("a", 0)) for each in (one, two)]
            scene.run(one.write(0, attempts[0], 1, "x", row))
            commit = scene.steps(one.commit("a", 0, attempts[0], {"x": 1}))
            write = scene.steps(two.write(0, attempts[1], 1, "x", row))
            advance(commit, first)
            advance(write, second)
            for steps, count in ((commit, 1), (write, 100), (commit, 100)):
                advance(steps, count)
            decided += scene.record(one)["epoch"] == 0
            assert scene.seen.total() >= decided, f"lost after {first} and {second} commands"
    assert 0 < decided < 3 * len(seconds)


def test_rows_of_a_former_attempt_give_way_alone(scene: Scene) -> None:
    row = NewMessage("id", 1)
    one, two = scene.query("one", ""), scene.query("two", "")
    scene.write(one, "a", row)
    attempt = scene.run(one.join("b", 0))
    scene.write(two, "c", row)
    assert scene.run(one.commit("b", 0, attempt, {})) == 0


@pytest.mark.usefixtures("stale")
def test_new_query_of_a_stage_shows_what_was_decided(scene: Scene) -> None:
    """The checkpoint was deleted. The source may acknowledge before it reads on."""
    scene.decide("a", 3)
    scene.run(scene.query("query-2").join("b", 0))
    scene.consume()
    assert scene.seen == ONCE


def test_foreign_id_and_taken_key_are_as_for_a_push(client: Client, scene: Scene) -> None:
    client.queue("other").push(1, id="theirs")
    scene.queue.push(0, key="k")
    attempt = scene.run(scene.writes.join("a", 0))
    with pytest.raises(DuplicateKey, match="never in queue"):
        scene.run(scene.writes.write(0, attempt, 1, "x", [NewMessage("theirs", 1)]))
    assert scene.run(scene.writes.write(0, attempt, 2, "y", TASKS[0])) == 2
    assert scene.run(scene.writes.commit("a", 0, attempt, {"y": 2})) == 1
    assert scene.hidden() == 0
    assert scene.run(scene.writes.write(1, attempt, 3, "z", [NewMessage("s~1", 1)])) == 0


def test_hidden_rows_are_no_messages_and_do_not_expire(client: Client, scene: Scene) -> None:
    attempt = scene.write(scene.writes, "a", *TASKS[0])
    assert scene.queue.counts().total == 0
    assert scene.queue.get("s~1") is None
    assert [each.name for each in client.queues()] == [scene.queue.name]
    (row,) = client.database["pyqueue"].find({"_id": "s~1"})
    assert "expires" not in row
    scene.run(scene.writes.commit("a", 0, attempt, {"x": 2}))
    (row,) = client.database["pyqueue"].find({"_id": "s~1"})
    assert not {"staged", "attempt", "processed"} & row.keys()
    copy = pickle.loads(pickle.dumps(scene.writes))
    assert (copy.name, copy.target.queue) == (scene.writes.name, scene.queue.name)
