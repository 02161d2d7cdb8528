"""A Spark stage without a target: a function writes the messages to a table, claim by claim.

A claim keeps its number and its messages until the function has written all of them. So a function
that overwrites the rows of that number writes each message once. If the function fails, the claim
is released, and its messages are claimed again in smaller claims with new numbers, until the
messages that make the function fail are found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession

from pyqueue import arguments
from pyqueue.backends.claims.claims import NamedClaims, forget_tries
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.errors import ConfigurationError, Fenced, LeaseLost, QueueClosed, Unavailable
from pyqueue.runtime.connecting import Connection
from pyqueue.spark.ahead import Claimed, bury_killer, claimed_now, working
from pyqueue.spark.models import frame
from pyqueue.spark.outputs import Report
from pyqueue.spark.told import Told

log = logging.getLogger("pyqueue")

#: How many processes may die on a claim before it is divided.
DEATHS: Final = 2
#: Into how many parts such a claim is divided.
PARTS: Final = 8


class TableSink:
    """A stage without a target: its function writes the claimed messages to a table.

    Args:
        connection: The connection of a blocking client.
        source: The queue that is read, with the stage's options.
        function: A function that takes a DataFrame, or a DataFrame and the number of its claim.
        output: The output of the stage. Only the default, "move", is allowed.
        limit: The maximum number of messages in a claim.

    Raises:
        ConfigurationError: There is no function, the function takes other arguments, or ``output``
            is not "move".
    """

    def __init__(
        self,
        connection: Connection,
        source: QueuePlans,
        function: Callable[..., object] | None,
        output: str,
        limit: int,
    ) -> None:
        if function is None:
            raise ConfigurationError(
                "transform: a stage without a target needs a function that writes the messages; "
                "pass one, or name a target"
            )
        if output != "move":
            raise ConfigurationError(
                "output: not allowed in a stage without a target, because such a stage writes no "
                "messages to a queue; leave out output"
            )
        self.takes_number = arguments.takes_second("transform", function, ("df", "number"))
        self._connection = connection
        self._source = source
        self._told = Told(connection, source)
        self._function = function
        self._limit = limit
        #: The size of the next claim. It shrinks while the function fails.
        self._size = limit
        #: How many messages have failed alone since the function last succeeded.
        self._failed = 0

    def run_once(
        self, claims: NamedClaims, token: str, session: Callable[[], SparkSession]
    ) -> Report:
        """Write the messages of the outstanding claim, or of a new claim if there is none.

        Raises:
            Exception: The function's own error, if it fails on one message after another.
        """
        run = self._connection.run
        while True:
            began = time.monotonic()
            before = run(claims.progress(token))
            claimed = run(claimed_now(claims, token, self._size))
            count = len(claimed.held)
            if not count:
                return Report()
            self._told.received(claimed.held.values(), began)
            outstanding = claimed.upto <= before.claimed
            if outstanding and before.adopted >= DEATHS and self._divided(claims, claimed):
                continue
            try:
                # Only a message that fails alone is rolled back. Smaller claims find it.
                with working(self._connection, claims, claimed, blames=count == 1):
                    self._write(claimed, session)
            except (ConfigurationError, Fenced, QueueClosed, Unavailable):
                raise
            except Exception as error:
                if count > 1:
                    self._size = count // 2
                    continue
                (id,) = claimed.held
                text = "message %s of queue %r makes the stage fail: %s"
                log.warning(text, id, self._source.queue, str(error)[:500])
                self._failed += 1
                if self._failed > 1:
                    raise
                return Report(1, failed=1)
            done = run(claims.finish(token, claimed.upto))
            held = [*claimed.held.values()]
            unknown = LeaseLost("no longer held", unknown=held) if done < count else None
            self._told.settled("commit", held, error=unknown)
            self._size, self._failed = min(self._limit, 2 * self._size), 0
            return Report(count, done, lost=count - done)

    def _divided(self, claims: NamedClaims, claimed: Claimed) -> bool:
        """End a claim during which processes have died. Return whether the claim was ended.

        Its messages are then claimed again in parts. A claim of a single message ends only if that
        message has no try left. The message is then buried.
        """
        run, held = self._connection.run, [*claimed.held.values()]
        if len(held) == 1:
            return run(bury_killer(self._source, held[0]))
        # The parts will show which message killed the process. The other messages are not to blame.
        run(forget_tries(claims, claimed.token))
        given_back = run(claims.rollback(claimed.token, claimed.upto, tried=False, pieces=PARTS))
        self._told.settled("release", given_back)
        self._size = max(1, len(held) // PARTS)
        return True

    def _write(self, claimed: Claimed, session: Callable[[], SparkSession]) -> None:
        documents = [*claimed.documents.values()]
        df = frame(session(), documents, self._source.codec.model)
        result = self._function(df, claimed.upto) if self.takes_number else self._function(df)
        if result is not None:
            raise ConfigurationError(
                f"to: the stage of queue {self._source.queue!r} has no target, but its "
                f"transform returned {type(result).__name__}; name a target, or write the messages "
                "in the transform and return None"
            )
