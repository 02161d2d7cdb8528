"""The docstring of the data source and the reference have each option."""

from __future__ import annotations

import inspect
import re

import pytest

from pyqueue.spark import QueueDataSource, defaults
from pyqueue.spark.option_table import REFUSED, TABLE, Option, Way
from tests.docs.pages import prose

#: How the pages call the uses of an option.
TITLES = {
    Way.ALL: "all uses",
    Way.QUEUES: "queues",
    Way.READS: "reads",
    Way.READ: "batch reads of a queue",
    Way.READ_STREAM: "streaming reads of a queue",
    Way.STREAM_READS: "streaming reads",
    Way.BY_POSITION: "reads of a stream",
    Way.READ_BY_POSITION: "batch reads of a stream",
    Way.READ_STREAM_BY_POSITION: "streaming reads of a stream",
    Way.WRITES: "writes",
    Way.WRITE: "batch writes",
    Way.WRITE_STREAM: "streaming writes",
}


def of_docstring() -> list[tuple[str, str, str]]:
    """Return the names, the uses and the text of each entry."""
    found = []
    for title, block in re.findall(
        r"^Options for ([^:\n]+):\n(.*?)\n\n", inspect.getdoc(QueueDataSource) or "", re.M | re.S
    ):
        for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", block, re.M):
            found.append((names, title, text))
    return found


def of_reference() -> list[tuple[str, str, str]]:
    _, after = prose("docs/reference.md").split('Options for `format("pyqueue")`:')
    table = after.split("\n\n")[1]
    rows = [line.strip("| ").split(" | ", 2) for line in table.splitlines()[2:]]
    return [(names.replace("`", ""), uses, text) for names, uses, text in rows]


def default_in(text: str, option: Option) -> bool:
    words = re.findall(r"[\w-]+", re.sub(r"(?<=\d) (?=\d{3})", "", text))
    return option.default is None or option.default in words


@pytest.mark.parametrize("entries", [of_docstring(), of_reference()], ids=["docstring", "page"])
def test_documentation_has_each_option_with_its_uses_and_default(
    entries: list[tuple[str, str, str]],
) -> None:
    found = [(name, uses, text) for names, uses, text in entries for name in names.split(", ")]
    assert sorted((name, uses) for name, uses, _ in found) == sorted(
        (each.name, TITLES[each.ways]) for each in TABLE
    )
    texts = {name: text for name, _, text in found}
    assert [each.name for each in TABLE if not default_in(texts[each.name], each)] == []


def test_every_name_is_in_the_table() -> None:
    names = {each.name for each in TABLE}
    assert {name for refused, _, _ in REFUSED for name in refused.split(", ")} <= names
    assert set(defaults._OPTIONS) <= names
