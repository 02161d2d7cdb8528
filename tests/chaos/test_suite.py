"""The fault suite: that its audit can fail, that its witness and its tools tell the truth, and a short run with each kind of fault."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pymongo
import pytest
from pymongo.errors import BulkWriteError, WriteError
from typer.testing import CliRunner

from pyqueue import Client, ConfigurationError, LeaseLost, Queue, Reservation, Unavailable
from pyqueue.connecting import runner_of
from pyqueue.drivers import _faults, translated
from pyqueue.embedded import find_mongod
from pyqueue.requests import Delete, Find
from tests.chaos import ledger
from tests.chaos import run as faults
from tests.chaos.__main__ import app
from tests.chaos.change_log import note
from tests.chaos.checker import MUST_BE_ZERO, Ledgers, Times, Witnessed, audit
from tests.chaos.conftest import Server
from tests.chaos.nemesis import OF_CLIENTS, OF_SERVERS
from tests.chaos.plot import per_second
from tests.chaos.pop_checker import Circumstances
from tests.chaos.scenario import Story
from tests.chaos.workload import CREW
from tests.conftest import missing
from tests.integration.eventually import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def story() -> Story:
    return Story()


def zero(found: dict[str, Any], *but: str) -> None:
    """Everything that must not happen did not, but for these, each once."""
    assert {name: found[name] for name in (*MUST_BE_ZERO, "refused_though_done")} == {
        name: int(name in but) for name in (*MUST_BE_ZERO, "refused_though_done")
    }, found["wrong"]


# ---- the audit


class TestAudit:
    def test_a_run_in_which_all_is_well(self, story: Story) -> None:
        for id in ("a", "b"):
            story.stored(id)
            story.held(id, f"{id}1")
            story.settled("move", id, f"{id}1")
            story.moved(id, f"{id}1", to="billed")
            story.held(id, f"{id}2", "billed")
        story.settled("rollback", "a", "a2", "billed")
        story.changed("a", token=None, by="a2")
        story.held("a", "a3", "billed", tries=2)
        story.settled("commit", "a", "a3", "billed")
        story.went("a")
        found = story.verdict("b")
        zero(found)
        assert (found["messages"], found["acknowledged"], found["pushed"], found["stored"]) == (
            2,
            2,
            2,
            1,
        )
        assert (found["received"], found["redelivered"], found["settled"], found["refused"]) == (
            5,
            1,
            3,
            0,
        )
        assert (found["claims_undone"], found["errors"]) == (0, {})

    # lost

    def test_an_acknowledged_push_that_was_never_stored(self, story: Story) -> None:
        story.pushed("a")
        zero(story.verdict(), "lost")

    def test_an_acknowledged_content_that_was_never_stored(self, story: Story) -> None:
        """A push that replaces a message is acknowledged with that one's id."""
        story.stored("a", "states")
        story.called("push", "states", ["new"], "ok", ["a"])
        zero(story.verdict("a"), "lost")
        story.changed("a", n="new")
        zero(story.verdict("a"))

    def test_a_message_that_is_not_there_in_the_end(self, story: Story) -> None:
        story.stored("a")
        zero(story.verdict(), "lost")
        zero(story.verdict("a"))

    def test_a_message_that_was_deleted_while_nobody_held_it(self, story: Story) -> None:
        story.stored("a")
        story.went("a")
        zero(story.verdict(), "lost")

    def test_a_message_that_was_deleted_while_its_holder_wanted_something_else(
        self, story: Story
    ) -> None:
        story.stored("a")
        story.held("a", "1")
        story.settled("move", "a", "1", outcome="unknown")
        story.went("a")
        zero(story.verdict(), "lost")

    def test_a_popped_message_that_nobody_got(self, story: Story) -> None:
        story.stored("a", "events")
        story.went("a")
        story.called("pop", "events", 1, "ok", [])
        zero(story.verdict(), "lost")

    @pytest.mark.parametrize("outcome", [None, "unknown"])
    def test_a_popped_message_whose_consumer_died_or_heard_nothing(
        self, story: Story, outcome: str | None
    ) -> None:
        story.stored("a", "events")
        story.went("a")
        story.called("pop", "events", 1, outcome)
        zero(story.verdict())
        story.stored("b", "events")
        story.went("b")
        zero(story.verdict(), "lost")  # one such pop cannot have taken two

    def test_single_pops_of_which_one_was_answered(self, story: Story) -> None:
        """They share nothing, unlike those of a batch."""
        for id in "ab":
            story.stored(id, "events")
            story.went(id)
        story.called("pop", "events", 1, "ok", ["a"])
        story.called("pop", "events", 1, "unknown")
        zero(story.verdict())

    def test_calls_are_held_against_what_they_can_have_taken(self, story: Story) -> None:
        """The large call took the batch, as only its process can have; so the small one took the single message."""
        for id in "abc":
            story.stored(id, "events")
        for id in "ab":
            story.changed(id, token="1", owner="consumer-1.1")
        for id in "abc":
            story.went(id)
        story.called("pop", "events", 2, "unknown", who="consumer-1.1")
        story.called("pop", "events", 1, "unknown", who="consumer-2.1")
        zero(story.verdict())

    @pytest.mark.parametrize("outcome", [None, "unknown"])
    def test_a_popped_message_whose_consumer_died_or_gave_up_at_another_time(
        self, story: Story, outcome: str | None
    ) -> None:
        story.called("pop", "events", 50, outcome, at=10.0)
        killed = {"consumer-1.1": 11.0}
        story.stored("a", "events")
        story.went("a", at=30.0)
        zero(story.verdict(killed=killed))
        story.stored("b", "events")
        story.went("b", at=40.0)
        zero(story.verdict(killed=killed), "lost")

    def test_a_message_that_is_pushed_and_popped_again_within_a_moment(self, story: Story) -> None:
        """Of three pops the first one's answer was lost: it is of that one that nobody heard, whoever got the others."""
        for token, who, at, outcome in (
            ("1", 1, 5.0, "unknown"),
            ("2", 2, 5.3, "ok"),
            ("3", 1, 5.6, "ok"),
        ):
            story.called(
                "pop", "events", 2, outcome, ["a", "b"], who=f"consumer-{who}.1", at=at - 0.4
            )
            for id in "ab":
                story.pushed(id, "events")
                story.came(id, "events", pushed=int(token))
                story.changed(id, token=token, owner=f"consumer-{who}.1")
                story.went(id, at=at)
        zero(story.verdict())

    def test_a_batch_that_was_popped_for_another_process(self, story: Story) -> None:
        """What is popped by the batch is claimed before, so it is known by whom."""
        story.called("pop", "events", 50, "unknown", who="consumer-1.1")
        story.stored("a", "events")
        story.changed("a", token="1", owner="consumer-1.1")
        story.went("a")
        zero(story.verdict())
        story.stored("b", "events")
        story.changed("b", token="2", owner="consumer-2.1")
        story.went("b")
        zero(story.verdict(), "lost")

    @pytest.mark.parametrize("outcome", [None, "unknown"])
    def test_a_batch_of_which_others_got_their_part(
        self, story: Story, outcome: str | None
    ) -> None:
        """Callers of one process share a claim: if one was answered, so were all, unless the process was killed."""
        for id in "ab":
            story.stored(id, "events")
            story.changed(id, token="1", owner="consumer-1.1")
        for id in "ab":
            story.went(id)
        story.called("pop", "events", 1, "ok", ["a"])
        story.called("pop", "events", 1, outcome)
        zero(story.verdict(), *(["lost"] if outcome else []))

    @pytest.mark.parametrize("outcome", ["ok", "unknown"])
    def test_a_claim_that_lapsed_before_another_popped_one_by_one(
        self, story: Story, outcome: str
    ) -> None:
        """A single pop takes what is there, and writes nothing of its own into it before."""
        story.stored("a", "events")
        story.changed("a", token="1", owner="consumer-1.1")
        story.went("a")
        story.called("pop", "events", 50, "ok", [], who="consumer-1.1")
        story.called("pop", "events", 1, outcome, ["a"], who="consumer-2.1")
        zero(story.verdict())

    def test_what_a_cancelled_pop_took_is_given_back(self, story: Story) -> None:
        story.stored("a", "events")
        story.went("a")
        story.called("pop", "events", 1, "cancelled")
        zero(story.verdict(), "lost")
        story.came("a", "events")
        zero(story.verdict("a"))
        story.went("a")
        story.called("pop", "events", 1, "ok", ["a"])
        zero(story.verdict())

    @pytest.mark.parametrize(
        ("known", "excused"),
        [
            ({"killed": {"consumer-1.1": 102.0}}, True),
            ({"killed": {"consumer-1.1": 110.0}}, False),
            ({"killed": {"consumer-2.1": 102.0}}, False),
            ({"broken": [(102.0, 103.0)]}, True),
            ({"broken": [(110.0, 111.0)]}, False),
            ({"broken": [(80.0, 90.0)]}, False),
        ],
    )
    def test_what_a_cancelled_pop_took_and_could_not_give_back(
        self, story: Story, known: dict[str, Any], excused: bool
    ) -> None:
        """Its process was killed, or the servers were away."""
        story.stored("a", "events")
        story.changed("a", token="1", owner="consumer-1.1")
        story.went("a", at=100.0)
        story.called("pop", "events", 1, "cancelled", at=99.0)
        zero(story.verdict(**known), *([] if excused else ["lost"]))

    # settled twice

    def test_a_message_that_left_its_queue_twice(self, story: Story) -> None:
        story.stored("a", "billed")
        story.held("a", "1", "billed")
        story.settled("commit", "a", "1", "billed")
        story.settled("commit", "a", "1", "billed")
        story.went("a")
        found = story.verdict()
        assert found["settled_twice"] == 2  # by the claim, and by the message
        assert not any(found[name] for name in MUST_BE_ZERO if name != "settled_twice")

    def test_a_message_that_was_pushed_again_may_be_settled_again(self, story: Story) -> None:
        """A push of unknown outcome is repeated; when it was committed meanwhile, it is a new message."""
        story.pushed("a", "billed", "unknown")
        for token in "12":
            story.came("a", "billed", pushed=int(token))
            story.held("a", token, "billed")
            story.settled("commit", "a", token, "billed")
            story.went("a")
        story.pushed("a", "billed")
        zero(story.verdict())

    def test_a_message_that_two_got_by_pops(self, story: Story) -> None:
        story.stored("a", "events")
        story.went("a")
        for who in ("consumer-1.1", "consumer-2.1"):
            story.called("pop", "events", 1, "ok", ["a"], who=who)
        zero(story.verdict(), "settled_twice")

    def test_a_message_that_was_pushed_again_may_be_popped_again(self, story: Story) -> None:
        story.pushed("a", "events", "unknown")
        for pushed in (1, 2):
            story.came("a", "events", pushed=pushed)
            story.went("a")
            story.called("pop", "events", 1, "ok", ["a"])
        story.pushed("a", "events")
        zero(story.verdict())

    # effects of who held it no longer

    def test_a_settle_that_succeeded_after_another_claim(self, story: Story) -> None:
        story.stored("a", "billed")
        story.held("a", "1", "billed")
        story.held("a", "2", "billed", tries=2)
        story.settled("commit", "a", "1", "billed")
        story.went("a")
        story.settled("commit", "a", "2", "billed", outcome=None)
        zero(story.verdict(), "fenced_effects")

    def test_the_database_alone_shows_who_moved_what_another_held(self, story: Story) -> None:
        """Whatever clients say, or if they say nothing."""
        story.stored("a")
        story.held("a", "1")
        story.held("a", "2", tries=2)
        story.moved("a", by="1")
        zero(story.verdict("a"), "fenced_effects")

    def test_the_database_alone_shows_who_moved_what_nobody_held(self, story: Story) -> None:
        story.stored("a")
        story.held("a", "1")
        story.moved("a", by="1")
        story.changed("a", q="billed", by="1")
        zero(story.verdict("a"), "fenced_effects")

    def test_a_settle_of_what_was_replaced_meanwhile(self, story: Story) -> None:
        story.stored("a", "states")
        story.held("a", "1", "states")
        story.changed("a", token=None, n="new")
        story.settled("commit", "a", "1", "states")
        zero(story.verdict("a"), "fenced_effects")

    def test_a_former_holder_that_is_refused(self, story: Story) -> None:
        story.stored("a")
        story.held("a", "1")
        story.held("a", "2", tries=2)
        story.settled("move", "a", "1", outcome="refused")
        story.settled("move", "a", "2")
        story.moved("a", by="2")
        found = story.verdict("a")
        zero(found)
        assert found["refused"] == 1

    # settles that were acknowledged, and are not there

    @pytest.mark.parametrize("op", ["commit", "move", "rollback", "release", "extend"])
    def test_an_acknowledged_settle_of_a_claim_that_is_not_there(
        self, story: Story, op: str
    ) -> None:
        """A fail-over undid the claim. Nobody settles by it then."""
        story.stored("a")
        story.received("a", "1")
        found = story.verdict("a")
        zero(found)
        assert found["claims_undone"] == 1
        story.settled(op, "a", "1")
        zero(story.verdict("a"), "undone")

    def test_an_acknowledged_settle_that_is_not_there(self, story: Story) -> None:
        story.stored("a")
        story.held("a", "1")
        story.settled("move", "a", "1")
        zero(story.verdict("a"), "undone")

    # what nobody knows

    @pytest.mark.parametrize("outcome", [None, "unknown", "cancelled", "QueueError: something"])
    @pytest.mark.parametrize("done", [True, False])
    def test_an_unknown_outcome_is_neither_an_error_nor_a_success(
        self, story: Story, outcome: str | None, done: bool
    ) -> None:
        story.pushed("a", outcome=outcome)
        story.stored("b")
        story.held("b", "1")
        story.settled("move", "b", "1", outcome=outcome)
        if done:
            story.came("a")
            story.moved("b", by="1")
        found = story.verdict(*("ab" if done else "b"))
        zero(found)
        assert (found["messages"], found["settled"]) == (1, 0)
        assert sum(found["errors"].values()) == (2 if outcome and ":" in outcome else 0)

    def test_a_settle_that_was_refused_and_done(self, story: Story) -> None:
        story.stored("a")
        story.held("a", "1")
        story.settled("move", "a", "1", outcome="refused")
        story.moved("a", by="1")
        zero(story.verdict("a"), "refused_though_done")

    def test_a_settle_that_was_repeated_may_be_refused_though_it_was_done(
        self, story: Story
    ) -> None:
        story.stored("a")
        story.held("a", "1")
        story.settled("move", "a", "1", outcome="unknown")
        story.moved("a", by="1")
        story.settled("move again", "a", "1", outcome="refused")
        zero(story.verdict("a"))

    def test_of_a_batch_that_was_refused_the_others_are_settled(self, story: Story) -> None:
        for id in "ab":
            story.stored(id, "billed")
            story.held(id, "1", "billed")
        story.claimed("b", "2")
        story.called("commit", "billed", {"1": ["a", "b"]}, "refused", [{"1": ["b"]}, {}])
        story.went("a")
        found = story.verdict("b")
        zero(found)
        assert (found["settled"], found["refused"]) == (1, 1)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text('["call",1,0.5,"push","orders",["a"]]\n["heard",1,0.')
    assert list(ledger.read(tmp_path / "ledger")) == [["call", 1, 0.5, "push", "orders", ["a"]]]


def test_recovery_counts_from_the_fault_and_outages_leave_out_who_was_suspended() -> None:
    times = Times(
        pushes=[(0.0, 9.0, 1), (2.0, 8.0, 1), (3.0, 5.0, 1), (6.0, 7.0, 1)],
        answered={
            "producer-1.1": [1.0, 2.0, 7.5],
            "consumer-1.1": [1.0, 9.0, 10.0],
            "mover-1.1": [4.0, 6.0],
        },
    )
    assert times.recovered(1.0) == {"push": 4.0, "settle": None}
    assert times.recovered(5.0) == {"push": 2.0, "settle": None}
    assert times.outage("producer", {}) == 5.5
    assert times.outage("mover consumer", {}) == 8.0
    assert times.outage("mover consumer", {"consumer-1.1": [(2.0, 5.0)]}) == 2.0
    assert per_second([(0.0, 0.5, 10), (1.0, 1.5, 20), (1.0, 1.9, 5)], 0.0, 2.0) == [
        (0.0, 10.0),
        (1.0, 25.0),
        (2.0, 0.0),
    ]


# ---- the witness


def test_the_witness_notes_what_happened(
    client: Client, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    """Each operation leaves the line that the audit reads, and who settled is in what is stored."""
    orders, parsed, states = (client.queue(name) for name in ("orders", "parsed", "states"))
    packed = client.queue("packed", history=60)
    collection = client.database[client.namespace]
    client.queues()  # the collection is there
    marks = itertools.count()
    with mongo[client.database.name][client.namespace].watch() as stream:

        def noted(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            operation(*args, **options)
            mark = f"~mark-{next(marks)}"
            collection.insert_one({"_id": mark, "record": True})
            events = itertools.takewhile(lambda event: event["documentKey"]["_id"] != mark, stream)
            return [line for line in map(note, events) if line is not None]

        def take(queue: Queue[Any], id: str) -> tuple[Reservation[Any], str]:
            got: list[Any] = []
            lines = noted(lambda: got.append(queue.reserve(0)))
            (held,) = got
            assert lines == [["set", id, {"token": held.token, "owner": runner_of(client).owner}]]
            return held, held.token

        def moved(**put: Any) -> list[Any]:
            return [["set", "a", {"token": None, **put}]]

        payload: dict[str, Any] = {"n": "a", "trail": []}
        (line,) = noted(orders.push, payload, id="a")
        assert line[:-1] == ["in", "a", "orders", "a"]
        assert abs(line[-1] / 1000 - time.time()) < 5
        held, _ = take(orders, "a")
        assert noted(orders.extend, held) == []
        assert noted(orders.release, held) == moved()
        held, token = take(orders, "a")
        assert noted(orders.rollback, held, delay=0, error=f"by {token}") == moved(by=token)
        # The first of the trail, a later one, and a payload that is new as a whole.
        held, token = take(orders, "a")
        update = {"$push": {"trail": ["orders", token]}}
        assert noted(orders.move, held, to=parsed, update=update) == moved(q="parsed", by=token)
        held, token = take(parsed, "a")
        update = {"$push": {"trail": ["parsed", token]}}
        assert noted(parsed.move, held, to=orders, update=update) == moved(q="orders", by=token)
        held, token = take(orders, "a")
        payload = {**held.payload, "trail": [*held.payload["trail"], ["orders", token]]}
        assert noted(orders.move, held, to=packed, payload=payload) == moved(
            q="packed", n="a", by=token
        )
        held, token = take(packed, "a")
        ((_, _, put),) = noted(packed.commit, held, payload={"trail": [["packed", token]]})
        assert put.pop("token") not in (None, token)
        assert put == {"processed": True, "by": token}

        (line,) = noted(states.push, {"n": "1", "trail": []}, key="k", id="s")
        assert line[:-1] == ["in", "s", "states", "1"]
        again = {"key": "k", "on_duplicate": "replace"}
        assert noted(states.push, {"n": "2", "trail": []}, **again) == [["set", "s", {"n": "2"}]]
        take(states, "s")
        assert noted(states.push, {"n": "3", "trail": []}, **again) == [
            ["set", "s", {"n": "3", "token": None}]
        ]
        held, _ = take(states, "s")
        assert noted(states.bury, held) == [
            ["set", "s", {"q": "states.dead", "token": None, "dead": True}]
        ]
        ((out, id, at),) = noted(client.queue("states.dead").pop, 0)
        assert (out, id) == ("out", "s")
        assert abs(at - time.monotonic()) < 5


# ---- the servers and the network


def _mongod() -> None:
    try:
        find_mongod()
    except ConfigurationError as error:
        missing(str(error))


def test_a_short_run_with_each_kind_of_fault(tmp_path: Path) -> None:
    _mongod()
    plot, kept = tmp_path / "plot.svg", tmp_path / "kept"
    result = faults.run(
        0, seed=1, at_least=1, haste=0.25, pause=(0.1, 0.3), rate=100, plot=plot, keep=kept
    )
    assert result["kinds"] == dict.fromkeys([*OF_SERVERS, *OF_CLIENTS], 1) | result["kinds"]
    zero(result)
    assert faults.is_good(result)
    assert result["messages"] > 500
    # Each of them did something: where that can be counted, more than nothing.
    counted = [
        int(times)
        for event in result["events"]
        for times in re.findall(r"(\d+) times", event["what"])
    ]
    assert len(counted) >= 9
    assert all(counted)
    assert result["refused"] > 0
    drawing = plot.read_text()
    ElementTree.fromstring(drawing)
    assert all(kind in drawing for kind in result["kinds"])
    # What it kept can be judged again.
    ledgers = Ledgers({path.stem: ledger.read(path) for path in kept.glob("*.ledger")})
    known = Circumstances(**json.loads((kept / "known.json").read_text()))
    assert len(known.killed) >= 3
    again = audit(ledgers, Witnessed(ledger.read(kept / "witness")), [], known)
    assert {name: again[name] for name in ("messages", "pushed", "settled")} == {
        name: result[name] for name in ("messages", "pushed", "settled")
    }


def is_load(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()[-1:] == ["load"]
    return False


def test_nothing_outlives_the_program_however_it_ends(tmp_path: Path) -> None:
    """Not even what is suspended when it is killed, and so can hear of nothing."""
    _mongod()
    command = [sys.executable, "-m", "tests.chaos", "--minutes", "1", "--seed", "1"]
    with (tmp_path / "errors").open("w") as errors:
        program = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=errors,
            stderr=errors,
        )
    try:
        until(
            lambda: (
                sum(bool(path.stat().st_size) for path in tmp_path.glob("*/*.ledger")) == len(CREW)
            )
        )
        children = psutil.Process(program.pid).children(recursive=True)
        assert [each.name() for each in children].count("mongod") == 3
        load = [each for each in children if is_load(each)]
        assert len(load) == len(CREW)
        for each in load:
            each.suspend()
    finally:
        program.kill()
        program.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    for each in alive:
        each.kill()
    assert alive == []


# ---- the command


def result_with(**found: Any) -> dict[str, Any]:
    """A result as ``run`` gives it, of a made-up run."""
    story = Story()
    story.stored("a")
    return {
        "seed": 7,
        "minutes": 0.5,
        "seconds": 30.0,
        "faults": 1,
        "kinds": {"primary killed": 1},
        **story.verdict("a"),
        "unfinished": 0,
        "longest_outage": {"producer": 1.0, "consumer": 2.0},
        "recovery": {"primary killed": {"push": {"median": 1.5, "longest": 1.5}}},
        "events": [],
        **found,
    }


@pytest.mark.parametrize("name", [None, *MUST_BE_ZERO])
def test_the_exit_status_is_1_if_anything_happened_that_must_not(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    given: list[Any] = []

    def run(minutes: float, seed: int, *, plot: Path | None, keep: Path | None) -> dict[str, Any]:
        given.extend([minutes, seed, plot, keep])
        return result_with(**({} if name is None else {name: 1, "wrong": {name: ["a: something"]}}))

    monkeypatch.setattr(faults, "run", run)
    told = CliRunner().invoke(
        app,
        [
            "--minutes",
            "0.5",
            "--seed",
            "7",
            "--plot",
            "a.svg",
            "--keep",
            "kept",
            "--json",
        ],
    )
    assert told.exit_code == (name is not None)
    line = json.loads(told.stdout.splitlines()[-1])
    assert {
        "lost",
        "settled_twice",
        "fenced_effects",
        "faults",
        "messages",
        "kinds",
        "seed",
        "minutes",
    } <= set(line)
    assert given == [0.5, 7, Path("a.svg"), Path("kept")]
    shown = CliRunner().invoke(app, ["--seed", "7"])
    assert shown.exit_code == (name is not None)
    assert ("WRONG" in shown.stdout) == (name is not None)
    assert "primary killed" in shown.stdout


def test_errors_that_nobody_thought_of_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    faults.show(result_with(errors={"TypeError: [no]": 3}))
    assert "error, 3 times: TypeError: [no]\n" in capsys.readouterr().out


def test_a_fault_after_which_nothing_was_called_has_no_recovery() -> None:
    events = [{"kind": "clients cut off", "at": 11.0, "seconds": 1.0, "what": ""}]
    told = faults._timed(Times(pushes=[(1.0, 2.0, 1)]), events, 10.0, 12.0, None, 1)
    assert told["recovery"] == {"clients cut off": {}}
    assert told["events"][0]["recovered"] == {"push": None, "settle": None}
    assert told["events"][0]["at"] == 1.0


@pytest.mark.slow
def test_the_command_for_two_minutes(tmp_path: Path) -> None:
    _mongod()
    command = [
        sys.executable,
        "-m",
        "tests.chaos",
        "--minutes",
        "2",
        "--seed",
        "1",
        "--json",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    result = json.loads(done.stdout.splitlines()[-1])
    zero(result)
    assert result["faults"] >= 15
    assert len(result["kinds"]) >= 8


# ---- what the suite found


def test_a_batch_pop_whose_claim_was_undone_hands_nothing_out(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fail-over can undo a claim, which waits for the primary alone; then another pops the messages."""
    queue = client.queue("jobs")
    ids = queue.push_many(range(4))
    elsewhere: list[Any] = []
    driver = runner_of(client).open()
    send = type(driver)._send

    def undone_before(self: Any, request: Any) -> Any:
        if isinstance(request, Delete) and self is driver and not elsewhere:
            undo = {
                "$set": {"when": driver.clock.now()},
                "$unset": {"token": "", "owner": "", "reserved": ""},
            }
            client.database[client.namespace].update_many({"token": {"$exists": True}}, undo)
            with Client(url) as other:
                elsewhere.extend(other.queue("jobs").pop_many(4, timeout=5))
        return send(self, request)

    monkeypatch.setattr(type(driver), "_send", undone_before)
    here = queue.pop_many(4, timeout=0)
    assert [each.id for each in elsewhere] == ids
    assert [each.id for each in here] == []


@pytest.mark.parametrize(("command", "settle"), [("delete", "commit"), ("update", "release")])
def test_a_step_down_while_a_settle_waits_is_unavailable(
    server: Server, database: str, command: str, settle: str
) -> None:
    """The write is done on a primary that is none any more; whether it stays nobody knows."""
    failure = {
        "code": 189,
        "codeName": "PrimarySteppedDown",
        "errmsg": "stepped down while waiting for replication",
    }
    # The driver looks for the primary again, and this one has nothing new to say until the next heartbeat.
    with Client(server.url(database) + "&heartbeatFrequencyMS=500") as client:
        queue = client.queue("jobs")
        queue.push_many(range(4))
        held = queue.reserve_many(4, timeout=0)
        server.fail(1, command, writeConcernError=failure)
        with pytest.raises(Unavailable) as unknown:
            getattr(queue, settle)(*held)
        assert server.spent()
        assert unknown.value.ids == [each.id for each in held]
        with pytest.raises(LeaseLost):
            getattr(queue, settle)(*held)


def test_what_a_batch_moved_is_not_called_lost_though_another_took_it_on(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three was lost, so the batch looks which; one that it moved is in other hands by then."""
    source, target = client.queue("source"), client.queue("target")
    source.push_many(range(3))
    held = source.reserve_many(3, timeout=0)
    client.database[client.namespace].update_one(
        {"_id": held[0].id}, {"$set": {"token": "another's"}}
    )
    driver = runner_of(client).open()
    send = type(driver)._send

    def taken_on_before(self: Any, request: Any) -> Any:
        if (
            self is driver
            and isinstance(request, Find)
            and request.filter == {"_id": {"$in": [each.id for each in held]}}
        ):
            with Client(url) as other:
                assert other.queue("target").reserve(5) is not None
        return send(self, request)

    monkeypatch.setattr(type(driver), "_send", taken_on_before)
    with pytest.raises(LeaseLost) as refused:
        source.move(*held, to=target)
    assert [each.id for each in refused.value.lost] == [held[0].id]
    assert target.counts().total == 2


@pytest.mark.parametrize("code", [10107, 189, 11600, 11602, 91])
def test_a_write_error_of_an_election_is_unavailable(code: int) -> None:
    """A step-down in the middle of a write of several documents is told as the error of one of them."""
    assert isinstance(translated(WriteError("Not primary while writing", code)), Unavailable)
    (fault,) = (
        _faults(
            BulkWriteError({"writeErrors": [{"index": 0, "code": code, "errmsg": "Not primary"}]})
        )
        or []
    )
    assert isinstance(fault.error, Unavailable)
