"""Packs in the change log: its lines, with one line for each message of a pack.

A claim of a pack claims each message that it still has. A message whose bit is set has left the
pack. If the same update lists its copy, the copy goes on with it, hidden until it is shown. Else
the message is finished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pyqueue import packs
from pyqueue.backends.transitions import hidden_queue

__all__ = ["PackLog"]

Line = list[Any]


@dataclass(slots=True)
class _Pack:
    """A stored pack: its queue, its size, and the bits of the messages that left it."""

    queue: str
    size: int
    words: list[int]

    @property
    def alive(self) -> int:
        return packs.alive_of({"b": range(self.size), "done": self.words})


@dataclass(slots=True)
class _Copy:
    """A hidden copy: the line of its message, the queue that it enters, and its claim."""

    line: Line
    target: str
    token: str
    dead: bool
    #: Whether its pack has handed it over.
    decided: bool = False


class PackLog:
    """The lines of a change log, message by message.

    Args:
        lines: The lines of the change log.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self._lines = lines
        self._packs: dict[str, _Pack] = {}
        self._copies: dict[str, _Copy] = {}
        #: What no pack may do, in words, by the figure that counts it.
        self.wrong: dict[str, list[str]] = defaultdict(list)

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines. ``wrong`` is complete after the last one."""
        for line in self._lines:
            kind, id, *rest = line
            if kind == "pack":
                yield from self._stored(id, *rest)
            elif kind == "copy":
                self._hidden(id, *rest)
            elif id in self._packs:
                yield from self._changed(id, *rest) if kind == "set" else self._deleted(id, *rest)
            elif id in self._copies:
                yield from self._copy_changed(line)
            else:
                yield line
        for id, copy in self._copies.items():
            if copy.decided:
                self.wrong["lost"].append(f"{id}: it left its pack, and was never shown")

    def _stored(
        self, id: str, queue: str, contents: list[str], pushed: int, at: float, when: float
    ) -> Iterator[Line]:
        self._packs[id] = _Pack(queue, len(contents), [0] * len(contents))
        for place, content in enumerate(contents):
            yield ["in", f"{id}:{place}", queue, content, pushed, at, when]

    def _changed(self, id: str, put: Mapping[str, Any], at: float) -> Iterator[Line]:
        pack = self._packs[id]
        before = pack.alive
        for place, word in put.get("done", {}).items():
            if pack.words[int(place)] & ~word:
                self.wrong["undone"].append(f"{id}: messages that had left it are back")
            pack.words[int(place)] = word
        if put.get("left", pack.alive.bit_count()) != pack.alive.bit_count():
            self.wrong["settled_twice"].append(
                f"{id}: it counts {put['left']} messages, and has {pack.alive.bit_count()}"
            )
        gone = {f"{id}:{place}" for place in packs.places(before & ~pack.alive)}
        for token, ids in put.get("handed", ()):
            for each in sorted(gone.intersection(ids)):
                gone.remove(each)
                yield from self._handed_over(each, pack.queue, token, at)
        for each in sorted(gone):
            yield ["out", each, at]
        rest = {name: put[name] for name in put if name not in ("left", "done", "handed")}
        for place in packs.places(pack.alive) if rest else ():
            yield ["set", f"{id}:{place}", rest, at]

    def _handed_over(self, id: str, queue: str, token: str, at: float) -> Iterator[Line]:
        """Yield how the claim of a message ends whose copy goes on with it."""
        copy, hidden = self._copies.get(id), {"q": hidden_queue(queue)}
        put: dict[str, Any] = {"token": None, "by": token}
        if copy is None or copy.token != token:
            self.wrong["lost"].append(f"{id}: it left its pack by {token} without a copy")
        elif copy.target == queue:
            copy.decided = True
            yield ["set", id, put, at]  # back in its queue
            put = {}
        else:
            copy.decided = True
            put |= {"dead": True} if copy.dead else {}
        yield ["set", id, put | hidden, at]

    def _deleted(self, id: str, at: float) -> Iterator[Line]:
        for place in packs.places(self._packs.pop(id).alive):
            yield ["out", f"{id}:{place}", at]

    # ---- copies

    def _hidden(self, id: str, _: str, *line: Any) -> None:
        *rest, target, token, dead = line
        self._copies[id] = _Copy([id, target, *rest], target, token, dead)

    def _copy_changed(self, line: Line) -> Iterator[Line]:
        kind, id, *rest = line
        copy = self._copies[id]
        if kind == "out":
            del self._copies[id]
            if copy.decided:
                yield line
            return
        put = rest[0]
        if "q" in put:
            del self._copies[id]
            if copy.decided:
                yield line
                return
            self.wrong["settled_twice"].append(f"{id}: its copy is shown, and its pack has it, too")
            yield ["in", *copy.line]
        elif "with" in put or "target" in put or "dead" in put:
            if copy.decided:
                self.wrong["lost"].append(f"{id}: its copy was overwritten when it had left")
            copy.target = put.get("target", copy.target)
            copy.token = put.get("with", copy.token)
            copy.dead = put.get("dead", copy.dead)
