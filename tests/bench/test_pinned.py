"""The code of the bound and of the client by hand, to which the bench compares pyqueue.

If one of them became slower, each ratio to it would rise, and pyqueue would look faster than
before. No report shows the cause, and a loss of some per cent is smaller than the noise of a run.
So a changed client fails here until its new digest is written down, where a reviewer sees it.
Before that, measure both forms in the same rounds. Comments, docstrings and layout are free.
"""

from __future__ import annotations

import ast
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import bson
import pytest

from pyqueue import Client
from pyqueue.backends import transitions
from tests.bench.by_hand import OWNER, ByHand
from tests.bench.sketch import LEASE, new_document

PINNED = {"sketch": "d20b731ae6d6dede", "by_hand": "be2449d6515e9450"}


def digest(source: str) -> str:
    """The digest of code, the same in each version of Python."""
    return hashlib.sha256(repr(shape(ast.parse(source))).encode()).hexdigest()[:16]


def shape(node: object) -> object:
    """A syntax tree as tuples, without docstrings and without the fields that are empty."""
    if isinstance(node, list):
        return [shape(each) for each in node if not is_docstring(each)]
    if not isinstance(node, ast.AST):
        return node
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, [])]
    return type(node).__name__, [(name, shape(value)) for name, value in fields]


def is_docstring(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.parametrize("name", PINNED)
def test_code_has_its_pinned_digest(name: str) -> None:
    found = digest(Path(__file__).with_name(f"{name}.py").read_text())
    assert found == PINNED[name], (
        f"the code of {name} has changed: measure the old form beside the new one, then pin {found}"
    )


def test_digest_sees_code_and_no_comment() -> None:
    code = "def f(a):\n    return a + 1\n"
    assert digest('"""A."""\ndef f(a):  # b\n    """C."""\n    return (a +\n 1)\n') == digest(code)
    for changed in ("return a + 2", "return a - 1", "print(a)\n    return a + 1"):
        assert digest(code.replace("return a + 1", changed)) != digest(code)


def forms(document: dict[str, Any]) -> dict[str, tuple[type, int]]:
    """The type and the stored size of each field."""
    return {name: (type(value), len(bson.encode({"": value}))) for name, value in document.items()}


def test_client_by_hand_stores_the_fields_of_pyqueue() -> None:
    payload, now = {"n": 1, "text": "x"}, datetime.now(UTC)
    with Client("memory:") as client:
        client.queue("q").push(payload)
        (stored,) = client.database[client.namespace].find({"record": None})
    assert forms(new_document("q", payload)) == forms(stored)
    claim = transitions.claiming(now, LEASE.total_seconds(), OWNER, count=True)
    by_hand = ByHand.claiming(now)
    assert by_hand.keys() == claim.keys()
    assert [forms(by_hand[name]) for name in claim] == [forms(each) for each in claim.values()]
