"""The ledger of a workload process: each call that it was about to make, and its outcome.

Each line reaches the file by one write, before the call and after it, so a killed process leaves
all that it knew. The outcome of a call without a result is unknown. Times are of the machine's
true monotonic clock, which all processes share.

A line is a JSON list: ``["call", number, at, op, queue, items]`` or ``["result", number, at,
outcome, items]``. Messages have names in place of ids; see ``names``. The items are:

* of a push or pop, ids; of a settle, ``{token: [ids]}``; of a reserve, ``{token: {id: tries}}``;
* of an append, contents, and in its result positions;
* in the result of a purge or a remove, the number of messages that it removed; in the result of a
  "bulk" call, how many messages it changed and passed;
* of "next", by which a loop commits its last message and receives another, as of a settle, and in
  its result as of a reserve; in the result of a cancel, a wait or a request, what it returned;
* in the result of a refused settle, the two lists ``lost`` and ``unknown`` of LeaseLost, each in
  the form of a settle;
* in the result of a call that raised, the text of Unavailable, or the traceback of another error.

``["error", number, at, text, traceback]`` is an error that pyqueue has logged, or that has ended a
thread.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyqueue import DuplicateKey, JobFailed, LeaseLost, Reservation, Unavailable
from tests.chaos.clock_skew import true_monotonic
from tests.chaos.names import name_in

Line = list[Any]


def ids_by_token(held: Iterable[Reservation[Any]]) -> dict[str, list[str]]:
    """Return the ids of reservations, grouped by the token of their claim."""
    found: dict[str, list[str]] = {}
    for each in held:
        found.setdefault(each.token, []).append(name_in(each.queue, each.id))
    return found


class Call:
    """A call and its outcome."""

    def __init__(self) -> None:
        #: The value that it returned.
        self.result: Any = None
        #: "ok", "refused" (LeaseLost), "unknown" (Unavailable), "late" (the same, but the caller
        #: had a deadline), "taken" (DuplicateKey), "failed" (JobFailed), "timeout" (TimeoutError),
        #: "cancelled", or the type and text of another error.
        self.outcome = "ok"
        #: The ``lost`` and ``unknown`` of a refused settle.
        self.refused: list[Any] = []
        #: The text of Unavailable, the reason of JobFailed, or the traceback; and the ids whose
        #: outcome is unknown.
        self.error = ""
        self.ids: list[Any] = []


class Ledger:
    """The ledger of this process.

    Args:
        path: The file that lines are appended to.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = itertools.count()

    def about_to(self, op: str, queue: str, items: object) -> int:
        """Record a call before it is made and return its number."""
        number = next(self._numbers)
        self._write(["call", number, round(true_monotonic(), 3), op, queue, items])
        return number

    @contextmanager
    def recorded(
        self, op: str, queue: str, items: object, *, hurried: bool = False
    ) -> Iterator[Call]:
        """Record a call and its outcome. Errors end here and become the ``outcome``.

        Args:
            op: The name of the call.
            queue: The queue, stream or group of the call.
            items: See above.
            hurried: Whether the caller has a deadline.
        """
        number, call = self.about_to(op, queue, items), Call()
        try:
            yield call
        except LeaseLost as error:
            call.outcome, call.refused = (
                "refused",
                [ids_by_token(error.lost), ids_by_token(error.unknown)],
            )
        except Unavailable as error:
            call.error, call.ids = str(error)[:200], list(error.ids)
            call.outcome = "late" if hurried else "unknown"
            if isinstance(items, list) and len(error.ids) not in (0, len(items)):
                call.outcome = f"Unavailable names {len(error.ids)} ids of {len(items)}: {error}"
        except DuplicateKey:
            call.outcome = "taken"
        except JobFailed as error:
            call.outcome, call.error = "failed", error.reason
        except TimeoutError:
            call.outcome = "timeout"
        except Exception as error:
            call.outcome = f"{type(error).__name__}: {str(error)[:200]}"
            call.error = traceback.format_exc()
        except asyncio.CancelledError:
            self._record_result(number, "cancelled", None)
            raise
        if call.outcome == "refused":
            shown: object = call.refused
        else:
            shown = call.error or _items_of(op, queue, call.result)
        self._record_result(number, call.outcome, shown)

    def record_logged_errors(self) -> None:
        """Record the errors that this process logs, and those that end a thread, from now on."""
        logging.getLogger().addHandler(_ErrorLog(self))
        hook = threading.excepthook

        def ended(args: threading.ExceptHookArgs) -> None:
            text = "".join(traceback.format_exception(args.exc_value)) if args.exc_value else ""
            self.record_error(f"a thread ended: {args.exc_value!r}", text)
            hook(args)

        threading.excepthook = ended

    def record_error(self, text: str, trace: str) -> None:
        """Record an error that no call has raised."""
        at = round(true_monotonic(), 3)
        self._write(["error", next(self._numbers), at, text[:500], trace])

    def _record_result(self, number: int, outcome: str, items: object) -> None:
        self._write(["result", number, round(true_monotonic(), 3), outcome, items])

    def _write(self, line: Line) -> None:
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


class _ErrorLog(logging.Handler):
    """Records logged errors."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(logging.ERROR)
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        """Record an error, with its traceback if it has one."""
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
        self._ledger.record_error(f"{record.name}: {record.getMessage()}", trace)


def _items_of(op: str, queue: str, result: Any) -> object:
    """Return the items of a result in the form of the ledger."""
    if op in ("reserve", "next"):
        found: dict[str, dict[str, int]] = {}
        for each in result or ():
            found.setdefault(each.token, {})[name_in(each.queue, each.id)] = each.tries
        return found
    if op == "pop":
        return [name_in(queue, each.id) for each in result or ()]
    if op == "append":
        return list(result or ())
    if op in ("purge", "remove"):
        return int(result)
    if op.startswith("bulk "):
        return [result.done, result.passed]
    if op in ("cancel", "request"):
        return result
    if op == "wait":
        return None if result is None else result.result
    if op == "push":
        return [None if id is None else name_in(queue, id) for id in result or ()]
    return None


def read(path: Path) -> Iterator[Line]:
    """Yield the lines of a ledger or of the change log, without an incomplete last line."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
