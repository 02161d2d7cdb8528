"""The ticks of a schedule: the instants at which it pushes a message.

The package cronsim evaluates cron expressions. When daylight saving time begins or ends, it follows
Debian's cron. If neither the minute nor the hour begins with a star, a skipped time ticks right
after the change, and a time that occurs twice ticks once. Other expressions match the local time at
every instant, so on that day they may have more or fewer ticks than usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from pyqueue import arguments
from pyqueue.errors import ConfigurationError
from pyqueue.limits import shown

#: The precision of instants in the database.
MOMENT: Final = timedelta(milliseconds=1)
#: The shortest time between two ticks, in seconds.
LEAST_EVERY_S: Final = 1.0
#: The number of fields of a cron expression, which has no field for seconds.
_FIELDS: Final = 5
_LONGEST: Final = 200
_EXAMPLE: Final = 'use five fields: minute, hour, day, month, weekday, such as "0 3 * * *"'


class Timing(NamedTuple):
    """When a schedule ticks: at the times of a cron expression, or at equal intervals."""

    #: The cron expression, or None if ``every_s`` sets the ticks.
    cron: str | None
    timezone: str = "UTC"
    every_s: float | None = None

    def first(self, now: datetime) -> datetime | None:
        """Return the first tick of a schedule that begins now, or None if it never ticks."""
        return self.after(now, now)

    def after(self, tick: datetime, now: datetime) -> datetime | None:
        """Return the first tick after ``now``, or None if there is none in the next 50 years.

        Args:
            tick: A tick, or when the schedule begins. Equal intervals are counted from then.
            now: An instant that is not before ``tick``.
        """
        if self.every_s is not None:
            step = timedelta(seconds=self.every_s)
            return tick + ((now - tick) // step + 1) * step
        return next(self._from(now), None)

    def last(self, tick: datetime, until: datetime, count: int) -> list[datetime]:
        """Return the last ``count`` ticks, or fewer, from ``tick`` to ``until``, both included."""
        if self.every_s is not None:
            step = timedelta(seconds=self.every_s)
            number = (until - tick) // step + 1
            return [tick + place * step for place in range(max(0, number - count), number)]
        # Going back finds where to start. Only going forward gives exactly the right ticks.
        past = deque(islice(self._cron(until + MOMENT, reverse=True), count + 1), maxlen=1)
        start = max([tick, *(each.astimezone(UTC) for each in past)])
        found = deque[datetime](maxlen=count)
        for each in self._from(start - MOMENT):
            if each > until:
                break
            found.append(each)
        return list(found)

    def _from(self, when: datetime) -> Iterator[datetime]:
        """Yield the times of the cron expression after ``when``, in UTC."""
        for each in self._cron(when):
            tick = each.astimezone(UTC)
            if tick > when:  # cronsim begins before ``when`` in an hour that occurs twice
                yield tick

    def _cron(self, when: datetime, *, reverse: bool = False) -> CronSim:
        return CronSim(str(self.cron), when.astimezone(ZoneInfo(self.timezone)), reverse=reverse)


def timing_of(cron: object, every: object, timezone: object) -> Timing:
    """Check the arguments that say when a schedule ticks.

    Args:
        cron: A cron expression of five fields, or None.
        every: The time between two ticks, or None.
        timezone: The time zone of the expression: its name, or a ZoneInfo with a name.

    Raises:
        ConfigurationError: An argument is not allowed, or the expression never matches.
    """
    timezone = _zone_name(timezone)
    if (cron is None) == (every is None):
        raise ConfigurationError("cron, every: pass one of the two")
    if every is not None:
        length_s = arguments.duration("every", every, positive=True)
        if length_s < LEAST_EVERY_S:
            raise ConfigurationError(f"every: {shown(every)} is not allowed; use at least 1 second")
        return Timing(None, timezone, round(length_s, 3))
    if not isinstance(cron, str) or len(cron) > _LONGEST or len(cron.split()) != _FIELDS:
        raise ConfigurationError(f"cron: {shown(cron)} is not allowed; {_EXAMPLE}")
    timing = Timing(" ".join(cron.split()), timezone)
    try:
        first = timing.first(datetime(2000, 1, 1, tzinfo=UTC))
    except CronSimError as error:
        raise ConfigurationError(
            f"cron: {shown(cron)} is not allowed ({error}); {_EXAMPLE}"
        ) from None
    if first is None:
        raise ConfigurationError(f"cron: {shown(cron)} never matches; change its day or month")
    return timing


def _zone_name(given: object) -> str:
    """Check a time zone, and return its name."""
    name = given.key if isinstance(given, ZoneInfo) else given
    try:
        if isinstance(name, str):
            ZoneInfo(name)
            return name
    except (KeyError, ValueError, OSError):  # unknown, a path outside the database, or a folder
        pass
    raise ConfigurationError(
        f'timezone: {shown(given)} is not allowed; use a name such as "UTC" or "Europe/Berlin"'
    )
