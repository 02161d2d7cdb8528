"""Share the rewriting of test files among the workers of xdist.

pytest rewrites the asserts of each test file, and stores the result beside the file. In a new
checkout every worker would do this at the same time for the same files. Here each worker first
does it for some of the files.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Rewrite the files that are this worker's share, unless their results are stored."""
    given = getattr(config, "workerinput", None)
    if given is None or sys.dont_write_bytecode:
        return
    number = int(given["workerid"].removeprefix("gw"))
    for path in files_of(config)[number :: given["workercount"]]:
        stored = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if stored.exists() and stored.stat().st_mtime >= path.stat().st_mtime:
            continue
        if rewrite.try_makedirs(stored.parent):
            with suppress(SyntaxError):  # its import reports that
                stat, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, stored)


def files_of(config: pytest.Config) -> list[Path]:
    """Return the test files that the run collects."""
    found = set[Path]()
    for each in config.args:
        path = config.invocation_params.dir / each.partition("::")[0]
        found.update(path.rglob("test_*.py") if path.is_dir() else [path])
    return sorted(found)
