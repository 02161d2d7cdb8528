"""``pyqueue get``, ``history`` and ``replay``: messages that have ended."""

from __future__ import annotations

import pytest

from pyqueue import Client
from tests.cli.shell import Shell


def finish(client: Client, *payloads: object, history: float = 60) -> list[str]:
    """Push and commit messages. Return their ids."""
    queue = client.queue("a", history=history)
    ids = queue.push_many(payloads)
    queue.commit(*queue.reserve_many(len(payloads), timeout=5))
    return [str(id) for id in ids]


def test_get_prints_the_payload_wherever_it_is(shell: Shell, client: Client) -> None:
    [finished] = finish(client, {"n": 1})
    waiting = str(client.queue("b").push("words", delay=60))
    assert shell.run("get", finished) == (0, '{"n": 1}\n', "")
    assert shell.run("get", waiting) == (0, '"words"\n', "")
    (whole,) = shell.json("get", finished)
    assert (whole["outcome"], whole["queue"], whole["result"]) == ("committed", "a", None)
    (whole,) = shell.json("get", waiting)
    assert (whole["state"], "outcome" in whole) == ("scheduled", False)


def test_get_waits_for_the_result(shell: Shell, client: Client) -> None:
    queue = client.queue("a")
    id = str(queue.push("x", result=60))
    status, out, errors = shell.run("get", id, "--wait", "0.05")
    assert (status, out) == (1, "")
    assert f"message {id} has not finished within 0.05 s" in errors
    held = queue.reserve(5)
    assert held is not None
    queue.commit(held, result=[1, 2])
    assert shell.run("get", id, "--wait", "5") == (0, "[1, 2]\n", "")
    assert shell.json("get", id, "--wait", "5")[0]["result"] == [1, 2]


def test_get_of_a_failed_or_unknown_message_exits_with_1(shell: Shell, client: Client) -> None:
    queue = client.queue("a")
    id = str(queue.push("x", result=60))
    held = queue.reserve(5)
    assert held is not None
    queue.bury(held, error="no such page")
    status, out, errors = shell.run("get", id, "--wait", "5")
    assert (status, out) == (1, "")
    assert "was buried" in errors
    assert "no such page" in errors
    assert shell.run("get", id)[:2] == (0, '"x"\n')
    status, out, errors = shell.run("get", "nowhere")
    assert (status, out) == (1, "")
    assert "no queue of namespace 'pyqueue' has a message with id nowhere" in errors


def test_history_shows_the_newest_first(shell: Shell, client: Client) -> None:
    ids = [finish(client, n)[0] for n in range(3)]
    assert [str(each["id"]) for each in shell.json("history", "a")] == ids[::-1]
    (newest,) = shell.json("history", "a", "--limit", "1")
    assert (newest["payload"], newest["outcome"]) == (2, "committed")
    head, *lines = shell.run("history", "a")[1].splitlines()
    assert head.split("\t") == ["id", "finished", "outcome", "tries", "took", "payload"]
    assert [line.split("\t")[-1] for line in lines] == ["2", "1", "0"]
    assert lines[0].split("\t")[4].endswith(" s")
    since = newest["processed"].isoformat()
    assert [each["payload"] for each in shell.json("history", "a", "--since", since)] == [2]


def test_history_shows_no_time_for_a_message_never_tried(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    queue.remove(queue.push("removed") or "")
    queue.push("popped")
    queue.pop(0)
    lines = [line.split("\t") for line in shell.run("history", "a")[1].splitlines()[1:]]
    assert [(outcome, took != "") for _, _, outcome, _, took, _ in lines] == [
        ("popped", True),
        ("removed", False),
    ]


def test_replay_makes_messages_ready_again(shell: Shell, client: Client) -> None:
    ids = finish(client, 1, 2, 3)
    assert shell.run("replay", "a", ids[0], ids[2], "nowhere") == (0, "2\n", "")
    assert sorted(each.payload for each in client.queue("a").peek()) == [1, 3]
    assert shell.json("replay", "a", ids[1]) == [{"replayed": 1}]
    assert shell.run("replay", "a", ids[1])[:2] == (1, "0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("history", "b"), "QUEUE: namespace 'pyqueue' has no queue 'b'"),
        (("history", "a", "--since", "today"), "--since: 'today' is not allowed"),
        (("history", "a", "--limit", "0"), "--limit"),
        (("replay", "b", "x"), "QUEUE: namespace 'pyqueue' has no queue 'b'"),
        (("get", "x", "--wait", "-1"), "--wait"),
        (("get", "~x"), "id"),
    ],
)
def test_wrong_input_is_refused(
    shell: Shell, client: Client, arguments: tuple[str, ...], said: str
) -> None:
    client.queue("a").push(1)
    assert said in shell.refused(*arguments)
