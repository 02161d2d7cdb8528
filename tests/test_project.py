"""The files of the project: the version, the workflow, the hooks."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

import pyqueue

ROOT = Path(__file__).parents[1]


def test_version_is_that_of_the_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", pyqueue.__version__)
    assert ProjectMetadata(str(ROOT), PluginManager()).version == pyqueue.__version__


def test_version_has_an_entry_in_the_changelog() -> None:
    title = "Unreleased" if ".dev" in pyqueue.__version__ else pyqueue.__version__
    assert f"\n## {title}\n" in (ROOT / "docs/changelog.md").read_text()


def test_workflow_runs_every_supported_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    supported = {
        each.rpartition(" ")[2] for each in project["classifiers"] if "Python :: 3." in each
    }
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    matrix = re.findall(r"^ +python: (\[.*\])$", workflow, re.MULTILINE)
    assert set(json.loads(matrix[0])) == supported
    assert "      - run: .ci/run\n" in workflow
    assert (ROOT / ".ci/run").exists()


def test_hooks_are_local() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert set(re.findall(r"repo: *(\S+)", hooks)) == {"local"}
