"""A Spark stage without a target: a function writes the messages to a table, claim by claim.

A claim keeps its number and its messages until the function has written all of them. So a function
that overwrites the rows of that number writes each message once. Smaller claims find the messages
that make it fail: a failed claim is released, and claimed again in parts with new numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from pyspark.sql import SparkSession

from pyqueue import arguments
from pyqueue.backends.claims.claims import NamedClaims, forget_tries
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import (
    ConfigurationError,
    Fenced,
    LeaseLost,
    QueueClosed,
    QueueError,
    Unavailable,
)
from pyqueue.messages import MAX_BATCH_BYTES, Reservation
from pyqueue.reserved import log_failed_rollback
from pyqueue.runtime.connecting import Connection
from pyqueue.spark.models import frame
from pyqueue.spark.outputs import Report

log = logging.getLogger("pyqueue")

#: How many processes may die on a claim before it is divided. Until then it keeps its messages.
DEATHS: Final = 2
#: Into how many parts it is divided.
PARTS: Final = 8


class TableSink:
    """Has a function write the claims of a group.

    Args:
        connection: The connection of a blocking client.
        source: The queue that is read, with the stage's options.
        function: Takes a DataFrame, or a DataFrame and the number of its claim.
        limit: The largest size of a claim.

    Raises:
        ConfigurationError: The function takes other arguments.
    """

    def __init__(
        self,
        connection: Connection,
        source: QueuePlans,
        function: Callable[..., object],
        limit: int,
    ) -> None:
        self.takes_number = arguments.takes_second("transform", function, ("df", "number"))
        self._connection = connection
        self._source = source
        self._function = function
        self._limit = limit
        #: The size of the next claim. It shrinks while the function fails.
        self._size = limit
        #: How many messages have failed alone since the function last succeeded.
        self._failed = 0

    @property
    def id(self) -> str:
        """The name in log messages."""
        return f"the claim of queue {self._source.queue!r}"

    @property
    def lease(self) -> float:
        """The length of the lease in seconds."""
        return self._source.options.lease

    def run_once(
        self, claims: NamedClaims, token: str, session: Callable[[], SparkSession]
    ) -> Report:
        """Have the outstanding claim written, or, if there is none, claim and write ready messages.

        Raises:
            Exception: The function's error, if it fails on one message after another.
        """
        began, run = time.monotonic(), self._connection.run
        while True:
            before = run(claims.progress(token))
            plan = claims.proceed(token, self._size, self.lease, max_bytes=MAX_BATCH_BYTES)
            number, ids = run(plan)
            if not ids:
                return Report(0, 0, 0, 0, 0, seconds=time.monotonic() - began)
            outstanding = number <= before.claimed
            if outstanding and before.adopted >= DEATHS and self._divided(claims, token, number):
                continue
            try:
                self._write(claims, token, number, session)
            except (ConfigurationError, Fenced, QueueClosed, Unavailable):
                raise
            except Exception as error:
                if len(ids) > 1:
                    self._size = len(ids) // 2
                    continue
                log.warning(
                    "message %s of queue %r makes the stage fail: %s",
                    ids[0],
                    self._source.queue,
                    str(error)[:500],
                )
                self._failed += 1
                if self._failed > 1:
                    raise
                return Report(1, 0, 0, 1, 0, seconds=time.monotonic() - began)
            done = run(claims.finish(token, number))
            self._size, self._failed = min(self._limit, 2 * self._size), 0
            return Report(len(ids), done, 0, 0, len(ids) - done, seconds=time.monotonic() - began)

    def _held(self, claims: NamedClaims, token: str, number: int) -> Sequence[Reservation[Any]]:
        return self._connection.run(claims.reservations(token, 0, number))

    def _divided(self, claims: NamedClaims, token: str, number: int) -> bool:
        """End a claim on which processes have died. Return whether it ended.

        It is claimed again in parts. A message that is alone is buried, if it had all its tries.
        """
        held, most = self._held(claims, token, number), self._source.options.max_tries
        if len(held) > 1:
            # The parts will show which message killed the process. The rest is not to blame.
            self._connection.run(forget_tries(claims, token))
            self._release(claims, token, number)
            self._size = max(1, len(held) // PARTS)
        elif held and (most is None or held[0].tries <= most):
            return False
        else:
            error = "the process ended each time it worked on this message"
            self._connection.run(claims.rollback(token, number, error))
        return True

    def _write(
        self,
        claims: NamedClaims,
        token: str,
        number: int,
        session: Callable[[], SparkSession],
    ) -> None:
        run, renewer = self._connection.run, self._connection.renewer
        documents = [
            each
            for part in run(claims.ranges(token, 0, number, 1))
            for each in run(claims.read(part))
        ]
        renewer.add(self, lambda _: run(claims.renew(token, self.lease)))
        try:
            df = frame(session(), documents, self._source.codec.model)
            result = self._function(df, number) if self.takes_number else self._function(df)
            if result is not None:
                raise ConfigurationError(
                    f"to: the stage of queue {self._source.queue!r} has no target, and its "
                    f"transform returned a {type(result).__name__}: name the target, or write the "
                    "messages in the transform and return nothing"
                )
        except (Fenced, QueueClosed, Unavailable):
            raise
        except BaseException as error:
            try:
                self._give_back(claims, token, number, error)
            except QueueError as failure:  # the first exception matters more
                log_failed_rollback(self.id, failure)
            raise
        finally:
            renewer.discard(self)

    def _give_back(
        self, claims: NamedClaims, token: str, number: int, error: BaseException
    ) -> None:
        """Roll back a message that failed alone. Otherwise release the messages of the claim."""
        held = self._held(claims, token, number)
        alone = len(held) == 1 and isinstance(error, Exception)
        if alone and not isinstance(error, ConfigurationError):
            self._connection.run(claims.rollback(token, number, error))
        else:
            self._release(claims, token, number)

    def _release(self, claims: NamedClaims, token: str, number: int) -> None:
        with suppress(LeaseLost):  # another consumer took some of them just now
            self._connection.run(self._source.release(tuple(self._held(claims, token, number))))
        self._connection.run(claims.acknowledge(token, number))
