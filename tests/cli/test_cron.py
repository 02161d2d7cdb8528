"""The commands on schedules: their output and their refusals."""

from __future__ import annotations

from pyqueue import Client
from tests.cli.shell import Shell


def test_schedules_are_listed_steered_and_deleted(shell: Shell, client: Client) -> None:
    client.schedule("nightly", queue="reports", cron="0 3 * * *", timezone="Europe/Berlin")
    client.schedule("often", queue="reports", every=90, payload={"a": 1})
    often, nightly = shell.json("cron", "ls")[::-1]
    assert (nightly["schedule"], nightly["times"]) == ("nightly", "0 3 * * *")
    assert (often["times"], often["options"]["payload"]) == ("every 90 s", {"a": 1})
    assert shell.run("cron", "ls")[1].splitlines()[1].startswith("nightly\treports\t0 3 * * *\t")
    (ran,) = shell.json("cron", "run", "often")
    message = client.queue("reports").get(ran["id"])
    assert message is not None
    assert message.payload == {"a": 1}
    assert shell.json("cron", "pause", "often") == [{"schedule": "often", "paused": True}]
    assert [each.paused for each in client.schedules()] == [False, True]
    assert shell.run("cron", "resume", "often")[:2] == (0, "often: not paused\n")
    assert [each.paused for each in client.schedules()] == [False, False]
    assert shell.run("cron", "rm", "often")[:2] == (0, "often: deleted\n")
    assert [each.name for each in client.schedules()] == ["nightly"]


def test_unknown_schedule_is_refused(shell: Shell, client: Client) -> None:
    client.schedule("nightly", queue="reports", every=60)
    for command in ("run", "pause", "resume", "rm"):
        assert "did you mean 'nightly'?" in shell.refused("cron", command, "nigthly")
        assert "`pyqueue cron ls` lists all schedules" in shell.refused("cron", command, "x")


def test_doctor_finishes_a_tick(shell: Shell, client: Client) -> None:
    """A process died after it had decided, a while ago."""
    client.schedule("n", queue="reports", every=3600)
    collection = client.database["pyqueue"]
    stored = collection.find_one({"_id": "~cron:n"})
    assert stored is not None
    when = stored["when"].replace(year=2020)
    mark = {"to": "reports", "source": "~cron:n", "token": "former"}
    copy = {"_id": "cron:n:x", "q": "~handover:~cron", "when": when, "due": when, "tries": 0}
    collection.insert_one({**copy, "pushed": when, "payload": 1, "handover": mark})
    handed = {"$set": {"handed": [{"h": "former", "ids": ["cron:n:x"]}]}}
    collection.update_one({"_id": "~cron:n"}, handed)
    (found,) = [each for each in shell.json("doctor") if each["check"] == "handovers"]
    assert found["text"] == "finished or cleaned up after processes that died: 1 documents"
    assert [each.payload for each in client.queue("reports").peek()] == [1]
