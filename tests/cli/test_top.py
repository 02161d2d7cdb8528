"""``pyqueue top``: its screens, driven by keys on ``memory:``, and the tables that it prints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from pyqueue import AsyncClient, AsyncQueue, Client, QueueStats, Unavailable
from pyqueue.cli import board, top, top_app
from pyqueue.cli.board import Board, Picture
from pyqueue.cli.screens import ListScreen, Question, Table
from pyqueue.cli.top_app import Top
from pyqueue.errors import NotPermitted
from pyqueue.requests import Find, Plan
from pyqueue.telemetry import watching
from pyqueue.telemetry.watching import recent_stats
from tests.cli.shell import Shell
from tests.cli.test_queues import screen_of, terminal

Driver = Pilot[None]


@asynccontextmanager
async def opened(client: AsyncClient, size: tuple[int, int] = (80, 24)) -> AsyncIterator[Driver]:
    """Open the app, and wait until it has read the queues. It reads again by ``refreshed``."""
    async with Top(client, 3600).run_test(size=size) as pilot:
        await settled(pilot)
        yield pilot


async def settled(pilot: Driver) -> None:
    """Wait until everything that the keys began is done."""
    await pilot.pause()
    await pilot.app.workers.wait_for_complete()
    await pilot.pause()


async def press(pilot: Driver, *keys: str) -> None:
    await pilot.press(*keys)
    await settled(pilot)


async def refreshed(pilot: Driver) -> None:
    screen(pilot).read_soon()
    await settled(pilot)


def screen(pilot: Driver) -> ListScreen:
    found = pilot.app.screen
    assert isinstance(found, ListScreen)
    return found


def table(pilot: Driver) -> Table:
    return screen(pilot).table


def texts(pilot: Driver) -> list[list[str]]:
    """The texts of the rows on the screen."""
    return [[each.text for each in cells] for cells in table(pilot).shown.values()]


def head(pilot: Driver) -> str:
    return str(pilot.app.screen.query_one("#head", Static).content)


def drive(test: Callable[[AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncClient("memory:") as client:
            await test(client)

    asyncio.run(main())


async def bury(queue: AsyncQueue[Any], number: int) -> None:
    await queue.push_many(range(number))
    for each in await queue.reserve_many(number, timeout=0):
        await queue.bury(each, error=TimeoutError("too late"))


# ---- queues


def test_queues_have_a_line_each_and_fit_80_columns() -> None:
    async def test(client: AsyncClient) -> None:
        await bury(client.queue("mail"), 3)
        await client.queue("orders").push_many(range(7))
        await client.queue("orders").push(1, delay=60)
        assert await client.queue("orders").reserve(0) is not None
        async with opened(client) as pilot:
            assert [row[:4] for row in texts(pilot)] == [
                ["mail", "0", "0", "0"],
                ["orders", "6", "1", "1"],
            ]
            mail, orders = table(pilot).shown.values()
            assert (mail[-1].text, mail[-1].style) == ("3", "bold red")
            assert {cell.style for cell in orders[1:]} <= {"", "dim"}, "colour is for trouble"
            assert table(pilot).virtual_size.width <= 80
            assert table(pilot).max_scroll_x == 0
            assert "work 1  dead 3" in head(pilot)
            active = [each.binding for each in pilot.app.screen.active_bindings.values()]
            keys = {each.key for each in active if each.show}
            assert keys == {"p", "r", "d", "slash", "s", "enter", "escape", "q"}

    drive(test)


def test_refresh_keeps_the_cursor_and_the_order() -> None:
    async def test(client: AsyncClient) -> None:
        for name in ("b", "c", "d"):
            await client.queue(name).push_many(range(3))
        async with opened(client) as pilot:
            await press(pilot, "down")
            assert (table(pilot).current, table(pilot).cursor_row) == ("c", 1)
            await client.queue("a").push(1)
            await client.queue("b").push(2)
            await client.queue("d").push(2)
            await refreshed(pilot)
            assert (table(pilot).current, table(pilot).cursor_row) == ("c", 1)
            assert [row[:2] for row in texts(pilot)] == [
                *(["b", "4"], ["c", "3"], ["d", "4"], ["a", "1"]),
            ]
            await client.delete_queue("b", force=True)
            await refreshed(pilot)
            assert table(pilot).current == "c"

    drive(test)


def test_key_sorts_by_the_next_column() -> None:
    async def test(client: AsyncClient) -> None:
        for name, number in {"a": 1, "b": 3, "c": 2}.items():
            await client.queue(name).push_many(range(number))
        async with opened(client) as pilot:
            await press(pilot, "s")
            assert [row[0] for row in texts(pilot)] == ["b", "c", "a"]
            assert "by ready" in head(pilot)
            assert table(pilot).current == "a", "the cursor stays on its queue"

    drive(test)


def test_filter_shows_what_matches_until_escape() -> None:
    async def test(client: AsyncClient) -> None:
        for name in ("orders", "mail", "reports"):
            await client.queue(name).push(1)
        async with opened(client) as pilot:
            await press(pilot, "slash", *"or")
            assert [row[0] for row in texts(pilot)] == ["orders", "reports"]
            await press(pilot, "d", "enter")
            assert [row[0] for row in texts(pilot)] == ["orders"]
            assert pilot.app.focused is table(pilot)
            await press(pilot, "escape")
            assert len(texts(pilot)) == 3
            assert not pilot.app.screen.query_one("#filter", Input).display
            await press(pilot, "escape")
            assert len(texts(pilot)) == 3, "the first screen has no screen before"

    drive(test)


def test_key_pauses_and_resumes_a_queue() -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("orders", lease=17)
        await queue.push(1)
        async with opened(client) as pilot:
            await press(pilot, "p")
            assert await queue.paused()
            assert texts(pilot)[0][0] == "orders paused"
            [info] = await client.queues()
            assert info.options["lease"] == 17
            await press(pilot, "p")
            assert not await queue.paused()

    drive(test)


def test_redrive_asks_and_sends_dead_messages_back() -> None:
    async def test(client: AsyncClient) -> None:
        await bury(client.queue("orders"), 3)
        async with opened(client) as pilot:
            await pilot.press("r")
            question = pilot.app.screen
            assert isinstance(question, Question)
            assert question.text == "Send 3 messages of orders.dead back?"
            await press(pilot, "n")
            assert (await client.queue("orders").counts()).ready == 0
            await press(pilot, "r", "y")
            assert (await client.queue("orders").counts()).ready == 3
            assert texts(pilot)[0][1] == "3"
            await press(pilot, "r")
            assert not isinstance(pilot.app.screen, Question), "nothing to send back"

    drive(test)


def test_stream_unfolds_into_its_groups() -> None:
    async def test(client: AsyncClient) -> None:
        stream = client.stream("clicks")
        await stream.append_many(range(5))
        audit = stream.consumer("audit")
        await audit.commit(*await audit.reserve_many(2, timeout=0))
        async with opened(client) as pilot:
            assert [row[:2] for row in texts(pilot)] == [["▸ clicks", "5"]]
            await press(pilot, "enter")
            assert [row[:2] for row in texts(pilot)] == [["▾ clicks", "5"], ["  audit", "3"]]
            await press(pilot, "p")
            assert not await audit.paused(), "a stream itself cannot be paused"
            await press(pilot, "down", "p")
            assert await audit.paused()
            assert texts(pilot)[1][0] == "  audit paused"
            await press(pilot, "up", "enter")
            assert len(texts(pilot)) == 1

    drive(test)


def test_error_of_the_server_is_shown_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: AsyncClient) -> None:
        await client.queue("orders").push(1)
        async with opened(client) as pilot:
            with monkeypatch.context() as patched:

                async def fail(self: AsyncClient, **options: object) -> None:
                    raise Unavailable("no answer")

                patched.setattr(AsyncClient, "queues", fail)
                await refreshed(pilot)
            assert head(pilot) == "no answer"
            assert [row[0] for row in texts(pilot)] == ["orders"]
            await refreshed(pilot)
            assert head(pilot).startswith("pyqueue")

    drive(test)


def test_wide_terminal_shows_rates_and_the_last_30_minutes() -> None:
    async def main() -> None:
        async with AsyncClient("memory:", telemetry=True) as counting:
            queue = counting.queue("raw")
            await queue.push_many(range(200))
            await queue.move(*await queue.reserve_many(100, timeout=0), to="parsed")
            held = await queue.reserve(0)
            assert held is not None
            await queue.rollback(held, delay=60)
            assert counting._telemetry is not None
            await counting._telemetry.flush()
            async with opened(counting, (140, 30)) as pilot:
                heads = [each.text for each in table(pilot).heads]
                assert heads[-4:] == ["LAST 30 MIN", "P95", "FAIL/M", "DEAD"]
                rows = {row[0]: dict(zip(heads, row, strict=True)) for row in texts(pilot)}
                assert float(rows["raw"]["IN/S"]) > 0
                assert float(rows["raw"]["DONE/S"]) > 0
                assert float(rows["parsed"]["IN/S"]) > 0, "messages that moved here count"
                assert rows["raw"]["LAST 30 MIN"].strip() == "█"
                assert rows["raw"]["P95"].endswith("s")
                failed = table(pilot).shown["raw"][-2]
                assert failed.style == "bold red"

    asyncio.run(main())


def test_rates_of_all_lines_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: AsyncClient) -> None:
        for name in "abc":
            await client.queue(name).push(1)
        asked: list[int] = []

        def noted(minutes: int) -> Plan[dict[str, QueueStats]]:
            asked.append(minutes)
            return recent_stats(minutes)

        monkeypatch.setattr(board, "recent_stats", noted)
        read = Board(client).read
        await read(history=False)
        assert asked == [1]
        await read()
        await read()
        assert asked[1:] == [1, 30, 1]
        monkeypatch.setattr(board, "_HISTORY_AGE_S", -1.0)
        await read()
        assert asked[4:] == [1, 30]

    drive(test)


def test_lines_need_no_permission_for_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: AsyncClient) -> None:
        await client.queue("a").push(1)

        def refused(suffix: str, request: Find) -> Plan[NoReturn]:
            yield from ()
            raise NotPermitted("no")

        monkeypatch.setattr(watching, "aside", refused)
        [line] = (await Board(client).read()).lines
        assert (line.ready, line.flow) == (1, None)

    drive(test)


# ---- messages


def test_queue_opens_and_escape_returns() -> None:
    async def test(client: AsyncClient) -> None:
        await client.queue("a").push(0)
        ids = await client.queue("b").push_many([{"n": n} for n in range(4)])
        async with opened(client) as pilot:
            await press(pilot, "down", "enter")
            assert [row[0] for row in texts(pilot)] == [str(id) for id in ids]
            assert texts(pilot)[2][-1] == '{"n": 2}'
            assert table(pilot).max_scroll_x == 0
            await press(pilot, "slash", *"payload.n=3", "enter")
            assert [row[0] for row in texts(pilot)] == [str(ids[3])]
            await press(pilot, "enter")
            assert not isinstance(pilot.app.screen, ListScreen), "all fields of a message"
            await press(pilot, "escape", "escape")
            assert len(texts(pilot)) == 4
            await press(pilot, "escape")
            assert [row[0] for row in texts(pilot)] == ["a", "b"]
            assert table(pilot).current == "b"

    drive(test)


def test_dead_letters_open_and_go_back_one_by_one() -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("orders")
        await bury(queue, 2)
        async with opened(client) as pilot:
            await press(pilot, "d")
            assert [row[1] for row in texts(pilot)] == ["dead", "dead"]
            assert table(pilot).shown[table(pilot).current or ""][-1].style == "bold red"
            assert texts(pilot)[0][-1] == "too late"
            await press(pilot, "u")
            assert len(texts(pilot)) == 1
            assert (await queue.counts()).ready == 1

    drive(test)


def test_key_shows_the_next_page(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: AsyncClient) -> None:
        monkeypatch.setattr(top_app, "PAGE_SIZE", 2)
        await client.queue("orders").push_many(range(3))
        async with opened(client) as pilot:
            await press(pilot, "enter")
            assert [row[-1] for row in texts(pilot)] == ["0", "1"]
            assert "more: n" in head(pilot)
            await press(pilot, "n")
            assert [row[-1] for row in texts(pilot)] == ["2"]
            await press(pilot, "n")
            assert [row[-1] for row in texts(pilot)] == ["0", "1"]

    drive(test)


def test_message_is_cancelled_after_a_question() -> None:
    async def test(client: AsyncClient) -> None:
        queue = client.queue("orders")
        first, _ = await queue.push_many([1, 2])
        async with opened(client) as pilot:
            await press(pilot, "enter", "c", "y")
            assert first is not None
            assert await queue.get(first) is None
            assert len(texts(pilot)) == 1

    drive(test)


def test_wrong_filter_of_messages_is_named() -> None:
    async def test(client: AsyncClient) -> None:
        await client.queue("orders").push(1)
        async with opened(client) as pilot:
            await press(pilot, "enter", "slash", *"state=odd", "enter")
            assert head(pilot).startswith("state: expected one of scheduled, ready")
            await press(pilot, "escape")
            assert len(texts(pilot)) == 1

    drive(test)


def test_hostile_texts_do_not_reach_the_terminal() -> None:
    async def test(client: AsyncClient) -> None:
        await client.queue("orders").push("[red]\x9b31m", id="\x1b]0;x\x07")
        async with opened(client) as pilot:
            await press(pilot, "enter")
            shown = "".join(str(each) for each in table(pilot).get_row_at(0))
            assert "[red]" in shown, "not taken for markup"
            assert shown.isprintable()

    drive(test)


# ---- tables


def test_top_in_a_pipe_prints_once(shell: Shell, client: Client) -> None:
    client.queue("orders").push_many(range(3))
    client.stream("clicks").append(1)
    group = client.stream("clicks").consumer("audit")
    group.release(*group.reserve_many(1, timeout=0))
    for arguments in (["top"], ["top", "--once"]):
        status, out, errors = shell.run(*arguments)
        assert (status, errors) == (0, "")
        lines = [line.split("\t") for line in out.splitlines()]
        assert lines[0][:6] == ["queue", "group", "kind", "ready", "reserved", "scheduled"]
        assert [line[:4] for line in lines[1:]] == [
            ["clicks", "", "stream", "1"],
            ["clicks", "audit", "stream", "1"],
            ["orders", "", "standard", "3"],
        ]
    [_, _, row] = shell.json("top")
    assert (row["queue"], row["ready"], row["in/s"]) == ("orders", 3, None)


def test_top_without_textual_names_the_extra(
    bare_shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "find_spec", lambda name: None)
    with terminal() as (_, theirs), open(theirs, "w", closefd=False) as stdout:
        assert bare_shell.stream("top", stdout=stdout) == 2
    assert 'pip install "pyqueue-mongo[top]", or use --plain' in capsys.readouterr().err


def test_top_once_at_a_terminal_is_a_table(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("orders").push_many(range(3))
    client.queue("orders").pause()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    with terminal() as (ours, theirs), open(theirs, "w", closefd=False) as stdout:
        assert shell.stream("top", "--once", stdout=stdout) == 0
        first, second = screen_of(ours, theirs).splitlines()
    assert first.split()[:3] == ["QUEUE", "READY", "WORK"]
    assert second.split()[:3] == ["orders", "paused", "3"]
    assert max(len(first), len(second)) <= 80


def test_top_plain_prints_again_and_again(
    shell: Shell, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.queue("orders").push(1)
    reads: list[int] = []
    read = Board.read

    async def counted(self: Board) -> Picture:
        reads.append(1)
        if len(reads) == 3:
            raise KeyboardInterrupt
        return await read(self)

    monkeypatch.setattr(Board, "read", counted)
    status, out, _ = shell.run("top", "--plain", "--interval", "1ms")
    assert status == 130
    assert out.count("\norders\t") == 2
