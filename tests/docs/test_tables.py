"""What the pages list or deny agrees with the code, and a comparison carries its date.

``test_docs.py`` compares the tables of the README and the page of kinds.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, date, datetime
from functools import cache
from typing import Any

import pytest
import typer.main

import pyqueue
from pyqueue import Backoff, Client, Consumer, Limit, Stream
from pyqueue.backends.kind import Kind, known
from pyqueue.cli import app
from pyqueue.cli.doctor import OLDEST_VERSION
from pyqueue.messages import HIGHEST_PRIORITY, QueueOptions
from pyqueue.payloads import LIMIT
from pyqueue.pipeline import StageOptions
from tests.docs.pages import ROOT, commands, links, pages, prose

KINDS = "docs/topics/which-kind.md"
MIGRATE = "docs/how-to/migrate.md"
RECIPES = "docs/how-to/recipes.md"
#: The pages that say what pyqueue has.
SHOP_WINDOW = ("README.md", "docs/index.md", "docs/quickstart.md", MIGRATE, RECIPES)
LIMIT_ARGUMENTS = {each.name for each in fields(Limit)}


def joined(page: str) -> str:
    """Return the prose of a page on one line."""
    return " ".join(prose(page).split())


# ---- commands


def subcommands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command below a group of commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from subcommands(command, (*path, name))
        else:
            yield (*path, name)


def test_command_line_page_shows_every_command() -> None:
    shown = [words[1:] for words in commands("docs/how-to/cli.md") if words[0] == "pyqueue"]
    every = list(subcommands(typer.main.get_command(app)))
    assert len(every) >= 20
    assert [each for each in every if list(each) not in (w[: len(each)] for w in shown)] == []


# ---- kinds and limits


@cache
def kinds() -> dict[str, Kind]:
    return {
        name: kind for name, kind in known().items() if type(kind).__module__.startswith("pyqueue.")
    }


def test_readme_counts_the_kinds_and_the_stream() -> None:
    (number,) = re.findall(r"^## (\w+) kinds of queue", prose("README.md"), re.MULTILINE)
    assert ("Four", "Five", "Six", "Seven").index(number) + 4 == len(kinds()) + 1


@pytest.mark.parametrize("page", ["docs/how-to/limits.md", "docs/how-to/rates.md"])
def test_pages_of_limits_name_every_argument(page: str) -> None:
    text = (ROOT / page).read_text()
    named = {name for name in LIMIT_ARGUMENTS if re.search(rf"\b{name}=|`{name}`", text)}
    assert named == LIMIT_ARGUMENTS


def test_arguments_of_limits_exist_on_every_page() -> None:
    calls = [
        (page, arguments)
        for page in pages()
        for arguments in re.findall(r"\bLimit\(([^)]*)\)", (ROOT / page).read_text())
    ]
    assert len(calls) >= 10
    for page, arguments in calls:
        assert set(re.findall(r"(\w+)=", arguments)) <= LIMIT_ARGUMENTS, page


def test_page_of_kinds_says_which_limits_each_takes() -> None:
    rows = re.findall(r"^\| .* \| \[?`Limit\((.*?)\)`.* \| (.*) \|$", prose(KINDS), re.MULTILINE)
    assert len(rows) == 4
    for arguments, cell in rows:
        needed = {"concurrency", "rate", "per"} & set(re.findall(r"(\w+)=", arguments))
        takers = {name for name, kind in kinds().items() if needed <= kind.capabilities}
        written = {*kinds()} if cell.startswith("all") else {*cell.split(", ")}
        assert written == takers, arguments


# ---- names


@cache
def public_names() -> frozenset[str]:
    """Return the public names, the methods of the public classes, and all their parameters."""
    names = {*pyqueue.__all__, *StageOptions.__annotations__, *QueueOptions.__annotations__}
    for name in pyqueue.__all__:
        value = getattr(pyqueue, name)
        if isinstance(value, type):
            for member, found in inspect.getmembers(value):
                if member == "__init__" or not member.startswith("_"):
                    names.add(member)
                    if inspect.isfunction(found):
                        names |= {*inspect.signature(found).parameters}
    return frozenset(names)


def inline_code(page: str) -> list[str]:
    """Return the inline code of a page that is about pyqueue, without its commands."""
    lines = prose(page).splitlines()
    if page in (MIGRATE, RECIPES):  # the first cell of a row is the other product's
        lines = [line.partition(" | ")[2] if line.startswith("| ") else line for line in lines]
    code = re.findall(r"`([^`\n]+)`", "\n".join(lines))
    return [each for each in code if not re.match(r"(make|pyqueue|celery) ", each)]


@pytest.mark.parametrize("page", SHOP_WINDOW)
def test_names_that_a_page_advertises_exist(page: str) -> None:
    for code in inline_code(page):
        named = re.findall(r"\b(?:client|queue|pipeline|worker|delivery)\.([a-z]\w*)", code)
        named += re.findall(r"\b([a-z]\w*)=", code)
        assert {*named} <= public_names(), code


#: A page, what it denies in its own words, and the names that would contradict it.
DENIED = [
    ("README.md", "Routing by topics or patterns", {"topic", "pattern", "routing_key", "exchange"}),
]


@pytest.mark.parametrize(("page", "sentence", "names"), DENIED, ids=[each[1] for each in DENIED])
def test_features_that_a_page_denies_are_missing(page: str, sentence: str, names: set[str]) -> None:
    assert sentence in joined(page)
    assert names & public_names() == set()


def test_stream_lacks_the_arguments_that_its_page_denies() -> None:
    denied = {"key", "delay", "priority", "group", "session"}
    text = joined("docs/how-to/streams.md")
    assert "`key`, `delay`, `priority` and `group` do not exist on `append`, and `session` " in text
    for name in ("append", "append_many"):
        assert denied & set(inspect.signature(getattr(Stream, name)).parameters) == set()
    (row,) = re.findall(r"^\| `client\.stream\(\)` .*$", prose(KINDS), re.MULTILINE)
    assert "key, id, delay, priority, group and session of a message; `pop`, `move`, history" in row
    for cls in (Stream, Consumer):
        assert [name for name in ("pop", "move", "history") if hasattr(cls, name)] == []


def test_last_try_comes_when_the_checklist_says() -> None:
    assert "the last try comes about eight hours after the first" in joined(
        "docs/how-to/production.md"
    )
    assert inspect.signature(Client.queue).parameters["max_tries"].default == 20
    assert round(sum(Backoff(jitter=0).delay(n) for n in range(1, 20)) / 3600) == 8


# ---- requirements


def test_requirements_of_the_readme_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    text = joined("README.md")
    (python,) = re.findall(r"Python (\d+\.\d+) or later", text)
    assert project["requires-python"] == f">={python}"
    (mongodb,) = re.findall(r"MongoDB (\d+\.\d+) or later", text)
    assert mongodb == ".".join(map(str, OLDEST_VERSION))
    (spark,) = re.findall(r"PySpark (\d+\.\d+) or later", text)
    assert f"pyspark>={spark}" in extras["spark"]
    assert "(Linux on x86-64)" in text
    (embedded,) = extras["embedded"]
    assert "sys_platform == 'linux' and platform_machine == 'x86_64'" in embedded


def test_sizes_of_the_readme_are_those_of_the_code() -> None:
    text = joined("README.md")
    assert f"from 0 to {HIGHEST_PRIORITY}; higher ones come first" in text
    (megabytes, kilobytes) = re.findall(r"over (\d+) MB \(less (\d+) KB\)", text)[0]
    assert int(megabytes) * 2**20 - int(kilobytes) * 2**10 == LIMIT


# ---- comparisons

#: A page with one of these names is a dated comparison, or links one.
PRODUCTS = re.compile(
    r"\b(Celery|kombu|Keuss|Kafka|JetStream|NATS|Redis streams|RabbitMQ|SQS|Azure|BullMQ|River|Oban"
    r"|Solid Queue|Sidekiq|procrastinate|PgQueuer|SAQ|Redpanda|Temporal)\b",
    re.IGNORECASE,
)
COMPARISON = "docs/topics/comparison.md"
DATED = {COMPARISON, MIGRATE, RECIPES}
#: The changelog names the products that a release was compared with.
HISTORY = {"docs/changelog.md"}
MAX_AGE_DAYS = 366


@pytest.mark.parametrize("page", sorted(DATED))
def test_comparison_is_younger_than_a_year(page: str) -> None:
    (day,) = re.findall(r"As of (\d{4}-\d\d-\d\d)", prose(page))
    age = datetime.now(UTC).date() - date.fromisoformat(day)
    assert age.days <= MAX_AGE_DAYS, f"{page}: check the comparison against new versions"


def test_pages_that_name_other_products_link_a_comparison() -> None:
    naming = [each for each in pages() if PRODUCTS.search(joined(each))]
    assert set(naming) >= DATED
    for page in set(naming) - DATED - HISTORY:
        linked = {((ROOT / page).parent / link.partition("#")[0]).resolve() for link in links(page)}
        assert linked & {ROOT / each for each in DATED}, page


def test_comparison_gives_the_version_of_each_product() -> None:
    text = joined(COMPARISON)
    versions, _, rest = text.partition("## Speed")
    speed, _, rest = rest.partition("<!-- bench")
    named = {each.lower() for each in PRODUCTS.findall(rest)}
    assert named <= {each.lower() for each in PRODUCTS.findall(versions + speed)}
