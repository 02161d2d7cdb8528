"""The invalid fields of stored documents are found by a remembered layout, too."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pyqueue import documents
from pyqueue.documents import MAX_LAYOUTS, invalid_fields
from tests.plans.runner import message


@pytest.fixture(autouse=True)
def no_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "_layouts", {})


@pytest.mark.parametrize(
    ("field", "valid", "wrong"),
    [
        ("tries", 1.0, math.nan),
        ("deliveries", 3, 1 << 60),
        ("headers", {"a": 1}, {"a": []}),
        ("trail", [], [{"q": 5}]),
        ("attempts", [{}], [1]),
        ("dead", {"from": "a", "at": message("m")["when"]}, {"from": "a"}),
    ],
)
def test_values_are_checked_for_each_document(field: str, valid: Any, wrong: Any) -> None:
    for _ in range(2):
        assert invalid_fields(message("m", **{field: valid})) == []
        assert invalid_fields(message("m", **{field: wrong})) == [field]


def test_every_wrong_field_is_named_each_time() -> None:
    for _ in range(2):
        document = message("m", q=5, tries=math.nan, headers=None, other=object())
        assert invalid_fields(document) == ["q", "headers", "tries"]


def test_few_layouts_are_remembered() -> None:
    for number in range(2 * MAX_LAYOUTS):
        assert invalid_fields(message("m", **{f"field{number}": 1})) == []
        assert invalid_fields(message("m", **{f"field{number}": 1}, tries="1")) == ["tries"]
    assert len(documents._layouts) == MAX_LAYOUTS


@pytest.mark.parametrize("names", [["x" * 2000], [f"field{number}" for number in range(500)]])
def test_large_layouts_are_not_remembered(names: list[str]) -> None:
    assert invalid_fields(message("m", **dict.fromkeys(names, 1))) == []
    assert documents._layouts == {}
