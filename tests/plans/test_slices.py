"""Dividing a queue among readers: nothing twice, nothing left out, and one walk over the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given, settings
from hypothesis import strategies as st

from pyqueue.backends import kind
from pyqueue.backends.bulk.partitions import Slice, page, slices
from pyqueue.requests import Command, Count, Find
from tests.plans.runner import NOW, Runner, after, message, record
from tests.plans.store import Store, World, place

STANDARD = kind.lookup("standard")

ids = st.one_of(
    st.text("~amz", min_size=1, max_size=3), st.binary(min_size=12, max_size=12).map(ObjectId)
)
#: Few instants, so that many messages share one; one of them is in the future.
messages = st.dictionaries(ids, st.sampled_from([-2.0, -1.0, 0.0, 1.0]), max_size=25)


def stored(seconds_of: dict[Any, float]) -> Store:
    """Return a store with the record of a queue and these messages."""
    store = World(0).store
    store.documents["~queue:a"] = record()
    store.documents |= {id: message(id, when=after(at)) for id, at in seconds_of.items()}
    return store


def running(store: Store, before: Callable[[int], object] = lambda number: None) -> Runner:
    """Return a runner of plans on a store. ``before`` gets the number of each command."""

    def carried(request: Command[Any]) -> Any:
        before(len(runner.commands))
        return store.answer(None, request)  # type: ignore[arg-type]  # no process asks

    runner = Runner()
    runner.answers = [carried] * 10_000
    return runner


def read(runner: Runner, parts: Sequence[Slice], limit: int) -> list[list[Any]]:
    """Return the ids in each slice, which is read page by page."""
    result = []
    for part in parts:
        seen: list[Any] = []
        while found := runner.run(page("a", STANDARD, part, limit)):
            assert len(found) <= limit
            seen += [each["_id"] for each in found]
            if len(found) < limit:
                break
            part = Slice(part.now, (found[-1]["when"], found[-1]["_id"]), part.upto)
        result.append(seen)
    return result


def in_order(store: Store) -> list[Any]:
    """Return the ids of ready messages, in scan order."""
    found = [
        each for each in store.documents.values() if each["when"] <= NOW and "record" not in each
    ]
    return [each["_id"] for each in sorted(found, key=place)]


@given(messages, st.integers(1, 9), st.sampled_from([1, 2, 5, 100]))
@settings(max_examples=100)
def test_slices_are_disjoint_complete_and_even(
    seconds_of: dict[Any, float], parts: int, limit: int
) -> None:
    store = stored(seconds_of)
    runner = running(store)
    found = runner.run(slices("a", STANDARD, parts))
    expected = in_order(store)
    assert len(found) == max(1, min(parts, len(expected)))
    seen = read(runner, found, limit)
    assert [each for part in seen for each in part] == expected
    sizes = [len(part) for part in seen]
    assert max(sizes) - min(sizes) <= 1


@given(messages, st.integers(2, 9), st.data())
@settings(max_examples=100)
def test_messages_that_come_and_go_spoil_no_slice(
    seconds_of: dict[Any, float], parts: int, data: st.DataObject
) -> None:
    """A message that stays ready is in exactly one slice, whatever happens between commands."""
    store = stored(seconds_of)
    moves = data.draw(st.lists(st.tuples(st.integers(1, 20), ids, st.booleans()), max_size=8))
    there = set(in_order(store))

    def meddle(number: int) -> None:
        for at, id, comes in moves:
            if at == number and comes and id not in there and id not in seconds_of:
                store.documents[id] = message(id)
            elif at == number and not comes and there:
                gone = min(there, key=str)
                there.discard(gone)
                del store.documents[gone]

    runner = running(store, meddle)
    found = runner.run(slices("a", STANDARD, parts))
    assert (found[0].above, found[-1].upto) == (None, None)
    assert [part.above for part in found[1:]] == [part.upto for part in found[:-1]]
    seen = [each for part in read(running(store), found, 3) for each in part]
    assert len(seen) == len(set(seen))
    assert there <= set(seen)


@pytest.mark.parametrize("instants", [1, 7, 240])
@pytest.mark.parametrize("text", [True, False])
def test_division_walks_over_the_index_once(instants: int, text: bool) -> None:
    """Not once for each part. Each read skips from the last bound; some are counted first."""
    count, parts = 240, 40
    store = stored(
        {
            f"m{number:03}" if text else ObjectId(): -float(number % instants)
            for number in range(count)
        }
    )
    runner = running(store)
    assert len(runner.run(slices("a", STANDARD, parts))) == parts
    walked = [
        request.skip + 1 if isinstance(request, Find) else request.cap or count
        for request in runner.commands
        if isinstance(request, (Find, Count))
    ]
    assert sum(walked) <= 6 * count
    assert len(walked) <= 6 * parts


def test_document_of_another_program_bounds_no_slice() -> None:
    """Its id may be of any type, and a range compares within one type."""
    store = stored({f"m{number}": -1.0 for number in range(2)})
    store.documents[5] = message(5, when=after(-2))
    runner = running(Numbered(store))
    found = runner.run(slices("a", STANDARD, 3))
    assert [part.upto for part in found] == [(after(-1), "m0"), None]


class Numbered(Store):
    """A store whose ids may be numbers, which precede all other ids."""

    def __init__(self, store: Store) -> None:
        super().__init__(World(0))
        self.documents = store.documents

    def _found(self, filter: Any, sort: Any, skip: int, limit: int) -> list[dict[str, Any]]:
        found = super()._found(filter, None, 0, 0)
        if sort is not None:
            found.sort(key=lambda each: (each["when"], isinstance(each["_id"], str), each["_id"]))
        return found[skip : skip + limit if limit else None]
