"""Settling in batches: the commands that are requested, and the handling of their answers.

There is no database.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import UNCHANGED, Backoff, ConfigurationError, DuplicateKey, LeaseLost, Unavailable
from pyqueue.backends.applying import apply
from pyqueue.backends.moving import move_each
from pyqueue.backends.options import NewMessage, QueueShape
from pyqueue.errors import Disconnected, TimedOut
from pyqueue.facts import Burial
from pyqueue.requests import (
    Change,
    Coalesce,
    Delete,
    EnsureQueue,
    Find,
    Plan,
    Update,
    UpdateEach,
    WriteFailure,
)
from tests.plans.runner import NOW, Runner, after, reservation, standard


def pairs(filter: Any) -> set[tuple[str, str]]:
    """Return the (_id, token) pairs of a filter; fail if the filter is not a list of pairs."""
    branches = filter.get("$or", [filter])
    assert set(filter) - {"processed"} in ({"$or"}, {"_id", "token"})
    found = set()
    for branch in branches:
        assert set(branch) - {"processed"} == {"_id", "token"}
        assert isinstance(branch["token"], str), "several tokens in one branch are a cross product"
        ids = branch["_id"]["$in"] if isinstance(branch["_id"], dict) else [branch["_id"]]
        found |= {(id, branch["token"]) for id in ids}
    return found


def lost_by(runner: Runner, plan: Plan[None]) -> tuple[list[Any], list[Any]]:
    """Run a plan that loses leases. Return the lost and the unknown reservations."""
    with pytest.raises(LeaseLost) as caught:
        runner.run(plan)
    return list(caught.value.lost), list(caught.value.unknown)


def test_commit_is_one_delete_by_pairs() -> None:
    runner = Runner(3)
    held = [reservation("m1", "t1"), reservation("m2", "t2"), reservation("m3", "t1")]
    runner.run(standard().commit(tuple(held)))
    (command,) = runner.commands  # with the pairs, and not a cross product of ids and tokens
    assert isinstance(command, Delete)
    assert command.many
    assert pairs(command.filter) == {("m1", "t1"), ("m2", "t2"), ("m3", "t1")}


def test_message_twice_in_a_batch_is_settled_alone() -> None:
    """The former and the present holder both settle it, and each gets the true result."""

    def answer(command: Delete) -> int:
        return len(pairs(command.filter) - {("m1", "old")})

    runner = Runner(*[answer] * 3)
    former, present, other = (
        reservation("m1", "old"),
        reservation("m1", "new"),
        reservation("m2", "new"),
    )
    assert lost_by(runner, standard().commit((former, present, other))) == ([former], [])
    assert sorted(map(sorted, (pairs(command.filter) for command in runner.commands))) == [
        [("m1", "new")],
        [("m1", "old")],
        [("m2", "new")],
    ]


def test_reservation_given_twice_is_settled_once() -> None:
    runner = Runner(1)
    held = reservation("m1")
    runner.run(standard().commit((held, held)))
    assert not runner.commands[0].many


def test_expired_reservation_is_settled_alone() -> None:
    lapsed, live, other = reservation("m1", until=NOW), reservation("m2"), reservation("m3")

    def answer(command: Delete) -> int:
        return 0 if ("m1", "t1") in pairs(command.filter) else len(pairs(command.filter))

    runner = Runner(*[answer] * 2)
    assert lost_by(runner, standard().commit((live, lapsed, other))) == ([lapsed], [])
    assert sorted(len(pairs(each.filter)) for each in runner.commands) == [1, 2]


def test_expiry_is_judged_by_the_given_time() -> None:
    held = [reservation("m1", until=after(10)), reservation("m2", until=after(20))]
    for now, commands in ((9.999, 1), (10, 2), (20, 2)):
        runner = Runner(*[lambda command: len(pairs(command.filter))] * 2, now=after(now))
        runner.run(standard().commit(tuple(held)))
        assert len(runner.commands) == commands


def test_partial_batch_is_resolved() -> None:
    held = [reservation("m1"), reservation("m2"), reservation("m3")]
    runner = Runner(2, [{"_id": "m2", "token": "another", "q": "a", "when": after(60)}])
    assert lost_by(runner, standard().commit(tuple(held))) == ([held[1]], [])
    assert isinstance(runner.commands[1], Find)


def test_missing_message_without_history_is_unknown() -> None:
    held = [reservation("m1"), reservation("m2")]
    runner = Runner(1, [])
    assert lost_by(runner, standard().commit(tuple(held))) == ([], held)


def test_missing_message_with_history_is_lost() -> None:
    held = [reservation("m1"), reservation("m2")]

    def found(command: Find) -> list[dict[str, Any]]:
        return [{"_id": "m1", "token": "t1", "q": "a", **runner.commands[0].update["$set"]}]

    runner = Runner(Change(1, None), found)
    assert lost_by(runner, standard(history=60).commit(tuple(held))) == ([held[1]], [])


def test_nothing_settled_means_all_lost_without_a_read() -> None:
    held = [reservation("m1"), reservation("m2")]
    runner = Runner(0)
    assert lost_by(runner, standard().commit(tuple(held)))[0] == held
    assert len(runner.commands) == 1


def test_refused_batch_is_halved_down_to_one_settlement() -> None:
    """One taken key must not keep the other messages from being settled."""
    taken = DuplicateKey("taken", keys=["k"])

    def answer(command: Update) -> Change:
        ids = [id for id, _ in pairs(command.filter)]
        if "m3" in ids:
            raise taken
        return Change(len(ids), None)

    runner = Runner(*[answer] * 7)
    held = [reservation(f"m{n}", f"t{n}") for n in range(5)]
    with pytest.raises(DuplicateKey) as caught:
        runner.run(standard().release(tuple(held)))
    assert caught.value is taken
    asked = [sorted(id for id, _ in pairs(command.filter)) for command in runner.commands]
    places = ["01234", "01", "234", "2", "34", "3", "4"]
    assert asked == [[f"m{place}" for place in each] for each in places]
    assert runner.answers == []


def test_each_call_of_a_batch_gets_its_result() -> None:
    """The server refuses one of three, another holder has one, and one is settled."""
    taken = DuplicateKey("taken")

    def stored(command: Find) -> list[dict[str, Any]]:
        left = runner.commands[0].pairs[2][1]["$set"]["left"]
        return [
            {"_id": "m0", "token": "t0"},
            {"_id": "m1", "left": "another's"},
            {"_id": "m2", "left": left},
        ]

    runner = Runner((1, [WriteFailure(0, "key", taken)]), stored)
    held = [reservation(f"m{n}", f"t{n}") for n in range(3)]
    outcomes = runner.run(
        move_each(
            standard().terms,
            standard("b").target,
            [(each, NewMessage(None, each.id, None, "k")) for each in held],
        )
    )
    assert outcomes == list(zip(held, (taken, "lost", "done"), strict=True))


def test_move_each_shares_a_command_if_nothing_changes() -> None:
    runner = Runner(Change(2, None), (2, []))
    held = [reservation(f"m{n}", "t") for n in range(4)]
    new = [
        NewMessage(None, UNCHANGED),
        NewMessage(None, 1),
        NewMessage(None, UNCHANGED),
        NewMessage(None, UNCHANGED, {"x": 1}),
    ]
    plan = move_each(standard().terms, standard("b").target, list(zip(held, new, strict=True)))
    assert [outcome for _, outcome in runner.run(plan)] == ["done"] * 4
    shared, each = runner.commands
    assert pairs(shared.filter) == {("m0", "t"), ("m2", "t")}
    assert "payload" not in shared.update["$set"]
    assert [update["$set"].get("payload") for _, update in each.pairs] == [1, None]


def test_move_each_shares_a_command_unless_it_waits() -> None:
    """An instant in the past means at once. Rows that come from a queue have one."""
    runner = Runner(Change(2, None), (2, []))
    held = [reservation(f"m{n}", "t") for n in range(4)]
    new = [
        NewMessage(None, UNCHANGED, at=after(-1)),
        NewMessage(None, UNCHANGED, at=after(5)),
        NewMessage(None, UNCHANGED, at=after(-2)),
        NewMessage(None, UNCHANGED, delay=7),
    ]
    plan = move_each(standard().terms, standard("b").target, list(zip(held, new, strict=True)))
    assert [outcome for _, outcome in runner.run(plan)] == ["done"] * 4
    shared, each = runner.commands
    assert pairs(shared.filter) == {("m0", "t"), ("m2", "t")}
    assert shared.update["$set"]["when"] == NOW
    assert [update["$set"]["when"] for _, update in each.pairs] == [after(5), after(7)]


def test_moves_after_unlike_stays_are_one_bulk_write() -> None:
    """Their trails differ, and each small group would need a command."""
    held = [reservation(f"m{n}", tries=n % 2 + 1, reserved=after(n % 2)) for n in range(4)]
    runner = Runner((4, []))
    runner.run(standard().move([(each, UNCHANGED) for each in held], to=standard("b")))
    (command,) = runner.commands
    assert isinstance(command, UpdateEach)
    stops = [update["$push"]["trail"]["$each"] for _, update in command.pairs]
    stop = {"q": "a", "at": NOW}
    first, second = stop | {"tries": 1, "waited": 0.0}, stop | {"tries": 2, "waited": 1.0}
    assert stops == [[first], [second]] * 2


def test_later_move_of_a_settled_message_leaves_it_unknown() -> None:
    """Another consumer moved both on since: which of the two this move settled is not stored."""
    held = [reservation("m1"), reservation("m2")]
    stored = [{"_id": each.id, "left": "another's"} for each in held]
    runner = Runner(Change(1, None), stored)
    plan = standard().move([(each, UNCHANGED) for each in held], to=standard("b"))
    assert lost_by(runner, plan) == ([], held)


def test_count_resolves_an_unclear_outcome() -> None:
    """If another consumer is seen to hold all that is missing, then the rest was settled."""
    held = [reservation("m1"), reservation("m2")]
    stored = [{"_id": "m1", "left": "another's"}, {"_id": "m2", "token": "another's"}]
    runner = Runner(Change(1, None), stored)
    plan = standard().move([(each, UNCHANGED) for each in held], to=standard("b"))
    assert lost_by(runner, plan) == ([held[1]], [])


class Shared(Runner):
    """Runs each call in one batch with the call of a neighbour, which settles m2."""

    def _answer(self, request: Any) -> Any:
        if not isinstance(request, Coalesce):
            return super()._answer(request)
        neighbour = request.item._replace(held=reservation("m2"))
        return self._drive(request.batch([request.item, neighbour]))[0]


LOCKED = TimedOut("locked")


@pytest.mark.parametrize("failure", [LOCKED, Disconnected("reset")])
def test_failed_batch_is_settled_by_each_caller_alone(failure: Unavailable) -> None:
    runner = Shared(failure, 1)
    runner.run(standard().commit((reservation("m1"),)))
    shared, alone = runner.commands
    assert pairs(shared.filter) == {("m1", "t1"), ("m2", "t1")}
    assert pairs(alone.filter) == {("m1", "t1")}
    assert shared.half_time
    assert alone.half_time  # together no longer than the time limit


def test_timed_out_settle_is_tried_alone_only_once() -> None:
    runner = Shared(LOCKED, LOCKED)
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().commit((reservation("m1"),)))
    assert caught.value.ids == ["m1"]
    assert type(caught.value) is Unavailable


def test_batch_that_failed_otherwise_is_not_repeated() -> None:
    """The majority may lag, for example: then one more try does not help."""
    with pytest.raises(Unavailable):
        Shared(Unavailable("gone")).run(standard().commit((reservation("m1"),)))


def test_timed_out_call_with_several_messages_is_not_repeated() -> None:
    held = [reservation("m1"), reservation("m2")]
    runner = Runner(LOCKED)
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().commit(held))
    assert caught.value.ids == ["m1", "m2"]
    assert not runner.commands[0].half_time


@pytest.mark.parametrize(
    ("left_s", "stored", "lost", "unknown"),
    [
        (60, [], 0, 0),  # no other call settles it under a live lease
        (0.5, [], 0, 1),
        (60, [{"_id": "m1", "token": "another's"}], 1, 0),
    ],
)
def test_repeated_commit_reports_the_first_outcome(
    left_s: float, stored: list[Any], lost: int, unknown: int
) -> None:
    runner = Shared(LOCKED, 0, stored, now=after(1))
    plan = standard().commit((reservation("m1", until=after(left_s)),))
    if not lost + unknown:
        runner.run(plan)
        return
    assert [len(each) for each in lost_by(runner, plan)] == [lost, unknown]


def test_repeated_rollback_finds_the_mark_of_the_first() -> None:
    """The first command rolled it back before it timed out, and another consumer has it now."""

    def stored(command: Find) -> list[dict[str, Any]]:
        mark = runner.commands[0].update["$set"]["left"]
        return [{"_id": "m1", "left": mark, "token": "another's"}]

    runner = Shared(LOCKED, Change(0, None), stored)
    runner.run(standard().rollback((reservation("m1"),), delay=5))
    assert runner.commands[0].update is runner.commands[1].update
    assert runner.signals == [("a", after(5))]


def test_unknown_outcome_names_the_ids() -> None:
    held = [reservation("m1"), reservation("m2")]
    runner = Runner(Unavailable("gone"))
    with pytest.raises(Unavailable) as caught:
        runner.run(standard().commit(tuple(held)))
    assert set(caught.value.ids) == {"m1", "m2"}


def test_rollback_uses_the_tries_of_the_reservation() -> None:
    runner = Runner(Change(1, None), now=after(5))
    backend = standard(backoff=Backoff(base=7, factor=2, jitter=0))
    runner.run(backend.rollback((reservation("m1", tries=3),), error="why"))
    put = runner.commands[0].update["$set"]
    assert put["when"] == put["due"] == after(5 + 28)
    assert put["error"].items() >= {"type": "error", "message": "why", "at": after(5)}.items()
    assert ("a", after(5 + 28)) in runner.signals


def attempts(update: Any) -> Any:
    """Return the attempt that an update adds, and how many it keeps."""
    pushed = update["$push"]["attempts"]
    (attempt,) = pushed["$each"]
    return attempt["number"], attempt["seconds"], pushed["$slice"]


def test_rollback_adds_the_attempt_in_its_update() -> None:
    runner = Runner(Change(1, None), now=after(5))
    held = reservation("m1", tries=3, reserved=after(1.5))
    runner.run(standard().rollback((held,), error="why"))
    (command,) = runner.commands
    assert attempts(command.update) == (3, 3.5, -5)


def test_rollbacks_of_equal_attempts_share_a_command() -> None:
    held = [
        reservation("m1"),
        reservation("m2", tries=2),
        reservation("m3"),
        reservation("m4", reserved=after(-1)),
    ]
    runner = Runner(Change(2, None), (2, []))
    runner.run(standard().rollback(tuple(held), delay=5, error="why"))
    shared, each = runner.commands
    assert pairs(shared.filter) == {("m1", "t1"), ("m3", "t1")}
    assert attempts(shared.update) == (1, 0.0, -5)
    assert [attempts(update) for _, update in each.pairs] == [(2, 0.0, -5), (1, 1.0, -5)]


def test_rollbacks_without_an_error_share_one_command() -> None:
    held = [reservation("m1"), reservation("m2", tries=2)]
    runner = Runner(Change(2, None))
    runner.run(standard().rollback(tuple(held), delay=5))
    (command,) = runner.commands
    assert "$push" not in command.update


def test_last_try_is_one_update_into_the_dead_queue() -> None:
    runner = Runner(Change(1, None))
    runner.run(standard(max_tries=3).rollback((reservation("m1", tries=3, key="k"),), error="why"))
    (command,) = runner.commands
    assert isinstance(command, Update)
    assert pairs(command.filter) == {("m1", "t1")}
    assert command.update["$set"]["q"] == "a.dead"
    assert command.update["$set"]["dead"]["tries"] == 3
    assert attempts(command.update) == (3, 0.0, -5)
    assert "attempts" not in command.update["$unset"]
    assert command.update["$rename"] == {"key": "last_key"}
    assert runner.entered == ["a.dead"]
    assert ("a.dead", NOW) in runner.signals


def test_move_is_one_update_for_each_message() -> None:
    """Different payloads take one update each in one command; equal payloads take one update."""
    held = (reservation("m1"), reservation("m2", "t2"))
    runner = Runner((2, []))
    runner.run(standard().move([(each, each.id) for each in held], to=standard("b")))
    (command,) = runner.commands
    assert isinstance(command, UpdateEach)
    assert [pairs(filter) for filter, _ in command.pairs] == [{("m1", "t1")}, {("m2", "t2")}]
    assert [update["$set"]["payload"] for _, update in command.pairs] == ["m1", "m2"]
    runner = Runner(Change(2, None))
    runner.run(standard().move([(each, UNCHANGED) for each in held], to=standard("b")))
    (command,) = runner.commands
    assert isinstance(command, Update)
    assert pairs(command.filter) == {("m1", "t1"), ("m2", "t2")}
    assert command.update["$set"]["q"] == "b"
    assert "token" in command.update["$unset"]
    assert runner.entered == ["b"]


def test_key_clash_reaches_only_the_call_that_caused_it() -> None:
    held = [reservation("m1"), reservation("m2")]
    backend = standard()
    clash = WriteFailure(0, "key", DuplicateKey("taken"))
    runner = Runner((1, [clash]))

    def acts() -> Plan[list[Any]]:
        """Settle as two calls that were coalesced."""
        given = []
        for each, key in zip(held, ("k1", "k2"), strict=True):
            plan = backend.move([(each, UNCHANGED)], to=standard("b"), key=key)
            request = next(plan)
            while not isinstance(request, Coalesce):
                answers = {EnsureQueue: "standard", QueueShape: {}}
                request = plan.send(answers.get(type(request), NOW))
            given.append(request.item)
            plan.close()
        return (yield from apply(backend.queue, given))

    first, second = runner.run(acts())
    assert isinstance(first, DuplicateKey)
    assert second == "done"


def test_bad_arguments_send_no_command() -> None:
    calls: tuple[Callable[[], Plan[None]], ...] = (
        lambda: standard().commit(("m1",)),
        lambda: standard().rollback((reservation("m1"),), delay=-1),
        lambda: standard().extend((reservation("m1"),), lease=0),
        lambda: standard().release((reservation("m1", queue="b"),)),
        lambda: standard().move([(reservation("m1"), 1)], to="b", key=""),
        lambda: standard().progress(reservation("m1"), 2),
    )
    for call in calls:
        runner = Runner()
        with pytest.raises(ConfigurationError):
            runner.run(call())
        assert runner.commands == []
        assert runner.entered == []


def test_some_verbs_check_arguments_before_their_plan_begins() -> None:
    """So a call for several queues checks them for all queues first."""
    dead = reservation("m1")
    dead.dead = Burial.of({"from": "b", "at": NOW, "reason": "tries", "tries": 1, "error": None})
    with pytest.raises(ConfigurationError, match="reservations"):
        standard().commit(("m1",))
    with pytest.raises(ConfigurationError, match="already in a dead-letter queue"):
        standard().bury((dead,))
    for target in ("b", standard("b")):
        with pytest.raises(ConfigurationError, match="group"):
            standard().move([(reservation("m1"), UNCHANGED)], to=target, group="")


def test_settle_in_a_transaction_refuses_a_short_lease() -> None:
    session = object()
    for lease, left, taken in (
        (60, 20, True),
        (60, 19.9, False),
        (12, 4, True),
        (12, 3.9, False),
        (6000, 20, True),
    ):
        held = reservation("m1", until=after(left), lease=float(lease))
        runner = Runner(1)
        if taken:
            runner.run(standard().commit((held,), session=session))
            assert runner.commands[0].session is session
        else:
            with pytest.raises(ConfigurationError, match=r"extend\(\).*lease="):
                runner.run(standard().commit((held,), session=session))
            assert runner.commands == []
