"""Claims: a claim writes a unique token, reads its messages by it, and is recovered by it.

There is no database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from bson import MinKey

from pyqueue import ConfigurationError, DuplicateKey, InvalidMessage, Message, Unavailable
from pyqueue.backends.byte_limit import Limits
from pyqueue.backends.giving_back import give_back
from pyqueue.backends.invalid import decode
from pyqueue.backends.options import Options
from pyqueue.backends.popping import undo_pop
from pyqueue.backends.queue_plans import QueuePlans, plans_of
from pyqueue.backends.scan import FIRST
from pyqueue.requests import Change, Delete, Find, FindAndModify, Insert, Update, Wait, WriteFailure
from pyqueue.runtime.waiters import Waiters
from tests.plans.runner import NOW, Runner, after, giving, message, standard
from tests.plans.steps import Steps, lasting


def document(id: str, **fields: Any) -> dict[str, Any]:
    """Return a message that was received once."""
    return message(id, tries=1) | fields


NOT_PAUSED: list[Any] = [{"_id": "~queue:t"}]


def seen(*ids: str) -> list[dict[str, Any]]:
    """Return the fields of these messages that a scan reads."""
    return [{"_id": id, "when": NOW} for id in ids]


def takes(id: str, **fields: Any) -> Callable[[Any], dict[str, Any]]:
    """Return an answer to a claim of one: the message as the claim leaves it."""
    return lambda command: document(id, **fields, **command.update["$set"])


def mine(*ids: str, until: float = 60) -> Callable[[Any], list[dict[str, Any]]]:
    """Return an answer to a read by a token: these messages have it."""
    return lambda command: [
        document(id, token=command.filter["token"], when=after(until)) for id in ids
    ]


def popping(*ids: str, answers: Sequence[Any]) -> Runner:
    """Return a runner whose first claim takes these messages for a pop."""
    return Runner(NOT_PAUSED, seen(*ids), Change(len(ids), None), mine(*ids, until=30), *answers)


def receive(runner: Runner, limit: int, *, history: float | None = None, **how: Any) -> list[Any]:
    """Receive without waiting. Return the ids."""
    plan = standard(history=history).receive(Waiters("t"), limit, timeout=0, **how)
    return [each.id for each in runner.run(plan)]


def test_claim_writes_a_token_and_the_end_of_the_lease() -> None:
    runner = Runner(NOT_PAUSED, takes("m1"), now=after(5))
    (held,) = runner.run(standard(lease=30).receive(Waiters("t"), 1, timeout=0))
    command = runner.commands[1]
    assert isinstance(command, FindAndModify)
    assert command.w1
    assert command.max_time_s == 29  # of 30 s: the rest is for finding the outcome
    assert command.hint == "hot"
    update: Any = command.update
    put = update["$set"]
    assert (put["when"], put["reserved"], put["owner"]) == (after(35), after(5), "me")
    assert command.filter["when"] == {"$lte": after(5)}
    assert command.filter["_id"] == {"$ne": "~queue:a"}
    assert update["$inc"] == {"tries": 1, "deliveries": 1}
    assert (held.token, held.until) == (put["token"], after(35))


def test_every_claim_has_a_unique_token() -> None:
    tokens = set()
    for _ in range(50):
        runner = Runner(NOT_PAUSED, takes("m1"))
        tokens.add(runner.run(standard().receive(Waiters("t"), 1, timeout=0))[0].token)
    assert len(tokens) == 50


def test_batch_is_read_by_its_token_after_the_claim() -> None:
    """A message may be replaced between scan and claim, so the scanned document is stale."""
    runner = Runner(
        NOT_PAUSED,
        seen("m1", "m2"),
        Change(1, None),
        lambda command: [
            document("m2", token=command.filter["token"], payload="replaced", when=after(60))
        ],
    )
    held = runner.run(standard().receive(Waiters("t"), 3, timeout=0))
    scan, claim, read = runner.commands[1:]
    assert isinstance(scan, Find)
    assert scan.projection == {"_id": 1, "when": 1}
    assert isinstance(claim, Update)
    assert (claim.w1, claim.max_time_s) == (True, 29)
    assert claim.filter == {"_id": {"$in": ["m1", "m2"]}, "q": "a", "when": {"$lte": NOW}}
    assert isinstance(read, Find)
    assert read.filter["token"] == claim.update["$set"]["token"]
    assert read.filter["_id"] == {"$in": ["m1", "m2"]}
    assert [(each.id, each.payload) for each in held] == [("m2", "replaced")]


@pytest.mark.parametrize("stored", [5, 3, 2])
def test_claim_takes_in_callers_that_come_during_it(stored: int) -> None:
    """They would else wait for this claim, and claim apart from it ever after."""
    taken = ["m0", "m1", "m2", "m3"][:stored]
    runner = Runner(NOT_PAUSED, seen(*(f"m{n}" for n in range(stored))))
    runner.latecomers = [Limits(1, 1000), Limits(1, 1000)]
    waiters = Waiters("t")
    waiters.scan.last_claim, waiters.scan.largest_seen = 3, 200
    runner.answers += [Change(len(taken), None), mine(*taken)]
    held = runner.run(standard().receive(waiters, 2, timeout=0))
    scan, claim, read = runner.commands[1:]
    assert scan.limit == 5  # the limit of the call plus the size of the last claim
    assert claim.filter["_id"] == read.filter["_id"] == {"$in": taken}
    assert [each.id for each in held] == taken[:2]
    late = [[document["_id"] for document, _ in share] for share in runner.results]
    assert late == ([] if stored == 2 else [taken[2:3], taken[3:4]])


def test_claim_continues_for_callers_beyond_its_scan() -> None:
    def read(*taken: str) -> list[Any]:
        return [seen(*taken), Change(len(taken), None), mine(*taken, until=0)]

    runner = Runner(NOT_PAUSED, *read("m0", "m1", "m2", "m3", "m4"), *read("m5", "m6"))
    runner.latecomers = [Limits(1, 1000)] * 5
    waiters = Waiters("t")
    waiters.scan.last_claim, waiters.scan.largest_seen = 3, 200
    assert len(runner.run(standard().receive(waiters, 2, timeout=0))) == 2
    assert [each.limit for each in runner.commands if isinstance(each, Find)] == [1, 5, 5, 7, 2]
    assert [len(share) for share in runner.results] == [1] * 5


def test_claim_that_lost_every_message_scans_again() -> None:
    runner = Runner(
        NOT_PAUSED,
        seen("m1"),
        Change(0, None),
        seen("m2"),
        Change(1, None),
        mine("m2"),
        [],  # the end of the queue, in case the last scan did not start at the first message
    )
    assert receive(runner, 5) == ["m2"]


def test_contested_claim_skips_ahead_then_starts_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("random.randrange", lambda most: most - 1)
    runner = Runner(
        NOT_PAUSED,
        seen("m1", "m2", "m3"),
        Change(1, None),  # another claim has two of them
        mine("m1"),
        [],  # there is nothing that far ahead
        seen("m4"),
        Change(1, None),
        mine("m4"),
    )
    assert receive(runner, 3) == ["m1", "m4"]
    scans = [each for each in runner.commands if isinstance(each, Find) and each.sort]
    assert [each.skip for each in scans] == [0, 3, 0]


def test_unknown_claim_is_recovered_by_its_token() -> None:
    runner = Runner(
        NOT_PAUSED,
        Unavailable("cut off"),
        lambda command: [
            document("m1", token=command.filter["token"], when=command.filter["when"])
        ],
    )
    (held,) = runner.run(standard().receive(Waiters("t"), 1, timeout=0))
    claim, read = runner.commands[1:]
    assert read.filter["token"] == claim.update["$set"]["token"] == held.token


def test_unknown_batch_claim_is_recovered_by_its_token() -> None:
    runner = Runner(
        NOT_PAUSED,
        seen("m1", "m2"),
        Unavailable("cut off"),
        mine("m2"),
        [{"_id": "m2", "when": after(60)}],  # nothing was left out because it is too large
        [],  # the update may have stopped half way, so it scans again
    )
    assert receive(runner, 5) == ["m2"]


@pytest.mark.parametrize("limit", [1, 5])
def test_claim_that_surely_failed_raises(limit: int) -> None:
    def answer(command: Any) -> Any:
        if isinstance(command, Find):
            return [] if "token" in command.filter else seen("m1")
        raise Unavailable("cut off")

    runner = Runner(NOT_PAUSED, *[answer] * 20)
    with pytest.raises(Unavailable, match="cut off"):
        runner.run(standard().receive(Waiters("t"), limit, timeout=0))
    claims = [each for each in runner.commands if isinstance(each, (FindAndModify, Update))]
    assert 1 <= len(claims) <= 3  # it is repeated no more than twice
    assert "token" in runner.commands[-1].filter  # and no message stays claimed


def test_plain_pop_is_one_command() -> None:
    runner = Runner(NOT_PAUSED, document("m1"))
    (message,) = runner.run(standard().receive(Waiters("t"), 1, timeout=0, pop=True))
    assert message.id == "m1"
    take = runner.commands[1]
    assert isinstance(take, FindAndModify)
    assert take.update is None


def test_pop_many_claims_reads_and_deletes_by_token() -> None:
    runner = popping("m1", "m2", answers=[2])
    assert receive(runner, 5, pop=True) == ["m1", "m2"]
    claim, delete = runner.commands[2], runner.commands[4]
    assert "$inc" not in claim.update  # a pop does not count as a try
    assert isinstance(delete, Delete)
    assert delete.filter["token"] == claim.update["$set"]["token"]


@pytest.mark.parametrize(
    ("answers", "handed_out"),
    [
        # The claim was undone, or its lease has ended: other processes have both.
        ([0, 0, 0], []),
        # Its lease ends soon, and another process has one.
        ([0, 0, 1], ["m2"]),
        # Another writer has replaced one.
        ([1, [{"_id": "m2"}]], ["m1"]),
    ],
)
def test_pop_many_returns_messages_it_finished(answers: list[Any], handed_out: list[str]) -> None:
    scans_again: list[Any] = [] if handed_out else [[]]
    runner = popping("m1", "m2", answers=[*answers, *scans_again])
    assert receive(runner, 5, pop=True) == handed_out


def test_pop_many_that_claims_a_message_twice_returns_it() -> None:
    """Its first claim of m1 lapsed before it had enough. The second one deletes the message."""

    def left(command: Find) -> list[dict[str, Any]]:
        return [{"_id": "m1", "token": runner.commands[5].update["$set"]["token"]}]

    runner = Runner(
        NOT_PAUSED,
        seen("m1", "m2"),
        Unavailable("the reply was lost"),  # so it scans again for the rest
        mine("m1", "m2", until=30),
        seen("m1"),
        Change(1, None),
        mine("m1", until=30),
        1,
        left,
        1,
    )
    assert sorted(receive(runner, 5, pop=True)) == ["m1", "m2"]


def test_pop_many_is_unknown_if_some_were_finished_elsewhere() -> None:
    """Some messages are gone, and the call cannot know which of them it finished itself."""
    runner = popping("m1", "m2", "m3", answers=[1, [{"_id": "m3", "token": "other"}]])
    with pytest.raises(Unavailable) as caught:
        receive(runner, 5, pop=True)
    assert caught.value.ids == ["m1", "m2"]


def test_pop_many_with_history_knows_its_messages() -> None:
    def found(command: Find) -> list[dict[str, Any]]:
        assert command.filter["token"] == runner.commands[2].update["$set"]["token"]
        return [{"_id": "m1"}]

    runner = popping("m1", "m2", "m3", answers=[Change(1, None), found])
    assert receive(runner, 5, pop=True, history=60) == ["m1"]


def test_claim_one_by_one_skips_what_was_claimed_meanwhile() -> None:
    refusal = InvalidMessage("no number")
    runner = Runner(
        NOT_PAUSED,
        seen("m1", "m2"),
        refusal,  # the claim of both
        [],  # claimed so far
        [{"_id": "m1"}, {"_id": "m2"}],  # not claimed
        refusal,  # m1
        [],  # another process was faster; it may put m1 back now, so nothing reads it again
        Change(1, None),  # m2
        [{"_id": "m2"}],
        mine("m2", until=30),
        [],  # the following claims
    )
    assert receive(runner, 5) == ["m2"]


def test_refused_claim_keeps_its_messages() -> None:
    """It gives none back: they would be claimed again and again around each malformed message."""
    ids = [f"m{number}" for number in range(20)]
    runner = Runner(
        NOT_PAUSED,
        seen(*ids, "malformed"),
        InvalidMessage("no number"),
        lambda command: [{**each, "bytes": 200} for each in mine(*ids)(command)],
        *(mine(id) for id in ids),
        [],  # the following claims
    )
    assert receive(runner, 30) == ids


def test_receive_stops_claiming_before_its_leases_end() -> None:
    steps = Steps([message(f"m{number:03}") for number in range(300)])
    steps.trip_s = 0.2
    held = steps.run(standard(lease=4).receive(Waiters("t"), 300, timeout=0))
    assert 100 <= len(held) < 300
    assert min(each.until for each in held) - steps.now > timedelta(seconds=2)


def test_burials_of_many_messages_leave_the_others_their_leases() -> None:
    malformed = [message(f"bad{number:03}", headers=5) for number in range(60)]
    steps = Steps([*malformed, *(message(f"m{number:03}") for number in range(40))])
    steps.trip_s = 0.05
    held = steps.run(standard(lease=2).receive(Waiters("t"), 100, timeout=0))
    assert len(held) == 40
    assert min(each.until for each in held) - steps.now > timedelta(seconds=1)


def test_exhausted_message_is_buried_and_the_claim_continues() -> None:
    runner = Runner(
        NOT_PAUSED,
        takes("worn", tries=4),
        Change(1, None),
        takes("good"),
    )
    (held,) = runner.run(standard(max_tries=3).receive(Waiters("t"), 1, timeout=0))
    assert held.id == "good"
    claim, bury = runner.commands[1:3]
    assert bury.filter == {"_id": "worn", "token": claim.update["$set"]["token"]}
    assert bury.update["$set"]["q"] == "a.dead"
    assert bury.update["$set"]["dead"]["tries"] == 3


def test_paused_queue_is_not_claimed_and_its_flag_is_reread() -> None:
    waiters = Waiters("t")
    runner = Runner([{"paused": True}], [{"paused": False}], takes("m1"))

    def wait(request: Wait) -> bool:
        assert request.until <= runner.now + timedelta(seconds=5)
        return runner.pass_time(request)

    runner.on_wait = wait
    (held,) = runner.run(standard().receive(waiters, 1, timeout=None))
    assert held.id == "m1"
    assert len(runner.waits) == 1


def test_receive_waits_until_the_next_when() -> None:
    runner: Runner = Runner(
        NOT_PAUSED,
        None,
        [{"_id": "m1", "when": after(0.7)}],
        *[lambda command: takes("m1")(command) if runner.now >= after(0.7) else None] * 9,
    )
    runner.on_wait = runner.pass_time
    (held,) = runner.run(standard().receive(Waiters("t"), 1, timeout=60))
    assert held.id == "m1"
    assert runner.now == after(0.7)


def test_pause_is_noticed_after_the_clock_was_set_back() -> None:
    waiters = Waiters("t")
    runner = Runner(NOT_PAUSED, None)
    assert runner.run(standard().receive(waiters, 1, timeout=0)) == []
    runner.now = after(-60)
    runner.answers = [[{"paused": True}]]
    assert runner.run(standard().receive(waiters, 1, timeout=0)) == []
    assert waiters.scan.paused


def test_next_when_is_read_once_a_second() -> None:
    waiters = Waiters("t")
    runner = Runner(NOT_PAUSED, *[lambda command: [] if isinstance(command, Find) else None] * 200)
    reads: list[datetime] = []

    def wait(request: Wait) -> bool:
        command = runner.commands[-1]
        if isinstance(command, Find) and command.projection == {"_id": 1, "when": 1}:
            reads.append(runner.now)
        runner.now = min(request.until, runner.now + timedelta(seconds=0.1))
        # Another consumer takes each message that this one is signalled.
        return waiters.on_signal(runner.now, runner.now)

    runner.on_wait = wait
    assert runner.run(standard().receive(waiters, 1, timeout=4.5)) == []
    assert reads == [after(seconds) for seconds in range(5)]


def test_receive_scans_once_more_after_subscribing() -> None:
    runner = Runner(NOT_PAUSED, None, takes("m1"))
    runner.listening = False
    (held,) = runner.run(standard().receive(Waiters("t"), 1, timeout=60))
    assert held.id == "m1"
    assert runner.waits == []


def test_timeout_is_measured_by_the_given_time() -> None:
    runner = Runner(NOT_PAUSED, *[lambda command: [] if isinstance(command, Find) else None] * 200)

    def wait(request: Wait) -> bool:
        assert request.deadline == 10
        runner.now = min(request.until, after(request.deadline))
        return True

    runner.on_wait = wait
    assert runner.run(standard(poll=3).receive(Waiters("t"), 1, timeout=10)) == []
    assert runner.now == after(10)
    assert len(runner.waits) >= 4  # the fallback poll


def test_queue_is_checked_after_its_part_of_the_poll() -> None:
    runner = Runner(NOT_PAUSED, *[lambda command: [] if isinstance(command, Find) else None] * 200)
    waiting = Waiters("t", poll_share=0.75)
    waiting.scan.rescan_at = after(100)
    runner.on_wait = runner.pass_time
    assert runner.run(standard(poll=8).receive(waiting, 1, timeout=6)) == []
    assert [each.until for each in runner.waits] == [after(6)]


def test_empty_scan_is_repeated_when_a_rescan_is_due() -> None:
    def waiters() -> Waiters:
        waiters = Waiters("t")
        waiters.scan.lower_bound, waiters.scan.rescan_at = (after(-1), None), after(0.001)
        return waiters

    def late(command: Any) -> None:
        runner.now = after(0.001)

    runner = Runner(NOT_PAUSED, late, takes("m1"))
    (held,) = runner.run(standard().receive(waiters(), 1, timeout=0))
    first, second = runner.commands[1:]
    assert first.filter["when"] == {"$gte": after(-1), "$lte": NOW}
    assert second.filter["when"] == {"$lte": runner.now}
    assert (held.id, held.until) == ("m1", after(60.001))

    def found(command: Any) -> Any:
        late(command)
        return takes("m1")(command)

    runner = Runner(NOT_PAUSED, found)
    (held,) = runner.run(standard().receive(waiters(), 1, timeout=0))
    assert held.id == "m1"


@pytest.mark.parametrize(("took", "found"), [(0.005, False), (0.001, False), (0.005, True)])
def test_sentinel_moves_ahead_after_a_slow_empty_scan(took: float, found: bool) -> None:
    def scan(command: Any) -> Any:
        runner.now = after(took)
        return takes("m1")(command) if found else None

    runner = Runner(NOT_PAUSED, scan, Change(1, None))
    assert len(runner.run(standard().receive(Waiters("t"), 1, timeout=0))) == found
    updates = [command for command in runner.commands if isinstance(command, Update)]
    if found or took < 0.002:
        assert updates == []
    else:
        (update,) = updates
        assert update.w1
        assert update.filter == {"_id": {"$in": ["~queue:a"]}, "when": {"$lt": after(1 + took)}}
        assert update.update == {"$set": {"when": after(2 + took)}}


@pytest.mark.parametrize(
    ("took", "moved"),
    [
        # A slow network, a machine that is busy for a while, deleted entries at first or later.
        ([0.03] * 60, 1),
        ([0.001] * 20 + [0.5] * 20 + [0.001] * 20, 1),
        ([0.03, *[0.001] * 20], 20),
        ([0.001] * 20 + [0.01] + [0.001] * 20, 20),
        ([0.5] * 2 + [0.001] * 20 + [0.03] + [0.001] * 20, 21),
    ],
)
def test_record_is_moved_only_as_long_as_that_helps(took: list[float], moved: int) -> None:
    """Otherwise each idle consumer on a slow network would write every other second."""
    waiters, moves = Waiters("t"), 0

    def answer(command: Any) -> Any:
        if isinstance(command, Update):
            return Change(1, None)
        if not isinstance(command, FindAndModify):  # for the upkeep
            return []
        runner.now += timedelta(seconds=took[number])
        return None

    for number in range(len(took)):
        runner = Runner(*[answer] * 9, now=after(2 * number))
        waiters.scan.flag_read, waiters.scan.limit.known = runner.now, True
        assert runner.run(standard().receive(waiters, 1, timeout=0, is_known=True)) == []
        moves += sum(isinstance(command, Update) for command in runner.commands)
    assert moves == pytest.approx(moved, abs=1)


def test_undo_of_a_reservation_leaves_no_trace() -> None:
    runner = Runner((2, []))
    backend = standard()
    taken = [
        document(id, token="t1", when=after(60), due=due)
        for id, due in (("m1", NOW), ("m2", after(1)))
    ]
    runner.run(give_back(*giving(backend)[:2], taken))
    # One for any number of messages: no consumer can receive them in between.
    (command,) = runner.commands
    assert [filter for filter, _ in command.pairs] == [
        {"_id": id, "token": "t1"} for id in ("m1", "m2")
    ]
    for (_, update), due in zip(command.pairs, (NOW, after(1)), strict=True):
        assert update["$set"] == {"when": due}
        assert update["$inc"] == {"tries": -1, "deliveries": -1}
        assert {"token", "owner", "reserved"} <= set(update["$unset"])
    assert runner.signals == [("a", NOW)]


def test_undo_of_a_pop_inserts_the_same_message() -> None:
    runner = Runner([])
    backend = standard()
    popped = document("m1", key="k", tries=2, headers={"a": 1})
    runner.run(undo_pop(*giving(backend), [(popped, decode(backend.codec, popped, NOW))]))
    (command,) = runner.commands
    assert isinstance(command, Insert)
    assert command.documents == [popped]


@pytest.mark.parametrize("history_s", [None, 60.0])
def test_undo_of_a_pop_of_a_message_without_due(history_s: float | None) -> None:
    """Its ``when`` is the end of the lease that the pop had."""
    runner, backend = (
        Runner([] if history_s is None else Change(1, None)),
        standard(history=history_s),
    )
    popped = document("m1", token="t1", when=after(60), reserved=NOW)
    del popped["due"]
    runner.run(undo_pop(*giving(backend), [(popped, decode(backend.codec, popped, NOW))]))
    command: Any = runner.commands[0]
    put = command.documents[0] if history_s is None else command.update["$set"]
    assert put["when"] == NOW
    assert runner.signals == [("a", NOW)]


def test_undo_of_many_pops_takes_two_commands() -> None:
    runner = Runner([WriteFailure(1, "key", DuplicateKey("taken"))], [])
    backend = standard()
    popped = [document(id, key=key) for id, key in (("m1", "k1"), ("m2", "k2"))]
    runner.run(
        undo_pop(*giving(backend), [(each, decode(backend.codec, each, NOW)) for each in popped])
    )
    assert [[each["_id"] for each in command.documents] for command in runner.commands] == [
        ["m1", "m2"],
        ["m2"],
    ]
    (again,) = runner.commands[1].documents
    assert "key" not in again
    assert again["last_key"] == "k2"


def test_backend_is_small_and_pickles() -> None:
    import pickle

    backend = standard(history=60)
    data = pickle.dumps(backend)
    assert len(data) < 1000
    copy = pickle.loads(data)
    assert (copy.queue, copy.options) == (backend.queue, backend.options)
    assert copy.terms.owner() == backend.terms.owner() == "me"


def test_message_without_a_valid_due_is_given_back_at_once() -> None:
    """Its ``when`` is the end of the lease, for which it would stay out of sight."""
    held = {"_id": "m1", "token": "t", "when": after(60)}
    runner = Runner((2, []))
    documents = [held | {"due": MinKey()}, held | {"_id": "m2", "due": after(-5)}]
    runner.run(give_back("a", standard().kind, documents))
    (command,) = runner.commands
    assert [update["$set"]["when"] for _, update in command.pairs] == [FIRST, after(-5)]
    assert runner.signals == [("a", FIRST)]


# ---- prepared receives


def test_each_receive_follows_its_arguments() -> None:
    """A client uses again what the last receive of a queue prepared, if the arguments are equal."""
    steps, waiting = lasting(), Waiters("a")
    queue, other = (
        plans_of("a", Options(dead_letter="dead", lease=lease), kind=kind)
        for lease, kind in ((60, "standard"), (90, None))
    )
    steps.run(queue.push(list(range(9))))

    def received(plans: QueuePlans, limit: Any = 1, **how: Any) -> list[Any]:
        return steps.run(plans.receive(waiting, limit, timeout=0, **how))

    assert [each.lease for each in received(queue)] == [60]
    assert [each.lease for each in received(queue, lease=5)] == [5]
    assert [type(each) for each in received(queue, pop=True)] == [Message]
    assert [each.lease for each in received(other)] == [90]
    assert [each.lease for each in received(queue)] == [60]
    assert len(received(queue, 2)) == 2
    assert len(received(queue, 2, max_bytes=1)) == 1
    for wrong in (True, 2.0):  # they equal a number that was given before
        with pytest.raises(ConfigurationError, match="limit"):
            received(queue, wrong)
    steps.run(queue.pause(True))
    steps.seconds = 6
    assert received(queue) == []
