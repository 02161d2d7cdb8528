"""The command web."""

from __future__ import annotations

import re
import signal
import urllib.request

import pytest

from pyqueue import Client
from pyqueue.cli import web
from tests.cli.shell import Shell


def test_dashboard_is_served(shell: Shell, client: Client) -> None:
    client.queue("orders").push_many(range(3))
    with shell.program("web", "--port", "0", "--label", "staging") as started:
        assert started.stderr is not None
        line = started.stderr.readline()
        (address,) = re.findall(r"the dashboard is on (http://127\.0\.0\.1:\d+/)", line)
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
        assert ">staging<" in text
        assert 'data-live="orders:ready">3<' in text
        assert "/act/" not in text
        started.send_signal(signal.SIGINT)
        assert started.wait(60) in (0, 130)


def test_password_is_needed_beyond_this_machine(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(web.PASSWORD, raising=False)
    errors = shell.refused("web", "--host", "0.0.0.0")
    assert "--host: a dashboard on 0.0.0.0 needs a password; set PYQUEUE_WEB_PASSWORD" in errors


def test_missing_extra_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    errors = shell.refused("web")
    assert 'pip install "pyqueue-mongo[web]"' in errors


def test_dashboard_needs_a_server(bare_shell: Shell) -> None:
    assert "missing server" in bare_shell.refused("web")
