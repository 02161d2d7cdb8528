"""A secret in an invalid payload appears in no error, log, traceback or screen."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, field_validator

from pyqueue import Client, ConfigurationError, InvalidMessage, Pipeline, Worker
from tests.contract.world import AnyQueue
from tests.hostile.conftest import Place

SECRET = "hunter2Qx"


class Login(BaseModel):
    user: str
    password: int


class Outer(BaseModel):
    """A validator calls another model, whose error becomes part of its text."""

    login: Any

    @field_validator("login")
    @classmethod
    def check(cls, value: Any) -> Any:
        return Login.model_validate(value)


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Loose(BaseModel):
    """A validator changes the type, which pydantic warns about when it dumps the value."""

    password: int

    @field_validator("password")
    @classmethod
    def changed(cls, value: Any) -> Any:
        return SECRET


class Unstorable:
    def __repr__(self) -> str:
        return SECRET


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
LOGIN = {"user": "ann", "password": SECRET}
#: A model, a payload that does not fit it, and the text of the error in place of the value.
MISFITS: dict[str, tuple[Any, Any, str]] = {
    "field": (Login, LOGIN, "password: Input should be a valid integer"),
    "two fields": (Login, {"password": SECRET}, "user: Field required\npassword: Input should be"),
    "whole": (Login, SECRET, "Input should be a valid dictionary"),
    "nested": (list[Login], [LOGIN], "0.password: Input should be a valid integer"),
    "validator": (Outer, {"login": LOGIN}, "login.password: Input should be a valid integer"),
    "tag": (Pet, {"kind": SECRET}, "Input tag is none of 'cat', 'dog'"),
    "key": (dict[int, int], {SECRET: 1}, "[key]: Input should be a valid integer"),
    "extra": (list[int], [SECRET] * 1000, "\nand 980 more"),
}
misfits = pytest.mark.parametrize(("model", "payload", "said"), MISFITS.values(), ids=MISFITS)


def whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@misfits
def test_invalid_push_shows_no_value(place: Place, model: Any, payload: Any, said: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        place.client.queue(place.name(), model).push(payload)
    assert said in str(caught.value)
    assert SECRET not in whole(caught.value)
    assert caught.value.__context__ is None


@pytest.mark.parametrize("payload", [Unstorable(), {"a": [Unstorable()]}])
def test_unstorable_push_shows_no_value(place: Place, payload: Any) -> None:
    queue = place.client.queue(place.name())
    queue.push(1)
    held = queue.reserve(0)
    assert held is not None
    calls: list[Callable[[], object]] = [
        lambda: queue.push(payload),
        lambda: queue.push_many([payload]),
        lambda: queue.checkpoint(held, payload),
        lambda: queue.commit(held, payload=payload),
        lambda: queue.move(held, to="other", payload=payload),
        lambda: queue.move(held, to="other", update={"$set": {"a": payload}}),
    ]
    for call in calls:
        with pytest.raises(InvalidMessage, match=r"\(type .*Unstorable\); ") as caught:
            call()
        assert SECRET not in whole(caught.value)


def test_dump_warns_without_the_value(place: Place, recwarn: pytest.WarningsRecorder) -> None:
    queue: AnyQueue = place.client.queue(place.name(), Loose)
    queue.push({"password": 1})
    assert [str(each.message) for each in recwarn if SECRET in str(each.message)] == []


@misfits
def test_stored_misfit_shows_no_value(
    place: Place, caplog: pytest.LogCaptureFixture, model: Any, payload: Any, said: str
) -> None:
    name = place.name()
    place.client.queue(name).push(payload)
    queue = place.client.queue(name, model)
    (peeked,) = queue.peek()
    with caplog.at_level(logging.DEBUG, "pyqueue"):
        assert queue.reserve(0) is None
    (buried,) = place.client.queue(f"{name}.dead").peek()
    for error in (peeked.error, buried.error, buried.dead and buried.dead["error"]):
        assert error is not None
        assert said in error["message"]
        assert SECRET not in str(error)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("field", ["headers", "key", "error", "progress", "trail", "dead"])
def test_foreign_document_shows_no_value(
    place: Place, caplog: pytest.LogCaptureFixture, field: str
) -> None:
    name = place.name()
    queue = place.client.queue(name)
    value: Any = {"headers": {"token": [SECRET]}, "key": [SECRET], "trail": SECRET}
    id = queue.push(1)
    place.raw.update_one({"_id": id}, {"$set": {field: value.get(field, [SECRET])}})
    with caplog.at_level(logging.DEBUG, "pyqueue"):
        assert queue.reserve(0) is None
    (buried,) = place.client.queue(f"{name}.dead").peek()
    assert buried.error is not None
    assert field in buried.error["message"]
    assert SECRET not in f"{buried.error} {buried.dead} {caplog.text}"


# ---- handlers


def validates(payload: Any) -> object:
    return Login.model_validate(payload)


def validates_in_a_group(payload: Any) -> object:
    try:
        return Login.model_validate(payload)
    except ValueError as error:
        raise ExceptionGroup("several", [error, KeyError("other")]) from None


def chains(payload: Any) -> object:
    try:
        return Login.model_validate(payload)
    except ValueError as error:
        raise RuntimeError("the login is invalid") from error


def run(build: Callable[[Client], Worker | Pipeline], caplog: pytest.LogCaptureFixture) -> str:
    """Run it on one message. Return the log and the stored error."""
    with Client("memory:") as client, caplog.at_level(logging.DEBUG, "pyqueue"):
        client.queue("in").push(LOGIN)
        build(client).run(until_empty=True, handle_signals=False)
        (buried,) = client.queue("in.dead").peek()
        return f"{caplog.text} {buried.error} {buried.dead}"


@pytest.mark.parametrize("handler", [validates, validates_in_a_group, chains])
def test_handler_error_shows_no_value(caplog: pytest.LogCaptureFixture, handler: Any) -> None:
    seen = run(lambda client: Worker(client).on("in", handler, max_tries=1), caplog)
    assert SECRET not in seen
    assert "password: Input should be a valid integer" in seen
    assert "test_secrets.py" in caplog.text  # the traceback is still there


def test_answer_that_misfits_shows_no_value(caplog: pytest.LogCaptureFixture) -> None:
    def build(client: Client) -> Pipeline:
        pipeline = client.pipeline().link("in", lambda payload: payload, to="next")
        return pipeline.sink("next", print, model=Login)

    seen = run(build, caplog)
    assert SECRET not in seen
    assert "password: Input should be a valid integer" in seen


@pytest.mark.parametrize("verb", ["rollback", "bury"])
def test_given_error_shows_no_value(place: Place, verb: str) -> None:
    name = place.name()
    queue = place.client.queue(name, max_tries=1)
    queue.push(1)
    held = queue.reserve(0)
    assert held is not None
    try:
        Login.model_validate(LOGIN)
    except ValueError as error:
        getattr(queue, verb)(held, error=error)
    (buried,) = place.client.queue(f"{name}.dead").peek()
    assert buried.error is not None
    assert buried.error["type"] == "ValidationError"
    assert "password: Input should be a valid integer" in buried.error["message"]
    assert SECRET not in f"{buried.error} {buried.dead}"


def test_recipe_error_shows_no_value(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'[[stages]]\nqueue = "a"\nhandler = "a:b"\nlease = "{SECRET}"\n')
    with Client("memory:") as client, pytest.raises(ConfigurationError) as caught:
        Pipeline.from_recipe(client, path)
    assert "stages[0].lease: expected a duration; use seconds" in str(caught.value)
    assert SECRET not in whole(caught.value)
