"""``pyqueue browse``: the messages of a queue in any state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pyqueue import Client, Queue
from pyqueue.cli.common import age
from tests.cli.shell import Shell
from tests.cli.test_queues import screen_of, terminal


def test_browse_selects_by_state_and_values(shell: Shell, client: Client) -> None:
    queue = client.queue("a")
    queue.push_many([{"n": n, "by": "me"} for n in range(12)])
    queue.push({"n": "3"}, delay=60)
    assert len(shell.json("browse", "a")) == 10

    def browsed(*options: str) -> list[Any]:
        return [each["payload"]["n"] for each in shell.json("browse", "a", *options)]

    assert browsed("--limit", "2", "--newest") == ["3", 11]
    assert browsed("--state", "scheduled") == ["3"]
    assert browsed("--where", "payload.n=3") == [3]
    assert browsed("--where", 'payload.n="3"') == ["3"]
    assert browsed("--where", "payload.by=me", "--where", "payload.n=5") == [5]
    assert browsed("--where", "payload.by=you") == []


def test_browse_goes_on_until_it_has_found_enough(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("a").push_many(range(30))
    defaults = (None, None, None, 100, False, 7)
    monkeypatch.setattr(Queue.browse, "__defaults__", defaults)
    assert [each["payload"] for each in shell.json("browse", "a", "--where", "payload=25")] == [25]


def test_browse_of_dead_letters_says_why(shell: Shell, client: Client) -> None:
    queue = client.queue("a")
    queue.push("x")
    held = queue.reserve(0)
    assert held is not None
    queue.bury(held, error=TimeoutError("too slow"))
    (row,) = shell.json("browse", "a.dead", "--where", "error.type=TimeoutError")
    assert (row["state"], row["dead"]["reason"], row["deferred"]) == ("dead", "buried", None)
    head, line = shell.run("browse", "a.dead")[1].splitlines()
    assert head.split("\t") == ["id", "state", "when", "tries", "payload", "why"]
    assert line.split("\t")[-2:] == ['"x"', "too slow"]


def test_browse_says_what_a_deferred_message_waits_for(shell: Shell, client: Client) -> None:
    queue = client.queue("a", kind="ordered")
    queue.push_many([1, 2], groups=["g", "g"])
    assert queue.reserve(0) is not None
    assert queue.reserve(0) is None
    (row,) = shell.json("browse", "a", "--where", "payload=2")
    assert (row["state"], row["deferred"]) == ("scheduled", "group")
    assert "waits for an earlier message of its group" in shell.run("browse", "a")[1]
    id = str(row["id"])
    assert shell.json("trace", id)[0]["deferred"] == "group"
    assert "waits      for an earlier message of its group" in shell.run("trace", id)[1]


def test_browse_at_a_terminal_keeps_ids_whole(
    shell: Shell,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ids = client.queue("a", kind="bucket").push_many([{"text": "many words " * 9}] * 2)
    client.queue("a").push(1, delay=3600)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stdout:
        assert shell.stream("browse", "a", stdout=stdout) == 0
        lines = screen_of(ours, theirs).splitlines()
    assert capsys.readouterr().err == ""
    assert max(map(len, lines)) <= 80
    for id in ids:
        assert [line for line in lines if f" {id} " in line]
    (later,) = [line for line in lines if "scheduled" in line]
    assert "in 59m" in later or "in 60m" in later


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0s ago"), (119, "119s ago"), (121, "2m ago"), (-100.2, "in 100s")),
        *((7201, "2h ago"), (47 * 3600 + 1, "47h ago"), (-3 * 86400 - 1, "in 3d")),
    ],
)
def test_age_is_short(seconds: float, text: str) -> None:
    assert age(datetime.now(UTC) - timedelta(seconds=seconds)) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a", "--where", "n"), "--where: 'n' is not allowed; use PATH=VALUE"),
        (("a", "--where", "=1"), "--where: '=1' is not allowed; use PATH=VALUE"),
        (("a", "--where", "payload=1", "--where", "payload=2"), "payload is set twice"),
        (("a", "--where", "error.typ=x"), "where: unknown path 'error.typ' (did you mean"),
        (("b",), "QUEUE: namespace 'pyqueue' has no queue 'b'"),
        (("clicks",), "QUEUE: 'clicks' is a stream; use `pyqueue stream read`"),
    ],
)
def test_browse_refuses_wrong_input(
    shell: Shell, client: Client, arguments: tuple[str, ...], said: str
) -> None:
    client.queue("a").push(1)
    client.stream("clicks").append(1)
    assert said in shell.refused("browse", *arguments)


def test_trace_finds_a_message_of_a_stream(shell: Shell, client: Client) -> None:
    client.stream("clicks").append_many(["a", "b"])
    (facts,) = shell.json("trace", "clicks~1")
    assert (facts["queue"], facts["position"], facts["payload"]) == ("clicks", 1, "b")
    assert "position   1" in shell.run("trace", "clicks~1")[1]
    assert shell.run("trace", "clicks~2")[0] == 1
