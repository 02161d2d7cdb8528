"""A server with TLS and passwords: the documented roles suffice, and failures are reported."""

from __future__ import annotations

import json
import re
import ssl
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from pyqueue import Client, ConfigurationError, Finished, LeaseLost, QueueError, Unavailable
from pyqueue.backends import indexes
from pyqueue.cli import app
from tests.docs.pages import blocks
from tests.docs.test_privileges import roles
from tests.hostile.conftest import ABANDONED
from tests.hostile.servers import Secure, relay
from tests.integration.conftest import connecting
from tests.support.servers import RedisServer

pytestmark = [pytest.mark.filterwarnings(ABANDONED), pytest.mark.usefixtures("collected")]

#: It has every character that a URL must quote.
PASSWORD = "p@ss:w/rd?#[]%&="
both = pytest.mark.parametrize("kind", ["blocking", "async"])


@contextmanager
def connected(kind: str, url: str, **options: Any) -> Iterator[Client]:
    """Yield an open client; an async client has the blocking names."""
    with connecting(kind, url) as connect:
        yield connect(**options)


def refused(kind: str, url: str, words: str, **options: Any) -> QueueError:
    """Return the error of a connection; it names the cause in time and shows no password.

    On a loaded machine, the shortest time-outs may end before the cause is known.
    """
    for timeout in (0.5, 2, 8):
        begun = time.monotonic()
        with (
            pytest.raises(QueueError) as caught,
            connected(kind, url, command_timeout=timeout, **options),
        ):
            pass
        assert time.monotonic() - begun < 30 + timeout  # PyMongo by itself waits longer
        assert "p@ss" not in str(caught.value)
        assert quote(PASSWORD, safe="") not in str(caught.value)
        if re.search(words, str(caught.value)):
            break
    assert re.search(words, str(caught.value))
    return caught.value


def wakes(client: Client) -> None:
    """Check that a push wakes a waiting consumer, long before the poll."""
    queue = client.queue("wakes", poll=600)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.pop, 60)
        while client.stats.get("bus heard", 0) == 0 and not waiting.done():
            client.queue("wakes").push(datetime.now(UTC))
            time.sleep(0.05)
        assert waiting.result(60) is not None


# ---- TLS


@both
def test_client_works_over_tls(secured: Secure, database: str, kind: str) -> None:
    secured.user(database, "shop", PASSWORD, "readWrite")
    with connected(kind, secured.url("shop", PASSWORD, database)) as client:
        queue = client.queue("a")
        queue.push(1)
        [held] = queue.reserve_many(1, timeout=5)
        queue.commit(held)
        wakes(client)


@both
def test_tls_failures_are_reported_in_time(secured: Secure, database: str, kind: str) -> None:
    secured.user(database, "shop", PASSWORD, "readWrite")
    url = secured.url("shop", PASSWORD, database)
    strange = secured.url("shop", PASSWORD, database, tlsCAFile=str(secured.stranger.ca))
    elsewhere = url.replace("@127.0.0.1:", "@localhost:")
    plain = secured.url("shop", PASSWORD, database, tls="", tlsCAFile="")
    for wrong, words in (
        (strange, "certificate verify failed"),
        (elsewhere, "not valid for 'localhost'"),
        (plain, "clos|reset"),
    ):
        assert isinstance(refused(kind, wrong, words), Unavailable)
    error = refused(kind, secured.url("shop", "another", database), "password")
    assert isinstance(error, ConfigurationError)


def test_command_line_works_over_tls(secured: Secure, database: str) -> None:
    secured.user(database, "shop", PASSWORD, "readWrite")
    runner = CliRunner(env={"PYQUEUE_URL": secured.url("shop", PASSWORD, database)})
    assert runner.invoke(app, ["push", "a", "1"]).exit_code == 0
    assert runner.invoke(app, ["pop", "a"]).stdout == "1\n"
    result = runner.invoke(app, ["doctor", "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    levels = {each["check"]: each["level"] for each in map(json.loads, result.stdout.splitlines())}
    assert levels["bus"] == levels["indexes"] == levels["write concern"] == "ok"
    assert set(levels.values()) <= {"ok", "advice"}


# ---- TLS before Redis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory, secured: Secure) -> Iterator[int]:
    """The port of a Redis that requires a password, behind TLS."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD)
    with relay(server.port, secured.trusted.server) as port:
        yield port
    server.kill()


def rediss(port: int, ca: Path, password: str = PASSWORD, host: str = "127.0.0.1") -> str:
    return f"rediss://:{quote(password, safe='')}@{host}:{port}/0?ssl_ca_certs={quote(str(ca))}"


@both
def test_redis_bus_works_over_tls(secured: Secure, redis: int, database: str, kind: str) -> None:
    secured.user(database, "shop", PASSWORD, "readWrite")
    url = secured.url("shop", PASSWORD, database)
    with connected(kind, url, signals=rediss(redis, secured.trusted.ca)) as client:
        wakes(client)
        assert PASSWORD not in repr(client)
    for signals, words in {
        rediss(redis, secured.stranger.ca): "certificate verify failed",
        rediss(redis, secured.trusted.ca, host="localhost"): "not valid for 'localhost'",
        rediss(redis, secured.trusted.ca, "another"): "password",
        f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{redis}/0": "",
    }.items():
        error = refused(kind, url, rf"(?s)^signals: .*{words}", signals=signals)
        assert isinstance(error, ConfigurationError)


# ---- the documented roles


def granted(secured: Secure, database: str, name: str, privileges: list[dict[str, Any]]) -> str:
    """Create the documented role for this database, and a user with it; return the URL."""
    renamed = [each | {"resource": each["resource"] | {"db": database}} for each in privileges]
    secured.admin[database].command("createRole", name, privileges=renamed, roles=[])
    secured.user(database, "shop", PASSWORD, name)
    return secured.url("shop", PASSWORD, database)


def everything(client: Client) -> None:
    """Use every operation of a queue."""
    queue, other = client.queue("a", history=60, max_tries=2), client.queue("b")
    queue.push_many([1, 2, 3, 4], keys=["a", "b", None, None], headers={"h": 1})
    assert queue.push(5, key="a", on_duplicate="replace") is not None
    queue.push("later", delay=60, id="later")
    with queue.reserved(5) as held:
        assert held is not None
        queue.extend(held)
        queue.progress(held, 0.5, "half")
        queue.checkpoint(held, {"page": 1})
    taken = queue.reserve_many(3, timeout=5)
    queue.rollback(taken[0], delay=0, error="once more")
    queue.release(taken[1])
    queue.move(taken[2], to=other, payload="moved", key="k")
    moved = other.reserve(5)
    assert moved is not None
    other.bury(moved, error="bad")
    assert client.queue("b.dead").redrive() == 1
    assert len(other.pop_many(5, timeout=5)) == 1
    again = queue.reserve_many(5, timeout=0)
    queue.commit(*again)
    with pytest.raises(LeaseLost):
        queue.commit(*again)
    finished = queue.history()
    assert queue.replay(finished[0].id) == 1
    assert isinstance(queue.get(finished[1].id), Finished)
    assert queue.counts().scheduled == 1
    assert queue.peek()[0].id == finished[0].id
    assert queue.next_when() is not None
    queue.pause()
    assert queue.paused()
    queue.resume()
    assert queue.remove("later")
    assert queue.purge() == 1
    names = [each.name for each in client.queues()]
    assert names[:3] == ["a", "b", "b.dead"]


def in_transactions(client: Client) -> None:
    """Use sessions, which differ between the two kinds of client."""
    queue = client.queue("t")
    with client.transaction() as session:
        queue.push(1, key="k", session=session)
    held = queue.reserve(5)
    assert held is not None
    client.run_transaction(lambda session: queue.commit(held, session=session))
    assert queue.counts().total == 0


def in_bulk(client: Client) -> None:
    """Use the claims of groups, in the same collection and with the same privileges."""
    queue = client.queue("bulk")
    queue.push_many(range(5))
    with queue.claim("group", limit=3) as claim:
        assert len(claim.ids) == 3
        claim.commit()
    with queue.claim("group", limit=3) as claim:
        claim.rollback()
    assert queue.counts().total == 2


def administer(secured: Secure, database: str) -> None:
    """Run the administrator's commands of the page."""
    text = "\n".join(each.text for each in blocks("docs/how-to/least-privileges.md"))
    made = set(re.findall(r'createIndex\(.*?\{name: "(\w+)"', text))
    assert made.issuperset(indexes.INDEXES)
    for name, (keys, options) in indexes.INDEXES.items():
        secured.admin[database]["pyqueue"].create_index(keys, name=name, **options)
    size = re.findall(r'createCollection\("pyqueue.signals", \{capped: true, size: (\d+)\}\)', text)
    secured.admin[database].create_collection("pyqueue.signals", capped=True, size=int(size[0]))


@pytest.mark.parametrize(
    ("role", "kind"),
    [
        *(("queues", "async"), ("queues_only", "blocking")),
        pytest.param("queues", "blocking", marks=pytest.mark.slow),
        pytest.param("queues_only", "async", marks=pytest.mark.slow),
    ],
)
def test_documented_role_allows_every_operation(
    secured: Secure, database: str, kind: str, role: str
) -> None:
    url = granted(secured, database, role, roles()[role])
    if role == "queues_only":
        administer(secured, database)
    with connected(kind, url) as client:
        everything(client)
        wakes(client)
        in_transactions(client)
    with Client(url) as blocking:
        in_bulk(blocking)
    result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, ["doctor", "--json"])
    found = {each["check"]: each for each in map(json.loads, result.stdout.splitlines())}
    assert {each["level"] for each in found.values()} <= {"ok", "advice"}, found
    assert result.exit_code == 0
    advised = {name for name, each in found.items() if each["level"] == "advice"}
    assert advised <= {
        "parameters",
        "indexes",
        "documents",
        "streams",
        "handovers",
        "gathers",
        "spark",
        "unused queues",
    }


#: For each privilege: an operation that needs it, and the server's name for the command.
NEEDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "find": (lambda queue: queue.peek(), "find"),
    "insert": (lambda queue: queue.push(1), "insert"),
    "update": (lambda queue: queue.reserve(0), "findAndModify"),
    "remove": (lambda queue: queue.purge(), "delete"),
}


@both
@pytest.mark.parametrize("action", NEEDS)
def test_missing_privilege_is_named(secured: Secure, database: str, kind: str, action: str) -> None:
    with Client(secured.admin[database], signals="none:") as client:
        client.queue("a", kind="standard").push_many([1, 2])
    [first, *_] = roles()["queues"]
    less = first | {"actions": [each for each in first["actions"] if each != action]}
    url = granted(secured, database, "queues", [less])
    call, word = NEEDS[action]
    with connected(kind, url, signals="none:") as client:
        with pytest.raises(ConfigurationError) as refusal:
            call(client.queue("a"))
        text = str(refusal.value)
        assert text.startswith("the database user is not permitted to do this; grant it find, ")
        assert f"not authorized on {database} to execute command {{ {word}:" in text
    result = CliRunner(env={"PYQUEUE_URL": url}).invoke(app, ["doctor", "--signals", "none:"])
    if action in ("find", "remove"):  # the doctor writes nothing, so it misses the rest
        assert result.exit_code == 1
        assert "this user may not do that; see docs/how-to/least-privileges.md" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr


def test_documented_url_works(secured: Secure, database: str) -> None:
    """The URL of the page, with the address of this server."""
    text = (Path(__file__).parents[2] / "docs/how-to/least-privileges.md").read_text()
    [url] = re.findall(r"^mongodb://.*tlsCAFile=.*$", text, re.MULTILINE)
    secured.user(database, "queues", "secret", "readWrite")
    here = re.sub(r"@[^/]+/\w+", f"@127.0.0.1:{secured.port}/{database}", url)
    here = re.sub(r"tlsCAFile=[^&]+", f"tlsCAFile={quote(str(secured.trusted.ca), safe='')}", here)
    with Client(here.replace("replicaSet=rs0", "replicaSet=secure")) as client:
        client.queue("a").push(1)


def test_authorities_sign_different_certificates(secured: Secure) -> None:
    """Without two different authorities, no test would show that certificates are verified."""
    for mine, other in ((secured.trusted, secured.stranger), (secured.stranger, secured.trusted)):
        ssl.create_default_context(cafile=str(mine.ca)).load_cert_chain(mine.server)
        assert mine.ca.read_text() != other.ca.read_text()
