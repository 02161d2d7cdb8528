"""The actions. Each is first written to the audit, and the next page shows its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from starlette.exceptions import HTTPException

from pyqueue.async_queues import AsyncQueue
from pyqueue.async_selections import AsyncSelection
from pyqueue.errors import ConfigurationError
from pyqueue.messages import BulkResult
from pyqueue.web.access import Viewer
from pyqueue.web.filters import conditions
from pyqueue.web.overview import row_of
from pyqueue.web.queue_page import BULK
from pyqueue.web.shapes import counted
from pyqueue.web.site import Site

#: Carries out an action, and returns a text that says what was done.
Action = Callable[[Site, Viewer], Awaitable[str]]

#: The share by which the number of messages may differ from the number that was shown.
_TOLERANCE: Final = 0.1
#: The fields of forms that the audit keeps.
_KEPT: Final = ("id", "state", "where", "expected", "to", "group", "position", "schedule", "force")
_UNCHANGED: Final = "nothing was changed: the message has moved, changed or ended"


async def act(site: Site, viewer: Viewer, action: str) -> str:
    """Carry out an action, and return the id of its entry in the audit.

    Args:
        site: The dashboard that received the form.
        viewer: The person who sent the form, and who has the permission.
        action: The name of the action.
    """
    form = viewer.form
    details = {name: form[name][:500] for name in _KEPT if form.get(name)}
    entry = await site.audit.begin(viewer.name, action, form.get("queue", "")[:200], details)
    result = "failed"
    try:
        result = await ACTIONS[action](site, viewer)
    except HTTPException as error:
        result = f"refused: {error.detail}"
        raise
    except Exception as error:
        text = site.redactor.text("error.message", str(error))
        result = f"failed: {type(error).__name__}: {text}"
        raise
    finally:
        site.sampler.expire()
        await site.audit.end(entry, result)
    return entry


async def _queue(site: Site, viewer: Viewer) -> AsyncQueue[Any]:
    """Return the queue that a form names."""
    _, row = await row_of(site, viewer.form.get("queue", ""))
    return site.queue(row.info)


def _typed(viewer: Viewer, expected: str) -> None:
    """Refuse a hard-to-undo action unless the viewer has typed the name given in ``expected``."""
    if viewer.form.get("name", "").strip() != expected:
        raise HTTPException(400, f"name: type {expected!r} to confirm; nothing was changed")


# ---- one message


async def _cancel(site: Site, viewer: Viewer) -> str:
    queue, form = await _queue(site, viewer), viewer.form
    result = await queue.cancel(form.get("id", ""), form.get("force") == "1")
    if result == "requested":
        return "its holder was asked to end it"
    return _UNCHANGED if result is None else "the message was cancelled"


async def _force_release(site: Site, viewer: Viewer) -> str:
    queue, id = await _queue(site, viewer), viewer.form.get("id", "")
    # The permission is about this queue, and the client would find the message in any other queue.
    known = await queue.get(id) is not None
    released = known and await site.client.force_release(id)
    return "the message is ready again" if released else _UNCHANGED


async def _requeue(site: Site, viewer: Viewer) -> str:
    if "id" not in viewer.form:
        return await _bulk(site, viewer, lambda chosen: chosen.requeue(limit=BULK))
    done = await (await _queue(site, viewer)).requeue(viewer.form["id"])
    return "the message is ready" if done else _UNCHANGED


async def _remove(site: Site, viewer: Viewer) -> str:
    if "id" not in viewer.form:
        return await _bulk(site, viewer, lambda chosen: chosen.remove(limit=BULK))
    done = await (await _queue(site, viewer)).remove(viewer.form["id"])
    return "the message was removed" if done else _UNCHANGED


async def _replay(site: Site, viewer: Viewer) -> str:
    done = await (await _queue(site, viewer)).replay(viewer.form.get("id", ""))
    return "the message is ready again" if done else _UNCHANGED


# ---- many messages


async def _redrive(site: Site, viewer: Viewer) -> str:
    return await _bulk(site, viewer, lambda chosen: chosen.redrive(limit=BULK))


async def _move(site: Site, viewer: Viewer) -> str:
    to = viewer.form.get("to", "").strip()
    await viewer.require("move", to)
    await row_of(site, to)  # a mistyped name would create a queue
    return await _bulk(site, viewer, lambda chosen: chosen.move(to, limit=BULK))


async def _bulk(
    site: Site, viewer: Viewer, change: Callable[[AsyncSelection], Awaitable[BulkResult]]
) -> str:
    """Change the messages that match, unless their number differs too much from the one shown."""
    form, queue = viewer.form, await _queue(site, viewer)
    state: Any = form.get("state", "")
    chosen = queue.select(conditions(form.get("where", ""), site.redactor), state)
    number, text = await chosen.count(BULK), form.get("expected", "")
    expected = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if abs(number - expected) > _TOLERANCE * expected:
        raise HTTPException(
            409,
            f"{counted(number)} match now, and {expected} did on the page before; nothing was "
            "changed",
        )
    result = await change(chosen)
    passed = f", {result.passed} left alone" if result.passed else ""
    more = f"; more may match, so repeat it after {BULK}" if result.done >= BULK else ""
    return f"{counted(result.done)}{passed}{more}"


# ---- queues, groups and schedules


async def _pause(site: Site, viewer: Viewer, verb: str = "pause") -> str:
    if "schedule" in viewer.form:
        await getattr(site.client, f"{verb}_schedule")(await _schedule(site, viewer))
    elif "group" in viewer.form:
        await getattr(await _group(site, viewer), verb)()
    else:
        await getattr(await _queue(site, viewer), verb)()
    return f"{verb}d"


async def _resume(site: Site, viewer: Viewer) -> str:
    return await _pause(site, viewer, "resume")


async def _run(site: Site, viewer: Viewer) -> str:
    id = await site.client.run_schedule(await _schedule(site, viewer))
    return "nothing was changed: the schedule is gone" if id is None else f"message {id} was pushed"


async def _schedule(site: Site, viewer: Viewer) -> str:
    """Return the name of the schedule in a form. The schedule must be for the queue in the form."""
    name = viewer.form.get("schedule", "")
    queues = {each.name: each.queue for each in await site.client.schedules()}
    if queues.get(name) != viewer.form.get("queue", ""):
        raise HTTPException(404, f"There is no schedule {name[:120]!r}.")
    return name


async def _purge(site: Site, viewer: Viewer) -> str:
    queue = await _queue(site, viewer)
    _typed(viewer, queue.name)
    return f"{counted(await queue.purge())} deleted"


async def _group(site: Site, viewer: Viewer) -> Any:
    """Return the consumer group that a form names."""
    _, row = await row_of(site, viewer.form.get("queue", ""), stream=True)
    name, stream = viewer.form.get("group", ""), site.client.stream(row.info.name)
    if name not in [each.name for each in await stream.consumers()]:
        raise HTTPException(404, f"There is no group {name[:120]!r}.")
    return stream.consumer(name)


async def _seek(site: Site, viewer: Viewer) -> str:
    group = await _group(site, viewer)
    _typed(viewer, viewer.form["group"])
    text = viewer.form.get("position", "").strip()
    start: Any = int(text) if text.isascii() and text.isdigit() and len(text) < 16 else text
    if isinstance(start, str) and start not in ("first", "last"):
        raise ConfigurationError(
            f'position: expected "first", "last" or a number, found {text[:40]!r}; use one of them'
        )
    return f"the group continues at {await group.seek(start)}"


async def _delete_consumer(site: Site, viewer: Viewer) -> str:
    await _group(site, viewer)
    _typed(viewer, viewer.form["group"])
    await site.client.stream(viewer.form["queue"]).delete_consumer(viewer.form["group"])
    return "the group was deleted"


#: The actions, keyed by the names with which ``allow`` is called.
ACTIONS: Final[Mapping[str, Action]] = {
    "cancel": _cancel,
    "force_release": _force_release,
    "requeue": _requeue,
    "remove": _remove,
    "replay": _replay,
    "redrive": _redrive,
    "move": _move,
    "pause": _pause,
    "resume": _resume,
    "run": _run,
    "purge": _purge,
    "seek": _seek,
    "delete_consumer": _delete_consumer,
}
