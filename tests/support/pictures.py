"""Make the pictures of README: `python -m tests.support.pictures [--minutes N] [--address URL]`.

It runs `pyqueue demo --web` for some minutes, so that there is something to see, and then takes the
pictures with the Chromium of the system. With `--address`, it takes them of a demo that runs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.support.eventually import LONG
from tests.support.processes import ROOT, program

PICTURES: Final = ROOT / "docs" / "images"
STYLE: Final = ROOT / "pyqueue" / "web" / "static" / "dashboard.css"
#: The largest picture, in bytes.
MOST_BYTES: Final = 120_000
#: The pages, by the name of the picture, with the height of the picture in pixels.
PAGES: Final = {"overview": ("/", 664), "queue": ("/q/mails?since=900", 776)}
WIDTH: Final = 1140


@contextmanager
def demo(minutes: float) -> Iterator[str]:
    """Run the demo, wait, and yield the address of its dashboard."""
    with program("-m", "pyqueue.cli", "demo", "--web", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        (address,) = re.findall(r"http://\S+/", process.stderr.readline())
        time.sleep(60 * minutes)
        yield address
        process.send_signal(signal.SIGINT)
        process.wait(LONG)


def take(address: str) -> None:
    """Take the pictures of pages."""
    browsers = import_module("playwright.sync_api").sync_playwright
    with browsers() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        for name, (path, height) in PAGES.items():
            page = browser.new_page(
                viewport={"width": WIDTH, "height": height}, reduced_motion="reduce"
            )
            page.goto(address.rstrip("/") + path)
            page.wait_for_function("() => document.getElementById('state').textContent === 'live'")
            page.screenshot(path=str(PICTURES / f"{name}.png"))
            page.close()
        browser.close()


def standalone(page: str, style: str) -> str:
    """Return the graph of the page of pipelines as a file.

    Args:
        page: The page.
        style: The style sheet, whose colours the file has. They differ on light and dark screens.
    """
    (graph,) = re.findall(r'<svg class="graph wide".*?</svg>', page, re.DOTALL)
    graph = re.sub(r"</?a\b[^>]*>| data-live=\"[^\"]*\"", "", graph)
    colours = style.partition("* {")[0]
    rules = [each for each in style.splitlines() if each.startswith("svg.graph")]
    own = ["svg { font-family: system-ui, sans-serif; }", ".paper { fill: var(--panel); }"]
    inside = "\n".join([colours.strip(), *rules, *own])
    head = re.sub("^<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', graph).partition(">")
    paper = '<rect class="paper" width="100%" height="100%"/>'
    return f"{head[0]}>\n<style>\n{inside}\n</style>\n{paper}\n{head[2]}\n"


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.pictures")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--address", help="the address of a demo that runs")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    if options.address:
        make(options.address)
    else:
        with demo(options.minutes) as address:
            make(address)


def make(address: str) -> None:
    """Make the pictures of a demo that runs."""
    take(address)
    with urllib.request.urlopen(f"{address}pipelines", timeout=LONG) as answer:
        text = standalone(answer.read().decode(), STYLE.read_text())
    (PICTURES / "pipeline.svg").write_text(text)
    for path in sorted(Path(PICTURES).iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")
        assert path.stat().st_size < MOST_BYTES, path


if __name__ == "__main__":
    main()
