"""Misspelt options are errors for a type checker."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: mypy must report the lines that end in "# error", and no other line.
PROGRAM = """
from pyqueue import AsyncClient, Client, Worker

client = Client("memory:", namespace="jobs", command_timeout=5)
Client("memory:", namespce="jobs")  # error
AsyncClient("memory:", owner="me", durability="acknowledged")
AsyncClient("memory:", durabilty="majority")  # error
Client("memory:", durability="some")  # error

queue = client.queue("orders", int, lease=30, max_tries=None)
client.queue("orders", leese=3)  # error
AsyncClient("memory:").queue("orders", int, leese=3)  # error
queue.push(1, delay=2)
queue.push(1, dely=2)  # error
queue.push("one")  # error

pipeline = client.pipeline()
pipeline.link("a", print, to="b", max_tries=3, concurrency=2)
pipeline.link("a", print, to="b", max_trys=3)  # error
pipeline.sink("b", print, time_limt=3)  # error
Worker(client).on("orders", print, leese=3)  # error

client.schedule("nightly", queue="orders", every=60, missed="skip")
client.schedule("nightly", queue="orders", evry=60)  # error
client.schedule("nightly", queue="orders", every=60, missed="some")  # error
Worker(client).cron("0 3 * * *", lease=3, overlap=True)(print)
Worker(client).cron("0 3 * * *", leese=3)(print)  # error
"""


def test_mypy_reports_misspelt_options(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    cache = ROOT / ".mypy_cache"
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    reported = {int(line) for line in re.findall(r"program\.py:(\d+): error", done.stdout)}
    lines = PROGRAM.splitlines()
    expected = {n for n, line in enumerate(lines, 1) if line.endswith("# error")}
    assert reported == expected, done.stdout + done.stderr
