"""The checker finds mistakes of ordered groups, limits and packs in invented runs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId

from tests.chaos.change_log import line_of
from tests.chaos.cluster import ids_of
from tests.chaos.group_checker import Groups
from tests.chaos.limit_checker import KEYED_QUEUE, LIMITS, NARROW_QUEUE, PACED_QUEUE
from tests.chaos.pack_log import PackLog
from tests.chaos.scenario import Scenario, expect_only
from tests.chaos.windows import Spans, Windows

TURNS, PARCELS = "turns", "parcels"
PACK = "0123456789abcdef01234567"


def message(place: str) -> str:
    return f"{PACK}:{place}"


# ---- ordered groups


def good_group(scenario: Scenario) -> None:
    """Two messages of one group, the second one stored first, and one of another group."""
    scenario.stored("b", TURNS, place=["g", [2, 0]]).stored("a", TURNS, place=["g", [1, 0]])
    scenario.stored("c", TURNS, place=["h", 1])


def test_checker_accepts_groups_that_take_turns(scenario: Scenario) -> None:
    """A rolled-back message keeps its place, and a claim that lapsed is claimed again."""
    good_group(scenario)
    scenario.held("a", "1", TURNS).held("c", "2", TURNS).settled("rollback", "a", "1", TURNS)
    scenario.updated("a", token=None, by="1", due=5.0, when=5.0).held("a", "3", TURNS, tries=2)
    scenario.committed("a", "4", TURNS).committed("b", "5", TURNS)
    expect_only(scenario.check("c"))


def test_checker_two_held_messages_of_a_group_are_noticed(scenario: Scenario) -> None:
    good_group(scenario)
    scenario.held("a", "1", TURNS).held("b", "2", TURNS)
    expect_only(scenario.check(*"abc"), "out_of_order")


def test_checker_commit_before_an_earlier_message_is_noticed(scenario: Scenario) -> None:
    good_group(scenario)
    scenario.committed("b", "1", TURNS)
    expect_only(scenario.check(*"ac"), "out_of_order")


@pytest.mark.parametrize("repeated", [False, True])
def test_checker_pushes_for_one_instant_keep_their_order(
    scenario: Scenario, repeated: bool
) -> None:
    """Whatever places they have in the database, unless a push was repeated."""
    for number, seq in ((9, 3), (10, 1), (11, 2)):
        scenario.stored(f"p.{number}@5.000", "shifts", place=["g", seq])
    if repeated:
        scenario.called("push", "shifts", ["p.9@5.000"], "unknown")
    scenario.stored("p.8@6.000", "shifts", place=["g", 9]).committed("p.10@5.000", "1", "shifts")
    left = ["p.9@5.000", "p.11@5.000", "p.8@6.000"]
    expect_only(scenario.check(*left), *([] if repeated else ["out_of_order"]))


@pytest.mark.parametrize("seen", [True, False])
def test_checker_early_claim_that_no_caller_got_is_accepted(scenario: Scenario, seen: bool) -> None:
    """A scan gives back a message that it should not have claimed."""
    good_group(scenario)
    (scenario.held if seen else scenario.claimed)("b", "1")
    scenario.updated("b", token=None)
    expect_only(scenario.check(*"abc"), *(["out_of_order"] if seen else []))


@pytest.mark.parametrize("first", ["claim", "insert"])
def test_checker_accepts_producers_that_race(scenario: Scenario, first: str) -> None:
    """The earlier message is stored when the later one is held, whatever the order of the log."""
    scenario.stored("b", TURNS, place=["g", [2, 0]]).received("b", "1", TURNS)
    if first == "claim":
        scenario.claimed("b", "1", at=1.0)
    scenario.pushed("a", TURNS).inserted("a", TURNS, at=1.1, place=["g", [1, 0]])
    if first == "insert":
        scenario.claimed("b", "1", at=1.0)
    scenario.settled("commit", "b", "1", TURNS).deleted("b")
    scenario.committed("a", "2", TURNS)
    expect_only(scenario.check())


def test_checker_finds_a_group_that_is_forgotten(scenario: Scenario) -> None:
    """It starves from the end of the claim before, whatever ``when`` says. Its rest does not."""
    for id, seq in (("a", 1), ("b", 2), ("c", 3)):
        scenario.inserted(id, TURNS, place=["g", [seq, 0]])
    scenario.claimed("a", "1", at=1.0, when=4.0)
    for id in "bc":
        scenario.updated(id, when=3600.0, at=1.1)  # deferred
    scenario.deleted("a", at=2.0).claimed("b", "2", at=12.0, when=15.0)
    scenario.claimed("b", "3", at=18.0, when=25.0)  # 3 s after its lease ended
    scenario.deleted("b", at=24.0)
    for at in (3.0, 15.0):
        scenario.called("reserve", TURNS, None, "ok", {}, at=at, seconds=8.0)
    found = scenario.check_times(Windows(Spans([(0.0, 1.0)])))
    assert found["longest_starvation"]["without_fault"] == 8.0
    assert found["starved"] == 1
    assert "b: in turns" in found["wrong"]["starved"][0]


def test_groups_end_with_the_messages_of_a_queue() -> None:
    """A buried message has no turn any more, also if it was the last one."""
    groups = Groups()
    groups.add(["in", "a", TURNS, "a", 1, 0.0, 0.0, "g", [1, 0]])
    groups.add(["set", "a", {"token": "1", "when": 3.0}, 1.0])
    assert groups.add(["set", "a", {"token": None, "q": "turns.dead", "dead": True}, 2.0])
    assert not groups.add(["out", "a", 3.0])
    groups.finish(10.0)
    assert [(each.id, each.until) for each in groups.turns] == [("a", 1.0)]


# ---- limits


def test_checker_accepts_held_messages_up_to_the_limit(scenario: Scenario) -> None:
    """A claim that ended, that was claimed again, or of another tenant takes no slot.

    A scan that ends a lapsed claim is not the call of the former holder.
    """
    ids = ["a@x", "b@x", "c@x", "d@y"]
    for id in ids:
        scenario.stored(id, KEYED_QUEUE)
    for number, id in enumerate(("a@x", "b@x", "d@y", "b@x")):
        scenario.held(id, str(number), KEYED_QUEUE)
    scenario.updated("a@x", token=None).settled("release", "a@x", "0", KEYED_QUEUE, "refused")
    scenario.held("c@x", "4", KEYED_QUEUE)
    expect_only(scenario.check(*ids))


def test_checker_message_held_above_a_limit_is_noticed(scenario: Scenario) -> None:
    """Also if a lease has lapsed, as long as its claim was not ended."""
    for number, id in enumerate(("a@x", "b@x", "c@x")):
        scenario.stored(id, KEYED_QUEUE).received(id, str(number), KEYED_QUEUE)
        scenario.claimed(id, str(number), at=10.0 * number, when=10.0 * number + 3)
    expect_only(scenario.check("a@x", "b@x", "c@x"), "over_limit")


def starts(number: int, seconds: float, *, faults: Windows | None = None) -> dict[str, Any]:
    """Return the findings of the checker if a number of messages start in this time."""
    scenario = Scenario()
    for each in range(number):
        id, at = f"m{each}", 20 + seconds * each / number
        scenario.inserted(id, PACED_QUEUE).received(id, f"t{each}", PACED_QUEUE)
        scenario.claimed(id, f"t{each}", at=at, when=at + 3).deleted(id, at=at)
    return scenario.check_times(faults)


@pytest.mark.parametrize(("at", "wrong"), [(5.0, []), (60.0, ["over_limit"])])
def test_checker_follows_a_lowered_limit(scenario: Scenario, at: float, wrong: list[str]) -> None:
    """The messages that are held stay held, and some seconds later no other one may start."""
    for number in range(4):
        scenario.stored(f"m{number}", NARROW_QUEUE)
    for number in range(3):
        scenario.claimed(f"m{number}", f"t{number}", at=1.0, when=90.0)
    scenario.limited(NARROW_QUEUE, 2, at=2.0).claimed("m3", "t3", at=at, when=90.0)
    expect_only(scenario.check(*(f"m{number}" for number in range(4))), *wrong)


def test_checker_starts_above_a_rate_are_noticed() -> None:
    """A scan may use permits for a second; after a fault, its claim may arrive later still."""
    limit = LIMITS[PACED_QUEUE]
    assert limit.rate is not None
    in_ten = limit.capacity + round(11 * limit.rate) - 2
    faults = Windows(servers=Spans([(15.0, 16.0)]))
    for number, seconds, given, wrong in (
        *((in_ten, 10, None, 0), (in_ten + 4, 10, None, 1)),
        *((in_ten, 5, None, 1), (in_ten, 5, faults, 0), (9 * in_ten, 5, faults, 1)),
    ):
        found = starts(number, seconds, faults=given)
        assert found["too_fast"] == wrong, (number, seconds, found["wrong"])


@pytest.mark.parametrize("queue", [KEYED_QUEUE, PACED_QUEUE])
def test_checker_message_that_could_start_starves(queue: str) -> None:
    """It waits for a slot first, and for the rest of the time for no one."""
    scenario = Scenario()
    most = LIMITS[queue].concurrency
    assert most is not None
    for each in range(most):
        scenario.inserted(f"m{each}@x", queue).claimed(f"m{each}@x", f"t{each}", at=1.0, when=9.0)
    scenario.inserted("late@x", queue, at=2.0).deleted("m0@x", at=4.0)
    scenario.claimed("late@x", "late", at=12.0, when=15.0).deleted("late@x", at=13.0)
    for at in (2.0, 5.0):
        scenario.called("reserve", queue, None, "ok", {}, at=at, seconds=7.0)
    found = scenario.check_times()
    assert found["longest_starvation"]["without_fault"] == 8.0
    assert found["starved"] == 1


# ---- packs


def good_pack(scenario: Scenario) -> None:
    """A pack of three that is claimed. One is committed, one rolled back, and one moved."""
    ids = [message(place) for place in "012"]
    scenario.called("push", PARCELS, ["a", "b", "c"], "ok", ids, process="producer-1.1")
    scenario.packed(PACK, ["a", "b", "c"]).claimed(PACK, "1")
    scenario.called("reserve", PARCELS, None, "ok", {"1": dict.fromkeys(ids, 1)})
    scenario.settled("commit", ids[0], "1", PARCELS).updated(PACK, done={"0": 1}, left=2)
    for place, target in (("1", PARCELS), ("2", "billed")):
        scenario.hidden(message(place), target, "1")
    handed = [["1", [message("1"), message("2")]]]
    scenario.updated(PACK, done={"0": 7}, left=0, handed=handed)
    scenario.settled("rollback", ids[1], "1", PARCELS).settled("move", ids[2], "1", PARCELS)
    for place, target in (("1", PARCELS), ("2", "billed")):
        scenario.updated(message(place), q=target)
    scenario.deleted(PACK)


def test_checker_accepts_a_pack_settled_in_parts(scenario: Scenario) -> None:
    good_pack(scenario)
    found = scenario.check(message("1"), message("2"))
    expect_only(found)
    assert (found["settled"], found["received"], found["messages"]) == (2, 3, 3)


def test_checker_rest_of_a_pack_is_given_back(scenario: Scenario) -> None:
    """The update that settles the last message ends the claim. So does a delete."""
    scenario.packed(PACK, ["a", "b"]).held(message("0"), "1", PARCELS, pack=PACK)
    scenario.settled("commit", message("0"), "1", PARCELS)
    scenario.updated(PACK, done={"0": 1}, left=1, token=None, when=9.0)
    scenario.held(message("1"), "2", PARCELS, pack=PACK)
    scenario.settled("commit", message("1"), "2", PARCELS).deleted(PACK)
    expect_only(scenario.check())


def test_checker_message_that_left_its_pack_unasked_is_lost(scenario: Scenario) -> None:
    scenario.packed(PACK, ["a", "b"]).claimed(PACK, "1").updated(PACK, done={"0": 1}, left=1)
    expect_only(scenario.check(message("1")), "lost")


def test_checker_pack_deleted_with_messages_is_noticed(scenario: Scenario) -> None:
    scenario.packed(PACK, ["a", "b"]).held(message("0"), "1", PARCELS, pack=PACK)
    scenario.settled("commit", message("0"), "1", PARCELS).deleted(PACK)
    expect_only(scenario.check(), "lost")


def test_checker_message_of_a_pack_settled_twice_is_noticed(scenario: Scenario) -> None:
    """By one claim: the count is wrong. By two: the former one did not hold it any more."""
    scenario.packed(PACK, ["a", "b", "c"]).held(message("0"), "1", PARCELS, pack=PACK)
    scenario.settled("commit", message("0"), "1", PARCELS).updated(PACK, done={"0": 1}, left=2)
    scenario.updated(PACK, done={"0": 1}, left=1)
    expect_only(scenario.check(message("1"), message("2")), "settled_twice")
    scenario = Scenario()
    scenario.packed(PACK, ["a", "b"]).held(message("0"), "1", PARCELS, pack=PACK)
    scenario.held(message("0"), "2", PARCELS, tries=2, pack=PACK)
    scenario.settled("commit", message("0"), "1", PARCELS).updated(PACK, done={"0": 1}, left=1)
    scenario.settled("commit", message("0"), "2", PARCELS, outcome=None)
    expect_only(scenario.check(message("1")), "fenced_effects")


def test_checker_content_in_two_packs_is_settled_twice(scenario: Scenario) -> None:
    scenario.packed(PACK, ["a", "b"]).packed(PACK[::-1], ["a", "c"])
    stored = [f"{pack}:{place}" for pack in (PACK, PACK[::-1]) for place in "01"]
    expect_only(scenario.check(*stored), "settled_twice")


@pytest.mark.parametrize(("number", "starved"), [(1, 1), (99, 0)])
def test_checker_large_receive_of_a_bucket_may_take_long(number: int, starved: int) -> None:
    """It takes document by document, while the pack waits behind earlier messages."""
    scenario = Scenario()
    scenario.packed(PACK, ["a"])
    ids = {f"{PACK[::-1]}:{place}": 1 for place in range(number)}
    for at in (0.0, 3.0):
        scenario.called("reserve", PARCELS, None, "ok", {"1": ids}, at=at, seconds=3.0)
    scenario.claimed(PACK, "2", at=6.0, when=9.0)
    found = scenario.check_times()
    assert (found["starved"], found["starved_in_faults"]) == (starved, starved)


def copies(copy: str, *steps: str) -> PackLog:
    """Return the log of a pack of three messages, two of which leave it in these steps.

    Args:
        copy: The id of their copy. If it is the id of a message, the second one has no copy.
        steps: The names of the steps.
    """
    contents = (
        {message("0"): "a"} if copy == message("0") else {message("0"): "a", message("1"): "b"}
    )
    lines: dict[str, list[Any]] = {
        "copy": ["copy", copy, "~handover:parcels", contents, 1, 1.0, 2.0, PARCELS, "1", False],
        "decide": [
            "set",
            PACK,
            {"done": {"0": 3}, "left": 1, "handed": [["1", [copy]]]},
            3.0,
        ],
        "overwrite": ["set", copy, {"with": "2"}, 4.0],
        "write over another queue's": ["set", copy, {"q": "~handover:parcels", "with": "1"}, 2.0],
        "show": ["set", copy, {"q": PARCELS, "when": 5.0}, 5.0],
        "discard": ["out", copy, 6.0],
    }
    before = [
        ["pack", PACK, PARCELS, ["a", "b", "c"], 1, 0.0, 0.0],
        ["set", PACK, {"token": "1"}, 0.5],
    ]
    log = PackLog([*before, *(lines[step] for step in steps)])
    list(log)
    return log


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (("copy", "decide", "show"), None),
        (("copy", "discard"), None),
        (("copy", "overwrite", "discard"), None),
        (("copy", "write over another queue's", "decide", "show"), None),
        (("copy", "show"), "settled_twice"),
        (("decide",), "lost"),
        (("copy", "overwrite", "decide"), "lost"),
        (("copy", "decide"), "lost"),
        (("copy", "decide", "overwrite", "show"), "lost"),
    ],
)
@pytest.mark.parametrize("copy", [message("0"), f"{PACK}/1.0"], ids=["message", "part"])
def test_checker_follows_what_leaves_a_pack(
    copy: str, steps: tuple[str, ...], wrong: str | None
) -> None:
    """A copy may be shown once its pack lists it, under its token, and then it must be."""
    assert list(copies(copy, *steps).wrong) == ([wrong] if wrong else [])


def test_checker_dead_letter_that_is_overwritten_is_moved() -> None:
    """A burial broke off, and the next holder of the message moves it."""
    copy = message("0")
    update = {
        "updatedFields": {"handover": {"to": "crates", "token": "2"}},
        "removedFields": ["dead"],
    }
    overwritten = line_of(
        {
            "operationType": "update",
            "documentKey": {"_id": copy},
            "wallTime": datetime.now(UTC),
            "updateDescription": update,
        }
    )
    assert overwritten is not None
    hidden, target = "~handover:parcels", "parcels.dead"
    log = PackLog(
        [
            ["pack", PACK, PARCELS, ["a", "b"], 1, 0.0, 0.0],
            ["copy", copy, hidden, {copy: "a"}, 1, 1.0, 2.0, target, "1", True],
            overwritten,
            ["set", PACK, {"done": {"0": 1}, "left": 1, "handed": [["2", [copy]]]}, 3.0],
        ]
    )
    assert list(log)[-1] == ["set", copy, {"token": None, "by": "2", "q": hidden}, 3.0]


def test_checker_messages_that_come_back_to_a_pack_are_undone() -> None:
    lines = [
        ["pack", PACK, PARCELS, ["a", "b"], 1, 0.0, 0.0],
        ["set", PACK, {"done": {"0": 1}, "left": 1}, 1.0],
        ["set", PACK, {"done": {"0": 2}, "left": 1}, 2.0],
    ]
    log = PackLog(lines)
    list(log)
    assert list(log.wrong) == ["undone"]


def test_stored_pack_stands_for_what_it_still_has() -> None:
    pack = {"_id": ObjectId(PACK), "q": PARCELS, "done": [2], "b": [{}, {}, {}]}
    assert ids_of(pack) == [message("0"), message("2")]
    part = {"_id": f"{PACK}/t.3", "q": PARCELS, "done": [2], "b": [{}, {}], "at": [3, 9]}
    assert ids_of(part) == [message("3")]
    assert ids_of({"_id": "a", "q": "orders"}) == ["a"]


def test_result_under_the_id_of_a_message_is_another_message(scenario: Scenario) -> None:
    """Both may be stored, claimed and settled at once."""
    result = f"results/{message('0')}"
    scenario.packed(PACK, ["a", "b"]).called("push", "results", [result], "ok", [result])
    scenario.inserted(message("0"), "results").held(message("0"), "1", PARCELS, pack=PACK)
    scenario.received(result, "2", "results").claimed(message("0"), "2")
    scenario.settled("commit", result, "2", "results").deleted(message("0"))
    expect_only(scenario.check(message("0"), message("1")))
