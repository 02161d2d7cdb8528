"""The parts of a dashboard that its pages share, and how a page becomes a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, Response

from pyqueue.async_client import AsyncClient
from pyqueue.async_queues import AsyncQueue
from pyqueue.errors import QueueError
from pyqueue.messages import QueueInfo
from pyqueue.web import charts, graphs, shapes
from pyqueue.web.access import Access, Viewer
from pyqueue.web.audit import Audit
from pyqueue.web.redacting import Redactor
from pyqueue.web.sampling import Sampler

#: The files of the pages, keyed by name, and their types.
STATIC: Final = {
    "dashboard.css": "text/css; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: The pages in the head: path and name.
NAVIGATION: Final = (
    ("/", "Queues"),
    ("/pipelines", "Pipelines"),
    ("/errors", "Errors"),
    ("/workers", "Workers"),
    ("/schedules", "Schedules"),
    ("/audit", "Audit"),
)
#: The options of a queue that its programs set, as its record has them.
_OPTIONS: Final = ("lease", "max_tries", "dead_letter", "history")


class View(NamedTuple):
    """A page: a template, and its values. The values are also the JSON of the page."""

    template: str
    values: dict[str, Any]
    status: int = 200


@dataclass(frozen=True)
class Site:
    """The parts of a dashboard that all its pages use.

    Args:
        client: The client of the namespace that is shown.
        access: The rules that say who may do what.
        redactor: Hides secrets.
        label: A word in the head of each page, such as "staging".
    """

    client: AsyncClient
    access: Access
    redactor: Redactor
    label: str
    sampler: Sampler = field(init=False)
    audit: Audit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampler", Sampler(self.client))
        object.__setattr__(self, "audit", Audit(self.client))

    def queue(self, info: QueueInfo) -> AsyncQueue[Any]:
        """Return a queue with the options that its programs last set."""
        kind: Any = None if info.kind == "standard" else info.kind
        given = {name: info.options[name] for name in _OPTIONS if name in info.options}
        try:
            return self.client.queue(info.name, kind=kind, **given)
        except QueueError:  # another release stored the options
            return self.client.queue(info.name, kind=kind)

    async def html(self, viewer: Viewer, view: View, notice: bool = True) -> Response:
        """Return a page, with the result of the action that led to it if ``notice`` is true."""
        text = (
            environment()
            .get_template(view.template)
            .render(
                **view.values,
                root=viewer.root,
                here=str(viewer.request.scope["path"]).removeprefix(viewer.root) or "/",
                label=self.label,
                namespace=self.client.namespace,
                notice=await self._notice(viewer) if notice else "",
            )
        )
        return HTMLResponse(text, view.status)

    async def _notice(self, viewer: Viewer) -> str:
        """Return the result of the action that led to a page."""
        if not (id := viewer.argument("did")) or viewer.request.method != "GET":
            return ""
        entry = await self.audit.entry(id)
        if entry is None or not await viewer.sees(str(entry.get("queue", ""))):
            return ""
        return f"{entry.get('action')}: {entry.get('result', 'it has not ended')}"


def as_json(view: View) -> Response:
    """Return the values of a page as JSON. Charts are left out."""
    values = {name: each for name, each in view.values.items() if not hasattr(each, "__html__")}
    text = json.dumps(values, default=shapes.plain, ensure_ascii=False)
    return Response(text, view.status, media_type="application/json")


# ---- links


def path_to(kind: str, name: object) -> str:
    """Return the path of the page of a queue ("q"), a stream ("s") or a message ("m")."""
    return f"/{kind}/{quote(str(name), safe='')}"


def query(values: Mapping[str, object]) -> str:
    """Return the query string of a URL with all values that are not empty."""
    given = [(name, each) for name, each in values.items() if each not in ("", None)]
    return f"?{urlencode(given, doseq=True)}" if given else ""


# ---- templates and files


@cache
def environment() -> Environment:
    """Return the environment of the templates, which escapes every value."""
    made = Environment(
        loader=PackageLoader("pyqueue.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = (shapes.number, shapes.counted, shapes.rate, shapes.size)
    times = (shapes.since, shapes.ago, shapes.clock)
    made.filters |= {each.__name__: each for each in (*numbers, *times, query)}
    made.filters["duration"] = shapes.length  # jinja has its own "length"
    made.globals |= {
        "path_to": path_to,
        "sparkline": charts.sparkline,
        "drawing": graphs.drawing,
        "navigation": NAVIGATION,
        "static": static_paths(),
    }
    return made


@cache
def static_files() -> Mapping[str, bytes]:
    """Return the contents of the files of the pages, keyed by name."""
    folder = files("pyqueue.web") / "static"
    return {name: (folder / name).read_bytes() for name in STATIC}


def static_paths() -> Mapping[str, str]:
    """Return the paths of the static files. A path changes when the contents of its file change."""
    return {
        name: f"/static/{name}?v={sha256(data).hexdigest()[:12]}"
        for name, data in static_files().items()
    }


def static(name: str) -> Response:
    """Return the response for a static file."""
    if name not in STATIC:
        return Response("no such file\n", 404, media_type="text/plain")
    headers = {"cache-control": "public, max-age=31536000, immutable"}
    return Response(static_files()[name], headers=headers, media_type=STATIC[name])
