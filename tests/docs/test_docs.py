"""The documentation is true: its code runs, and its commands, links and cited tests exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pyqueue
from pyqueue import AsyncClient, Client, Limit, Queue
from pyqueue.backends import transitions
from pyqueue.backends.kind import known
from pyqueue.cli import app
from pyqueue.embedded import EmbeddedServer
from tests.docs.pages import ROOT, TESTING, Block, anchors, blocks, commands, links, pages, prose
from tests.support.pictures import MOST_BYTES, PICTURES

PAGES = pages()
#: A program whose arguments are paths of files. ``integration/test_demo.py`` runs it.
BY_HAND = {"docs/examples/data/README.md"}
#: The first `embedded:` of this page starts a real server. All other pages get a database of the
#: run's shared server, which is faster.
EMBEDDED = "README.md"
CODE = [
    page
    for page in PAGES
    if page not in {*BY_HAND, TESTING} and any(each.language == "python" for each in blocks(page))
]
#: The pages about Spark with code: each runs from an empty database, in the run's Spark session.
SPARK = [page for page in CODE if page.startswith("docs/how-to/spark")]

# ---- code


class Shared:
    """Stands in for an EmbeddedServer: an empty database of the run's server."""

    url = ""

    def __init__(self, path: str) -> None:
        assert path

    def close(self) -> None:
        pass


@pytest.fixture
def servers(
    request: pytest.FixtureRequest, url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The server of `embedded:` on a page; the pages about Spark get the run's Spark session."""
    page = request.node.callspec.params["page"]
    if page in SPARK:
        request.getfixturevalue("spark")
    real = [EmbeddedServer] if page == EMBEDDED else []

    def start(path: str) -> EmbeddedServer | Shared:
        return real.pop()(path) if real else Shared(path)

    monkeypatch.setattr(Shared, "url", url)
    monkeypatch.setattr("pyqueue.runtime.connecting.EmbeddedServer", start)
    if page != EMBEDDED:
        # The URL that the client shows would name the database "pyqueue", which is not this one.
        monkeypatch.setattr(Client, "url", property(lambda self: url))
    yield
    assert real == []


def outputs(code: str) -> list[str]:
    """The comments behind the prints of a block: the output that each print is to show."""
    lines = code.splitlines()
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    prints = [node for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    ends = sorted((node.end_lineno or 0, node.end_col_offset or 0) for node in prints)
    rests = [lines[line - 1].encode()[column:].decode() for line, column in ends]
    return [rest[len("  # ") :] for rest in rests if rest.startswith("  # ")]


def says(text: str, line: str) -> bool:
    """Whether a comment gives a printed line; one that ends in ... gives its beginning."""
    return line.startswith(text.removesuffix("...")) if text.endswith("...") else line == text


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.spark_long, pytest.mark.xdist_group("spark")])
        if page in SPARK
        else page
        for page in CODE
    ],
)
def test_code_runs_and_prints_its_comments(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {"__name__": "page"}
    try:
        for block in blocks(page):
            if block.language == "python":
                run(page, block, space)
                expected = outputs(block.text)
                lines = capsys.readouterr().out.splitlines()
                if expected:
                    assert len(lines) == len(expected), lines
                    assert [
                        line
                        for text, line in zip(expected, lines, strict=True)
                        if not says(text, line)
                    ] == []
    finally:
        for value in space.values():
            if isinstance(value, Client):
                value.close()


def run(page: str, block: Block, space: dict[str, Any]) -> None:
    # Empty lines before it, so that a traceback names the line of the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec"), space)


def test_code_about_spark_runs_in_the_shared_session() -> None:
    """Another session in the process would have the settings of the first one."""
    using = [page for page in CODE if any("pyqueue.spark" in each.text for each in blocks(page))]
    assert len(using) >= 7
    assert using == SPARK


def test_readme_examples_are_short() -> None:
    code = [each.text for each in blocks("README.md") if each.language == "python"]
    assert len(code) == 3
    for text in code:
        assert sum(bool(line.strip()) for line in text.splitlines()) <= 15


def test_readme_pictures_are_small_and_described() -> None:
    found = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert len(found) == 3
    for text, path in found:
        assert len(text) > 40, path
        assert 1000 < (ROOT / path).stat().st_size < MOST_BYTES, path
    assert {(ROOT / path) for _, path in found} == {*PICTURES.iterdir()}


# ---- commands


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def program() -> Any:
    """The commands of pyqueue."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page: str) -> None:
    for words in commands(page):
        match words:
            case ["make", *rest]:
                assert next(word for word in rest if "=" not in word) in targets(), words
            case ["pyqueue", command, *rest]:
                if command.startswith("-"):
                    continue
                assert command in program().commands, words
                found = program().commands[command]
                while hasattr(found, "commands"):
                    found = found.commands[rest.pop(0)]
                known = {option for each in found.params for option in each.opts}
                assert {word for word in rest if word.startswith("--")} <= known, words
            case ["python" | ".venv/bin/python", "-m", module, *_]:
                assert importlib.util.find_spec(module), words
            case ["pip" | ".venv/bin/pip", "install", *rest]:
                named = shlex.split(" ".join(rest))[-1]
                for extra in re.findall(r"\[(.*)\]", named):
                    assert all(
                        f"\n{each} = [" in (ROOT / "pyproject.toml").read_text()
                        for each in extra.split(",")
                    ), words


def test_commands_are_found() -> None:
    assert ["make", "demo"] in list(commands("README.md"))


def test_readme_tables_name_all_there_is() -> None:
    text = (ROOT / "README.md").read_text()
    kinds, after = text.split("| Kind |")[1].split("| Argument |")
    limits, after = after.split("The command `pyqueue` has ")
    commands = after.split(": see")[0]

    def firsts(table: str) -> list[str]:
        return [name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in names(row)]

    def names(text: str) -> list[str]:
        return re.findall(r"`([^`]+)`", text)

    ours = {name for name, kind in known().items() if type(kind).__module__.startswith("pyqueue.")}
    assert {*firsts(kinds)} == {*ours, "client.stream()"}
    assert {*firsts(limits)} == {each.name for each in fields(Limit)}
    assert {*names(commands)} == {*program().commands}


def test_bench_sections_exist() -> None:
    text = prose("docs/decisions/0002-coalescing-and-bounded-scans.md")
    named = re.findall(r"`--only (\w+)`", text)
    assert len(named) >= 5
    main = (ROOT / "tests/bench/__main__.py").read_text()
    sections = set(re.findall(r'^    "(\w+)": \w+(?:\.run)?,', main, re.M))
    assert set(named) <= sections
    for page in PAGES:
        for given in re.findall(r"--only ((?:\w+ ?)+)", (ROOT / page).read_text()):
            assert set(given.split()) <= sections, page


# ---- links


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.relative_to(ROOT).as_posix()), link


def test_index_links_every_page() -> None:
    reached = {
        ((ROOT / "docs") / link.partition("#")[0]).resolve() for link in links("docs/index.md")
    }
    missing = [
        page
        for page in PAGES
        if page not in BY_HAND | {"README.md", "docs/index.md"} and ROOT / page not in reached
    ]
    assert missing == []


# ---- cited tests


@cache
def defined_tests(path: Path) -> set[str]:
    """The tests in a file; those in classes are named Class::test."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}::{each.name}"
                for each in node.body
                if isinstance(each, ast.FunctionDef)
            }
    return names


def cited_tests(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`([\w/]+\.py)::([\w:]+)`", text)


@pytest.mark.parametrize("page", PAGES)
def test_cited_tests_exist(page: str) -> None:
    for path, name in cited_tests((ROOT / page).read_text()):
        assert (ROOT / "tests" / path).is_file(), path
        assert name.startswith("test_") or "::test_" in name, name
        assert name in defined_tests(ROOT / "tests" / path), f"{path}::{name}"


GUARANTEES = "docs/topics/guarantees.md"
#: The pages of promises. The page about things that are not promised has none.
PROMISES = [
    page
    for page in PAGES
    if page.startswith(GUARANTEES.removesuffix(".md")) and not page.endswith("-not-promised.md")
]


@pytest.mark.parametrize("page", PROMISES)
def test_promises_each_cite_a_test(page: str) -> None:
    sections = promises(page)
    assert sections
    assert [text.splitlines()[0] for text in sections if not cited_tests(text)] == []
    folded = [text.count("<details>") == text.count("</details>") == 1 for text in sections]
    assert all(folded)


def promises(page: str) -> list[str]:
    return re.split(r"^### ", prose(page), flags=re.MULTILINE)[1:]


def test_promises_are_all_there() -> None:
    titles = [text.splitlines()[0] for page in PROMISES for text in promises(page)]
    assert len(titles) >= 52
    assert len(set(titles)) == len(titles)


def test_guarantees_link_the_pages_of_promises() -> None:
    linked = {f"docs/topics/{link.partition('#')[0]}" for link in links(GUARANTEES)}
    rest = {*PROMISES, "docs/topics/guarantees-not-promised.md"} - {GUARANTEES}
    assert len(rest) >= 5
    assert rest - linked == set()


def test_figures_of_the_last_run_agree_on_all_pages() -> None:
    run = prose("docs/topics/fault-run.md")
    faults, messages = re.findall(
        r"\| faults; kinds \| (\d+);|\| messages; received; settled \| ([\d ]+);", run
    )
    text = f"{faults[0]} faults, {messages[1]} messages, none lost, none settled twice"
    assert text in prose("README.md")
    (seed,) = re.findall(r"--seed (\d+)", run)
    plot = (ROOT / "docs/topics/faults.svg").read_text()
    assert f">{faults[0]} faults, seed {seed}; messages per second" in plot
    assert "| lost; settled twice; effects by a fenced consumer; undone | 0; 0; 0; 0 |" in run


# ---- kinds of queue


def test_page_of_kinds_has_what_each_refuses() -> None:
    lines = prose("docs/topics/which-kind.md").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    refused = {cells[0].strip("`"): cells[4] for cells in rows}
    offered = {
        name: kind.capabilities
        for name, kind in known().items()
        if type(kind).__module__.startswith("pyqueue.")
    }
    assert {*refused} == {*offered, "client.stream()"}
    words = {"claim": "Queue.claim", "priority": "priority=", "group": "group="}
    every = frozenset[str]().union(*offered.values()) - {"packs"}
    for name, capabilities in offered.items():
        written = {each for each in every if f"`{words.get(each, each)}`" in refused[name]}
        assert written == every - capabilities, name


# ---- the reference


REFERENCE = "docs/reference.md"


def shown(name: str, function: Any) -> str:
    """Return a signature in the form of the reference: names and defaults."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    text = str(
        signature.replace(parameters=parameters[1:], return_annotation=inspect.Signature.empty)
    )
    return re.sub(r"Backoff\(.*?\)", "Backoff()", f"{name}{text}").replace("'", '"')


def public(cls: type) -> dict[str, Any]:
    """Return the public methods of a class, including inherited methods."""
    return {
        name: value
        for name, value in inspect.getmembers(cls)
        if not name.startswith("_") and callable(value)
    }


@pytest.mark.parametrize("name", pyqueue.__all__)
def test_reference_has_every_public_name(name: str) -> None:
    assert f"`{name}" in (ROOT / REFERENCE).read_text()


@pytest.mark.parametrize("cls", [Queue, Client])
def test_reference_has_every_method_with_its_signature(cls: type) -> None:
    text = " ".join((ROOT / REFERENCE).read_text().split())
    plumbing = {"run", "line", "backend"}
    for name, method in public(cls).items():
        if name not in plumbing:
            assert shown(name, method) in text


def test_reference_has_the_arguments_of_a_client() -> None:
    text = " ".join((ROOT / REFERENCE).read_text().split())
    assert shown("Client", pyqueue.Client.__init__) in text
    for name in ("database", "url", "stats"):
        assert isinstance(inspect.getattr_static(AsyncClient, name), property)
        assert f"`{name}`" in text


@pytest.mark.parametrize(
    "name", [name for name in pyqueue.__all__ if is_dataclass(getattr(pyqueue, name))]
)
def test_reference_has_every_field(name: str) -> None:
    text = (ROOT / REFERENCE).read_text()
    for each in fields(getattr(pyqueue, name)):
        assert re.search(rf"`{each.name}[`=]|[(, ]{each.name}[=,)]", text), each.name


# ---- stored fields, errors, docker compose


def test_states_page_has_every_stored_field(client: Client) -> None:
    """Compare the page with the fields that are stored over a message's life."""
    found = {*transitions.HELD_FIELDS, *transitions.STAY_FIELDS}
    queue = client.queue("a", int, history=60)
    other = client.queue("b", history=60)
    queue.push(1, key="k", headers={"a": 1})
    collection = client.database[client.namespace]

    def look() -> None:
        for document in collection.find({"record": {"$exists": False}}):
            found.update(document)

    look()
    held = queue.reserve(0)
    assert held is not None
    queue.progress(held, 0.5)
    queue.checkpoint(held, [1])
    look()
    queue.move(held, to=other)
    look()
    other.pop(0)
    look()
    client.queue("c").push(1)
    held = client.queue("c").reserve(0)
    assert held is not None
    client.queue("c").bury(held, error="bad")
    look()
    assert len(found) > 20
    text = prose("docs/topics/states.md")
    assert sorted(name for name in found if f"`{name}`" not in text) == []
    record = collection.find_one({"record": True})
    assert record is not None
    assert sorted(name for name in record if f"`{name}`" not in text) == []


def test_errors_page_has_every_error() -> None:
    text = prose("docs/topics/errors.md")
    for name in pyqueue.__all__:
        value = getattr(pyqueue, name)
        if isinstance(value, type) and issubclass(value, pyqueue.QueueError):
            assert f"`{name}`" in text, name


def test_compose_file_matches_its_page() -> None:
    compose = (ROOT / "docker-compose.yml").read_text()
    page = (ROOT / "docs/how-to/docker-compose.md").read_text()
    port, name = re.findall(r"mongodb://127\.0\.0\.1:(\d+)/\w*\?replicaSet=(\w+)", page)[0]
    assert f'"127.0.0.1:{port}:{port}"' in compose
    assert f'"--replSet", "{name}"' in compose
    assert f'host: "127.0.0.1:{port}"' in compose


# ---- the page on architecture

ARCHITECTURE = "docs/topics/architecture.md"


def test_architecture_names_every_module_and_package() -> None:
    text = (ROOT / ARCHITECTURE).read_text()
    found = [
        path.relative_to(ROOT / "pyqueue").as_posix()
        for folder in ("pyqueue", "pyqueue/backends")
        for path in (ROOT / folder).iterdir()
    ]
    modules = [each for each in found if each.endswith(".py") and "__init__" not in each]
    folders = [f"{each}/" for each in found if (ROOT / "pyqueue" / each / "__init__.py").exists()]
    expected = [*modules, *(each for each in folders if each != "backends/")]
    assert [name for name in expected if f"`{name}`" not in text] == []


def test_modules_named_by_architecture_exist() -> None:
    drawn = re.findall(
        r'class="module"[^>]*>([^<]*)<',
        (ROOT / ARCHITECTURE).with_suffix(".svg").read_text(),
    )
    named = {name for text in drawn for name in text.split()}
    assert {"transitions", "drivers", "spark/"} <= named
    written = set(re.findall(r"`([\w/]+\.py)`", prose(ARCHITECTURE)))
    folders = [
        ROOT,
        *(ROOT / "pyqueue" / name for name in ("", "backends", "runtime")),
        *(path.parent for path in (ROOT / "pyqueue/backends").glob("*/__init__.py")),
    ]
    for name in {*written, *(n if n.endswith("/") else f"{n}.py" for n in named)}:
        assert any((folder / name).exists() for folder in folders), name


def test_functions_named_by_architecture_exist() -> None:
    written = re.findall(r"`([a-z]\w+)\.(\w+)`", prose(ARCHITECTURE))
    named = [(module, name) for module, name in written if name != "py"]
    assert len(named) >= 10
    for module, name in named:
        places = (ROOT / "pyqueue/backends").rglob(f"{module}.py")
        parts = [path.relative_to(ROOT).with_suffix("").parts for path in places]
        found = [importlib.import_module(".".join(each)) for each in parts]
        assert any(hasattr(each, name) for each in found), f"{module}.{name}"


# ---- figures


def test_pages_with_a_speed_name_its_command() -> None:
    speed = re.compile(r"\d ?(?:x\b|/s\b|us\b|µs\b|msg/s)")
    without = [
        page
        for page in PAGES
        if speed.search(prose(page))
        and not re.search(r"`(make bench|make demo|python -m tests)", prose(page))
    ]
    assert without == []
