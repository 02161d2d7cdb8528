"""``pyqueue metrics``: figures of all queues for Prometheus."""

from __future__ import annotations

import typer

from pyqueue.cli.common import Commands, Namespace, Url, connect
from pyqueue.telemetry import metrics_text

app = typer.Typer(cls=Commands)


@app.command()
def metrics(url: Url = None, namespace: Namespace = "pyqueue") -> None:
    """Print metrics as text for Prometheus: messages by state, and the sums of telemetry."""
    with connect(url, namespace) as client:
        print(metrics_text(client), end="")
