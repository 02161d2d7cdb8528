"""Batches that fail while the server does not answer, so that they cannot be given back.

No test here needs Spark: a function stands in for it.
"""

from __future__ import annotations

from typing import Any

import pytest

from pyqueue import Unavailable
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.requests import Plan
from tests.spark.fakes import Flow, Frame, no_session

pytestmark = pytest.mark.usefixtures("faked")


def broken(frame: Frame) -> Frame:
    """Fail on every batch."""
    raise ArithmeticError("no luck")


def test_batch_that_cannot_be_given_back_stays_claimed(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The error of the transform is raised, and the next call continues with the messages."""

    def gone(*args: Any, **how: Any) -> Plan[None]:
        raise Unavailable("the server went away")

    flow.raw.push_many(range(3))
    stage = flow.stage(broken)
    with monkeypatch.context() as patch:
        patch.setattr(NamedClaims, "rollback", gone)
        with pytest.raises(ArithmeticError, match="no luck"):
            stage.run_once(no_session)
    assert "the batch of group 'g' was not rolled back" in caplog.text
    assert flow.raw.counts().reserved == 3
    (report,) = flow.work()
    assert (report.claimed, report.written) == (3, 3)
    assert flow.left() == []
