"""The command metrics."""

from __future__ import annotations

from pyqueue import Client
from pyqueue.telemetry import metrics_text
from tests.cli.shell import Shell


def without_ages(text: str) -> list[str]:
    """Return the lines, but not the ages of messages, which grow."""
    return [each for each in text.splitlines() if not each.startswith("pyqueue_oldest")]


def test_metrics_are_printed(shell: Shell, url: str, client: Client) -> None:
    with Client(url, telemetry=True) as counting:
        counting.queue("orders").push_many(range(3))
    status, out, errors = shell.run("metrics")
    assert (status, errors) == (0, "")
    assert without_ages(out) == without_ages(metrics_text(client))
    assert 'pyqueue_messages{queue="orders",kind="standard",state="ready"} 3\n' in out
    assert 'pyqueue_pushed_total{queue="orders"} 3\n' in out


def test_namespace_of_metrics_is_chosen(shell: Shell, url: str) -> None:
    with Client(url, namespace="other", telemetry=True) as counting:
        counting.queue("orders").push(1)
    assert "orders" not in shell.run("metrics")[1]
    assert (
        'pyqueue_pushed_total{queue="orders"} 1' in shell.run("metrics", "--namespace", "other")[1]
    )


def test_metrics_need_a_server(bare_shell: Shell) -> None:
    assert "missing server" in bare_shell.refused("metrics")
