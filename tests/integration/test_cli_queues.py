"""The commands on queues, as processes on a real server: what they do, what they print for programs, how they end."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pymongo
import pytest
from bson import ObjectId
from typer.testing import CliRunner

from pyqueue import AsyncClient, Client, Queue, QueueClosed, Worker
from pyqueue.cli import app, doctor, work
from pyqueue.cli.common import as_json_text, parsed
from pyqueue.connecting import runner_of
from pyqueue.embedded import EmbeddedServer
from tests.integration.eventually import until

ROOT = Path(__file__).parents[2]
SECONDS = 60  # far more than anything here takes
NOBODY = "mongodb://user:s3cret@127.0.0.1:1/nobody"


class Shell:
    """Runs commands of ``pyqueue`` on one database."""

    def __init__(self, url: str, cwd: Path) -> None:
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith("PYQUEUE_")
        }
        self.env |= {"PYQUEUE_URL": url, "PYTHONPATH": str(ROOT)}
        self._cwd = cwd

    def popen(self, *arguments: str, start_new_session: bool = False) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "pyqueue.cli", *arguments]
        return subprocess.Popen(
            command,
            cwd=self._cwd,
            env=self.env,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=start_new_session,
        )

    def run(self, *arguments: str, given: str = "") -> tuple[int, str, str]:
        with self.popen(*arguments) as process:
            try:
                out, errors = process.communicate(given, timeout=SECONDS)
            finally:
                process.kill()
        return process.returncode, out, errors

    def call(self, *arguments: str, given: str = "") -> tuple[int, str, str]:
        """As run, but in this process, which is quicker."""
        result = CliRunner(env=self.env).invoke(app, list(arguments), input=given)
        return result.exit_code, result.stdout, result.stderr

    def ok(self, *arguments: str, given: str = "") -> list[Any]:
        """What a command answers with --json, each line a value. In this process."""
        status, out, errors = self.call(*arguments, "--json", given=given)
        assert (status, errors) == (0, ""), errors
        return [parsed(line, "stdout") for line in out.splitlines()]


@pytest.fixture
def shell(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(url, tmp_path)


# ---- push


def test_push_takes_extended_json_and_all_options(shell: Shell, client: Client) -> None:
    payload = '{"n": 1, "at": {"$date": "2020-01-01T00:00:00Z"}, "é": null}'
    [told] = shell.ok(
        "push", "a", payload, "--delay", "60", "--key", "k", "--header", "x=y=z", "--id", "mine"
    )
    assert told == {"id": "mine"}
    message = client.queue("a").get("mine")
    assert message is not None
    assert (message.payload["n"], message.payload["at"].year, message.payload["é"]) == (
        1,
        2020,
        None,
    )
    assert (message.key, message.headers, message.state) == ("k", {"x": "y=z"}, "scheduled")
    assert shell.ok("push", "a", "2", "--key", "k") == [{"id": None}]
    status, out, errors = shell.call("push", "a", "2", "--key", "k")
    assert (status, out, errors) == (0, "", "pyqueue: nothing pushed: the key 'k' is taken\n")
    assert shell.ok("push", "a", "3", "--key", "k", "--on-duplicate", "replace") == [{"id": "mine"}]
    status, out, errors = shell.run("push", "a", "4", "--key", "k", "--on-duplicate", "error")
    assert (status, out) == (2, "")
    assert errors == "pyqueue: queue 'a' has messages with these keys: ['k']\n"
    assert [each.payload for each in client.queue("a").peek()] == [3]


def test_push_reads_arguments_files_and_standard_input(
    shell: Shell, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "one.json").write_text('{"from": "file"}\n')
    shell.ok("push", "a", "--file", "one.json")
    shell.ok("push", "a", given='{"from":\n "stdin"}\n')
    shell.ok("push", "a", "plain words", "--text")
    shell.ok("push", "a", "--ndjson", given='1\n\n{"n": 2}\r\n"three"')
    (tmp_path / "lines").write_text("four\nfive\n")
    assert shell.ok("push", "a", "--ndjson", "--text", "--file", "lines") == [{"pushed": 2}]
    payloads = [each.payload for each in client.queue("a").peek(100)]
    assert payloads == [
        {"from": "file"},
        {"from": "stdin"},
        "plain words",
        1,
        {"n": 2},
        "three",
        "four",
        "five",
    ]


def test_push_passes_lines_on_as_they_come(shell: Shell, client: Client) -> None:
    with shell.popen("push", "a", "--ndjson") as process:
        try:
            assert process.stdin is not None
            process.stdin.write("1\n2\n")
            process.stdin.flush()
            until(lambda: client.queue("a").counts().ready == 2)  # and the input is still open
            out, _ = process.communicate("3\n", timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "3\n")


def test_a_file_that_is_no_text_is_refused(shell: Shell, client: Client, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    status, out, errors = shell.call("push", "a", "--text", "--file", "binary")
    assert (status, out) == (2, "")
    assert errors.startswith("pyqueue: the input cannot be read: ")
    assert client.queue("a").counts().total == 0


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """The two ends of a terminal, the person's and the program's."""
    ours, theirs = pty.openpty()
    try:
        yield ours, theirs
    finally:
        os.close(ours)
        os.close(theirs)


def test_push_without_a_payload_does_not_wait_for_a_person_to_type_one(shell: Shell) -> None:
    command = [sys.executable, "-m", "pyqueue.cli", "push", "a"]
    with terminal() as (_, theirs):
        done = subprocess.run(
            command, env=shell.env, stdin=theirs, capture_output=True, text=True, timeout=SECONDS
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "pyqueue: PAYLOAD: give one, or --file, or pipe it in\n"


def test_a_person_at_a_terminal_gets_a_table(shell: Shell, client: Client) -> None:
    client.queue("a").push_many(["[bold]x[/bold]", 2])
    command = [sys.executable, "-m", "pyqueue.cli", "peek", "a"]
    env = shell.env | {"TERM": "dumb", "COLUMNS": "120"}
    with terminal() as (ours, theirs):
        done = subprocess.run(
            command, env=env, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=SECONDS
        )
        lines = os.read(ours, 1 << 16).decode().splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    [head] = [line for line in lines if "payload" in line]
    [first] = [line for line in lines if "bold" in line]
    assert head.split() == ["id", "when", "tries", "key", "payload", "why"]
    assert '"[bold]x[/bold]"' in first  # as it is, and not taken for markup
    assert first.index('"[') == head.index("payload")  # below its head
    assert any("──" in line for line in lines)
    assert not any("\t" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "given", "complaint"),
    [
        (["push", "a", "{"], "", "no JSON"),
        (["push", "a", "--ndjson"], "1\nno\n", "line 2: no JSON"),
        (["push", "a", "1", "--header", "x"], "", "NAME=VALUE"),
        (["push", "a", "--file", "nowhere"], "", "nowhere"),
        (["push", "a", "--ndjson", "--key", "k"], "1", "--key"),
        (["push", "a", "1", "--ndjson"], "2", "no PAYLOAD"),
        (["push", "a", "1", "--file", "one.json"], "", "not both"),
        (["push", "a", "1", "--delay", "-1"], "", "delay"),
        (["push", "no name", "1"], "", "invalid queue name"),
        (["ls", "--namespace", "1"], "", "invalid namespace name"),
        (["move", "a", "a"], "", "TO"),
        (["trace", "~queue:a"], "", "id"),
        (["ls", "--url", "memory:"], "", "no other process"),
        (["doctor", "--url", "nonsense"], "", "nonsense"),
        (["worker", "nonsense"], "", "MODULE:OBJECT"),
        (["worker", "nowhere:worker"], "", "no module 'nowhere'"),
        (["worker", "json:dumps"], "", "neither a Worker nor a Pipeline"),
        (["worker", "json:nothing"], "", "nothing"),
        (["pipeline", "run", "nowhere.toml"], "", "nowhere.toml"),
        (["pipeline", "show", "nowhere.toml"], "", "nowhere.toml"),
    ],
)
def test_wrong_input_is_named_in_one_line(
    arguments: list[str], given: str, complaint: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, arguments, input=given)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pyqueue: ")
    assert result.stderr.count("\n") == 1
    assert complaint in result.stderr


def test_without_a_server_it_says_how_to_start_one() -> None:
    result = CliRunner(env={"PYQUEUE_URL": ""}).invoke(app, ["ls"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "pyqueue embedded PATH" in result.stderr


def test_a_server_that_is_not_there_exits_2_within_seconds(shell: Shell) -> None:
    shell.env["PYQUEUE_URL"] = NOBODY
    commands = [
        ["ls"],
        ["push", "a", "1"],
        ["trace", "x", "--json"],
        ["move", "a", "b"],
        ["doctor"],
        ["doctor", "--quiet"],
    ]
    begun = time.monotonic()
    processes = [
        shell.popen(*each)
        for each in [*commands, ["pipeline", "run", str(ROOT / "docs/examples/flights.toml")]]
    ]
    ended = []
    for process in processes:
        with process:
            try:
                out, errors = process.communicate(timeout=SECONDS)
            finally:
                process.kill()
        assert "s3cret" not in out + errors
        assert "user" not in out + errors
        ended.append((process.returncode, out.count("\n"), errors.count("\n")))
    nothing = (2, 0, 1)  # nothing printed, and one line of complaint
    assert ended == [*[nothing] * 4, (1, 1, 0), (1, 0, 0), nothing]
    assert time.monotonic() - begun < 25  # 5 for the connection; the machine may be busy


# ---- pop, peek, ls


def test_pop_prints_payloads_or_whole_messages(shell: Shell, client: Client) -> None:
    queue = client.queue("a", history=60)
    queue.push_many([{"n": number} for number in range(4)], headers={"x": 1})
    assert shell.run("pop", "a", "--limit", "2") == (0, '{"n": 0}\n{"n": 1}\n', "")
    [third, fourth] = shell.ok("pop", "a", "--limit", "10")
    assert (third["payload"], third["headers"], third["queue"]) == ({"n": 2}, {"x": 1}, "a")
    assert fourth["payload"] == {"n": 3}
    assert shell.run("pop", "a") == (1, "", "")
    assert len(queue.history()) == 4  # with the queue's own options, not the command line's


def test_pop_waits(shell: Shell, client: Client) -> None:
    with shell.popen("pop", "a", "--timeout", "60") as process:
        try:
            until(
                lambda: client.database[client.namespace].count_documents({"record": True}) == 1
            )  # it looked
            client.queue("a").push("late")
            assert process.communicate(timeout=SECONDS)[0] == '"late"\n'
        finally:
            process.kill()


def test_ctrl_c_exits_130(shell: Shell, client: Client) -> None:
    with shell.popen("pop", "a", "--timeout", "60") as process:
        try:
            until(lambda: client.database[client.namespace].count_documents({"record": True}) == 1)
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=SECONDS) == ("", "")
        finally:
            process.kill()
    assert process.returncode == 130


def test_a_closed_pipe_is_quiet(shell: Shell, client: Client) -> None:
    client.queue("a").push_many("x" * 2000 for _ in range(300))
    with shell.popen("peek", "a", "--limit", "300", "--json") as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith("{")
            process.stdout.close()
            assert process.stderr.read() == ""
            assert process.wait(SECONDS) == 141
        finally:
            process.kill()


def test_peek_and_ls_show_what_is_there_and_take_nothing(shell: Shell, client: Client) -> None:
    a = client.queue("a")
    a.push_many(["tab\there", {"n": 2}])
    a.push("later", delay=60)
    client.queue("b").pause()
    assert [each["payload"] for each in shell.ok("peek", "a", "--limit", "1")] == ["tab\there"]
    status, out, _ = shell.call("peek", "a")
    head, first, second = (line.split("\t") for line in out.splitlines())
    assert (status, head) == (0, ["id", "when", "tries", "key", "payload", "why"])
    assert (first[4], second[4]) == ('"tab\\there"', '{"n": 2}')
    counts = {"scheduled": 1, "reserved": 0, "history": 0}
    assert shell.ok("ls") == [
        {"queue": "a", "paused": False, "ready": 2, **counts},
        {"queue": "b", "paused": True, "ready": 0, **counts, "scheduled": 0},
    ]
    assert shell.run("ls")[1].splitlines()[1:] == ["a\t2\t1\t0\t0\t", "b\t0\t0\t0\t0\tyes"]
    assert shell.ok("ls", "--namespace", "other") == []


def test_json_keeps_what_only_bson_has() -> None:
    value = {"id": ObjectId("6b00635bb4b31ce5bc7b3ac2"), "n": 1, "f": 1.5, "nan": float("nan")}
    assert json.loads(as_json_text(value)) == {
        "id": {"$oid": "6b00635bb4b31ce5bc7b3ac2"},
        "n": 1,
        "f": 1.5,
        "nan": {"$numberDouble": "NaN"},
    }


# ---- move, redrive, purge, pause


def test_move_redrive_purge_pause_resume(shell: Shell, client: Client) -> None:
    a, b = client.queue("a"), client.queue("b", history=60)
    a.push_many(range(250))
    assert shell.ok("move", "a", "b", "--limit", "3") == [{"moved": 3}]
    assert shell.ok("move", "a", "b") == [{"moved": 247}]
    assert shell.run("move", "a", "b") == (0, "0\n", "")
    assert [each.payload for each in b.peek(250)] == list(range(250))
    b.bury(*b.reserve_many(3, timeout=0), error="why")
    status, out, errors = shell.call("redrive", "b")
    assert (status, out) == (0, "0\n")
    assert "'b.dead'" in errors
    assert shell.ok("redrive", "b.dead", "--limit", "2") == [{"moved": 2}]
    assert shell.ok("redrive", "b.dead") == [{"moved": 1}]
    for given in ("n\n", ""):
        status, out, errors = shell.call("purge", "b", given=given)
        assert (status, out) == (1, "")
        assert "250 messages" in errors
    assert b.counts().ready == 250
    assert shell.run("purge", "b", given="y\n")[:2] == (0, "250\n")
    b.push(1)
    assert shell.ok("pause", "b") == [{"queue": "b", "paused": True}]
    status, _, errors = shell.call("pop", "b")
    assert status == 1
    assert "pyqueue resume b" in errors
    assert shell.ok("resume", "b") == [{"queue": "b", "paused": False}]
    assert not b.paused()
    assert shell.ok("purge", "b", "--yes") == [{"purged": 1}]


def test_move_takes_nothing_from_a_paused_queue_and_says_why(shell: Shell, client: Client) -> None:
    a = client.queue("a")
    a.push_many(range(3))
    a.pause()
    assert shell.call("move", "a", "b") == (
        0,
        "0\n",
        "pyqueue: queue 'a' is paused: `pyqueue resume a`\n",
    )
    assert a.counts().ready == 3


def test_move_does_not_count_what_others_took_meanwhile(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("a").push_many(range(3))
    whole = Queue.move

    def move(self: Queue[Any], *batch: Any, to: Any) -> None:
        client.database[client.namespace].delete_one({"_id": batch[0].id})
        whole(self, *batch, to=to)

    monkeypatch.setattr(Queue, "move", move)
    assert shell.ok("move", "a", "b") == [{"moved": 2}]
    assert client.queue("b").counts().ready == 2


def test_a_move_that_is_interrupted_gives_back_what_it_held(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("a").push_many(range(3))

    def interrupted(self: Queue[Any], *batch: Any, to: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Queue, "move", interrupted)
    assert shell.call("move", "a", "b") == (130, "", "")
    counts = client.queue("a").counts()
    assert (counts.ready, counts.reserved) == (3, 0)


# ---- trace


def test_trace_tells_the_story_of_a_message(shell: Shell, client: Client) -> None:
    a, b = client.queue("a", max_tries=5), client.queue("b", history=60)
    id = a.push({"n": 1}, key="k", headers={"x": "y"})
    told = shell.ok("trace", str(id))[0]
    assert (told["id"], told["queue"], told["state"], told["max_tries"]) == (id, "a", "ready", 5)

    [held] = a.reserve_many(1, timeout=0)
    a.progress(held, 0.4, "half way")
    told = shell.ok("trace", str(id))[0]
    assert (told["state"], told["lease"]["owner"], told["lease"]["lapsed"]) == (
        "reserved",
        runner_of(client).owner,
        False,
    )
    assert told["lease"]["until"] == held.until
    assert told["progress"]["fraction"] == 0.4
    words = shell.run("trace", str(id))[1]
    for word in (runner_of(client).owner, "40% half way", "1 of 5", "key", '{"n": 1}'):
        assert word in words

    a.move(held, to=b)
    [held] = b.reserve_many(1, timeout=0)
    b.bury(held, error=ValueError("bad"))
    told = shell.ok("trace", str(id))[0]
    assert (told["queue"], told["dead"]["from"], told["error"]["message"]) == ("b.dead", "b", "bad")
    assert [stop["q"] for stop in told["trail"]][:2] == ["a", "b"]
    words = shell.call("trace", str(id))[1]
    for word in ("buried: from b", "pyqueue redrive b.dead", "ValueError: bad"):
        assert word in words

    client.queue("b.dead").redrive()
    b.pop(0)
    told = shell.ok("trace", str(id))[0]
    assert (told["state"], told["outcome"], "expires" in told) == ("finished", "popped", True)
    assert "finished: popped" in shell.call("trace", str(id))[1]


def test_trace_of_an_unknown_id_exits_1(shell: Shell, client: Client) -> None:
    client.queue("a").push("x", id="my id")
    assert shell.ok("trace", "my id")[0]["payload"] == "x"
    status, out, errors = shell.call("trace", "another", "--json")
    assert (status, out) == (1, "")
    assert "another" in errors


# ---- doctor


def checks(found: list[dict[str, str]]) -> dict[str, str]:
    return {each["check"]: each["level"] for each in found}


def test_doctor_of_a_healthy_server_finds_nothing_wrong_and_changes_nothing(
    shell: Shell, url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    status, out, errors = shell.call("doctor", "--json")
    assert (status, errors) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    assert set(checks(found).values()) == {"ok"}
    assert set(checks(found)) >= {
        "reach",
        "version",
        "kind",
        "write concern",
        "retryable writes",
        "indexes",
        "clock",
        "member clocks",
        "bus",
        "parameters",
    }
    name = pymongo.uri_parser.parse_uri(url)["database"]
    assert set(mongo[str(name)].list_collection_names()) <= {"pyqueue.signals"}
    assert shell.call("doctor", "--quiet") == (0, "", "")
    status, out, _ = shell.call("doctor", "--signals", "none:")
    assert status == 0
    assert all(line[17:].startswith("OK") for line in out.splitlines())


def test_doctor_sees_indexes_that_are_missing_or_wrong(shell: Shell, client: Client) -> None:
    collection = client.database[client.namespace]
    client.queue("a").push(1)
    collection.drop_index("expires")
    status, out, errors = shell.call("doctor", "--json", "--signals", "none:")
    assert (status, errors) == (1, "")
    [wrong] = [each for each in map(json.loads, out.splitlines()) if each["level"] == "wrong"]
    assert wrong["check"] == "indexes"
    assert "missing: expires" in wrong["text"]
    collection.drop_index("key")
    collection.create_index([("key", 1)], name="key")
    collection.create_index([("expires", 1)], name="expires", expireAfterSeconds=7)
    finding = doctor._indexes(client)
    assert finding.level == "wrong"
    assert "key, expires" in finding.text


@pytest.mark.parametrize("url", ["nonsense", ""])
def test_a_quiet_doctor_prints_nothing(url: str) -> None:
    result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, ["doctor", "--quiet"])
    assert (result.exit_code, result.output) == (2, "")


def test_doctor_knows_a_bus_that_is_not_there(client: Client) -> None:
    finding = doctor._bus(client, "redis://127.0.0.1:1/0")
    assert finding.level == "wrong"
    assert finding.text.startswith("redis")


def test_doctor_judges_what_the_server_says() -> None:
    assert doctor._kind({}).level == "advice"
    assert doctor._retryable({}).level == "advice"
    assert doctor._kind({"msg": "isdbgrid"}).level == "ok"
    assert doctor._kind({"setName": "s", "hosts": ["a", "b"], "arbiters": ["c"]}).level == "advice"
    three = doctor._kind({"setName": "s", "hosts": ["a", "b", "c"]})
    assert (three.level, three.text) == ("ok", "replica set 's', 3 members")

    assert (
        doctor._version(
            SimpleNamespace(client=SimpleNamespace(server_info=lambda: {"version": "5.0.31"}))
        ).level
        == "wrong"
    )


def test_doctor_tells_of_clocks_that_are_apart(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = SimpleNamespace(
        command=lambda name: {"localTime": datetime.now(UTC) + timedelta(seconds=3)}
    )
    finding = doctor._clock(ahead)
    assert finding.level == "advice"
    assert "ahead of this machine's" in finding.text
    offsets = iter([-1.0, 2.0])
    monkeypatch.setattr(doctor, "_offset", lambda command: next(offsets))
    finding = doctor._members(client, {"hosts": ["one:1"], "passives": ["two:2"]})
    assert finding.level == "wrong"
    assert finding.text.startswith("3.000 s between the 2 members")


def test_doctor_asks_each_member_for_its_clock(client: Client, mongod: EmbeddedServer) -> None:
    there = [f"127.0.0.1:{mongod.port}", f"localhost:{mongod.port}"]
    finding = doctor._members(client, {"hosts": there})
    assert finding.level == "ok"
    assert finding.text.endswith("between the 2 members")
    finding = doctor._members(client, {"hosts": [there[0], "127.0.0.1:1"]})
    assert finding.level == "wrong"
    assert finding.text.startswith("no answer from 127.0.0.1:1:")
    for url, scheme in (
        ("mongodb+srv://u:s3cret@shop.example", "mongodb+srv"),
        (None, "this target"),
    ):
        finding = doctor._members(cast(Client, SimpleNamespace(url=url)), {"hosts": there})
        assert (finding.level, finding.text) == ("advice", f"not measured for {scheme}")


def test_doctor_of_a_namespace_that_is_a_view_says_what_the_server_refuses(
    shell: Shell, client: Client
) -> None:
    client.database.command("create", "seen", viewOn="elsewhere", pipeline=[])
    status, out, errors = shell.call(
        "doctor", "--json", "--signals", "none:", "--namespace", "seen"
    )
    assert (status, errors) == (1, "")
    found = {each["check"]: each for each in map(json.loads, out.splitlines())}
    assert found["write concern"]["level"] == "wrong"
    assert "view" in found["write concern"]["text"]
    assert found["parameters"]["level"] == "ok"  # what comes after is looked at all the same


def test_doctor_goes_on_when_the_server_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "REACH", 0.2)
    with (
        EmbeddedServer(tmp_path / "data") as server,
        Client(server.url.replace("/?", "/gone?"), owner=None) as client,
    ):
        looking = doctor.findings(client, "none:")
        monkeypatch.setattr(doctor, "REACH", 5.0)
        assert next(looking).level == "ok"
        monkeypatch.setattr(doctor, "REACH", 0.2)
        server.close()
        rest = {each.check: each.level for each in looking}
    assert rest["permission"] == rest["write concern"] == rest["clock"] == "wrong"
    assert rest["kind"] == rest["bus"] == "ok"  # what was said before, and what asks no server


def test_doctor_hears_a_bus_that_is_dumb_or_unknown(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor._bus(client, "pigeon:").level == "wrong"
    monkeypatch.setattr(doctor, "REACH", 0.05)
    monkeypatch.setattr("signals.capped_bus.CappedBus.emit", lambda *arguments: None)
    finding = doctor._bus(client, "capped:")
    assert finding.level == "wrong"
    assert "nothing heard" in finding.text


def test_doctor_looks_at_parameters(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = client.database.client.admin
    name = "transactionLifetimeLimitSeconds"
    before = admin.command("getParameter", 1, **{name: 1})[name]
    admin.command("setParameter", 1, **{name: 20})
    try:
        finding = doctor._parameters(client.database)
    finally:
        admin.command("setParameter", 1, **{name: before})
    assert (finding.level, finding.text.partition(":")[0]) == ("advice", f"{name}=20")
    # Of another version of the server, that does not know it.
    monkeypatch.setattr(doctor, "PARAMETERS", {"noSuchParameter": doctor.PARAMETERS[name]})
    finding = doctor._parameters(client.database)
    assert (finding.level, finding.text) == ("ok", "none to look at")


# ---- worker

APP = """
import os, signal
from pyqueue import {client}, Worker

client = {client}(os.environ["PYQUEUE_URL"])
worker = Worker(client)
other = 1

@worker.on("jobs")
{define} work(job, delivery):
    if job == "die" and delivery.message.tries == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def working(shell: Shell, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with shell.popen("worker", *arguments, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for each in psutil.Process(process.pid).children():
                    each.kill()
                process.kill()


@pytest.mark.parametrize(("kind", "define"), [("Client", "def"), ("AsyncClient", "async def")])
def test_a_worker_works_until_it_is_stopped(
    kind: str, define: str, shell: Shell, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP.format(client=kind, define=define))
    jobs = client.queue("jobs")
    jobs.push_many(range(10))
    with working(shell, "shop:worker", "--concurrency", "2", "--json") as process:
        until(lambda: jobs.counts().total == 0)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert json.loads(out)["stages"]["jobs"]["out"] == 10


def test_a_run_closes_the_client_of_its_worker() -> None:
    blocking, awaited = Client("memory:"), AsyncClient("memory:")
    for client in (blocking, awaited):
        report = work._run(Worker(client).on("jobs", print), client, until_empty=True)
        assert report.stages["jobs"]["in"] == 0
    with pytest.raises(QueueClosed):
        blocking.queue("jobs").push(1)


def test_worker_processes_are_started_again_and_stopped_together(
    shell: Shell, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP.format(client="Client", define="def"))
    jobs = client.queue("jobs", lease=2)
    with working(shell, "shop:worker", "--processes", "2") as process:
        jobs.push("die")
        assert process.stderr is not None
        line = next(each for each in process.stderr if "ended" in each)
        assert "ended by signal 9; starting it again in 1 s" in line
        parent = psutil.Process(process.pid)
        until(lambda: len(parent.children()) == 2)
        family = parent.children()
        jobs.push_many(range(10))
        until(lambda: jobs.counts().ready == 0)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert psutil.wait_procs(family, timeout=10)[1] == []


def test_worker_processes_end_when_their_parent_is_killed(
    shell: Shell, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(APP.format(client="Client", define="def"))
    jobs = client.queue("jobs")
    jobs.push(1)
    with working(shell, "shop:worker", "--processes", "2") as process:
        until(lambda: jobs.counts().total == 0)
        family = psutil.Process(process.pid).children()
        assert len(family) == 2
        process.kill()
        process.wait()
        assert psutil.wait_procs(family, timeout=SECONDS)[1] == []


def test_worker_processes_that_swallow_a_ctrl_c_as_they_are_imported_end_all_the_same(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time\n"
        "open(f'{os.getpid()}.here', 'x').close()\n"
        "while True:\n"
        "    try: time.sleep(600)\n"
        "    except KeyboardInterrupt: pass\n"
    )
    with working(shell, "slow:worker", "--processes", "2") as process:
        until(lambda: len(list(tmp_path.glob("*.here"))) == 2)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0


def test_worker_processes_that_cannot_run_end_the_parent(shell: Shell) -> None:
    status, out, errors = shell.run("worker", "nowhere:worker", "--processes", "2")
    assert (status, out) == (2, "")
    assert "no module 'nowhere'" in errors


def test_a_dying_process_is_started_again_after_longer_and_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours, theirs = os.pipe()
    child = work.Child(1, [sys.executable, "-c", "raise SystemExit(3)"], ours)
    pauses = []
    try:
        for _ in range(3):
            child._process.wait(SECONDS)
            assert child.look(False) is None
            assert child._due is not None
            pauses.append(round(child._due - time.monotonic()))
            child._due = 0.0  # the time has come
            assert child.look(False) is None
    finally:
        child.kill()
        os.close(ours)
        os.close(theirs)
    assert pauses == [1, 2, 4]
    assert capsys.readouterr().err.count("ended with status 3") == 3


def test_a_process_that_waits_to_be_started_again_is_not_when_all_are_stopped() -> None:
    ours, theirs = os.pipe()
    child = work.Child(1, [sys.executable, "-c", "raise SystemExit(3)"], ours)
    try:
        child._process.wait(SECONDS)
        for _ in range(3):  # it had died often, and then ran well
            next(child._delays)
        child._begun = time.monotonic() - work.HEALTHY
        assert child.look(False) is None
        assert next(child._delays) == 2  # so it began with the shortest delay again
        assert child.look(False) is None  # not yet
        child.stop()  # nobody
        assert child.look(True) == 0
        assert child._process.returncode == 3
    finally:
        child.kill()
        os.close(ours)
        os.close(theirs)


def test_a_module_that_misses_another_is_told_from_one_that_is_not_there(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "half_a_shop.py").write_text("import no_such_till")
    result = CliRunner(env=shell.env).invoke(app, ["worker", "half_a_shop:worker"])
    assert isinstance(result.exception, ModuleNotFoundError)  # with its traceback
    assert result.exception.name == "no_such_till"


# ---- pipeline


def test_pipeline_run_and_show(shell: Shell, client: Client, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(
        "import os\n"
        "def double(n): return 2 * n\n"
        "def keep(n): assert os.environ['PYQUEUE_URL'] and os.environ['PYQUEUE_NAMESPACE'] == 'pyqueue'\n"
    )
    (tmp_path / "numbers.toml").write_text(
        '[[stages]]\nqueue = "in"\nhandler = "steps:double"\nto = "out"\n'
        '[[stages]]\nqueue = "out"\nhandler = "steps:keep"\n'
    )
    client.queue("in").push_many(range(20))
    shown = json.loads(shell.run("pipeline", "show", "numbers.toml", "--json")[1])
    assert shown["stages"][0] == {"queue": "in", "kind": "link", "handler": "double", "to": ["out"]}
    assert shown["counts"]["in"]["ready"] == 20
    drawn = shell.run("pipeline", "show", "numbers.toml", "--format", "mermaid")[1]
    assert "flowchart" in drawn
    assert "20 ready" in drawn
    status, out, errors = shell.run(
        "pipeline", "run", "numbers.toml", "--until-empty", "--concurrency", "4", "--json"
    )
    assert status == 0, errors
    report = json.loads(out)
    assert report["name"] == "numbers"
    assert (report["stages"]["in"]["out"], report["stages"]["out"]["out"]) == (20, 20)
    del shell.env["PYQUEUE_URL"]
    [told] = shell.ok("pipeline", "show", "numbers.toml")
    assert (told["stages"], "counts" in told) == (shown["stages"], False)
    status, drawn, errors = shell.run("pipeline", "show", "numbers.toml")
    assert (status, errors) == (0, "")
    assert "20 ready" not in drawn
    assert "double" in drawn
