"""The dashboard: pages that show queues, streams, messages, errors and workers, and change them.

``Dashboard`` is an ASGI app, and ``pyqueue web`` serves it. It uses the public API of an
``AsyncClient`` and the figures of telemetry. It needs the extra ``web``.
"""

from pyqueue.web.app import Dashboard
from pyqueue.web.redacting import SECRETS

__all__ = ["SECRETS", "Dashboard"]
