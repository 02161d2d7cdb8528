"""The roles of docs/how-to/least-privileges.md are enough, and every action in them is needed.

These tests run on a mongod that asks for passwords.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import httpx2
import pytest
from pymongo import MongoClient

from pyqueue import AsyncClient, Client, ConfigurationError, Many, QueueError, To, Worker
from pyqueue.backends import indexes
from pyqueue.runtime.connecting import runner_of
from pyqueue.spark import QueueDataSource
from pyqueue.spark.columns import columns
from pyqueue.telemetry.storing import SUFFIXES, live_workers
from pyqueue.web import Dashboard
from pyqueue.web.audit import AUDIT
from tests.docs.pages import blocks, prose
from tests.support.eventually import eventually
from tests.support.samples import some_or_all, spread
from tests.support.servers import mongod_process

PAGE = "docs/how-to/least-privileges.md"
Mongo = MongoClient[dict[str, Any]]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mongo]:
    """The administrator's connection to a mongod that asks for passwords."""
    with mongod_process(tmp_path_factory.mktemp("guarded"), "--auth") as port:
        # While there is no user, a connection from this machine may create the first one.
        with Mongo("127.0.0.1", port) as first:
            first.admin.command("createUser", "admin", pwd="admin", roles=["root"])
        with Mongo("127.0.0.1", port, username="admin", password="admin") as admin:
            yield admin


def roles() -> dict[str, list[dict[str, Any]]]:
    """Return the privileges of each role on the page."""
    text = "\n".join(each.text for each in blocks(PAGE) if each.language == "javascript")
    found = [json.loads(each) for each in re.findall(r"createRole\((\{.*?\n\})\)", text, re.DOTALL)]
    return {each["role"]: each["privileges"] for each in found}


def statements() -> list[str]:
    text = "\n".join(each.text for each in blocks(PAGE) if each.language == "javascript")
    return [
        line
        for line in text.splitlines()
        if re.search(r"\)\.create(Index|Collection)\(|\.createCollection\(", line)
    ]


def prepare(admin: Mongo, number: int, role: str, privileges: list[dict[str, Any]]) -> str:
    """Make a user that has the role in an empty database. Return the URL."""
    name = f"shop{number}"
    renamed = [each | {"resource": each["resource"] | {"db": name}} for each in privileges]
    admin[name].command("createRole", role, privileges=renamed, roles=[])
    admin[name].command("createUser", "user", pwd="secret", roles=[role])
    host, port = admin.address or ("", 0)
    return f"mongodb://user:secret@{host}:{port}/{name}"


def administer(admin: Mongo, number: int) -> None:
    """Run the commands that the page gives to an administrator."""
    database = admin[f"shop{number}"]
    for name, (keys, options) in indexes.INDEXES.items():
        database["pyqueue"].create_index(keys, name=name, **options)
    database.create_collection("pyqueue.signals", capped=True, size=1048576)


def use(url: str) -> None:
    """Use every operation that needs a different permission."""
    with Client(url, signals="capped:") as client:
        queue, other = client.queue("a", history=60), client.queue("b")
        queue.push_many([1, 2], keys=["a", "b"])
        held = queue.reserve(0)
        assert held is not None
        queue.rollback(held, delay=0)
        with queue.reserved(0) as again:
            assert again is not None
        one = queue.reserve(0)
        assert one is not None
        queue.move(one, to=other, payload=3)
        dead = other.reserve(0)
        assert dead is not None
        other.bury(dead)
        assert client.queue("b.dead").redrive() == 1
        assert other.pop(5) is not None
        queue.pause()
        queue.resume()
        with client.queue("b").claim("group", limit=10) as claim:
            assert not claim.ids
        assert queue.replay(*(each.id for each in queue.history())) == 1
        assert [each.name for each in client.queues()] == ["a", "b", "b.dead"]
        assert queue.pop_many(10, timeout=0)
        assert queue.push(1) is not None
        assert queue.purge() == 1


def suffices(url: str) -> bool:
    try:
        use(url)
    except QueueError:
        return False
    return True


def test_commands_are_those_of_the_code() -> None:
    written = statements()
    expected = [indexes.shell_command("pyqueue", name).strip() for name in indexes.all_indexes()]
    plain = [line.removeprefix('db.getSiblingDB("shop").').replace('"', "'") for line in written]
    of_metrics = [line for line in plain if "expires: 1" in line and "'pyqueue'" not in line]
    options = "{expires: 1}, {name: 'expires', expireAfterSeconds: 0}"
    assert of_metrics == [
        f"getCollection('pyqueue.{suffix}').createIndex({options})" for suffix in (*SUFFIXES, AUDIT)
    ]
    bus = "createCollection('pyqueue.signals', {capped: true, size: 1048576})"
    assert {f"db.{line}" for line in plain if line not in (bus, *of_metrics)} == set(expected)
    assert plain[len(indexes.INDEXES)] == bus
    names = set(re.findall(r"`(\w+)`", prose(PAGE)))
    assert names.issuperset(indexes.all_indexes().keys() - indexes.INDEXES.keys())


def test_missing_credentials_are_named(guarded: Mongo) -> None:
    host, port = guarded.address or ("", 0)
    url = f"mongodb://{host}:{port}/shop"
    with (
        pytest.raises(ConfigurationError, match="target: the server asks for a user name"),
        Client(url, signals="none:"),
    ):
        pass


@pytest.mark.parametrize("role", ["queues", "queues_only"])
def test_gathers_need_no_other_permission(guarded: Mongo, role: str) -> None:
    """A producer and a worker have the role. An administrator may have to create the index."""
    number = 210 if role == "queues" else 211
    url = prepare(guarded, number, role, roles()[role])
    database = guarded[f"shop{number}"]
    database.command("createUser", "worker", pwd="secret", roles=[role])
    if role == "queues_only":
        administer(guarded, number)
    with Client(url, signals="none:") as producer:
        if role == "queues_only":
            refused = pytest.raises(ConfigurationError, match=r"createIndex.*gathers")
            with refused, producer.gather(To("report", "all")):
                raise AssertionError("it began")
            keys, options = indexes.all_indexes()["gathers"]
            database["pyqueue"].create_index(keys, name="gathers", **options)
        with producer.gather(To("report", "all")) as g:
            producer.queue("a").push(2, gather=g)

    def split(number: int) -> Many:
        return Many([To("part", n) for n in range(number)], then=To("report", "parts"))

    done: list[Any] = []
    with Client(url.replace("//user:", "//worker:"), signals="none:") as client:
        pipeline = client.pipeline().choice("a", split, to=["part", "report"])
        pipeline.sink("part", done.append).sink("report", done.append).run(until_empty=True)
    assert (sorted(done[:2]), done[2:]) == ([0, 1], ["parts", "all"])


@some_or_all
@pytest.mark.parametrize("role", ["queues", "queues_only"])
def test_role_is_enough_and_every_action_is_needed(
    guarded: Mongo, role: str, few: int | None
) -> None:
    privileges = roles()[role]
    whole = (0 if role == "queues" else 100) + (1000 if few else 0)
    url = prepare(guarded, whole, role, privileges)
    if role == "queues_only":
        administer(guarded, whole)
    use(url)
    cases = [(place, action) for place, each in enumerate(privileges) for action in each["actions"]]
    kept = spread(len(cases), few or len(cases))
    for number, (place, action) in enumerate([cases[each] for each in kept], whole + 1):
        less = [
            each
            | {"actions": [name for name in each["actions"] if (index, name) != (place, action)]}
            for index, each in enumerate(privileges)
        ]
        url = prepare(guarded, number, role, less)
        if role == "queues_only":
            administer(guarded, number)
        assert not suffices(url), f"{role} does without {action}"


def test_missing_indexes_are_refused_with_the_remedy(guarded: Mongo) -> None:
    url = prepare(guarded, 200, "queues_only", roles()["queues_only"])
    with (
        pytest.raises(ConfigurationError, match="createIndex") as caught,
        Client(url, signals="none:"),
    ):
        pass
    assert statements()[0].split(".", 2)[2].replace('"', "'") in str(caught.value)


def test_missing_signals_permission_only_warns(
    guarded: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    privileges = roles()["queues"][:1]
    with Client(prepare(guarded, 201, "queues", privileges)) as client:
        queue = client.queue("a", poll=0.3)
        queue.push(1)
        assert queue.pop(5) is not None
        assert queue.pop(0.1) is None
        end = time.monotonic() + 10
        while not any(record.name == "signals" for record in caplog.records):
            assert time.monotonic() < end, "the log does not warn"
            with suppress(QueueError):
                queue.pop(0.1)


def count(url: str) -> None:
    """Use everything of telemetry that needs a different permission."""
    with Client(url, signals="none:", telemetry=True) as client:
        queue = client.queue("a")
        queue.push_many(range(3))
        held = queue.reserve(0)
        assert held is not None
        # A try that ends in the millisecond of its claim does not count.
        eventually(lambda: datetime.now(UTC) - held.reserved > timedelta(milliseconds=5))
        queue.rollback(held, error="no")
        telemetry: Any = client._telemetry
        with telemetry.presence.running(Worker(client).on("a", print)):
            telemetry.flush()
        telemetry.flush()
        assert not telemetry.counting.off
        assert telemetry.presence.empty
        assert queue.stats().counts["pushed"] == 3
        run = runner_of(client).run
        run(live_workers(datetime.now(UTC)))


def counts(url: str) -> bool:
    try:
        count(url)
    except (QueueError, AssertionError):
        return False
    return True


@some_or_all
@pytest.mark.parametrize("administered", [False, True])
def test_role_of_metrics_is_enough_and_needed(
    guarded: Mongo, administered: bool, few: int | None
) -> None:
    base, privileges = roles()["queues"], roles()["metrics"]
    if administered:
        privileges = [
            each | {"actions": [name for name in each["actions"] if name != "createIndex"]}
            for each in privileges
        ]

    def url(number: int, some: list[dict[str, Any]]) -> str:
        found = prepare(guarded, number, "metrics", [*base, *some])
        if administered:
            for suffix in SUFFIXES:
                guarded[f"shop{number}"][f"pyqueue.{suffix}"].create_index(
                    [("expires", 1)], name="expires", expireAfterSeconds=0
                )
        return found

    whole = (400 if administered else 300) + (1000 if few else 0)
    count(url(whole, privileges))
    cases = [(place, action) for place, each in enumerate(privileges) for action in each["actions"]]
    kept = spread(len(cases), few or len(cases))
    for number, (place, action) in enumerate([cases[each] for each in kept], whole + 1):
        less = [
            each
            | {"actions": [name for name in each["actions"] if (index, name) != (place, action)]}
            for index, each in enumerate(privileges)
        ]
        assert not counts(url(number, less)), f"it does without {action} on {place}"


def test_missing_metrics_permission_only_warns(
    guarded: Mongo, caplog: pytest.LogCaptureFixture
) -> None:
    url = prepare(guarded, 500, "queues", roles()["queues"])
    with Client(url, telemetry=True) as client:
        telemetry: Any = client._telemetry
        for number in range(3):
            client.queue("a").push(number)
            telemetry.flush()
        assert client.queue("a").counts().total == 3
    told = [each.getMessage() for each in caplog.records if "telemetry" in each.getMessage()]
    assert len(told) == 1
    assert "is off, because the database user may not store it" in told[0]
    assert "least-privileges" in told[0]


def test_role_of_the_dashboard_is_enough(guarded: Mongo) -> None:
    url = prepare(guarded, 600, "dashboard", [*roles()["queues"], *roles()["dashboard"]])

    async def work() -> list[int]:
        async with AsyncClient(url) as client:
            await client.queue("a").push(1)
            app: Any = Dashboard(client, allow=lambda request, action, queue: True)
            transport = httpx2.ASGITransport(app=app)
            own = {"sec-fetch-site": "same-origin"}
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
                acted = await http.post("/act/pause", data={"queue": "a"}, headers=own)
                pages = [await http.get(path) for path in ("/", "/errors", "/workers", "/audit")]
                assert "paused" in pages[-1].text
                return [each.status_code for each in (acted, *pages)]

    assert asyncio.run(work()) == [303, 200, 200, 200, 200]


def test_role_read_reads_a_table_of_spark(guarded: Mongo) -> None:
    """A read writes nothing."""
    administer(guarded, 90)
    host, port = guarded.address or ("", 0)
    with Client(f"mongodb://admin:admin@{host}:{port}/shop90?authSource=admin") as client:
        client.queue("a").push(1)
    guarded["shop90"].command("createUser", "reader", pwd="secret", roles=["read"])
    uri = f"mongodb://reader:secret@{host}:{port}/shop90"
    reader = QueueDataSource({"uri": uri, "queue": "a"}).reader(columns(None))
    (part, *_) = reader.partitions()
    (rows,) = cast("Any", reader).read(part)
    assert rows.column("payload").to_pylist() == ["1"]
