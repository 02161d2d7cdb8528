"""Browsing: the pages of a queue have each message once, in order, and examine no more than asked.

The contract suite browses the queues of all kinds, and servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
from bson import ObjectId
from hypothesis import given
from hypothesis import strategies as st

from pyqueue import Message, Page
from pyqueue.backends import browsing
from pyqueue.backends.browsing import BrowseOptions
from pyqueue.backends.queue_plans import QueuePlans
from pyqueue.messages import KEPT
from pyqueue.requests import Find
from pyqueue.where import ge
from tests.plans.runner import NOW, after, message, record, standard
from tests.plans.steps import WRITES, Steps
from tests.plans.test_packs import plans as bucket

#: The default arguments of ``Queue.browse``.
ALL = BrowseOptions(state=None, where=None, after=None, limit=100, newest=False, budget=5000)

#: By the state that a message shows: the fields of messages that have it.
STATES: dict[str, list[dict[str, Any]]] = {
    "ready": [{"when": after(0)}, {"when": after(-1), "due": after(-1)}, {"token": "lapsed"}],
    "scheduled": [{"when": after(1), "due": after(1)}, {"when": after(2), "due": after(2)}],
    "reserved": [
        {"when": after(1), "token": "t"},
        {"when": after(2), "token": "t", "dead": {"from": "b", "at": NOW}},
    ],
    "dead": [
        {"when": after(-1), "dead": {"from": "b", "at": NOW}},
        {"when": after(2), "dead": {"from": "b", "at": NOW}},
    ],
    "finished": [
        {"when": NOW + KEPT, "processed": NOW, "outcome": "committed", "token": "t"},
        {"when": after(-1) + KEPT, "processed": after(-1), "outcome": "popped"},
    ],
}
forms = [(state, fields) for state, some in STATES.items() for fields in some]
ids = st.sampled_from(["a", "b", "c/1", "d", *(ObjectId(f"{n:024x}") for n in range(8))])
queues = st.dictionaries(ids, st.sampled_from(forms), max_size=12)
options = st.fixed_dictionaries(
    {
        "state": st.sampled_from([None, *STATES]),
        "where": st.sampled_from([None, {"payload": ge(3)}]),
        "limit": st.sampled_from([1, 2, 5, 100]),
        "newest": st.booleans(),
        "budget": st.sampled_from([1, 3, 100]),
    }
)


def page_of(
    steps: Steps, plans: QueuePlans, given: Mapping[str, Any], place: str | None = None
) -> Page[Any]:
    """Return one page."""
    merged: Any = {**ALL, "after": place, **given}
    return steps.run(browsing.browse(plans.terms, browsing.checked(**merged)))


def all_pages(steps: Steps, plans: QueuePlans, **given: Any) -> list[Message[Any]]:
    """Return the messages of all pages, after comparing each page with its limits."""
    found: list[Message[Any]] = []
    place: str | None = None
    for _ in range(100):
        page = page_of(steps, plans, given, place)
        assert len(page.messages) <= given["limit"]
        assert page.looked <= given["budget"]
        found += page.messages
        if page.complete:
            return found
        place = page.after
    raise AssertionError("it never ends")


def place_of(document: Mapping[str, Any]) -> tuple[Any, bool, Any]:
    """Return the place of a message in the order of the index: a str precedes an ObjectId."""
    return document["when"], isinstance(document["_id"], ObjectId), document["_id"]


@given(stored=queues, chosen=options)
def test_pages_have_each_message_once_in_order(
    stored: dict[Any, tuple[str, dict[str, Any]]], chosen: dict[str, Any]
) -> None:
    documents = [
        message(id, **fields, payload=n) for n, (id, (_, fields)) in enumerate(stored.items())
    ]
    expected = [
        (each["_id"], stored[each["_id"]][0])
        for each in sorted(documents, key=place_of, reverse=chosen["newest"])
        if chosen["state"] in (None, stored[each["_id"]][0])
        and (chosen["where"] is None or each["payload"] >= 3)
    ]
    steps = Steps([record(), *documents])
    found = all_pages(steps, standard(), **chosen)
    assert [(each.id, each.state) for each in found] == expected


@cache
def packed() -> list[Any]:
    """Return three packs, of which messages have left, and two ordinary messages."""
    steps, plans = Steps(), bucket()
    pushed = steps.run(plans.push(range(10)))
    for some in ([10], range(11, 16), [16]):
        steps.seconds += 1
        pushed += steps.run(plans.push(some))
    for id in (pushed[0], pushed[7], pushed[15]):
        assert id is not None
        assert steps.run(plans.remove(id))
    return steps.all()


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("budget", [1, 4, 100])
def test_pages_of_a_bucket_end_within_packs(budget: int, limit: int, newest: bool) -> None:
    steps = Steps(packed())
    steps.seconds += 10
    expected = [n for n in range(17) if n not in (0, 7, 15)]
    paging: Any = {"newest": newest, "limit": limit, "budget": budget}
    found = [each.payload for each in all_pages(steps, bucket(), **paging)]
    assert found == (expected[::-1] if newest else expected)
    some = [each.payload for each in all_pages(steps, bucket(), where={"payload": ge(9)}, **paging)]
    assert some == [n for n in (expected[::-1] if newest else expected) if n >= 9]


def test_page_examines_no_more_than_its_budget() -> None:
    steps = Steps([message(f"{n:02}", payload=n) for n in range(30)])
    where = {"payload": ge(25)}
    page = page_of(steps, standard(), {"where": where, "budget": 10})
    assert (page.messages, page.looked, page.complete) == ([], 10, False)
    page = page_of(steps, standard(), {"where": where, "budget": 20}, page.after)
    assert [each.payload for each in page.messages] == [25, 26, 27, 28, 29]
    assert (page.looked, page.complete, page.after) == (20, True, None)
    page = page_of(steps, standard(), {"limit": 30})
    assert (len(page.messages), page.looked, page.complete) == (30, 30, True)


def test_page_reads_only_the_documents_that_it_examines() -> None:
    steps = Steps([message(f"{n:03}") for n in range(300)])
    page = page_of(steps, standard(), {"limit": 10})
    _, places, documents = steps.commands  # the record comes first
    assert isinstance(places, Find)
    assert isinstance(documents, Find)
    assert (places.limit, len(documents.filter["_id"]["$in"])) == (11, 10)
    assert not any(isinstance(each, WRITES) for each in steps.commands)
    assert (page.looked, page.complete) == (10, False)


def test_page_follows_messages_that_move_on() -> None:
    """A cursor keeps its place, although its message is gone and time makes messages ready."""
    documents = [message(f"{n}", when=after(n), due=after(n)) for n in range(6)]
    steps = Steps(documents)
    steps.seconds = 3
    page = page_of(steps, standard(), {"state": "scheduled", "limit": 1})
    assert [each.id for each in page.messages] == ["4"]
    steps.collection.delete_one({"_id": "4"})
    steps.seconds = 5
    page = page_of(steps, standard(), {"state": "scheduled"}, page.after)
    assert page.messages == []
    page = page_of(steps, standard(), {"state": "ready", "newest": True, "limit": 2})
    assert [each.id for each in page.messages] == ["5", "3"]


def test_documents_that_no_cursor_can_name_are_left_out() -> None:
    odd: list[Any] = [*range(9), *(bytes([n]) for n in range(9))]
    documents = [message(id, when=after(when)) for when, id in enumerate(odd, start=-18)]
    documents += [message(id) for id in (*range(20, 29), b"x", "0", "1", ObjectId())]
    steps = Steps([*documents, message("never", when="never")])
    for newest in (False, True):
        found = all_pages(steps, standard(), limit=1, budget=100, newest=newest)
        assert len(found) == 3
        assert {each.id for each in found} == {each["_id"] for each in documents[-3:]}


def test_document_that_just_left_the_queue_is_passed() -> None:
    steps = Steps([message(f"{n}") for n in range(3)])
    terms = standard().terms
    running = steps.steps(browsing.browse(terms, browsing.checked(**ALL)))
    for _ in range(3):  # it has read the record and the places
        next(running)
    steps.collection.update_one({"_id": "1"}, {"$set": {"q": "b"}})
    with pytest.raises(StopIteration) as end:
        next(running)
    page = end.value.value
    assert ([each.id for each in page.messages], page.looked) == (["0", "2"], 3)


def test_deferred_message_says_why_it_waits() -> None:
    later: dict[str, Any] = {"when": after(60)}
    steps = Steps(
        [
            message("0", **later, group="abc:g"),
            message("1", **later, limited="=t"),
            message("2", **later, due=after(60), group="abc:g"),
            message("3", **later, token="t", limited="=t"),
            message("4", group="abc:g"),
        ]
    )
    found = page_of(steps, standard(), {}).messages
    states = {each.id: (each.state, each.deferred) for each in found}
    assert states == {
        "0": ("scheduled", "group"),
        "1": ("scheduled", "limit"),
        "2": ("scheduled", None),
        "3": ("reserved", None),
        "4": ("ready", None),
    }
