"""Decide who may do what: by host, password, the origin of a change, and ``allow``."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from hmac import compare_digest
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Takes the request, an action, and the name of a queue or None. Returns whether it is allowed.
Allow = Callable[[Request, str, str | None], bool | Awaitable[bool]]
#: Takes the request, and returns the name of the person for the audit.
Who = Callable[[Request], str]

#: The actions that change nothing.
READING: Final = frozenset({"view", "metrics"})
#: Hosts that are always allowed.
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
#: The largest form, in bytes.
_MAX_FORM: Final = 65_536
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # "no-referrer" would make the Origin of forms "null".
    "referrer-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Access(NamedTuple):
    """The rules of a dashboard."""

    allow: Allow | Literal["anyone"]
    #: Whether changes are possible at all.
    writable: bool
    hosts: frozenset[str]
    password: str | None
    who: Who | None

    @property
    def any_host(self) -> bool:
        """Whether all hosts are allowed."""
        return "*" in self.hosts

    def check(self, request: Request) -> None:
        """Check the host and the password of a request and, for a change, its origin.

        Raises:
            HTTPException: The request is refused.
        """
        host = _name(request.headers.get("host", ""))
        if not self.any_host and host not in self.hosts:
            raise HTTPException(
                400, f"Host: {host[:100]!r} is not allowed; add it to hosts= of the dashboard"
            )
        if self.password is not None and not self._knows_password(request):
            realm = {"www-authenticate": 'Basic realm="pyqueue", charset="UTF-8"'}
            raise HTTPException(401, "A password is needed.", realm)
        if request.method not in ("GET", "HEAD") and not self._is_own(request):
            raise HTTPException(403, "This request does not come from a page of the dashboard.")

    def _knows_password(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        try:
            text = base64.b64decode(given, validate=True).decode()
        except ValueError:
            return False
        _, _, password = text.partition(":")
        expected = str(self.password).encode()
        return scheme.lower() == "basic" and compare_digest(password.encode(), expected)

    def _is_own(self, request: Request) -> bool:
        """Return whether a request comes from a page of this dashboard."""
        headers = request.headers
        if "sec-fetch-site" in headers:
            return headers["sec-fetch-site"] == "same-origin"
        origin = headers.get("origin", "")
        if "://" not in origin:
            return False
        own = origin.partition("://")[2] == headers.get("host")
        # Behind a proxy, ``Host`` may differ from the browser's.
        return own or _name(origin.partition("://")[2]) in self.hosts - {*_LOOPBACK, "*"}

    def name(self, request: Request) -> str:
        """Return the name of the person, for the audit."""
        if self.who is not None:
            return str(self.who(request))[:200]
        user = request.scope.get("user")
        name = getattr(user, "display_name", "") or getattr(user, "username", "")
        address = request.client.host if request.client else "unknown"
        return str(name or address)[:200]


def allowed_hosts(hosts: Iterable[str]) -> frozenset[str]:
    """Return the names of the allowed hosts, which include the names of this machine."""
    return frozenset([*_LOOPBACK, *(each if each == "*" else _name(each) for each in hosts)])


def _name(host: str) -> str:
    """Return the name of a host without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


class Viewer:
    """The person behind a request. The answers of ``allow`` are remembered.

    Args:
        request: The request of the person.
        access: The rules that say who may do what.
        form: The fields of the form that was sent.
    """

    def __init__(self, request: Request, access: Access, form: Mapping[str, str]) -> None:
        self.request, self.form = request, form
        self._access = access
        self._answers: dict[tuple[str, str | None], bool] = {}

    @property
    def name(self) -> str:
        """The name of the person."""
        return self._access.name(self.request)

    @property
    def root(self) -> str:
        """The path under which the dashboard is mounted."""
        return str(self.request.scope.get("root_path", "")).rstrip("/")

    def argument(self, name: str, default: str = "") -> str:
        """Return an argument of the URL."""
        return str(self.request.query_params.get(name, default))

    def count(self, name: str, default: int = 0) -> int:
        """Return an argument of the URL as a number.

        If it is not a number of up to 15 digits, return ``default``.
        """
        text = self.argument(name)
        return int(text) if text.isascii() and text.isdigit() and len(text) <= 15 else default

    async def may(self, action: str, queue: str | None = None) -> bool:
        """Return whether an action on a queue is allowed; for a consumer group, on its stream."""
        queue = queue if queue is None else queue.partition("~")[0]
        if (action, queue) not in self._answers:
            self._answers[action, queue] = await self._ask(action, queue)
        return self._answers[action, queue]

    async def _ask(self, action: str, queue: str | None) -> bool:
        if action not in READING and not self._access.writable:
            return False
        allow = self._access.allow
        if allow == "anyone":
            return True
        answer: Any = allow(self.request, action, queue)
        return bool((await answer) if inspect.isawaitable(answer) else answer)

    async def require(self, action: str, queue: str | None = None) -> None:
        """Check that an action is allowed.

        Raises:
            HTTPException: The action is not allowed.
        """
        if not await self.may(action, queue):
            about = "" if queue is None else f" on {queue[:120]!r}"
            raise HTTPException(403, f"The action {action!r}{about} is not allowed.")

    def again(self) -> Viewer:
        """Return the same viewer without remembered answers, because answers may change."""
        return Viewer(self.request, self._access, self.form)

    async def sees(self, queue: str) -> bool:
        """Return whether this person may view a queue."""
        return await self.may("view", queue)


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: The form is too large, is not URL-encoded, or cannot be decoded.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "Send a form as application/x-www-form-urlencoded.")
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_FORM:
            raise HTTPException(413, "The form is too large.")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=100))
    except ValueError as error:
        raise HTTPException(400, "The form cannot be read.") from error


class Guarded:
    """Adds the headers that protect a page to each response, and changes nothing else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        await self._app(scope, receive, sending)
