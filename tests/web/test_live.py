"""The sampler and the live numbers: read once for all viewers, and only while they ask."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request

from pyqueue import Unavailable
from pyqueue.web import sampling
from pyqueue.web.access import Viewer
from pyqueue.web.live import events
from pyqueue.web.sampling import Sampler
from pyqueue.web.site import Site
from tests.web.world import Pages, World


def commands(world: World) -> int:
    return world.client.stats["commands"]


def site_of(pages: Pages) -> Site:
    site: Any = pages.dashboard._site
    assert isinstance(site, Site)
    return site


def viewer_of(site: Site) -> Viewer:
    return Viewer(Request({"type": "http", "headers": [], "query_string": b""}), site.access, {})


def parsed(event: str) -> tuple[str, dict[str, str]]:
    name, data = event.strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_hundred_viewers_cost_what_one_costs(shop: World) -> None:
    async def look(viewers: int) -> int:
        sampler = Sampler(shop.client)
        before = commands(shop)
        samples = await asyncio.gather(*(sampler.sample() for _ in range(viewers)))
        assert len({each.number for each in samples}) == 1
        return commands(shop) - before

    assert shop.run(look, 100) == shop.run(look, 1) > 0


def test_sampler_without_viewers_reads_nothing(shop: World) -> None:
    pages = shop.pages()
    pages.get("/")
    before = commands(shop)
    shop.run(asyncio.sleep, 0.05)
    assert commands(shop) == before


def test_sample_is_used_again_for_a_while(shop: World) -> None:
    pages = shop.pages()
    pages.get("/")
    before = commands(shop)
    for path in ("/", "/errors", "/workers"):
        pages.get(path)
    assert commands(shop) == before
    site_of(pages).sampler.expire()
    pages.get("/")
    assert commands(shop) > before


def test_slow_sample_takes_a_tenth_of_the_time(shop: World) -> None:
    async def work() -> None:
        sampler = Sampler(shop.client)
        first = await sampler.sample()
        assert replace(first, took_s=0.01).interval_s == sampling.INTERVAL_S
        slow: Any = sampler
        slow._sample = replace(first, took_s=5.0)
        assert slow._sample.interval_s == 45.0
        assert (await sampler.sample()).number == 1
        # Once it is time, viewers see the last sample until the new one is there.
        slow._taken -= 46.0
        assert (await sampler.sample()).number == 1
        await slow._task
        assert (await sampler.sample()).number == 2

    shop.run(work)


def test_counts_are_capped_lower_if_counting_is_slow(
    shop: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def caps() -> list[int]:
        sampler = Sampler(shop.client)
        found = []
        for limits in ((9.0, 99.0), (0.0, 99.0), (0.0, 0.0), (9.0, 99.0)):
            monkeypatch.setattr(sampling, "_FAST_S", limits[0])
            monkeypatch.setattr(sampling, "_SLOW_S", limits[1])
            found.append((await sampler.sample()).cap)
            sampler.expire()
        return found

    low, high = sampling.LOW_CAP, sampling.CAP
    assert shop.run(caps) == [low, high, high, low]


def test_events_tell_what_has_changed(shop: World) -> None:
    async def work() -> None:
        site = site_of(shop.pages())
        stream = events(site, viewer_of(site), every_s=0)
        assert await anext(stream) == "retry: 2000\n\n"
        name, first = parsed(await anext(stream))
        assert (name, first["orders:ready"], first["tiles:dead"]) == ("cells", "2", "1")
        assert "line" in "".join(first)
        assert await anext(stream) == ": no change\n\n"
        await shop.client.queue("orders").push(1)
        site.sampler.expire()
        name, second = parsed(await anext(stream))
        assert second["orders:ready"] == "3"
        assert "groups:ready" not in second

    shop.run(work)


def test_events_end_without_permission(shop: World) -> None:
    allowed = {"view"}

    async def work() -> None:
        site = site_of(shop.pages(allow=lambda request, action, queue: action in allowed))
        stream = events(site, viewer_of(site), every_s=0)
        await anext(stream)
        await anext(stream)
        allowed.clear()
        assert [each async for each in stream] == []

    shop.run(work)


def test_events_say_that_the_database_is_down(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Sampler) -> Any:
        raise Unavailable("down")

    async def work() -> None:
        pages = shop.pages()
        site = site_of(pages)
        stream = events(site, viewer_of(site), every_s=0)
        await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(Sampler, "sample", fails)
            assert parsed(await anext(stream)) == ("down", {})
        assert parsed(await anext(stream))[0] == "cells"

    shop.run(work)


def test_page_without_a_database_says_so(shop: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Sampler) -> Any:
        raise Unavailable("no answer from mongodb://me:secret@host/db")

    pages = shop.pages()
    monkeypatch.setattr(Sampler, "sample", fails)
    text = pages.get("/", 503)
    assert "No answer" in text
    assert "me:secret" not in text


def test_health_checks_tell_whether_the_database_answers(
    shop: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = shop.pages()
    assert pages.get("/health/ready") == pages.get("/health/live") == "ok\n"

    def fails() -> Any:
        raise Unavailable("down")

    monkeypatch.setattr("pyqueue.web.app.ping", fails)
    assert pages.get("/health/ready", 503) == "the database does not answer\n"
    assert pages.get("/health/live") == "ok\n"
