"""Who may see and do what: the table of routes, ``allow``, hosts, origins, the password."""

from __future__ import annotations

import base64
import re
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route

from pyqueue import AsyncClient, Client, ConfigurationError
from pyqueue.web import Dashboard
from pyqueue.web.acting import ACTIONS
from pyqueue.web.app import OPEN, PAGES
from pyqueue.web.exporting import FORMATS
from tests.web.world import OWN, Pages, World

#: Values for the parameters of paths.
NAMES = {"{name}": "orders", "{id:path}": "orders", "{path:path}": "nothing"}


class Gate:
    """An ``allow`` that notes the questions.

    Args:
        yes: The actions that it allows.
    """

    def __init__(self, *yes: str) -> None:
        self.yes = yes
        self.asked: list[tuple[str, str | None]] = []

    async def __call__(self, request: Request, action: str, queue: str | None) -> bool:
        assert request.headers["host"] == "localhost"
        self.asked.append((action, queue))
        return action in self.yes


def routes(dashboard: Dashboard) -> list[tuple[str, str, str]]:
    """Return the method, the template and an example of each route."""
    found = []
    for each in dashboard.routes:
        assert isinstance(each, Route)
        path = each.path
        for name, value in NAMES.items():
            path = path.replace(name, value)
        assert each.methods is not None
        found.append(("POST" if "POST" in each.methods else "GET", each.path, path))
    return found


def request(pages: Pages, method: str, path: str) -> Any:
    form = {"queue": "orders", "id": "x"} if method == "POST" else None
    return pages.send(method, path, data=form, headers=OWN)


def test_routes_are_those_that_are_known(pages: Pages) -> None:
    known = {("GET", path) for path in PAGES} | {
        ("GET", f"/json{path.rstrip('/')}") for path in PAGES
    }
    known |= {("GET", f"/q/{{name}}/export.{ending}") for ending in FORMATS}
    known |= {("POST", f"/act/{action}") for action in ACTIONS}
    known |= {("GET", path) for path in (*OPEN, "/find", "/live", "/metrics", "/{path:path}")}
    assert {(method, path) for method, path, _ in routes(pages.dashboard)} == known


def test_every_route_asks_before_it_does_anything(shop: World) -> None:
    gate = Gate()
    pages = shop.pages(allow=gate)
    before = dict(shop.client.stats)
    for method, template, path in routes(pages.dashboard):
        if template in OPEN:
            continue
        gate.asked.clear()
        response = request(pages, method, path)
        assert response.status_code == 403, path
        assert "data-live" not in response.text, path
        expected: tuple[str, str | None] = ("view", "orders" if "{name}" in template else None)
        if method == "POST":
            expected = (path.removeprefix("/act/"), "orders")
        elif path == "/metrics":
            expected = ("metrics", None)
        assert gate.asked == [expected], path
    assert dict(shop.client.stats) == before, "a command was sent"


def test_open_routes_ask_nothing_and_tell_nothing(shop: World) -> None:
    gate = Gate()
    pages = shop.pages(allow=gate, password="pw")
    for path in ("/static/dashboard.css", "/static/dashboard.js", "/health/live", "/health/ready"):
        response = pages.send("GET", path, headers={"host": "10.0.0.7:8080"})
        assert response.status_code == 200
        assert "orders" not in response.text
    assert pages.send("GET", "/static/x.css").status_code == 404
    assert gate.asked == []


@pytest.mark.parametrize("options", [{}, {"allow": None}, {"allow": "everyone"}])
def test_dashboard_without_allow_is_refused(world: World, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="allow: expected a function"):
        Dashboard(world.client, **options)


def test_arguments_are_checked(world: World) -> None:
    blocking: Any = Client("memory:")
    with pytest.raises(ConfigurationError, match="client: expected an AsyncClient, found Client"):
        Dashboard(blocking, allow="anyone")
    for name in ("hosts", "secrets"):
        wrong: Any = {name: "abc"}
        with pytest.raises(ConfigurationError, match=f"{name}: expected a list"):
            Dashboard(world.client, allow="anyone", **wrong)
    with pytest.raises(ConfigurationError, match="password: expected a text"):
        Dashboard(world.client, allow="anyone", password="")
    number: Any = 1
    with pytest.raises(ConfigurationError, match="writable: "):
        Dashboard(world.client, allow="anyone", writable=number)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("hosts", 5, "expected a list of str, found int; use"),
        ("hosts", [5], "expected a list of str, found int; use"),
        ("secrets", [b"pin"], "expected a list of str, found bytes; use"),
        ("password", 5, "expected a text, found int; set a long password"),
        ("who", "me", "expected a function, found str; pass a function, or None"),
        ("redact", {"pin": "***"}, "expected a function, found dict; pass a function, or None"),
        ("label", None, "expected a str, found NoneType; pass a word"),
    ],
)
def test_wrong_type_is_refused(world: World, name: str, value: object, said: str) -> None:
    wrong: Any = {name: value}
    with pytest.raises(ConfigurationError, match=f"^{name}: {said}"):
        Dashboard(world.client, allow="anyone", **wrong)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"allow": lambda request, action, queue: True, "writable": False},
        {"allow": lambda request, action, queue: action == "view"},
    ],
)
def test_read_only_dashboard_refuses_every_change(shop: World, options: dict[str, Any]) -> None:
    pages = shop.pages(**options)

    def state() -> list[Any]:
        infos = shop.run(shop.client.queues)
        return [(each.name, each.counts, each.paused) for each in infos]

    before = state()
    for action in ACTIONS:
        pages.act(action, 403, queue="orders", id="x", name="orders", state="ready")
    assert state() == before
    for text in pages.crawl().values():
        assert "/act/" not in text
    assert shop.client.collection("audit").count_documents({}) == 0


def test_hidden_queue_is_in_no_byte(shop: World) -> None:
    async def fill() -> Any:
        hidden = shop.client.queue("hiddenq")
        await shop.client.schedule("hiddenq-cron", queue="hiddenq", every=60)
        await hidden.push_many(["hiddenq-payload"] * 3)
        held = await hidden.reserve(0)
        assert held is not None
        await hidden.move(held, to="orders", payload="from there")
        return held.id

    moved = shop.run(fill)
    dead = shop.bury("hiddenq", 1, ValueError("hiddenq-error"))
    shop.graph("hiddenq", {"hiddenq": ["orders"]})
    shop.graph("seen", {"orders": ["hiddenq", "packs"]})
    shop.report("hider", "hiddenq", in_progress=[{"q": "hiddenq", "id": "hiddenq-id"}])
    shop.flush()
    all_of_it = shop.pages(allow=lambda request, action, queue: True)
    all_of_it.act("pause", queue="hiddenq")

    def allow(request: Request, action: str, queue: str | None) -> bool:
        return queue is None or not queue.startswith("hiddenq")

    pages = shop.pages(allow=allow)
    for path, text in pages.crawl().items():
        assert "hiddenq" not in text, path
    for path in ("/", "/pipelines", "/errors", "/workers", "/schedules", "/audit", f"/m/{moved}"):
        assert "hiddenq" not in str(pages.json(path)), path
    every, some = all_of_it.json("/")["tiles"], pages.json("/")["tiles"]
    assert (every["ready"] - some["ready"], every["dead"] - some["dead"]) == (2, 1)
    assert every["workers"] - some["workers"] == 1
    pages.get("/q/hiddenq", 403)
    for path in (f"/m/{dead}", "/m/nothing"):
        pages.get(path, 404)
    assert "/m/hiddenq" in pages.send("GET", "/find?q=hiddenq").headers["location"]


def test_unknown_hosts_are_refused(world: World) -> None:
    pages = world.pages(hosts=["Queues.example.com:443"])
    for host in ("localhost:8080", "127.0.0.1", "[::1]:80", "queues.example.com"):
        assert pages.send("GET", "/", headers={"host": host}).status_code == 200
    for host in ("evil.example", "localhost.evil.example", "", "[", "x@localhost.evil"):
        response = pages.send("GET", "/", headers={"host": host})
        assert response.status_code == 400
        assert "add it to hosts=" in response.text
    anywhere = world.pages(hosts=["*"])
    assert anywhere.send("GET", "/", headers={"host": "evil.example"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, False),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"origin": "http://localhost"}, True),
        ({"origin": "http://localhost:81"}, False),
        ({"origin": "null"}, False),
        ({"origin": "http://evil.example"}, False),
        ({"origin": "https://public.example"}, True),
    ],
)
def test_only_own_pages_may_change(shop: World, headers: dict[str, str], allowed: bool) -> None:
    pages = shop.pages(allow=lambda request, action, queue: True, hosts=["public.example"])
    response = pages.send("POST", "/act/pause", data={"queue": "orders"}, headers=headers)
    assert response.status_code == (303 if allowed else 403)
    assert shop.run(shop.client.queue("orders").paused) is allowed


def test_forms_are_bounded(pages: Pages) -> None:
    data = b"queue=" + b"x" * 70_000
    kind = {"content-type": "application/x-www-form-urlencoded"}
    wrong = [
        ({**OWN, **kind}, data, 413),
        ({**OWN, "content-type": "application/json"}, b"{}", 415),
        ({**OWN, **kind}, b"queue=\xff", 400),
        ({**OWN, **kind}, b"&".join(b"a=b" for _ in range(101)), 400),
    ]
    for headers, content, status in wrong:
        response = pages.send("POST", "/act/pause", content=content, headers=headers)
        assert response.status_code == status


def test_password_is_asked_for(world: World) -> None:
    pages = world.pages(password="pässword")

    def status(given: str | None) -> int:
        headers = {} if given is None else {"authorization": given}
        return int(pages.send("GET", "/", headers=headers).status_code)

    right = base64.b64encode("me:pässword".encode()).decode()
    assert status(f"Basic {right}") == 200
    for wrong in (None, "Basic", f"Bearer {right}", "Basic !!", "Basic " + "bWU6eA=="):
        assert status(wrong) == 401
    assert "Basic" in pages.send("GET", "/").headers["www-authenticate"]


def test_pages_carry_the_headers_that_protect_them(shop: World) -> None:
    pages = shop.pages()
    for path in ("/", "/q/orders", "/q/none", "/json", "/metrics", "/static/dashboard.js"):
        headers = pages.send("GET", path).headers
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert ("immutable" in headers["cache-control"]) == path.startswith("/static")
    for path, text in pages.crawl().items():
        if not path.startswith("/static") and "/export." not in path:
            assert re.findall(r"<[^>]*\s(?:style|on\w+)=", text) == [], path
            assert len(re.findall("<script", text)) == 1, path


def test_person_is_named_in_the_audit(shop: World) -> None:
    def allow(request: Request, action: str, queue: str | None) -> bool:
        return True

    shop.pages(allow=allow, who=lambda request: "Ann").act("pause", queue="orders")
    shop.pages(allow=allow).act("resume", queue="orders")
    assert [each["who"] for each in shop.client.collection("audit").find({})] == [
        "Ann",
        "127.0.0.1",
    ]


def test_clients_are_not_opened_by_a_dashboard() -> None:
    client = AsyncClient("memory:")
    Dashboard(client, allow="anyone")
    assert client.stats == {}
