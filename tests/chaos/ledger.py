"""The ledger of a process of the load: what it was about to do, and then what it heard of it.

Each line goes to the file by one write, before the call and after it, so a process that is killed leaves all it knew. A call without a
result is one whose outcome nobody knows. The clock is the machine's monotonic one, which all processes share.

A line is a JSON list: ``["call", number, at, op, queue, items]`` or ``["heard", number, at, outcome, items]``. The items of a push or
pop are ids; those of a settle are ``{token: [ids]}``, those that a reserve got ``{token: {id: tries}}``. Of a settle that was refused they
are the two lists ``lost`` and ``unknown`` of LeaseLost, each like a settle's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyqueue import DuplicateKey, LeaseLost, QueueError, Reservation, Unavailable

__all__ = ["Call", "Ledger", "by_token", "read"]

Line = list[Any]


def by_token(held: Iterable[Reservation[Any]]) -> dict[str, list[str]]:
    """The ids of reservations, by the tokens of their claims."""
    found: dict[str, list[str]] = {}
    for each in held:
        found.setdefault(each.token, []).append(str(each.id))
    return found


class Call:
    """A call under way, and what came of it."""

    def __init__(self) -> None:
        #: What it returned.
        self.got: Any = None
        #: "ok", "refused" (LeaseLost), "unknown" (Unavailable), "taken" (DuplicateKey), "cancelled", or what another error says.
        self.outcome = "ok"
        #: What a refused settle left to be done by nobody: its members were lost.
        self.refused: list[Any] = []


class Ledger:
    """The ledger of this process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = itertools.count()

    def about_to(self, op: str, queue: str, items: object) -> int:
        """Note a call that is about to be made; its number."""
        number = next(self._numbers)
        self._write(["call", number, round(time.monotonic(), 3), op, queue, items])
        return number

    @contextmanager
    def noted(self, op: str, queue: str, items: object) -> Iterator[Call]:
        """Note a call and what came of it. The errors of pyqueue end here: the call's ``outcome`` says them."""
        number, call = self.about_to(op, queue, items), Call()
        try:
            yield call
        except LeaseLost as error:
            call.outcome, call.refused = "refused", [by_token(error.lost), by_token(error.unknown)]
        except Unavailable:
            call.outcome = "unknown"
        except DuplicateKey:
            call.outcome = "taken"
        except QueueError as error:
            call.outcome = f"{type(error).__name__}: {str(error)[:200]}"
        except asyncio.CancelledError:
            self._heard(number, "cancelled", None)
            raise
        self._heard(
            number, call.outcome, call.refused if call.outcome == "refused" else _told(op, call.got)
        )

    def _heard(self, number: int, outcome: str, items: object) -> None:
        self._write(["heard", number, round(time.monotonic(), 3), outcome, items])

    def _write(self, line: Line) -> None:
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _told(op: str, got: Any) -> object:
    """What a call returned, for the ledger."""
    if op == "reserve":
        found: dict[str, dict[str, int]] = {}
        for each in got or ():
            found.setdefault(each.token, {})[str(each.id)] = each.tries
        return found
    if op == "pop":
        return [str(each.id) for each in got or ()]
    if op == "push":
        return [None if id is None else str(id) for id in got or ()]
    return None


def read(path: Path) -> Iterator[Line]:
    """The lines of a ledger, or of the witness; a last one that was not written to its end is left out."""
    with path.open() as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)
