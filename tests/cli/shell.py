"""Run the commands of ``pyqueue``: in this process, which is fast, or as a program."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

import pytest
from typer.testing import CliRunner

from pyqueue.cli import app
from pyqueue.cli.common import parse_json
from tests.support.processes import ROOT, program


class Shell:
    """Runs commands on one database.

    Args:
        url: The database, as PYQUEUE_URL names it; empty for none.
        monkeypatch: Undoes the changes that a command makes in this process.
    """

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name in ("PYQUEUE_URL", "PYQUEUE_NAMESPACE", "PYQUEUE_SIGNALS"):
            monkeypatch.delenv(name, raising=False)
        if url:
            monkeypatch.setenv("PYQUEUE_URL", url)
        monkeypatch.setattr(sys, "path", list(sys.path))
        self._modules = dict(sys.modules)

    def close(self) -> None:
        """Forget the modules that a command imported from the working directory."""
        here = os.getcwd()
        for name, module in list(sys.modules.items()):
            if name not in self._modules and str(getattr(module, "__file__", "")).startswith(here):
                del sys.modules[name]

    def run(self, *arguments: str, given: str = "") -> tuple[int, str, str]:
        """Run a command in this process. Return its exit status, its output and its errors."""
        result = CliRunner().invoke(app, list(arguments), input=given)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    def refused(self, *arguments: str, given: str = "") -> str:
        """Run a command that must exit with 2 and print nothing. Return its errors."""
        status, out, errors = self.run(*arguments, given=given)
        assert (status, out) == (2, ""), errors
        return errors

    def json(self, *arguments: str, given: str = "") -> list[Any]:
        """Run a command with --json in this process. Return the values that it prints."""
        status, out, errors = self.run(*arguments, "--json", given=given)
        assert (status, errors) == (0, ""), errors
        return [parse_json(line, "stdout") for line in out.splitlines()]

    def stream(
        self, *arguments: str, stdin: TextIO | None = None, stdout: TextIO | None = None
    ) -> int:
        """Run a command in this process on these files, such as pipes. Return its exit status."""
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stdin or sys.stdin)
            patch.setattr(sys, "stdout", stdout or sys.stdout)
            with pytest.raises(SystemExit) as end:
                app(list(arguments), prog_name="pyqueue")
        return int(end.value.code or 0)

    def program(
        self, *arguments: str, new_session: bool = False
    ) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start a command as a program. It is killed at the end, with its children."""
        return program(
            "-m",
            "pyqueue.cli",
            *arguments,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            cwd=Path.cwd(),
            stderr=subprocess.PIPE,
            new_session=new_session,
        )
