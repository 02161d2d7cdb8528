"""A shell for the tests of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import Shell


@pytest.fixture
def shell(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell on an empty database, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    shell = Shell(url, monkeypatch)
    yield shell
    shell.close()


@pytest.fixture
def bare_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A shell without a database, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    shell = Shell("", monkeypatch)
    yield shell
    shell.close()
