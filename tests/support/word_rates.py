"""Compare how often words occur here and in four projects whose language is plain: the anchors.

`anchors.json` has the counts of the anchors, read by the same functions. To write it again, run
`python -m tests.support.word_rates --store DIRECTORY ...` with a checkout of each project.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.support.language import ROOT, files, texts

STORED: Final = Path(__file__).with_name("anchors.json")
GLOSSARY: Final = ROOT / "docs" / "glossary.md"
#: The parts of the repository that are counted apart.
AREAS: Final = {
    "product": ("pyqueue", "signals"),
    "docs": ("README.md", "docs"),
    "tests": ("tests",),
}
WORD: Final = re.compile(r"[a-z]+(?:'[a-z]+)?")
#: The target of a link.
LINK: Final = re.compile(r"\]\([^)]*\)")
#: Proper names are no dialect.
NAMES: Final = {"spark", "spark's", "mongodb", "redis", "pyqueue", "bson", "pymongo", "mongod"}
#: A rate is the number of occurrences in this many words.
PER: Final = 10_000
#: How many times as often as in the anchors a phrase may occur.
MOST_TIMES: Final = 3
#: A word that occurs this many times as often as in the anchors belongs into the glossary.
DIALECT_TIMES: Final = 5
#: A word that the anchors use less often counts as if they used it so often.
LEAST_COUNT: Final = 3


class Phrase(NamedTuple):
    """A phrase that plain texts use less often, and what to write in its place."""

    name: str
    pattern: str
    remedy: str


PHRASES: Final = (
    Phrase("what", r"\bwhat\b", "name the thing: 'the messages that', 'the fields that'"),
    Phrase(
        "noun look", r"\b(?:a|the|each|every|one|its|first|next) look\b", "write 'scan', 'read'"
    ),
    Phrase("that of", r"\bth(?:at|ose)\s+of\b", "repeat the noun"),
    Phrase("ones", r"\bones\b", "repeat the noun"),
    Phrase("meanwhile", r"\bmeanwhile\b", "write 'since then', or name the event"),
    Phrase("so many", r"\b(?:so|as)\s+many\b", "write the number, or 'the same number of'"),
    Phrase("go on", r"\bgo(?:es)?\s+on\b", "write 'continue'"),
)
#: Rates above the limit, by area and phrase. They may only fall.
TODAY: Final[Mapping[tuple[str, str], float]] = {
    ("product", "go on"): 0.5,
    ("docs", "so many"): 1.8,
}
#: The share of words that only this project uses so often, in 10 000. It may only fall.
DIALECT_TODAY: Final = 570.0


class Counts(NamedTuple):
    """How often words and phrases occur in some texts."""

    words: Counter[str]
    phrases: Counter[str]

    def rate(self, phrase: str) -> float:
        """Return how often a phrase occurs in ``PER`` words."""
        return self.phrases[phrase] * PER / (self.words.total() or 1)


def count(paths: Iterable[Path]) -> Counts:
    """Count the words and the phrases of files and folders."""
    words, phrases = Counter[str](), Counter[str]()
    for path in files(paths):
        if path.suffix in (".py", ".md"):
            for each in texts(path):
                text = LINK.sub("]", each.text).lower()
                words.update(WORD.findall(text))
                for phrase in PHRASES:
                    phrases[phrase.name] += len(re.findall(phrase.pattern, text))
    return Counts(words, phrases)


@cache
def anchors() -> Counts:
    """Return the stored counts of the anchors."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    words = Counter[str]()
    for line in stored["words"]:
        items = line.split()
        words.update(dict(zip(items[::2], map(int, items[1::2]), strict=True)))
    words["(rare)"] = stored["total"] - words.total()
    return Counts(words, Counter(stored["phrases"]))


def terms() -> set[str]:
    """Return the words of the terms of the glossary, with their common endings."""
    rows = re.findall(r"^\| ([^|]+) \|", GLOSSARY.read_text(encoding="utf-8"), re.M)
    words = {word for term in rows for word in WORD.findall(term.lower())}
    return words | {form for word in words for form in _forms(word)}


def _forms(word: str) -> Iterable[str]:
    stem = word.removesuffix("e")
    doubled = word + word[-1]
    plural = word.removesuffix("y") + "ies" if word.endswith("y") else word + "s"
    yield from (plural, f"{word}es", f"{word}'s", f"{stem}ed", f"{stem}ing", f"{stem}er")
    yield from (f"{stem}ers", f"{doubled}ed", f"{doubled}ing", f"{word.removesuffix('y')}ied")


def dialect(ours: Counts) -> dict[str, float]:
    """Return the words outside the glossary that the anchors use far less often.

    Returns:
        For each word how much its rate is above the limit.
    """
    theirs, known = anchors().words, terms() | NAMES
    found = {}
    for word, number in ours.words.items():
        limit = DIALECT_TIMES * max(theirs[word], LEAST_COUNT) * PER / theirs.total()
        excess = number * PER / ours.words.total() - limit
        if excess > 0 and word not in known:
            found[word] = excess
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def check() -> list[str]:
    """Return the phrases and words that occur too often, each with its rate and limit."""
    wrong = []
    whole = Counts(Counter(), Counter())
    for area, names in AREAS.items():
        ours = count(ROOT / name for name in names)
        whole.words.update(ours.words)
        for phrase in PHRASES:
            rate = ours.rate(phrase.name)
            limit = TODAY.get((area, phrase.name), MOST_TIMES * anchors().rate(phrase.name))
            if rate > limit:
                text = f"{area}: '{phrase.name}' occurs {rate:.1f} times in {PER} words"
                wrong.append(f"{text}, and may occur {limit:.1f} times: {phrase.remedy}")
    own = dialect(whole)
    if sum(own.values()) > DIALECT_TODAY:
        text = f"words that plain texts use less often are {sum(own.values()):.0f} in {PER}"
        first = ", ".join([*own][:20])
        wrong.append(f"{text}, and may be {DIALECT_TODAY:.0f}; the first are {first}")
    return wrong


def store(checkouts: list[Path]) -> dict[str, Any]:
    """Return the content of `anchors.json`. Words that occur once are only in the total."""
    words, phrases = count(checkouts)
    lines: dict[str, list[str]] = {}
    for word, number in sorted(words.items()):
        if number > 1:
            lines.setdefault(word[0], []).append(f"{word} {number}")
    return {
        "projects": sorted(path.name for path in checkouts),
        "total": words.total(),
        "phrases": dict(phrases),
        "words": [" ".join(line) for line in lines.values()],
    }


def main(arguments: list[str] | None = None) -> int:
    """Print what occurs too often, or store the counts of the anchors; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.support.word_rates")
    parser.add_argument("--store", nargs="+", type=Path, metavar="DIRECTORY", help="the anchors")
    options = parser.parse_args(arguments)
    if options.store:
        stored = json.dumps(store(options.store), indent=1)
        STORED.write_text(stored + "\n", encoding="utf-8")
        return 0
    wrong = check()
    print("\n".join(wrong) or "the words are plain")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
