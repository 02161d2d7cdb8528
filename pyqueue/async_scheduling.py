# Generated from scheduling.py by `make faces`. Edit scheduling.py, and run `make faces`.
"""``AsyncScheduling``: the methods of a client that manage schedules."""

from __future__ import annotations

from typing import Unpack

from pyqueue.backends.schedules import managing as schedules
from pyqueue.backends.schedules.definitions import definition
from pyqueue.messages import Id, ScheduleInfo, ScheduleOptions
from pyqueue.runtime.connecting import AsyncConnection, Connected


class AsyncScheduling(Connected[AsyncConnection]):
    """The methods of a client that manage schedules, for async code."""

    async def schedule(
        self,
        name: str,
        *,
        queue: str,
        cron: str | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> bool:
        """Push a message to a queue at certain times, from any running worker or pipeline.

        Each of these times, a tick, pushes one message, however many workers run. The schedule is
        stored, so it outlives this program. Another call with the same name changes the schedule.

        Args:
            name: 1-110 characters of A-Z a-z 0-9 _ - . : >.
            queue: The name of the queue.
            cron: Five fields, such as "0 3 * * *": minute, hour, day of the month, month, weekday.
            options: ``every``: instead of ``cron``, the seconds between two ticks, at least 1.
                ``timezone``: the time zone of ``cron``; default "UTC". ``payload`` (default {}),
                ``headers``, ``key``, ``priority`` and ``group``: as for a push, for each message.
                If another message has the key, the new message gets no key. ``missed``: after ticks
                at which no worker ran, push one message for all of them ("once", the default), none
                ("skip"), or one for each of the last 100 ("all", which needs ``overlap=True``).
                ``overlap``: whether to push a message while the previous message is still in a
                queue (not a dead-letter queue); by default, the tick is skipped. ``grace``: how
                many seconds late a tick may be before it counts as missed; default 60, at least 1.

        Returns:
            Whether the schedule is new or has changed.

        Raises:
            ConfigurationError: An argument is not allowed, the queue is a stream, or the queue
                does not support an option. Nothing is stored.
            InvalidMessage: The payload cannot be stored.
        """
        given = definition(name, queue, cron, options)
        return await self._connection.run(schedules.schedule(given))

    async def schedules(self) -> list[ScheduleInfo]:
        """Return the schedules of this namespace, sorted by name."""
        return await self._connection.run(schedules.schedules())

    async def unschedule(self, name: str) -> bool:
        """Delete a schedule. Messages that were already pushed stay in their queue.

        Args:
            name: The name of the schedule.

        Returns:
            Whether there was such a schedule.
        """
        return await self._connection.run(schedules.unschedule(name))

    async def pause_schedule(self, name: str) -> bool:
        """Pause a schedule in all processes. A later change of the schedule does not resume it.

        Args:
            name: The name of the schedule.

        Returns:
            Whether there is such a schedule.
        """
        return await self._connection.run(schedules.pause(name, True))

    async def resume_schedule(self, name: str) -> bool:
        """Resume a schedule at its next tick. Ticks during the pause do not count as missed.

        Args:
            name: The name of the schedule.

        Returns:
            Whether there is such a schedule.
        """
        return await self._connection.run(schedules.pause(name, False))

    async def run_schedule(self, name: str) -> Id | None:
        """Push a message of a schedule now, even if it is paused. The next tick does not change.

        Args:
            name: The name of the schedule.

        Returns:
            The id of the message, or None if there is no such schedule.

        Raises:
            ConfigurationError: The queue refuses the message.
        """
        return await self._connection.run(schedules.run(name))
