"""The overview names what needs attention, with its cause and the action that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pymongo
import pytest
from anyio.from_thread import start_blocking_portal
from bson import ObjectId

from pyqueue import Limit
from pyqueue.web import sampling
from pyqueue.web import troubles as web_troubles
from pyqueue.web.overview import MAX_ROWS
from pyqueue.web.redacting import HIDDEN
from pyqueue.web.sampling import LOW_CAP
from pyqueue.web.troubles import KINDS, MAX_SHOWN
from tests.web.test_pages import MOST_BYTES
from tests.web.world import Pages, World

Mongo = pymongo.MongoClient[dict[str, Any]]
KINDS_OF_QUEUES = ("standard", "priority", "ordered", "bucket", "stream")
ERRORS = (ValueError, KeyError, TypeError, OSError, LookupError)
PAST = timedelta(minutes=10)


class Scale(NamedTuple):
    """How large the staged troubles are."""

    queues: int
    #: The messages of the blocked group, and the packs that the consumer group is behind.
    waiting: int
    packs: int


class Line(NamedTuple):
    """A line of the table of troubles."""

    name: str
    path: str
    cause: str
    help: str
    help_path: str


class Stage:
    """A namespace on a real server, and direct access to its documents."""

    def __init__(self, world: World, database: Any) -> None:
        self.world, self.client, self.database = world, world.client, database
        self.messages = database[world.client.namespace]

    def beside(self, suffix: str) -> Any:
        return self.database[f"{self.client.namespace}.{suffix}"]

    def age(self, queue: str) -> None:
        """Let the waiting messages of a queue have waited for a while."""
        past = datetime.now(UTC) - PAST
        waiting = {"q": queue, "pushed": {"$exists": True}, "token": {"$exists": False}}
        self.messages.update_many(waiting, {"$set": {"due": past}})

    def lines(self, pages: Pages) -> dict[str, list[Line]]:
        """Return the troubles that the page shows, by kind."""
        (table,) = re.findall(r'<section class="troubles">.*?</section>', pages.get("/"), re.DOTALL)
        row = (
            r'<tr>.*?class="badge \w+">([^<]*)<.*?href="([^"]*)">([^<]*)<.*?"Cause">([^<]*)<'
            r'.*?href="([^"]*)">([^<]*)<'
        )
        found: dict[str, list[Line]] = {}
        for each in re.findall(row, table, re.DOTALL):
            kind, path, name, cause, help_path, action = map(unescape, each)
            found.setdefault(kind, []).append(Line(name, path, cause, action, help_path))
        return found


@pytest.fixture
def stage(url: str, mongo: Mongo) -> Iterator[Stage]:
    database = mongo.get_database(url.rpartition("/")[2].partition("?")[0])
    with start_blocking_portal() as portal:
        world = World(portal, url)
        yield Stage(world, database)
        world.run(world.client.close)


# ---- the troubles


def stage_group(stage: Stage, waiting: int) -> None:
    """Stage a group whose first message is held, so that the other messages wait."""

    async def fill() -> None:
        orders = stage.client.queue("orders", kind="ordered", lease=3600)
        await orders.push_many([0, 1], groups=["acme", "acme"])
        for _ in range(2):  # the second scan defers the second message
            await orders.reserve(0)

    stage.world.run(fill)
    past = datetime.now(UTC) - PAST
    held = {"q": "orders", "lock": {"$exists": True}}
    assert stage.messages.update_one(held, {"$set": {"reserved": past}}).matched_count == 1
    model = stage.messages.find_one({"q": "orders", "group": {"$exists": True}})
    copies = [{**model, "_id": ObjectId(), "no": model["no"] + n} for n in range(1, waiting)]
    stage.messages.insert_many(copies, ordered=False)
    stage.age("orders")


def stage_stream(stage: Stage, packs: int) -> None:
    """Stage a consumer group that is many packs of 1000 messages behind."""

    async def fill() -> None:
        clicks = stage.client.stream("clicks")
        await clicks.append_many(range(1000))
        audit = clicks.consumer("audit")
        await audit.commit(*await audit.reserve_many(1, timeout=0))

    stage.world.run(fill)
    model = stage.messages.find_one({"q": "~log:clicks"})
    for n in range(1, packs):
        id = f"~log:clicks~{1000 * n:016d}"
        stage.messages.insert_one({**model, "_id": id, "s": 1000 * n})


def stage_queues(stage: Stage) -> None:
    """Stage a limit that is used up, a paused queue, and dead letters of five errors."""

    async def fill() -> None:
        mails = stage.client.queue("mails", limit=Limit(concurrency=2))
        await mails.push_many(range(5))
        await mails.reserve_many(2, timeout=0)
        await stage.client.queue("halted").push_many(range(3))
        await stage.client.queue("halted").pause()

    stage.world.run(fill)
    stage.age("mails")
    for error in ERRORS:
        stage.world.bury("imports", 1, error("bad"))


def stage_schedules(stage: Stage) -> None:
    """Stage a schedule that has not fired, and a schedule that fires into nothing."""

    async def fill() -> None:
        await stage.client.schedule("nightly", queue="reports", every=3600)
        await stage.client.schedule("hourly", queue="nowhere", every=3600)
        await stage.client.run_schedule("hourly")

    stage.world.run(fill)
    late = {"$set": {"when": datetime.now(UTC) - PAST}}
    assert stage.messages.update_one({"spec.queue": "reports"}, late).matched_count == 1
    stage.age("nowhere")


def stage_figures(stage: Stage) -> None:
    """Stage a silent worker and a growing queue."""
    now = datetime.now(UTC)
    worker = {"_id": "w", "kind": "worker", "name": "packer", "beat": now - PAST, "every": 5.0}
    worker |= {"stages": [{"q": "uploads"}], "messages": 2, "host": "h1", "pid": 7, "started": now}
    stage.beside("workers").insert_one({**worker, "expires": now + timedelta(hours=1)})
    stage.world.run(stage.client.queue("uploads").push_many, range(60))
    stage.world.flush()
    metrics = stage.beside("metrics")
    (known,) = metrics.find({"_id": {"$regex": "^m"}, "q": "uploads"})
    at = known["at"] - timedelta(minutes=2)
    metrics.insert_one({**known, "_id": f"m{at:%Y%m%d%H%M} uploads", "at": at})


def stage_healthy(stage: Stage, number: int) -> None:
    """Stage queues of every kind without trouble, and streams among them."""

    async def fill() -> None:
        for place in range(number):
            kind = KINDS_OF_QUEUES[place % len(KINDS_OF_QUEUES)]
            named: Any = kind
            if kind == "stream":
                stream = stage.client.stream(f"p{place % 7}.{place}")
                await stream.append(1)
                await stream.consumer("g").pause()
                await stream.consumer("g").resume()
            else:
                groups = {"group": "g"} if kind == "ordered" else {}
                queue: Any = stage.client.queue(f"p{place % 7}.{place}", kind=named)
                await queue.push(1, delay=3600, **groups)

    stage.world.run(fill)


def stage_all(stage: Stage, scale: Scale) -> None:
    stage_healthy(stage, scale.queues)
    stage_group(stage, scale.waiting)
    stage_stream(stage, scale.packs)
    stage_queues(stage)
    stage_schedules(stage)
    stage_figures(stage)


#: For each kind of trouble: its name, its cause as a pattern, and the action that the linked page
#: must offer. The texts of the links are in ``KINDS``.
EXPECTED: dict[str, list[tuple[str, str, str]]] = {
    "silent worker": [("packer", r"h1:7 has not reported for 10 min, with 2 messages in work", "")],
    "blocked group": [
        (
            "orders",
            r"group 'acme': [\d\s+]+ messages waiting while me holds one for 10 min",
            "force_release",
        )
    ],
    "no worker": [
        ("nowhere", "no worker receives from it; 1 message waiting, the oldest for 10", "")
    ],
    "schedule": [
        ("hourly", "it pushes to nowhere, from which no worker receives", "act/run"),
        ("nightly", "its tick is 10 min late, because no worker runs", "act/run"),
    ],
    "dead letters": [
        (
            "imports",
            "5 dead letters of 5 errors: (ValueError|KeyError|TypeError|OSError|LookupError|, )+$",
            "verb=redrive",
        )
    ],
    "behind": [
        ("clicks~audit", r"[\d\s+]+ messages behind; 0.2/min are done, and \S+ come in", "act/seek")
    ],
    "limit used up": [("mails", r"Limit\(concurrency=2\); 3 messages waiting", "")],
    "growing": [("uploads", r"\S+ come in, and 0 are done by 0 workers", "")],
    "paused": [("halted", "it is paused; 3 messages waiting", "act/resume")],
}


def check(stage: Stage) -> dict[str, list[Line]]:
    """Check that each staged trouble, and no other, is named with its cause and what helps."""
    pages = stage.world.pages(allow=lambda request, action, queue: True)
    found = stage.lines(pages)
    assert {kind: [each.name for each in some] for kind, some in found.items()} == {
        kind: [name for name, _, _ in some] for kind, some in EXPECTED.items()
    }
    for kind, some in EXPECTED.items():
        for line, (_, cause, action) in zip(found[kind], some, strict=True):
            assert re.match(cause, line.cause), line
            assert line.help == KINDS[kind][1]
            assert action in pages.get(line.help_path), line
            pages.get(line.path)
    return found


def test_overview_names_each_trouble_and_what_helps(stage: Stage) -> None:
    stage_all(stage, Scale(queues=30, waiting=5, packs=2))
    found = check(stage)
    assert "5 messages" in found["blocked group"][0].cause
    assert found["behind"][0].cause.startswith("1\u202f999 messages")


# ---- the cost


class Cost(NamedTuple):
    """What the server did for a page."""

    commands: int
    #: How many documents were examined, without those examined to count messages by state.
    documents: int
    #: How many documents were examined to count messages by state.
    counted: int


#: Commands that tell messages in work from scheduled messages. The server cuts long commands off.
_TELLS_HELD = re.compile(r"token'?: \{ ?'?\$exists'?: [Tt]rue")


def cost_of_page(stage: Stage) -> Cost:
    """Return how many commands a page took, and how much the server examined for them."""
    pages = stage.world.pages()
    stage.database.command("profile", 2)
    pages.get("/")
    stage.database.command("profile", 0)
    # The client may store its figures meanwhile: those are updates.
    match = {"ns": {"$regex": f"[.]{stage.messages.name}"}, "op": {"$ne": "update"}}
    found = list(stage.database["system.profile"].find(match))
    stage.database["system.profile"].drop()
    counts = [each for each in found if _TELLS_HELD.search(str(each["command"]))]
    return Cost(
        len(found),
        sum(each.get("docsExamined", 0) for each in found if each not in counts),
        sum(each.get("docsExamined", 0) for each in counts),
    )


def portions(stage: Stage) -> int:
    """Return how many portions of up to 100 queues the namespace has."""
    return -(-len([each for each in stage.messages.distinct("q") if each[0] != "~"]) // 100)


def check_cost(stage: Stage, scale: Scale) -> None:
    cost, number = cost_of_page(stage), portions(stage)
    # For each portion: counts, packs and the oldest messages, ends of streams and their groups.
    assert cost.commands <= 12 + 6 * number, cost
    # Records, ends of streams, figures, and a few documents of each queue. No message is read.
    assert cost.documents <= 10 * (scale.queues + 30), cost
    # To tell messages in work from scheduled messages, the server reads all of these.
    assert cost.counted <= scale.waiting + LOW_CAP + 10 * (scale.queues + 30), cost


def test_cost_of_the_overview_is_bounded(stage: Stage) -> None:
    scale = Scale(queues=30, waiting=3000, packs=4)
    stage_all(stage, scale)
    check_cost(stage, scale)


@pytest.mark.slow
def test_troubles_are_named_among_many_queues(stage: Stage) -> None:
    scale = Scale(queues=990, waiting=100_000, packs=1001)
    stage_all(stage, scale)
    text = stage.world.pages().get("/")
    assert len(text.encode()) < MOST_BYTES
    assert len(stage.messages.distinct("q", {"_id": {"$regex": "^~queue:"}})) > MAX_ROWS
    found = check(stage)
    assert "1\u202f000+ messages" in found["blocked group"][0].cause
    assert found["behind"][0].cause.startswith("1\u202f000\u202f999 messages")
    check_cost(stage, scale)


# ---- single troubles


def test_troubles_of_one_kind_are_listed_up_to_a_number(world: World) -> None:
    async def fill() -> None:
        for place in range(MAX_SHOWN + 3):
            await world.client.queue(f"q{place:02}").pause()

    world.run(fill)
    (paused,) = world.pages().json("/")["troubles"]
    assert (paused["kind"], len(paused["rows"]), paused["more"]) == ("paused", MAX_SHOWN, 3)
    assert ">3 more<" in world.pages().get("/")


def test_troubles_of_hidden_queues_are_not_named(world: World) -> None:
    async def fill() -> None:
        await world.client.queue("salaries").pause()
        await world.client.schedule("payday", queue="salaries", every=3600)
        await world.client.pause_schedule("payday")

    world.bury("salaries", 1, ValueError("bad"))
    world.run(fill)
    world.report("payer", "salaries", every=-1.0)
    world.flush()
    assert len(world.pages().json("/")["troubles"]) == 3
    hidden = world.pages(allow=lambda request, action, queue: queue in (None, "x"))
    assert hidden.json("/")["troubles"] == []
    assert "Needs attention" not in hidden.get("/")


def troubles(pages: Pages) -> dict[str, str]:
    """Return the causes of all troubles, by name."""
    kinds = pages.json("/")["troubles"]
    return {each["name"]: each["cause"] for kind in kinds for each in kind["rows"]}


def test_paused_groups_and_schedules_are_named(world: World) -> None:
    async def fill() -> None:
        clicks = world.client.stream("clicks")
        await clicks.append_many(range(3))
        await clicks.consumer("audit").pause()
        await world.client.schedule("nightly", queue="orders", every=3600)
        await world.client.pause_schedule("nightly")

    world.run(fill)
    assert troubles(world.pages()) == {
        "clicks~audit": "the consumer group is paused, 3 messages behind",
        "nightly": "the schedule is paused",
    }


def test_group_behind_a_failed_message_is_named(world: World) -> None:
    async def fill() -> str:
        orders = world.client.queue("orders", kind="ordered", max_tries=9)
        await orders.push_many(range(3), groups=["acme"] * 3)
        held = await orders.reserve(0)
        assert held is not None
        await orders.rollback(held, error=ValueError("bad"), delay=3600)
        assert await orders.reserve(0) is None
        return str(held.id)

    id = world.run(fill)
    (kind,) = world.pages().json("/")["troubles"]
    (row,) = kind["rows"]
    assert row["cause"] == (
        "group 'acme': 2 messages waiting behind one whose try failed, and whose next is in 60 min"
    )
    assert row["help_path"] == f"/m/{id}"
    assert "act/requeue" in world.pages(allow=lambda *_: True).get(row["help_path"])


def test_rates_and_limits_per_key_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_troubles, "_WAIT_S", -1.0)

    async def fill() -> None:
        slow = world.client.queue("slow", limit=Limit(rate=2, period=3600, burst=2))
        await slow.push_many(range(3))
        await slow.reserve_many(3, timeout=0)
        keyed = world.client.queue("keyed", limit=Limit(concurrency=1, per="headers.a"))
        await keyed.push_many([1, 2], headers={"a": "x"})
        await keyed.reserve(0)
        assert await keyed.reserve(0) is None
        await world.client.queue("free", limit=Limit(concurrency=5)).push(1)

    world.run(fill)
    world.flush()
    assert troubles(world.pages()) == {
        "keyed": "Limit(concurrency=1, per='headers.a'); 1 message waiting",
        "slow": "Limit(rate=2, period=3600.0, burst=2); 1 message waiting",
    }


# ---- streams


def test_groups_of_all_streams_are_read(stage: Stage) -> None:
    async def fill() -> None:
        for place in range(25):
            stream = stage.client.stream(f"s{place:02}")
            await stream.append_many(range(5))
            group = stream.consumer("g")
            await group.commit(*await group.reserve_many(place % 5 + 1, timeout=0))
        late = stage.client.stream("s03").consumer("late")
        await late.seek(4)

    stage.world.run(fill)
    pages = stage.world.pages()
    rows = {each["name"]: each["groups"] for each in pages.json("/")["rows"]}
    for name, groups in rows.items():
        infos = stage.world.run(stage.client.stream(name).consumers)
        assert [(each["name"], each["behind"]) for each in groups] == [
            (info.name, info.counts.total) for info in infos
        ]
    assert [each["name"] for each in rows["s03"]] == ["g", "late"]
    assert len(pages.json("/s/s24")["groups"]) == 1


def test_bounds_respect_the_retention(stage: Stage) -> None:
    async def fill() -> list[int]:
        clicks = stage.client.stream("clicks")
        await clicks.append_many(range(10))
        await clicks.consumer("g").seek("first")
        return [each.counts.total for each in await clicks.consumers()]

    assert stage.world.run(fill) == [10]
    stage.messages.update_one({"_id": "~queue:clicks"}, {"$set": {"first": 4}})
    (group,) = stage.world.run(stage.client.stream("clicks").consumers)
    (shown,) = stage.world.pages().json("/s/clicks")["groups"]
    assert (shown["behind"], shown["skipped"]) == (6, 4) == (group.counts.total, 4)


# ---- causes


def test_group_without_a_worker_and_a_failed_tick_say_so(stage: Stage) -> None:
    async def fill() -> None:
        clicks = stage.client.stream("clicks")
        await clicks.append_many(range(1000))
        await clicks.consumer("audit").seek("first")
        await stage.client.schedule("nightly", queue="orders", every=3600)

    stage.world.run(fill)
    failed = {"$set": {"error": "refused: password=abc"}}
    assert stage.messages.update_one({"spec.queue": "orders"}, failed).matched_count == 1
    assert troubles(stage.world.pages()) == {
        "clicks~audit": "1\u202f000 messages behind; no worker",
        "nightly": f"the last tick failed: refused: password={HIDDEN}",
    }


def test_holder_whose_lease_has_ended_is_named(stage: Stage) -> None:
    stage_group(stage, 2)
    past = datetime.now(UTC) - timedelta(minutes=5)
    stage.messages.update_one({"q": "orders", "lock": {"$exists": True}}, {"$set": {"when": past}})
    (line,) = stage.lines(stage.world.pages())["blocked group"]
    cause = line.cause
    assert re.search(r"while me holds one for 10 min; its lease ended 5 min ago$", cause), cause


def test_few_groups_and_blocked_queues_are_read(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_troubles, "_WAIT_S", -1.0)

    async def fill() -> None:
        for name in ("first", "second"):
            queue = world.client.queue(name, kind="ordered")
            await queue.push_many([1, 2], groups=["g", "g"])
            for _ in range(2):
                await queue.reserve(0)
            clicks = world.client.stream(f"{name}clicks")
            await clicks.append(1)
            await clicks.consumer("audit").pause()

    world.run(fill)
    assert {*troubles(world.pages())} == {
        *("first", "second", "firstclicks~audit", "secondclicks~audit"),
    }
    monkeypatch.setattr(sampling, "_MAX_BLOCKED", 1)
    monkeypatch.setattr(sampling, "_MAX_GROUPS", 1)
    assert {*troubles(world.pages())} == {"first", "firstclicks~audit"}


def test_page_on_the_dashboard_lists_all_kinds() -> None:
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "dashboard.md").read_text()
    _, _, table = text.partition("| Trouble | Shown if | What helps |\n|---|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    assert [each.split(" | ")[0].removeprefix("| ") for each in rows] == [*KINDS]
