"""The checker finds mistakes with loops, cancels, bulk changes, results, schedules and tries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.chaos.names import ASKS, CHORES, CHORES_DEAD, LOOPS, TICKS
from tests.chaos.nemesis import SCOPES
from tests.chaos.scenario import Scenario, expect_only
from tests.chaos.tick_checker import EVERY_S, SCHEDULE
from tests.chaos.windows import windows_of

# ---- loops


@pytest.mark.parametrize(("bodies", "wrong"), [(1, []), (2, ["settled_twice"])])
def test_checker_claim_of_a_loop_reaches_one_body(
    scenario: Scenario, bodies: int, wrong: list[str]
) -> None:
    scenario.stored("a", LOOPS).claimed("a", "1")
    for number in range(bodies):
        process = f"consumer-{number}.1"
        scenario.called("next", LOOPS, {}, "ok", {"1": {"a": 1}}, process=process)
    expect_only(scenario.check("a"), *wrong)


@pytest.mark.parametrize(
    ("outcome", "result", "done", "wrong"),
    [
        ("ok", {}, True, []),
        ("ok", {}, False, ["undone"]),
        ("refused", [{"1": ["a"]}, {}], False, []),
        ("refused", [{"1": ["a"]}, {}], True, ["refused_though_done"]),
        *(
            (outcome, None, done, [])
            for outcome in (None, "unknown", "cancelled")
            for done in (False, True)
        ),
    ],
)
def test_checker_loop_commits_when_it_asks_again(
    scenario: Scenario, outcome: str | None, result: Any, done: bool, wrong: list[str]
) -> None:
    scenario.stored("a", LOOPS).claimed("a", "1")
    scenario.called("next", LOOPS, {}, "ok", {"1": {"a": 1}})
    scenario.called("next", LOOPS, {"1": ["a"]}, outcome, result)
    if done:
        scenario.deleted("a")
    expect_only(scenario.check(*([] if done else ["a"])), *wrong)


def test_checker_loop_may_commit_again_what_its_body_committed(scenario: Scenario) -> None:
    """The body did not learn whether its commit was carried out, so the loop commits again."""
    scenario.stored("a", LOOPS).claimed("a", "1")
    scenario.called("next", LOOPS, {}, "ok", {"1": {"a": 1}})
    scenario.called("commit", LOOPS, {"1": ["a"]}, "unknown", "the server did not answer")
    scenario.deleted("a")
    scenario.called("next", LOOPS, {"1": ["a"]}, "refused", [{"1": ["a"]}, {}])
    expect_only(scenario.check())


def test_checker_left_loop_must_not_commit(scenario: Scenario) -> None:
    scenario.stored("a", LOOPS).held("a", "1", LOOPS).settled("rollback", "a", "1", LOOPS, None)
    scenario.deleted("a")
    expect_only(scenario.check(), "lost")


@pytest.mark.parametrize(
    ("deleted", "killed", "lapsed"), [(4.0, "", 0), (7.0, "", 1), (7.0, "consumer-1.1", 0)]
)
def test_times_claim_of_a_loop_must_not_lapse(
    scenario: Scenario, deleted: float, killed: str, lapsed: int
) -> None:
    """A message that no body gets is given back, unless the process was killed."""
    scenario.inserted("a", LOOPS).updated("a", token="1", owner="consumer-1.1", at=1.0, when=6.0)
    scenario.deleted("a", at=deleted)
    event = {"kind": "consumer killed", "at": 3.0, "seconds": 0.5, "what": killed}
    assert scenario.check_times(windows_of([event], {}, SCOPES))["lapsed"] == lapsed


# ---- cancels


def ended(scenario: Scenario, at: float, outcome: str = "cancelled") -> None:
    scenario.updated("a", at=at, processed=True, outcome=outcome)


def cancelled(scenario: Scenario, answer: str | None, outcome: str | None = "ok") -> None:
    """A call that cancels the message, from 5.0 to 5.5."""
    scenario.called("cancel", CHORES, ["a"], outcome, answer, at=5.0)


@pytest.mark.parametrize(
    ("outcome", "answer", "at", "wrong"),
    [
        ("ok", "cancelled", 5.2, []),
        ("ok", "cancelled", None, ["undone"]),
        ("ok", "cancelled", 9.0, ["undone"]),
        ("ok", None, 4.0, ["lost"]),  # by no process
        ("ok", None, None, ["undone"]),
        ("unknown", "no answer", 5.2, []),
        ("unknown", "no answer", None, []),
        (None, None, 5.2, []),
        (None, None, 4.0, ["lost"]),
        (None, None, None, []),
    ],
)
def test_checker_cancelled_message_has_ended(
    scenario: Scenario, outcome: str | None, answer: str | None, at: float | None, wrong: list[str]
) -> None:
    scenario.stored("a", CHORES)
    cancelled(scenario, answer, outcome)
    if at is not None:
        ended(scenario, at)
    expect_only(scenario.check("a"), *wrong)


def test_checker_cancelled_message_without_history_is_deleted(scenario: Scenario) -> None:
    scenario.stored("a", CHORES).updated("a", q="billed", when=3.0, due=3.0, at=3.0)
    scenario.called("bulk move", CHORES, None, "ok", [1, 0], at=2.8)
    cancelled(scenario, "cancelled")
    scenario.deleted("a", at=5.2)
    expect_only(scenario.check())


@pytest.mark.parametrize(
    ("received", "lifted", "wrong"),
    [(False, False, []), (True, False, ["undone"]), (True, True, [])],
)
def test_checker_requested_cancel_stops_the_next_delivery(
    scenario: Scenario, received: bool, lifted: bool, wrong: list[str]
) -> None:
    """The next claim ends it, unless it was made ready by hand."""
    scenario.stored("a", CHORES).held("a", "1", CHORES)
    cancelled(scenario, "requested")
    scenario.updated("a", token=None, when=6.0, due=6.0, at=6.0)
    if lifted:
        scenario.called("bulk requeue", CHORES, None, "ok", [1, 0], at=6.3)
        scenario.updated("a", when=6.5, due=6.5, at=6.5)
    scenario.claimed("a", "2", at=8.0)
    if received:
        scenario.received("a", "2", CHORES)
    else:
        scenario.updated("a", token="x", processed=True, outcome="cancelled", at=8.1)
    expect_only(scenario.check("a"), *wrong)


@pytest.mark.parametrize(("outcome", "wrong"), [("refused", []), ("ok", ["undone"])])
def test_checker_holder_of_an_ended_message_is_refused(
    scenario: Scenario, outcome: str, wrong: list[str]
) -> None:
    scenario.stored("a", CHORES).held("a", "1", CHORES)
    cancelled(scenario, "cancelled")
    scenario.updated("a", token="x", processed=True, outcome="cancelled", at=5.2)
    scenario.settled("commit", "a", "1", CHORES, outcome)
    expect_only(scenario.check("a"), *wrong)


@pytest.mark.parametrize(
    ("outcome", "result", "lost"),
    [
        ("timeout", None, 0),
        ("unknown", "no answer", 0),
        (None, None, 0),
        ("failed", "cancelled", 2),  # no process asked for that, and the caller got no result
    ],
)
def test_checker_request_without_an_answer_is_cancelled(
    scenario: Scenario, outcome: str | None, result: str | None, lost: int
) -> None:
    """The request names the content, and the message has another id."""
    scenario.inserted("a", ASKS, content="n")
    scenario.called("request", ASKS, ["n"], outcome, result, at=5.0)
    ended(scenario, 5.6)
    found = scenario.check("a")
    assert (found["lost"], found["undone"], found["errors"]) == (lost, 0, 0), found["wrong"]


def test_checker_timed_out_request_is_not_delivered_again(scenario: Scenario) -> None:
    scenario.inserted("a", ASKS, content="n")
    scenario.called("request", ASKS, ["n"], "timeout", at=5.0)
    scenario.claimed("a", "1", at=5.3).received("a", "1", ASKS)  # it may be held then
    expect_only(scenario.check("a"))
    scenario.updated("a", token=None, when=6.0).claimed("a", "2", at=8.0).received("a", "2", ASKS)
    expect_only(scenario.check("a"), "undone")


# ---- changes in bulk


@pytest.mark.parametrize("verb", ["remove", "move", "redrive", "requeue"])
@pytest.mark.parametrize(
    ("outcome", "counted", "at", "wrong"),
    [("ok", 1, 5.2, False), ("ok", 2, 5.2, True), ("ok", 1, 9.0, True), ("unknown", 1, 9.0, False)],
)
def test_checker_bulk_changes_count_what_they_changed(
    scenario: Scenario, verb: str, outcome: str, counted: int, at: float, wrong: bool
) -> None:
    scenario.stored("a", CHORES)
    puts: dict[str, dict[str, Any]] = {
        "remove": {"processed": True, "outcome": "removed"},
        "move": {"q": "billed", "when": at, "due": at},
        "redrive": {"q": CHORES, "dead": False, "when": at, "due": at},
        "requeue": {"when": at, "due": at},
    }
    if verb == "redrive":
        scenario.updated("a", q=CHORES_DEAD, dead=True, at=2.0)
    result: Any = [counted, 0] if outcome == "ok" else "no answer"
    scenario.called(f"bulk {verb}", CHORES, None, outcome, result, at=5.0)
    scenario.updated("a", at=at, **puts[verb])
    unasked = verb == "remove" and at == 9.0 and outcome == "ok"
    figures = ["undone"] * wrong + ["lost"] * unasked
    expect_only(scenario.check("a"), *figures)


# ---- results


def answered(scenario: Scenario, op: str, outcome: str | None, result: Any) -> None:
    """A message is finished by the claim "1", and its producer waits."""
    scenario.stored("a", ASKS).held("a", "1", ASKS).settled("commit", "a", "1", ASKS)
    scenario.updated("a", token="x", processed=True, by="1")
    scenario.called(op, ASKS, ["a"], outcome, result)


@pytest.mark.parametrize("op", ["wait", "request"])
@pytest.mark.parametrize(
    ("outcome", "result", "wrong"),
    [
        ("ok", {"n": "a", "by": "1"}, []),
        ("ok", {"n": "b", "by": "1"}, ["lost"]),
        ("ok", {"n": "a", "by": "2"}, ["undone"]),
        ("ok", None, ["lost"]),
        ("failed", "gone", ["lost"]),
        ("failed", "dead", ["lost"]),
        ("timeout", None, []),
        ("unknown", "no answer", []),
        ("cancelled", None, []),
        (None, None, []),
    ],
)
def test_checker_caller_gets_the_result_of_its_message(
    scenario: Scenario, op: str, outcome: str | None, result: Any, wrong: list[str]
) -> None:
    answered(scenario, op, outcome, result)
    expect_only(scenario.check("a"), *wrong)


def test_checker_caller_of_a_buried_message_fails(scenario: Scenario) -> None:
    scenario.stored("a", ASKS).held("a", "1", ASKS).settled("bury", "a", "1", ASKS)
    scenario.updated("a", token=None, q=f"{ASKS}.dead", dead=True)
    scenario.called("wait", ASKS, ["a"], "failed", "dead")
    expect_only(scenario.check("a"))


def test_checker_end_that_is_no_longer_kept_is_not_lost(scenario: Scenario) -> None:
    answered(scenario, "wait", "ok", {"n": "a", "by": "1"})
    scenario.deleted("a")
    expect_only(scenario.check())


def test_checker_timeout_of_another_call_is_an_error(scenario: Scenario) -> None:
    scenario.called("counts", "orders", None, "timeout")
    expect_only(scenario.check(), "errors")


# ---- schedules

#: An instant in milliseconds.
BEGAN = round(datetime(2026, 1, 1, 12, 0, 0, 700_000, UTC).timestamp() * 1000)


def tick(number: int, random: str = "ab") -> str:
    """Return the id of a message of a tick."""
    return f"cron:{SCHEDULE}:20260101T1200{EVERY_S * number:02}Z:{random}"


def decided(scenario: Scenario, number: int, skipped: int = 0) -> None:
    """The schedule has a message for a tick, and for ticks that were missed."""
    following = BEGAN + (number + skipped + 1) * EVERY_S * 1000
    scenario.ticked(SCHEDULE, when=following, last=tick(number + skipped))


@pytest.mark.parametrize(
    ("ids", "wrong"),
    [
        ([tick(0), tick(1)], []),
        ([tick(0)], ["lost"]),
        ([tick(0), tick(1), tick(1, "cd")], ["settled_twice"]),
        ([tick(0), tick(1), tick(2)], ["settled_twice"]),
    ],
)
def test_checker_each_tick_has_one_message(
    scenario: Scenario, ids: list[str], wrong: list[str]
) -> None:
    scenario.ticked(SCHEDULE, when=BEGAN)
    decided(scenario, 0)
    decided(scenario, 1)
    for id in ids:
        scenario.inserted(id, TICKS)
    expect_only(scenario.check(*ids), *wrong)


@pytest.mark.parametrize(("messages", "wrong"), [(4, []), (3, ["lost"])])
def test_checker_missed_ticks_have_messages(
    scenario: Scenario, messages: int, wrong: list[str]
) -> None:
    """Between two decisions, the schedule was paused and deleted: these are no ticks."""
    scenario.ticked(SCHEDULE, when=BEGAN)
    decided(scenario, 0, skipped=2)
    scenario.ticked(SCHEDULE, when=None).ticked(SCHEDULE, when=BEGAN + 10_000)
    scenario.ticked(SCHEDULE, gone=True).ticked(SCHEDULE, when=BEGAN + 20_000)
    decided(scenario, 10)
    ids = [tick(number) for number in (0, 1, 2, 10)][:messages]
    for id in ids:
        scenario.inserted(id, TICKS)
    expect_only(scenario.check(*ids), *wrong)


# ---- tries


@pytest.mark.parametrize(
    ("op", "outcome", "tries", "wrong"),
    [
        ("postpone", "ok", 1, []),
        ("postpone", "ok", None, ["undone"]),
        ("release", "ok", 1, []),
        ("release", "ok", 2, ["undone"]),
        ("rollback", "ok", None, []),
        ("rollback", "ok", 1, ["undone"]),
        ("postpone", "unknown", None, []),
        ("postpone", None, None, []),
        ("rollback", "refused", 1, []),
    ],
)
def test_checker_settlement_takes_back_tries_that_do_not_count(
    scenario: Scenario, op: str, outcome: str | None, tries: int | None, wrong: list[str]
) -> None:
    scenario.stored("a", CHORES).held("a", "1", CHORES, tries=2)
    scenario.settled(op, "a", "1", CHORES, outcome)
    put = {} if tries is None else {"tries": tries}
    scenario.updated("a", token=None, when=1.0, **put)
    found = scenario.check("a")
    found["refused_though_done"] = 0  # the end may be of another claim
    expect_only(found, *wrong)
