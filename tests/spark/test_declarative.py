"""Spark Declarative Pipelines: a queue is the source of a streaming table, and a sink of a flow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

import pyqueue.spark
from pyqueue import Client
from pyqueue.spark.session import find_java
from tests.support.processes import ROOT

pytestmark = pytest.mark.xdist_group("spark")

#: A run of a pipeline ends by itself. One that lasts longer than this, in seconds, hangs.
RUN_S = 600.0

SPEC = """
name: flights
storage: file://{folder}/storage
libraries:
  - glob:
      include: transformations/**
"""

SINK = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession

spark = SparkSession.active()
dp.create_sink("late", "pyqueue", {"uriEnv": "QUEUE_URI", "queue": "late", "stage": "late"})


@dp.append_flow(target="late")
def late_flights():
    options = {"uriEnv": "QUEUE_URI", "queue": "raw", "group": "late", "numPartitions": "1"}
    flights = spark.readStream.format("pyqueue").options(**options).load()
    return flights.where("cast(get_json_object(payload, '$.delay') as int) > 0")
"""


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, signals="none:") as client:
        yield client


@pytest.mark.slow
def test_declarative_pipeline_writes_each_message_once(
    url: str, client: Client, tmp_path: Path
) -> None:
    """Three runs: new messages, more of them, and none. The checkpoint is the pipeline's."""
    pytest.importorskip("yaml", reason="spark-pipelines reads its settings by PyYAML")
    late = client.queue("late")
    project = tmp_path / "project"
    (project / "transformations").mkdir(parents=True)
    (project / "transformations" / "flows.py").write_text(SINK)
    (project / "spark-pipeline.yml").write_text(SPEC.format(folder=tmp_path))
    for delays, expected in (((-1, 5), [5]), ((7, -3), [5, 7]), ((), [5, 7])):
        client.queue("raw").push_many([{"delay": delay} for delay in delays])
        run(project, url)
        assert sorted(each.payload["delay"] for each in late.peek()) == expected


def run(project: Path, url: str) -> None:
    """Run a pipeline to its end. Spark finds the data source by the module of the wheel."""
    find_java()
    modules = project / "modules"
    modules.mkdir(exist_ok=True)
    source = Path(pyqueue.spark.__file__).with_name("pyspark_pyqueue.py")
    shutil.copy(source, modules)
    home = Path(pyspark.__file__).parent
    environment = os.environ | {
        "QUEUE_URI": url,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(modules), os.environ.get("PYTHONPATH", "")]),
    }
    command = [str(home / "bin" / "spark-pipelines"), "run", "--spec", "spark-pipeline.yml"]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
