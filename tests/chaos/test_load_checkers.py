"""The checker finds mistakes with pops of a bucket, removals, order and malformed documents."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import Client, Unavailable
from tests.chaos import forked
from tests.chaos.names import JARS, ROWS
from tests.chaos.order_checker import Entrances
from tests.chaos.pack_log import PackLog
from tests.chaos.removal_checker import Removal, miscounted
from tests.chaos.scenario import Scenario, expect_only
from tests.chaos.windows import Lock, windows_of

PACK = "0123456789abcdef01234567"
FIRST, SECOND = f"{PACK}:0", f"{PACK}:1"


# ---- pops of a bucket


def popped_pack(scenario: Scenario) -> None:
    """One process claims a pack of two, and its pops take both."""
    scenario.packed(PACK, ["a", "b"], JARS).updated(PACK, token="1", owner="consumer-1.1")
    scenario.updated(PACK, left=1, done={"0": 1}).deleted(PACK)


def test_checker_cancelled_pop_of_a_bucket_must_give_back(scenario: Scenario) -> None:
    """It comes back as a single message, which has the name that it had in its pack."""
    popped_pack(scenario)
    scenario.called("pop", JARS, 1, "ok", [FIRST]).called("pop", JARS, 5, "cancelled")
    expect_only(scenario.check(), "lost")
    scenario.inserted(f"{PACK}:0001", JARS)
    expect_only(scenario.check(SECOND))


@pytest.mark.parametrize(("queue", "wrong"), [(JARS, []), ("events", ["lost"])])
def test_checker_unknown_pop_excuses_only_its_queue(
    scenario: Scenario, queue: str, wrong: list[str]
) -> None:
    """A pop of a bucket shares no answer with other pops of the same pack."""
    popped_pack(scenario)
    scenario.called("pop", JARS, 1, "ok", [FIRST]).called("pop", queue, 5, "unknown")
    expect_only(scenario.check(), *wrong)


@pytest.mark.parametrize(("done", "wrong"), [(1, []), (0, ["settled_twice"])])
def test_checker_pop_may_give_back_over_a_copy(done: int, wrong: list[str]) -> None:
    """A dead holder left a hidden copy of the message, whose pack does not have it any more."""
    log = PackLog(
        [
            ["pack", PACK, JARS, ["a", "b"], 1, 0.0, 0.0],
            ["copy", FIRST, f"~handover:{JARS}", {FIRST: "a"}, 1, 1.0, 1.0, JARS, "1", False],
            ["set", PACK, {"done": {"0": done}, "left": 2 - done}, 2.0],
            ["set", FIRST, {"q": JARS}, 3.0],
        ]
    )
    assert list(log)[-1] == ["in", FIRST, JARS, "a", 1, 1.0, 1.0]
    assert list(log.wrong) == wrong


# ---- the order of one producer


@pytest.mark.parametrize(
    ("tries", "instants", "wrong"),
    [
        ((1, 1, 1), (5.0, 5.0, 5.0), True),
        ((1, 2, 1), (5.0, 5.0, 5.0), False),  # its first delivery failed
        ((1, 1, 1), (5.0, 6.0, 5.0), False),  # it came later
    ],
)
def test_checker_messages_that_leave_a_pack_keep_their_order(
    tries: tuple[int, ...], instants: tuple[float, ...], wrong: bool
) -> None:
    """The third message is received before the second one."""
    ids = [f"{PACK}:{place}" for place in range(3)]
    entrances = Entrances()
    for number, id in enumerate(ids):
        entrances.add(["in", id, "sheaves", f"producer-1.1.{8 + number}", 1, 0.0, 0.0])
        entrances.add(["set", id, {"q": ROWS, "when": instants[number]}, 6.0])
    received = {ids[place]: tries[place] for place in (0, 2, 1)}
    assert bool(entrances.out_of_order([{"1": received}])) == wrong
    assert entrances.out_of_order([{"1": dict.fromkeys(ids, 1)}]) == []


# ---- removals


@pytest.mark.parametrize(
    ("removals", "broken", "wrong"),
    [
        ([Removal(1.0, 2.0, 2)], [], 0),
        ([Removal(1.0, 2.0, 3)], [], 0),  # one of them a consumer may have committed
        ([Removal(1.0, 2.0, 4)], [], 1),
        ([Removal(1.0, 2.0, 1)], [], 1),
        ([Removal(1.0, 2.0, 1)], [(1.5, 1.6)], 0),
        ([Removal(1.0, 2.0, 1), Removal(0.0, 9.0, None)], [], 0),
        ([Removal(5.0, 6.0, 0), Removal(7.0, 8.0, 1)], [], 1),
    ],
)
def test_checker_removals_count_what_they_removed(
    removals: list[Removal], broken: list[tuple[float, float]], wrong: int
) -> None:
    assert len(miscounted(removals, [1.2, 1.4], [1.3], broken)) == wrong


@pytest.mark.parametrize(
    ("counted", "at", "wrong"), [(1, 5.0, []), (0, 5.0, ["undone"]), (0, 9.0, ["lost"])]
)
def test_checker_removed_message_is_not_lost(
    scenario: Scenario, counted: int, at: float, wrong: list[str]
) -> None:
    scenario.stored("a", "drafts").called("purge", "drafts", None, "ok", counted, at=4.8)
    scenario.deleted("a", at=at)
    expect_only(scenario.check(), *wrong)


@pytest.mark.parametrize(("at", "wrong"), [(5.0, []), (9.0, ["refused_though_done"])])
def test_checker_commit_after_a_purge_is_refused(
    scenario: Scenario, at: float, wrong: list[str]
) -> None:
    scenario.stored("a", "drafts").held("a", "1", "drafts")
    scenario.called("purge", "drafts", None, "ok", 1 if at == 5.0 else 0, at=4.8)
    scenario.settled("commit", "a", "1", "drafts", outcome="refused").deleted("a", at=at)
    expect_only(scenario.check(), *wrong)


def test_times_transaction_excuses_a_purge_of_its_queue(scenario: Scenario) -> None:
    held = windows_of([], {}, {}, [Lock(9.0, 15.0, ["drafts"])])
    for queue, wrong in (("drafts", 0), ("brief", 1)):
        scenario.called("purge", queue, None, "unknown", at=10.0)
        assert scenario.check_times(held)["unavailable_without_fault"] == wrong


# ---- malformed documents


@pytest.mark.parametrize("end", ["buried", "left", "committed"])
def test_checker_malformed_documents_must_be_dead_letters(scenario: Scenario, end: str) -> None:
    scenario.called("plant", "billed", ["a", "never stored"], "unknown").inserted("a", "billed")
    if end == "buried":
        scenario.updated("a", q="billed.dead", dead=True)
    elif end == "committed":
        scenario.committed("a", "1", "billed")
    stored = [] if end == "committed" else ["a"]
    expect_only(scenario.check(*stored), *([] if end == "buried" else ["lost"]))


# ---- forked children


def push(url: str, **options: Any) -> list[Any]:
    spec = {"url": url, "namespace": "load"}
    ids, groups = ["a", "b"], ["g", "g"]
    return forked.push_in_child(spec, "turns", [1, 2], ids=ids, groups=groups, **options)


def test_forked_child_pushes(client: Client, url: str) -> None:
    assert push(url) == ["a", "b"]


@pytest.mark.parametrize(
    ("child", "error", "text"),
    [
        ("signal.pause()", RuntimeError, r"did not end within 0\.1 s"),
        ("os._exit(3)", RuntimeError, "ended with status 3"),
        ("raise ZeroDivisionError", RuntimeError, "(?s)failed: .*ZeroDivisionError"),
        ("raise Unavailable('no answer')", Unavailable, "no answer"),
    ],
)
def test_forked_child_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch, child: str, error: type[Exception], text: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        exec(child, vars(forked) | {"Unavailable": Unavailable})

    monkeypatch.setattr(forked, "Client", fail)
    if "within" in text:
        monkeypatch.setattr(forked, "CHILD_S", 0.1)
    with pytest.raises(error, match=text):
        push("")
