"""``pyqueue trace``: the history of a message, for people and for programs."""

from __future__ import annotations

from pyqueue import Client
from pyqueue.runtime.connecting import runner_of
from tests.cli.shell import Shell


def test_trace_shows_the_history_of_a_message(shell: Shell, client: Client) -> None:
    a, b = client.queue("a", max_tries=5), client.queue("b", history=60)
    id = a.push({"n": 1}, key="k", headers={"x": "y"})
    facts = shell.json("trace", str(id))[0]
    assert (facts["id"], facts["queue"], facts["state"], facts["max_tries"]) == (
        id,
        "a",
        "ready",
        5,
    )

    [held] = a.reserve_many(1, timeout=0)
    a.progress(held, 0.4, "half way")
    facts = shell.json("trace", str(id))[0]
    assert (facts["state"], facts["lease"]["owner"], facts["lease"]["lapsed"]) == (
        "reserved",
        runner_of(client).owner(),
        False,
    )
    assert facts["lease"]["until"] == held.until
    assert facts["progress"]["fraction"] == 0.4
    words = shell.run("trace", str(id))[1]
    for word in (runner_of(client).owner(), "40% half way", "1 of 5", "key", '{"n": 1}'):
        assert word in words

    a.move(held, to=b)
    [held] = b.reserve_many(1, timeout=0)
    b.bury(held, error=ValueError("bad"))
    facts = shell.json("trace", str(id))[0]
    assert (facts["queue"], facts["dead"]["from"], facts["error"]["message"]) == (
        "b.dead",
        "b",
        "bad",
    )
    assert [stop["q"] for stop in facts["trail"]][:2] == ["a", "b"]
    first, second = facts["trail"][:2]
    assert (first["tries"], first["in"], first["out"]) == (1, facts["pushed"], second["in"])
    assert first["waited"] >= 0
    words = shell.run("trace", str(id))[1]
    assert (facts["deliveries"], [each["number"] for each in facts["attempts"]]) == (0, [1])
    for word in ("buried: from b", f"pyqueue redrive b.dead {id}\n", "ValueError: bad"):
        assert word in words
    for word in ("try 1", ", tries: 1", "fingerprint"):
        assert word in words

    client.queue("b.dead").redrive()
    b.pop(0)
    facts = shell.json("trace", str(id))[0]
    assert (facts["state"], facts["outcome"], "expires" in facts) == ("finished", "popped", True)
    assert "finished: popped" in shell.run("trace", str(id))[1]


def test_trace_of_a_finished_message_has_no_holder(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    for end in (queue.commit, queue.release):
        id = str(queue.push(1))
        held = queue.reserve(0)
        assert held is not None
        end(held)
        if end == queue.release:
            queue.remove(id)
        facts = shell.json("trace", id)[0]
        assert (facts["state"], "lease" in facts) == ("finished", False)
        assert "held by" not in shell.run("trace", id)[1]


def test_trace_of_an_unknown_id_exits_1(shell: Shell, client: Client) -> None:
    client.queue("a").push("x", id="my id")
    assert shell.json("trace", "my id")[0]["payload"] == "x"
    status, out, errors = shell.run("trace", "another", "--json")
    assert (status, out) == (1, "")
    assert "another" in errors
