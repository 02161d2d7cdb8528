"""The checks of a stream: the records of every process, and the contents at the end.

An acknowledged append must be at its position, and positions have no gap. Each group finishes each
message once; a commit with an unknown outcome may have finished it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.windows import Wait


def _position(id: str) -> int:
    """Return the position of a message, from its id."""
    return int(id.rpartition("~")[2])


@dataclass
class StreamCalls:
    """The calls of a stream and its groups in the ledgers."""

    figures: Counter[str] = field(default_factory=Counter)
    #: The acknowledged appends: the position and the content.
    appended: list[tuple[int, str]] = field(default_factory=list)
    #: When each acknowledged commit ended, by group and position; and those that may be done.
    committed: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    unknown: set[tuple[str, int]] = field(default_factory=set)
    #: The acknowledged appends: when, and the last position.
    appends: list[tuple[float, int]] = field(default_factory=list)
    #: The receives of each group: when, and the last position.
    receives: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    #: When each receive that returned a message began.
    received: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, call: Any) -> None:
        """Learn from a call."""
        if call.op == "append":
            self.figures["pushed"] += len(call.items)
            if call.outcome == "ok":
                self.appended += zip(call.result, call.items, strict=True)
                self.appends.append((call.ended, max(call.result)))
        elif call.op == "reserve":
            for ids in call.result.values() if call.outcome == "ok" else ():
                self.figures["received"] += len(ids)
                self.figures["redelivered"] += sum(tries > 1 for tries in ids.values())
                last = max(map(_position, ids))
                self.receives[call.queue].append((call.ended, last))
                for id in ids:
                    self.received[call.queue, _position(id)].append(call.began)
        elif call.op == "commit":
            self._commit(call)

    def _commit(self, call: Any) -> None:
        lost, unknown = call.result if call.outcome == "refused" else ({}, {})
        for token, ids in call.items.items():
            for id in ids:
                place = call.queue, _position(id)
                if call.outcome not in ("ok", "refused") or id in unknown.get(token, ()):
                    self.unknown.add(place)
                elif id in lost.get(token, ()):
                    self.figures["refused"] += 1
                else:
                    self.committed[place].append(call.ended)

    def waits(self, groups: tuple[str, ...]) -> list[Wait]:
        """Return how long the messages of each append waited until a group received one so late.

        A group claims positions in their order, so then it had claimed all before.
        """
        found = []
        for group in groups:
            reached: list[tuple[float, int]] = []
            for at, last in sorted(self.receives[group]):
                if not reached or last > reached[-1][1]:
                    reached.append((at, last))
            for at, last in self.appends:
                place = bisect_left(reached, last, key=lambda pair: pair[1])
                if place < len(reached) and reached[place][0] > at:
                    until = reached[place][0]
                    found.append(Wait(f"position {last}", group, at, at, until))
        return found

    def check(self, contents: Mapping[int, str], groups: tuple[str, ...]) -> dict[str, list[str]]:
        """Return the mistakes, in words.

        Args:
            contents: The contents at the end, by position.
            groups: The consumer groups, which have finished everything.
        """
        wrong: dict[str, list[str]] = defaultdict(list)
        if sorted(contents) != list(range(len(contents))):
            wrong["lost"].append("the positions of the stream are not contiguous")
        wrong["lost"] += [
            f"position {position}: the append of {content} was acknowledged, but "
            f"{contents.get(position)} is stored there"
            for position, content in self.appended
            if contents.get(position) != content
        ]
        wrong["settled_twice"] += [
            f"{content}: stored at {times} positions"
            for content, times in Counter(contents.values()).items()
            if times > 1
        ]
        for group in groups:
            wrong["lost"] += [
                f"position {position}: {group} never finished it"
                for position in contents
                if not self.committed.get((group, position))
                and (group, position) not in self.unknown
            ]
        for (group, position), ended in self.committed.items():
            if len(ended) > 1:
                text = f"position {position}: finished {len(ended)} times by {group}"
                wrong["settled_twice"].append(text)
            elif any(began > ended[0] for began in self.received[group, position]):
                text = f"position {position}: received again by {group} after its commit"
                wrong["undone"].append(text)
        return wrong
