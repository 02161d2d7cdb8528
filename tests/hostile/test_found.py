"""Regressions: records of later releases, foreign documents, arguments, secrets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

from pyqueue import AsyncClient, Client, ConfigurationError, InvalidMessage, QueueError
from pyqueue.runtime.connecting import runner_of
from tests.hostile.conftest import Place
from tests.hostile.servers import Secure
from tests.hostile.test_documents import EARLY, message, record, unreadable
from tests.hostile.test_upgrade import ENTERING, LATER, leaves_alone

#: Operations on stored messages that need not read the record.
RECORDLESS: dict[str, Callable[..., Any]] = {
    "remove": lambda client, queue, held: queue.remove("there"),
    "purge": lambda client, queue, held: queue.purge(),
    "redrive": lambda client, queue, held: queue.redrive(),
    "replay": lambda client, queue, held: queue.replay("done"),
    "pause": lambda client, queue, held: queue.pause(),
}


@pytest.mark.parametrize("name", RECORDLESS)
def test_messages_of_a_later_version_are_left_alone(place: Place, name: str) -> None:
    leaves_alone(place, LATER["a newer version"], {name: RECORDLESS[name]})


def test_record_of_another_kind_is_left_alone(place: Place) -> None:
    """The options would be written before the kind is checked."""
    leaves_alone(place, LATER["another kind"], ENTERING)


@pytest.mark.parametrize("options", [True, "text", ["a"]], ids=repr)
def test_record_without_valid_options_works(place: Place, options: Any) -> None:
    name = place.name()
    place.raw.insert_one(record(name, options=options))
    assert place.client.queue(name).push(1) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"dead": "x"},
        {"dead": {}},
        {"dead": {"from": "no name", "at": EARLY}},
        {"dead": {"from": "a", "at": EARLY}, "trail": "x"},
        {"dead": {"from": "a", "at": EARLY}, "token": {"$bad": 1}},
    ],
    ids=repr,
)
def test_redrive_skips_messages_without_a_source(place: Place, fields: dict[str, Any]) -> None:
    name = place.name()
    queue = place.client.queue(name)
    place.raw.insert_one(message(f"{name}.dead", **fields))
    queue.push(1)
    held = queue.reserve(0)
    assert held is not None
    queue.bury(held)
    assert place.client.queue(f"{name}.dead").redrive() >= 1
    assert [each.payload for each in queue.peek()] == [1]
    place.raw.delete_many({})


def test_push_with_the_id_of_a_foreign_message(place: Place) -> None:
    name = place.name()
    place.raw.insert_one(message(name, _id=f"id of {name}", trail="x"))
    assert place.client.queue(name).push(1, id=f"id of {name}") == f"id of {name}"
    place.raw.insert_one(message("another", _id=f"another of {name}", trail=["x"]))
    with pytest.raises(QueueError):
        place.client.queue(name).push(1, id=f"another of {name}")


def holding(place: Place, payload: Any) -> tuple[Any, Any]:
    """Return a new queue, and the reservation of its one message."""
    queue = place.client.queue(place.name())
    queue.push(payload)
    return queue, queue.reserve(0)


@pytest.mark.parametrize("to", [5, None, {"$x": 1}, ""], ids=repr)
def test_rename_to_an_invalid_name_is_refused(place: Place, to: Any) -> None:
    queue, held = holding(place, {"a": 1})
    with pytest.raises(ConfigurationError, match="update"):
        queue.move(held, to="x", update={"$rename": {"a": to}})


def test_next_when_skips_a_when_that_is_not_a_date(place: Place) -> None:
    name = place.name()
    place.raw.insert_one(message(name, when=[datetime(2500, 1, 1, tzinfo=UTC)]))
    assert place.client.queue(name).next_when() is None


def test_history_lists_finished_messages_only(place: Place) -> None:
    name, far = place.name(), datetime(9500, 1, 1, tzinfo=UTC)
    queue = place.client.queue(name, history=60)
    queue.push(1)
    queue.pop(0)
    place.raw.insert_one(message(name, when=far))
    place.raw.update_one({"_id": f"~queue:{name}"}, {"$set": {"when": far}})
    assert [each.outcome for each in queue.history()] == ["popped"]


def test_history_since_a_future_day_is_empty(place: Place) -> None:
    queue = place.client.queue(place.name(), history=60)
    assert queue.history(since=datetime(3500, 1, 1, tzinfo=UTC)) == []


def test_note_with_a_lone_surrogate_is_refused(place: Place) -> None:
    queue, held = holding(place, 1)
    with pytest.raises(ConfigurationError, match="note"):
        queue.progress(held, 0.5, "\ud800")


def test_refused_move_makes_no_record(place: Place) -> None:
    queue, held = holding(place, 1)
    target = place.name()
    with pytest.raises(InvalidMessage):
        queue.move(held, to=target, payload=object())
    assert place.raw.find_one({"q": target}) is None


def test_arguments_that_are_not_lists_are_refused(place: Place) -> None:
    queue: Any = place.client.queue(place.name())
    with pytest.raises(ConfigurationError, match="payloads"):
        queue.push_many(None)
    for pairs in (5, [5], [(1, 2, 3)]):
        with pytest.raises(ConfigurationError, match="pairs"):
            queue.move_many(pairs, to="x")


@pytest.mark.parametrize("verb", ["get", "peek"])
def test_reading_an_unreadable_message_raises(place: Place, verb: str) -> None:
    name = place.name()
    place.raw.insert_many(unreadable(name))
    try:
        queue = place.client.queue(name)
        with pytest.raises(InvalidMessage, match="cannot be read"):
            queue.peek() if verb == "peek" else queue.get(f"a text of {name}")
    finally:
        place.raw.delete_many({"q": name})


def test_any_exception_of_a_model_refuses_the_push(place: Place) -> None:
    class Raising(BaseModel):
        @model_validator(mode="before")
        @classmethod
        def check(cls, value: Any) -> Any:
            return value["a"]

    queue: Any = place.client.queue(place.name(), Raising)
    with pytest.raises(InvalidMessage, match="payload"):
        queue.push({"b": 1})


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_invalid_options_of_a_client_are_refused(kind: Any) -> None:
    with pytest.raises(ConfigurationError, match="model"):
        kind("memory:").queue("a", "NoSuchModel")
    with pytest.raises(ConfigurationError, match="signals"):
        kind("memory:", signals=5)
    with pytest.raises(ConfigurationError, match="owner"):
        kind("memory:", owner="\ud800")


def test_secrets_elsewhere_in_a_url_are_hidden() -> None:
    """Among the options, and in a URL without a scheme."""
    texts = [
        repr(Client(f"mongodb://127.0.0.1:1/shop?{option}=s3cret"))
        for option in ("tlsCertificateKeyFilePassword", "authMechanismProperties")
    ]
    with pytest.raises(ConfigurationError) as caught:
        Client("//s3cret:x@127.0.0.1/shop")
    assert [text for text in [*texts, str(caught.value)] if "s3cret" in text] == []


def test_missing_certificate_file_is_reported(secured: Secure) -> None:
    for kind in (Client, AsyncClient):
        client: Any = kind(secured.url("user", "s3cret", "x", tlsCAFile="/nowhere/ca.pem"))
        with pytest.raises(ConfigurationError, match=r"(?i)/nowhere/ca\.pem|tlsCAFile") as caught:
            runner_of(client).open()
        assert "s3cret" not in str(caught.value)
