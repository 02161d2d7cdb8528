"""Bad records of named claims: noted by readers, buried by the acknowledgement. No database."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue.backends import reading
from pyqueue.backends.claims import acknowledging as module
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.errors import Fenced, InvalidMessage, Unavailable
from pyqueue.requests import Change, Delete, Find, Update, UpdateEach, WriteFailure
from tests.plans.runner import NOW, Runner, message, standard
from tests.plans.test_named_claims import LEASE, Bench, interrupted, one

REASON = "does not match int: a value is of type str"


def claimed(bench: Bench, claims: NamedClaims, limit: int = 100) -> tuple[str, int]:
    """Claim as a stream does; return the token and the number of the claim."""
    token = bench.run(claims.adopt(LEASE, count=False))
    return token, bench.run(claims.claim(token, limit, LEASE))


def begun(messages: int, **options: Any) -> tuple[Bench, NamedClaims, str, int]:
    """Return a bench with a claim of all its messages, and the token and number of the claim."""
    bench = Bench(messages, **options)
    claims = bench.claims()
    return (bench, claims, *claimed(bench, claims))


def writes(bench: Bench, since: int) -> list[Any]:
    """Return the commands after the first ``since`` that are no reads."""
    return [each for each in bench.process.commands[since:] if not isinstance(each, Find)]


def test_acknowledgement_buries_noted_messages_with_the_reason() -> None:
    bench = Bench(5)
    bench.push("keyed", key="k")
    claims = bench.claims()
    token, n = claimed(bench, claims)
    bench.run(claims.note_bad(token, n, {"m0003": REASON, "keyed": REASON}))
    assert bench.run(claims.acknowledge(token, n, 6)) == 6
    assert {each["_id"] for each in bench.messages} == {"m0003", "keyed"}
    for id in ("m0003", "keyed"):
        dead = bench.stored(id)
        assert (dead["q"], dead["dead"]["from"], dead["dead"]["reason"]) == (
            "a.dead",
            "a",
            "invalid",
        )
        assert (dead["error"]["type"], REASON in dead["error"]["message"]) == (
            "InvalidMessage",
            True,
        )
        assert dead["dead"]["tries"] == 1
        assert not {"token", "claim", "owner", "reserved"} & dead.keys()
    assert (bench.stored("keyed").get("key"), bench.stored("keyed")["last_key"]) == (None, "k")
    progress = bench.run(claims.progress(token))
    assert (progress.acknowledged, progress.buried, progress.lost) == (n, 2, 0)


def test_acknowledgement_uses_dead_letter_and_history() -> None:
    bench = Bench(3)
    options = Options(dead_letter="graves", history=60)
    claims = NamedClaims(plans_of("a", options), "g")
    token, n = claimed(bench, claims)
    bench.run(claims.note_bad(token, n, {"m0001": REASON}))
    assert bench.run(claims.acknowledge(token, n)) == 3
    assert [bench.stored(id).get("outcome") for id in ("m0000", "m0001", "m0002")] == [
        "committed",
        None,
        "committed",
    ]
    assert bench.stored("m0001")["q"] == "graves"


def test_repeated_note_changes_nothing() -> None:
    """Spark may repeat a task, or run it twice at once."""
    bench, claims, token, n = begun(3)
    for _ in range(2):
        bench.run(claims.note_bad(token, n, {"m0001": REASON}))
    bench.run(claims.acknowledge(token, n))
    bench.run(claims.note_bad(token, n, {"m0001": REASON}))  # a task that comes too late
    assert [(each["_id"], each["q"]) for each in bench.messages] == [("m0001", "a.dead")]
    assert "claim" not in bench.stored("m0001")
    assert bench.run(claims.progress(token)).bad == n


def test_note_after_a_takeover_is_fenced_or_without_effect() -> None:
    """The takeover comes before each command of the note in turn."""
    for kind in (UpdateEach, Update):
        bench, claims, former, n = begun(3)
        tokens: list[str] = []

        def take_over(
            bench: Bench = bench, claims: NamedClaims = claims, tokens: list[str] = tokens
        ) -> None:
            tokens.append(bench.run(claims.adopt(LEASE, count=False)))

        plan = claims.note_bad(former, n, {"m0001": REASON})
        if kind is Update:
            with pytest.raises(Fenced):
                interrupted(bench, plan, take_over, lambda each: isinstance(each, Update))
        else:
            interrupted(bench, plan, take_over, lambda each: isinstance(each, UpdateEach))
        # The task of the former runner failed, so the next one reads the batch again.
        assert ("bad" in bench.stored("m0001")["claim"]) == (kind is Update)
        bench.run(claims.note_bad(tokens[0], n, {"m0001": None}))
        assert bench.run(claims.acknowledge(tokens[0], n)) == 3
        assert bench.messages == []


def test_takeover_by_a_stream_keeps_notes_and_counts_no_try() -> None:
    """A query whose sink is down may start often. Its last batch may have been committed."""
    bench, claims, token, n = begun(3, max_tries=2)
    bench.run(claims.note_bad(token, n, {"m0001": REASON}))
    for _ in range(20):
        token = bench.run(claims.adopt(LEASE, count=False))
    assert [each["tries"] for each in bench.messages] == [1, 1, 1]
    assert bench.run(claims.acknowledge(token, n)) == 3
    assert [(each["_id"], each["q"]) for each in bench.messages] == [("m0001", "a.dead")]


def test_corrected_type_removes_notes() -> None:
    bench, claims, token, n = begun(3)
    bench.run(claims.note_bad(token, n, {"m0001": REASON, "m0002": REASON}))
    bench.run(claims.note_bad(token, n, {"m0001": None, "m0002": "another reason"}))
    bench.run(claims.acknowledge(token, n))
    (left,) = bench.messages
    assert (left["_id"], "another reason" in left["error"]["message"]) == ("m0002", True)


def test_takeover_by_a_stage_removes_notes() -> None:
    """A stage reads all messages itself. So does a stage that repeats a batch of a stream."""
    for stage in (True, False):
        bench, claims, token, n = begun(3)
        bench.run(claims.begin_work(token, n))
        bench.run(claims.note_bad(token, n, {"m0001": REASON}))
        token = bench.run(claims.adopt(LEASE, count=stage))
        if not stage:
            bench.run(claims.begin_work(token, n))
        assert all(each["claim"] == {"g": "a~g", "n": n} for each in bench.messages)
        assert [each["tries"] for each in bench.messages] == [2, 2, 2]


def test_acknowledgement_cut_short_is_finished_by_the_next() -> None:
    """It dies before each of its commands in turn. No noted message is finished as if read."""
    for steps in range(1, 12):
        bench, claims, token, n = begun(4)
        bench.run(claims.note_bad(token, n, {"m0002": REASON}))
        plan, died = claims.acknowledge(token, n, 4), True
        answer: Any = None
        try:
            for _ in range(steps):
                answer = bench.run(one(plan.send(answer)))
        except StopIteration:
            died = False
        plan.close()
        bench.run(claims.acknowledge(token, n, 4))
        assert [(each["_id"], each["q"]) for each in bench.messages] == [("m0002", "a.dead")]
        assert bench.state()["n"] == n
        if not died:
            break
    assert steps > 4


def test_acknowledged_claim_is_acknowledged_by_one_read() -> None:
    bench, claims, token, n = begun(2)
    bench.run(claims.acknowledge(token, n))
    before = len(bench.process.commands)
    assert bench.run(claims.acknowledge(token, n)) == 0
    assert len(bench.process.commands) == before + 1
    assert writes(bench, before) == []


@pytest.mark.parametrize("before", [UpdateEach, Delete])
def test_concurrent_acknowledgements_count_lost_messages_once(before: type) -> None:
    """The query and its listener may acknowledge a batch at the same time."""
    bench, claims, token, n = begun(6)
    bench.run(claims.note_bad(token, n, {"m0001": REASON}))
    bench.world.store.documents["m0005"] = bench.stored("m0005") | {"token": "another's"}

    def also() -> None:
        bench.run(claims.acknowledge(token, n, 6))

    interrupted(bench, claims.acknowledge(token, n, 6), also, lambda each: isinstance(each, before))
    progress = bench.run(claims.progress(token))
    assert (progress.acknowledged, progress.buried, progress.lost) == (n, 1, 1)
    assert {each["_id"] for each in bench.messages} == {"m0001", "m0005"}


def test_claim_that_a_stage_settles_loses_nothing() -> None:
    """The stage settles the messages of a stream one by one, so none is left to acknowledge."""
    bench, claims, token, n = begun(3)
    bench.run(claims.begin_work(token, n))
    for id in ("m0000", "m0001", "m0002"):
        bench.world.store.documents.pop(id)
    bench.run(claims.acknowledge(token, n, 3))
    assert bench.run(claims.progress(token)).lost == 0


def test_repeated_work_on_a_claim_counts_a_try() -> None:
    bench, claims, token, n = begun(2)
    tries = []
    for _ in range(3):
        bench.run(claims.begin_work(token, n))
        tries.append([each["tries"] for each in bench.messages])
        token = bench.run(claims.adopt(LEASE, count=False))
    assert tries == [[1, 1], [2, 2], [3, 3]]
    bench.run(claims.begin_work("another's", n))
    assert [each["tries"] for each in bench.messages] == [3, 3]


def test_large_burials_are_written_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BATCH", 2)
    bench, claims, token, n = begun(5)
    bench.run(claims.note_bad(token, n, {f"m000{number}": REASON for number in range(5)}))
    assert bench.run(claims.acknowledge(token, n, 5)) == 5
    sizes = [len(each.pairs) for each in bench.process.commands if isinstance(each, UpdateEach)]
    assert sizes == [2, 2, 1, 2, 2, 1]
    assert {each["q"] for each in bench.messages} == {"a.dead"}


def noted(id: str) -> dict[str, Any]:
    return message(id, token="t", tries=1, claim={"n": 1, "bad": REASON})


def test_burial_that_the_server_refuses_is_tried_without_labels() -> None:
    refused = WriteFailure(1, None, InvalidMessage("too large"))
    runner = Runner([noted("m0"), noted("m1")], (1, [refused]), [], Change(1, None))
    assert runner.run(module.bury_noted(standard().terms, {"token": "t"}, NOW)) == 2
    (again,) = [each for each in runner.commands if isinstance(each, Update)]
    assert again.filter == {"_id": "m1", "token": "t"}
    assert ("a.dead", NOW) in runner.signals


def test_burial_of_unknown_outcome_is_not_passed_over() -> None:
    unknown = WriteFailure(0, None, Unavailable("the server went away"))
    runner = Runner([noted("m0")], (0, [unknown]))
    with pytest.raises(Unavailable):
        runner.run(module.bury_noted(standard().terms, {"token": "t"}, NOW))


def test_note_of_unknown_outcome_fails_its_task() -> None:
    """Spark repeats the task. A message that is left out and not noted would be finished."""
    unknown = WriteFailure(0, None, Unavailable("the server went away"))
    runner = Runner((0, [unknown]))
    with pytest.raises(Unavailable):
        runner.run(NamedClaims(standard(), "g").note_bad("t", 1, {"m0": REASON}))


# ---- scans of an idle runner


def test_idle_scan_is_one_read() -> None:
    bench = Bench()
    assert bench.run(reading.due_in("a")) == float("inf")
    assert len(bench.process.commands) == 1
    bench.push("m")
    assert bench.run(reading.due_in("a")) == 0
    claims = bench.claims()
    claimed(bench, claims)
    assert LEASE - 1 < bench.run(reading.due_in("a")) <= LEASE


def test_scan_finds_a_message_behind_a_foreign_document() -> None:
    bench = Bench(1)
    bench.world.store.documents["m0000"]["when"] = []  # its place in the index is the first
    runner = Runner([{"_id": "m0000", "when": []}])
    assert runner.run(reading.due_in("a")) == 0


def test_idle_stage_writes_nothing() -> None:
    bench, claims, token, n = begun(1)
    assert bench.run(claims.has_work())
    bench.run(claims.acknowledge(token, n))
    before = len(bench.process.commands)
    assert not bench.run(claims.has_work())
    assert len(bench.process.commands) == before + 2
    assert writes(bench, before) == []
    bench.push("m")
    assert bench.run(claims.has_work())
    bench.world.store.documents["~queue:a"]["paused"] = True
    assert not bench.run(claims.has_work())


def test_claim_that_is_held_no_more_is_no_work() -> None:
    """Other consumers took the messages of a runner that died."""
    bench = Bench(2)
    claims = bench.claims()
    claimed(bench, claims)
    bench.world.store.documents.pop("m0000")
    bench.world.store.documents.pop("m0001")
    assert bench.run(claims.has_work())
    assert bench.run(claims.begin(5, LEASE))[2] == []
    assert not bench.run(claims.has_work())
