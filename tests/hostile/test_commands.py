"""The command line with any arguments and input.

It exits with 0, 1 or 2. Complaints take one line, and there is never a traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pyqueue import Client
from pyqueue.cli import app

fixed = [HealthCheck.function_scoped_fixture]
bounded = settings(max_examples=12, suppress_health_check=fixed)
long = settings(max_examples=1500, derandomize=False, suppress_health_check=fixed)

#: Arguments a shell can pass: no NUL. Bytes that are not UTF-8 arrive as surrogates.
WORDS = st.sampled_from(
    [
        *("", "-", "--", "a", "a.dead", "no name", "~queue:a", "0" * 24, "\udcff", "é", "x" * 600),
        *("1e400", "nan", "-1", "9" * 30, "9" * 5000, "[" * 3000, '{"$gt": ""}', '{"a": 1}'),
        *('{"$date": "x"}', '{"$oid": 5}', '{"$uuid": "z"}', '{"$numberDecimal": "x"}'),
        '{"$binary": 5}',
        *('{"$numberLong": "9"}', '{"$regex": 5}', '{"a\\u0000": 1}', '"\\ud800"'),
    ]
) | st.text(st.characters(exclude_characters="\0"), max_size=8)
OPTIONS = [
    *("--delay", "--key", "--on-duplicate", "--header", "--id", "--limit", "--timeout"),
    *("--namespace", "--signals", "--file", "--ndjson", "--text", "--json", "--yes", "--quiet"),
    *("--unknown", "-x"),
]
COMMANDS = [
    *("push", "pop", "peek", "move", "redrive", "purge", "pause", "resume", "trace", "ls"),
    "nothing",
]


@pytest.fixture
def shell(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Client]]:
    monkeypatch.chdir(tmp_path)
    with Client(url) as client:
        client.queue("bystander").push_many([1, {"a": 1}], keys=["k", None])
        yield url, client


def call(shell: tuple[str, Client], arguments: list[str], given: str) -> None:
    data = given.encode("utf-8", "surrogateescape")
    url, client = shell
    collection = client.database["pyqueue"]
    before = list(collection.find({"q": "bystander"}).sort("_id", 1))
    runner = CliRunner(env={"PYQUEUE_URL": url, "PYQUEUE_SIGNALS": "none:"})
    result = runner.invoke(app, arguments, input=data)
    assert result.exception is None or isinstance(result.exception, SystemExit), arguments
    assert result.exit_code in (0, 1, 2), arguments
    assert "Traceback" not in result.stdout + result.stderr
    if result.stderr.startswith("pyqueue: "):
        assert result.stderr.count("\n") <= 2, result.stderr
    assert list(collection.find({"q": "bystander"}).sort("_id", 1)) == before


def arguments() -> st.SearchStrategy[list[str]]:
    option = st.tuples(st.sampled_from(OPTIONS), WORDS) | st.tuples(WORDS)
    options = st.lists(option, max_size=3)
    return st.builds(
        lambda command, words, more: [command, *words, *(word for each in more for word in each)],
        st.sampled_from(COMMANDS),
        st.lists(WORDS, max_size=2),
        options,
    )


def waits(words: list[str]) -> bool:
    """Return whether the command would wait for long."""
    return "--timeout" in words


@bounded
@given(arguments(), WORDS)
@example(["push", "a", "--text", "\udcff"], "")
@example(["push", "a", "1", "--key", "\udcff"], "")
@example(["push", "a", "1", "--header", "\udcff=\udcff"], "")
@example(["trace", "\udcff"], "")
@example(["pop", "a", "--timeout", "1e400"], "")
@example(["pop", "a", "--timeout", "nan"], "")
@example(["peek", "a", "--limit", "9" * 30], "")
@example(["ls", "--namespace", "a..b"], "")
@example(["ls", "--namespace", "a."], "")
def test_commands_survive_any_arguments(
    shell: tuple[str, Client], words: list[str], given: str
) -> None:
    if not waits(words) or words[-1] in ("1e400", "nan"):
        call(shell, words, given)


@pytest.mark.slow
@long
@given(arguments(), WORDS)
def test_commands_survive_any_arguments_at_length(
    shell: tuple[str, Client], words: list[str], given: str
) -> None:
    if not waits(words):
        call(shell, words, given)


@settings(bounded, max_examples=8)
@given(
    st.lists(WORDS, max_size=5).map("\n".join),
    st.sampled_from([["--ndjson"], ["--ndjson", "--text"], [], ["--text"]]),
)
def test_push_survives_any_input(shell: tuple[str, Client], given: str, options: list[str]) -> None:
    call(shell, ["push", "a", *options], given)


APPS = [
    *(".x:y", "..:x", ":", "a:", ":b", "a..b:c", "os:path.", "os:.path", "x y:z", "os:path:join"),
    *("é:é", "\udcff:x", "json:dumps", "1:2"),
]


def test_worker_refuses_an_invalid_app() -> None:
    for name in APPS:
        result = CliRunner().invoke(app, ["worker", name])
        assert (result.exit_code, result.stdout) == (2, ""), name
        assert result.stderr.startswith("pyqueue: APP: ")


@pytest.mark.parametrize("command", ["run", "show"])
def test_pipeline_command_survives_any_recipe(
    shell: tuple[str, Client],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setenv("PYQUEUE_URL", "")  # the command sets it for handlers
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "pyqueue")
    for data in (b"", b"\xff\xfe", b"[" * 3000, b"x = " + b"9" * 5000, b"stages = 5"):
        (tmp_path / "x.toml").write_bytes(data)
        call(shell, ["pipeline", command, "x.toml"], "")
