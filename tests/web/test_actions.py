"""The actions: what each changes, and that the audit has it first."""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import Unavailable
from pyqueue.web.audit import Audit
from tests.web.world import Pages, World


def entries(world: World) -> list[tuple[Any, ...]]:
    found = world.client.collection("audit").find({}, sort=[("_id", 1)])
    return [(each["action"], each["queue"], each.get("result")) for each in found]


def state(world: World, id: Any) -> str | None:
    found = world.run(world.client.find, id)
    return None if found is None else found.state


def test_messages_are_changed_one_by_one(world: World, pages: Pages) -> None:
    async def fill() -> list[str]:
        queue = world.client.queue("a", history=60)
        ids = [await queue.push(n, delay=60) for n in range(3)]
        held = await queue.reserve_id(ids[2])
        assert held is not None
        return [str(each) for each in ids]

    one, two, held = world.run(fill)
    assert pages.act("requeue", queue="a", id=one).startswith(f"/m/{one}?did=")
    assert state(world, one) == "ready"
    assert pages.act("cancel", queue="a", id=two).startswith("/q/a?did=")
    assert state(world, two) == "finished"
    pages.act("replay", queue="a", id=two)
    assert state(world, two) == "ready"
    pages.act("cancel", queue="a", id=held)
    assert state(world, held) == "reserved"
    pages.act("force_release", queue="a", id=held)
    assert state(world, held) == "scheduled"  # it was pushed with a delay
    pages.act("force_release", queue="a", id=held)
    dead = world.bury("a", 1, "why")
    pages.act("requeue", queue="a.dead", id=dead)
    assert state(world, dead) == "ready"
    other = world.bury("a", 1, "why")
    pages.act("remove", queue="a.dead", id=other)
    assert state(world, other) is None
    unchanged = "nothing was changed: the message has moved, changed or ended"
    assert entries(world) == [
        ("requeue", "a", "the message is ready"),
        ("cancel", "a", "the message was cancelled"),
        ("replay", "a", "the message is ready again"),
        ("cancel", "a", "its holder was asked to end it"),
        ("force_release", "a", "the message is ready again"),
        ("force_release", "a", unchanged),
        ("requeue", "a.dead", "the message is ready"),
        ("remove", "a.dead", "the message was removed"),
    ]


def test_cancel_by_force_ends_a_held_message(world: World, pages: Pages) -> None:
    async def hold() -> Any:
        queue = world.client.queue("a")
        await queue.push(1)
        held = await queue.reserve(0)
        assert held is not None
        return held.id

    id = world.run(hold)
    pages.act("cancel", queue="a", id=id, force="1")
    assert state(world, id) is None


def test_permission_is_about_the_queue_that_has_the_message(world: World) -> None:
    async def hold() -> Any:
        for name in ("mine", "theirs"):
            await world.client.queue(name).push(1)
        held = await world.client.queue("theirs").reserve(0)
        assert held is not None
        return held.id

    id = world.run(hold)
    pages = world.pages(allow=lambda request, action, queue: queue != "theirs")
    for action in ("force_release", "cancel", "remove", "requeue", "replay"):
        pages.act(action, queue="mine", id=id, force="1")
    assert state(world, id) == "reserved"
    pages.act("move", 403, queue="mine", state="ready", expected="1", to="theirs")
    world.run(world.client.schedule, "tick", queue="theirs", every=60)
    for action in ("run", "pause", "resume"):
        pages.act(action, 404, queue="mine", schedule="tick")


def test_bulk_action_shows_the_number_and_does_it(world: World, pages: Pages) -> None:
    for number in range(4):
        world.bury("a", {"n": number}, ValueError("x") if number else "other")
    shown = pages.json("/q/a.dead/bulk?verb=redrive&state=dead&where=error.type:ValueError")
    assert (shown["number"], shown["wrong"]) == (3, "")
    text = pages.get("/q/a.dead/bulk?verb=redrive&state=dead&where=error.type:ValueError")
    assert 'name="expected" value="3"' in text
    page = pages.act(
        "redrive", queue="a.dead", state="dead", where="error.type:ValueError", expected="3"
    )
    assert "redrive: 3 messages" in pages.get(page)
    assert world.run(world.client.queue("a").counts).ready == 3
    pages.act("move", queue="a", state="ready", expected="3", to="a.dead")
    pages.act("remove", queue="a.dead", state="dead", expected="1")
    assert world.run(world.client.queue("a").counts).total == 0
    assert [each[2] for each in entries(world)] == ["3 messages", "3 messages", "1 message"]


@pytest.mark.parametrize(("expected", "status"), [("20", 303), ("19", 303), ("17", 409), ("", 409)])
def test_bulk_action_refuses_another_number(
    world: World, pages: Pages, expected: str, status: int
) -> None:
    world.run(world.client.queue("a").push_many, range(20), delay=60)
    answer = pages.act("requeue", status, queue="a", state="scheduled", expected=expected)
    ready = world.run(world.client.queue("a").counts).ready
    assert ready == (20 if status == 303 else 0)
    if status == 409:
        assert "20 messages match now" in answer
        assert entries(world)[0][2].startswith("refused: 20 messages match now")


def test_bulk_page_refuses_what_is_not_possible(world: World, pages: Pages) -> None:
    world.run(world.client.queue("a").push, 1)
    for query in ("verb=redrive&state=ready", "verb=x", "verb=move&state=ready&where=x"):
        assert pages.json(f"/q/a/bulk?{query}")["wrong"]
    assert "No message matches" in pages.get("/q/a/bulk?verb=remove&state=ready&where=payload:7")


def test_bulk_action_needs_a_known_target(world: World, pages: Pages) -> None:
    world.run(world.client.queue("a").push, 1)
    pages.act("move", 404, queue="a", state="ready", expected="1", to="mistyped")
    assert [each.name for each in world.run(world.client.queues)] == ["a"]


def test_queues_are_paused_and_purged(world: World, pages: Pages) -> None:
    queue = world.client.queue("a")
    world.run(queue.push_many, range(3))
    pages.act("pause", queue="a")
    assert world.run(queue.paused)
    assert ">paused<" in pages.get("/q/a")
    pages.act("resume", queue="a")
    assert not world.run(queue.paused)
    pages.act("purge", 400, queue="a", name="b")
    assert world.run(queue.counts).ready == 3
    pages.act("purge", queue="a", name="a")
    assert world.run(queue.counts).ready == 0
    pages.act("pause", 404, queue="none")


def test_groups_are_paused_moved_and_deleted(shop: World) -> None:
    pages = shop.pages(allow=lambda request, action, queue: True)
    group: dict[str, Any] = {"queue": "clicks", "group": "audit"}
    stream = shop.client.stream("clicks")
    assert pages.act("pause", **group).startswith("/s/clicks?did=")
    assert shop.run(stream.consumers)[0].paused
    pages.act("resume", **group)
    pages.act("seek", 400, **group, name="audit", position="soon")
    pages.act("seek", 400, **group, name="x", position="0")
    pages.act("seek", **group, name="audit", position="0")
    assert shop.run(stream.consumers)[0].position == 0
    pages.act("seek", **group, name="audit", position="last")
    assert shop.run(stream.consumers)[0].position == 7
    pages.act("pause", 404, queue="clicks", group="none")
    pages.act("delete_consumer", 400, **group)
    pages.act("delete_consumer", **group, name="audit")
    assert shop.run(stream.consumers) == []


def test_schedules_are_run_and_paused(shop: World) -> None:
    pages = shop.pages(allow=lambda request, action, queue: True)
    form: dict[str, Any] = {"queue": "orders", "schedule": "nightly"}
    page = pages.act("run", **form)
    assert page.startswith("/schedules?did=")
    assert "run: message cron:nightly:" in pages.get(page)
    pages.act("pause", **form)
    (schedule,) = shop.run(shop.client.schedules)
    assert schedule.paused
    pages.act("resume", **form)


def test_audit_comes_first_and_without_it_nothing_changes(
    world: World, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run(world.client.queue("a").push, 1)

    async def fails(*arguments: Any) -> str:
        raise Unavailable("no audit")

    monkeypatch.setattr(Audit, "begin", fails)
    pages.act("pause", 503, queue="a")
    assert not world.run(world.client.queue("a").paused)


def test_failed_action_is_in_the_audit(world: World, pages: Pages) -> None:
    world.run(world.client.queue("a").push, 1)
    pages.act("redrive", 400, queue="a", state="ready", where="payload.password:x")
    ((action, queue, result),) = entries(world)
    assert (action, queue) == ("redrive", "a")
    assert result == "failed: ConfigurationError: filter: payload.password is hidden here; " \
        "use another field"  # fmt: skip
    text = pages.get("/audit")
    assert "hidden here" in text
    assert pages.json("/audit")["entries"][0]["who"] == "127.0.0.1"


def test_result_survives_a_failed_end(
    world: World, pages: Pages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.run(world.client.queue("a").push, 1)
    store = Audit._store

    async def once(self: Audit, id: Any, fields: Any) -> None:
        if "result" in fields:
            raise Unavailable("gone")
        await store(self, id, fields)

    monkeypatch.setattr(Audit, "_store", once)
    page = pages.act("pause", queue="a")
    assert world.run(world.client.queue("a").paused)
    assert "pause: it has not ended" in pages.get(page)
    assert "the result of an action is missing in the audit" in caplog.text


def test_audit_entries_expire(world: World, pages: Pages) -> None:
    world.run(world.client.queue("a").push, 1)
    pages.act("pause", queue="a")
    audit = world.client.collection("audit")
    entry = audit.find_one({})
    assert entry is not None
    assert (entry["expires"] - entry["at"]).days == 90
    assert "expires" in audit.index_information()
