"""Files with the messages of a queue's page: what they have, hide and leave out."""

from __future__ import annotations

import csv
import io
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from bson import ObjectId

from pyqueue.web import exporting
from pyqueue.web.redacting import HIDDEN, SECRETS, Redactor
from pyqueue.web.shapes import redacted
from tests.web.world import HOSTILE, Pages, World


def lines(pages: Pages, path: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in pages.get(path).split("\n")[:-1]]


def rows(pages: Pages, path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(pages.get(path))))


def test_file_has_the_messages_of_the_page(shop: World) -> None:
    pages = shop.pages()
    for arguments in ("", "?state=scheduled", "?state=finished", "?where=payload.n%3E2"):
        shown = pages.json(f"/q/orders{arguments}")["rows_of_messages"]
        found = lines(pages, f"/q/orders/export.ndjson{arguments}")
        assert [each["id"] for each in found] == [each["id"] for each in shown]
        assert len(found) > 0, arguments
        table = rows(pages, f"/q/orders/export.csv{arguments}")
        assert [each["id"] for each in table] == [each["id"] for each in found]
        assert [json.loads(each["payload"]) for each in table] == [e["payload"] for e in found]
    (line,) = lines(pages, "/q/orders.dead/export.ndjson")
    assert (line["state"], line["error"]) == ("dead", "ValueError: no such book")
    assert (line["payload"], line["tries"]) == ({"n": 5, "why": "late"}, 0)
    assert datetime.fromisoformat(line["pushed"]) <= datetime.now(UTC)
    assert lines(pages, "/q/orders/export.ndjson?state=ready")[0]["headers"] == {"a": "b"}


def test_page_leads_to_its_files(shop: World) -> None:
    pages = shop.pages()
    text = pages.get("/q/orders?where=payload.n%3E2")
    assert "/q/orders/export.csv?state=ready&amp;where=payload.n%3E2&amp;newest=0" in text
    response = pages.send("GET", "/q/orders/export.csv")
    assert response.headers["content-type"].startswith("text/csv")
    disposition = "attachment; filename*=UTF-8''orders-ready.csv"
    assert response.headers["content-disposition"] == disposition
    assert response.headers["x-content-type-options"] == "nosniff"
    newest = lines(pages, "/q/orders/export.ndjson?newest=1")
    assert newest == lines(pages, "/q/orders/export.ndjson?newest=0")[::-1]


@pytest.mark.parametrize(
    ("limit", "value", "number"),
    [("MOST", 120, 120), ("_BUDGET", 100, 100), ("_MOST_CHARACTERS", 1, 1), ("MOST", 130, 130)],
)
def test_large_files_end_and_say_so(
    world: World, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, number: int
) -> None:
    world.run(world.client.queue("many").push_many, range(130))
    monkeypatch.setattr(exporting, limit, value)
    pages = world.pages()
    found = lines(pages, "/q/many/export.ndjson")
    assert [each["payload"] for each in found] == list(range(number))
    response = pages.send("GET", "/q/many/export.csv")
    name = f"many-ready-first-{number}.csv" if number < 130 else "many-ready.csv"
    assert response.headers["content-disposition"].endswith(f"''{name}")


def test_secrets_are_hidden_in_files(world: World) -> None:
    payload = {"password": "s3cr3t", "list": [{"api_key": "s3cr3t"}], "url": "x://a:s3cr3t@h"}
    world.bury("a", payload, ValueError("token=s3cr3t"))
    world.run(world.client.queue("a").push, payload, headers={"x-token": "s3cr3t"})
    world.run(world.client.queue("n").push, {"n": 12345})
    pages = world.pages(redact=lambda path, value: 0 if path == "payload.n" else value)
    for file in ("a.dead/export.ndjson", "a.dead/export.csv", "a/export.ndjson", "a/export.csv"):
        text = pages.get(f"/q/{file}")
        assert "s3cr3t" not in text
        assert text.count(HIDDEN) == 4
    pages.get("/q/a.dead/export.csv?where=payload.password:s3cr3t", 400)
    assert lines(pages, "/q/n/export.ndjson")[0]["payload"] == {"n": 0}


def test_files_need_the_permission_to_view(shop: World) -> None:
    pages = shop.pages(allow=lambda request, action, queue: queue != "orders")
    for ending in ("ndjson", "csv"):
        pages.get(f"/q/orders/export.{ending}", 403)
        assert len(pages.get(f"/q/packs/export.{ending}").splitlines()) >= 5
        pages.get(f"/q/none/export.{ending}", 404)
    pages.get("/q/packs/export.xlsx", 404)


def test_hostile_texts_stay_in_their_cells(world: World) -> None:
    async def fill() -> None:
        queue = world.client.queue("evil")
        for number, evil in enumerate(HOSTILE):
            await queue.push(evil, key=f'=HYPERLINK("{number}")', headers={"h": evil})

    world.run(fill)
    pages = world.pages()
    table = rows(pages, "/q/evil/export.csv")
    assert [json.loads(each["payload"]) for each in table] == list(HOSTILE)
    assert [json.loads(each["headers"])["h"] for each in table] == list(HOSTILE)
    assert [each["key"] for each in table] == [f'\'=HYPERLINK("{n}")' for n in range(len(HOSTILE))]
    assert [each["payload"] for each in lines(pages, "/q/evil/export.ndjson")] == list(HOSTILE)


def test_values_become_json_with_hidden_secrets() -> None:
    def redact(path: str, value: Any) -> Any:
        return {"hidden": 1} if path == "payload.list.1" else value

    instant = datetime(2030, 1, 31, 12, tzinfo=UTC)
    id = ObjectId("6b00635bb4b31ce5bc7b3ac2")
    value: dict[str, Any] = {
        "n": 1,
        "x": float("nan"),
        "none": None,
        "yes": True,
        "at": instant,
        "b": b"xyz",
    }
    value |= {"list": [1, 2], "id": id, "PASS word": [3], "text": "pwd password=4"}
    assert redacted(Redactor(SECRETS, redact), "payload", value) == {
        "n": 1,
        "x": "nan",
        "none": None,
        "yes": True,
        "at": "2030-01-31T12:00:00+00:00",
        "b": "3 bytes",
        "list": [1, {"hidden": 1}],
        "id": "6b00635bb4b31ce5bc7b3ac2",
        "PASS word": HIDDEN,
        "text": f"pwd password={HIDDEN}",
    }
