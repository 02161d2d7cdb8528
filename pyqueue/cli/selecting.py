"""The options that select messages, and how a command changes the messages that match."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import typer

from pyqueue import BulkResult, ConfigurationError, Queue
from pyqueue.cli.common import duration, emit, note, parse_json

Where = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH=VALUE",
        help="Only messages with this value, which is JSON or else text: payload.n=3, "
        "error.type=Timeout. Can be repeated.",
    ),
]
WaitingState = Annotated[
    Literal["scheduled", "ready", "dead"] | None,
    typer.Option("--state", help="Only messages in this state."),
]
Older = Annotated[
    float | None,
    typer.Option(
        metavar="DURATION",
        parser=duration("--older"),
        help="Only messages that were pushed longer ago than this, such as 2h30m.",
    ),
]
ErrorType = Annotated[
    str | None,
    typer.Option("--error", metavar="TYPE", help="Only messages whose last error has this type."),
]
Count = Annotated[
    int | None,
    typer.Option("--limit", min=1, metavar="N", help="Take at most N messages; by default all."),
]
Rate = Annotated[
    float | None, typer.Option(metavar="N", help="Take at most N messages per second.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing; print how many messages match.")
]


class Chosen(NamedTuple):
    """The options that select the messages to change, and that limit their number and rate."""

    where: Where = None
    older: Older = None
    error: ErrorType = None
    limit: Count = None
    rate: Rate = None
    dry_run: DryRun = False


class Selected(NamedTuple):
    """The messages that a command changes, selected by options and by state."""

    chosen: Chosen
    state: Literal["scheduled", "ready", "dead"] | None

    @property
    def filters(self) -> bool:
        """Whether the selection has a condition."""
        given = (self.state, self.chosen.older, self.chosen.error)
        return any(each is not None for each in given) or bool(self.chosen.where)

    def needs_filter(self) -> bool:
        """Return whether the selection has a condition.

        Raises:
            ConfigurationError: There is no condition, but an option needs one.
        """
        if not self.filters and (self.chosen.dry_run or self.chosen.rate is not None):
            option = "--dry-run" if self.chosen.dry_run else "--rate"
            raise ConfigurationError(
                f"{option}: needs a condition; add --where, --state, --older or --error"
            )
        return self.filters

    def change(
        self,
        queue: Queue[Any],
        verb: str,
        change: Callable[..., BulkResult],
        as_json: bool,
    ) -> None:
        """Change the messages that match, or count them in a dry run. Print how many.

        Args:
            queue: The queue that has the messages.
            verb: The key of the number of changed messages in the JSON output.
            change: A method of ``Selection``.
            as_json: Whether to print JSON.
        """
        where, older, error, limit, rate, dry_run = self.chosen
        selection = queue.select(conditions(where or []), self.state, older, error)
        if dry_run:
            number = selection.count(limit)
            emit({"matched": number}) if as_json else print(number)
            return
        result = change(selection, limit=limit, rate=rate)
        if as_json:
            emit({verb: result.done, "passed": result.passed})
            return
        print(result.done)
        if result.passed:
            note(
                f"{result.passed} matching messages stay: consumers hold them, they changed in "
                "the meantime, or this change is not possible for them"
            )


def conditions(given: list[str]) -> dict[str, object]:
    """Return the values of the ``--where`` options, keyed by path."""
    found: dict[str, object] = {}
    for each in given:
        path, equals, text = each.partition("=")
        if not equals or not path:
            raise ConfigurationError(
                f"--where: {each!r} is not allowed; use PATH=VALUE, such as payload.n=3 or "
                "error.type=Timeout"
            )
        if path in found:
            raise ConfigurationError(f"--where: {path} is set twice; set it once")
        try:
            found[path] = parse_json(text, "--where")
        except ConfigurationError:
            found[path] = text
    return found
