"""The checker finds each kind of loss in invented runs, and nothing in good runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.checker import MUST_BE_ZERO, Times
from tests.chaos.plot import per_second
from tests.chaos.pop_checker import Disturbances, Popped, Returned, UnknownPop, check_pops
from tests.chaos.scenario import Scenario, expect_only


def test_checker_accepts_a_good_run(scenario: Scenario) -> None:
    for id in ("a", "b"):
        scenario.stored(id).held(id, f"{id}1").settled("move", id, f"{id}1")
        scenario.moved(id, f"{id}1", to="billed").held(id, f"{id}2", "billed")
    scenario.settled("rollback", "a", "a2", "billed").updated("a", token=None, by="a2")
    scenario.held("a", "a3", "billed", tries=2).settled("commit", "a", "a3", "billed").deleted("a")
    found = scenario.check("b")
    expect_only(found)
    expected = {
        "messages": 2,
        "acknowledged": 2,
        "pushed": 2,
        "stored": 1,
        "received": 5,
        "redelivered": 1,
        "settled": 3,
        "refused": 0,
        "claims_undone": 0,
        "errors": 0,
    }
    assert {name: found[name] for name in expected} == expected


# ---- lost


def test_checker_push_never_stored_is_lost(scenario: Scenario) -> None:
    scenario.pushed("a")
    expect_only(scenario.check(), "lost")


def test_checker_content_never_stored_is_lost(scenario: Scenario) -> None:
    """A push that replaces a message returns the id of that message."""
    scenario.stored("a", "states").called("push", "states", ["new"], "ok", ["a"])
    expect_only(scenario.check("a"), "lost")
    scenario.updated("a", n="new")
    expect_only(scenario.check("a"))


def test_checker_message_missing_at_the_end_is_lost(scenario: Scenario) -> None:
    scenario.stored("a")
    expect_only(scenario.check(), "lost")
    expect_only(scenario.check("a"))


def test_checker_end_that_is_no_longer_kept_is_not_lost(scenario: Scenario) -> None:
    """The server may delete it after the log has ended."""
    scenario.stored("a").held("a", "1").settled("commit", "a", "1")
    scenario.updated("a", token="2", processed=True, by="1")
    expect_only(scenario.check())


def test_checker_message_deleted_unclaimed_is_lost(scenario: Scenario) -> None:
    scenario.stored("a").deleted("a")
    expect_only(scenario.check(), "lost")


def test_checker_message_deleted_instead_of_moved_is_lost(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").settled("move", "a", "1", outcome="unknown").deleted("a")
    expect_only(scenario.check(), "lost")


def test_checker_popped_message_without_receiver_is_lost(scenario: Scenario) -> None:
    scenario.popped("a").called("pop", "events", 1, "ok", [])
    expect_only(scenario.check(), "lost")


@pytest.mark.parametrize("outcome", [None, "unknown"])
def test_checker_unknown_pop_excuses_one_message(scenario: Scenario, outcome: str | None) -> None:
    scenario.popped("a").called("pop", "events", 1, outcome)
    expect_only(scenario.check())
    scenario.popped("b")
    expect_only(scenario.check(), "lost")  # one pop of one message cannot have taken two


def test_checker_single_pops_share_no_claim(scenario: Scenario) -> None:
    """An answer to one of them says nothing about the other, unlike in a batch."""
    scenario.popped("a").popped("b")
    scenario.called("pop", "events", 1, "ok", ["a"]).called("pop", "events", 1, "unknown")
    expect_only(scenario.check())


def test_checker_matches_pops_that_fit_the_claim(scenario: Scenario) -> None:
    """Only the large call can have taken the batch, so the small one took the single message."""
    scenario.popped("a", "1").popped("b", "1").popped("c")
    scenario.called("pop", "events", 2, "unknown", process="consumer-1.1")
    scenario.called("pop", "events", 1, "unknown", process="consumer-2.1")
    expect_only(scenario.check())


@pytest.mark.parametrize("outcome", [None, "unknown"])
def test_checker_unknown_pop_excuses_only_its_time(scenario: Scenario, outcome: str | None) -> None:
    scenario.called("pop", "events", 50, outcome, at=10.0)
    killed = {"consumer-1.1": 11.0}
    scenario.popped("a", at=30.0)
    expect_only(scenario.check(killed=killed))
    scenario.popped("b", at=40.0)
    expect_only(scenario.check(killed=killed), "lost")


def test_checker_tells_quickly_repeated_pops_apart(scenario: Scenario) -> None:
    """Of three pops of the same messages only the first one has no answer."""
    for token, number, at, outcome in (
        ("1", 1, 5.0, "unknown"),
        ("2", 2, 5.3, "ok"),
        ("3", 1, 5.6, "ok"),
    ):
        scenario.called(
            "pop", "events", 2, outcome, ["a", "b"], process=f"consumer-{number}.1", at=at - 0.4
        )
        for id in "ab":
            scenario.pushed(id, "events").inserted(id, "events", pushed=int(token))
            scenario.updated(id, token=token, owner=f"consumer-{number}.1").deleted(id, at=at)
    expect_only(scenario.check())


def test_checker_batch_pop_belongs_to_its_claim_owner(scenario: Scenario) -> None:
    """A batch pop claims its messages first, so the change log shows its process."""
    scenario.called("pop", "events", 50, "unknown", process="consumer-1.1")
    scenario.popped("a", "1")
    expect_only(scenario.check())
    scenario.popped("b", "2", "consumer-2.1")
    expect_only(scenario.check(), "lost")


def test_checker_moves_excuses_where_they_are_needed() -> None:
    """The first message fits both calls, and the second one only the call that the first takes."""
    popped = {"x": [Popped(1.0, "t1", "p2")], "y": [Popped(2.0, "t2", "p3")]}
    one = UnknownPop("p1", 0.5, 1, "unknown", 5.0, single=True)
    many = UnknownPop("p2", 0.5, 50, "unknown", 5.0, single=False)
    for calls in ([one, many], [many, one]):
        lost, _, excuses = check_pops(popped, {}, calls, Disturbances())
        assert (lost, excuses["unknown"]) == ([], {"used": 2, "allowed": 51})
    assert check_pops(popped, {}, [one], Disturbances())[0] == ["y"]
    assert check_pops(popped, {}, [many], Disturbances())[0] == ["y"]


@pytest.mark.parametrize("outcome", [None, "unknown"])
def test_checker_shared_claim_answers_all_callers(scenario: Scenario, outcome: str | None) -> None:
    """Callers of one process share a claim. If one got an answer, all did, unless it was killed."""
    scenario.popped("a", "1").popped("b", "1")
    scenario.called("pop", "events", 1, "ok", ["a"]).called("pop", "events", 1, outcome)
    expect_only(scenario.check(), *(["lost"] if outcome else []))


def test_checker_later_pop_answers_no_earlier_caller() -> None:
    """A power cut undid the deletion of "y", and the process popped it alone when it was free."""
    popped = {"x": [Popped(1.0, "t", "p1")], "y": [Popped(9.0, "t", "p1")]}
    returned = {"y": [Returned(9.1, "p1", True)]}
    for ended, lost in ((1.2, []), (9.5, ["x"])):
        call = UnknownPop("p1", 0.5, 50, "unknown", ended, single=False)
        assert check_pops(popped, returned, [call], Disturbances())[0] == lost


@pytest.mark.parametrize("outcome", ["ok", "unknown"])
def test_checker_single_pop_may_take_a_lapsed_claim(scenario: Scenario, outcome: str) -> None:
    """A single pop makes no claim, so the message still shows the lapsed one."""
    scenario.popped("a", "1")
    scenario.called("pop", "events", 50, "ok", [], process="consumer-1.1")
    scenario.called("pop", "events", 1, outcome, ["a"], process="consumer-2.1")
    expect_only(scenario.check())


@pytest.mark.parametrize(
    ("process", "began", "lost"),
    [("p1", 50.1, []), ("p2", 49.9, []), ("p1", 49.9, ["y"])],  # the last may share the claim
)
def test_checker_single_pop_shares_no_lapsed_claim(
    process: str, began: float, lost: list[str]
) -> None:
    """A claim lapsed, and its messages are popped one by one. One reply is lost.

    The answers to the rest of these pops say nothing about that one.
    """
    popped = {id: [Popped(at, "t", "p1")] for id, at in (("x", 50.0), ("y", 50.2))}
    returned = {"x": [Returned(50.1, "p1", True)]}
    call = UnknownPop(process, began, 1, "unknown", 58.0, single=True)
    assert check_pops(popped, returned, [call], Disturbances())[0] == lost


def test_checker_cancelled_pop_must_give_back(scenario: Scenario) -> None:
    scenario.popped("a").called("pop", "events", 1, "cancelled")
    expect_only(scenario.check(), "lost")
    scenario.inserted("a", "events")
    expect_only(scenario.check("a"))
    scenario.deleted("a").called("pop", "events", 1, "ok", ["a"])
    expect_only(scenario.check())


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
def test_checker_faults_excuse_a_cancelled_pop(
    scenario: Scenario, known: dict[str, Any], excused: bool
) -> None:
    """Its process was killed, or the servers failed at that time."""
    scenario.popped("a", "1", at=100.0)
    scenario.called("pop", "events", 1, "cancelled", at=99.0)
    expect_only(scenario.check(**known), *([] if excused else ["lost"]))


def test_checker_blames_cancelled_pops_last() -> None:
    """Else the loss of a pop that was cancelled hides among those that faults explain.

    The first message fits both calls. The second one only fits the one that was cancelled, before
    the fault began.
    """
    popped = {"x": [Popped(12.0, "t1", "p1")], "y": [Popped(12.1, "t2", "p2")]}
    unknown = UnknownPop("p1", 11.0, 1, "unknown", 15.0, single=False)
    for began, ended, lost in ((10.0, 12.2, []), (5.0, 8.0, ["y"])):
        calls = [
            unknown,
            *(UnknownPop(p, began, 5, "cancelled", ended, single=False) for p in ("p1", "p2")),
        ]
        found, _, excuses = check_pops(popped, {}, calls, Disturbances(broken=[(12.0, 13.0)]))
        assert found == lost
        assert excuses["unknown"] == {"used": 1, "allowed": 1}
        assert excuses["cancelled"] == (
            {"used": 0, "allowed": 0} if lost else {"used": 1, "allowed": 10}
        )


# ---- settled twice


def test_checker_message_left_twice_is_settled_twice(scenario: Scenario) -> None:
    scenario.stored("a", "billed").held("a", "1", "billed").settled("commit", "a", "1", "billed")
    scenario.settled("commit", "a", "1", "billed").deleted("a")
    found = scenario.check()
    assert found["settled_twice"] == 2  # once for the claim, once for the message
    assert not any(found[name] for name in MUST_BE_ZERO if name != "settled_twice")


def test_checker_repeated_push_may_be_settled_again(scenario: Scenario) -> None:
    """A push is repeated because its outcome was unknown. A committed message is stored anew."""
    scenario.pushed("a", "billed", "unknown")
    for token in "12":
        scenario.inserted("a", "billed", pushed=int(token)).committed("a", token, "billed")
    scenario.pushed("a", "billed")
    expect_only(scenario.check())


def test_checker_message_popped_twice_is_settled_twice(scenario: Scenario) -> None:
    scenario.popped("a")
    for process in ("consumer-1.1", "consumer-2.1"):
        scenario.called("pop", "events", 1, "ok", ["a"], process=process)
    expect_only(scenario.check(), "settled_twice")


def test_checker_repeated_push_may_be_popped_again(scenario: Scenario) -> None:
    scenario.pushed("a", "events", "unknown")
    for pushed in (1, 2):
        scenario.inserted("a", "events", pushed=pushed).deleted("a")
        scenario.called("pop", "events", 1, "ok", ["a"])
    scenario.pushed("a", "events")
    expect_only(scenario.check())


# ---- fenced effects


def test_checker_settle_after_another_claim_is_fenced(scenario: Scenario) -> None:
    scenario.stored("a", "billed").held("a", "1", "billed").held("a", "2", "billed", tries=2)
    scenario.settled("commit", "a", "1", "billed").deleted("a")
    scenario.settled("commit", "a", "2", "billed", outcome=None)
    expect_only(scenario.check(), "fenced_effects")


def test_checker_move_of_another_claim_is_fenced(scenario: Scenario) -> None:
    """The change log alone shows it, whatever the ledgers say."""
    scenario.stored("a").held("a", "1").held("a", "2", tries=2).moved("a", by="1")
    expect_only(scenario.check("a"), "fenced_effects")


def test_checker_move_without_a_claim_is_fenced(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").moved("a", by="1").updated("a", q="billed", by="1")
    expect_only(scenario.check("a"), "fenced_effects")


def test_checker_settle_of_a_replaced_message_is_fenced(scenario: Scenario) -> None:
    scenario.stored("a", "states").held("a", "1", "states").updated("a", token=None, n="new")
    scenario.settled("commit", "a", "1", "states")
    expect_only(scenario.check("a"), "fenced_effects")


def test_checker_counts_a_refused_former_holder(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").held("a", "2", tries=2)
    scenario.settled("move", "a", "1", outcome="refused").settled("move", "a", "2")
    scenario.moved("a", by="2")
    found = scenario.check("a")
    expect_only(found)
    assert found["refused"] == 1


# ---- undone


@pytest.mark.parametrize("op", ["commit", "move", "rollback", "release", "extend"])
def test_checker_settle_of_a_missing_claim_is_undone(scenario: Scenario, op: str) -> None:
    """A fail-over rolled the claim back. A settle with its token must not be acknowledged."""
    scenario.stored("a").received("a", "1")
    found = scenario.check("a")
    expect_only(found)
    assert found["claims_undone"] == 1
    scenario.settled(op, "a", "1")
    expect_only(scenario.check("a"), "undone")


def test_checker_missing_settle_is_undone(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").settled("move", "a", "1")
    expect_only(scenario.check("a"), "undone")


# ---- unknown outcomes and refusals


@pytest.mark.parametrize("outcome", [None, "unknown", "cancelled", "late"])
@pytest.mark.parametrize("done", [True, False])
def test_checker_unknown_outcome_may_be_done_or_not(
    scenario: Scenario, outcome: str | None, done: bool
) -> None:
    scenario.pushed("a", outcome=outcome).stored("b").held("b", "1")
    scenario.settled("move", "b", "1", outcome=outcome)
    if done:
        scenario.inserted("a").moved("b", by="1")
    found = scenario.check(*("ab" if done else "b"))
    expect_only(found)
    assert (found["messages"], found["settled"]) == (1, 0)


def test_checker_unexpected_errors_are_noticed(scenario: Scenario) -> None:
    """Each with its number, and the traceback of the first one."""
    scenario.called("push", "orders", ["a"], "QueueError: it broke", "Traceback: line 7")
    expect_only(found := scenario.check(), "errors")
    line = "1 times: push in orders: QueueError: it broke\nTraceback: line 7"
    assert found["wrong"]["errors"] == [line]
    scenario.called("push", "orders", ["b"], "QueueError: it broke", "Traceback: line 8")
    scenario.logged("pyqueue: a copy was not shown", "")
    found = scenario.check()
    assert (found["errors"], len(found["wrong"]["errors"])) == (3, 2)


@pytest.mark.parametrize(
    ("queue", "wrong"), [("states", []), ("results", []), ("orders", ["errors"])]
)
def test_checker_taken_ids_and_keys_are_expected_in_some_queues(
    scenario: Scenario, queue: str, wrong: list[str]
) -> None:
    scenario.called("push", queue, ["a"], "taken")
    expect_only(scenario.check(), *wrong)


def test_checker_message_may_go_with_its_deleted_queue(scenario: Scenario) -> None:
    """Only while a call deletes the queue, and only in this queue."""
    scenario.stored("a", "brief").deleted("a", at=50.0)
    expect_only(scenario.check(), "lost")
    scenario.called("delete", "brief", None, at=49.0, seconds=2.0)
    expect_only(scenario.check())
    scenario.stored("b", "orders").deleted("b", at=50.0)
    expect_only(scenario.check(), "lost")


def test_checker_counts_settles_refused_though_done(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").settled("move", "a", "1", outcome="refused")
    scenario.moved("a", by="1")
    expect_only(scenario.check("a"), "refused_though_done")


def test_checker_repeated_settle_may_be_refused(scenario: Scenario) -> None:
    scenario.stored("a").held("a", "1").settled("move", "a", "1", outcome="unknown")
    scenario.moved("a", by="1").settled("move again", "a", "1", outcome="refused")
    expect_only(scenario.check("a"))


def test_checker_refused_batch_settles_the_rest(scenario: Scenario) -> None:
    for id in "ab":
        scenario.stored(id, "billed").held(id, "1", "billed")
    scenario.claimed("b", "2")
    scenario.called("commit", "billed", {"1": ["a", "b"]}, "refused", [{"1": ["b"]}, {}])
    scenario.deleted("a")
    found = scenario.check("b")
    expect_only(found)
    assert (found["settled"], found["refused"]) == (1, 1)


# ---- times


def test_times_recovery_and_outages() -> None:
    """Recovery counts from the fault. An outage leaves out the time a process was suspended."""
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


def test_per_second_counts_messages() -> None:
    done = [(0.0, 0.5, 10), (1.0, 1.5, 20), (1.0, 1.9, 5)]
    assert per_second(done, 0.0, 2.0) == [(0.0, 10.0), (1.0, 25.0), (2.0, 0.0)]
