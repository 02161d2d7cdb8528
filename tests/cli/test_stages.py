"""The commands on stages of Spark: their output and their refusals."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pyqueue import Client
from pyqueue.backends.bulk.epochs import EpochWrites
from pyqueue.backends.bulk.staging import Staging
from pyqueue.backends.claims.claims import NamedClaims
from pyqueue.backends.options import NewMessage
from pyqueue.cli.doctor import check_spark
from pyqueue.queue_base import backend_of
from pyqueue.runtime.connecting import runner_of
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


def test_doctor_tells_of_groups_and_stages_and_removes_old_rows(
    shell: Shell, client: Client
) -> None:
    """Rows of a stage stay: it may still decide about them."""
    run, target = runner_of(client).run, backend_of(client.queue("clean")).target
    raw = client.queue("raw", kind="standard")
    assert check_spark(client, repair=True).text == "no group reads, and no stage writes"
    raw.push_many(range(3))
    run(NamedClaims(backend_of(raw), "raw>clean").begin(2, 60))
    writes = EpochWrites(target, "nightly", "query-1")
    attempt = run(writes.join("job", 3)) or 0
    run(writes.write(3, attempt, 0, "a", [NewMessage("of-a-stage", 1)]))
    for job in ("old", "new"):
        run(Staging(target, job).write("a", [NewMessage(f"{job}-{n}", n) for n in range(2)]))
    rows = client.database["pyqueue"]
    day = timedelta(days=1, minutes=1)
    for row in rows.find({"_id": {"$in": ["old-0", "old-1", "of-a-stage"]}}):
        rows.update_one({"_id": row["_id"]}, {"$set": {"processed": row["processed"] - day}})

    def hidden() -> set[str]:
        return {each["_id"] for each in rows.find({"q": {"$regex": "^~staged:"}})}

    (found,) = [each for each in shell.json("doctor") if each["check"] == "spark"]
    assert found["level"] == "advice"
    for part in (
        "groups: 'raw>clean' of queue 'raw' (run by ",
        ", holds 2 messages)",
        "stages: 'nightly' of queue 'clean' (batch -1, 0.0 hours ago)",
        "; 2 hidden rows are older than a day",
    ):
        assert part in found["text"]
    assert len(hidden()) == 5
    (found,) = [each for each in shell.json("doctor", "--repair") if each["check"] == "spark"]
    assert found["level"] == "ok"
    assert found["text"].endswith("; removed 2 hidden rows older than a day")
    assert hidden() == {"new-0", "new-1", "of-a-stage"}


def test_doctor_counts_the_messages_of_packs(client: Client) -> None:
    """A group holds packs, and a write that died has left hidden packs."""
    run, raw = runner_of(client).run, client.queue("raw", kind="bucket", pack=3)
    raw.push_many(range(7))
    run(NamedClaims(backend_of(raw), "g").begin(4, 60))
    rows = [NewMessage(None, number) for number in range(5)]
    assert run(Staging(backend_of(raw).target, "old").write("a", rows)) == 5
    before = {"$set": {"processed": datetime.now(UTC) - timedelta(days=1, minutes=1)}}
    client.database["pyqueue"].update_many({"staged": True}, before)
    text = check_spark(client, repair=False).text
    assert ", holds 6 messages)" in text
    assert "; 5 hidden rows are older than a day" in text
    swept = check_spark(client, repair=True).text
    assert swept.endswith("; removed 5 hidden rows older than a day")
    assert "hidden rows" not in check_spark(client, repair=True).text
