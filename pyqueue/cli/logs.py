"""The log of ``pyqueue worker``: lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pyqueue.pipeline.around import current_deliveries

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

_TEXT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: The attributes of every record. Any other attribute was given as ``extra=``.
_OF_EVERY_RECORD: Final = frozenset(
    {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
)


def configure(level: Level | None, format: Format | None) -> None:
    """Send the log to stderr.

    Args:
        level: The lowest level that is shown. None means "info".
        format: "text" or "json". None means "text". If both arguments are None, a log that the
            program has configured stays unchanged.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if format == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(
        level=(level or "info").upper(),
        handlers=[handler],
        force=level is not None or format is not None,
    )


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON.

    A line of a handler has the ``queue``, the ``id`` and the ``try`` of its message. For a batch,
    they are those of its first message, and ``batch`` is the number of messages.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line for a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        deliveries = current_deliveries.get()
        if deliveries:
            first = deliveries[0].message
            line |= {"queue": first.queue, "id": str(first.id), "try": first.tries}
        if len(deliveries) > 1:
            line["batch"] = len(deliveries)
        for name, value in vars(record).items():
            if name not in _OF_EVERY_RECORD:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        return json.dumps(line, default=str, ensure_ascii=False)
