"""Secrets: which are hidden, and that none is in any byte."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from pyqueue.web.redacting import HIDDEN, MAX_TEXT, SECRETS, Redactor
from pyqueue.web.shapes import summary, tree
from tests.web.world import World

SECRET = "s3cr3tvalue"
redactor = Redactor(SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        f"password={SECRET}",
        f"wrong pass-word: '{SECRET} {SECRET}' given",
        f'{{"api_key": "{SECRET}", "n": 1}}',
        f'{{\\"client_secret\\": \\"{SECRET}\\"}}',
        f"Authorization: Bearer {SECRET}",
        f"cannot reach mongodb://me:{SECRET}@host/db",
        f"GET /x?access_token={SECRET}&n=1",
        f"Set-Cookie: {SECRET}; path=/",
        f"PASSWORD = {SECRET}",
    ],
)
def test_secrets_in_texts_are_hidden(text: str) -> None:
    shown = redactor.value("error.message", text)
    assert SECRET not in shown
    assert HIDDEN in shown


@pytest.mark.parametrize("text", ["orders: 3", "the token was used", "see https://host/a@b", ""])
def test_other_texts_stay(text: str) -> None:
    assert redactor.value("error.message", text) == text


def test_fields_are_hidden_by_name_at_any_depth() -> None:
    payload = {"a": [{"Api-Key": SECRET, "n": 1}], "tokens": [SECRET], "user": {"PassWord": {}}}
    assert SECRET not in str(tree(redactor, "payload", payload))
    assert summary(redactor, "payload", payload) == (
        f"{{a: [{{Api-Key: {HIDDEN}, n: 1}}], tokens: {HIDDEN}, user: {{PassWord: {HIDDEN}}}}}"
    )
    for at in (["tokens"], ["tokens", "0"], ["user", "PassWord"], ["a", "0", "Api-Key"]):
        assert SECRET not in str(tree(redactor, "payload", payload, at))


def test_function_hides_other_fields() -> None:
    def redact(path: str, value: Any) -> Any:
        return "card" if path == "payload.number" else value

    found = Redactor(SECRETS, redact)
    assert summary(found, "payload", {"number": SECRET, "n": 1}) == '{number: "card", n: 1}'


def test_cut_text_shows_no_half_of_a_secret() -> None:
    for start in (f"mongodb://me:{SECRET}", f"password={SECRET}"):
        for cut in range(5, len(start)):
            text = "x" * (MAX_TEXT - cut) + start + "@host"
            shown = redactor.value("payload", text)
            assert SECRET[:3] not in shown, (start, cut)
            assert len(shown) <= MAX_TEXT + len(HIDDEN)


@pytest.mark.parametrize("word", ["a", "token", "pass", '"', "://", "x:", "token=", "- ", "\\"])
def test_hostile_texts_take_little_time(word: str) -> None:
    began = time.perf_counter()
    redactor.value("payload", word * (2_000_000 // len(word)))
    assert time.perf_counter() - began < 1


def test_no_secret_is_in_any_byte(world: World) -> None:
    text = f"password={SECRET}"

    async def fill() -> list[Any]:
        client, ids = world.client, list[Any]()
        payload = {"password": SECRET, "list": [{"api_key": SECRET}], "url": f"x://a:{SECRET}@h"}
        queue = client.queue("a", history=60, max_tries=2)
        token = {"x-token": SECRET}
        ids += [await queue.push({**payload, "n": n}, headers=token) for n in range(3)]
        for each in ids[:2]:
            held = await queue.reserve_id(each)
            assert held is not None
            await queue.progress(held, 0.5, text)
            await queue.checkpoint(held, {"secret": SECRET, "text": text})
            await queue.rollback(held, error=ValueError(text), delay=0)
        held = await queue.reserve_id(ids[0])
        assert held is not None
        await queue.bury(held, error=ValueError(text))
        ids.append(await queue.push(payload, result=60))
        held = await queue.reserve_id(ids[-1])
        assert held is not None
        await queue.commit(held, result={"token": SECRET, "text": text})
        await client.queue("p", kind="bucket").push_many([payload, text])
        await client.stream("s").append(payload, headers={"authorization": SECRET})
        options: Any = {"payload": payload, "headers": {"cookie": SECRET}}
        await client.schedule("tick", queue="a", every=60, **options)
        return ids

    ids = world.run(fill)
    world.flush()
    pages = world.pages(allow=lambda request, action, queue: True)
    pages.act("redrive", 400, queue="a.dead", state="dead", where=f"payload.password:{SECRET}")
    found = pages.crawl()
    for state in ("ready", "scheduled", "reserved", "finished"):
        found[state] = pages.get(f"/q/a?state={state}")
    for each in ids:
        found[str(each)] = pages.get(f"/m/{each}")
    paths = [path for path in found if not re.search("^[^/]|^/static|/export\\.", path)]
    assert len(paths) > 15
    for path, page in found.items():
        assert SECRET not in page, path
    for path in paths:
        if path not in ("/health/live", "/health/ready"):
            assert SECRET not in str(pages.json(path)), path


@pytest.mark.parametrize("where", ["payload.password:x", "payload.a.TOKEN?", "headers.api-key>1"])
def test_filter_on_a_hidden_field_is_refused(world: World, where: str) -> None:
    world.run(world.client.queue("a").push, {"password": "x"})
    values = world.pages().json(f"/q/a?where={where.replace('>', '%3E')}")
    assert values["wrong"].endswith("is hidden here; use another field")
    assert values["rows_of_messages"] == []


def test_filter_on_a_field_that_a_function_hides_is_refused(world: World) -> None:
    world.run(world.client.queue("a").push, {"number": 12345})
    pages = world.pages(redact=lambda path, value: "x" if path == "payload.number" else value)
    assert "is hidden here" in pages.json("/q/a?where=payload.number:12345")["wrong"]


def test_filter_on_a_part_of_a_hidden_document_is_refused(world: World) -> None:
    world.run(world.client.queue("a").push, {"card": {"number": "4111"}, "n": 1})
    pages = world.pages(redact=lambda path, value: "a card" if path.endswith(".card") else value)
    for where in ("payload.card.number~41", "payload.card.number:4111", "payload.card.number?"):
        values = pages.json(f"/q/a?where={where}")
        assert values["wrong"].endswith("is hidden here; use another field")
    assert len(pages.json("/q/a?where=payload.n:1")["rows_of_messages"]) == 1


def test_login_that_a_stored_text_cuts_off_is_hidden(world: World) -> None:
    """Errors are stored up to a length, and the end of a login may be beyond it."""
    texts = ["x" * length + f" mongodb://me:{SECRET}@host/db" for length in range(160, 200)]
    ids = [world.bury("a", 1, ValueError(text)) for text in texts]
    world.flush()
    pages = world.pages()
    paths = ["/errors", "/q/a.dead?state=dead", *(f"/m/{id}" for id in ids)]
    for path in paths:
        assert SECRET[:4] not in pages.get(path) + str(pages.json(path)), path


def test_function_hides_a_part_of_a_scheduled_payload(world: World) -> None:
    payload = {"number": 12345}
    world.run(world.client.schedule, "tick", queue="a", every=60, payload=payload)
    pages = world.pages(redact=lambda path, value: "x" if path == "payload.number" else value)
    assert "tick" in pages.get("/schedules")
    assert "12345" not in pages.get("/schedules") + str(pages.json("/schedules"))


def test_hidden_group_is_not_why_a_message_waits(world: World) -> None:
    async def fill() -> Any:
        queue = world.client.queue("turns", kind="ordered")
        ids = [await queue.push(number, group="acme-corp") for number in range(3)]
        await queue.reserve(0)
        await queue.reserve(0)
        return ids

    ids = world.run(fill)
    pages = world.pages(redact=lambda path, value: "x" if path == "group" else value)
    pages_of = [pages.get(f"/m/{id}") for id in ids]
    assert any("earlier message of its group" in page for page in pages_of)
    assert not [page for page in pages_of if "acme-corp" in page]
