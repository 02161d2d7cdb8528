"""The checker finds each kind of loss in a stream in invented runs, and nothing in a good one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos.scenario import Scenario, expect_only
from tests.chaos.stream_load import GROUPS, STREAM

CONTENTS = {0: "a", 1: "b"}


def good() -> Scenario:
    """Return a run in which each group commits both messages, one after a redelivery."""
    scenario = Scenario()
    scenario.called("append", STREAM, ["a", "b"], "ok", [0, 1])
    for group in GROUPS:
        receive(scenario, group, "t1", {"s~0": 1, "s~1": 1})
        scenario.called("commit", group, {"t1": ["s~1"]}, "ok", None)
        receive(scenario, group, "t2", {"s~0": 2})
        scenario.called("commit", group, {"t2": ["s~0"]}, "ok", None)
    return scenario


def receive(
    scenario: Scenario, group: str, token: str, ids: dict[str, int], at: float | None = None
) -> None:
    scenario.called("reserve", group, None, "ok", {token: ids}, at=at)


def test_checker_accepts_a_good_stream() -> None:
    found = good().check(contents=CONTENTS)
    expect_only(found)
    names = ("messages", "pushed", "acknowledged", "received", "redelivered", "settled")
    assert [found[name] for name in names] == [2, 2, 2, 9, 3, 6]


def test_checker_accepts_unknown_outcomes_of_a_stream() -> None:
    scenario = good()
    scenario.called("append", STREAM, ["c"], "unknown", "")
    scenario.called("append", STREAM, ["d"], "unknown", "")
    for group in GROUPS:
        receive(scenario, group, "t3", {"s~2": 1})
        scenario.called("commit", group, {"t3": ["s~2"]}, "unknown", "")
        lost: list[dict[str, Any]] = [{"t3": ["s~2"]}, {}]
        scenario.called("commit", group, {"t3": ["s~2"]}, "refused", lost)
    expect_only(scenario.check(contents=CONTENTS | {2: "c"}))


@pytest.mark.parametrize(
    "contents",
    [{0: "a"}, {0: "a", 1: "x"}, {0: "a", 1: "b", 3: "c"}],
    ids=["missing", "another one", "a gap"],
)
def test_checker_message_missing_in_the_stream_is_lost(contents: dict[int, str]) -> None:
    assert good().check(contents=contents)["lost"] > 0


def test_checker_message_that_a_group_missed_is_lost() -> None:
    scenario = good()
    scenario.called("append", STREAM, ["c"], "ok", [2])
    for group in GROUPS[1:]:
        receive(scenario, group, "t3", {"s~2": 1})
        scenario.called("commit", group, {"t3": ["s~2"]}, "ok", None)
    expect_only(scenario.check(contents=CONTENTS | {2: "c"}), "lost")


def test_checker_message_twice_in_the_stream_is_noticed() -> None:
    scenario = good()
    for group in GROUPS:
        scenario.called("commit", group, {"t3": ["s~2"]}, "unknown", "")
    expect_only(scenario.check(contents=CONTENTS | {2: "a"}), "settled_twice")


def test_checker_second_commit_for_a_group_is_noticed() -> None:
    scenario = good()
    receive(scenario, GROUPS[0], "t3", {"s~1": 2})
    scenario.called("commit", GROUPS[0], {"t3": ["s~1"]}, "ok", None)
    expect_only(scenario.check(contents=CONTENTS), "settled_twice")


def test_checker_delivery_after_a_commit_is_noticed() -> None:
    scenario = good()
    receive(scenario, GROUPS[1], "t3", {"s~1": 2}, at=100)
    expect_only(scenario.check(contents=CONTENTS), "undone")


@pytest.mark.parametrize(("last", "starved"), [(7.0, 1), (3.0, 0)])
def test_checker_group_that_receives_nothing_new_starves(last: float, starved: int) -> None:
    """Messages that it receives again say nothing of the messages behind."""
    scenario = Scenario()
    scenario.called("append", STREAM, ["a"], "ok", [0], at=0.0)
    scenario.called("append", STREAM, ["b"], "ok", [1], at=0.0)
    receive(scenario, GROUPS[0], "t1", {"s~0": 1}, at=0.5)
    for at in range(1, int(last)):
        scenario.called("reserve", GROUPS[0], None, "ok", {}, at=float(at), seconds=1.0)
    receive(scenario, GROUPS[0], "t2", {"s~0": 2}, at=last - 0.5)
    receive(scenario, GROUPS[0], "t3", {"s~1": 1}, at=last)
    assert scenario.check_times()["starved"] == starved
