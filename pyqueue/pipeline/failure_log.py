"""How a stage logs that its handler failed: a traceback once a minute for each kind of failure."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from time import monotonic
from typing import Final

from pyqueue.error_records import error_record
from pyqueue.payloads import error_text, log_failure

log: Final = logging.getLogger("pyqueue")

#: For how long a failure with the same fingerprint is logged without its traceback.
INTERVAL_S: Final = 60.0
#: The maximum number of fingerprints that are remembered.
MAX_FINGERPRINTS: Final = 100


class FailureLog:
    """The failures of one stage: each kind of failure shows its traceback once a minute."""

    def __init__(self) -> None:
        #: When a traceback may be logged again, by the monotonic clock, keyed by fingerprint.
        self._silent_until: dict[object, float] = {}

    def log(self, failure: BaseException, text: str, *values: object) -> None:
        """Log a failure with its traceback, or with one line if it was logged a moment ago."""
        now, fingerprint = monotonic(), _fingerprint(failure)
        if now >= self._silent_until.get(fingerprint, now):
            self._silent_until.pop(fingerprint, None)
            if len(self._silent_until) >= MAX_FINGERPRINTS:
                del self._silent_until[next(iter(self._silent_until))]  # the oldest
            self._silent_until[fingerprint] = now + INTERVAL_S
            log_failure(failure, text, *values)
            return
        line = " ".join(error_text(failure).split())[:200]
        log.warning(f"{text}: %s: %s", *values, type(failure).__name__, line)


def _fingerprint(failure: BaseException) -> object:
    return error_record(failure, datetime.now(UTC))["fp"]
