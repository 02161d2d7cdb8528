"""``Claim`` and ``AsyncClaim``: many messages under one lease, for bulk work."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import anyio.to_thread

from pyqueue import arguments, telling
from pyqueue.backends.claims.admitting import MAX_CLAIM
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.claims.groups import hold, runner_lease_s
from pyqueue.backends.queue_plans import QueuePlans, found
from pyqueue.errors import ConfigurationError, LeaseLost, QueueError
from pyqueue.messages import Duration, Id, Reservation
from pyqueue.requests import Document, Plan
from pyqueue.reserved import log_failed_rollback
from pyqueue.runtime.plan_runner import AsyncPlanRunner, PlanRunner, RunnerBase
from pyqueue.runtime.renewal import NamedLease

Runs = TypeVar("Runs", bound=RunnerBase)


class ClaimSize(NamedTuple):
    """The limits of a claim, in messages and in bytes."""

    limit: int
    max_bytes: int

    def check(self) -> None:
        """Check both limits.

        Raises:
            ConfigurationError: A limit is not allowed.
        """
        if arguments.count("limit", self.limit) > MAX_CLAIM:
            raise ConfigurationError(
                f"limit: {self.limit} is not allowed; a claim has at most {MAX_CLAIM} messages"
            )
        arguments.count("max_bytes", self.max_bytes)


class ClaimBase(Generic[Runs]):
    """The base of ``Claim`` and ``AsyncClaim``."""

    def __init__(self, runner: Runs, claims: NamedClaims, lease: Duration | None) -> None:
        self._runner = runner
        self._claims = claims
        self._token = ""
        self._upto = 0
        self._settled = False
        #: The ids of the claimed messages, or [] if no message was ready.
        self.ids: list[Id] = []
        #: The reservations of these messages, without payloads, or [] if the client has no hooks.
        self._held: list[Reservation[Any]] = []
        #: The name of the group.
        self.group = claims.group
        #: The length of the lease in seconds.
        self.lease = claims.backend.options.lease
        if lease is not None:
            self.lease = arguments.duration("lease", lease, positive=True)
        #: The lease of the process that runs the group. It keeps Spark stages out of the group.
        self._runner_lease = NamedLease(
            f"the runner of group {claims.group!r}", runner_lease_s(self.lease)
        )

    def _label(self) -> str:
        return f"the claim of group {self.group!r} of queue {self._claims.backend.queue!r}"

    @property
    def id(self) -> str:
        """The name of the claim in logs."""
        return f"group {self.group!r}"

    @property
    def number(self) -> int:
        """The number of the claim in its group.

        A process that takes over the claim after a crash gets the same number. After a rollback,
        the messages are claimed again under a larger number.
        """
        return self._upto

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        queue = self._claims.backend.queue
        return f"{type(self).__name__}({queue!r}, group={self.group!r}, {len(self)} messages)"

    def _begin(self, size: ClaimSize) -> Plan[None]:
        if self._runner.hooks is None:
            yield from self._claim(size)
        else:
            plan = self._claim_for_hooks(size)
            self._held = yield from telling.receiving(self._claims.backend.queue, plan)

    def _claim(self, size: ClaimSize) -> Plan[None]:
        self._token, self._upto, self.ids = yield from self._claims.begin(
            size.limit, self.lease, max_bytes=size.max_bytes
        )

    def _claim_for_hooks(self, size: ClaimSize) -> Plan[list[Reservation[Any]]]:
        yield from self._claim(size)
        if not self.ids:
            return []
        return (yield from self._claims.reservations(self._token, 0, self._upto))

    def _telling(self, verb: str, plan: Plan[None]) -> Plan[None]:
        tells = telling.tells_of(self._claims.backend, verb, self._held)
        return telling.settling(plan, tells) if tells else plan

    def _documents(self) -> Plan[list[Document]]:
        documents: list[Document] = []
        for span in (yield from self._claims.ranges(self._token, 0, self._upto, 1)):
            for each in (yield from self._claims.read(span)):
                documents += self._claims.contents.messages(each)
        return documents

    def _settle(self) -> None:
        if self._settled:
            raise ConfigurationError(
                f"claim: the claim of group {self.group!r} was already committed or rolled back; "
                "a claim can be settled only once"
            )
        self._settled = True
        self._runner.renewer.discard(self)
        self._runner.renewer.discard(self._runner_lease)

    def _commit(self) -> Plan[None]:
        self._settle()
        yield from self._telling("commit", self._finish())

    def _finish(self) -> Plan[None]:
        done = yield from self._claims.finish(self._token, self._upto)
        if done < len(self):
            raise LeaseLost(
                f"{len(self) - done} of {len(self)} messages of claim group {self.group!r} "
                "were no longer held; they will be delivered again",
                unknown=self._held,  # hooks cannot know which of them were finished
            )

    def _renew(self) -> Plan[None]:
        yield from self._claims.renew(self._token, self.lease)

    def _hold(self) -> Plan[None]:
        yield from hold(self._claims, self._token, self.lease)

    def _rollback(self, error: BaseException | str | None) -> Plan[None]:
        self._settle()
        with suppress(LeaseLost):  # only hooks get it
            yield from self._telling("rollback", self._give_back(error))

    def _give_back(self, error: BaseException | str | None) -> Plan[None]:
        """Roll back the claim. If there are hooks, raise LeaseLost for messages not given back."""
        given_back = yield from self._claims.rollback(self._token, self._upto, error)
        ids = {each.id for each in given_back}
        if lost := [each for each in self._held if each.id not in ids]:
            raise LeaseLost(f"claim group {self.group!r} no longer holds some messages", lost=lost)


class Claim(ClaimBase[PlanRunner]):
    """Many messages that are held under one lease, and settled together. The lease is renewed."""

    def dataframe(self, spark: Any) -> Any:
        """Return the messages as a DataFrame.

        Its columns are id, queue, payload, headers, key, when, pushed and tries. The payload is a
        struct if the queue has a pydantic model, and a JSON string otherwise.

        Args:
            spark: A Spark session, classic or Connect.

        Returns:
            The DataFrame. It contains the rows themselves, so it stays valid after the claim is
            settled.

        Raises:
            InvalidMessage: A payload does not fit the model.
            Fenced: Another process took over the group.
        """
        from pyqueue.spark.models import frame

        return frame(spark, self._runner.run(self._documents()), self._claims.backend.codec.model)

    def commit(self) -> None:
        """Finish the messages.

        Raises:
            LeaseLost: Some messages were no longer held and are unchanged. All the other messages
                were finished.
            Fenced: Another process took over the group. Nothing was changed.
        """
        self._runner.run(self._commit())

    def rollback(self, error: BaseException | str | None = None) -> None:
        """Give the messages back for another try, as ``Queue.rollback`` does.

        Args:
            error: The reason for the rollback, which is kept in ``Message.error``.

        Raises:
            Fenced: Another process took over the group. Nothing was changed.
        """
        self._runner.run(self._rollback(error))


class AsyncClaim(ClaimBase[AsyncPlanRunner]):
    """The twin of ``Claim`` for async code."""

    async def dataframe(self, spark: Any) -> Any:
        """Return the messages as a DataFrame. See ``Claim.dataframe``."""
        from pyqueue.spark.models import frame

        documents = await self._runner.run(self._documents())
        return await anyio.to_thread.run_sync(
            frame, spark, documents, self._claims.backend.codec.model
        )

    async def commit(self) -> None:
        """Finish the messages. See ``Claim.commit``."""
        await self._runner.run(self._commit())

    async def rollback(self, error: BaseException | str | None = None) -> None:
        """Give the messages back for another try. See ``Claim.rollback``."""
        await self._runner.run(self._rollback(error))


@contextmanager
def claimed(
    runner: PlanRunner,
    backend: QueuePlans,
    group: str,
    size: ClaimSize,
    lease: Duration | None,
) -> Iterator[Claim]:
    """Claim messages for the block of ``Queue.claim``."""
    plans = runner.run(found(backend, names=True))
    size.check()
    claim = Claim(runner, NamedClaims(plans, group), lease)
    runner.run(claim._begin(size))
    runner.renewer.add(claim, lambda _: runner.run(claim._renew()))
    runner.renewer.add(claim._runner_lease, lambda _: runner.run(claim._hold()))
    try:
        yield claim
    except BaseException as error:
        if not claim._settled:
            try:
                claim.rollback(error)
            except QueueError as failure:  # the exception of the block matters more
                log_failed_rollback(claim._label(), failure)
        raise
    if not claim._settled:
        claim.rollback()


@asynccontextmanager
async def claimed_async(
    runner: AsyncPlanRunner,
    backend: QueuePlans,
    group: str,
    size: ClaimSize,
    lease: Duration | None,
) -> AsyncIterator[AsyncClaim]:
    """Claim messages for the block of ``AsyncQueue.claim``."""
    plans = await runner.run(found(backend, names=True))
    size.check()
    claim = AsyncClaim(runner, NamedClaims(plans, group), lease)
    await runner.run(claim._begin(size))
    runner.renewer.add(claim, lambda _: runner.run(claim._renew()))
    runner.renewer.add(claim._runner_lease, lambda _: runner.run(claim._hold()))
    try:
        yield claim
    except BaseException as error:
        if not claim._settled:
            try:
                with anyio.CancelScope(shield=True):
                    await claim.rollback(error)
            except QueueError as failure:  # the exception of the block matters more
                log_failed_rollback(claim._label(), failure)
        raise
    if not claim._settled:
        await claim.rollback()
