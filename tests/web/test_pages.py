"""The pages: their numbers, their tables, and hostile values in all of them."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from pyqueue import Limit
from pyqueue.errors import NotPermitted
from pyqueue.telemetry import reading
from pyqueue.web import sampling, shapes
from pyqueue.web.overview import MAX_ROWS
from pyqueue.web.site import static_files
from tests.web.world import HOSTILE, Pages, World

#: The most bytes and seconds of a page.
MOST_BYTES = 300_000
MOST_S = 1.0


def rows(pages: Pages) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in pages.json("/")["rows"]}


def test_overview_counts_messages_as_counts_does(shop: World) -> None:
    found = rows(shop.pages())
    for name in ("orders", "groups", "levels", "packs"):
        counts = shop.run(shop.client.queue(name).counts)
        shown = {state: found[name][state] for state in ("ready", "reserved", "scheduled")}
        assert shown == {state: getattr(counts, state) for state in shown}, name
    assert (found["orders"]["dead"], found["orders"]["dead_path"]) == (1, "/q/orders.dead")
    assert "orders.dead" not in found
    assert found["packs"]["ready"] == 5
    assert found["clicks"]["ready"] == 7
    (group,) = found["clicks"]["groups"]
    assert (group["name"], group["position"], group["behind"]) == ("audit", 2, 5)


def test_group_that_catches_up_says_when(shop: World) -> None:
    shop.client.collection("metrics").update_many({"q": "clicks~audit"}, {"$set": {"finished": 60}})
    text = shop.pages().get("/")
    (row,) = re.findall(r'<tr class="group">.*?</tr>', text, re.DOTALL)
    assert re.search(r">caught up in \d+ s<", row)
    assert 'data-label="Oldest">–<' in row


def test_overview_adds_the_queues_up(shop: World) -> None:
    tiles = shop.pages().json("/")["tiles"]
    found = [each for each in rows(shop.pages()).values() if each["kind"] != "stream"]
    assert tiles["ready"] == sum(each["ready"] for each in found)
    assert (tiles["reserved"], tiles["dead"], tiles["workers"]) == (2, 1, 1)


def test_figures_of_the_last_hour_are_shown(shop: World) -> None:
    found = rows(shop.pages())
    assert sum(found["orders"]["points"]) == 1  # finished
    assert found["orders"]["p95"] is not None
    text = shop.pages().get("/q/orders")
    assert '<polyline class="line in"' in text
    assert re.search(r'class="(line|dot) working p95"', text)
    for since in (900, 7200, 86_400, 2_592_000):
        assert shop.pages().json(f"/q/orders?since={since}")["since"] == since


def test_counts_beyond_the_cap_are_marked(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LOW_CAP", 3)
    text = shop.pages().get("/")
    assert re.search(r'data-live="packs:ready">2\+<', text)
    assert re.search(r'data-live="tiles:ready">\d+\+<', text)


def test_queue_page_has_a_tab_for_each_state(shop: World) -> None:
    pages = shop.pages()
    tabs = {state: number for state, _, number in pages.json("/q/orders")["tabs"]}
    assert tabs == {"ready": 2, "reserved": 1, "scheduled": 1, "finished": 1}
    for state, number in tabs.items():
        shown = pages.json(f"/q/orders?state={state}")["rows_of_messages"]
        assert len(shown) == number, state
    dead = pages.json("/q/orders.dead")
    assert [(state, number) for state, _, number in dead["tabs"]] == [
        *[("dead", 1), ("reserved", 0), ("finished", 0)]
    ]
    (line,) = dead["rows_of_messages"]
    assert line["error"] == "ValueError: no such book"
    (failed,) = pages.json("/q/orders")["errors"]
    assert (failed["type"], failed["dead"], failed["dead_queue"]) == (
        *("ValueError", 1, "orders.dead"),
    )


def test_filter_selects_messages(shop: World) -> None:
    pages = shop.pages()

    def found(where: str, state: str = "ready") -> list[str]:
        values = pages.json(f"/q/orders?state={state}&where={where}")
        assert values["wrong"] == ""
        return [each["payload"] for each in values["rows_of_messages"]]

    assert len(found("payload.n%3E2")) == 1
    assert len(found("payload.n%3E%3D2+payload.book%3AEmma")) == 2
    assert found("payload.book~zz") == []
    assert len(found("key%3F", "scheduled")) == 1
    wrong = pages.json("/q/orders?where=payload.n")["wrong"]
    assert wrong.startswith("filter: expected PATH:VALUE, found 'payload.n'; use ")
    assert "filter: expected PATH:VALUE" in pages.get("/q/orders?where=payload.n")
    assert "after: this is not a cursor" in pages.get("/q/orders?after=x")


def test_pages_of_a_queue_have_each_message_once(world: World) -> None:
    world.run(world.client.queue("many").push_many, [{"n": n} for n in range(120)])
    pages = world.pages()
    seen, path = list[str](), "/q/many"
    while path:
        values = pages.json(path)
        seen += [each["id"] for each in values["rows_of_messages"]]
        path = "/q/many" + values["next"] if values["next"] else ""
    assert len(seen) == len(set(seen)) == 120


def test_unknown_queues_and_streams_are_not_found(shop: World) -> None:
    pages = shop.pages()
    for path in (
        "/q/none",
        "/s/none",
        "/q/clicks",
        "/s/orders",
        "/m/none",
        "/none",
        "/m/" + "x" * 600,
    ):
        assert "Not found" in pages.get(path, 404)
    assert pages.send("GET", "/json/q/none").json() == {
        "status": 404,
        "text": "There is no queue 'none'.",
    }


# ---- badges, and why a message waits


def badges(pages: Pages, queue: str) -> list[str]:
    return [text for _, text in rows(pages)[queue]["badges"]]


def test_badges_say_what_a_person_should_know(world: World) -> None:
    async def fill() -> None:
        await world.client.queue("halted").push(1)
        await world.client.queue("halted").pause()
        limited = world.client.queue("slow", limit=Limit(concurrency=1, per="headers.a"))
        await limited.push_many([1, 2], headers={"a": "x"})
        assert await limited.reserve(0) is not None
        assert await limited.reserve(0) is None
        await world.client.queue("alone").push(1)

    world.run(fill)
    pages = world.pages()
    assert badges(pages, "halted") == ["paused"]
    assert badges(pages, "slow") == ["limited", "blocked"]
    assert badges(pages, "alone") == []


def test_unattended_and_growing_queues_are_marked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_UNATTENDED_S", -1.0)
    world.run(world.client.queue("alone").push_many, range(20))
    assert badges(world.pages(), "alone") == ["no worker"]
    world.report("w", "alone")
    assert badges(world.pages(), "alone") == []
    world.flush()
    earlier = timedelta(minutes=2)
    metrics = world.client.collection("metrics")
    (document,) = list(metrics.find({"_id": {"$regex": "^m"}, "q": "alone"}))
    at = document["at"] - earlier
    metrics.insert_one({**document, "_id": f"m{at:%Y%m%d%H%M} alone", "at": at})
    assert badges(world.pages(), "alone") == ["growing"]
    metrics.update_many({"q": "alone"}, {"$set": {"pushed": 0, "finished": 600}})
    assert badges(world.pages(), "alone") == ["empty in 10 s"]
    metrics.update_many({"q": "alone"}, {"$set": {"finished": 1500}})
    assert badges(world.pages(), "alone") == []


def test_queue_whose_worker_has_ended_is_marked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "_UNATTENDED_S", -1.0)

    async def work() -> None:
        alone = world.client.queue("alone")
        await alone.push_many(range(20))
        for held in await alone.reserve_many(5, timeout=0):
            await alone.commit(held)

    world.run(work)
    world.flush()
    assert "no worker" not in badges(world.pages(), "alone")
    metrics = world.client.collection("metrics")
    (document,) = list(metrics.find({"_id": {"$regex": "^m"}, "q": "alone"}))
    for minutes, marked in ((4, False), (7, True)):
        at = document["at"] - timedelta(minutes=minutes)
        metrics.delete_many({"_id": {"$regex": "^m"}, "q": "alone"})
        metrics.insert_one({**document, "_id": f"m{at:%Y%m%d%H%M} alone", "at": at})
        assert ("no worker" in badges(world.pages(), "alone")) == marked


def test_message_page_says_why_a_message_waits(shop: World) -> None:
    async def ids() -> dict[str, str]:
        found = {}
        for _ in range(2):  # a scan puts the second message of the group off
            await shop.client.queue("groups").reserve(0)
        for queue in ("groups", "orders"):
            for each in (await shop.client.queue(queue).browse()).messages:
                found[f"{queue} {each.deferred or each.state} {each.group or ''}".strip()] = str(
                    each.id
                )
        return found

    known = shop.run(ids)
    pages = shop.pages()
    waits = pages.json(f"/m/{known['groups group g']}")
    assert waits["why"] == "It waits for an earlier message of its group 'g'."
    assert waits["holder"]["id"] == known["groups reserved g"]
    assert waits["holder"]["path"] in pages.get(f"/m/{known['groups group g']}")
    assert "It is scheduled, for " in pages.json(f"/m/{known['orders scheduled']}")["why"]
    assert pages.json(f"/m/{known['orders reserved']}")["why"] == ""
    assert ["progress", "50% half"] in pages.json(f"/m/{known['orders reserved']}")["facts"]
    ready = f"/m/{known['orders ready']}"
    assert "It is ready." in pages.json(ready)["why"]
    shop.run(shop.client.queue("orders").pause)
    assert shop.pages().json(ready)["why"] == "Its queue is paused."
    shop.report("busy", "orders", in_progress=[{"q": "orders", "id": known["orders reserved"]}])
    assert "<strong>busy</strong> works on it" in shop.pages().get(f"/m/{known['orders reserved']}")


def test_message_page_shows_the_way_and_the_tries(world: World) -> None:
    async def work() -> Any:
        first, second = world.client.queue("first"), world.client.queue("second", max_tries=3)
        await first.push({"n": 1}, headers={"tenant": "a"}, key="k1")
        held = await first.reserve(0)
        assert held is not None
        await first.move(held, to="second")
        for number in range(3):
            held = await second.reserve(0)
            assert held is not None
            await second.progress(held, 0.5, "half")
            await second.checkpoint(held, {"row": number})
            await second.rollback(held, error=KeyError("gone"), delay=0)
        return held.id

    id = world.run(work)
    pages = world.pages()
    values = pages.json(f"/m/{id}")
    assert [each["queue"] for each in values["way"]] == ["first", "second", "second.dead"]
    assert values["way"][-1]["look"] == "dead"
    assert [each["number"] for each in values["attempts"]] == [1, 2, 3]
    assert values["error"]["type"] == "KeyError"
    text = pages.get(f"/m/{id}")
    for part in ("Checkpoint", "KeyError", "tenant", "It is dead", ">second.dead<"):
        assert part in text, part


# ---- large and hostile values


def test_large_payloads_are_shown_in_parts(world: World) -> None:
    payload = {"list": list(range(450)), "text": "x" * 3_000_000, "deep": {}}
    deep = payload["deep"]
    for _ in range(40):
        assert isinstance(deep, dict)
        deep["a"] = {}
        deep = deep["a"]
    id = world.run(world.client.queue("a").push, payload)
    pages = world.pages()
    began = time.perf_counter()
    text = pages.get(f"/m/{id}")
    assert time.perf_counter() - began < MOST_S
    assert len(text.encode()) < MOST_BYTES
    assert f"/m/{id}?at=list&amp;skip=200" in text
    last = pages.get(f"/m/{id}?at=list&skip=400")
    assert ">449<" in last
    assert len(pages.get(f"/m/{id}?at=text").encode()) < MOST_BYTES
    assert "at=deep&amp;at=a&amp;at=a" in text
    assert pages.get(f"/m/{id}?at=deep" + "&at=a" * 39).count("0 fields") == 1


def test_hostile_values_are_escaped_on_every_page(world: World) -> None:
    async def fill() -> list[str]:
        ids = []
        for number, evil in enumerate(HOSTILE):
            queue = world.client.queue("evil")
            safe = evil.replace("\x00", "")
            id = await queue.push(
                {safe.replace(".", "").replace("$", ""): evil, "list": [evil]},
                headers={"h": evil},
                key=f"{number} {safe}",
                id=f"{number} {safe}",
            )
            assert id is not None
            held = await queue.reserve_id(id)
            assert held is not None
            await queue.progress(held, 0.1, evil)
            await queue.checkpoint(held, {"c": evil})
            await queue.bury(held, error=ValueError(evil))
            ids.append(str(id))
            await world.client.queue("evilpacks", kind="bucket").push_many([evil, {"x": evil}])
            await world.client.stream("evilstream").append(evil, headers={"h": evil})
        return ids

    world.run(fill)
    evil = HOSTILE[0]
    run = {"q": "evil", "id": evil}
    world.report(evil, "evil", in_progress=[run], host=evil, version=evil, owner=evil)
    world.flush()
    pages = world.pages(label=evil, allow=lambda request, action, queue: True)
    pages.act("pause", queue="evil")
    began, found = time.perf_counter(), {}
    for start in ("/", *(f"/find?q={each}" for each in ("%3Cscript%3E", "x"))):
        response = pages.send("GET", start)
        found[start] = response.text
    # A person may come from elsewhere, with anything in the URL.
    for argument in ("where", "find", "state", "after", "did", "sort", "at", "verb"):
        for path in ("/", "/q/evil.dead", "/q/evil/bulk"):
            found[f"{path} {argument}"] = pages.send("GET", path, params={argument: evil}).text
    queue = pages.json("/q/evil.dead")
    for each in queue["rows_of_messages"]:
        found[each["path"]] = pages.get(each["path"])
    for path in ("/q/evil.dead", "/q/evilpacks", "/s/evilstream", "/errors", "/workers", "/audit"):
        found[path] = pages.get(path)
    assert (time.perf_counter() - began) / len(found) < MOST_S
    for path, text in found.items():
        assert len(text.encode()) < MOST_BYTES, path
        assert "<script>alert" not in text, path
        assert "<img" not in text, path
        assert "</textarea>" not in text, path
    assert any("{{ 7 * 7 }}" in text for text in found.values())
    assert sum("&lt;script&gt;alert" in text for text in found.values()) >= 8


def test_many_queues_are_grouped_by_name(world: World) -> None:
    async def fill() -> None:
        for number in range(MAX_ROWS + 1):
            await world.client.queue(f"a{number % 3}.{number}").push(1)

    world.run(fill)
    pages = world.pages()
    values = pages.json("/")
    assert values["rows"] == []
    assert [(each["name"], each["queues"], each["ready"]) for each in values["groups"]] == [
        *[("a0", 34, 34), ("a1", 34, 34), ("a2", 33, 33)]
    ]
    assert len(pages.get("/").encode()) < MOST_BYTES
    assert len(pages.json("/?find=A0.")["rows"]) == 34
    order = [each["name"] for each in pages.json("/?find=a0.&sort=ready")["rows"]]
    assert order == sorted(order)


# ---- mounted


@pytest.mark.parametrize("root", ["/admin/queues", "/a/b/c"])
@pytest.mark.parametrize("outer", ["starlette", "fastapi"])
def test_all_links_lead_somewhere_under_a_prefix(shop: World, root: str, outer: str) -> None:
    plain = shop.pages(allow=lambda request, action, queue: True)
    app: Any = FastAPI() if outer == "fastapi" else Starlette()
    app.router.routes.append(Mount(root, plain.dashboard))
    pages = Pages(shop, plain.dashboard, app, root)
    found = pages.crawl()
    kinds = {path.split("?")[0].split("/")[1] for path in found}
    pages_of_all = {"pipelines", "errors", "workers", "schedules", "audit"}
    assert kinds == {"", "q", "s", "m", "static", *pages_of_all}
    for path, text in found.items():
        for form in re.findall(r'action="([^"]*)"', text):
            assert form.startswith(root + "/"), path
    assert pages.act("pause", queue="orders").startswith("/q/orders?did=")
    assert pages.send("GET", "/find?q=orders").headers["location"] == f"{root}/q/orders"


def test_search_finds_queues_streams_and_messages(shop: World) -> None:
    pages = shop.pages()

    def leads(text: str) -> str:
        return str(pages.send("GET", "/find", params={"q": text}).headers["location"])

    assert leads("orders") == "/q/orders"
    assert leads("clicks") == "/s/clicks"
    assert leads("ORDER") == "/?find=ORDER"
    assert leads("6b00635bb4b31ce5bc7b3ac2") == "/m/6b00635bb4b31ce5bc7b3ac2"
    assert leads("//evil.example") == "/m/%2F%2Fevil.example"
    assert leads("") == "/"


def test_other_pages_show_their_subjects(shop: World) -> None:
    pages = shop.pages()
    assert pages.json("/s/clicks")["rows_of_messages"][2]["position"] == 2
    assert [each["position"] for each in pages.json("/s/clicks?after=4")["rows_of_messages"]] == [
        *(5, 6)
    ]
    (error,) = pages.json("/errors")["errors"]
    assert error["message"] == "no such book"
    (run,) = pages.json("/workers")["runs"]
    assert (run["name"], run["queues"], run["silent"]) == ("shipper", ["orders"], False)
    (schedule,) = pages.json("/schedules")["schedules"]
    assert (schedule["name"], schedule["queue"], schedule["paused"]) == ("nightly", "orders", False)
    shop.report("old", "packs", version="0.9", every=-1.0)
    text = shop.pages().get("/workers")
    assert "They run 2 versions: 0.9, 1.0." in text
    assert "silent" in text
    assert 'pyqueue_messages{queue="orders"' in pages.get("/metrics")


def test_script_is_small_and_writes_no_html() -> None:
    script = static_files()["dashboard.js"]
    assert len(script) < 15_000
    assert re.findall(rb"innerHTML|outerHTML|eval\(|insertAdjacent|document\.write", script) == []


# ---- charts


def test_chart_counts_messages_that_moved_in(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fill() -> None:
        for name, number in (("raw.a", 40), ("b", 20)):
            queue = world.client.queue(name)
            await queue.push_many(range(number))
            await queue.move(*await queue.reserve_many(number, timeout=0), to="parsed.x")
        await world.client.queue("parsed.x").push(1)

    world.run(fill)
    world.flush()
    pages = world.pages()
    for since in (7200, 2_592_000):
        legend = {each["look"]: each["value"] for each in pages.json(since_of(since))["legend"]}
        assert legend["in"] == shapes.rate(61 / since) != "0", since
    # The number beside the chart is its maximum: 61 messages in one minute.
    assert f'y="14">{shapes.rate(61 / 60)}<' in pages.get(since_of(900))
    monkeypatch.setattr(reading, "_MAX_SOURCES", 1)
    assert f'y="14">{shapes.rate(21 / 60)}<' in pages.get(since_of(900))  # only from b


def since_of(seconds: int) -> str:
    return f"/q/parsed.x?since={seconds}"


def test_stream_page_has_a_chart_for_each_group(shop: World) -> None:
    text = shop.pages().get("/s/clicks")
    assert "Group audit, last hour" in text
    assert re.search(r'class="in">delivered <strong>[\d.]+/\w+<', text)
    assert re.search(r'class="done">committed <strong>[\d.]+/\w+<', text)
    points = re.findall(r'<polyline class="line (\w+)" points="([^"]*)"', text)
    assert {look for look, _ in points} == {"in", "done", "retried", "dead"}
    lines = dict(points)
    assert lines["in"] == lines["done"] != lines["dead"]
    assert "<svg" not in shop.pages().send("GET", "/json/s/clicks").text


def test_errors_page_may_show_one_queue(shop: World) -> None:
    shop.bury("other", 1, KeyError("gone"))
    shop.flush()
    pages = shop.pages()
    for queue, types in {
        "": {"ValueError", "KeyError"},
        "other": {"KeyError"},
        "no": set(),
    }.items():
        assert {each["type"] for each in pages.json(f"/errors?queue={queue}")["errors"]} == types


@pytest.mark.parametrize("users", [1, 2])
def test_dead_letters_of_a_queue_with_any_name_are_shown(world: World, users: int) -> None:
    async def fill() -> None:
        for name in ("jobs", "tasks")[:users]:
            queue = world.client.queue(name, dead_letter="graveyard")
            for number in range(3):
                await queue.push(number)
                held = await queue.reserve(0)
                assert held is not None
                await queue.bury(held, error=ValueError("no"))

    world.run(fill)
    pages = world.pages(allow=lambda request, action, queue: True)
    values = pages.json("/q/graveyard")
    assert len(values["rows_of_messages"]) == 3 * users
    assert [state for state, _, _ in values["tabs"]] == ["dead", "reserved", "finished"]
    assert "redrive" in values["bulk"]
    board = pages.json("/")
    assert board["tiles"]["ready"] == 0
    assert board["tiles"]["dead"] == 3 * users
    assert "dead letters" in str(board["troubles"])


def test_queue_page_without_rights_to_the_figures(
    shop: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*given: Any) -> Any:
        raise NotPermitted("no")

    monkeypatch.setattr(reading, "aside", forbidden)
    values = shop.pages().json("/q/orders")
    assert values["rows_of_messages"]
