"""The checker of times: starvation, lapsed renewals and Unavailable, in invented runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chaos import report
from tests.chaos.nemesis import CLIENT_FAULTS, SCOPES, SERVER_FAULTS
from tests.chaos.scenario import Scenario
from tests.chaos.starvation import LONGEST_WAIT_S, OVERTAKEN, TIMELY
from tests.chaos.windows import KEYS_LOCKED, Lock, Spans, Windows, windows_of


def expect_only(found: dict[str, Any], *wrong: str) -> None:
    """Assert that each of these went wrong, and nothing else."""
    assert [name for name in TIMELY if found[name]] == list(wrong), found["wrong"]
    assert set(found["wrong"]) == set(wrong)


def ask_in_vain(scenario: Scenario, begin: float, end: float, **options: Any) -> None:
    """Let a consumer ask again and again, half a second each time."""
    at = begin
    while at < end:
        scenario.called("reserve", "orders", None, "ok", {}, at=at, **options)
        at += 0.5


def events(kind: str, at: float, seconds: float, what: str = "") -> list[dict[str, Any]]:
    return [{"kind": kind, "at": at, "seconds": seconds, "what": what}]


# ---- starvation


def test_times_starved_while_consumers_ask(scenario: Scenario) -> None:
    """Empty answers are no answers. The time counts from when the message is ready."""
    scenario.inserted("a", at=10.0)
    ask_in_vain(scenario, 5.0, 10.0 + LONGEST_WAIT_S + 1)
    scenario.claimed("a", "1", at=10.0 + LONGEST_WAIT_S + 1, when=90.0)
    found = scenario.check_times()
    expect_only(found, "starved", "starved_in_faults")
    assert found["longest_starvation"] == {
        "without_fault": LONGEST_WAIT_S + 1,
        "with_fault": LONGEST_WAIT_S + 1,
    }


def test_times_short_waits_are_no_starvation(scenario: Scenario) -> None:
    scenario.inserted("a", at=10.0)
    ask_in_vain(scenario, 5.0, 13.0)
    scenario.claimed("a", "1", at=13.0, when=90.0)
    found = scenario.check_times()
    expect_only(found)
    assert found["longest_starvation"]["without_fault"] == 3.0


def test_times_backlog_is_no_starvation(scenario: Scenario) -> None:
    """Consumers that are busy with earlier messages do not starve the later ones."""
    for id, at in (("a", 1.0), ("b", 2.0)):
        scenario.inserted(id, at=at)
    scenario.claimed("a", "1", at=40.0, when=90.0).claimed("b", "2", at=80.0, when=90.0)
    expect_only(scenario.check_times())


@pytest.mark.parametrize("later", [OVERTAKEN, OVERTAKEN - 1])
def test_times_overtaken_message_starves(scenario: Scenario, later: int) -> None:
    """Many later messages flow, and one is hidden from all consumers."""
    scenario.inserted("a", at=1.0)
    for number in range(later):
        scenario.inserted(f"b{number}", at=2.0)
        scenario.claimed(f"b{number}", f"t{number}", at=3.0, when=90.0)
    scenario.claimed("a", "2", at=30.0, when=90.0)
    found = scenario.check_times()
    expect_only(found, *(["starved", "starved_in_faults"] if later == OVERTAKEN else []))
    if later == OVERTAKEN:
        assert found["longest_starvation"]["without_fault"] == 27.0


def test_times_blocked_receive_starves(scenario: Scenario) -> None:
    """A call that takes long is no answer either, whatever it returns at last."""
    scenario.inserted("a", at=10.0)
    scenario.called("reserve", "orders", None, "ok", {"1": {"a": 1}}, at=11.0, seconds=20.0)
    scenario.claimed("a", "1", at=31.0, when=90.0)
    expect_only(scenario.check_times(), "starved", "starved_in_faults")


def test_times_lease_end_makes_a_message_ready(scenario: Scenario) -> None:
    """A held message starves only from the end of its lease on."""
    scenario.inserted("a", at=1.0).claimed("a", "1", at=1.0, when=50.0)
    ask_in_vain(scenario, 1.0, 53.0)
    scenario.claimed("a", "2", at=53.0, when=90.0)
    found = scenario.check_times()
    expect_only(found)
    assert found["longest_starvation"]["without_fault"] == 3.0


def test_times_deleting_pop_overtakes_nothing(scenario: Scenario) -> None:
    """A pop of several claims them first. The end of its lease is no place in the order."""
    for id in "ab":
        scenario.inserted(id, "events", at=1.0)
    scenario.claimed("a", "1", at=2.0, when=60.0).deleted("a", at=2.1).deleted("b", at=40.0)
    expect_only(scenario.check_times())


def test_times_without_a_fault_leave_faults_out(scenario: Scenario) -> None:
    """A fault of the servers excuses the wait until the recovery, and no later wait."""
    scenario.inserted("a", at=10.0)
    ask_in_vain(scenario, 10.0, 34.0)
    scenario.claimed("a", "1", at=34.0, when=90.0)
    at = events("primary killed", 11.0, 4.0)
    windows = windows_of(at, {11.0: 20.0}, SCOPES)
    found = scenario.check_times(windows)
    expect_only(found)
    # The recovery that the ledgers show is later than the end of the fault, and a second follows.
    assert found["longest_starvation"] == {"without_fault": 2.0, "with_fault": 2.0}
    sooner = windows_of(at, {11.0: 12.0}, SCOPES)
    expect_only(scenario.check_times(sooner), "starved", "starved_in_faults")


def test_times_bus_death_excuses_no_starvation(scenario: Scenario) -> None:
    scenario.inserted("a", at=10.0)
    ask_in_vain(scenario, 10.0, 25.0)
    scenario.claimed("a", "1", at=25.0, when=90.0)
    windows = windows_of(events("Redis killed", 9.0, 15.0), {}, SCOPES)
    found = scenario.check_times(windows)
    expect_only(found, "starved_in_faults")
    assert found["longest_starvation"]["with_fault"] == 15.0


def test_times_suspended_process_does_not_ask(scenario: Scenario) -> None:
    """A call of a process that was suspended takes long for that reason."""
    scenario.inserted("a", at=10.0)
    scenario.called("reserve", "orders", None, "ok", {}, at=11.0, seconds=20.0)
    scenario.claimed("a", "1", at=31.0, when=90.0)
    windows = windows_of(events("consumer suspended", 11.0, 20.0, "consumer-1.1"), {}, SCOPES)
    expect_only(scenario.check_times(windows))
    windows = windows_of(events("consumer suspended", 11.0, 20.0, "consumer-2.1"), {}, SCOPES)
    expect_only(scenario.check_times(windows), "starved_in_faults")


def test_times_transaction_excuses_what_it_holds(scenario: Scenario) -> None:
    """Its neighbours must not wait for its end."""
    for id in "ab":
        scenario.inserted(id, at=10.0)
    ask_in_vain(scenario, 10.0, 20.0)
    scenario.claimed("a", "1", at=20.0, when=90.0)
    expect_only(
        scenario.check_times(windows_of([], {}, SCOPES, [Lock(9.0, 15.0, ["a", "b"])])),
    )
    only = windows_of([], {}, SCOPES, [Lock(9.0, 15.0, ["b"])])
    expect_only(scenario.check_times(only), "starved_in_faults")


# ---- renewals, and Unavailable


@pytest.mark.parametrize("lapsed", [False, True])
def test_times_renewed_lease_must_not_lapse(scenario: Scenario, lapsed: bool) -> None:
    scenario.inserted("a", "renewed", at=1.0).claimed("a", "1", at=1.0, when=6.0)
    scenario.updated("a", at=6.5 if lapsed else 4.0, when=12.0)  # the renewal
    scenario.deleted("a", at=8.0)
    expect_only(scenario.check_times(), *(["lapsed"] if lapsed else []))
    outage = Windows(servers=Spans([(2.0, 4.0)]))
    expect_only(scenario.check_times(outage))


def test_times_claim_that_was_stored_late_has_not_lapsed(scenario: Scenario) -> None:
    """No renewal could come before it. Its renewal must not be late, all the same."""
    scenario.inserted("a", "renewed", at=1.0).claimed("a", "1", at=6.6, when=6.0)
    scenario.updated("a", at=6.7, when=11.7)
    expect_only(scenario.check_times())
    scenario.deleted("a", at=12.5)
    expect_only(scenario.check_times(), "lapsed")


@pytest.mark.parametrize(("stored", "wrong"), [(5.8, []), (4.5, ["lapsed"])])
def test_times_claim_is_known_with_its_last_message(
    scenario: Scenario, stored: float, wrong: list[str]
) -> None:
    """The server took seconds to store a claim: no renewal could come before its reply."""
    scenario.inserted("a", "renewed", at=0.5).inserted("b", "renewed", at=0.5)
    scenario.claimed("a", "1", at=3.0, when=6.0).claimed("b", "1", at=stored, when=6.0)
    scenario.updated("b", at=6.0, when=11.0).deleted("b", at=8.0).deleted("a", at=9.0)
    expect_only(scenario.check_times(), *wrong)


@pytest.mark.parametrize(("received", "wrong"), [(5.8, []), (4.5, ["lapsed"])])
def test_times_claim_is_known_when_it_is_received(
    scenario: Scenario, received: float, wrong: list[str]
) -> None:
    """The reply took seconds. Only the first lease may end because of that."""
    scenario.inserted("a", "renewed", at=0.5).claimed("a", "1", at=1.0, when=6.0)
    scenario.called(
        "reserve", "renewed", None, "ok", {"1": {"a": 1}}, at=0.8, seconds=received - 0.8
    )
    scenario.updated("a", at=6.3, when=11.3)
    expect_only(scenario.check_times(), *wrong)
    scenario.updated("a", at=11.6, when=16.6)
    expect_only(scenario.check_times(), "lapsed")


@pytest.mark.parametrize(
    ("kind", "what", "excused"),
    [
        ("clients cut off", "", True),
        ("server clocks stepped", "", True),
        ("consumer killed", "consumer-1.1", True),
        ("consumer killed", "consumer-2.1", False),
        ("Redis killed", "", False),
        ("bus dropped", "", False),
        ("thousands of leases renewed", "", False),
    ],
)
def test_times_unavailable_needs_a_fault(
    scenario: Scenario, kind: str, what: str, excused: bool
) -> None:
    scenario.called("reserve", "orders", None, "unknown", at=10.0)
    expect_only(scenario.check_times(), "unavailable_without_fault")
    windows = windows_of(events(kind, 9.0, 1.2, what), {}, SCOPES)
    expect_only(scenario.check_times(windows), *([] if excused else ["unavailable_without_fault"]))
    late = windows_of(events(kind, 11.0, 1.0, what), {}, SCOPES)
    expect_only(scenario.check_times(late), "unavailable_without_fault")


def test_times_unavailable_for_a_held_message(scenario: Scenario) -> None:
    """A transaction excuses calls about its messages and keys, and no other calls."""
    held = windows_of([], {}, SCOPES, [Lock(9.0, 15.0, ["a", KEYS_LOCKED])])
    scenario.called("commit", "orders", {"1": ["a"]}, "unknown", at=10.0)
    scenario.called("push", "states", ["c"], "unknown", at=10.0)
    expect_only(scenario.check_times(held))
    scenario.called("push", "orders", ["b"], "unknown", at=10.0)
    found = scenario.check_times(held)
    expect_only(found, "unavailable_without_fault")
    assert found["unavailable_without_fault"] == 1


# ---- the spans, and the verdict


def test_spans_are_merged_and_cut() -> None:
    spans = Spans([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0)])
    assert spans.within(0.0, 9.0) == [(1.0, 4.0), (5.0, 6.0)]
    assert spans.within(2.0, 5.5) == [(2.0, 4.0), (5.0, 5.5)]
    assert spans.within(4.2, 4.8) == []
    assert spans.without(0.0, 9.0) == [(0.0, 1.0), (4.0, 5.0), (6.0, 9.0)]
    assert spans.without(2.0, 3.0) == []
    assert spans.plus([(4.0, 5.0)]).without(0.0, 9.0) == [(0.0, 1.0), (6.0, 9.0)]


def test_scopes_name_every_fault() -> None:
    assert set(SCOPES) == {*SERVER_FAULTS, *CLIENT_FAULTS}


@pytest.mark.parametrize("name", report.VERDICT)
def test_verdict_fails_for_each_figure(name: str) -> None:
    result = dict.fromkeys(report.VERDICT, 0)
    assert report.is_good(result)
    assert not report.is_good({**result, name: 1})
    assert report.failed_checks({**result, name: 1}) == [name]
    assert {"lost", "settled_twice", "fenced_effects", "unfinished", *TIMELY} <= set(result)
