"""``pyqueue pipeline run`` and ``pyqueue pipeline show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyqueue import Client
from tests.cli.shell import Shell


@pytest.fixture(autouse=True)
def recipe(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of two stages, and the module of its handlers, in the working directory."""
    Path("steps.py").write_text(
        "import os\n"
        "def double(n): return 2 * n\n"
        "def keep(n):\n"
        "    assert os.environ['PYQUEUE_URL'] and os.environ['PYQUEUE_NAMESPACE'] == 'pyqueue'\n"
    )
    Path("numbers.toml").write_text(
        '[[stages]]\nqueue = "in"\nhandler = "steps:double"\nto = "out"\n'
        '[[stages]]\nqueue = "out"\nhandler = "steps:keep"\n'
    )
    monkeypatch.setenv("PYQUEUE_NAMESPACE", "pyqueue")  # `run` sets it, so take that back


def test_pipeline_show_draws_with_counts(shell: Shell, client: Client) -> None:
    client.queue("in").push_many(range(20))
    [graph] = shell.json("pipeline", "show", "numbers.toml")
    assert graph["stages"][0] == {"queue": "in", "kind": "link", "handler": "double", "to": ["out"]}
    assert graph["counts"]["in"]["ready"] == 20
    _, drawn, _ = shell.run("pipeline", "show", "numbers.toml", "--format", "mermaid")
    assert "flowchart" in drawn
    assert "20 ready" in drawn


def test_pipeline_show_needs_no_server(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("in").push_many(range(20))
    [with_counts] = shell.json("pipeline", "show", "numbers.toml")
    monkeypatch.delenv("PYQUEUE_URL")
    [graph] = shell.json("pipeline", "show", "numbers.toml")
    assert (graph["stages"], "counts" in graph) == (with_counts["stages"], False)
    status, drawn, errors = shell.run("pipeline", "show", "numbers.toml")
    assert (status, errors) == (0, "")
    assert "20 ready" not in drawn
    assert "double" in drawn


def test_handlers_use_the_embedded_server_of_the_run(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one client can start the server of a directory, so handlers get its URL."""
    Path("steps.py").write_text(
        "import os, pyqueue\n"
        "def client(): return pyqueue.Client(os.environ['PYQUEUE_URL'])\n"
        "with client() as first: first.queue('in').push(1)\n"
        "def double(n): return 2 * n\n"
        "def keep(n):\n"
        "    with client() as another: another.queue('kept').push(n)\n"
    )
    options = ("--url", "embedded:./data", "--until-empty", "--json")
    status, out, errors = shell.run("pipeline", "run", "numbers.toml", *options)
    assert status == 0, errors
    assert json.loads(out)["stages"]["out"]["out"] == 1
    monkeypatch.setenv("PYQUEUE_URL", "embedded:./data")  # the server was stopped
    assert shell.json("peek", "kept")[0]["payload"] == 2


def test_pipeline_run_ends_when_empty(shell: Shell, client: Client) -> None:
    client.queue("in").push_many(range(20))
    options = ["--until-empty", "--concurrency", "4", "--json"]
    status, out, errors = shell.run("pipeline", "run", "numbers.toml", *options)
    assert status == 0, errors
    report = json.loads(out)
    assert report["name"] == "numbers"
    assert (report["stages"]["in"]["out"], report["stages"]["out"]["out"]) == (20, 20)
