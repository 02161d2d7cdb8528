"""Named claims of buckets: whole packs under one token, settled together or message by message.

``test_faults`` disturbs them at each command. Whatever happens, a message is finished once, or is
delivered again, and it keeps its id.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

import bson
import pytest

from pyqueue import ConfigurationError, Fenced, LeaseLost
from pyqueue.backends.bucket import packs
from pyqueue.backends.claims import claims as module
from pyqueue.backends.claims.claims import ClaimRange, NamedClaims, divided
from pyqueue.backends.contents import backlog, contents_of
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.messages import UNCHANGED, Id
from pyqueue.payloads import OPTIONS, encode
from pyqueue.requests import Document, Plan, UpdateEach
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import Faults, Settler, check_ends
from tests.plans.steps import Steps, resume
from tests.plans.test_pack_moves import MESSAGES, check, documents, drain, ids, plans, stored

LEASE = 60.0
MB = 2**20
MOST_COMMANDS = 250
REASON = "does not match bigint"


class Batch(Settler):
    """A process that works on two batches of one group, and settles messages in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.claims = NamedClaims(plans("a"), "g")
        self.numbers: dict[Id, int] = {}
        self.finished: set[int] = set()

    def number(self, held: Any) -> int:
        return self.numbers[held.id]

    def work(self) -> Plan[None]:
        for _ in range(2):
            with suppress(Fenced):
                yield from self.batch()

    def batch(self) -> Plan[None]:
        claims, backend = self.claims, self.claims.backend
        token, n, _ = yield from claims.begin(7, LEASE, max_bytes=MB)
        for each in (yield from claims.read(ClaimRange(token, 0, n, ()))):
            found = claims.contents.messages(each)
            self.numbers |= {one["_id"]: one["payload"]["n"] for one in found}
        held = yield from claims.reservations(token, 0, n)
        for plan in (
            backend.rollback(tuple(held[:1]), delay=0, error="why"),
            backend.bury(tuple(held[1:2])),
            backend.move([(each, UNCHANGED) for each in held[2:4]], to=plans("c")),
        ):
            with suppress(LeaseLost):
                yield from plan
        yield from claims.note_bad(token, n, {each.id: REASON for each in held[4:5]})
        yield from self.settle(acknowledged(claims, token, n), held[5:], self.finished)


def acknowledged(claims: NamedClaims, token: str, n: int) -> Plan[None]:
    yield from claims.acknowledge(token, n)


def dead() -> QueuePlans:
    return plans_of("dead", Options(dead_letter="dead.dead"))


def audit(steps: Steps, *batches: Batch) -> None:
    """Check where each message is."""
    check(steps)
    finished = [number for each in batches for number in each.finished]
    delivered = drain(steps, [plans("a"), plans("c"), dead()])
    check_ends([each.payload["n"] for each in delivered], finished, batches, MESSAGES)
    assert {each.payload["n"]: each.id for each in delivered}.items() <= ids().items()


FAULTS = Faults(stored, Batch, audit, MOST_COMMANDS, check, stride=53)


def claimed(limit: int, *, steps: Steps | None = None) -> tuple[Steps, NamedClaims, str]:
    """Return a store, and a group that has claimed messages of its bucket."""
    steps = steps or Steps(stored())
    claims = NamedClaims(plans("a"), "g")
    token = steps.run(claims.adopt(LEASE))
    assert steps.run(claims.claim(token, limit, LEASE, max_bytes=MB)) == 1
    return steps, claims, token


def of_numbers(*numbers: int) -> list[str]:
    return [ids()[number] for number in numbers]


def test_batches_without_faults() -> None:
    steps, batch = Steps(stored()), Batch()
    steps.run(batch.work())
    assert len(batch.finished) == 11
    audit(steps, batch)


# ---- claiming


@pytest.mark.parametrize(("limit", "taken"), [(1, 5), (5, 5), (6, 10), (19, 20), (1000, 20)])
def test_claim_takes_whole_packs(limit: int, taken: int) -> None:
    steps, claims, token = claimed(limit)
    assert steps.run(claims.ids(token, 0, 1)) == of_numbers(*range(taken))
    assert sum(steps.run(claims.sizes(token, 0, 1)).values()) == taken
    found = documents(steps, "a")
    assert [each["c"] for each in found] == [1] * (taken // 5) + [0] * (4 - taken // 5)
    assert [each["tries"] for each in found] == [each["c"] for each in found]
    assert steps.run(backlog("a", plans("a").kind, 100))[0] == 20 - taken
    assert steps.run(backlog("a", plans("a").kind, 3))[0] == min(3, 20 - taken)


def test_claim_of_a_bucket_ends_at_its_bytes() -> None:
    steps = Steps(stored())
    size = len(bson.encode(documents(steps, "a")[0]))
    claims = NamedClaims(plans("a"), "g")
    token = steps.run(claims.adopt(LEASE))
    for n, (max_bytes, count) in enumerate([(1, 5), (2 * size, 10), (None, 5)], 1):
        steps.run(claims.claim(token, 100, LEASE, max_bytes=max_bytes))
        assert len(steps.run(claims.ids(token, n - 1, n))) == count


def test_claim_hands_out_a_pack_that_lapsed_as_a_whole() -> None:
    """A consumer would get a part of it. A stage finds the message that kills its process."""
    steps = Steps(stored())
    steps.run(plans("a").receive(Waiters("a"), 5, timeout=0))
    steps.seconds += 61
    claims = NamedClaims(plans("a"), "g")
    token = steps.run(claims.adopt(LEASE))
    steps.run(claims.claim(token, 100, LEASE))
    assert len(steps.run(claims.reservations(token, 0, 1))) == 20


def test_claim_of_a_bucket_refuses_a_rate() -> None:
    steps = Steps(stored())
    rate = {"$set": {"shape.limit": {"rate": 5}, "v": 2}}
    steps.collection.update_one({"_id": "~queue:a"}, rate)
    claims = NamedClaims(plans("a"), "g")
    token = steps.run(claims.adopt(LEASE))
    with pytest.raises(ConfigurationError, match=r"claim: .*so it cannot obey the rate"):
        steps.run(claims.claim(token, 5, LEASE))


def test_claim_prepares_packs_of_former_holders() -> None:
    """It removes an empty pack, and buries what only resembles a pack."""
    steps = Steps(stored())
    first, second, *_ = documents(steps, "a")
    full = packs.setting((1 << 5) - 1)
    done = {name: value["or"] for name, value in full["$bit"].items()}
    steps.collection.update_one({"_id": first["_id"]}, {"$set": {**done, "n": 0}})
    steps.collection.update_one({"_id": second["_id"]}, {"$set": {"n": 3}})
    _, claims, token = claimed(100, steps=steps)
    assert steps.run(claims.ids(token, 0, 1)) == of_numbers(*range(10, 20))
    assert {each["_id"]: each["q"] for each in steps.all() if "b" in each}.items() >= {
        (second["_id"], "dead")
    }
    assert first["_id"] not in {each["_id"] for each in steps.all()}


def test_takeover_buries_what_only_resembles_a_pack() -> None:
    """The last runner died within its claim, perhaps before it had buried the document."""
    for at in range(MOST_COMMANDS):
        steps = Steps(stored())
        malformed = documents(steps, "a")[1]["_id"]
        steps.collection.update_one({"_id": malformed}, {"$unset": {"done": 1}})
        claims = NamedClaims(plans("a"), "g")
        token = steps.run(claims.adopt(LEASE))
        running = steps.stalled(claims.claim(token, 100, LEASE), at)
        _, _, found = steps.run(claims.begin(100, LEASE))
        assert {*found} == {*of_numbers(*range(5), *range(10, 20))}
        assert {each["_id"] for each in documents(steps, "dead")} == {malformed}
        if running is None:
            return
    pytest.fail("the claim does not end")


@pytest.mark.parametrize("limit", [1, 2])
def test_claim_passes_packs_that_are_empty(limit: int) -> None:
    """The next claim deletes a pack whose last message was removed."""
    steps = Steps(stored())
    assert all(steps.run(plans("a").remove(ids()[number])) for number in range(10))
    claims = NamedClaims(plans("a"), "g")
    token = steps.run(claims.adopt(LEASE))
    assert steps.stalled(claims.claim(token, limit, LEASE), 60) is None, "it does not end"
    n = steps.run(claims.progress()).claimed
    assert steps.run(claims.ids(token, n - 1, n)) == of_numbers(*range(10, 15))
    assert len(documents(steps, "a")) == 2


def test_claim_publishes_what_a_former_holder_handed_over() -> None:
    """The process died between its decision and the publication."""
    for at in range(20):
        steps = Steps(stored())
        held = steps.run(plans("a").receive(Waiters("a"), 5, timeout=0))
        running = steps.stalled(plans("a").bury(held[1:2]), at)
        if any(each.get("handed") for each in steps.all()):
            break
    assert running is not None
    steps.seconds += 61
    _, claims, token = claimed(100, steps=steps)
    assert {*steps.run(claims.ids(token, 0, 1))} == {*ids().values()} - {ids()[1]}
    assert [each["_id"] for each in documents(steps, "dead")] == of_numbers(1)
    assert steps.run(claims.acknowledge(token, 1)) == 19


# ---- reading


def with_parts() -> Steps:
    """Return a store with packs, ordinary messages and parts: ids of both types."""
    steps = Steps(stored())
    held = steps.run(plans("a").receive(Waiters("a"), 5, timeout=0))
    steps.run(plans("a").move([(each, UNCHANGED) for each in held[1:4]], to=plans("c")))
    again = steps.run(plans("c").receive(Waiters("c"), 5, timeout=0))
    steps.run(plans("c").move([(each, UNCHANGED) for each in again], to=plans("a")))
    steps.run(plans("a").rollback(held[:1], delay=0))
    steps.run(plans("a").release(held[4:]))
    return steps


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_of_a_claim_are_disjoint_and_complete(parts: int) -> None:
    steps, claims, token = claimed(100, steps=with_parts())
    assert {type(each["_id"]) for each in documents(steps, "a")} > {str}
    ranges = steps.run(claims.ranges(token, 0, 1, parts))
    assert len(ranges) == min(parts, len(documents(steps, "a")))
    found = [
        one["_id"]
        for part in ranges
        for each in steps.run(claims.read(part))
        for one in claims.contents.messages(each)
    ]
    assert Counter(found) == Counter(ids().values())
    assert divided(steps.run(claims.sizes(token, 0, 1)), parts) == [each.ranges for each in ranges]


def test_messages_in_bson_equal_the_decoded_messages() -> None:
    """For packs with headers, notes and parts, with messages that have left, and for messages."""
    steps, claims, token = claimed(100, steps=with_parts())
    steps.run(claims.note_bad(token, 1, {ids()[7]: REASON, ids()[2]: REASON, ids()[0]: REASON}))
    first = {"$set": {"b.0.h": {"h": 1}, "type": "T", "trail": []}}
    steps.collection.update_many({"b": {"$exists": True}}, first)
    contents, every = claims.contents, documents(steps, "a")
    raw = contents.encoded([bytes(encode(each).raw) for each in every])
    decoded = [one for each in every for one in contents.messages(each)]
    assert bson.decode_all(b"".join(raw), OPTIONS) == decoded
    noted = {
        each["_id"]: each["claim"]["bad"] for each in decoded if "bad" in each.get("claim", ())
    }
    assert noted == dict.fromkeys(of_numbers(0, 2, 7), REASON)
    assert len(decoded) == 20


def test_contents_of_other_kinds_are_the_documents() -> None:
    contents = contents_of(plans_of("a", Options()).kind)
    document: Document = {"_id": "m", "b": [1], "n": 7}
    assert (contents.size(document), contents.messages(document)) == (1, [document])
    assert contents.encoded([b"m"]) == [b"m"]


# ---- settling


def test_acknowledgement_deletes_packs() -> None:
    steps, claims, token = claimed(10)
    assert steps.run(claims.acknowledge(token, 1, 10)) == 10
    assert len(documents(steps, "a")) == 2
    assert steps.run(claims.progress()).lost == 0
    assert steps.run(claims.acknowledge(token, 1)) == 0


def test_acknowledgement_counts_messages_that_were_taken() -> None:
    steps, claims, token = claimed(10)
    taken = {"$set": {"token": "thief"}, "$unset": {"claim": ""}}
    steps.collection.update_one({"_id": documents(steps, "a")[0]["_id"]}, taken)
    assert steps.run(claims.acknowledge(token, 1, 10)) == 5
    assert steps.run(claims.progress()).lost == 5


def test_rollback_keeps_packs_together() -> None:
    steps, claims, token = claimed(10)
    steps.run(claims.rollback(token, 1, "why"))
    found = documents(steps, "a")
    assert [(each["n"], each["tries"], "claim" in each) for each in found] == [
        (5, 1, False),
        (5, 1, False),
        (5, 0, False),
        (5, 0, False),
    ]
    assert [each["error"]["message"] for each in found[:2]] == ["why"] * 2
    assert [packs.level_of({**each, "c": each["c"] + 1}) for each in found] == [0] * 4


def test_rollback_in_pieces_lets_smaller_claims_follow() -> None:
    steps, claims, token = claimed(1)
    sizes = []
    for n in range(2, 8):
        steps.run(claims.rollback(token, n - 1, tried=False, pieces=2))
        steps.run(claims.claim(token, 1, LEASE))
        sizes.append(len(steps.run(claims.ids(token, n - 1, n))))
    assert sizes[0] == 1
    left = drain(steps, [plans("a"), plans("c"), dead()])
    assert Counter(each.payload["n"] for each in left) == Counter(range(20))
    assert {each.tries for each in left} == {1, 2}


def test_bad_message_leaves_its_pack_and_is_buried() -> None:
    steps, claims, token = claimed(5)
    bad: dict[Id, str | None] = {ids()[3]: REASON, ids()[1]: "was noted by an earlier reader"}
    steps.run(claims.note_bad(token, 1, bad))
    steps.run(claims.note_bad(token, 1, {ids()[1]: None}))
    fit = steps.run(claims.reservations(token, 0, 1, noted=False))
    assert [each.id for each in fit] == of_numbers(0, 1, 2, 4)
    assert steps.run(claims.acknowledge(token, 1, 5)) == 5
    (message,) = documents(steps, "dead")
    assert (message["_id"], message["dead"]["reason"]) == (ids()[3], "invalid")
    assert message["error"]["message"] == f"payload: it {REASON}"
    assert len(documents(steps, "a")) == 3


def test_bad_messages_of_a_pack_are_noted_by_one_update() -> None:
    steps, claims, token = claimed(10)
    steps.run(claims.note_bad(token, 1, dict.fromkeys(of_numbers(0, 1, 2, 7), REASON)))
    (change,) = [each for each in steps.commands if isinstance(each, UpdateEach)]
    assert len(change.pairs) == 2
    fit = steps.run(claims.reservations(token, 0, 1, noted=False))
    assert [each.id for each in fit] == of_numbers(3, 4, 5, 6, 8, 9)


def test_bad_message_that_was_taken_does_not_count_as_buried() -> None:
    """Another process takes the pack during the acknowledgement."""
    for at in range(MOST_COMMANDS):
        steps, claims, token = claimed(5)
        steps.run(claims.note_bad(token, 1, {ids()[3]: REASON}))
        running = steps.stalled(claims.acknowledge(token, 1, 5), at)
        if running is None:
            assert at > 10
            return
        taken = {"$set": {"token": "thief"}, "$unset": {"claim": ""}}
        pack = steps.collection.find_one_and_update({"token": token, "b": {"$exists": True}}, taken)
        assert resume(running) == 5 - (pack["n"] if pack else 0), f"taken before command {at}"
    raise AssertionError("more commands than expected")


def test_noted_message_stays_claimed_when_the_rest_is_settled() -> None:
    """Otherwise the end of the last message would give the noted one back."""
    steps, claims, token = claimed(5)
    steps.run(claims.note_bad(token, 1, {ids()[3]: REASON}))
    fit = steps.run(claims.reservations(token, 0, 1, noted=False))
    steps.run(plans("a").commit(fit))
    (pack, *_) = documents(steps, "a")
    assert (pack["n"], pack["token"]) == (1, token)
    assert steps.run(claims.acknowledge(token, 1)) == 1
    assert [each["_id"] for each in documents(steps, "dead")] == of_numbers(3)


def test_notes_before_work_are_kept_by_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAMP", 2)
    steps, claims, token = claimed(100, steps=with_parts())
    every = steps.run(claims.ids(token, 0, 1))
    steps.run(claims.mark(token, every[:12], 1))
    steps.run(claims.mark(token, every[8:12], 2))
    expected = dict.fromkeys(every[:8], 1) | dict.fromkeys(every[8:12], 2)
    assert steps.run(claims.marks(token, 1)) == expected
    steps.run(claims.mark("another's", every[:1], 9))
    assert steps.run(claims.marks(token, 1)) == expected
    # The message that left its pack is not found in the pack.
    alone = ids()[0]
    assert steps.run(claims.contents.find_shared({}, [alone, ids()[9], "x"])).keys() == {ids()[9]}
