"""The commands for the stages of Spark queries that write into queues: ls and forget."""

from __future__ import annotations

from typing import Annotated

import typer

from pyqueue import ConfigurationError
from pyqueue.backends.bulk import stages
from pyqueue.cli.common import Commands, Json, Namespace, Url, connect, emit, table
from pyqueue.runtime.connecting import runner_of

app = typer.Typer(
    cls=Commands, help="Spark queries that write into queues: ls, forget.", no_args_is_help=True
)


@app.command()
def ls(
    queue: Annotated[
        str | None, typer.Argument(metavar="[QUEUE]", help="The first queue of the stages.")
    ] = None,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """List the Spark queries that write by batch, and the last batch of each."""
    with connect(url, namespace) as client:
        found = [each._asdict() for each in runner_of(client).run(stages.stages(queue))]
    if as_json:
        for each in found:
            emit(each)
    else:
        table(stages.StageInfo._fields, found, right=("epoch",))


@app.command()
def forget(
    queue: Annotated[
        str, typer.Argument(metavar="QUEUE", help="The first queue that the stage writes into.")
    ],
    stage: Annotated[
        str,
        typer.Argument(
            metavar="[STAGE]", help="The name of the stage. Default: writes without a stage."
        ),
    ] = "",
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Let the query of a stage begin again with any batch number. Stop the query first.

    After that, a row is skipped only if the queue or its history still has the id of the row.
    """
    with connect(url, namespace) as client:
        run = runner_of(client).run
        count = run(stages.forget(queue, stage))
        if not count:
            known = sorted({each.stage for each in run(stages.stages(queue))})
            raise ConfigurationError(
                f"STAGE: queue {queue!r} has no stage {stage!r}; it has {known}"
            )
    emit({"forgotten": count}) if as_json else print(count)
