"""The effect of an answer on its message: the table of docs/how-to/pipelines.md."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import Backoff, BatchFailed, Drop, Many, Reject, RetryLater, To, Worker
from tests.docs.pages import ROOT
from tests.pipeline.place import Place, counted

#: The answers, by the first column of the table.
ANSWERS: dict[str, Any] = {
    "a value": 5,
    "None, or no `return`": None,
    '`To("late", payload)`': To("late", "new"),
    "`To` a queue that `to` does not list": To("elsewhere"),
    "`Many([To(...), ...])`": Many([To("late"), To("late")]),
    "`Drop()`": Drop(),
    '`Reject("why")`, raised or returned': Reject("why"),
    "`RetryLater(30)`, raised or returned": RetryLater(0),
    "any other exception, raised or returned": OSError("the disk is full"),
}


def table() -> dict[str, list[str]]:
    """Return the rows of the table, by the first column."""
    text = (ROOT / "docs/how-to/pipelines.md").read_text().partition("| Answer |")[2]
    rows = text.partition("\n\n")[0].splitlines()[2:]
    return {name: cells for name, *cells in (row.strip("| ").split(" | ") for row in rows)}


def answer(name: str, tries: int) -> Any:
    """Answer by the name of a message: the row, and whether to raise an exception."""
    row, _, how = name.partition(": ")
    found = Drop() if tries > 1 else ANSWERS[row]
    if how == "raised" and found is ANSWERS[row]:
        raise found
    return found


def answer_batch(names: list[str], deliveries: Any) -> list[Any]:
    """Answer a batch: returned values stand in a list, exceptions in BatchFailed."""
    answers, errors = [], {}
    for place, (name, each) in enumerate(zip(names, deliveries, strict=True)):
        try:
            answers.append(answer(name, each.message.tries))
        except Exception as error:
            errors[place] = error
            answers.append(None)
    if errors:
        raise BatchFailed(errors, answers)
    return answers


@pytest.mark.parametrize("batch", [None, 50])
@pytest.mark.parametrize("stage", ["link", "choice", "sink", "worker"])
def test_answers_do_as_the_table_says(place: Place, stage: str, batch: int | None) -> None:
    column = min(["link", "choice", "sink", "worker"].index(stage), 2)
    rows = table()
    assert list(rows) == list(ANSWERS)
    names = [
        f"{row}: {how}"
        for row, given in ANSWERS.items()
        for how in (["returned", "raised"] if isinstance(given, Exception) else ["returned"])
    ]
    ids = dict(zip(names, place.queue("in", history=60).push_many(names), strict=True))
    again: list[str] = []

    def one(name: str, delivery: Any) -> Any:
        again.extend([name] * (delivery.message.tries - 1))
        return answer(name, delivery.message.tries)

    def several(names: list[str], deliveries: Any) -> list[Any]:
        again.extend(n for n, d in zip(names, deliveries, strict=True) if d.message.tries > 1)
        return answer_batch(names, deliveries)

    def build(client: Any) -> Any:
        runner = Worker(client) if stage == "worker" else client.pipeline()
        add = getattr(runner, "on" if stage == "worker" else stage)
        handler = place.handler(one if batch is None else several)
        options = {"history": 60, "batch": batch, "backoff": Backoff(base=0)}
        return add("in", handler, to="late" if stage == "link" else ["late"], **options)

    counters = counted(place.run(build, until_empty=True), "in")
    late = {each.id: each.payload for each in place.queue("late").peek()}
    dead = place.ids("in.dead")
    committed = [each.id for each in place.queue("in").history()]

    def fate(name: str) -> str:
        found = {
            "moves on": ids[name] in late,
            "buried": ids[name] in dead,
            "tried again": name in again,
            "replaced": list(late.values()).count(name) == 2,
        }
        found["committed"] = ids[name] in committed and not any(found.values())
        [word] = [word for word, is_so in found.items() if is_so]
        return word

    assert {name: fate(name) for name in names} == {
        name: rows[name.partition(": ")[0]][column] for name in names
    }
    assert (counters["retried"], counters["dropped"]) == (4, 5)
