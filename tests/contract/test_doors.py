"""Every case of this folder holds with shut doors, too. ``make test`` runs them with open doors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_contract_holds_with_shut_doors() -> None:
    options = ["-q", "-m", "not slow", "-n", "4", "--dist", "loadgroup"]
    plugin = ["-p", "tests.support.shut_doors"]
    command = [sys.executable, "-m", "pytest", *options, *plugin, str(Path(__file__).parent)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-5000:]
