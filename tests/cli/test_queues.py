"""The commands on queues: their effects, output and exit codes."""

from __future__ import annotations

import json
import os
import pty
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pymongo
import pytest
from bson import ObjectId

from pyqueue import Client, Limit, Queue
from pyqueue.cli import common, doctor
from pyqueue.cli.common import as_json_text, cell
from tests.cli.shell import Shell
from tests.support.eventually import eventually
from tests.support.processes import ROOT

UNREACHABLE = "mongodb://user:s3cret@127.0.0.1:1/nothing"


# ---- push


def test_push_takes_extended_json_and_all_options(shell: Shell, client: Client) -> None:
    payload = '{"n": 1, "at": {"$date": "2020-01-01T00:00:00Z"}, "é": null}'
    [pushed] = shell.json(
        "push", "a", payload, "--delay", "60", "--key", "k", "--header", "x=y=z", "--id", "mine"
    )
    assert pushed == {"id": "mine"}
    message = client.queue("a").get("mine")
    assert message is not None
    values = (message.payload["n"], message.payload["at"].year, message.payload["é"])
    assert values == (1, 2020, None)
    assert (message.key, message.headers, message.state) == ("k", {"x": "y=z"}, "scheduled")
    assert shell.json("push", "a", "2", "--key", "k") == [{"id": None}]
    taken = "pyqueue: nothing pushed: the key 'k' is taken\n"
    assert shell.run("push", "a", "2", "--key", "k") == (0, "", taken)
    replace = ("--on-duplicate", "replace")
    assert shell.json("push", "a", "3", "--key", "k", *replace) == [{"id": "mine"}]
    errors = shell.refused("push", "a", "4", "--key", "k", "--on-duplicate", "error")
    assert errors == "pyqueue: queue 'a' has messages with the keys ['k']\n"
    assert [each.payload for each in client.queue("a").peek()] == [3]


def test_push_of_a_stored_id_says_where_it_is(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    payload = '{"n": 1, "at": {"$date": "2020-01-01T00:00:00Z"}}'
    push = ("push", "a", payload, "--id", "mine")
    assert shell.run(*push) == (0, "mine\n", "")
    said = "pyqueue: nothing was written: mine is already stored in {}\n"
    assert shell.run(*push) == (0, "mine\n", said.format("a (ready)"))
    held = queue.reserve(0)
    assert held is not None
    queue.bury(held, error="wrong")
    dead = said.format("a.dead (dead)")
    assert shell.run(*push) == (0, "mine\n", dead)
    assert shell.run("push", "a", '{"n": 2}', "--id", "mine") == (1, "mine\n", dead)
    assert shell.run("push", "a", "{}", "--id", "mine", "--json") == (1, '{"id": "mine"}\n', dead)
    found = client.find("mine")
    assert found is not None
    assert found.payload["n"] == 1


def test_push_reads_arguments_files_and_stdin(shell: Shell, client: Client) -> None:
    Path("one.json").write_text('{"from": "file"}\n')
    shell.json("push", "a", "--file", "one.json")
    shell.json("push", "a", given='{"from":\n "stdin"}\n')
    shell.json("push", "a", "plain words", "--text")
    shell.json("push", "a", "--ndjson", given='1\n\n{"n": 2}\r\n"three"')
    Path("lines").write_text("four\nfive\n")
    assert shell.json("push", "a", "--ndjson", "--text", "--file", "lines") == [{"pushed": 2}]
    payloads = [each.payload for each in client.queue("a").peek(100)]
    files = [{"from": "file"}, {"from": "stdin"}, "plain words"]
    assert payloads == [*files, 1, {"n": 2}, "three", "four", "five"]


def test_push_passes_lines_on_as_they_arrive(
    shell: Shell, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()

    def produce() -> None:
        with open(write, "w") as lines:
            print("1\n2", file=lines, flush=True)
            # The input is still open when the first lines arrive.
            eventually(lambda: client.queue("a").counts().ready == 2, "two messages")
            print("3", file=lines)

    with ThreadPoolExecutor(1) as pool, open(read) as stdin:
        produced = pool.submit(produce)
        assert shell.stream("push", "a", "--ndjson", stdin=stdin) == 0
        produced.result()
    assert capsys.readouterr().out == "3\n"


def test_push_refuses_a_binary_file(shell: Shell, client: Client) -> None:
    Path("binary").write_bytes(b"\xff\xfe")
    errors = shell.refused("push", "a", "--text", "--file", "binary")
    assert errors.startswith("pyqueue: the input cannot be read (")
    assert client.queue("a").counts().total == 0


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal: the person's and the program's."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def screen_of(ours: int, theirs: int) -> str:
    """Return what a program that has ended wrote to its terminal, which passes it on in parts."""
    os.write(theirs, b"\0")
    parts = b""
    while not parts.endswith(b"\0"):
        parts += os.read(ours, 1 << 16)
    return parts[:-1].decode()


def test_push_at_a_terminal_needs_a_payload(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for a person to type one."""
    with terminal() as (_, theirs), open(theirs, closefd=False) as stdin:
        assert shell.stream("push", "a", stdin=stdin) == 2
    captured = capsys.readouterr()
    expected = "pyqueue: PAYLOAD: pass a payload or --file, or pipe the payload in\n"
    assert (captured.out, captured.err) == ("", expected)


def test_peek_at_a_terminal_prints_a_table(
    shell: Shell,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.queue("a").push_many(["[bold]x[/bold]", 2])
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")
    with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stdout:
        assert shell.stream("peek", "a", stdout=stdout) == 0
        lines = screen_of(ours, theirs).splitlines()
    assert capsys.readouterr().err == ""
    [head] = [line for line in lines if "payload" in line]
    [first] = [line for line in lines if "bold" in line]
    assert head.split() == ["id", "when", "tries", "key", "payload", "why"]
    assert '"[bold]x[/bold]"' in first  # not taken for markup
    assert first.index('"[') == head.index("payload")  # below its head
    assert any("──" in line for line in lines)
    assert not any("\t" in line for line in lines)


# ---- wrong input


#: The arguments, the standard input, and a part of the complaint.
WRONG_INPUT: list[tuple[list[str], str, str]] = [
    (["push", "a", "{"], "", "invalid JSON"),
    (["push", "a", "--ndjson"], "1\nno\n", "line 2: invalid JSON"),
    (["push", "a", "1", "--header", "x"], "", "NAME=VALUE"),
    (["push", "a", "--file", "nowhere"], "", "nowhere"),
    (["push", "a", "--ndjson", "--key", "k"], "1", "--key"),
    (["push", "a", "1", "--ndjson"], "2", "leave out PAYLOAD"),
    (["push", "a", "1", "--file", "one.json"], "", "not both"),
    (["push", "a", "1", "--delay", "-1"], "", "delay"),
    (["push", "no name", "1"], "", "invalid queue name"),
    (["ls", "--namespace", "1"], "", "invalid namespace"),
    (["move", "a", "a"], "", "TO"),
    (["trace", "~queue:a"], "", "id"),
    (["ls", "--url", "memory:"], "", "no other process"),
    (["ls", "--url", "memory:shop"], "", "no other process"),
    (["doctor", "--url", "nonsense"], "", "nonsense"),
    (["worker", "nonsense"], "", "MODULE:OBJECT"),
    (["worker", "nowhere:worker"], "", "module 'nowhere'"),
    (["worker", "json:dumps"], "", "expected a function without arguments that returns a Worker"),
    (["worker", "json:nothing"], "", "nothing"),
    (["pipeline", "run", "nowhere.toml"], "", "nowhere.toml"),
    (["pipeline", "show", "nowhere.toml"], "", "nowhere.toml"),
]


def test_wrong_input_is_named_in_one_line(shell: Shell) -> None:
    for arguments, given, complaint in WRONG_INPUT:
        errors = shell.refused(*arguments, given=given)
        assert errors.startswith("pyqueue: ")
        assert errors.count("\n") == 1
        assert complaint in errors


def test_a_missing_url_says_how_to_start_a_server(bare_shell: Shell) -> None:
    assert "pyqueue embedded PATH" in bare_shell.refused("ls")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ls"], (2, 0, 1)),
        (["push", "a", "1"], (2, 0, 1)),
        (["trace", "x", "--json"], (2, 0, 1)),
        (["move", "a", "b"], (2, 0, 1)),
        (
            ["pipeline", "run", str(ROOT / "docs/examples/flights.toml"), "--until-empty"],
            (2, 0, 1),
        ),
        (["doctor"], (1, 1, 0)),
        (["doctor", "--quiet"], (1, 0, 0)),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else None,
)
@pytest.mark.usefixtures("impatient")
def test_an_unreachable_server_is_named_in_one_line(
    arguments: list[str],
    expected: tuple[int, int, int],
    bare_shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The status, and the lines of output and of errors. Each command keeps its time limit."""
    monkeypatch.setenv("PYQUEUE_URL", UNREACHABLE)
    monkeypatch.setattr(common, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(doctor, "CONNECT_TIMEOUT_S", 0.1)
    limits: list[float | None] = []
    timeout = pymongo.timeout

    def noted(limit: float | None) -> Any:
        limits.append(limit)
        return timeout(limit)

    monkeypatch.setattr(pymongo, "timeout", noted)
    status, out, errors = bare_shell.run(*arguments)
    assert (status, out.count("\n"), errors.count("\n")) == expected
    assert "s3cret" not in out + errors
    assert "user" not in out + errors
    assert limits[0] == 0.1  # limits of inner calls follow


# ---- pop, peek, ls


def test_pop_prints_payloads_or_whole_messages(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    queue.push_many([{"n": number} for number in range(4)], headers={"x": 1})
    assert shell.run("pop", "a", "--limit", "2") == (0, '{"n": 0}\n{"n": 1}\n', "")
    [third, fourth] = shell.json("pop", "a", "--limit", "10")
    assert (third["payload"], third["headers"], third["queue"]) == ({"n": 2}, {"x": 1}, "a")
    assert fourth["payload"] == {"n": 3}
    assert shell.run("pop", "a") == (1, "", "")
    assert len(queue.history()) == 4  # by the queue's own options


def test_pop_waits(shell: Shell, client: Client) -> None:
    collection = client.database[client.namespace]

    def push_late() -> None:
        named = {"record": True, "open": {"$exists": False}}
        eventually(lambda: collection.count_documents(named) == 1, "a first scan of the queue")
        client.queue("a").push("late")

    client.queue("a").resume()  # makes the record, and leaves its kind open
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(push_late)
        assert shell.run("pop", "a", "--timeout", "60") == (0, '"late"\n', "")
        pushed.result()


def test_peek_and_ls_show_and_take_nothing(shell: Shell, client: Client) -> None:
    a = client.queue("a")
    a.push_many(["tab\there", {"n": 2}])
    a.push("later", delay=60)
    client.queue("b").pause()
    assert [each["payload"] for each in shell.json("peek", "a", "--limit", "1")] == ["tab\there"]
    status, out, _ = shell.run("peek", "a")
    head, first, second = (line.split("\t") for line in out.splitlines())
    assert (status, head) == (0, ["id", "when", "tries", "key", "payload", "why"])
    assert (first[4], second[4]) == ('"tab\\there"', '{"n": 2}')
    counts = {"scheduled": 1, "reserved": 0, "history": 0, "kind": "standard", "limit": None}
    oldest = a.peek()[0].when
    counts |= {"dead": 0, "oldest": None}
    assert shell.json("ls") == [
        {"queue": "a", "paused": False, "ready": 2, **counts, "oldest": oldest},
        {"queue": "b", "paused": True, "ready": 0, **counts, "scheduled": 0},
    ]
    assert shell.run("ls")[1].splitlines()[1:] == [
        f"a\t2\t1\t0\t0\t\tstandard\t0\t{cell(oldest)}",
        "b\t0\t0\t0\t0\tyes\tstandard\t0\t",
    ]
    assert shell.json("ls", "--namespace", "other") == []


def test_ls_counts_no_dead_letters_of_a_dead_queue(shell: Shell, client: Client) -> None:
    """It has no dead-letter queue, so the cell is empty, with and without a cap."""
    a = client.queue("a")
    a.push("x")
    a.bury(*a.reserve_many(1, timeout=0), error="why")
    for more in ([], ["--cap", "5"]):
        lines = [each.split("\t") for each in shell.run("ls", *more)[1].splitlines()]
        place = lines[0].index("dead")
        assert {each[0]: each[place] for each in lines[1:]} == {"a": "1", "a.dead": ""}


def test_json_keeps_what_only_bson_has() -> None:
    value = {"id": ObjectId("6b00635bb4b31ce5bc7b3ac2"), "n": 1, "f": 1.5, "nan": float("nan")}
    assert json.loads(as_json_text(value)) == {
        "id": {"$oid": "6b00635bb4b31ce5bc7b3ac2"},
        "n": 1,
        "f": 1.5,
        "nan": {"$numberDouble": "NaN"},
    }


# ---- priorities


def test_push_takes_a_priority(shell: Shell, client: Client) -> None:
    jobs = client.queue("jobs", kind="priority")
    jobs.push("low", priority=1)
    assert shell.run("push", "jobs", '"high"', "--priority", "9")[0] == 0
    lines = '"x"\n"y"\n'
    assert shell.run("push", "jobs", "--ndjson", "--priority", "8", given=lines)[1] == "2\n"
    shown = [(each["payload"], each["priority"]) for each in shell.json("peek", "jobs")]
    assert shown == [("high", 9), ("x", 8), ("y", 8), ("low", 1)]
    assert shell.json("ls")[0]["kind"] == "priority"
    client.queue("plain").push(1)
    status, _, error = shell.run("push", "plain", "1", "--priority", "9")
    assert status == 2
    assert "priority: queue 'plain' is of kind 'standard'" in error
    assert shell.run("push", "jobs", "1", "--priority", "10")[0] == 2


def test_reshape_changes_the_record(shell: Shell, client: Client) -> None:
    client.queue("jobs", kind="priority").push(1)
    assert shell.json("reshape", "jobs", "--strict") == [{"queue": "jobs", "strict": True}]
    client.queue("jobs", kind="priority", strict=True).push(2)
    assert shell.run("reshape", "jobs", "--no-strict") == (0, "jobs: strict=False\n", "")
    status, _, error = shell.run("reshape", "job", "--strict")
    assert status == 2
    assert "has no queue 'job'; did you mean 'jobs'?" in error


def test_reshape_sets_and_removes_auto_delete(shell: Shell, client: Client) -> None:
    client.queue("jobs").push(1)
    changed = shell.run("reshape", "jobs", "--auto-delete", "1h")
    assert changed == (0, "jobs: auto_delete=3600.0\n", "")
    (found,) = client.queues()
    assert found.options["auto_delete"] == 3600
    changed = shell.run("reshape", "jobs", "--auto-delete", "none")
    assert changed == (0, "jobs: auto_delete=none\n", "")
    (found,) = client.queues()
    assert found.options["auto_delete"] is False
    assert shell.run("reshape", "jobs", "--auto-delete", "0")[0] == 2


def test_reshape_takes_limits_and_ls_shows_them(shell: Shell, client: Client) -> None:
    client.queue("jobs").push(1)
    text = "concurrency=10,rate=0.5,period=60.0,burst=3"
    assert shell.json("reshape", "jobs", "--limit", text) == [{"queue": "jobs", "limit": text}]
    wanted = Limit(concurrency=10, rate=0.5, period=60, burst=3)
    assert [each.limit for each in client.queues()] == [wanted]
    assert shell.json("ls")[0]["limit"] == text
    assert [line.split("\t")[-1] for line in shell.run("ls")[1].splitlines()] == ["limit", text]
    text = "concurrency=1,rate=100,period=60.0,per=headers.tenant"
    assert shell.run("reshape", "jobs", "--limit", text) == (0, f"jobs: limit={text}\n", "")
    assert shell.run("reshape", "jobs", "--limit", "none") == (0, "jobs: limit=none\n", "")
    assert [each.limit for each in client.queues()] == [None]


def test_wrong_limit_on_the_command_line_is_refused(shell: Shell, client: Client) -> None:
    client.queue("jobs").push(1)
    for text, reason in (
        ("", "NAME=VALUE"),
        ("10", "NAME=VALUE"),
        ("speed=1", "NAME=VALUE"),
        ("rate=fast", "rate: 'fast'"),
        ("rate=1,rate=2", "set twice"),
        ("rate=0", "rate: 0"),
        ("concurrency=1.5", "concurrency: 1.5"),
        ("concurrency=1,per=tenant", "per: 'tenant'"),
    ):
        status, _, error = shell.run("reshape", "jobs", "--limit", text)
        assert (status, reason in error) == (2, True), text


# ---- move, redrive, purge, pause


def test_move_takes_a_number_or_all(shell: Shell, client: Client) -> None:
    client.queue("a").push_many(range(250))
    assert shell.json("move", "a", "b", "--limit", "3") == [{"moved": 3}]
    assert shell.json("move", "a", "b") == [{"moved": 247}]
    assert shell.run("move", "a", "b") == (0, "0\n", "")
    assert [each.payload for each in client.queue("b").peek(250)] == list(range(250))


def test_redrive_sends_dead_messages_back(shell: Shell, client: Client) -> None:
    b = client.queue("b", history=60)
    b.push_many(range(3))
    b.bury(*b.reserve_many(3, timeout=0), error="why")
    status, out, errors = shell.run("redrive", "b")
    assert (status, out) == (0, "0\n")
    assert "'b.dead'" in errors
    assert shell.json("redrive", "b.dead", "--limit", "2") == [{"moved": 2}]
    assert shell.json("redrive", "b.dead") == [{"moved": 1}]
    assert b.counts().ready == 3


def test_redrive_sends_single_messages_back(shell: Shell, client: Client) -> None:
    b = client.queue("b", history=60)
    first, second, third = map(str, b.push_many(range(3)))
    b.bury(*b.reserve_many(3, timeout=0), error="why")
    assert shell.run("redrive", "b.dead", first) == (0, "1\n", "")
    assert shell.run("trace", second)[1].count(f"pyqueue redrive b.dead {second}\n") == 1
    status, out, errors = shell.run("redrive", "b.dead", second, first, "lost", "--json")
    assert (status, out) == (1, '{"moved": 1}\n')
    assert f"{first} is not dead in 'b.dead': it is in 'b' (ready)" in errors
    assert "no queue of namespace 'pyqueue' has a message with id lost" in errors
    status, out, errors = shell.run("redrive", "b", third)
    assert (status, out) == (1, "0\n")
    assert "it is in 'b.dead' (dead)" in errors
    assert [b.counts().ready, client.queue("b.dead").counts().total] == [2, 1]
    assert "ID: ids select" in shell.refused("redrive", "b.dead", third, "--limit", "1")


def test_purge_asks_first(shell: Shell, client: Client) -> None:
    b = client.queue("b")
    b.push_many(range(250))
    for given in ("n\n", ""):
        status, out, errors = shell.run("purge", "b", given=given)
        assert (status, out) == (1, "")
        assert "250 messages" in errors
    assert b.counts().ready == 250
    assert shell.run("purge", "b", given="y\n")[:2] == (0, "250\n")
    b.push(1)
    assert shell.json("purge", "b", "--yes") == [{"purged": 1}]


def test_rm_deletes_an_empty_queue_or_any_with_force(shell: Shell, client: Client) -> None:
    client.queue("a").push(1)
    errors = shell.refused("rm", "a")
    assert "1 ready" in errors
    assert "force" in errors
    assert shell.run("rm", "a", "--force")[:2] == (0, "1\n")
    assert client.queues() == []


def test_mistyped_queue_is_refused(shell: Shell, client: Client) -> None:
    client.queue("orders").push(1)
    unknown = "QUEUE: namespace 'pyqueue' has no queue 'order'; did you mean 'orders'?"
    for command in ("peek", "redrive", "purge", "rm", "pop", "pause", "resume", "reshape"):
        more = ["-y"] if command == "purge" else []
        assert unknown in shell.refused(command, "order", *more)
        assert "`pyqueue ls` lists all queues" in shell.run(command, "x", *more)[2]
        assert [each.name for each in client.queues()] == ["orders"]


def test_dead_letter_queue_of_a_known_queue_is_known(shell: Shell, client: Client) -> None:
    client.queue("orders").push(1)
    assert shell.run("peek", "orders.dead")[0] == 0
    assert shell.run("redrive", "orders.dead")[:2] == (0, "0\n")
    assert "FROM: " in shell.run("move", "order", "orders")[2]


def test_push_at_takes_an_instant(shell: Shell, client: Client) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    shell.json("push", "a", "1", "--at", at.isoformat())
    shell.json("push", "a", "--ndjson", "--at", at.isoformat(), given="2\n3")
    queue = client.queue("a")
    assert (queue.counts().scheduled, queue.next_when()) == (3, at)
    for wrong, remedy in (("tomorrow", "2030-01-31"), ("2030-01-31T09:00", "time zone")):
        errors = shell.run("push", "a", "1", "--at", wrong)[2]
        assert errors.startswith(f"pyqueue: --at: {wrong!r} is not allowed; use")
        assert remedy in errors
    status, _, errors = shell.run("push", "a", "1", "--at", at.isoformat(), "--delay", "1")
    assert (status, "--at, --delay" in errors) == (2, True)
    assert queue.counts().total == 3


def test_ls_stops_counting_at_a_cap(shell: Shell, client: Client) -> None:
    client.queue("a").push_many(range(3))
    line = shell.run("ls", "--cap", "2")[1].splitlines()[1]
    assert line.startswith("a\t2+\t0\t0\t0\t\tstandard\t0\t")
    line = shell.run("ls", "--cap", "4")[1].splitlines()[1]
    assert line.startswith("a\t3\t0\t0\t0\t\tstandard\t0\t")
    assert shell.json("ls", "--cap", "2")[0]["ready"] == 2


def test_ls_at_a_terminal_keeps_names_whole(
    shell: Shell,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Columns that say nothing are left out."""
    arrivals = client.queue("arrivals.on-time")
    arrivals.push_many(range(12))
    arrivals.bury(*arrivals.reserve_many(5, timeout=0))
    client.queue("jobs", kind="priority").push(1, delay=3600)

    def shown() -> list[str]:
        with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stdout:
            assert shell.stream("ls", stdout=stdout) == 0
            lines = screen_of(ours, theirs).splitlines()
        assert capsys.readouterr().err == ""
        assert max(map(len, lines)) <= 80
        return [line for line in lines if line.strip(" ─")]

    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    head, one, dead, jobs = shown()
    assert head.split() == ["queue", "ready", "scheduled", "reserved", "kind", "dead", "oldest"]
    *row, seconds, ago = one.split()
    assert row == ["arrivals.on-time", "7", "0", "0", "standard", "5"]
    assert (seconds.endswith("s"), ago) == (True, "ago")
    assert dead.split()[:5] == ["arrivals.on-time.dead", "5", "0", "0", "standard"]
    assert jobs.split() == ["jobs", "0", "1", "0", "priority", "0"]
    client.delete_queue("jobs", force=True)
    assert shown()[0].split() == ["queue", "ready", "scheduled", "reserved", "dead", "oldest"]
    arrivals.pause()
    assert "paused" in shown()[0]


def test_pause_stops_pop_until_resume(shell: Shell, client: Client) -> None:
    b = client.queue("b")
    b.push(1)
    assert shell.json("pause", "b") == [{"queue": "b", "paused": True}]
    status, _, errors = shell.run("pop", "b")
    assert status == 1
    assert "pyqueue resume b" in errors
    assert shell.json("resume", "b") == [{"queue": "b", "paused": False}]
    assert not b.paused()
    assert shell.run("pop", "b") == (0, "1\n", "")


def test_move_says_that_a_queue_is_paused(shell: Shell, client: Client) -> None:
    a = client.queue("a")
    a.push_many(range(3))
    a.pause()
    remark = "pyqueue: queue 'a' is paused: `pyqueue resume a`\n"
    assert shell.run("move", "a", "b") == (0, "0\n", remark)
    assert a.counts().ready == 3


def test_move_does_not_count_lost_messages(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another consumer takes a message between the reserve and the move."""
    client.queue("a").push_many(range(3))
    whole = Queue.move

    def move(self: Queue[Any], *batch: Any, to: Any) -> None:
        client.database[client.namespace].delete_one({"_id": batch[0].id})
        whole(self, *batch, to=to)

    monkeypatch.setattr(Queue, "move", move)
    assert shell.json("move", "a", "b") == [{"moved": 2}]
    assert client.queue("b").counts().ready == 2


def test_an_interrupted_move_releases_its_messages(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("a").push_many(range(3))

    def interrupted(self: Queue[Any], *batch: Any, to: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "move", interrupted)
    assert shell.run("move", "a", "b") == (130, "", "")
    counts = client.queue("a").counts()
    assert (counts.ready, counts.reserved) == (3, 0)
