"""``pyqueue demo --web``: the demo with its dashboard, until Ctrl-C."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from typing import Any

import pymongo
from typer.testing import CliRunner

from pyqueue.cli import app
from tests.demo.test_run import SMALL
from tests.support.eventually import LONG, eventually
from tests.support.processes import program

FLIGHTS = {"raw", "parsed", "late", "on-time", "cancelled"}


def read(address: str, path: str = "") -> Any:
    with urllib.request.urlopen(f"{address}json{path}", timeout=LONG) as answer:
        return json.loads(answer.read())


def rows(address: str) -> dict[str, Any]:
    return {each["name"]: each for each in read(address)["rows"]}


def test_dashboard_shows_the_demo_until_ctrl_c(
    url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    command = ("-c", SMALL, "demo", "--web", "--rows", "40", "--url", url)
    with program(*command, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        (address,) = re.findall(r"the dashboard is on (http://\S+/)", process.stderr.readline())
        assert read(address)["tiles"]["dead"] >= 0
        with urllib.request.urlopen(address, timeout=LONG) as answer:
            assert ">demo<" in answer.read().decode()
        assert "the dashboard stays; stop it with Ctrl-C" in process.stderr.readline()

        eventually(lambda: {*rows(address)} >= {*FLIGHTS, "departures"}, "all queues")
        found = rows(address)
        assert found["raw"]["dead"] == 36
        kinds = {name: found[name]["kind"] for name in found.keys() - FLIGHTS}
        assert kinds == {
            "boarding": "ordered",
            "departures": "stream",
            "mails": "standard",
            "positions": "bucket",
        }
        assert found["mails"]["limit"].startswith("Limit(rate=1")
        eventually(lambda: len(rows(address)["departures"]["groups"]) == 2, "two groups")
        eventually(lambda: (rows(address)["parsed"]["in"] or 0) > 0, "figures of the flights")
        eventually(lambda: read(address, "/pipelines")["pipelines"], "the graph")

        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=LONG)
        assert (process.returncode, errors) == (0, "")
        assert "all equal" in out
    database = mongo[str(pymongo.uri_parser.parse_uri(url)["database"])]
    assert database.list_collection_names() == []


def test_web_and_spark_exclude_each_other() -> None:
    done = CliRunner().invoke(app, ["demo", "--web", "--spark"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("pyqueue: --web: cannot be used with --spark")
