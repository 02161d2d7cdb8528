"""Packs in the change log: its lines, with one line for each message of a pack.

A claim of a pack claims each message that it still has. A message whose bit is set has left the
pack. If the same update lists its copy, the message lives on in the copy, hidden until it is shown.
Else the message is finished. Copies that leave together may be one document, which is a pack then.

The lines have names in place of ids; see ``names``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyqueue.backends.bucket import packs
from pyqueue.backends.transitions import HIDDEN, hidden_queue
from tests.chaos.names import RESULTS, name_in, name_of

Line = list[Any]


@dataclass(slots=True)
class _Pack:
    """A stored pack: its queue, its messages, and the bits of those that left it."""

    queue: str
    names: Sequence[str]
    words: list[int]

    @property
    def alive(self) -> int:
        return packs.alive_of({"b": self.names, "done": self.words})

    @property
    def left(self) -> list[str]:
        """The messages that it still has."""
        return [self.names[place] for place in packs.places(self.alive)]


@dataclass(slots=True)
class _Copy:
    """A hidden copy: the lines of its messages, the queue that they enter, and their claim."""

    lines: dict[str, Line]
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
        #: The stored results. Each may have the id of a message.
        self._results: set[str] = set()
        #: The mistakes of packs, in words, by the figure that counts them.
        self.wrong: dict[str, list[str]] = defaultdict(list)

    def __iter__(self) -> Iterator[Line]:
        """Yield the lines. ``wrong`` is complete after the last one."""
        for line in self._lines:
            kind, id, *rest = line
            if kind == "pack":
                yield from self._stored(id, *rest)
            elif kind == "copy":
                self._hidden(id, *rest)
            elif id in self._copies:
                yield from self._copy_changed(line)
            elif id in self._packs:
                yield from self._changed(id, *rest) if kind == "set" else self._deleted(id, *rest)
            else:
                yield self._named(line)
        for id, copy in self._copies.items():
            if copy.decided:
                self.wrong["lost"].append(f"{id}: it left its pack, and was never shown")

    def _named(self, line: Line) -> Line:
        """Return the line of an ordinary message with its name."""
        kind, id, *rest = line
        if kind == "in" and rest[0] == RESULTS:
            self._results.add(id)
        if id not in self._results:
            return [kind, name_of(id), *rest]
        if kind == "out":
            self._results.discard(id)
        return [kind, name_in(RESULTS, id), *rest]

    def _stored(
        self, id: str, queue: str, contents: list[str], pushed: int, at: float, when: float
    ) -> Iterator[Line]:
        names = [f"{id}:{place}" for place in range(len(contents))]
        self._packs[id] = _Pack(queue, names, [0] * len(contents))
        for name, content in zip(names, contents, strict=True):
            yield ["in", name, queue, content, pushed, at, when]

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
        gone = {pack.names[place] for place in packs.places(before & ~pack.alive)}
        for token, ids in put.get("handed", ()):
            for each in sorted(ids):
                yield from self._handed_over(each, gone, pack.queue, token, at)
        for each in sorted(gone):
            yield ["out", each, at]
        rest = {name: put[name] for name in put if name not in ("left", "done", "handed")}
        pack.queue = put.get("q", pack.queue)
        for each in pack.left if rest else ():
            yield ["set", each, rest, at]

    def _handed_over(
        self, id: str, gone: set[str], queue: str, token: str, at: float
    ) -> Iterator[Line]:
        """Yield how the claims of messages end that live on in a copy."""
        copy, hidden = self._copies.get(id), {"q": hidden_queue(queue)}
        left = gone.intersection(copy.lines if copy else [name_of(id)])
        gone -= left
        put: dict[str, Any] = {"token": None, "by": token}
        if copy is None or copy.token != token:
            if left:
                self.wrong["lost"].append(f"{id}: it left its pack by {token} without a copy")
        elif left:
            copy.decided = True
            if copy.target == queue:  # back in its queue
                for each in sorted(left):
                    yield ["set", each, put, at]
                put = {}
            elif copy.dead:
                put |= {"dead": True}
        for each in sorted(left):
            yield ["set", each, put | hidden, at]

    def _deleted(self, id: str, at: float) -> Iterator[Line]:
        for each in self._packs.pop(id).left:
            yield ["out", each, at]

    # ---- copies

    def _hidden(self, id: str, _: str, contents: Mapping[str, Any], *line: Any) -> None:
        *times, target, token, dead = line
        lines = {name: ["in", name, target, content, *times] for name, content in contents.items()}
        self._copies[id] = _Copy(lines, target, token, dead)

    def _copy_changed(self, line: Line) -> Iterator[Line]:
        kind, id, *rest = line
        copy = self._copies[id]
        if kind == "out":
            del self._copies[id]
            if copy.decided:
                yield from ([kind, name, *rest] for name in copy.lines)
            return
        put = rest[0]
        if "q" in put and not put["q"].startswith(HIDDEN):
            del self._copies[id]
            if copy.decided:
                yield from ([kind, name, *rest] for name in copy.lines)
            else:  # a cancelled pop may have given its message back in place of the copy
                stored = {name for pack in self._packs.values() for name in pack.left}
                if stored.intersection(copy.lines):
                    self.wrong["settled_twice"].append(
                        f"{id}: its copy is shown, and its pack has it, too"
                    )
                yield from copy.lines.values()
            if "/" in id:
                self._packs[id] = _Pack(put["q"], list(copy.lines), [0] * len(copy.lines))
        elif "with" in put or "target" in put or "dead" in put:
            if copy.decided:
                self.wrong["lost"].append(f"{id}: its copy was overwritten when it had left")
            copy.target = put.get("target", copy.target)
            copy.token = put.get("with", copy.token)
            copy.dead = put.get("dead", copy.dead)
