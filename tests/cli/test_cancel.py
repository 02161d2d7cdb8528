"""``pyqueue cancel``: the result of a cancel, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyqueue import Client
from tests.cli.shell import Shell


def test_cancel_prints_its_result(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    waiting, held = queue.push(1), queue.push(2, id="held")
    assert shell.run("cancel", str(waiting)) == (0, "cancelled\n", "")
    found = queue.get(waiting)
    assert getattr(found, "outcome", None) == "cancelled", "the history of its programs"
    reservation = queue.reserve(0)
    assert reservation is not None
    assert shell.json("cancel", "held") == [{"id": held, "result": "requested"}]
    assert queue.get("held") is not None
    assert "it ends unless its holder commits it" in shell.run("trace", "held")[1]
    assert shell.json("cancel", "held", "--force") == [{"id": held, "result": "cancelled"}]
    assert queue.counts().total == 0


def test_cancel_of_an_unknown_message_exits_with_1(shell: Shell, client: Client) -> None:
    client.queue("a").push(1)
    error = "pyqueue: no message with id x in namespace 'pyqueue', or it is finished\n"
    assert shell.run("cancel", "x") == (1, "", error)
    assert shell.run("cancel", "x", "--json") == (1, '{"id": "x", "result": null}\n', error)
    assert "is a message of a stream" in shell.refused("cancel", stream_message(client))


def stream_message(client: Client) -> str:
    client.stream("log").append(1)
    return "log~0"


@pytest.mark.parametrize("dead", [False, True])
def test_corrected_copy_replaces_a_message(shell: Shell, client: Client, dead: bool) -> None:
    queue = client.queue("a")
    id = str(queue.push({"n": 1}))
    if dead:
        held = queue.reserve(0)
        assert held is not None
        queue.bury(held)
    shell.run("pause", "a")
    payload = json.loads(shell.run("get", id)[1])
    Path("fixed.json").write_text(json.dumps(payload | {"n": 2}))
    assert shell.run("push", "a", "--file", "fixed.json", "--id", id)[1].strip() == id
    assert queue.counts().ready == (0 if dead else 1), "a push with the old id adds nothing"
    assert shell.run("push", "a", "--file", "fixed.json")[0] == 0
    assert shell.run("cancel", id)[:2] == (0, "cancelled\n")
    shell.run("resume", "a")
    assert [each.payload for each in queue.pop_many(5, timeout=0)] == [{"n": 2}]
    assert client.queue("a.dead").counts().total == 0
