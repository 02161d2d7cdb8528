"""A client by hand: the claims, commits and pushes of pyqueue's own documents, and nothing else.

It works on the collection of a namespace, so its writes maintain all indexes there, and it stores
the fields that pyqueue stores. It joins calls as the bound does. It checks no argument and no
document, gives nothing back for a cancelled caller, sends no signal and repeats no command. So the
distance from here to pyqueue is the cost of pyqueue's code, and the distance to the bound is the
cost of its documents.
"""

from __future__ import annotations

import os
import secrets
import socket
from datetime import datetime

from tests.bench.sketch import LEASE, Document, Sketch

OWNER = f"{socket.gethostname()}:{os.getpid()}"


class ByHand(Sketch):
    """One queue of a namespace, for an async process. Each claim takes up to 64 messages."""

    claim_size = 64

    @staticmethod
    def claiming(now: datetime) -> Document:
        changed = {
            "when": now + LEASE,
            "token": secrets.token_hex(12),
            "owner": OWNER,
            "reserved": now,
        }
        removed = {"claim": "", "limited": ""}
        return {"$set": changed, "$unset": removed, "$inc": {"tries": 1, "deliveries": 1}}
