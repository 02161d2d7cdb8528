"""The mutants: each changes the part of pyqueue that it names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.chaos import report, runner
from tests.chaos.__main__ import app
from tests.chaos.mutants import MUTANTS
from tests.support.processes import ROOT

#: Each mutant changes another copy of the process.
EACH = """
import os, sys
from tests.chaos import mutants
for name in sys.argv[1:]:
    if not (child := os.fork()):
        mutants.apply(name)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0, name
print("applied")
"""


def test_mutant_changes_the_product() -> None:
    """In a process of the workload. An unknown attribute would be an error."""
    command = [sys.executable, "-c", EACH, *MUTANTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "applied\n"), done.stderr
    for mutant in MUTANTS.values():
        assert set(mutant.kinds) <= set(runner.ALL_FAULTS)


@pytest.mark.parametrize("noticed", [True, False])
def test_mutant_run_ends_at_the_first_failed_check(
    monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """Rounds have different seeds. Without a failed check they end after ten minutes."""
    seeds: list[int] = []

    def run(minutes: float, seed: int, **options: Any) -> dict[str, Any]:
        assert options["mutant"] == "w1"
        seeds.append(seed)
        return {**dict.fromkeys(report.VERDICT, 0), "lost": int(noticed and len(seeds) == 2)}

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(runner, "MUTANT_S", 600.0 if noticed else 0.0)
    result = runner.run_mutant("w1", 7)
    assert result["mutant"] == "w1"
    assert seeds == ([7, 8] if noticed else [7])
    assert (result["noticed"] is not None) == noticed


def test_mutant_option_shows_names_and_refuses_others() -> None:
    done = CliRunner().invoke(app, ["--mutant", "wrong"])
    assert done.exit_code == 2
    assert all(name in done.output for name in MUTANTS)


def test_mutant_command_passes_name_and_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []

    def run_mutant(name: str, seed: int, *, keep: Path | None) -> dict[str, Any]:
        given.extend([name, seed, keep])
        return {**dict.fromkeys(report.VERDICT, 0), "lost": 1, "mutant": name}

    monkeypatch.setattr(runner, "run_mutant", run_mutant)
    options = ["--mutant", "w1", "--seed", "3", "--keep", str(tmp_path), "--json"]
    assert CliRunner().invoke(app, options).exit_code == 1
    assert given == ["w1", 3, tmp_path]
