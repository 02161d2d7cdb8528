"""Values as people read them: numbers, times, and the tree of a payload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from math import isfinite
from typing import Any, Final

from bson import Decimal128, ObjectId

from pyqueue.durations import readable_rate
from pyqueue.web.redacting import HIDDEN, Redactor

#: The maximum number of items of a list or document in a tree, its depth, and its longest text.
MAX_ITEMS: Final = 200
_MAX_DEPTH: Final = 8
_MAX_STRING: Final = 2000
#: The maximum number of characters in a tree, and of values.
MAX_CHARACTERS: Final = 65_536
_MAX_NODES: Final = 1500
_UNITS: Final = ((60, "s"), (60, "min"), (24, "h"))


def number(value: float | None, cap: int | None = None) -> str:
    """Return a number with thin spaces. A count that has reached its cap becomes "1 000+"."""
    if value is None:
        return "–"
    if cap is not None and value >= cap:
        return f"{number(cap - 1)}+"
    return f"{value:,}".replace(",", "\u202f")


def counted(value: int, noun: str = "message", cap: int | None = None) -> str:
    """Return a number with a noun; see ``number`` for ``cap``."""
    return f"{number(value, cap)} {noun}{'' if value == 1 else 's'}"


def rate(value: float | None) -> str:
    """Return a number per second as a rate: "8.3/s", "4.0/min", "0"."""
    if not value:
        return "–" if value is None else "0"
    scaled, unit = readable_rate(value)
    return f"{f'{scaled:.1f}' if scaled < 99.95 else number(round(scaled))}/{unit}"


def length(seconds: float | None) -> str:
    """Return a length of time: "24 ms", "3.2 s", "16 min"."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for size, unit in _UNITS:
        if seconds < 2 * size:
            return f"{seconds:.0f} {unit}"
        seconds /= size
    return f"{number(round(seconds))} d"


def since(instant: datetime | None, now: datetime | None = None) -> str:
    """Return how long ago an instant was, without "ago", or "–" for None."""
    if instant is None:
        return "–"
    return length(max(0.0, ((now or datetime.now(UTC)) - instant).total_seconds()))


def ago(instant: datetime | None) -> str:
    """Return how long ago an instant was, or in how long it will be."""
    if instant is None:
        return "–"
    if instant.year >= 8000:
        return "never"
    passed_s = (datetime.now(UTC) - instant).total_seconds()
    return f"in {length(-passed_s)}" if passed_s < 0 else f"{length(passed_s)} ago"


def clock(instant: datetime | None) -> str:
    """Return an instant in UTC."""
    if instant is None:
        return ""
    return f"{instant:%Y-%m-%d %H:%M:%S}.{instant.microsecond // 1000:03}Z"


def size(number_of_bytes: float | None) -> str:
    """Return a number of bytes in MB."""
    if number_of_bytes is None:
        return "–"
    return f"{number_of_bytes / 2**20:.0f} MB"


def plain(value: Any) -> Any:
    """Return a value in a form that JSON can represent."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


# ---- trees


class _Tree:
    """Builds a tree of nodes, up to a maximum size."""

    def __init__(self, redactor: Redactor, characters: int, depth: int = 1) -> None:
        self._redactor = redactor
        self._characters = characters
        self._nodes = _MAX_NODES
        self._depth = depth

    def node(self, path: Sequence[str], value: Any, skip: int = 0) -> dict[str, Any]:
        """Return the node of a value and the nodes in it."""
        value = self._redactor.value(".".join(path), value)
        found: dict[str, Any] = {"name": path[-1], "path": list(path[1:]), "text": "", "items": []}
        self._nodes -= 1
        self._characters -= len(path[-1])
        items = _items(value)
        if items is None:
            found["type"], text = _leaf(value)
            longest = MAX_CHARACTERS if len(path) == self._depth else _MAX_STRING
            room = max(80, min(self._characters, longest))
            found["text"], found["cut"] = text[:room], max(0, len(text) - room)
            self._characters -= len(found["text"])
            return found
        number_of_items, pairs = items
        found["type"] = "document" if isinstance(value, Mapping) else "list"
        found["size"] = number_of_items
        for name, each in islice(pairs, skip, skip + MAX_ITEMS):
            if self._nodes <= 0 or self._characters <= 0 or len(path) >= self._depth + _MAX_DEPTH:
                break
            found["items"].append(self.node([*path, name[:200]], each))
        found["next"] = skip + len(found["items"])
        found["more"] = max(0, number_of_items - found["next"])
        return found


def tree(
    redactor: Redactor, root: str, value: Any, at: Sequence[str] = (), skip: int = 0
) -> dict[str, Any]:
    """Return a value as nodes, with its secrets hidden: up to 200 items a level, and 64 KB.

    Args:
        redactor: Hides the secrets.
        root: The name of the field, such as "payload".
        value: The value to show.
        at: The path of the part of the value that is shown.
        skip: How many of the first items of this part to leave out.
    """
    path = [root]
    for name in at:
        value = redactor.value(".".join(path), value)
        items = _items(value)
        value = None if items is None else dict(items[1]).get(name)
        path.append(name)
    return _Tree(redactor, MAX_CHARACTERS, len(path)).node(path, value, skip)


def summary(redactor: Redactor, root: str, value: Any, characters: int = 160) -> str:
    """Return the beginning of a value in one line, with its secrets hidden."""
    text = _line(_Tree(redactor, 2 * characters).node([root], value))
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def redacted(redactor: Redactor, path: str, value: Any) -> Any:
    """Return a value for JSON, with its secrets hidden at any depth.

    Args:
        redactor: Hides the secrets.
        path: The path of the value, such as "payload".
        value: The value to show.
    """
    value = redactor.value(path, value)
    items = _items(value)
    if items is not None:
        each_of = ((name, redacted(redactor, f"{path}.{name}", each)) for name, each in items[1])
        return dict(each_of) if isinstance(value, Mapping) else [each for _, each in each_of]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else str(value)  # JSON has no infinity
    if isinstance(value, datetime):
        return value.isoformat()
    return redactor.text(path, _leaf(value)[1] if isinstance(value, bytes) else str(value))


def _items(value: Any) -> tuple[int, Iterable[tuple[str, Any]]] | None:
    """Return the number of items and the items of a list or a document; None for other values."""
    if isinstance(value, Mapping):
        return len(value), ((str(name), each) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return len(value), ((str(place), each) for place, each in enumerate(value))
    return None


def _leaf(value: Any) -> tuple[str, str]:
    """Return the type of a value, and its text."""
    if value is None:
        return "null", "null"
    if isinstance(value, bool):
        return "bool", "true" if value else "false"
    if isinstance(value, (int, float, Decimal128)):
        return "number", str(value)
    if isinstance(value, datetime):
        return "time", clock(value)
    if isinstance(value, ObjectId):
        return "id", str(value)
    if isinstance(value, bytes):
        return "bytes", f"{len(value)} bytes"
    if value == HIDDEN:
        return "hidden", HIDDEN
    return "text", json.dumps(str(value), ensure_ascii=False)


def _line(node: Mapping[str, Any]) -> str:
    if node["type"] not in ("document", "list"):
        return f"{node['text']}{'…' if node['cut'] else ''}"
    more = ["…"] if node["more"] else []
    if node["type"] == "list":
        return f"[{', '.join([*map(_line, node['items']), *more])}]"
    inner = [f"{each['name']}: {_line(each)}" for each in node["items"]]
    return f"{{{', '.join([*inner, *more])}}}"
