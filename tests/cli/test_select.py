"""The commands that change the messages that match: redrive, move and rm with conditions."""

from __future__ import annotations

import re

import pytest

from pyqueue import Client
from tests.cli.shell import Shell


def bury(client: Client, number: int) -> None:
    """Bury messages; every second one because of a timeout."""
    queue = client.queue("a")
    queue.push_many(range(number))
    for each in queue.reserve_many(number, timeout=0):
        queue.bury(each, error=TimeoutError("late") if each.payload % 2 else ValueError("bad"))


def test_redrive_takes_conditions(shell: Shell, client: Client) -> None:
    bury(client, 8)
    timeouts = ("redrive", "a.dead", "--where", "error.type=TimeoutError")
    assert shell.json(*timeouts, "--dry-run") == [{"matched": 4}]
    assert shell.run(*timeouts, "--dry-run", "--limit", "3")[:2] == (0, "3\n")
    assert client.queue("a").counts().total == 0
    assert shell.json(*timeouts, "--limit", "1", "--rate", "50") == [{"moved": 1, "passed": 0}]
    assert shell.run(*timeouts) == (0, "3\n", "")
    assert shell.json("redrive", "a.dead", "--older", "3600") == [{"moved": 0, "passed": 0}]
    errors = ("redrive", "a.dead", "--error", "ValueError")
    assert shell.json(*errors, "--where", "payload=2") == [{"moved": 1, "passed": 0}]
    assert shell.json("redrive", "a.dead", "--rate", "1000") == [{"moved": 3, "passed": 0}]
    assert client.queue("a").counts().ready == 8


def test_move_takes_conditions(shell: Shell, client: Client) -> None:
    client.queue("a").push_many(range(6))
    client.queue("a").push(6, delay=60)
    held = client.queue("a").reserve(0)
    assert held is not None
    assert shell.json("move", "a", "b", "--state", "scheduled") == [{"moved": 1, "passed": 0}]
    chosen = ("move", "a", "b", "--where", "payload=0")
    status, out, note = shell.run(*chosen)
    assert (status, out) == (0, "0\n")
    assert "1 matching messages stay: consumers hold them" in note
    assert shell.json(*chosen) == [{"moved": 0, "passed": 1}]
    assert client.queue("b").counts().ready == 1
    assert shell.json("move", "a", "b", "--older", "0", "--limit", "2", "--dry-run") == [
        {"matched": 2}
    ]


def test_rm_with_a_condition_keeps_the_queue(shell: Shell, client: Client) -> None:
    client.queue("a").push_many([{"n": n} for n in range(5)])
    chosen = ("rm", "a", "--where", "payload.n=3")
    assert shell.run(*chosen, "--dry-run") == (0, "1\n", "")
    assert shell.json(*chosen) == [{"removed": 1, "passed": 0}]
    assert shell.run("rm", "a", "--state", "ready", "--limit", "2") == (0, "2\n", "")
    assert client.queue("a").counts().ready == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rm", "a", "--dry-run"), "--dry-run: needs a condition; add --where, --state"),
        (("rm", "a", "--rate", "1"), "--rate: needs a condition; add --where, --state"),
        (("rm", "a", "--limit", "1"), "--limit: needs a condition; add --where, --state"),
        (("rm", "a", "--state", "ready", "--force"), "--force: has no use here, because"),
        (("move", "a", "b", "--dry-run"), "--dry-run: needs a condition; add --where, --state"),
        (("move", "a", "b", "--where", "payload"), "--where: 'payload' is not allowed"),
        (("redrive", "a", "--where", "x=1"), "where: unknown path 'x'"),
        (("redrive", "a", "--rate", "0"), "rate: 0.0 is not allowed"),
        (("move", "a", "clicks", "--state", "ready"), "QUEUE: 'clicks' is a stream"),
        (("rm", "clicks", "--where", "payload=1"), "QUEUE: 'clicks' is a stream"),
    ],
)
def test_wrong_conditions_are_refused(
    shell: Shell, client: Client, arguments: tuple[str, ...], said: str
) -> None:
    client.queue("a").push(1)
    client.stream("clicks").append(1)
    assert said in shell.refused(*arguments)
    assert client.queue("a").counts().ready == 1


@pytest.mark.parametrize("command", ["redrive", "move", "rm"])
def test_help_of_conditions_fits_a_terminal(
    shell: Shell, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, text, _ = shell.run(command, "--help")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    shown = {*re.findall(r"--[a-z-]+", text)}
    assert {"--where", "--older", "--error", "--rate", "--dry-run"} <= shown
