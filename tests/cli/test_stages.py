"""The commands on stages of Spark: what they print, and what they refuse."""

from __future__ import annotations

from pyqueue import Client
from pyqueue.backends.epochs import EpochWrites
from pyqueue.connecting import runner_of
from pyqueue.queues import backend_of
from tests.cli.shell import Shell


def test_stages_are_listed_and_forgotten(shell: Shell, client: Client) -> None:
    writes = EpochWrites(backend_of(client.queue("clean")).target, "nightly", "query-1")
    run = runner_of(client).run
    run(writes.commit("job", 3, run(writes.join("job", 3)) or 0, {}))
    (row,) = shell.json("stage", "ls")
    assert {**row, "at": 0} == {
        "queue": "clean",
        "stage": "nightly",
        "query": "query-1",
        "epoch": 3,
        "at": 0,
    }
    assert shell.run("stage", "ls", "clean")[1].splitlines()[1].startswith("clean\tnightly\t")
    status, _, error = shell.run("stage", "forget", "clean", "nigthly")
    assert (status, "it has ['nightly']" in error) == (2, True)
    assert shell.json("stage", "forget", "clean", "nightly") == [{"forgotten": 1}]
    assert shell.json("stage", "ls") == []
    status, _, error = shell.run("stage", "forget", "clean", "a b")
    assert (status, "stage: invalid name" in error) == (2, True)
