"""Mistakes are errors for a type checker, and it knows the types of a service."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import blocks
from tests.support.servers import missing

#: One worker runs both, and early: the first one fills a cache, which takes long.
pytestmark = pytest.mark.xdist_group("types")

ROOT = Path(__file__).parents[1]

#: mypy must report the lines that end in "# error", and no other line.
PROGRAM = """
from pyqueue import AsyncClient, Client, Worker
from pyqueue.messages import Id

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

client.queue("orders", kind="priorty")  # error
pushed: Id = queue.push(1, delay=2)
pushed = queue.push(1, key="k")  # error
client.request(queue, 1, timeout=2)
client.request("orders", {"n": 1})
client.request(queue, "one")  # error


async def main() -> None:
    client = AsyncClient("memory:")
    await client.request(client.queue("orders", int), 1)
    await client.request(client.queue("orders", int), "one")  # error
"""

#: Calls of the testing kit.
KIT = """
from typing import Any, assert_type

from pyqueue import AsyncClient, Client, Report, Worker
from pyqueue.testing import Performed, assert_enqueued, drain, perform, refute_enqueued

client = Client("memory:")
worker = Worker(client).on("a", print)
assert_type(drain(worker), Report)
assert_type(perform(worker, "a", 1), Performed)
assert_enqueued(client, "a")[0].payload
refute_enqueued(client, "a")


async def main() -> None:
    client = AsyncClient("memory:")
    worker = Worker(client).on("a", print)
    assert_type(await drain(worker), Report)
    assert_type(await perform(worker, "a", 1, tries=2), Performed)
    (await assert_enqueued(client, "a"))[0].payload
    await refute_enqueued(client, "a")
    drain(worker)  # error
    perform(worker, "a", 1)  # error
    assert_enqueued(client, "a")  # error
    refute_enqueued(client, "a")  # error


def of_any(worker: Worker[Any]) -> None:
    drain(worker)
"""

#: A service whose types are all known.
SERVICE = """
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_type

from pyqueue import AsyncClient, Client, Delivery, QueueSpec, Report, To, Worker
from pyqueue.messages import Id


@dataclass
class Job:
    order: int


@dataclass
class Mail:
    text: str


class Carrier:
    pass


SHIP = QueueSpec("ship", Job, lease=15)
MAIL = QueueSpec("mail", Mail)
assert_type(SHIP, QueueSpec[Job])
assert_type(QueueSpec("any"), QueueSpec[Any])
QueueSpec("ship", Job, leese=15)  # error


async def lifespan() -> AsyncIterator[Carrier]:
    yield Carrier()


client = Client("memory:")
worker = Worker(client, lifespan=lifespan)
Worker(client, lifespan=3)  # error


@worker.use
async def timed(delivery: Delivery, call_next: Callable[[Delivery], Awaitable[object]]) -> object:
    return await call_next(delivery)


@worker.use
def plain(delivery: Delivery, call_next: Callable[[Delivery], object]) -> object:
    return call_next(delivery)


@worker.use  # error
async def takes_too_little(delivery: Delivery) -> None: ...


@worker.on(SHIP, to=[MAIL], retry_on=OSError, reject_on=(KeyError, ValueError))
async def ship(job: Job, delivery: Delivery[Job, Carrier]) -> To:
    assert_type(delivery.state, Carrier)
    assert_type(delivery.message.payload, Job)
    await delivery.progress(0.5)
    return To("mail", Mail("sent"))


@worker.on("jobs", model=Job, batch=10)
def batch(jobs: list[Job], deliveries: list[Delivery[Job]]) -> None: ...


@worker.on(SHIP)  # error
def takes_another(mail: Mail) -> None: ...


@worker.on("jobs", model=Job, batch=10)  # error
def takes_no_list(job: Job) -> None: ...


def takes_mail(mail: Mail) -> None: ...


worker.on(SHIP, ship)
worker.on(client.queue(SHIP), ship)
worker.on(SHIP, takes_mail)  # error
worker.on("letters", lambda letter: None, lease=3)
worker.on("letters", print, retry_on=3)  # error

report = worker.run()
assert_type(report, Report)
assert_type(report.stages["ship"]["out"], int)
assert_type(Worker().run(), Report)
assert_type(Worker().bind(client).run(), Report)
pipeline = client.pipeline(lifespan=lifespan)
pipeline.use(timed)
pipeline.use(takes_too_little)  # error
client.pipeline(lifespan=3)  # error


@pipeline.link(SHIP, to=MAIL)
async def pack(job: Job, delivery: Delivery[Job, Carrier]) -> Mail:
    return Mail("packed")


@pipeline.choice("sorted", model=Job, batch=10, to=[MAIL, "late"])
def choose(jobs: list[Job], deliveries: list[Delivery[Job]]) -> list[To]:
    return [To("late") for _ in jobs]


@pipeline.sink("letters")
def takes_anything(letter: str) -> None: ...


@pipeline.link(SHIP, to=MAIL)  # error
def links_another(mail: Mail) -> Mail:
    return mail


@pipeline.choice("sorted", model=Job, batch=10, to=[MAIL])  # error
def chooses_for_no_list(job: Job) -> list[To]:
    return []


@pipeline.choice(SHIP, batch=10, to=[MAIL])  # error
def chooses_for_another(mails: list[Mail]) -> list[To]:
    return []


@pipeline.sink("late", model=Job)  # error
def sinks_another(mail: Mail) -> None: ...


def takes_number(number: int | None) -> None: ...
def takes_some(jobs: Sequence[Job]) -> None: ...
def takes_state(payload: dict[str, Any], delivery: Delivery[Any, Carrier]) -> None: ...


class Halved:
    async def __call__(self, number: int, delivery: Delivery[int]) -> float:
        return number / 2


found: list[Any] = []


pipeline.link(SHIP, pack, to=MAIL).choice("sorted", choose, model=Job, batch=10, to=["late"])
pipeline.sink(SHIP, batch, batch=10).sink(MAIL, takes_mail).sink("late", takes_mail, model=Mail)
pipeline.sink("numbers", takes_number, model=int | None).sink("any", print)
pipeline.sink("lists", lambda job: None, model=Job).sink("upper", str.upper)
pipeline.sink("pairs", lambda job, delivery: None, batch=10).sink("part", partial(print, "x"))
pipeline.sink("words", found.append, batch=10).sink(SHIP, takes_some, batch=10)
pipeline.link("halves", Halved(), to="b", model=int).sink("b", takes_state)
pipeline.link(SHIP, takes_mail, to=MAIL)  # error
pipeline.link("sorted", takes_mail, to=MAIL, model=Job)  # error
pipeline.choice(SHIP, takes_mail, to=["late"])  # error
pipeline.choice("sorted", takes_mail, to=["late"], model=Job)  # error
pipeline.sink(SHIP, takes_mail)  # error
pipeline.sink("late", takes_mail, model=Job)  # error
pipeline.sink("late", choose, model=Mail, batch=10)  # error
worker.on("jobs", batch, model=Job, batch=10)
worker.on("jobs", takes_mail, model=Job)  # error
worker.on("jobs", takes_mail, model=Mail)
assert_type(client.pipeline().run(), Report)
assert_type(client.queue(SHIP).push(Job(1)), Id)
assert_type(client.queue(SHIP).push(Job(1), key="k"), Id | None)
client.queue(SHIP).push(Mail("x"))  # error
client.queue(SHIP, lease=3)  # error


async def main() -> None:
    async with AsyncClient("memory:") as client:
        assert_type(await client.queue(SHIP).push(Job(1)), Id)
        assert_type(await Worker(client).run(), Report)
        assert_type(await Worker().bind(client).run(), Report)
        assert_type(await client.pipeline().run(), Report)
"""

#: The programs by name. The last is a whole service without a mistake: app, outbox, worker, status.
PROGRAMS = {
    "program": PROGRAM,
    "service": SERVICE,
    "page": "\n\n".join(each.text for each in blocks("docs/how-to/types.md")),
    "kit": KIT,
    "whole": (ROOT / "tests/typed/service.py").read_text(),
}


class Reported(NamedTuple):
    """The results of a checker: the lines with errors of each program, and its output."""

    lines: Mapping[str, set[int]]
    output: str


def mypy(folder: Path) -> Reported:
    """Return the lines in which mypy reports errors."""
    cache = f"--cache-dir={ROOT / '.mypy_cache'}"
    programs = [str(folder / f"{name}.py") for name in PROGRAMS]
    command = [sys.executable, "-m", "mypy", "--strict", cache, *programs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = defaultdict[str, set[int]](set)
    for path, line in re.findall(r"^(.*?):(\d+): error", done.stdout, re.MULTILINE):
        found[Path(path).stem].add(int(line))
    return Reported(found, done.stdout + done.stderr)


def pyright(folder: Path) -> Reported:
    """Return the lines in which pyright reports errors, by its standard rules."""
    if find_spec("basedpyright") is None:
        missing("basedpyright is not installed")
    programs = [str(folder / f"{name}.py") for name in PROGRAMS]
    config = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", "include": programs}
    project = folder / "pyrightconfig.json"
    project.write_text(json.dumps(config))
    command = [sys.executable, "-m", "basedpyright", "-p", str(project), "--outputjson"]
    done = subprocess.run(
        [*command, "--pythonpath", sys.executable], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(PROGRAMS)
    found = defaultdict[str, set[int]](set)
    for each in report["generalDiagnostics"]:
        if each["severity"] == "error":
            found[Path(each["file"]).stem].add(each["range"]["start"]["line"] + 1)
    return Reported(found, done.stdout)


@pytest.fixture(scope="module", params=[mypy, pyright])
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """The results of one run of a checker over all programs. To start it takes the longest."""
    folder = tmp_path_factory.mktemp("programs")
    for name, text in PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    checked: Reported = request.param(folder)
    return checked


@pytest.mark.parametrize("name", PROGRAMS)
def test_checkers_report_only_the_mistakes(name: str, reported: Reported) -> None:
    lines = enumerate(PROGRAMS[name].splitlines(), 1)
    expected = {number for number, line in lines if line.endswith("# error")}
    assert reported.lines.get(name, set()) == expected, reported.output


def test_checkers_report_nothing_elsewhere(reported: Reported) -> None:
    assert {*reported.lines} <= {*PROGRAMS}, reported.output
