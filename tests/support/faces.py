"""Write the async classes from the blocking classes: `python -m tests.support.faces [--check]`.

A call that reaches the server is awaited, and a function with such a call is async. A name that has
a twin becomes the twin's name, in code and within double backticks. PHRASES is for the rest.
Comments stay. Ruff orders the imports and breaks lines of code; a line of a docstring needs room
for the longer name.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pyqueue"
MODULES = ("client", "scheduling", "queues", "manageable", "readable", "selections", "streams")
HEADER = "# Generated from {0}.py by `make faces`. Edit {0}.py, and run `make faces`.\n"

#: The calls that reach the server.
CALLS = re.compile(
    r"self\.(_runner|_connection|_telemetry)\.(run|run_transaction|enter|close)"
    r"|self\.(reserve|close)|call\.(join|complete)"
)
NAMES = {
    **{name: f"Async{name}" for name in ("Bus", "Claim", "Client", "Connection", "Consumer")},
    **{name: f"Async{name}" for name in ("Each", "Iterator", "PlanRunner", "Queue", "Stream")},
    "Scheduling": "AsyncScheduling",
    **{name: f"Async{name}" for name in ("Manageable", "Readable", "Selectable", "Selection")},
    **{name: f"{name}_async" for name in ("claimed", "gathered", "holding", "renewing")},
    "AbstractContextManager": "AbstractAsyncContextManager",
    "contextmanager": "asynccontextmanager",
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
}
PHRASES = {
    "A context manager": "An async context manager",
    "Any number of threads of the process that made it may use it.": (
        "It belongs to the event loop in which it is first used."
    ),
    "Call ``fn(session)``": "Await ``fn(session)``",
    "Callable[[Any], R]": "Callable[[Any], Awaitable[R]]",
    "``fn`` is async": "``fn`` is not async",
    "a ``with`` block": "an ``async with`` block",
    "a database of pymongo or mongomock": "a database of AsyncMongoClient or motor",
    "a thread of the client's renewer": "the event loop",
    "for blocking code": "for async code",
    "from pyqueue.manageable": "from pyqueue.async_manageable",
    "from pyqueue.queues": "from pyqueue.async_queues",
    "from pyqueue.readable": "from pyqueue.async_readable",
    "from pyqueue.scheduling": "from pyqueue.async_scheduling",
    "from pyqueue.selections": "from pyqueue.async_selections",
    "from pyqueue.streams": "from pyqueue.async_streams",
    "import Callable": "import Awaitable, Callable",
    "import Pipeline, Report": "import AwaitedReport, Pipeline",
    "Pipeline[Report]": "Pipeline[AwaitedReport]",
    "this process only": "this process only, run inline",
}


def reaches_server(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether a node is a call that the async class awaits."""
    return isinstance(node, ast.Call) and CALLS.fullmatch(ast.unparse(node.func)) is not None


def is_overload(function: ast.FunctionDef) -> bool:
    """Return whether a function is one of the signatures of an overloaded function."""
    return "overload" in map(ast.unparse, function.decorator_list)


def renamed(token: tokenize.TokenInfo) -> str:
    """Return the text of a token with the names of the twins."""
    if token.type in (tokenize.STRING, tokenize.COMMENT):
        return re.sub(r"(?<=``)\w+", lambda name: NAMES.get(name[0], name[0]), token.string)
    return NAMES.get(token.string, token.string)


def converted(source: str) -> str:
    """Return the async form of a blocking module, before ruff formats it."""
    before: dict[tuple[int, int], str] = {}
    nodes = [*ast.walk(ast.parse(source))]
    functions = [each for each in nodes if isinstance(each, ast.FunctionDef)]
    awaited = [each for each in functions if any(map(reaches_server, ast.walk(each)))]
    names = {each.name for each in awaited}
    awaited += [each for each in functions if is_overload(each) and each.name in names]
    for node in nodes:
        if reaches_server(node):
            before[node.lineno, node.col_offset] = "await "
        elif isinstance(node, ast.With) or node in awaited:
            before[node.lineno, node.col_offset] = "async "
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    written, end = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = lines[token.start[0] - 1] + token.start[1]
        written += [source[end:start], before.pop(token.start, ""), renamed(token)]
        end = start + len(token.string)
    assert not before, "write ASCII before a call or a def"  # ast counts bytes, tokenize characters
    text = "".join(written)
    for phrase, other in PHRASES.items():
        text = text.replace(phrase, other)
    return text


def ruff(*arguments: str, text: str) -> str:
    """Return a text after a command of ruff."""
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename=pyqueue/x.py", "-"]
    return subprocess.run(
        command, cwd=ROOT, input=text, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def main(arguments: list[str] | None = None) -> int:
    """Write the async modules, or name those that differ; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.support.faces")
    parser.add_argument("--check", action="store_true", help="write nothing; a difference fails")
    check = parser.parse_args(arguments).check
    sources = {name: (FOLDER / f"{name}.py").read_text(encoding="utf-8") for name in MODULES}
    wrong = [
        f"tests/support/faces.py: {phrase!r} is in no blocking module: change or remove it"
        for phrase in PHRASES
        if not any(phrase in source for source in sources.values())
    ]
    for name, source in sources.items():
        path = FOLDER / f"async_{name}.py"
        text = ruff("check", "--select=I", "--fix-only", "--quiet", text=converted(source))
        text = ruff("format", text=HEADER.format(name) + text)
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            wrong.append(f"pyqueue/{path.name} differs: edit pyqueue/{name}.py, run `make faces`")
    print("\n".join(wrong) or "the async classes equal the blocking ones")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
