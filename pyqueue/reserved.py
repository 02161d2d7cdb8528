"""The context managers of ``Queue.reserved`` and ``Queue.renew``, which renew leases in a block."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Protocol, TypeVar

import anyio

from pyqueue import arguments
from pyqueue.backends import extending
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.backends.streams import settling
from pyqueue.backends.streams.consumers import GroupPlans
from pyqueue.backends.streams.settling import GroupState
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError
from pyqueue.messages import Reservation, StreamReservation
from pyqueue.requests import Plan
from pyqueue.runtime.plan_runner import AsyncPlanRunner, PlanRunner
from pyqueue.runtime.renewal import LeaseRenewer
from pyqueue.telling import tell_lost

T = TypeVar("T")
H = TypeVar("H", bound=Reservation[Any])
L = TypeVar("L", bound=Reservation[Any], contravariant=True)
#: Called with a reservation whose lease was lost.
OnLost = Callable[[Reservation[T]], object] | None
#: A reservation, and the age of its lease in seconds.
Aged = tuple[Reservation[Any], float]

log = logging.getLogger("pyqueue")


class Settles(Protocol[L]):
    """The methods of a queue, or of a consumer group, that a block of ``reserved`` calls."""

    name: str

    def commit(self, *reservations: L) -> None:
        """Finish messages."""

    def rollback(self, *reservations: L, error: BaseException) -> None:
        """Put messages back for another try."""


class SettlesAsync(Protocol[L]):
    """``Settles`` for async code."""

    name: str

    def commit(self, *reservations: L) -> Awaitable[None]:
        """Finish messages."""

    def rollback(self, *reservations: L, error: BaseException) -> Awaitable[None]:
        """Put messages back for another try."""


def check_on_lost(on_lost: object) -> None:
    """Refuse an ``on_lost`` that a renewer cannot call.

    Raises:
        ConfigurationError: ``on_lost`` is not callable, or is a coroutine function.
    """
    if on_lost is not None and (not callable(on_lost) or iscoroutinefunction(on_lost)):
        raise ConfigurationError(
            "on_lost: expected a synchronous function that takes the reservation, found "
            f"{'a coroutine function' if callable(on_lost) else type(on_lost).__name__}; "
            "pass a function that sets an event or cancels a task, for example"
        )


def renewal(
    runner: PlanRunner | AsyncPlanRunner, told: Callable[[Reservation[Any]], object] | None = None
) -> Callable[[Sequence[Reservation[Any]]], Any]:
    """Return the function by which the renewer of a client extends leases.

    ``told`` is called for each reservation whose message was cancelled. If it is None, renewals do
    not check for cancelled messages.
    """
    return lambda reservations: runner.run(_renew(reservations, told))


def _renew(
    held: Sequence[Reservation[Any]], told: Callable[[Reservation[Any]], object] | None
) -> Plan[list[QueueError | None]]:
    first, *_ = held
    if isinstance(first, StreamReservation):
        group = [each for each in held if isinstance(each, StreamReservation)]
        return settling.renew(GroupState(first.queue, first.group), group)
    return extending.renew(held, told)


@contextmanager
def holding(
    runner: PlanRunner, queue: Settles[H], reservation: H, on_lost: OnLost[Any]
) -> Iterator[None]:
    """Hold a reservation while a block of ``Queue.reserved`` runs."""
    renewer = runner.renewer
    # Without a plan, which might wait or fail: the message is not renewed yet.
    age_s = reservation.lease - runner.seconds_left(reservation)
    callback = _callback(on_lost, reservation)
    renewer.add(reservation, renewal(runner), callback, queue.name, age_s)
    try:
        yield
    except BaseException as error:
        state = renewer.discard(reservation)
        if state == "lost":
            tell_lost(runner.hooks, queue.name, [reservation])
        elif state is not None:
            try:
                queue.rollback(reservation, error=error)
            except QueueError as failure:  # the exception of the block matters more
                log_failed_rollback(_described(reservation), failure)
        raise
    try:
        state = renewer.state(reservation)
        if state == "lost":
            tell_lost(runner.hooks, queue.name, [reservation])
            raise lost_in_body(reservation)
        if state == "renewed":  # the renewal continues while the commit runs
            queue.commit(reservation)
    finally:
        renewer.discard(reservation)


@asynccontextmanager
async def holding_async(
    runner: AsyncPlanRunner, queue: SettlesAsync[H], reservation: H, on_lost: OnLost[Any]
) -> AsyncIterator[None]:
    """Hold a reservation while a block of ``AsyncQueue.reserved`` runs."""
    renewer = runner.renewer
    # Without a plan, which might wait or fail: the message is not renewed yet.
    age_s = reservation.lease - runner.seconds_left(reservation)
    callback = _callback(on_lost, reservation)
    renewer.add(reservation, renewal(runner), callback, queue.name, age_s)
    try:
        yield
    except BaseException as error:
        state = renewer.discard(reservation)
        if state == "lost":
            tell_lost(runner.hooks, queue.name, [reservation])
        elif state is not None:
            try:
                with anyio.CancelScope(shield=True):
                    await queue.rollback(reservation, error=error)
            except QueueError as failure:  # the exception of the block matters more
                log_failed_rollback(_described(reservation), failure)
        raise
    try:
        state = renewer.state(reservation)
        if state == "lost":
            tell_lost(runner.hooks, queue.name, [reservation])
            raise lost_in_body(reservation)
        if state == "renewed":  # the renewal continues while the commit runs
            await queue.commit(reservation)
    finally:
        renewer.discard(reservation)


@contextmanager
def renewing(
    runner: PlanRunner,
    plans: QueuePlans | GroupPlans,
    given: Sequence[Reservation[Any]],
    on_lost: OnLost[Any],
) -> Iterator[None]:
    """Renew leases while a block of ``Queue.renew`` runs."""
    held = runner.run(_to_renew(runner.renewer, plans, given, on_lost))
    with _renewed(runner, plans.queue, held, on_lost):
        yield


@asynccontextmanager
async def renewing_async(
    runner: AsyncPlanRunner,
    plans: QueuePlans | GroupPlans,
    given: Sequence[Reservation[Any]],
    on_lost: OnLost[Any],
) -> AsyncIterator[None]:
    """Renew leases while a block of ``AsyncQueue.renew`` runs."""
    held = await runner.run(_to_renew(runner.renewer, plans, given, on_lost))
    with _renewed(runner, plans.queue, held, on_lost):
        yield


def _to_renew(
    renewer: LeaseRenewer,
    plans: QueuePlans | GroupPlans,
    given: Sequence[object],
    on_lost: object,
) -> Plan[list[Aged]]:
    """Check the arguments of ``Queue.renew``. Return the reservations with the lease ages."""
    check_on_lost(on_lost)
    held: Sequence[Reservation[Any]]
    if isinstance(plans, GroupPlans):
        held = settling.reservations(plans.state, given)
    else:
        held = arguments.reservations(plans.queue, tuple(given))
    if renewed := renewer.registered(held):
        raise ConfigurationError(
            f"reservations: message {renewed[0].id} is already being renewed, by another block or "
            "by its worker; leave out this reservation"
        )
    found: list[Aged] = []
    for each in held:
        age_s = yield from extending.age_s(each)
        found.append((each, age_s))
    return found


@contextmanager
def _renewed(
    runner: PlanRunner | AsyncPlanRunner, queue: str, held: Sequence[Aged], on_lost: OnLost[Any]
) -> Iterator[None]:
    """Renew leases until the block ends, or until it settles the reservations."""
    renewer, extend = runner.renewer, renewal(runner)
    try:
        for each, age_s in held:
            renewer.add(each, extend, _callback(on_lost, each), queue, age_s)
        yield
    finally:
        for each, _ in held:
            renewer.discard(each)


def _callback(on_lost: OnLost[T], reservation: Reservation[T]) -> Callable[[], object]:
    return (lambda: None) if on_lost is None else partial(on_lost, reservation)


def lost_in_body(*lost: Reservation[Any]) -> LeaseLost:
    """Return the error for reservations whose leases were lost while a block ran."""
    return LeaseLost(
        f"message {lost[0].id} of queue {lost[0].queue!r} is no longer held: its lease was "
        "lost while the block ran, so nothing was committed",
        lost=lost,
    )


def _described(reservation: Reservation[Any]) -> str:
    return f"message {reservation.id} of queue {reservation.queue!r}"


def log_failed_rollback(what: str, error: BaseException) -> None:
    """Log that a block ended with an exception and the rollback of its reservations failed."""
    log.warning("%s was not rolled back; it comes back when its lease ends: %s", what, error)
