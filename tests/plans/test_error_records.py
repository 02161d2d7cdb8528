"""What a message stores of an error: its place, its fingerprint and its trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pyqueue import ErrorInfo
from pyqueue.error_records import MAX_TRACE_BYTES, error_record
from tests.plans.runner import NOW


def function(
    module: str, body: str, *, installed: bool = False, name: str = "run", **names: Any
) -> Any:
    """Return a function of a module. ``names``: its global variables."""
    folder = "/venv/site-packages" if installed else "/app"
    values = {"__name__": module, **names}
    exec(compile(f"def {name}():\n    {body}", f"{folder}/code.py", "exec"), values)
    return values[name]


def raised(call: Callable[[], object]) -> BaseException:
    """Return the exception of a call, with a traceback that begins in the call."""
    try:
        call()
    except Exception as error:
        trace = error.__traceback__
        return error.with_traceback(trace and trace.tb_next)
    raise AssertionError("it raised nothing")


def facts(call: Callable[[], object]) -> ErrorInfo:
    """Return the stored facts of the exception of a call."""
    return info(raised(call))


def info(error: BaseException | str) -> ErrorInfo:
    """Return the stored facts of an error."""
    found = ErrorInfo.of(error_record(error, NOW))
    assert found is not None
    return found


LIBRARY = function("lib.http", "raise OSError('no answer')", installed=True)
MAIL = function("shop.mail", "call()", call=LIBRARY)


@pytest.mark.parametrize("installed", [False, True])
def test_place_is_the_last_call_in_the_handlers_package(installed: bool) -> None:
    handler = function("shop.orders", "call()", installed=installed, call=MAIL)
    worker = function("pyqueue.pipeline.engine", "call()", call=handler)
    thread = function("threading", "call()", call=worker)
    assert facts(thread).where == "shop.mail:run:2"


def test_place_without_a_handler_is_outside_installed_packages() -> None:
    installed = function("pydantic.main", "raise ValueError('x')", installed=True)
    assert facts(function("pyqueue.payloads", "call()", call=installed)).where == (
        "pyqueue.payloads:run:2"
    )
    assert facts(installed).where == "pydantic.main:run:2"


def test_errors_of_one_place_have_one_fingerprint() -> None:
    def fail(text: str) -> Any:
        return function("shop.orders", "raise kind(text)", kind=ValueError, text=text)

    one = facts(fail("order 17 is unknown"))
    assert one.fp == facts(fail("something else")).fp
    assert one.fp is not None
    assert len(one.fp) == 12
    others = [
        function("shop.orders", "raise kind()", kind=KeyError),
        function("shop.returns", "raise kind()", kind=ValueError),
        function("shop.orders", "pass\n    raise kind()", kind=ValueError),
    ]
    assert len({one.fp, *(facts(each).fp for each in others)}) == 4


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("order 17 is unknown", "order 4 is unknown", True),
        ("no 65f1c0ffee01", "no 0badcafe9912", True),
        ("at 0x7f3a", "at 0x1", True),
        (
            "user 3f2b8c1e-08a2-4b6d-9c11-5d0e7a61c2ff",
            "user 11112222-3333-4444-5555-66667777",
            True,
        ),
        ("order 17 is unknown", "order 17 is lost", False),
    ],
)
def test_text_has_the_fingerprint_of_its_words(one: str, other: str, same: bool) -> None:
    assert (info(one).fp == info(other).fp) is same
    assert (info(one).where, info(one).trace) == (None, None)
    # An exception that was never raised has no place.
    assert (info(ValueError(one)).fp == info(ValueError(other)).fp) is same
    assert info(ValueError(one)).where is None


def test_misfits_of_a_model_differ_by_their_texts() -> None:
    """All are raised at one place, in pyqueue or pydantic."""

    def misfit(text: str) -> str | None:
        fail = function("pydantic.main", "raise ValueError(text)", installed=True, text=text)
        return facts(function("pyqueue.payloads", "call()", call=fail)).fp

    assert misfit("a: not a date") == misfit("a: not a date")
    assert misfit("a: not a date") != misfit("b: not a date")


def test_trace_has_the_last_calls_and_no_values() -> None:
    call = function("shop.end", "secret = 'hunter2'; raise ValueError")
    for depth in range(12):
        call = function("shop", "secret = 'hunter2'; call()", name=f"depth{depth}", call=call)
    trace = facts(call).trace
    assert trace is not None
    lines = trace.splitlines()
    assert lines == [*(f"shop:depth{depth}:2" for depth in range(6, -1, -1)), "shop.end:run:2"]


def test_trace_of_long_names_is_cut() -> None:
    long = "日" * 3000
    call = function(long, "raise ValueError")
    for _ in range(10):
        call = function(long, "call()", call=call)
    found = facts(call)
    assert found.trace is not None
    assert found.where is not None
    assert 4000 < len(found.trace.encode()) <= MAX_TRACE_BYTES
    assert found.where.endswith(":run:2")
    assert len(found.where) == 200
