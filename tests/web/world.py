"""A namespace in memory, and requests to a dashboard on it, in one event loop."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from html import unescape
from typing import Any, TypeVar

import httpx2
from anyio.from_thread import BlockingPortal
from starlette.types import ASGIApp

from pyqueue import AsyncClient
from pyqueue.web import Dashboard

T = TypeVar("T")
#: The header of a form that a page of the dashboard sends.
OWN = {"sec-fetch-site": "same-origin"}
#: Texts that would run, break a page or a filter, if one of them were not escaped.
HOSTILE = (
    "<script>alert('x')</script>",
    "'\"><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:alert(1)//</textarea></title></style>",
    "\u202e\u0000\ud7ff\uffff\u2028 & &amp; <!--",
)


class World:
    """A namespace in memory, or in the database of a URL."""

    def __init__(self, portal: BlockingPortal, url: str = "memory:") -> None:
        self._portal = portal
        self.client = AsyncClient(url, telemetry=True, owner="me")

    def run(self, call: Callable[..., Awaitable[T]], *arguments: Any, **options: Any) -> T:
        """Await a call in the event loop of the client."""
        return self._portal.call(partial(call, *arguments, **options))

    def flush(self) -> None:
        """Store the figures."""
        telemetry: Any = self.client._telemetry
        self.run(telemetry.flush)

    def bury(self, queue: str, payload: Any, error: BaseException | str) -> Any:
        """Push a message, and let it die. Return its id."""

        async def work() -> Any:
            orders = self.client.queue(queue)
            id = await orders.push(payload)
            held = await orders.reserve_id(id)
            assert held is not None
            await orders.bury(held, error=error)
            return id

        return self.run(work)

    def report(self, name: str, queue: str, **fields: Any) -> None:
        """Store that a worker runs."""
        now = datetime.now(UTC)
        worker = {"_id": name, "kind": "worker", "name": name, "beat": now, "every": 5.0}
        worker |= {"stages": [{"q": queue}], "messages": 0, "in_progress": [], "started": now}
        worker |= {"host": "h1", "pid": 1, "version": "1.0", "owner": name, "memory": 2**26}
        self.client.collection("workers").insert_one(
            {**worker, "expires": now + timedelta(hours=1), **fields}
        )

    def graph(self, name: str, stages: dict[str, list[str]]) -> None:
        """Store the graph of a pipeline: the targets of each queue."""
        listed = [{"q": each, "to": to, "handler": "work"} for each, to in stages.items()]
        graph = {"_id": f"graph {name}", "kind": "graph", "name": name, "stages": listed}
        expires = datetime.now(UTC) + timedelta(days=7)
        self.client.collection("workers").insert_one({**graph, "expires": expires})

    def pages(self, **options: Any) -> Pages:
        """Return requests to a new dashboard, which anyone may view."""
        dashboard = Dashboard(self.client, **{"allow": "anyone", **options})
        return Pages(self, dashboard, dashboard)


class Pages:
    """Requests to a dashboard.

    Args:
        world: The namespace.
        dashboard: The dashboard.
        app: The app that gets the requests: the dashboard, or an app that mounts it.
        root: Where it is mounted.
    """

    def __init__(self, world: World, dashboard: Dashboard, app: ASGIApp, root: str = "") -> None:
        self.world, self.dashboard = world, dashboard
        self._app, self.root = app, root

    def send(self, method: str, path: str, **options: Any) -> httpx2.Response:
        """Send a request."""

        async def work() -> httpx2.Response:
            app: Any = self._app
            transport = httpx2.ASGITransport(app=app)
            url = "http://localhost"
            async with httpx2.AsyncClient(transport=transport, base_url=url) as http:
                return await http.request(method, self.root + path, **options)

        return self.world.run(work)

    def get(self, path: str, status: int = 200) -> str:
        """Return the text of a page."""
        response = self.send("GET", path)
        assert response.status_code == status, response.text
        return str(response.text)

    def json(self, path: str) -> Any:
        """Return the values of a page."""
        response = self.send(
            "GET", "/json" + (path[1:] if path.startswith("/?") or path == "/" else path)
        )
        assert response.status_code == 200, response.text
        return response.json()

    def act(self, action: str, status: int = 303, **form: Any) -> str:
        """Do an action. Return the next page if it was done, or else the error."""
        response = self.send("POST", f"/act/{action}", data=form, headers=OWN)
        assert response.status_code == status, response.text
        if status != 303:
            return str(response.text)
        location = response.headers["location"]
        assert location.startswith(self.root + "/")
        return location.removeprefix(self.root)

    def crawl(self, start: str = "/") -> dict[str, str]:
        """Follow all links from a page. Return the texts by path; none may be missing.

        Links that differ only in the values of arguments are followed once.
        """
        found: dict[str, str] = {}
        seen = set[object]()
        left = [start]
        while left:
            path = left.pop()
            page, _, query = path.partition("?")
            key = (page, frozenset(re.findall(r"(\w+)=", query)))
            if key in seen:
                continue
            seen.add(key)
            found[path] = self.get(path)
            for link in re.findall(r'(?:href|src)="([^"]*)"', found[path]):
                target = unescape(link)
                if target.startswith("?"):
                    target = self.root + path.partition("?")[0] + target
                if target and not target.startswith("#"):
                    assert target.startswith(self.root + "/"), f"{path} leads to {target}"
                    left.append(target.removeprefix(self.root))
        return found
