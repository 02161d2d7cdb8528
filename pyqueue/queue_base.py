"""The base of ``Queue`` and ``AsyncQueue``: it chooses the plan of each operation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Generic, Literal, TypedDict, TypeVar, Unpack

from pyqueue import arguments, at_once, gathers, telling
from pyqueue.backends import (
    also,
    awaiting,
    browsing,
    cancelling,
    choosing,
    managing,
    requeueing,
    results,
)
from pyqueue.backends.also import AlsoPlans
from pyqueue.backends.applying import stored_claim
from pyqueue.backends.browsing import BrowseOptions
from pyqueue.backends.forms import RollbackOptions
from pyqueue.backends.moving import MoveOptions
from pyqueue.backends.next_message import next_message
from pyqueue.backends.pushing import PushOptions, push_one
from pyqueue.backends.queue_plans import QueuePlans, in_recorded_kind
from pyqueue.backends.receiving import ReceiveOptions
from pyqueue.backends.receiving import checked as checked_receive
from pyqueue.backends.unpacking import unpacked
from pyqueue.each import LoopPlans
from pyqueue.errors import ConfigurationError, JobFailed, LeaseLost, QueueError
from pyqueue.facts import Gather, Keep
from pyqueue.messages import (
    MAX_RECEIVED_BYTES,
    UNCHANGED,
    Cancelled,
    Duration,
    Headers,
    Id,
    PackedReservation,
    Page,
    Reservation,
)
from pyqueue.requests import Aside, Plan
from pyqueue.runtime.doors import Door
from pyqueue.runtime.plan_runner import RunnerBase
from pyqueue.runtime.renewal import LeaseRenewer

T = TypeVar("T")
Runs = TypeVar("Runs", bound=RunnerBase)

#: The action of a push whose key is taken.
OnDuplicate = Literal["ignore", "replace", "error"]


class PushTerms(TypedDict, total=False):
    """The options of ``Queue.push`` other than its key."""

    delay: Duration | None
    at: datetime | None
    on_duplicate: OnDuplicate
    headers: Headers | None
    id: Id | None
    priority: int | None
    group: str | None
    result: Duration | None
    expires: Duration | None
    unique_for: Duration | None
    gather: Gather | None
    also: Sequence[Any] | None  # queues and names
    session: Any


class QueueBase(Generic[T, Runs]):
    """The base of ``Queue`` and ``AsyncQueue``."""

    def __init__(self, runner: Runs, backend: QueuePlans) -> None:
        self._runner = runner
        self._backend = backend
        self._door = Door(backend)
        #: The queue's name.
        self.name = backend.queue

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, namespace={self._runner.namespace!r})"

    def _receive(self, limit: int, **how: Unpack[ReceiveOptions]) -> Plan[list[Any]]:
        plan = self._receiving(limit, how)
        return plan if self._runner.hooks is None else telling.receiving(self.name, plan)

    def _receiving(self, limit: int, how: ReceiveOptions) -> Plan[list[Any]]:
        waiters = self._runner.waiters(self.name)
        plans = None if how.get("pop") else self._door.plans(self._runner.known, "receive")
        if plans is None:
            return self._backend.receive(waiters, limit, **how)
        how["is_known"] = True
        return plans.receive(waiters, limit, **how)

    def _claim_at_once(self, timeout: object, lease: object) -> at_once.Claim | None:
        """Return the call that receives one message without a plan, if that is possible."""
        plans = self._door.plans(self._runner.known, "receive") if lease is None else None
        return None if plans is None else at_once.claim(self._runner, plans, timeout)

    def _commit_at_once(
        self, given: Sequence[object], payload: object, result: object, session: object
    ) -> at_once.Commit | None:
        """Return the call that commits a message without a plan, if that is possible."""
        if session is not None or payload is not UNCHANGED or result is not UNCHANGED:
            return None
        plans = self._door.plans(self._runner.known, "settle")
        return None if plans is None else at_once.commit(self._runner, plans, given)

    @property
    def _settling(self) -> QueuePlans:
        """The plans to settle reservations with."""
        return self._door.plans(self._runner.known, "settle") or self._backend

    def _loops(self, timeout: Duration | None, lease: Duration | None) -> LoopPlans[Any]:
        """Return the plans for the loops of ``each``."""
        checked_receive(1, MAX_RECEIVED_BYTES, timeout, lease)
        plans, hooks = self._backend, self._runner.hooks

        def following(last: Any) -> Plan[list[Any]]:
            receive = self._receiving(1, {"timeout": timeout, "lease": lease})
            if last is None:
                plan = next_message(receive, None, release)
            else:
                first = self._commits_first(last)
                plan = next_message(
                    receive, commit([last]), release, commit_first=first, until=last.until
                )
            return plan if hooks is None else telling.receiving(self.name, plan)

        def commit(held: Sequence[Any]) -> Plan[None]:
            plan = self._settling.commit(held)
            if hooks is not None:
                tells = telling.tells_of(plans, "commit", held)
                plan = telling.settling(plan, tells, repeated=True)
            return without_renewal(self._runner.renewer, held, None, plan)

        def release(held: Sequence[Any]) -> Plan[None]:
            # Hooks are not told: no caller has received the messages.
            return plans.release(held, seen=False)

        def rollback(held: Sequence[Any], error: BaseException | str) -> Plan[None]:
            return self._settles("rollback", held, None, plans.rollback(held, error=error))

        return LoopPlans(self.name, following, commit, rollback)

    def _commits_first(self, held: Any) -> bool:
        """Return whether a claim may find more messages once this message is committed.

        Other messages may be waiting for this message. Its commit may also end the claim on its
        pack; until then, no claim finds the other messages of that pack.
        """
        return isinstance(held, PackedReservation) or bool(stored_claim(held))

    def _push(
        self,
        payload: object,
        on_duplicate: str,
        own: Mapping[str, Any],
        same: Mapping[str, Any],
        others: object = None,
    ) -> Plan[list[Id | None]]:
        # Most pushes give no option, and then have nothing to check.
        given: Any = {name: value for name, value in same.items() if value is not None}
        given |= {name: [value] for name, value in own.items() if value is not None}
        if on_duplicate != "ignore":
            given["on_duplicate"] = on_duplicate
        if others is None:
            return self._pushes([payload], given) if given else self._push_plain(payload)
        also.refuse_key(given)
        targets = also.targets(self.name, others, lambda to: target_of(to, self._runner, "also"))
        return self._pushes([payload], given, AlsoPlans(self._backend, targets))

    def _push_plain(self, payload: object) -> Plan[list[Id | None]]:
        plans, hooks = self._door.plans(self._runner.known, "push"), self._runner.hooks
        if plans is None or (hooks is not None and hooks.takes("pushing")):
            return self._pushes([payload], {})
        plan = push_one(plans.terms, payload, is_known=True)
        return plan if hooks is None else telling.pushed(self.name, plan)

    def _push_many(self, payloads: Iterable[Any], how: PushOptions) -> Plan[list[Id | None]]:
        given, how = unpacked(payloads, how)
        return self._pushes(given, how)

    def _keeps(self, how: PushOptions, number: int) -> list[Keep | None]:
        """Move ``results`` and ``uniques`` from the options of a push into one Keep per message."""
        none = [None] * number
        wanted, uniques = how.pop("results", none), how.pop("uniques", none)
        return results.keeps(wanted, uniques, self._runner.results)

    def _pushes(
        self, payloads: list[Any], how: PushOptions, plans: AlsoPlans | None = None
    ) -> Plan[list[Id | None]]:
        hooks, given = self._runner.hooks, how.get("gathers", ())
        pushing = plans or self._backend
        if "results" in how or "uniques" in how:
            how["keeps"] = self._keeps(how, len(payloads))
        if any(each is not None for each in given):
            home = (self._runner.namespace, self._runner.store)
            how["gathers"] = gathers.checked(given, home, how.get("session"))
        if hooks is None:
            plan = pushing.push(payloads, **how)
        else:
            plan = telling.push(hooks, pushing, payloads, how)
        return gathers.marking_failures(plan, given) if given else plan

    def _move(self, given: Iterable[tuple[Any, Any]], to: Any, edits: MoveOptions) -> Plan[None]:
        target = target_of(to, self._runner)
        pairs = list(given) if isinstance(given, Iterable) else [given]
        if not all(isinstance(pair, Sequence) and len(pair) == 2 for pair in pairs):
            raise ConfigurationError("pairs: expected pairs; pass (reservation, payload) tuples")
        plan = self._backend.move(pairs, to=target, **edits)
        name = target if isinstance(target, str) else target.queue
        return self._settles("move", [each for each, _ in pairs], edits["session"], plan, name)

    def _rollback(self, reservations: Sequence[Any], how: RollbackOptions) -> Plan[None]:
        plan = self._backend.rollback(reservations, **how)
        verb = "rollback" if how.get("counted", True) else telling.POSTPONE
        return self._settles(verb, reservations, how.get("session"), plan)

    def _reprioritize(self, id: Id, priority: int) -> Plan[bool]:
        def reprioritize(found: QueuePlans) -> Plan[bool]:
            return managing.reprioritize(self.name, found.kind, id, priority)

        return in_recorded_kind(self._backend, reprioritize)

    def _browse(self, options: BrowseOptions) -> Plan[Page[T]]:
        return browsing.browse(self._backend.terms, browsing.checked(**options))

    def _reserve_id(self, id: Id, lease: Duration | None) -> Plan[list[Any]]:
        waiting = self._runner.waiters(self.name)

        def reserve(found: QueuePlans) -> Plan[list[Any]]:
            return choosing.reserve_id(found.terms, waiting, id, lease)

        plan = in_recorded_kind(self._backend, reserve)
        return plan if self._runner.hooks is None else telling.receiving(self.name, plan)

    def _cancel(self, id: Id, force: bool) -> Plan[Cancelled | None]:
        return in_recorded_kind(
            self._backend, lambda found: cancelling.cancel(id, force, found.terms)
        )

    def _requeue(self, id: Id) -> Plan[bool]:
        return in_recorded_kind(self._backend, lambda found: requeueing.requeue(found.terms, id))

    def _notify(self) -> Plan[None]:
        return managing.notify(self.name)

    def _settles(
        self,
        verb: str,
        reservations: Iterable[Any],
        session: Any,
        plan: Plan[None],
        to: str | None = None,
    ) -> Plan[None]:
        """Run a plan that settles reservations. Stop renewing them, and call the hooks."""
        if session is not None:
            arguments.session(session)
        if self._runner.hooks is not None:
            tells = telling.tells_of(self._backend, verb, reservations, session, to)
            plan = telling.settling(plan, tells)
        return without_renewal(self._runner.renewer, reservations, session, plan)


def without_renewal(
    renewer: LeaseRenewer, reservations: Iterable[Any], session: Any, plan: Plan[None]
) -> Plan[None]:
    """Run a plan that settles reservations, and stop renewing them.

    In a transaction, renewing stops before the plan runs: a renewal between the first command of
    the transaction and the settlement would abort the transaction with a write conflict.
    """
    held = renewer.registered(reservations)
    return _without_renewal(renewer, held, session, plan) if held else plan


def _without_renewal(
    renewer: LeaseRenewer, held: Sequence[Any], session: Any, plan: Plan[None]
) -> Plan[None]:
    for each in held:
        if session is not None:
            renewer.suspend(each)
        else:
            renewer.settling(each, True)
    try:
        yield from plan
    except LeaseLost:
        for each in held:
            renewer.discard(each)
        raise
    except BaseException:
        if session is None:
            for each in held:
                renewer.settling(each, False)
        raise
    if session is None:
        for each in held:
            renewer.discard(each)


def target_of(to: object, runner: RunnerBase, argument: str = "to") -> QueuePlans | str:
    """Return the target that an argument names: the plans of a ``Queue``, or a queue name.

    Raises:
        ConfigurationError: The argument is neither a queue nor a name, or is in another namespace.
    """
    if isinstance(to, QueueBase):
        other = to._runner
        if (other.namespace, other.store) != (runner.namespace, runner.store):
            raise ConfigurationError(
                f"{argument}: queue {to.name!r} is in another database or namespace; "
                f"a message can only enter queues of its own namespace ({runner.namespace!r})"
            )
        return backend_of(to)
    if not isinstance(to, str):
        raise ConfigurationError(
            f"{argument}: expected a Queue or the name of a queue, found {type(to).__name__}"
        )
    return to


def backend_of(queue: QueueBase[Any, Any]) -> QueuePlans:
    """Return the plans of a queue, for other modules of pyqueue."""
    return queue._backend


def runs_on(queue: QueueBase[Any, Any], runner: object) -> bool:
    """Return whether a queue belongs to this plan runner."""
    return queue._runner is runner


def receiving(
    queue: QueueBase[Any, Any], limit: int, **how: Unpack[ReceiveOptions]
) -> Plan[list[Any]]:
    """Return the plan by which a queue receives messages, for other modules of pyqueue."""
    return queue._receive(limit, **how)


def requesting(
    queue: QueueBase[Any, Any], payload: object, timeout: Duration, options: Mapping[str, Any]
) -> Plan[Any]:
    """Return the plan of ``Client.request``, with these options of the push."""
    if not isinstance(queue, QueueBase):
        raise ConfigurationError(
            f"queue: expected a Queue or the name of a queue, found {type(queue).__name__}; create "
            "a Queue with client.queue(...)"
        )
    timeout_s = arguments.duration("timeout", timeout)
    runner = queue._runner
    own = {"priorities": options["priority"], "groups": options["group"]}
    own["results"] = timeout_s + awaiting.SPARE_S
    own["expires"] = max(timeout_s, 0.001)
    [id] = yield from queue._push(payload, "ignore", own, {"headers": options["headers"]})
    assert id is not None  # it has no key that could be taken
    try:
        finished = yield from awaiting.wait(runner.waiters(runner.results), id, timeout_s)
    except TimeoutError:
        yield from cancelling.cancel(id, False)
        raise
    except JobFailed as failed:
        if failed.reason != "expired":
            raise
        text = f"message {id} has expired: no worker has begun to work on it within {timeout_s:g} s"
        raise TimeoutError(text) from failed
    except (Exception, GeneratorExit):
        raise
    except BaseException:  # the task of the caller was cancelled, or Ctrl-C interrupted the call
        yield from Aside(_cancelling(id))
        raise
    return finished.result


def _cancelling(id: Id) -> Plan[None]:
    """Cancel a message whose result no caller waits for."""
    with suppress(QueueError):  # the message expires at the end of the timeout
        yield from cancelling.cancel(id, False)


def settling(
    queue: QueueBase[Any, Any], held: Sequence[Reservation[Any]], plan: Plan[None], verb: str
) -> Plan[None]:
    """Return a plan that settles messages of a queue, for other modules of pyqueue."""
    return queue._settles(verb, held, None, plan)
