"""The dashboard in a real Chromium. ``make test-web`` runs these tests.

Without a browser, they are skipped at home and fail under ``CI=true``. ``SCREENSHOTS=DIRECTORY``
keeps a picture of each page.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually
from tests.web.world import HOSTILE, World

pytestmark = [
    pytest.mark.browser,
    pytest.mark.xdist_group("browser"),
    # playwright leaves its event loop to the end of the process.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
#: The pages that are looked at, by name.
PATHS = {
    "overview": "/",
    "pipelines": "/pipelines",
    "queue": "/q/orders",
    "dead": "/q/orders.dead",
    "stream": "/s/clicks",
    "errors": "/errors",
    "workers": "/workers",
    "schedules": "/schedules",
    "audit": "/audit",
    "bulk": "/q/orders.dead/bulk?verb=redrive&state=dead",
}
#: The least contrast of a text with its background.
LEAST_CONTRAST = 4.5
#: Returns the texts of a page whose contrast is too low.
CONTRASTS = """
least => {
  const channels = text => {
    const found = text.match(/[\\d.]+/g).map(Number);
    return found.length > 3 ? found : [...found, 1];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(each => each / 255)
      .map(each => each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = each => {
    for (; each; each = each.parentElement) {
      const found = channels(getComputedStyle(each).backgroundColor);
      if (found[3] > 0.99) return found;
    }
    return [255, 255, 255, 1];
  };
  const wrong = [];
  for (const each of document.querySelectorAll("body *")) {
    const text = [...each.childNodes].filter(node => node.nodeType === 3)
      .map(node => node.textContent.trim()).join("");
    const box = each.getBoundingClientRect();
    if (!text || !box.width || box.width < 2 || each.closest(".skip")) continue;
    const style = getComputedStyle(each);
    const front = light(channels(each.closest("svg") ? style.fill : style.color));
    const back = light(behind(each));
    const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
    if (ratio < least) wrong.push(`${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return wrong;
}
"""


def executable() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for each in names if (path := shutil.which(each))), None)
    if found is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium; .ci/run installs it")
        pytest.skip("no Chromium")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = executable()
    get = import_module if os.environ.get("CI") == "true" else pytest.importorskip
    with get("playwright.sync_api").sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


class Served:
    """A dashboard on a port of this machine.

    Args:
        world: The namespace.
        port: The port; 0: any.
        options: As for ``Dashboard``.
    """

    def __init__(self, world: World, port: int = 0, **options: Any) -> None:
        import uvicorn

        self.world = world
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = world.pages(**options).dashboard
        config = uvicorn.Config(
            app, lifespan="off", log_level="error", timeout_graceful_shutdown=1, ws="none"
        )
        self._server = uvicorn.Server(config)
        # It runs in the event loop of the client.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        eventually(lambda: self._server.started, "the server listens")

    def _run(self) -> None:
        self.world.run(partial(self._server.serve, sockets=[self._socket]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        self._socket.close()


@pytest.fixture
def served(shop: World) -> Iterator[Served]:
    found = Served(shop, allow=lambda request, action, queue: True)
    yield found
    found.stop()


class Tab:
    """A page of a browser that notes errors.

    Args:
        browser: The browser.
        options: As for a context of playwright.
    """

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def close(self) -> None:
        self.context.close()


def settled(page: Any, text: str) -> None:
    page.wait_for_function("text => document.body.innerText.includes(text)", arg=text)


def connected(page: Any, text: str = "live") -> None:
    page.wait_for_function(
        "text => document.getElementById('state').textContent === text", arg=text
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 390])
def test_pages_are_readable_and_fit(browser: Any, served: Served, scheme: str, width: int) -> None:
    served.world.graph("shop", {"orders": ["groups", "packs"], "groups": ["levels"]})
    ids = served.world.run(served.world.client.queue("orders.dead").browse)
    paths = {**PATHS, "message": f"/m/{ids.messages[0].id}"}
    size = {"width": width, "height": 860}
    tab = Tab(browser, viewport=size, color_scheme=scheme)
    folder = os.environ.get("SCREENSHOTS")
    for name, path in paths.items():
        tab.page.goto(served.url + path)
        if folder:
            place = Path(folder) / f"{name}-{scheme}-{width}.png"
            tab.page.screenshot(path=str(place), full_page=True)
        assert tab.page.evaluate(CONTRASTS, LEAST_CONTRAST) == [], path
        wide = tab.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, path
        unnamed = tab.page.evaluate(
            "[...document.querySelectorAll('a, button, input:not([type=hidden])')].filter(each =>"
            " !(each.textContent.trim() || each.ariaLabel || each.labels?.length)).length"
        )
        assert unnamed == 0, path
    tab.close()
    assert tab.errors == []


def test_numbers_change_without_a_reload(browser: Any, served: Served) -> None:
    tab = Tab(browser)
    tab.page.goto(served.url)
    connected(tab.page)
    for number in (3, 4):
        served.world.run(served.world.client.queue("orders").push, number)
        tab.page.wait_for_function(
            "text => document.querySelector('[data-live=\"orders:ready\"]').textContent === text",
            arg=str(number),
        )
    tab.close()
    assert tab.errors == []


def test_page_is_live_again_after_the_server_was_gone(browser: Any, shop: World) -> None:
    first = Served(shop)
    tab = Tab(browser)
    tab.page.goto(first.url)
    connected(tab.page)
    first.stop()
    connected(tab.page, "not connected")
    again = Served(shop, first.port)
    try:
        connected(tab.page)
    finally:
        tab.close()
        again.stop()


def test_dead_message_is_found_and_redriven_by_keyboard(browser: Any, served: Served) -> None:
    tab = Tab(browser)
    page = tab.page
    page.goto(served.url)
    page.keyboard.press("/")
    page.keyboard.type("orders.dead")
    page.keyboard.press("Enter")
    page.wait_for_url("**/q/orders.dead")

    def follow(text: str) -> None:
        for _ in range(100):
            page.keyboard.press("Tab")
            if text in page.evaluate("document.activeElement.innerText ?? ''"):
                assert page.evaluate("document.activeElement.matches(':focus-visible')")
                page.keyboard.press("Enter")
                return
        raise AssertionError(f"Tab does not reach {text}")

    follow("Redrive…")
    page.wait_for_url("**/bulk?**")
    follow("Redrive 1 message")
    settled(page, "redrive: 1 message")
    tab.close()
    assert tab.errors == []
    assert served.world.run(served.world.client.queue("orders.dead").counts).total == 0


def test_pages_work_without_scripts(browser: Any, served: Served) -> None:
    tab = Tab(browser, java_script_enabled=False)
    page = tab.page
    page.goto(served.url)
    page.click("text=orders >> nth=0")
    page.fill("input[name=where]", "payload.n>2")
    page.click("text=Filter")
    assert page.locator("th a.id").count() == 1
    page.click("text=Pause")
    assert "pause: paused" in page.inner_text("main")
    page.click("text=Resume")
    page.fill("input[name=q]", "clicks")
    page.press("input[name=q]", "Enter")
    assert page.inner_text("h1") == "clicks"
    tab.close()


def test_hostile_values_run_nothing(browser: Any, served: Served) -> None:
    world = served.world
    for number, evil in enumerate(HOSTILE):
        world.bury("evil", {"a": evil, f"{number}": [evil]}, ValueError(evil))
    world.report(HOSTILE[0], "evil", host=HOSTILE[1])
    world.flush()
    tab = Tab(browser)
    ids = world.run(world.client.queue("evil.dead").browse).messages
    for path in (
        "/q/evil",
        "/q/evil.dead",
        "/errors",
        "/workers",
        *(f"/m/{each.id}" for each in ids),
    ):
        tab.page.goto(served.url + path)
    settled(tab.page, "evil")
    tab.close()
    assert tab.errors == []


def test_graph_is_drawn_for_the_width_of_the_screen(browser: Any, served: Served) -> None:
    served.world.graph("shop", {"orders": ["groups", "packs"], "groups": ["levels"]})
    tab = Tab(browser, viewport={"width": 1360, "height": 860})
    page = tab.page
    page.goto(f"{served.url}/pipelines")
    for width, look in ((1360, "wide"), (390, "narrow")):
        page.set_viewport_size({"width": width, "height": 860})
        for each in ("wide", "narrow"):
            assert page.locator(f"svg.{each}").is_visible() == (each == look)
        smallest = page.evaluate(
            "look => Math.min(...[...document.querySelectorAll(`svg.${look} text`)]"
            ".filter(each => each.textContent)"
            ".map(each => each.getBoundingClientRect().height))",
            look,
        )
        assert smallest > 9
    connected(page)
    served.world.run(served.world.client.queue("packs").push, 1)
    page.wait_for_function(
        "text => document.querySelector('svg.narrow [data-live=\"packs:ready\"]').textContent"
        " === text",
        arg="6",
    )
    page.click("svg.narrow a >> nth=0")
    page.wait_for_url("**/q/orders")
    tab.close()
    assert tab.errors == []


def test_messages_are_downloaded(browser: Any, served: Served) -> None:
    tab = Tab(browser, accept_downloads=True)
    tab.page.goto(f"{served.url}/q/orders?where=payload.n%3E2")
    with tab.page.expect_download() as begun:
        tab.page.click("text=CSV")
    assert begun.value.suggested_filename == "orders-ready.csv"
    assert len(Path(begun.value.path()).read_text().splitlines()) == 2
    tab.close()
    assert tab.errors == []
