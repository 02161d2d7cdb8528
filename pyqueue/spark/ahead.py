"""Claim, read and hold the batches of a stage, and claim the next batch in advance.

While Spark works on a batch and the driver settles it, a thread claims and reads the next one. The
work stays in order: a batch is settled and acknowledged before the work on the next one begins. If
the process is killed, both batches are outstanding, and the next process works on both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyqueue import telling
from pyqueue.backends.claims.claims import ClaimRange, NamedClaims, id_order
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.documents import eligible_since
from pyqueue.errors import (
    ConfigurationError,
    Fenced,
    LeaseLost,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.messages import MAX_BATCH_BYTES, NEVER, Id, Reservation
from pyqueue.requests import Document, Plan, ServerTime
from pyqueue.reserved import log_failed_rollback
from pyqueue.runtime.connecting import Connection
from pyqueue.spark.told import Told


@dataclass(frozen=True, slots=True)
class Claimed:
    """The messages of the claims with the numbers ``after + 1`` to ``upto``."""

    token: str
    after: int
    upto: int
    documents: dict[Id, Document]
    held: dict[Id, Reservation[Any]]
    #: When the messages were read, by the monotonic clock.
    read_at: float


def claimed_now(claims: NamedClaims, token: str, limit: int) -> Plan[Claimed]:
    """Return the messages of the outstanding claims. If there are none, claim new messages.

    Raises:
        Fenced: Another process runs the group now.
    """
    lease_s = claims.backend.options.lease
    upto, ids = yield from claims.proceed(token, limit, lease_s, max_bytes=MAX_BATCH_BYTES)
    if not ids:
        return Claimed(token, 0, upto, {}, {}, read_at=time.monotonic())
    return (yield from _read(claims, token, 0, upto))


def _claimed_next(claims: NamedClaims, token: str, after: int, limit: int) -> Plan[Claimed | None]:
    """Make the next claim after number ``after``. Return None if no message can be claimed.

    Raises:
        Fenced: Another process runs the group now.
    """
    lease_s = claims.backend.options.lease
    upto = yield from claims.claim(token, limit, lease_s, max_bytes=MAX_BATCH_BYTES)
    return None if upto is None else (yield from _read(claims, token, after, upto))


def _read(claims: NamedClaims, token: str, after: int, upto: int) -> Plan[Claimed]:
    read_at = time.monotonic()
    # A message that another consumer has taken since the claim is missing here.
    found = sorted((yield from claims.read(ClaimRange(token, after, upto, ()))), key=_order)
    now, contents = (yield from ServerTime()), claims.contents
    held = [one for each in found for one in contents.reservations(each, now)]
    documents = [one for each in found for one in contents.messages(each)]
    return Claimed(
        token,
        after,
        upto,
        {each["_id"]: each for each in documents},
        {each.id: each for each in held},
        read_at=read_at,
    )


def _order(document: Document) -> tuple[datetime, tuple[bool, Any]]:
    """Return the sort key that orders documents by when they became ready."""
    return eligible_since(document) or NEVER, id_order(document["_id"])


@contextmanager
def working(
    connection: Connection, claims: NamedClaims, claimed: Claimed, *, blames: bool = True
) -> Iterator[None]:
    """Return the messages of a claim to the queue if the block fails.

    The claim stays unchanged if the block fails because another runner has taken over, because the
    client was closed, or because the server does not answer.

    Args:
        connection: The connection of a blocking client.
        claims: The plans (command sequences) of the group.
        claimed: The claim with the messages.
        blames: Whether an exception counts as a failed try of each message. A ConfigurationError
            or an interrupt never counts. If False, the messages are released in two halves that
            share no document, so that the next claim can be smaller.
    """
    try:
        yield
    except (Fenced, QueueClosed, Unavailable):
        raise
    except BaseException as error:
        misuse = isinstance(error, ConfigurationError) or not isinstance(error, Exception)
        tried = blames and not misuse
        # The next claims are smaller, so no document may have more messages than they take.
        pieces = 1 if blames or misuse else 2
        try:
            given_back = connection.run(
                claims.rollback(claimed.token, claimed.upto, error, tried=tried, pieces=pieces)
            )
        except QueueError as failure:  # the first exception matters more
            log_failed_rollback(f"the batch of group {claims.group!r}", failure)
        else:
            Told(connection, claims.backend).settled("rollback" if tried else "release", given_back)
        raise


class Rejected(Exception):
    """A message, or a part of a batch, cannot be processed."""


def bury_killer(source: QueuePlans, held: Reservation[Any]) -> Plan[bool]:
    """Bury a message that killed its processes, unless it has a try left.

    A message that another consumer has claimed in the meantime is not buried.

    Returns:
        Whether the message has no try left.
    """
    most = source.options.max_tries
    if most is None or held.tries <= most:
        return False
    error = Rejected("the process ended each time it worked on this message")
    plan = source.rollback((held,), error=error)
    with suppress(LeaseLost):
        yield from telling.settling(plan, telling.tells_of(source, "rollback", (held,)))
    return True


class Ahead:
    """Claims one batch in advance, in a thread.

    Args:
        connection: The connection of a blocking client.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._threads: ThreadPoolExecutor | None = None
        self._future: Future[Claimed | None] | None = None

    def begin(self, claims: NamedClaims, token: str, after: int, limit: int) -> None:
        """Start to make the next claim after number ``after``, in the thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "pyqueue_ahead")
        plan = _claimed_next(claims, token, after, limit)
        self._future = self._threads.submit(self._connection.run, plan)

    def take(self) -> Claimed | None:
        """Wait for the claim made in advance, and return it.

        Return None if there is none, or if an earlier call returned it.

        Raises:
            QueueError: The claim failed.
        """
        future, self._future = self._future, None
        return None if future is None else future.result()

    def forget(self) -> None:
        """Forget the claim made in advance without settling it. The next batch contains it."""
        if self._future is not None:
            wait([self._future])
            self._future = None

    def give_back(self, release: Callable[[tuple[Reservation[Any], ...]], Plan[None]]) -> None:
        """Release the messages claimed in advance, if the server answers. No try is counted."""
        with suppress(QueueError):  # then the leases run out, or the next process continues
            claimed = self.take()
            if claimed is not None:
                self._connection.run(release(tuple(claimed.held.values())))

    def close(self) -> None:
        """End the thread."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
