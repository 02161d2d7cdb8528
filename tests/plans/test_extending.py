"""Extending leases: how many commands it takes, and how a locked message delays the rest."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from pyqueue import LeaseLost, Reservation, Unavailable
from pyqueue.backends.extending import renew
from pyqueue.concurrently import Concurrently
from pyqueue.requests import Change, Find, ServerTime, Update
from tests.plans.runner import NOW, Runner, after, reservation, standard


def ids_of(command: Update) -> list[Any]:
    """Return the ids that a command extends."""
    branches = command.filter.get("$or", [command.filter])
    return [
        id
        for branch in branches
        for id in (branch["_id"]["$in"] if isinstance(branch["_id"], dict) else [branch["_id"]])
    ]


class Server(Runner):
    """A server on which a transaction locks some messages. Time passes only while they block."""

    def __init__(self, *locked: str, lost: tuple[str, ...] = ()) -> None:
        super().__init__(now=NOW)
        self.locked, self.lost = set(locked), set(lost)

    def _answer(self, request: Any) -> Any:
        if not isinstance(request, (Update, Find)):
            return super()._answer(request)
        self.commands.append(request)
        if isinstance(request, Find):
            found = request.filter["_id"]["$in"]
            return [{"_id": id, "token": "other" if id in self.lost else "t1"} for id in found]
        if self.locked & set(ids_of(request)):
            limit_s = request.server_limit_s or request.max_time_s
            self.now = after(
                (self.now - NOW).total_seconds() + (30 if limit_s is None else limit_s)
            )
            raise Unavailable("a transaction locks it")
        return Change(len(set(ids_of(request)) - self.lost), None)


def reservations(count: int, lease: float = 60.0) -> list[Reservation[Any]]:
    return [reservation(f"m{n}", lease=lease, until=after(lease)) for n in range(count)]


@pytest.mark.parametrize("lease", [2.0, 5.0, 60.0])
def test_renewal_of_a_locked_message_costs_no_other_lease(lease: float) -> None:
    """A renewal begins after a third of the lease, so it has two thirds for all of them."""
    server, held = Server("m37"), reservations(100, lease)
    results = server.run(renew(held))
    assert [n for n, error in enumerate(results) if error is not None] == [37]
    assert isinstance(results[37], Unavailable)
    assert all(each.until > after(lease) for each in held if each.id != "m37")
    assert held[37].until == after(lease)
    assert (server.now - NOW).total_seconds() < 2 / 3 * lease
    assert len(server.commands) == 21


def test_renewal_gives_up_while_the_server_is_silent() -> None:
    server, held = Server(*(f"m{n}" for n in range(100))), reservations(100)
    results = server.run(renew(held))
    assert all(isinstance(error, Unavailable) for error in results)
    assert (server.now - NOW).total_seconds() < 40
    assert len(server.commands) < 20


class Busy(Server):
    """A server so busy that it takes longer for a large group than a renewal may."""

    def _answer(self, request: Any) -> Any:
        if isinstance(request, Concurrently):
            assert len(request.plans) <= request.at_once
            began, ends = self.now, []
            results = []
            for plan in request.plans:
                self.now = began
                results.append(self.run(plan))
                ends.append(self.now)
            self.now = max(ends)
            return results
        if isinstance(request, Update):
            large = len(ids_of(request)) > 50
            self.locked = set(ids_of(request)) if large else set()
            if not large:
                self.now += timedelta(seconds=0.5)
        return super()._answer(request)


def test_renewal_on_a_busy_server_takes_two_time_limits() -> None:
    """The parts of a group that timed out are renewed at once, so no lease ends meanwhile."""
    server, held = Busy(), reservations(100, 5.0)
    assert server.run(renew(held)) == [None] * 100
    assert (server.now - NOW).total_seconds() < 2
    assert len(server.commands) == 11


def test_renewal_takes_a_command_for_a_hundred_leases() -> None:
    server, held = Server(), reservations(250)
    assert server.run(renew(held)) == [None] * 250
    assert [len(ids_of(command)) for command in server.commands] == [100, 100, 50]
    assert {each.until for each in held} == {after(60)}
    assert all(command.w1 for command in server.commands)


@pytest.mark.parametrize(("lease", "limit_s", "sent_s"), [(2.0, 0.25, 0.5), (60.0, 7.5, 15.0)])
def test_server_keeps_the_limit_of_a_renewal(lease: float, limit_s: float, sent_s: float) -> None:
    """The driver sends no command whose limit is shorter than the round trips that it measured."""
    server = Server()
    server.run(renew(reservations(3, lease)))
    (command,) = server.commands
    assert (command.server_limit_s, command.max_time_s) == (limit_s, sent_s)


def test_extend_gives_the_last_try_of_a_message_longer() -> None:
    server, held = Server("m7"), reservations(20, 2.0)
    with pytest.raises(Unavailable) as unavailable:
        server.run(standard().extend(held))
    assert unavailable.value.ids == ["m7"]
    limits = [(len(ids_of(command)), command.max_time_s) for command in server.commands]
    assert limits[0] == (20, 0.5)
    assert (1, 2.0) in limits


def test_renewal_names_the_lost_leases() -> None:
    server, held = Server(lost=("m1", "m3")), reservations(5)
    results = server.run(renew(held))
    assert [error and type(error) for error in results] == [None, LeaseLost, None, LeaseLost, None]
    assert isinstance(results[3], LeaseLost)
    assert results[3].lost == (held[3],)


def test_extend_of_many_takes_groups() -> None:
    server, held = Server("m120", lost=("m5",)), reservations(250)
    with pytest.raises(Unavailable) as unavailable:
        server.run(standard().extend(held, lease=100))
    assert unavailable.value.ids == ["m120"]
    unchanged = [each.id for each in held if each.lease == 60]
    assert unchanged == ["m5", "m120"]
    server.locked.clear()
    with pytest.raises(LeaseLost) as lost:
        server.run(standard().extend(held, lease=200))
    assert lost.value.lost == (held[5],)
    assert {each.lease for each in held} == {60, 200}


def test_extend_of_one_waits_as_long_as_the_client_allows() -> None:
    server, held = Server("m0"), reservations(1)
    with pytest.raises(Unavailable):
        server.run(standard().extend(held))
    assert [command.max_time_s for command in server.commands] == [None]


def test_extend_keeps_until_if_the_outcome_is_unknown() -> None:
    held = reservation("m1")
    before = held.until
    with pytest.raises(Unavailable):
        Runner(Unavailable("gone")).run(standard().extend((held,), lease=100))
    assert held.until == before


def test_cancelled_extend_keeps_until() -> None:
    """The command may have been sent or not: the holder must not rely on it."""
    held = reservation("m1")
    before = (held.until, held.lease)
    plan = standard().extend((held,), lease=100)
    request = next(plan)
    while isinstance(request, ServerTime):
        request = plan.send(NOW)
    assert isinstance(request, Update)
    with pytest.raises(asyncio.CancelledError):
        plan.throw(asyncio.CancelledError())
    assert (held.until, held.lease) == before


def test_extend_of_different_lengths_takes_a_command_each() -> None:
    server, held = Server(), [*reservations(3, 60), *reservations(2, 90)]
    for number, each in enumerate(held):
        each.id = f"m{number}"
    server.run(standard().extend(held))
    assert [len(ids_of(command)) for command in server.commands] == [3, 2]
    assert [each.until for each in held] == [after(60)] * 3 + [after(90)] * 2
