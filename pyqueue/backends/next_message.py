"""The next message of a loop: it is claimed while the last one is committed.

The commit and the claim do not depend on each other, so they run concurrently, and the caller waits
for both. The commit goes first if the claim may find more messages after it, for example messages
that wait for the last one. The plan waits for a message only after the commit, so a caller that has
lost a lease learns of it at once. Nothing is claimed before the caller asks for it, and a message
that is claimed but not returned is given back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

from pyqueue.concurrently import Concurrently
from pyqueue.errors import LeaseLost, QueueError
from pyqueue.hooks import Tell
from pyqueue.messages import NEVER, Reservation
from pyqueue.pausable import Pausable, leaving_out
from pyqueue.requests import Aside, Listen, Plan, Request, ServerTime, ToTheEnd, Wait

log = logging.getLogger("pyqueue")

H = TypeVar("H", bound=Reservation[Any])


def next_message(
    receive: Plan[list[H]],
    commit: Plan[None] | None,
    release: Callable[[list[H]], Plan[None]],
    *,
    commit_first: bool = False,
    until: datetime = NEVER,
) -> Plan[list[H]]:
    """Commit the last message of a loop, and receive the next one.

    Args:
        receive: Receives up to one message.
        commit: Commits the last message; None if there is no such message, or it is settled.
        release: Returns the plan that gives messages back unprocessed.
        commit_first: Whether the claim may find more messages once the last one is committed.
        until: The end of the lease of the last message. After that instant, the claim could take
            that message again, so the commit goes first.

    Returns:
        The result of ``receive``.

    Raises:
        QueueError: The error of the commit, or else of the receive. The caller holds no message.
    """
    if commit is None:
        return (yield from receive)
    if commit_first or until <= (yield from ServerTime()):
        # It must run to the end: its last step releases the messages that wait for this one.
        yield from to_the_end(commit)
        return (yield from receive)
    return (yield from _commit_and_receive(commit, receive, release))


def _commit_and_receive(
    commit: Plan[None], receive: Plan[list[H]], release: Callable[[list[H]], Plan[None]]
) -> Plan[list[H]]:
    claim, settlement = Pausable(receive, (Listen, Wait)), _Settlement(commit)
    try:
        # The first plan runs in the caller's task, and needs several commands.
        plans = [_failure(claim.begin()), _failure(settlement.run())]
        claim_error, commit_error = yield from Concurrently(plans, outlive=True)
    except GeneratorExit:  # nothing runs this plan any more
        raise
    except BaseException:  # the caller was cancelled
        yield from settlement.leave()
        if claim.result:
            yield from Aside(_give_back(claim.result, release))
        raise
    yield from settlement.tell()
    if commit_error is not None:
        claim.close()
        if claim.result:
            yield from ToTheEnd(_give_back(claim.result, release))
        raise commit_error
    if claim_error is not None:
        raise claim_error
    return (yield from claim.finish()) or []


def _failure(plan: Plan[None]) -> Plan[Exception | None]:
    """Run a plan, and return its error, if any, so that the other plan also runs to its end."""
    try:
        yield from plan
    except Exception as error:
        return error
    return None


def _give_back(claimed: list[H], release: Callable[[list[H]], Plan[None]]) -> Plan[None]:
    """Give back a claimed message that the caller does not get after an error or a cancellation."""
    try:
        yield from release(claimed)
    except LeaseLost:
        pass  # another consumer has it
    except QueueError as error:
        log.warning(
            "message %s of queue %r was claimed for a loop, but neither returned nor given back; "
            "it comes back when its lease ends: %s",
            claimed[0].id,
            claimed[0].queue,
            error,
        )


def to_the_end(plan: Plan[None]) -> Plan[None]:
    """Run a plan that settles messages until it is complete, even if the caller is cancelled.

    Hooks are called in the caller's task. If the caller is gone, they are called where the plan
    runs, and an error of the plan is logged.
    """
    settlement = _Settlement(plan)
    try:
        yield from ToTheEnd(settlement.run())
    except GeneratorExit:  # nothing runs this plan any more
        raise
    except Exception:
        yield from settlement.tell()
        raise
    except BaseException:
        yield from settlement.leave()
        raise
    yield from settlement.tell()


class _Settlement:
    """A plan that settles messages in a separate task, and that may outlive its caller."""

    def __init__(self, plan: Plan[None]) -> None:
        self._plan = plan
        #: The reports of the plan to hooks, until the caller passes them on.
        self._kept: list[Tell] = []
        self._left = False

    def run(self) -> Plan[None]:
        """Run the plan."""
        try:
            yield from leaving_out(self._plan, self._keep)
        except QueueError as error:
            if self._left and not isinstance(error, LeaseLost):
                log.warning("messages of a loop were not settled: %s", error)
            raise

    def tell(self) -> Plan[None]:
        """Pass the reports of the plan so far on to hooks, in the caller's task."""
        kept, self._kept = self._kept, []
        yield from kept

    def leave(self) -> Plan[None]:
        """Note that the caller is gone, and pass the reports so far on to hooks."""
        self._left = True
        return self.tell()

    def _keep(self, request: Request[Any]) -> bool:
        if self._left or not isinstance(request, Tell):
            return False
        self._kept.append(request)
        return True
