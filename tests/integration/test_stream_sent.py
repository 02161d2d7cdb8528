"""The commands of each operation of a stream: the level of reads, the durability of writes.

A fail-over may undo a write that a majority has not stored. So the log is read and written at
majority, whatever the durability of the client is; only claims wait for the primary alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.test_sent import FAST, RATE, READS, SAFE, WRITES, concern, opened, seen

Call = Callable[[Any, Any, Any], object]

#: The operations, and the durability of their writes with durability="majority".
CASES: dict[str, tuple[Call, set[str]]] = {
    "append": (lambda log, group, held: log.append(1), {SAFE}),
    "append_many": (lambda log, group, held: log.append_many([1, 2]), {SAFE}),
    "read": (lambda log, group, held: log.read(), set()),
    "trim": (lambda log, group, held: log.trim(before=2), {SAFE}),
    "consumers": (lambda log, group, held: log.consumers(), set()),
    "delete_consumer": (lambda log, group, held: log.delete_consumer("g"), {SAFE}),
    "reserve": (lambda log, group, held: group.reserve(0), {FAST}),
    "reserve at a rate": (lambda log, group, held: group.reserve(0), {FAST, SAFE}),
    "reserve_many": (lambda log, group, held: group.reserve_many(2, timeout=0), {FAST}),
    "commit": (lambda log, group, held: group.commit(*held), {SAFE}),
    "rollback": (lambda log, group, held: group.rollback(*held), {SAFE}),
    "release": (lambda log, group, held: group.release(*held), {SAFE}),
    "extend": (lambda log, group, held: group.extend(*held), {SAFE}),
    "bury": (lambda log, group, held: group.bury(*held), {SAFE}),
    "counts": (lambda log, group, held: group.counts(), set()),
    "pause": (lambda log, group, held: group.pause(), {SAFE}),
    "resume": (lambda log, group, held: group.resume(), {SAFE}),
    "paused": (lambda log, group, held: group.paused(), set()),
    "seek": (lambda log, group, held: group.seek("first"), {SAFE}),
}


@pytest.mark.parametrize(
    ("driver", "durability"),
    [
        ("blocking", "majority"),
        ("blocking", "acknowledged"),
        *(
            pytest.param(driver, "majority", marks=pytest.mark.slow)
            for driver in ("async", "motor")
        ),
    ],
)
def test_streams_read_and_write_the_log_at_majority(driver: str, durability: str, url: str) -> None:
    wrong = []
    with opened(driver, url, durability) as place:
        for number, (name, (call, expected)) in enumerate(CASES.items()):
            limit = RATE if name == "reserve at a rate" else {}
            log = place.client.stream(f"log{number}", **limit)
            for payload in range(3):
                log.append(payload)
            group = log.consumer("g")
            held = group.reserve_many(2, timeout=0)
            group.reserve(0)
            group.release(*held[1:])
            place.recorder.commands.clear()
            with place.recorder.recording():
                call(log, group, held[:1])
            commands = list(place.recorder.commands)
            writes = {concern(each) for each in commands if each["name"] in WRITES}
            if durability == "majority" and not writes <= expected:
                wrong.append(f"{name}: {writes}")
            for each in commands:
                # Without the session and the cluster time, which name nothing.
                about = str({key: value for key, value in each.items() if key[0] != "$"})
                durable = "~log:" in about or "~limit:" in about
                if not durable and each["name"] != "insert":
                    continue
                if each["name"] in READS and seen(each) != "majority":
                    wrong.append(f"{name}: reads {seen(each)}")
                if each["name"] in WRITES and durable and concern(each) != SAFE:
                    wrong.append(f"{name}: writes {concern(each)}")
            assert commands, name
    assert not wrong, "\n".join(wrong)
