"""Check the language of the repository: `python -m tests.support.language [--report] [PATH ...]`.

The check reads comments, docstrings, the texts of errors and of log calls, the names of tests, and
the prose of Markdown pages. Code is not read: neither fenced blocks nor anything in backticks.

A rule without a limit refuses every hit. A rule with a limit counts its hits in the repository:
more than the limit is an error. Lower a limit whenever the count has fallen.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: What the check reads if no path is given.
WHOLE = (
    "README.md",
    "docs",
    "pyqueue",
    "signals",
    "tests",
    ".github",
    "Makefile",
    "pyproject.toml",
    "docker-compose.yml",
    ".ci/run",
)
MAX_TEST_NAME = 60


class Rule(NamedTuple):
    """A pattern to avoid, and what to write in its place."""

    name: str
    pattern: str
    remedy: str
    #: None: every hit is refused. Else the number of hits that the repository may have.
    limit: int | None = None
    #: The kinds of text that the rule is about; empty: all of them.
    kinds: frozenset[str] = frozenset()


RULES = (
    Rule("lest", r"\blest\b", "write 'so that ... not'"),
    Rule("whoever", r"\bwhoever\b", "name the subject: the consumer, the caller, the holder"),
    Rule("is told", r"\bis\s+told\b", "say what happens: 'raises LeaseLost', 'receives a signal'"),
    Rule("be mended", r"\bbe\s+mended\b", "write 'be fixed' or 'be repaired'"),
    Rule("Answers", r"\A\s*Answers\b", "begin with 'Return'", kinds=frozenset({"docstring"})),
    Rule(
        "is no X",
        r"(?<!there )\bis no (?!longer\b|more\b)\w+",
        "write \"invalid queue name 'x'; use ...\"",
        kinds=frozenset({"error"}),
    ),
    Rule("others", r"\bothers\b", "name them: other consumers, the other messages", limit=1),
    Rule("nobody", r"\bnobody\b", "write 'no consumer', 'no process', or rephrase", limit=1),
    Rule("of its own", r"\bof\s+its\s+own\b", "write 'its own X', or 'separate'", limit=2),
    Rule("as it is", r"\bas\s+it\s+is\b", "write 'unchanged'", limit=3),
)  # fmt: skip


class Text(NamedTuple):
    """A piece of text that people read: a comment, docstring, error, log or prose."""

    kind: str
    line: int
    text: str


class Hit(NamedTuple):
    """A place where a rule's pattern matches."""

    path: Path
    line: int
    rule: Rule
    text: str


# ---- what is read


def without_code(text: str) -> str:
    """Blank out what stands in backticks, and keep the line breaks."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", _blank, text, flags=re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match[0])


def prose(page: str) -> Iterator[Text]:
    """Read a Markdown page without its fenced blocks."""
    bare = re.sub(r"^ *```.*?^ *```$", _blank, page, flags=re.MULTILINE | re.DOTALL)
    yield Text("prose", 1, without_code(bare))


def comments(source: str) -> Iterator[Text]:
    """Read the comments of a Python file; those on lines that follow each other are one text."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield Text("comment", last - len(block) + 1, without_code("\n".join(block)))
            block = []
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    if block:
        yield Text("comment", last - len(block) + 1, without_code("\n".join(block)))


def hash_comments(source: str) -> Iterator[Text]:
    """Read the comments of a file in which `#` begins one: a Makefile, TOML, YAML, a script."""
    for number, line in enumerate(source.splitlines(), 1):
        _, mark, comment = line.partition("#")
        if mark:
            yield Text("comment", number, without_code(comment))


def docstrings(tree: ast.AST) -> Iterator[Text]:
    """Read the docstrings of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield Text("docstring", node.body[0].lineno, without_code(text))


def messages(tree: ast.AST) -> Iterator[Text]:
    """Read the texts of errors, raised or made to be raised, and those of log calls."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _called(node.func)
        if name in RAISED or re.search(r"(Error|Exception|Warning)$", name):
            kind = "error"
        elif name in LOGGED and re.search(r"log", ast.unparse(node.func).rpartition(".")[0]):
            kind = "log"
        else:
            continue
        for argument in (*node.args, *(each.value for each in node.keywords)):
            for text in _strings(argument):
                yield Text(kind, argument.lineno, text)


#: Errors of pyqueue whose names do not end in Error.
RAISED = {"Disconnected", "DuplicateKey", "Fenced", "InvalidMessage", "InvalidName", "LeaseLost",
          "QueueClosed", "TimedOut", "Unavailable", "Reject", "RetryLater"}  # fmt: skip
LOGGED = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _called(function: ast.expr) -> str:
    """Return the last name of what is called."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _strings(node: ast.expr) -> Iterator[str]:
    """Read the strings of an expression; a value inside an f-string becomes `{}`."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(
            str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
        )
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    elif not isinstance(node, ast.Call):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _strings(child)


def texts(path: Path) -> Iterator[Text]:
    """Read every text of a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from prose(source)
    elif path.suffix == ".py":
        tree = ast.parse(source)
        yield from comments(source)
        yield from docstrings(tree)
        yield from messages(tree)
    else:
        yield from hash_comments(source)


# ---- what is found


def matches(text: Text, rules: Iterable[Rule] = RULES) -> Iterator[tuple[Rule, int]]:
    """Find the rules that a text breaks, each with the line."""
    for rule in rules:
        if not rule.kinds or text.kind in rule.kinds:
            for match in re.finditer(rule.pattern, text.text, re.IGNORECASE):
                yield rule, text.line + text.text.count("\n", 0, match.start())


def hits(path: Path) -> Iterator[Hit]:
    """Find the places of a file that break a rule."""
    for text in texts(path):
        for rule, line in matches(text):
            yield Hit(path, line, rule, text.text)


def long_test_names(path: Path) -> Iterator[tuple[int, str]]:
    """Find the tests of a file whose names are too long, each with its line."""
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name.startswith("test_")
                and len(node.name) > MAX_TEST_NAME
            ):
                yield node.lineno, node.name


def files(paths: Iterable[Path]) -> Iterator[Path]:
    """List the files below some paths that the check can read."""
    for path in paths:
        if path.is_dir():
            yield from sorted(
                each for each in path.rglob("*") if each.suffix in (".py", ".md", ".yml")
            )
        elif path.exists():
            yield path


# ---- what is printed


def shown(path: Path) -> str:
    """Return a path as people type it, from the root of the repository if it is there."""
    path = path.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()


def check(paths: list[Path]) -> list[str]:
    """Return what is wrong: each refused place, and each count above its limit."""
    wrong, counts, places = [], Counter[str](), dict[str, list[str]]()
    for path in files(paths):
        for hit in hits(path):
            place = f"{shown(path)}:{hit.line}"
            if hit.rule.limit is None:
                wrong.append(f"{place}: '{hit.rule.name}': {hit.rule.remedy}")
            counts[hit.rule.name] += 1
            places.setdefault(hit.rule.name, []).append(place)
        for line, name in long_test_names(path):
            wrong.append(
                f"{shown(path)}:{line}: {name} has {len(name)} characters: name the subject and "
                f"the behaviour in at most {MAX_TEST_NAME}, and tell the story in the body"
            )
    return wrong + [
        f"'{rule.name}' occurs {counts[rule.name]} times, and may occur {rule.limit} times: "
        f"{rule.remedy}; it is at {', '.join(places[rule.name])}"
        for rule in RULES
        if rule.limit is not None and counts[rule.name] > rule.limit
    ]


def report(paths: list[Path]) -> str:
    """Return a table: for each file the hits of each rule, then sums and hits in 10 000 lines."""
    names = [rule.name for rule in RULES]
    found: dict[str, Counter[str]] = {}
    lines = 0
    for path in files(paths):
        lines += path.read_text(encoding="utf-8").count("\n")
        counter = Counter(hit.rule.name for hit in hits(path))
        counter["test name"] = sum(1 for _ in long_test_names(path))
        if counter.total():
            found[shown(path)] = counter
    total = sum(found.values(), Counter[str]())
    names = [*names, "test name"]
    rows = [["file", *names]]
    rows += [[name, *(str(count[each] or "") for each in names)] for name, count in found.items()]
    rows.append(["sum", *(str(total[each]) for each in names)])
    rate = 10_000 / (lines or 1)
    rows.append([f"in 10 000 of {lines} lines", *(f"{total[each] * rate:.2f}" for each in names)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def main(arguments: list[str] | None = None) -> int:
    """Print what is wrong, or the counts of each file; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.support.language")
    parser.add_argument("--report", action="store_true", help="print counts per file; exit 0")
    parser.add_argument("paths", nargs="*", type=Path, help="default: the whole repository")
    options = parser.parse_args(arguments)
    paths = options.paths or [ROOT / each for each in WHOLE]
    if options.report:
        print(report(paths))
        return 0
    wrong = check(paths)
    print("\n".join(wrong) or "the language is plain")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
