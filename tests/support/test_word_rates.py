"""The rates of words are counted, compared with the anchors and refused above their limits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support import word_rates
from tests.support.word_rates import Counts


def test_phrases_are_counted_in_prose_only(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""What goes on: that of the\nones, those\nof it."""\n\nwhat = 1  # so many\n')
    words, phrases = word_rates.count([tmp_path])
    assert +phrases == Counter({"what": 1, "go on": 1, "that of": 2, "ones": 1, "so many": 1})
    assert words.total() == 12


def test_anchors_hold_every_phrase() -> None:
    stored = word_rates.anchors()
    assert set(stored.phrases) == {phrase.name for phrase in word_rates.PHRASES}
    assert stored.words["the"] > 1_000
    assert 5 < stored.rate("what") < 7


def test_word_of_the_glossary_is_no_dialect() -> None:
    ours = Counts(Counter({"the": 30, "leases": 50, "lapsed": 50}), Counter())
    assert [*word_rates.dialect(ours)] == ["lapsed"]


def test_limits_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("It says what it lapses.\n")
    monkeypatch.setattr(word_rates, "AREAS", {"docs": (tmp_path,)})
    monkeypatch.setattr(word_rates, "TODAY", {})
    monkeypatch.setattr(word_rates, "DIALECT_TODAY", 10_000)
    monkeypatch.setattr(word_rates, "MOST_TIMES", 1_000)
    assert word_rates.check() == []
    monkeypatch.setattr(word_rates, "MOST_TIMES", 0)
    monkeypatch.setattr(word_rates, "DIALECT_TODAY", 0)
    *phrases, words = word_rates.check()
    assert any(each.startswith("docs: 'what' occurs") for each in phrases)
    assert words.startswith("words that plain texts use less often are")


def test_counts_of_anchors_are_stored(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("A page, a page and what it has. Once.\n")
    assert word_rates.store([tmp_path])["words"] == ["a 2", "page 2"]
    assert word_rates.store([tmp_path])["total"] == 9
