"""Reading the pages of the documentation: their code, commands, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: The page whose code is a program and its tests. ``test_testing.py`` runs them.
TESTING = "docs/how-to/testing.md"


class Block(NamedTuple):
    """A fenced block."""

    language: str
    #: The number of its first line in the page.
    line: int
    text: str


def pages() -> list[str]:
    """Return the paths of all pages, from the root of the repository."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = (ROOT / page).read_text()
    return [
        Block(match[1], text.count("\n", 0, match.start()) + 2, match[2])
        for match in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def links(page: str) -> list[str]:
    """Return the targets of a page's links, except those on the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    return [target for target in found if not target.startswith(("http://", "https://"))]


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as code hosts build them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def commands(page: str) -> Iterator[list[str]]:
    """Split the command lines of a page into words.

    They stand in console blocks, or in inline code that begins like a command.
    """
    for block in blocks(page):
        if block.language in ("console", "sh"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = line.partition("#")[0].removeprefix("$ ").split()
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    del words[0]
                if words:
                    yield words
    for code in re.findall(r"`((?:make|pyqueue|python -m) [^`\n]+)`", prose(page)):
        yield code.split()
