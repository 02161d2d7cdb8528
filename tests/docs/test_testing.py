"""The page about tests: its files are a program and its tests, which run as the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.docs.pages import ROOT, TESTING, blocks
from tests.support.shared import Mongod

#: The entry point of the plugin is not used, because the installed package may be another one.
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:pyqueue"]


def files() -> dict[str, str]:
    """Return the files of the page. The first line of each block names its file."""
    found = defaultdict[str, str](str)
    for block in blocks(TESTING):
        if block.language == "python":
            name, _, text = block.text.partition("\n")
            found[name.removeprefix("# ")] += text + "\n\n"
    return found


@pytest.mark.parametrize("place", ["memory", pytest.param("server", marks=pytest.mark.slow)])
def test_tests_of_the_page_pass(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> None:
    for name, text in files().items():
        (tmp_path / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYQUEUE_TEST_URL", None)
    if place == "server":
        mongod: Mongod = request.getfixturevalue("mongod")
        environment["PYQUEUE_TEST_URL"] = mongod.url
    run = subprocess.run(
        [*PYTEST, "-p", "pyqueue.testing.plugin", "--junitxml=report.xml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    cases = ElementTree.parse(tmp_path / "report.xml").findall(".//testcase")
    assert len(cases) == sum(text.count("def test_") for text in files().values())
    if place == "memory":
        # A test of a service with an outbox takes no server and little time.
        assert max(float(each.attrib["time"]) for each in cases) < 2


def test_plugin_is_an_entry_point_with_these_fixtures() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugin = import_module(project["entry-points"]["pytest11"]["pyqueue"])
    text = (ROOT / TESTING).read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    clients = {"pyqueue_client", "pyqueue_async_client"}
    assert named == {*clients, "pyqueue_target", "pyqueue_url"}
    assert all(hasattr(plugin, each) for each in named)


def test_plugin_costs_a_run_without_queues_little() -> None:
    code = "import sys, pyqueue.testing.plugin; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert {"pymongo", "pydantic", "anyio", "mongomock"}.isdisjoint(modules)
