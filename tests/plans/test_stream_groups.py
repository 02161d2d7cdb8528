"""Consumer groups: leases, tries, burials. ``test_faults`` disturbs them at each command.

Whatever happens, each position is finished once, or is delivered again, or is in the dead-letter
queue; never in two of these places, and never in none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any

import pytest

from pyqueue import ConfigurationError, LeaseLost, Unavailable
from pyqueue.backends import namespace
from pyqueue.backends.options import Options
from pyqueue.backends.queue_plans import plans_of
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.plans import StreamPlans
from pyqueue.backends.streams.settling import reload
from pyqueue.messages import UNCHANGED, Backoff
from pyqueue.payloads import Codec
from pyqueue.requests import Coalesce, Find, FindAndModify, Insert, Listen, Plan, Update, Wait
from pyqueue.runtime.waiters import Waiters
from tests.plans.faults import Faults, Settler, each_command
from tests.plans.steps import Steps, lost_reply, lost_request, resume

MESSAGES = 24
MOST_COMMANDS = 60


class Consumer(Settler):
    """A consuming process, and its knowledge of the ends of its messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        given = {"max_tries": 5, "dead_letter": "log.g.dead", "backoff": Backoff(jitter=0)}
        self.plans: GroupPlans = StreamPlans("log", Codec(), {}, owner="me").group(
            "g", Options(lease=60, **{**given, **options}), "first"
        )
        self.waiting = Waiters("log~g")
        self.committed: set[int] = set()
        self.buried: set[int] = set()

    def number(self, held: Any) -> int:
        position: int = held.position
        return position

    def receive(self, limit: int) -> Plan[list[Any]]:
        return self.plans.receive(self.waiting, limit, timeout=0)

    def work(self) -> Plan[None]:
        """Receive twice, and end each message in another way."""
        for limit in (6, 7):
            held = yield from self.receive(limit)
            yield from self.settle(self.plans.commit(held[:2]), held[:2], self.committed)
            yield from self.settle(self.plans.rollback(held[2:4], delay=0), held[2:4])
            yield from self.settle(self.plans.bury(held[4:5]), held[4:5], self.buried)
            yield from self.settle(self.plans.release(held[5:6]), held[5:6])
            yield from self.settle(self.plans.commit(held[6:]), held[6:], self.committed)


@cache
def stored() -> list[Any]:
    """Return the documents of a stream of packs of 5 messages, and of a group."""
    steps = Steps()
    stream = StreamPlans("log", Codec(), {})
    for first in range(0, MESSAGES, 5):
        steps.run(stream.append(list(range(first, min(first + 5, MESSAGES)))))
    steps.run(Consumer().plans.pause(False))
    return steps.all()


def holding(number: int, **options: Any) -> tuple[Steps, Consumer, list[Any]]:
    """Return a store, and a process with the messages that it holds."""
    steps, consumer = Steps(stored()), Consumer(**options)
    return steps, consumer, steps.run(consumer.receive(number))


@pytest.mark.parametrize("late", [Find, Update])
def test_late_burial_takes_nothing_back(late: type[Any]) -> None:
    """It sleeps before it shows its copy, until another process has shown it and moved it on."""
    steps, slow, quick = Steps(stored()), Consumer(), Consumer()
    held = steps.run(slow.receive(1))
    burying = steps.steps(slow.plans.bury(held))
    for command in burying:  # before it reads or updates its copy
        to = getattr(command, "projection", None) or getattr(command, "update", {}).get("$unset")
        if isinstance(command, late) and "to" in (to or ()):
            break
    steps.run(quick.receive(1))
    dead = plans_of("log.g.dead", Options(dead_letter="dead"))
    buried = steps.run(dead.receive(Waiters("log.g.dead"), 1, timeout=0))
    steps.run(dead.move([(each, UNCHANGED) for each in buried], to="further"))
    resume(burying)
    (one,) = steps.collection.find({"dead": {"$exists": False}, "trail.q": "log.g.dead"})
    assert (one["q"], one["payload"]) == ("further", held[0].payload)


def answered(request: Any) -> Plan[Any]:
    """Return a plan of one request."""
    return (yield request)


def drain(steps: Steps) -> list[int]:
    """Consume the rest, as a process that begins after all leases have ended."""
    steps.seconds += 1000
    last = Consumer(max_tries=None)
    delivered: list[int] = []
    while held := steps.run(last.receive(100)):
        delivered += [each.position for each in held]
        assert [each.payload for each in held] == [each.position for each in held]
        steps.run(last.plans.commit(held))
    group = steps.collection.find_one({"_id": "~group:log~g"})
    assert (group["out"], group["back"], group["left"]) == ([], [], [])
    assert group["next"] == MESSAGES
    return delivered


def dead_letters(steps: Steps) -> list[Any]:
    """Return the contents of the dead-letter queue."""
    return list(steps.collection.find({"q": "log.g.dead", "dead": {"$exists": True}}))


def audit(steps: Steps, *consumers: Consumer, gone: int = 0) -> None:
    """Check where each message is. ``gone``: how many the retention may have taken."""
    committed = set().union(*(each.committed for each in consumers))
    assert len(committed) == sum(len(each.committed) for each in consumers), "committed twice"
    buried = set().union(*(each.buried for each in consumers))
    begun = set().union(*(each.begun for each in consumers))
    delivered = drain(steps)
    assert len(set(delivered)) == len(delivered), "delivered after its commit"
    dead = [each["dead"]["position"] for each in dead_letters(steps)]
    assert len(set(dead)) == len(dead), "buried twice"
    assert not committed & set(delivered), "committed and delivered again"
    assert not set(dead) & (set(delivered) | committed), "in two places"
    assert buried <= set(dead)
    finished = set(range(MESSAGES)) - set(delivered) - set(dead)
    assert committed <= finished | set(range(gone))
    assert finished <= committed | begun | set(range(gone)), "lost"
    group = steps.collection.find_one({"_id": "~group:log~g"})
    missing = finished - committed - begun
    assert group["skipped"] >= len(missing)


FAULTS = Faults(stored, Consumer, audit, MOST_COMMANDS, stride=9)


def test_work_without_faults() -> None:
    steps, consumer = Steps(stored()), Consumer()
    steps.run(consumer.work())
    assert (len(consumer.committed), len(consumer.buried)) == (5, 2)
    audit(steps, consumer)


@each_command(FAULTS.stride)
def test_log_is_trimmed_anywhere_while_a_consumer_works(every: int) -> None:
    def trim(steps: Steps, quick: Consumer) -> None:
        steps.seconds += 700
        steps.run(StreamPlans("log", Codec(), {}).trim(12))
        steps.run(quick.work())

    # A burial gives up after ten minutes, and only older packs are trimmed.
    FAULTS.sleeps(every, trim, gives_up=True, gone=10)


# ---- leases, tries, order


def test_one_worker_gets_positions_in_order() -> None:
    steps, consumer = Steps(stored()), Consumer()
    seen: list[int] = []
    for limit in (1, 4, 3, 100):
        held = steps.run(consumer.receive(limit))
        seen += [each.position for each in held]
        steps.run(consumer.plans.commit(held))
    assert seen == list(range(MESSAGES))


def test_packs_are_read_at_majority_and_claims_wait_for_one() -> None:
    steps, consumer, held = holding(3)
    finds: list[Any] = [each for each in steps.commands if type(each).__name__ == "Find"]
    packs = [each for each in finds if "~log" in str(each.filter)]
    assert packs
    assert all(each.majority for each in packs)
    claims = [each for each in steps.commands if type(each).__name__ == "FindAndModify"]
    assert [(each.w1, each.majority) for each in claims] == [(True, False)]
    steps.run(consumer.plans.commit(held))
    (commit,) = steps.commands
    assert not commit.w1


def test_claim_of_a_busy_group_is_two_commands() -> None:
    steps, consumer = Steps(stored()), Consumer()
    steps.run(consumer.receive(5))
    held = steps.run(consumer.receive(5))
    names = [type(each).__name__ for each in steps.commands]
    assert names == ["Find", "FindAndModify", "Find"], "the record, the claim, the packs"
    assert [each.position for each in held] == [5, 6, 7, 8, 9]


def test_single_receives_read_a_pack_once() -> None:
    steps, consumer = Steps(stored()), Consumer()
    steps.run(consumer.receive(1))
    for position in range(1, 5):
        (held,) = steps.run(consumer.receive(1))
        assert held.position == position
        finds = [each for each in steps.commands if "~log" in str(getattr(each, "filter", ""))]
        assert finds == []


@pytest.mark.parametrize("ends", ["release", "rollback", "lapse"])
def test_old_view_of_a_divided_range_claims_nothing_twice(ends: str) -> None:
    """Each claim of a part leaves a rest, which must not resemble the former range."""
    steps, holder, held = holding(9)
    if ends == "release":
        steps.run(holder.plans.release(held))
    elif ends == "rollback":
        steps.run(holder.plans.rollback(held, delay=0))
    else:
        steps.seconds += 100
    view = steps.run(reload(holder.plans.state))
    received: list[int] = []
    for _ in range(3):
        consumer = Consumer()
        consumer.plans.state.seen = view  # from before the other claims
        received += [each.position for each in steps.run(consumer.receive(2))]
    assert received == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("ends", ["commit", "rollback", "release", "bury"])
def test_old_view_settles_messages_of_another_process(ends: str) -> None:
    """A pickled reservation, for example: positions missing in the old view are held."""
    steps, holder, settler = Steps(stored()), Consumer(), Consumer()
    assert steps.run(settler.receive(1))
    held = steps.run(holder.receive(2))
    steps.run(getattr(settler.plans, ends)(held))
    with pytest.raises(LeaseLost):
        steps.run(holder.plans.commit(held))


@pytest.mark.parametrize("late", ["read", "change"])
def test_group_is_not_forgotten_for_a_late_answer(late: str) -> None:
    """A consumer that waits would not know when the next try is due."""
    steps, consumer, held = holding(2)
    state = consumer.plans.state

    def before_the_answer(_: int, done: bool) -> None:
        if done:
            steps.run(consumer.plans.rollback(held[1:], delay=30))

    plan: Plan[Any] = reload(state) if late == "read" else consumer.plans.extend(held[:1])
    steps.run(plan, before_the_answer)
    assert state.seen is not None
    assert [each.until for each in state.seen.back] == [steps.now + timedelta(seconds=30)]


def test_consumer_scans_again_if_the_group_is_unknown() -> None:
    """Another call of the process has found that its view was old."""
    steps, consumer, held = holding(MESSAGES)
    steps.run(consumer.plans.rollback(held[:1], delay=30))
    state = consumer.plans.state
    plan = consumer.plans.receive(consumer.waiting, 1, timeout=100)
    answer = None
    while not isinstance(request := plan.send(answer), Wait):
        answer = steps.run(answered(request))
        if isinstance(request, Listen):
            state.seen = None
    assert request.until <= steps.now + timedelta(milliseconds=1)


def test_message_that_ends_its_consumers_is_buried_alone() -> None:
    """Each consumer that gets position 7 dies. Every other message is finished."""
    steps = Steps()
    stream = StreamPlans("log", Codec(), {})
    steps.run(stream.append(range(40)))
    finished: set[int] = set()
    for _ in range(60):
        consumer = Consumer(max_tries=2)
        while held := steps.run(consumer.receive(30)):
            positions = {each.position for each in held}
            if 7 in positions:
                break
            steps.run(consumer.plans.commit(held))
            finished |= positions
        steps.seconds += 61
        if not held:
            break
    assert finished == set(range(40)) - {7}
    (dead,) = dead_letters(steps)
    assert (dead["dead"]["position"], dead["dead"]["reason"], dead["payload"]) == (7, "tries", 7)


def test_last_try_that_is_rolled_back_is_buried() -> None:
    steps, consumer = Steps(stored()), Consumer(max_tries=2)
    for tries in (1, 2):
        (held,) = steps.run(consumer.receive(1))
        assert (held.position, held.tries) == (0, tries)
        assert (held.error is not None) == (tries == 2)
        steps.run(consumer.plans.rollback([held], error=ValueError("no")))
        steps.seconds += 10
    (dead,) = dead_letters(steps)
    assert dead["dead"]["reason"] == "tries"
    assert dead["error"]["message"] == "no"
    (following,) = steps.run(consumer.receive(1))
    assert following.position == 1


def test_backoff_delays_only_failed_messages() -> None:
    steps, consumer, held = holding(3)
    steps.run(consumer.plans.rollback(held[:2], delay=30))
    rest = steps.run(consumer.receive(100))
    assert [each.position for each in rest] == list(range(3, MESSAGES))
    steps.seconds += 30
    again = steps.run(consumer.receive(100))
    assert [(each.position, each.tries) for each in again] == [(0, 2), (1, 2)]


def test_failing_messages_do_not_starve_the_rest() -> None:
    """A consumer rolls back all that it receives, at once. Each message is tried in its turn."""
    steps, consumer = Steps(stored()), Consumer(max_tries=None)
    tries: Counter[int] = Counter()
    for number in range(300):
        (held,) = steps.run(consumer.receive(1))
        tries[held.position] += 1
        steps.run(consumer.plans.rollback([held], delay=0))
        steps.seconds += 0.01
        if number == 50:
            assert set(tries) == set(range(MESSAGES)), "new messages wait for failing ones"
    assert min(tries.values()) >= 5


def test_group_behind_the_retention_jumps(caplog: pytest.LogCaptureFixture) -> None:
    steps, consumer, held = holding(3)
    steps.seconds += 700
    assert steps.run(StreamPlans("log", Codec(), {}).trim(21)) == 20
    found = steps.run(Consumer().receive(2))
    assert [each.position for each in found] == [20, 21]
    counts = steps.run(consumer.plans.counts())
    assert (counts.skipped, counts.ready, counts.reserved) == (20, 2, 2)
    assert caplog.text.count("messages were deleted") == 1
    assert "20 messages were deleted" in caplog.text
    with pytest.raises(LeaseLost):
        steps.run(consumer.plans.commit(held))


def test_invalid_payload_goes_to_the_dead_letter_queue() -> None:
    steps = Steps()
    steps.run(StreamPlans("log", Codec(), {}).append([1, "two", 3]))
    consumer = Consumer()
    consumer.plans.codec = Codec(int)
    held = steps.run(consumer.receive(10))
    assert [each.payload for each in held] == [1, 3]
    (dead,) = dead_letters(steps)
    assert (dead["payload"], dead["dead"]["reason"]) == ("two", "invalid")


def received_together(consumer: Consumer, *limits: tuple[int, int]) -> Plan[Sequence[Any]]:
    """Receive by calls that share a claim. ``limits``: messages and bytes of each."""
    plan = consumer.receive(1)
    request = next(plan)
    while not isinstance(request, Coalesce):
        request = plan.send((yield request))
    limit = type(request.item)
    return (yield from request.batch([limit(*each) for each in limits]))


def with_misfit() -> tuple[Steps, Consumer, Plan[Sequence[Any]]]:
    """Return calls that share a claim. The second one meets a misfit, and has no room for 5."""
    steps, consumer = Steps(), Consumer()
    steps.run(StreamPlans("log", Codec(), {}).append([0, 1, 2, 3, "four", *range(5, 12)]))
    steps.run(namespace.target("log.g.dead"))  # makes its record
    consumer.plans.codec = Codec(int)
    return steps, consumer, received_together(consumer, (3, 1000), (3, 30), (3, 1000))


def positions(held: list[Any]) -> list[int]:
    return [each.position for each in held]


@pytest.mark.parametrize("lost", [lost_request, lost_reply])
@pytest.mark.parametrize("step", ["copy", "decision", "show"])
def test_claim_whose_burial_fails_holds_nothing_else(step: str, lost: Any) -> None:
    """No caller gets anything. So all that can be delivered comes back at once, without a try."""
    steps, _, plan = with_misfit()
    assert [positions(each) for each in steps.run(plan)] == [[0, 1, 2], [3], [6, 7, 8]]
    kinds = {"copy": Insert, "decision": FindAndModify, "show": Update}
    first = [type(each) for each in steps.commands].index(Insert)
    at = next(
        number
        for number, each in enumerate(steps.commands[first:], first)
        if type(each) is kinds[step]
    )
    steps, consumer, plan = with_misfit()
    with pytest.raises(Unavailable, match="no answer"):
        steps.run(plan, lost(at))
    other = Consumer()
    held = [each for _ in range(12) for each in steps.run(other.receive(1))]
    assert [(each.position, each.tries) for each in held] == [
        (position, 1) for position in range(12) if position != 4
    ]
    steps.run(other.plans.commit(held))
    steps.seconds += 61
    assert steps.run(consumer.receive(9)) == []
    (dead,) = dead_letters(steps)
    assert (dead["payload"], dead["dead"]["reason"]) == ("four", "invalid")


def test_second_claim_of_a_call_fails_and_the_first_comes_back() -> None:
    steps, consumer, held = holding(1)
    steps.run(consumer.plans.release(held))

    def fails(number: int, done: bool) -> None:
        claims = [each for each in steps.commands if isinstance(each, FindAndModify)]
        if len(claims) == 2 and isinstance(steps.commands[number], Find):
            raise Unavailable("no answer")

    with pytest.raises(Unavailable):
        steps.run(consumer.receive(8), fails)
    found = steps.run(Consumer().receive(8))
    assert [(each.position, each.tries) for each in found] == [(each, 1) for each in range(8)]


def test_message_that_cannot_be_buried_stops_nothing() -> None:
    """It would be the next to be claimed if it came back at once."""
    steps, consumer, _ = with_misfit()
    received: list[int] = []

    def fails(number: int, done: bool) -> None:
        if isinstance(steps.commands[number], Insert):
            raise Unavailable("no answer")

    for _ in range(4):
        with suppress(Unavailable):
            received += positions(steps.run(consumer.receive(6), fails))
    assert sorted(received) == [each for each in range(12) if each != 4]


def test_held_ranges_have_a_bound() -> None:
    steps = Steps()
    steps.run(StreamPlans("log", Codec(), {}).append(range(150)))
    consumer = Consumer()
    held = [steps.run(consumer.receive(1)) for _ in range(101)]
    assert [len(each) for each in held] == [1] * 100 + [0]
    steps.run(consumer.plans.commit(held[7]))
    assert steps.signals[-1][0] == "log", "who waits for room is woken"
    assert [each.position for each in steps.run(consumer.receive(1))] == [100]


def test_max_bytes_returns_the_rest() -> None:
    steps = Steps()
    steps.run(StreamPlans("log", Codec(), {}).append([b"x" * 1000] * 10))
    consumer = Consumer()
    plan = consumer.plans.receive(consumer.waiting, 10, timeout=0, max_bytes=3500)
    assert [each.position for each in steps.run(plan)] == [0, 1, 2]
    plan = consumer.plans.receive(consumer.waiting, 10, timeout=0, max_bytes=10)
    assert [(each.position, each.tries) for each in steps.run(plan)] == [(3, 1)]
    assert [each.position for each in steps.run(consumer.receive(10))] == list(range(4, 10))


def replaced(steps: Steps, payloads: Sequence[Any]) -> None:
    """Delete the collection, and begin a stream with the same name."""
    steps.collection.delete_many({})
    steps.seconds += 1
    steps.run(StreamPlans("log", Codec(), {}).append(payloads))


@pytest.mark.parametrize("others", [0, 1])
def test_consumer_reads_the_new_stream(others: int) -> None:
    """Also if the new group is where the old one was, because another process received."""
    steps, consumer = Steps(), Consumer()
    steps.run(StreamPlans("log", Codec(), {}).append(["old 0", "old 1"]))
    steps.run(consumer.plans.commit(steps.run(consumer.receive(1))))
    replaced(steps, ["new 0", "new 1"])
    for _ in range(others):
        steps.run(Consumer().receive(1))
    (held,) = steps.run(consumer.receive(1))
    assert held.payload == f"new {others}"


def test_consumer_claims_only_what_the_new_stream_has() -> None:
    steps, consumer = Steps(), Consumer()
    steps.run(StreamPlans("log", Codec(), {}).append(range(50)))
    assert len(steps.run(consumer.receive(50))) == 50
    replaced(steps, ["new"])
    assert [each.payload for each in steps.run(consumer.receive(10))] == ["new"]
    assert steps.run(consumer.receive(10)) == []


def test_seek_ends_every_lease() -> None:
    steps, consumer, held = holding(6)
    assert steps.run(consumer.plans.seek(3)) == 3
    with pytest.raises(LeaseLost):
        steps.run(consumer.plans.commit(held))
    assert [each.position for each in steps.run(consumer.receive(2))] == [3, 4]


def test_start_counts_for_a_new_group_only() -> None:
    steps = Steps(stored())
    stream = StreamPlans("log", Codec(), {})
    options = Options(dead_letter="x")
    for start, position in (("last", MESSAGES), (4, 4), ("first", 0)):
        group = stream.group(f"g{position}", options, start)
        steps.run(group.pause(False))
        again = stream.group(f"g{position}", options, 1)
        steps.run(again.pause(False))
        found = {each.name: each.position for each in steps.run(stream.groups())}
        assert found[f"g{position}"] == position
    wrong = stream.group("wrong", options, "middle")
    with pytest.raises(ConfigurationError, match="start"):
        steps.run(wrong.receive(Waiters("t"), 1, timeout=0))


def test_paused_group_receives_nothing() -> None:
    steps, consumer, other = Steps(stored()), Consumer(), Consumer()
    steps.run(other.receive(1))
    steps.run(consumer.plans.pause(True))
    assert steps.run(other.receive(5)) == []
    assert steps.run(consumer.plans.paused())
    steps.run(consumer.plans.pause(False))
    assert len(steps.run(other.receive(5))) == 5


def test_extend_keeps_the_longest_lease() -> None:
    steps, consumer, held = holding(2)
    steps.run(consumer.plans.extend(held[:1], lease=100))
    steps.run(consumer.plans.extend(held[1:], lease=1))
    steps.seconds += 99
    assert 0 not in [each.position for each in steps.run(Consumer().receive(100))]
    steps.run(consumer.plans.commit(held))
    with pytest.raises(LeaseLost):
        steps.run(consumer.plans.extend(held))
