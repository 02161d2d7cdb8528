"""The flushes of telemetry in the ledger of a process.

``flush`` is a call that takes the counts. ``flushed`` is recorded, without a result, when they are
stored. So a flush without it, before the next one, was lost or has an unknown outcome.
"""

from __future__ import annotations

from typing import Any

from pyqueue import AsyncClient, Client
from tests.chaos.ledger import Ledger
from tests.chaos.steps import Plan


def record_flushes(ledger: Ledger, client: Client | AsyncClient) -> None:
    """Record the flushes of a client, from now on."""
    telemetry: Any = client._telemetry
    take, store = telemetry.counting.take, telemetry._store

    def taking() -> Any:
        with ledger.recorded("flush", "", None):
            return take()

    def storing(*given: Any) -> Plan:
        yield from store(*given)
        ledger.about_to("flushed", "", None)

    telemetry.counting.take, telemetry._store = taking, storing
