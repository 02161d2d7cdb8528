"""Shell completion: names of queues, in bounded time, and without a word if there are none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pyqueue import Client
from pyqueue.cli import app, completing
from tests.cli.shell import Shell
from tests.cli.test_queues import UNREACHABLE


def completed(*words: str) -> tuple[list[str], str]:
    """Complete the last word as bash does. Return the answers and the errors."""
    environment = {
        "_PYQUEUE_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["pyqueue", *words]),
        "COMP_CWORD": str(len(words)),
    }
    result = CliRunner().invoke(app, [], prog_name="pyqueue", env=environment)
    return result.stdout.split(), result.stderr


@pytest.mark.usefixtures("shell")
def test_names_of_queues_and_streams_complete(client: Client) -> None:
    client.queue("orders").push(1)
    client.queue("orders-old").push(1)
    client.stream("ordinary").append(1)
    client.queue("mail").push(1)
    assert completed("peek", "ord") == (["orders", "orders-old", "ordinary"], "")
    assert completed("move", "mail", "m") == (["mail"], "")
    assert completed("stream", "read", "ordi") == (["ordinary"], "")


def test_namespace_and_url_of_the_command_line_count(url: str, bare_shell: Shell) -> None:
    with Client(url, namespace="other") as client:
        client.queue("letters").push(1)
    assert completed("peek", "--url", url, "--namespace", "other", "l") == (["letters"], "")
    assert completed("peek", "l") == ([], "")


def test_completion_writes_nothing(url: str, shell: Shell, client: Client) -> None:
    assert completed("peek", "--namespace", "nowhere", "a") == ([], "")
    assert "nowhere" not in client.database.list_collection_names()


def test_completion_is_silent_while_the_server_is_down(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completing, "LIMIT_S", 0.05)
    monkeypatch.setenv("PYQUEUE_URL", UNREACHABLE)
    began = time.monotonic()
    assert completed("peek", "a") == ([], "")
    assert time.monotonic() - began < 5


def test_completion_starts_no_server(bare_shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYQUEUE_URL", "embedded:./data")
    assert completed("peek", "a") == ([], "")
    assert [*Path.cwd().iterdir()] == []
