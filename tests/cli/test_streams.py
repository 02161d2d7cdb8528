"""The commands on streams: their output and their refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyqueue import Client
from tests.cli.shell import Shell


def test_read_prints_positions(shell: Shell, client: Client) -> None:
    client.stream("clicks").append_many(["a", {"b": 1}, "c"], headers={"by": "me"})
    lines = shell.run("stream", "read", "clicks", "--after", "0", "--limit", "1")[1].splitlines()
    assert lines[0] == "position\tpushed\tpayload"
    assert lines[1].startswith("1\t")
    assert lines[1].endswith('{"b": 1}')
    found = shell.json("stream", "read", "clicks")
    assert [(each["position"], each["payload"]) for each in found] == [
        (0, "a"),
        (1, {"b": 1}),
        (2, "c"),
    ]
    assert found[0]["headers"] == {"by": "me"}


def test_consumers_and_seek(shell: Shell, client: Client) -> None:
    log = client.stream("clicks")
    log.append_many(range(5))
    group = log.consumer("audit")
    group.reserve_many(2, timeout=0)
    (row,) = shell.json("stream", "consumers", "clicks")
    assert (row["group"], row["position"], row["ready"], row["reserved"]) == ("audit", 2, 3, 2)
    assert shell.run("stream", "seek", "clicks", "audit", "4")[1] == "4\n"
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    for place, position in (("first", 0), ("last", 5), (tomorrow, 5)):
        assert shell.json("stream", "seek", "clicks", "audit", place) == [{"position": position}]
    assert group.reserve(0) is None


def test_reshape_changes_the_retention(shell: Shell, client: Client) -> None:
    client.stream("clicks").append(1)
    assert shell.run("reshape", "clicks", "--retention", "3600")[1] == "clicks: retention=3600.0\n"
    client.stream("clicks", retention=3600).append(2)
    status, _, error = shell.run("reshape", "clicks")
    assert (status, "set at least one option" in error) == (2, True)


def test_ls_shows_the_kind(shell: Shell, client: Client) -> None:
    client.stream("clicks").append(1)
    client.queue("jobs").push(1)
    assert {row["queue"]: row["kind"] for row in shell.json("ls")} == {
        "clicks": "stream",
        "jobs": "standard",
    }


def test_wrong_arguments_are_refused(shell: Shell, client: Client) -> None:
    client.stream("clicks").append(1)
    client.stream("clicks").consumer("audit").pause()
    client.queue("jobs").push(1)
    for arguments, text in (
        (("read", "clocks"), "STREAM: namespace 'pyqueue' has no queue 'clocks'; did you mean"),
        (("seek", "clicks", "other", "first"), "has no consumer group 'other'"),
        (("seek", "clicks", "audit", "middle"), "TO: 'middle' is not allowed"),
        (("seek", "clicks", "audit", "2026-01-31"), "has no time zone"),
        (("consumers", "jobs"), "STREAM: 'jobs' is not a stream but a queue"),
    ):
        status, _, errors = shell.run("stream", *arguments)
        assert status != 0
        assert text in " ".join(errors.split())


def test_commands_of_queues_refuse_a_stream(shell: Shell, client: Client) -> None:
    client.stream("clicks").append(1)
    for command in ("peek", "pop", "purge", "redrive", "pause", "resume", "push"):
        errors = shell.refused(command, "clicks", *(["1"] if command == "push" else []))
        assert errors.count("\n") == 1
        assert "QUEUE: 'clicks' is a stream; use `pyqueue stream read`" in errors
