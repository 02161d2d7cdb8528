"""``Dashboard``: the ASGI app. It defines the routes, and checks permissions for each request."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from pyqueue import arguments
from pyqueue.async_client import AsyncClient
from pyqueue.backends.managing import ping
from pyqueue.errors import ConfigurationError, InvalidName, QueueError, Unavailable
from pyqueue.runtime.connecting import runner_of
from pyqueue.telemetry import CONTENT_TYPE, metrics_text
from pyqueue.web.access import Access, Allow, Guarded, Viewer, Who, allowed_hosts, form_of
from pyqueue.web.acting import ACTIONS, act
from pyqueue.web.exporting import FORMATS, export
from pyqueue.web.listing import (
    audit_page,
    errors_page,
    schedules_page,
    search,
    stream_page,
    workers_page,
)
from pyqueue.web.live import events
from pyqueue.web.message_page import message_page
from pyqueue.web.overview import overview
from pyqueue.web.pipelines_page import pipelines_page
from pyqueue.web.queue_page import bulk_page, queue_page
from pyqueue.web.redacting import SECRETS, Redact, Redactor
from pyqueue.web.site import Site, View, as_json, path_to, query, static

log = logging.getLogger("pyqueue")

#: The pages, keyed by path. The JSON of a page is at the same path below /json.
PAGES: Final[Mapping[str, Callable[[Site, Viewer], Awaitable[View]]]] = {
    "/": overview,
    "/q/{name}": queue_page,
    "/q/{name}/bulk": bulk_page,
    "/s/{name}": stream_page,
    "/m/{id:path}": message_page,
    "/pipelines": pipelines_page,
    "/errors": errors_page,
    "/workers": workers_page,
    "/schedules": schedules_page,
    "/audit": audit_page,
}
#: The paths that anyone may read, because they say nothing about queues.
OPEN: Final = ("/static/{name}", "/health/live", "/health/ready")
#: Actions after which the message is gone, so that the page of its queue follows.
_ENDS: Final = ("cancel", "remove")

_Handler = Callable[[Viewer], Awaitable[Response]]


def _names(argument: str, given: object) -> tuple[str, ...]:
    """Check a list of names, and return it."""
    wrong = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        names: tuple[Any, ...] = tuple(given)
        wrong = [each for each in names if not isinstance(each, str)]
        if not wrong:
            return names
    found = type(wrong[0]).__name__
    raise ConfigurationError(f"{argument}: expected a list of str, found {found}; use [...]")


def _check_texts_and_functions(
    password: object, label: object, functions: Mapping[str, object]
) -> None:
    if password is not None and (not isinstance(password, str) or not password):
        found = type(password).__name__ if password else "none"
        raise ConfigurationError(f"password: expected a text, found {found}; set a long password")
    if not isinstance(label, str):
        raise ConfigurationError(
            f'label: expected a str, found {type(label).__name__}; pass a word such as "staging"'
        )
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigurationError(
                f"{name}: expected a function, found {type(function).__name__}; "
                "pass a function, or None"
            )


class Dashboard:
    """Pages that show queues, streams, messages, errors and workers, as an ASGI app.

    It belongs to an AsyncClient, and to its event loop. Mount it in another app, or serve it; it
    does not open or close the client.

    Args:
        client: The client of the namespace to show.
        allow: Called with the request, an action and the name of a queue (None for pages of all
            queues) before anything is shown or changed. Returns whether the action is allowed; this
            may be an awaitable. The action is "view", "metrics" (all queues, as text) or the name
            of a change, such as "redrive". "anyone" allows everyone to view and, if ``writable``,
            to make changes.
        writable: Whether changes are possible, if ``allow`` allows them. By default, they are
            possible only if ``allow`` is a function.
        hosts: The host names under which browsers reach the dashboard, besides those of this
            machine. "*" allows any name.
        password: A password that the browser must send, or None if no password is needed.
        who: Takes a request, and returns the name of the person for the audit. None means the
            user of the request or, without a user, the address.
        secrets: Parts of the names of fields whose values are hidden.
        redact: Called with the path and the value of each other field; returns the value to show.
        label: A word in the head of each page, such as "staging".

    Raises:
        ConfigurationError: An argument is not allowed.
    """

    def __init__(
        self,
        client: AsyncClient,
        *,
        allow: Allow | Literal["anyone"] | None = None,
        writable: bool | None = None,
        hosts: Iterable[str] = (),
        password: str | None = None,
        who: Who | None = None,
        secrets: Iterable[str] = SECRETS,
        redact: Redact | None = None,
        label: str = "",
    ) -> None:
        if not isinstance(client, AsyncClient):
            raise ConfigurationError(
                f"client: expected an AsyncClient, found {type(client).__name__}; create one for "
                "the dashboard"
            )
        if allow is None or (allow != "anyone" and not callable(allow)):
            raise ConfigurationError(
                "allow: expected a function that says who may do what, found "
                f'{type(allow).__name__}; pass one, or "anyone" to let everyone view'
            )
        _check_texts_and_functions(password, label, {"who": who, "redact": redact})
        if writable is not None:
            arguments.flag("writable", writable)
        access = Access(
            allow=allow,
            writable=callable(allow) if writable is None else writable,
            hosts=allowed_hosts(_names("hosts", hosts)),
            password=password,
            who=who,
        )
        self._site = Site(client, access, Redactor(_names("secrets", secrets), redact), label)
        self._app = Starlette(
            routes=list(self._routes()),
            middleware=[Middleware(Guarded)],
            exception_handlers={HTTPException: self._refused, QueueError: self._failed},
        )

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """The routes of the app. They call ``allow``, except the routes in ``OPEN``."""
        return tuple(self._app.routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        await self._app(scope, receive, send)

    # ---- routes

    def _routes(self) -> Iterable[Route]:
        for path, page in PAGES.items():
            yield self._route(path, self._html(page))
            yield self._route("/json" + path.rstrip("/"), self._json(page))
        for ending in FORMATS:
            yield self._route(f"/q/{{name}}/export.{ending}", self._export(ending))
        yield self._route("/find", self._search)
        yield self._route("/live", self._live)
        yield self._route("/metrics", self._metrics, "metrics")
        for action in ACTIONS:
            yield self._route(f"/act/{action}", self._act(action), action, "POST")
        for path, handler in zip(OPEN, (_static, _alive, self._ready), strict=True):
            yield Route(path, handler, methods=["GET"])
        yield self._route("/{path:path}", _missing)  # so that only a viewer learns what exists

    def _route(
        self, path: str, handler: _Handler, action: str = "view", method: str = "GET"
    ) -> Route:
        """Return a route that first checks a request and the permission for it."""

        async def handle(request: Request) -> Response:
            self._site.access.check(request)
            form = await form_of(request) if method == "POST" else {}
            viewer = Viewer(request, self._site.access, form)
            name = request.path_params.get("name") if method == "GET" else form.get("queue", "")
            await viewer.require(action, name)
            return await handler(viewer)

        return Route(path, handle, methods=[method], name=path)

    def _html(self, page: Callable[[Site, Viewer], Awaitable[View]]) -> _Handler:
        async def handle(viewer: Viewer) -> Response:
            return await self._site.html(viewer, await page(self._site, viewer))

        return handle

    def _json(self, page: Callable[[Site, Viewer], Awaitable[View]]) -> _Handler:
        async def handle(viewer: Viewer) -> Response:
            return as_json(await page(self._site, viewer))

        return handle

    def _export(self, ending: str) -> _Handler:
        async def handle(viewer: Viewer) -> Response:
            return await export(self._site, viewer, ending)

        return handle

    def _act(self, action: str) -> _Handler:
        async def handle(viewer: Viewer) -> Response:
            did = await act(self._site, viewer, action)
            return RedirectResponse(viewer.root + _next_page(action, viewer.form, did), 303)

        return handle

    async def _search(self, viewer: Viewer) -> Response:
        return RedirectResponse(viewer.root + await search(self._site, viewer), 303)

    async def _live(self, viewer: Viewer) -> Response:
        headers = {"x-accel-buffering": "no"}  # otherwise nginx would buffer the events
        content = events(self._site, viewer)
        return StreamingResponse(content, headers=headers, media_type="text/event-stream")

    async def _metrics(self, viewer: Viewer) -> Response:
        text = await metrics_text(self._site.client)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _ready(self, request: Request) -> Response:
        try:
            await runner_of(self._site.client).run(ping())
        except QueueError:
            return PlainTextResponse("the database does not answer\n", 503)
        return PlainTextResponse("ok\n")

    # ---- errors

    async def _refused(self, request: Request, error: Exception) -> Response:
        """Show that a request was refused."""
        if not isinstance(error, HTTPException):  # not covered: Starlette passes no other
            raise error
        return await self._error(request, error.status_code, error.detail, error.headers)

    async def _failed(self, request: Request, error: Exception) -> Response:
        """Show that an operation failed."""
        status = 503 if isinstance(error, Unavailable) else 500
        if isinstance(error, (ConfigurationError, InvalidName)):
            status = 400
        if status >= 500:
            log.warning("dashboard: %s failed: %s", request.scope["path"], error)
        text = self._site.redactor.text("error.message", str(error)) or ""
        return await self._error(request, status, text)

    async def _error(
        self, request: Request, status: int, text: str, headers: Mapping[str, str] | None = None
    ) -> Response:
        viewer = Viewer(request, self._site.access, {})
        view = View("error.html", {"status": status, "text": text}, status)
        path = str(request.scope["path"]).removeprefix(viewer.root)
        plain = path.startswith("/json") or status in (400, 401)
        if plain:
            response = as_json(view)
        else:
            response = await self._site.html(viewer, view, notice=status == 404)
        response.headers.update(headers or {})
        return response


def _next_page(action: str, form: Mapping[str, str], did: str) -> str:
    """Return the path of the page that shows the result of an action."""
    queue, id = form.get("queue", ""), form.get("id", "")
    if form.get("schedule"):
        return "/schedules" + query({"did": did})
    if form.get("group"):
        return path_to("s", queue) + query({"did": did})
    if id and action not in _ENDS:
        return path_to("m", id) + query({"did": did})
    return path_to("q", queue) + query({"state": form.get("state", ""), "did": did})


async def _static(request: Request) -> Response:
    return static(str(request.path_params["name"]))


async def _missing(viewer: Viewer) -> Response:
    raise HTTPException(404, "There is no such page.")


async def _alive(request: Request) -> Response:
    return PlainTextResponse("ok\n")
