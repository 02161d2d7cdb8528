"""``pyqueue doctor``: its findings, and that it changes next to nothing."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pymongo
import pytest

from pyqueue import Client, Limit, To
from pyqueue.cli import doctor
from pyqueue.runtime.connecting import runner_of
from tests.cli.shell import Shell
from tests.support.eventually import eventually
from tests.support.proxy import Proxy
from tests.support.shared import Mongod


def levels(found: list[dict[str, str]]) -> dict[str, str]:
    return {each["check"]: each["level"] for each in found}


def test_doctor_finds_a_healthy_server_healthy(
    shell: Shell, url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    """It changes nothing, except that it may create the collection of the default bus."""
    status, out, errors = shell.run("doctor", "--json")
    assert (status, errors) == (0, "")
    found = levels([json.loads(line) for line in out.splitlines()])
    assert set(found.values()) == {"ok"}
    server = {"reach", "version", "kind", "write concern", "retryable writes", "parameters"}
    assert set(found) >= server | {"indexes", "clock", "member clocks", "bus"}
    name = pymongo.uri_parser.parse_uri(url)["database"]
    assert set(mongo[str(name)].list_collection_names()) <= {"pyqueue.signals"}
    assert shell.run("doctor", "--quiet") == (0, "", "")
    status, out, _ = shell.run("doctor", "--signals", "none:")
    assert status == 0
    assert all(line[17:].startswith("OK") for line in out.splitlines())


def test_doctor_finds_missing_and_wrong_indexes(shell: Shell, client: Client) -> None:
    collection = client.database[client.namespace]
    client.queue("a").push(1)
    collection.drop_index("expires")
    status, out, errors = shell.run("doctor", "--json", "--signals", "none:")
    assert (status, errors) == (1, "")
    [wrong] = [each for each in map(json.loads, out.splitlines()) if each["level"] == "wrong"]
    assert wrong["check"] == "indexes"
    assert "missing: expires" in wrong["text"]
    assert "db.getCollection('pyqueue').createIndex({expires: 1}, {name: 'expires'" in wrong["text"]
    collection.drop_index("key")
    collection.create_index([("key", 1)], name="key")
    collection.create_index([("expires", 1)], name="expires", expireAfterSeconds=7)
    finding = doctor.check_indexes(client)
    assert finding.level == "wrong"
    assert "key, expires" in finding.text


def test_doctor_names_an_index_of_an_earlier_release(client: Client) -> None:
    client.queue("a", kind="ordered").push(1)
    assert doctor.check_indexes(client).level == "ok"
    keys = [(name, 1) for name in ("q", "group", "seq", "_id")]
    client.database[client.namespace].create_index(keys, name="group")
    finding = doctor.check_indexes(client)
    assert finding.level == "advice"
    assert finding.text.startswith("unused: group; drop it")


def test_doctor_finds_limits_that_cannot_be_read(client: Client) -> None:
    client.queue("a", limit=Limit(rate=2, per="headers.customer")).push(1)
    client.queue("b", kind="bucket").push(1)
    client.queue("c").push(1)
    assert doctor.check_limits(client).level == "ok"
    records = client.database[client.namespace]
    records.update_one({"_id": "~queue:b"}, {"$set": {"shape.limit": {"concurrency": 2}}})
    records.update_one({"_id": "~queue:c"}, {"$set": {"shape.limit": {"weight": 2}}})
    finding = doctor.check_limits(client)
    assert finding.level == "wrong"
    assert "queue 'b'" in finding.text
    assert "queue 'c' cannot be read (unknown fields 'weight')" in finding.text
    assert {each.name: each.limit for each in client.queues()} == {
        "a": Limit(rate=2, per="headers.customer"),
        "b": Limit(concurrency=2),
        "c": None,
    }


@pytest.mark.parametrize("url", ["nonsense", ""])
def test_a_quiet_doctor_prints_nothing(
    url: str, bare_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYQUEUE_URL", url)
    assert bare_shell.run("doctor", "--quiet") == (2, "", "")


def test_doctor_judges_the_topology() -> None:
    assert doctor.check_topology({}).level == "advice"
    assert doctor.check_retryable_writes({}).level == "advice"
    assert doctor.check_topology({"msg": "isdbgrid"}).level == "ok"
    with_arbiter = {"setName": "s", "hosts": ["a", "b"], "arbiters": ["c"]}
    assert doctor.check_topology(with_arbiter).level == "advice"
    three = doctor.check_topology({"setName": "s", "hosts": ["a", "b", "c"]})
    assert (three.level, three.text) == ("ok", "replica set 's', 3 members")


def test_doctor_finds_an_old_version() -> None:
    assert doctor.check_version("5.0.31").level == "wrong"
    assert doctor.check_version("6.0.0").level == "ok"


def test_doctor_shows_the_outputs_of_a_dead_worker(shell: Shell, client: Client) -> None:
    """Also if no consumer of its queue lives."""
    client.queue("in").push(1)
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    hidden = {"q": "~handover:in", "when": datetime.now(UTC) - timedelta(minutes=1)}
    mark = {"to": "out", "source": "source", "token": "t"}
    copy = {**hidden, "_id": "copy", "due": long_ago, "payload": "x", "handover": mark}
    source = {**hidden, "_id": "source", "when": datetime(1970, 1, 1, tzinfo=UTC)}
    source |= {"handed": [{"h": "t", "ids": ["copy"]}], "ended": {"token": "t", "at": long_ago}}
    collection = client.database[client.namespace]
    collection.insert_many([copy, source])
    for text in ("finished or cleaned up", "none is left over"):
        status, out, _ = shell.run("doctor", "--json", "--signals", "none:")
        assert status == 0
        [finding] = [
            each for each in map(json.loads, out.splitlines()) if each["check"] == "handovers"
        ]
        assert text in finding["text"]
    assert [each.payload for each in client.queue("out").peek()] == ["x"]
    assert collection.count_documents({"q": "~handover:in"}) == 0


def test_doctor_looks_at_gathers(shell: Shell, client: Client) -> None:
    """Also if no worker runs. Only the first gather needs its index."""
    with client.gather(To("report", "done")) as g:
        client.queue("in").push(1, gather=g)
    collection = client.database[client.namespace]

    def found(check: str) -> tuple[str, str]:
        (finding,) = [each for each in shell.json("doctor") if each["check"] == check]
        return finding["level"], finding["text"]

    assert found("gathers") == ("ok", "1 open")
    assert "gathers" in found("indexes")[1]
    looks = runner_of(client).open().looks
    eventually(lambda: not looks.pending, "the look after the seal")
    client.queue("in").purge()
    collection.update_one({"_id": g.id}, {"$set": {"when": datetime(2020, 1, 1, tzinfo=UTC)}})
    assert found("gathers") == ("ok", "0 open; 1 ended just now")
    assert [each.payload for each in client.queue("report").peek()] == ["done"]


def test_doctor_names_and_deletes_unused_queues(shell: Shell, client: Client) -> None:
    for name in (*"abcdef", "used"):
        client.queue(name, auto_delete=60).push(1)
        client.queue(name).purge()
    collection = client.database[client.namespace]

    def found() -> tuple[str, str]:
        (finding,) = [each for each in shell.json("doctor") if each["check"] == "unused queues"]
        return finding["level"], finding["text"]

    left = "deleted once they are unused and empty"
    assert found() == ("ok", f"{left}: 'a', 'b', 'c', 'd', 'e' and more")
    past = datetime(2020, 1, 1, tzinfo=UTC)
    match = {"_id": {"$regex": "^~used:.$"}}
    collection.update_many(match, {"$set": {"used": past, "when": past}})
    deleted = "deleted just now: 'a', 'b', 'c', 'd', 'e' and more"
    assert found() == ("ok", f"{deleted}; {left}: 'used'")
    assert [each.name for each in client.queues()] == ["used"]
    client.reshape("used", auto_delete=False)
    collection.update_many({"_id": "~used:used"}, {"$set": {"when": past}})
    assert found() == ("ok", "no queue has auto_delete")


# ---- clocks


def test_doctor_compares_its_clock_with_the_primary() -> None:
    finding = doctor.check_clock(lambda: {"localTime": datetime.now(UTC) + timedelta(seconds=3)})
    assert finding.level == "advice"
    assert "ahead of this machine's" in finding.text


def test_doctor_compares_the_clocks_of_members(mongod: Mongod) -> None:
    offsets = iter([-1.0, 2.0])
    hello = {"hosts": ["one:1"], "passives": ["two:2"]}
    finding = doctor.check_member_clocks(mongod.url, hello, lambda hello: next(offsets))
    assert finding.level == "wrong"
    assert finding.text.startswith("3.000 s between the 2 members")


def test_doctor_asks_each_member_for_its_clock(mongod: Mongod) -> None:
    hosts = [f"127.0.0.1:{mongod.port}", f"localhost:{mongod.port}"]
    finding = doctor.check_member_clocks(mongod.url, {"hosts": hosts})
    assert finding.level == "ok"
    assert finding.text.endswith("between the 2 members")


@pytest.mark.usefixtures("impatient")
def test_doctor_names_a_silent_member(mongod: Mongod, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MEMBER_TIMEOUT_S", 0.1)
    hosts = [f"127.0.0.1:{mongod.port}", "127.0.0.1:1"]
    finding = doctor.check_member_clocks(mongod.url, {"hosts": hosts})
    assert finding.level == "wrong"
    assert "no answer from " in finding.text
    assert "127.0.0.1:1:" in finding.text


@pytest.mark.parametrize(
    ("url", "scheme"),
    [("mongodb+srv://u:s3cret@shop.example", "mongodb+srv"), (None, "this target")],
)
def test_doctor_needs_a_plain_url_for_members(url: str | None, scheme: str) -> None:
    finding = doctor.check_member_clocks(url, {"hosts": ["one:1", "two:2"]})
    assert (finding.level, finding.text) == ("advice", f"not measured for {scheme}")


# ---- servers that refuse or disappear


def test_doctor_shows_what_the_server_refuses(shell: Shell, client: Client) -> None:
    """The namespace is a view, which takes no writes. The later checks run all the same."""
    client.database.command("create", "seen", viewOn="elsewhere", pipeline=[])
    status, out, errors = shell.run("doctor", "--json", "--signals", "none:", "--namespace", "seen")
    assert (status, errors) == (1, "")
    found = {each["check"]: each for each in map(json.loads, out.splitlines())}
    assert found["write concern"]["level"] == "wrong"
    assert "view" in found["write concern"]["text"]
    assert found["parameters"]["level"] == "ok"


@pytest.mark.usefixtures("impatient")
def test_doctor_goes_on_when_the_server_disappears(
    mongod: Mongod, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(mongod.port) as proxy:
        url = f"mongodb://127.0.0.1:{proxy.port}/gone?directConnection=true"
        client = Client(url, owner=None)
        findings = doctor.findings(client, "none:")
        assert next(findings).level == "ok"
    monkeypatch.setattr(doctor, "CONNECT_TIMEOUT_S", 0.05)
    with closing(client):
        rest = {each.check: each.level for each in findings}
    assert rest["permission"] == rest["write concern"] == rest["clock"] == "wrong"
    assert rest["kind"] == rest["bus"] == "ok"  # they need no further answer


# ---- the bus, the parameters


def test_doctor_finds_an_unreachable_bus(client: Client) -> None:
    finding = doctor.check_bus(client, "redis://127.0.0.1:1/0")
    assert finding.level == "wrong"
    assert finding.text.startswith("redis")


def test_doctor_finds_an_unknown_bus(client: Client) -> None:
    assert doctor.check_bus(client, "pigeon:").level == "wrong"


def test_doctor_judges_parameters(client: Client) -> None:
    name = "transactionLifetimeLimitSeconds"
    too_short = {name: (lambda value: value > 1_000_000, "it is too short")}
    finding = doctor.check_parameters(client.database, too_short)
    assert (finding.level, finding.text.partition(":")[0]) == ("advice", f"{name}=60")
    is_good, _ = doctor.PARAMETERS[name]
    assert (is_good(20), is_good(60)) == (False, True)


def test_doctor_skips_unknown_parameters(client: Client) -> None:
    """Another version of the server may not know a parameter."""
    finding = doctor.check_parameters(client.database, {"noSuchParameter": (bool, "")})
    assert (finding.level, finding.text) == ("ok", "none to check")
