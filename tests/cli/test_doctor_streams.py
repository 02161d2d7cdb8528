"""``pyqueue doctor`` on streams: it names damage done by hand, with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import Client
from pyqueue.cli import doctor

#: The ids of the packs that ``filled`` makes.
FIRST, SECOND, THIRD = (f"~log:clicks~{position:016d}" for position in (0, 3, 5))


@pytest.fixture
def filled(client: Client) -> Client:
    """A client with a stream of three packs, a group in its middle, and a queue."""
    log = client.stream("clicks")
    for number in (3, 2, 4):
        log.append_many(range(number))
    group = log.consumer("audit")
    group.rollback(*group.reserve_many(4, timeout=0)[1:], delay=60)
    client.queue("jobs").push(1)
    client.stream("clicks:more").append(1)
    return client


def change(id: str, update: dict[str, Any]) -> Callable[[Any], object]:
    return lambda collection: collection.update_one({"_id": id}, {"$set": update})


def delete(id: str) -> Callable[[Any], object]:
    return lambda collection: collection.delete_one({"_id": id})


def insert(**document: Any) -> Callable[[Any], object]:
    return lambda collection: collection.insert_one(document)


DAMAGES: list[tuple[Callable[[Any], object], str]] = [
    (delete(SECOND), "positions 3 to 4 are missing: restore"),
    (change(SECOND, {"n": 1}), f"the pack '{SECOND}' was changed"),
    (change(SECOND, {"b": 1}), f"the pack '{SECOND}' was changed"),
    (change(FIRST, {"n": 4, "b": [{}] * 4}), "positions 3 to 3 are there twice"),
    (change(THIRD, {"s": "5"}), f"'{THIRD}' is not a pack: delete it"),
    (insert(_id="~log:clicks~x", q="~log:clicks"), "'~log:clicks~x' is not a pack"),
    (change("~group:clicks~audit", {"next": 10}), "'audit' is at 10, and the stream ends at 9"),
    (change("~group:clicks~audit", {"next": 2}), "'audit' is at 2 and holds messages beyond it"),
    (change("~group:clicks~audit", {"next": None}), "'audit' has no position: run `pyqueue stream"),
    (insert(_id="m", q="clicks", when=None), "messages of a queue under its name: m; no consumer"),
    (delete("~queue:clicks"), "it has packs and no record"),
    (change("~queue:clicks", {"kind": "standard"}), "the record of a 'standard' queue"),
]


def test_doctor_finds_healthy_streams_healthy(filled: Client) -> None:
    """Also after old packs were deleted, if a stream was deleted, and if it is used again."""
    finding = doctor.check_streams(filled)
    assert (finding.level, finding.text) == ("ok", "2 checked, the newest packs of each")
    collection = filled.database["pyqueue"]
    delete(FIRST)(collection)
    change("~queue:clicks", {"first": 3})(collection)
    filled.delete_queue("clicks:more", force=True)
    finding = doctor.check_streams(filled)
    assert (finding.level, finding.text) == ("ok", "1 checked, the newest packs of each")
    filled.stream("clicks:more").append(2)
    finding = doctor.check_streams(filled)
    assert (finding.level, finding.text) == ("ok", "2 checked, the newest packs of each")


@pytest.mark.parametrize(("damage", "text"), DAMAGES, ids=[text for _, text in DAMAGES])
def test_doctor_names_damage_of_streams(
    filled: Client, damage: Callable[[Any], object], text: str
) -> None:
    damage(filled.database["pyqueue"])
    finding = doctor.check_streams(filled)
    assert finding.level == "wrong"
    assert finding.text.startswith("stream 'clicks': ")
    assert text in finding.text


def test_doctor_says_little_of_much_damage(filled: Client) -> None:
    collection = filled.database["pyqueue"]
    collection.insert_many([{"_id": f"~log:clicks~x{n}"} for n in range(9)])
    assert doctor.check_streams(filled).text.endswith("; and 4 more")
