"""Credentials appear nowhere: logs, errors, reprs, pickles, output of commands, server status."""

from __future__ import annotations

import asyncio
import logging
import pickle
import traceback
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from anyio.from_thread import start_blocking_portal
from bson import json_util
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import signals
from pyqueue import AsyncClient, Client, ConfigurationError, Pipeline, QueueError, Worker
from pyqueue.cli import app
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
from tests.contract.portal import PortalClient
from tests.hostile.conftest import ABANDONED
from tests.hostile.servers import Secure
from tests.support.eventually import eventually, waiters
from tests.support.samples import sampled
from tests.support.servers import RedisServer

pytestmark = [
    pytest.mark.filterwarnings(ABANDONED),
    pytest.mark.usefixtures("collected", "impatient"),
]

#: They occur in no other text.
USER, PASSWORD, REDIS = "u5erQx", "mong0Qx/secret@:%", "redi5Qx#secret?"
TOKENS = ("u5erQx", "mong0Qx", "redi5Qx")
NOBODY = f"mongodb://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1:1/shop"


def clean(*texts: str) -> None:
    """Check that no text contains a credential."""
    for text in texts:
        for token in TOKENS:
            before, found, after = text.partition(token)
            assert not found, f"{before[-200:]}{found}{after[:100]}"


def texts_of(error: BaseException) -> list[str]:
    """Return all texts of an error and of the errors behind it."""
    texts = ["".join(traceback.format_exception(error))]
    chain: BaseException | None = error
    while chain is not None:
        texts += [str(chain), repr(chain), repr(vars(chain))]
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return texts


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Check that no log, of any logger and level, contains a credential."""
    caplog.set_level(logging.DEBUG)
    drivers = ("pymongo", "pymongo.command", "pymongo.connection", "asyncio", "redis")
    for name in ("pyqueue", "signals", *drivers):
        caplog.set_level(logging.DEBUG, logger=name)
    yield
    records = caplog.get_records("call")
    assert len(records) > 10
    clean(*(logging.Formatter("%(message)s").format(record) for record in records))


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", REDIS)
    yield server.port
    server.kill()


@pytest.fixture
def url(secured: Secure, database: str) -> str:
    """The URL of a server that accepts the credentials."""
    secured.user(database, USER, PASSWORD, "readWrite")
    return secured.url(USER, PASSWORD, database)


def redis_url(port: int, password: str = REDIS) -> str:
    return f"redis://{USER}:{quote(password, safe='')}@127.0.0.1:{port}/0"


# ---- calls that work, and calls that fail


def use(client: Any) -> list[str]:
    """Use a client. Return all that it and its queue show of themselves."""
    queue = client.queue("a")
    queue.push(1)
    held = queue.reserve(5)
    assert held is not None
    bus = runner_of(client).open().bus
    shown = [repr(held), repr(pickle.dumps(held)), repr(pickle.dumps(backend_of(queue)))]
    shown += [repr(bus), str(bus), repr(client.stats), repr(client), str(client), repr(queue)]
    queue.commit(held)
    return shown


def build(client: Client | AsyncClient) -> list[str]:
    """Return all that a worker and a pipeline of a client show of themselves."""
    pipeline = Pipeline(client).link("a", print, to="b")
    return [repr(Worker(client)), repr(pipeline), pipeline.show()]


@pytest.mark.usefixtures("logged")
@pytest.mark.parametrize("bus", ["capped:", "redis"])
def test_credentials_are_hidden_while_it_works(url: str, redis_port: int, bus: str) -> None:
    if bus == "redis":
        bus = f"redis://:{quote(REDIS, safe='')}@127.0.0.1:{redis_port}/0"
    options: dict[str, Any] = {"signals": bus}
    with Client(url, **options) as client:
        clean(*use(client), *build(client))
    with start_blocking_portal() as portal:
        other = AsyncClient(url, **options)
        try:
            clean(*use(PortalClient(portal, other)), *build(other))
        finally:
            portal.call(other.close)
    for value in (Client(url), AsyncClient(url), Client(url).queue("a")):
        with pytest.raises(ConfigurationError) as caught:
            pickle.dumps(value)  # its connection is this process's
        clean(*texts_of(caught.value))


def failing(
    url: str, redis_port: int, secured: Secure, database: str
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return targets that fail, each with options of the client."""
    stranger = str(secured.stranger.ca)
    return {
        "no server": (NOBODY, {}),
        "wrong password": (secured.url(USER, PASSWORD + "x", database), {}),
        "unknown user": (secured.url(USER + "x", PASSWORD, database), {}),
        "wrong authority": (secured.url(USER, PASSWORD, database, tlsCAFile=stranger), {}),
        "not permitted": (secured.url(USER, PASSWORD, f"{database}y", authSource=database), {}),
        "wrong replica set": (secured.url(USER, PASSWORD, database, replicaSet="another"), {}),
        "no Redis": (url, {"signals": redis_url(1)}),
        "wrong password of Redis": (url, {"signals": redis_url(redis_port, REDIS + "x")}),
        "no bus": (url, {"signals": f"rabbit://{USER}:{REDIS}@127.0.0.1/"}),
        "no URL of Redis": (url, {"signals": f"redis://{USER}:{REDIS}/@x[127.0.0.1:port/"}),
    }


KINDS = (
    *("no server", "wrong password", "unknown user", "wrong authority", "not permitted"),
    *("wrong replica set", "no Redis", "wrong password of Redis", "no bus", "no URL of Redis"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_credentials_are_hidden_when_it_fails(
    url: str,
    redis_port: int,
    secured: Secure,
    database: str,
    kind: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    target, options = failing(url, redis_port, secured, database)[kind]
    with (
        pytest.raises(QueueError) as caught,
        Client(target, command_timeout=0.3, **options) as client,
    ):
        client.queue("a").push(1)

    async def main() -> None:
        async with AsyncClient(target, command_timeout=0.3, **options) as client:
            await client.queue("a").push(1)

    with pytest.raises(QueueError) as other:
        asyncio.run(main())
    clean(*texts_of(caught.value), *texts_of(other.value))
    clean(*(logging.Formatter("%(message)s").format(record) for record in caplog.records))


@asynccontextmanager
async def opened_bus(place: str) -> AsyncIterator[Any]:
    bus = signals.open_async(place)
    try:
        yield bus
    finally:
        await bus.close()


def test_broken_bus_logs_no_password(redis_port: int, caplog: pytest.LogCaptureFixture) -> None:
    """Buses without a client are not checked; they complain to the log."""
    caplog.set_level(logging.DEBUG)
    bus: Any
    with closing(signals.open(redis_url(1))) as bus:
        with bus.listen("a") as listener:
            bus.emit("a", None)
            listener.wait(0.1)
        with pytest.raises(signals.BusError) as caught:
            bus.check()
        with pytest.raises(signals.BusError):
            pickle.dumps(bus)
        clean(*texts_of(caught.value), repr(bus), str(bus), repr(bus.stats), repr(listener))

    async def main() -> None:
        async with opened_bus(redis_url(redis_port, REDIS + "x")) as bus:
            async with bus.listen("a") as listener:
                bus.emit("a", None)
                await listener.wait(0.1)
            with pytest.raises(signals.BusError) as caught:
                await bus.check()
            clean(*texts_of(caught.value), repr(bus), str(bus), repr(listener))

    asyncio.run(main())
    assert any(record.name == "signals" for record in caplog.records)
    clean(*(logging.Formatter("%(message)s").format(record) for record in caplog.records))


# ---- invalid URLs


SCHEMES = ["mongodb://", "mongodb:/", "mongodb:", "MongoDB://", "mongo://", "http://", "//", ""]
MARKS = st.text(st.sampled_from("/?#[]@:%&= \t\\.,;é\x00"), max_size=2)
HOSTS = [
    *("127.0.0.1:1", "127.0.0.1:x", "[::1", "", "127.0.0.1:1,127.0.0.1:99999", "/nowhere.sock")
]
ENDS = ["/shop", "", "/", "/sh op", "/shop?tls=maybe", "/shop?replicaSet", "/shop?w=&&"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SCHEMES), MARKS, MARKS, st.sampled_from(HOSTS), st.sampled_from(ENDS))
def test_invalid_url_is_not_shown(
    scheme: str, before: str, after: str, host: str, rest: str
) -> None:
    """Without quoting, any part of a password may end up as a host, a port or an option."""
    url = f"{scheme}u:{before}mong0Qx{after}@{host}{rest}"
    for kind in (Client, AsyncClient):
        try:
            client = kind(url)
            clean(repr(client))
            runner_of(client).open()  # parses it
        except QueueError as error:
            clean(*texts_of(error))
        except UserWarning as warning:  # from PyMongo, about an unknown option
            clean(str(warning))
        else:
            closing: Any = client.close()
            if closing is not None:
                asyncio.run(closing)


# ---- the command line


COMMANDS = [
    ["push", "a", "1", "--json"],
    ["ls", "--json"],
    ["pop", "a"],
    ["move", "a", "b"],
    ["purge", "a", "--yes", "--json"],
    ["pause", "a"],
    ["trace", "x"],
    ["doctor"],
    ["doctor", "--json"],
]
#: The commands that are also tried with a wrong password for the bus.
HEARING = ("push", "doctor")


def output(arguments: list[str], **env: str) -> tuple[int, str]:
    result = CliRunner(env=env).invoke(app, arguments, input="1\n")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout + result.stderr


@pytest.mark.parametrize("command", sampled(COMMANDS, few=4), ids=lambda command: " ".join(command))
def test_commands_print_no_password(
    url: str,
    secured: Secure,
    database: str,
    redis_port: int,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong = secured.url(USER, PASSWORD + "x", database)
    with Client(url) as client:
        client.queue("a").push(1)  # commands refuse a queue that does not exist
    status, text = output(command, PYQUEUE_URL=url)
    assert status in (0, 1), text
    clean(text)
    if command[0] in HEARING:
        wrong_bus = redis_url(redis_port, "redi5Qx-wrong")
        status, text = output(command, PYQUEUE_URL=url, PYQUEUE_SIGNALS=wrong_bus)
        assert status == (1 if command[0] == "doctor" else 2)
        clean(text)
    for target, reach in ((NOBODY, 0.1), (wrong, 5)):
        monkeypatch.setattr("pyqueue.cli.common.CONNECT_TIMEOUT_S", reach)
        monkeypatch.setattr("pyqueue.cli.doctor.CONNECT_TIMEOUT_S", reach)
        status, text = output([*command, "--url", target])
        assert status == (1 if command[0] == "doctor" else 2)
        assert text.count("\n") == 1
        clean(text)
    clean(output([*command, "--help"], PYQUEUE_URL=url, PYQUEUE_SIGNALS=redis_url(redis_port))[1])


def test_pipeline_commands_print_no_password(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYQUEUE_URL", "")  # the command's setting goes with the test
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "pyqueue")
    (tmp_path / "x.toml").write_text('[[stages]]\nqueue = "a"\nhandler = "builtins:print"\n')
    commands = (
        ["pipeline", "run", "x.toml", "--until-empty"],
        ["pipeline", "show", "x.toml", "--json"],
    )
    for arguments in commands:
        status, text = output([*arguments, "--url", url])
        assert status == 0, text
        clean(text)
    monkeypatch.setattr("pyqueue.cli.common.CONNECT_TIMEOUT_S", 0.1)
    for arguments in commands:
        status, text = output([*arguments, "--url", NOBODY])
        assert status == 2
        clean(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls", NOBODY],
        [NOBODY],
        ["ls", "--namespace", NOBODY],
        ["push", "a", "1", "--header", NOBODY],
        ["push", NOBODY, "1"],
        ["trace", NOBODY, "--url", "nowhere"],
        ["pop", "a", "--limit", NOBODY],
        ["pipeline", "show", NOBODY],
        ["pipeline", "show", "x.toml", "--format", NOBODY],
        ["worker", NOBODY],
        ["move", "a", NOBODY, "--url", "nowhere"],
        ["ls", "--url", "mongodb:/" + NOBODY],
        ["ls", "--signals", NOBODY],
    ],
    ids=lambda arguments: " ".join(arguments).replace(NOBODY, "URL"),
)
def test_misplaced_url_is_not_printed(arguments: list[str]) -> None:
    status, text = output(arguments, COLUMNS="2000")
    assert status == 2
    clean(text)


# ---- output of the server


def test_server_shows_the_user_but_no_password(secured: Secure, url: str, database: str) -> None:
    """Operations, plans and profiles of our clients show no credentials."""
    admin = secured.admin
    admin[database].command("profile", 2)
    with Client(url, signals="capped:") as client, ThreadPoolExecutor(1) as pool:
        queue = client.queue("a", poll=600)
        waiting = pool.submit(queue.reserve, 60)
        eventually(lambda: waiters(client, "a") == 1)
        shown: list[dict[str, Any]] = []

        def ours() -> set[Any]:
            everything = {"allUsers": True, "idleConnections": True, "idleSessions": True}
            shown[:] = admin.admin.aggregate([{"$currentOp": everything}])
            mine = [each for each in shown if each.get("ns", "").startswith(f"{database}.")]
            return {each.get("appName") for each in mine}

        eventually(lambda: ours() == {"pyqueue"})  # it is idle between two waits for signals
        plan = client.database["pyqueue"].find({"q": "a"}).explain()
        queue.push(1)
        held = waiting.result(60)
        assert held is not None
        queue.commit(held)
    profiled = list(admin[database]["system.profile"].find())
    assert {each["command"].get("comment") for each in profiled} == {None}
    assert len(profiled) > 5
    # MongoDB shows the name of the user to administrators.
    texts = [json_util.dumps(shown), json_util.dumps(plan, default=str), json_util.dumps(profiled)]
    clean(*(text.replace(USER, "") for text in texts))
