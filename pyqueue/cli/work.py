"""The commands that run your code: worker, pipeline run and pipeline show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import typer

from pyqueue import AsyncClient, Backoff, Client, ConfigurationError, Counts, Pipeline, QueueError
from pyqueue.cli import progress
from pyqueue.cli.apps import client_for, find
from pyqueue.cli.common import (
    INTERRUPTED,
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    checked_url,
    connect,
    duration,
    emit,
    note,
    started,
    table,
)
from pyqueue.cli.health import served
from pyqueue.cli.logs import Format, Level, configure
from pyqueue.cli.starting import import_failed, server_reached, show_failure, start_line
from pyqueue.pipeline import Report, Runner, around_of, has_client, leave_errors
from pyqueue.runtime.retrying import RetryDelays

app = typer.Typer(cls=Commands)
pipelines = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Run or show the pipeline of a recipe."
)
app.add_typer(pipelines, name="pipeline")

#: The delay before a worker process that died is started again.
RESTART_BACKOFF = Backoff(base=1, maximum=60, jitter=0)
#: A worker process that ran for this long was healthy: after its death the delay is short again.
HEALTHY_AFTER_S = 60.0
POOL_POLL_INTERVAL_S = 0.05

Concurrency = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="The number of handlers that run at once.")
]
Grace = Annotated[
    float,
    typer.Option(
        metavar="DURATION",
        parser=duration("--grace"),
        help="How long handlers may take to end after a stop.",
    ),
]
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML or YAML file.")]

AppName = Annotated[
    str,
    typer.Argument(
        metavar="APP", help="MODULE:OBJECT: a Worker, a Pipeline, or a function that returns one."
    ),
]
Processes = Annotated[int, typer.Option(min=1, metavar="N", help="The number of processes.")]
LogLevel = Annotated[
    Level | None, typer.Option(help="The lowest level of log lines; by default info.")
]
LogFormat = Annotated[
    Format | None, typer.Option(help="Log lines for people (text, the default), or for programs.")
]
Health = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Answer /live and /ready at this PORT or HOST:PORT. The default host is 127.0.0.1.",
    ),
]


# ---- worker


@app.command()
def worker(
    context: typer.Context,
    name: AppName,
    concurrency: Concurrency = None,
    processes: Processes = 1,
    grace: Grace = 30,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    health: Health = None,
    as_json: Json = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C. A second signal ends it at once.

    While the server cannot be reached, the worker prints a note and waits for it.

    With --processes, each worker runs in a separate process, and a process that dies is started
    again. The exit status is 0 if the worker was stopped by a signal, and 1 if its lifespan failed.
    --url, --namespace and --signals are for a worker that was created without a client.
    """
    given = _given(context, {"url": url, "namespace": namespace, "signals": signals})
    os.environ.update({f"PYQUEUE_{each.upper()}": value for each, value in given.items()})
    # The processes of the pool, and clients of the user's module, use the server of this process.
    url = context.with_resource(started(url))
    if url is not None:
        os.environ["PYQUEUE_URL"] = url
    if processes > 1:
        if health is not None:
            raise ConfigurationError(
                "--health: several processes cannot share a port; start one process on each port"
            )
        options = {"concurrency": concurrency, "log-level": log_level, "log-format": log_format}
        command = [
            *(sys.executable, "-m", "pyqueue.cli", "worker", name, f"--grace={grace}"),
            *(f"--{each}={value}" for each, value in options.items() if value is not None),
            *(["--json"] if as_json else []),
        ]
        raise typer.Exit(WorkerPool(command, processes).run())
    if lifeline is not None:
        threading.Thread(target=_stop_with_parent, args=(lifeline,), daemon=True).start()
    runner = find(name)
    if given and has_client(runner):
        raise ConfigurationError(
            f"--{next(iter(given))}: {name!r} was created with a client; create the Worker without "
            f"a client, or leave out --{next(iter(given))}"
        )
    configure(log_level, log_format)
    client = client_for(runner, url, namespace, signals)
    with served(health) as pulse:
        around_of(runner).pulse = pulse
        report = _run_app(runner, client, concurrency, grace)
    _show_report(runner, report, as_json)


def _given(context: typer.Context, options: dict[str, str | None]) -> dict[str, str]:
    """Return the options that were given on the command line, not by environment variables."""
    return {
        name: value
        for name, value in options.items()
        if value is not None
        and getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }


def _run_app(
    runner: Runner[Any], client: Client | AsyncClient, concurrency: int | None, grace: float
) -> Report:
    """Run a worker. If its lifespan fails, show where, and exit with status 1."""
    try:
        return run_and_close(runner, client, concurrency=concurrency, grace=grace)
    except Exception as error:
        if around_of(runner).lifespan.failure is not error:
            raise
        show_failure(error)
        note(f"{runner.name}: the lifespan failed, see above")
        raise typer.Exit(1) from None


def _stop_with_parent(lifeline: int) -> None:
    """Stop this process when its parent is gone, even if the parent was killed.

    Only the parent holds the other end of the pipe, so the read returns when the parent ends.
    """
    with suppress(OSError):
        os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def run_and_close(
    runner: Runner[Any],
    client: Client | AsyncClient,
    *,
    until_empty: bool = False,
    concurrency: int | None = None,
    grace: float = 30,
    shown: AbstractAsyncContextManager[None] | None = None,
) -> Report:
    """Run a worker or a pipeline, and close its client. Return the report of the run.

    Args:
        runner: The worker or the pipeline.
        client: The client of the worker or the pipeline.
        until_empty: As for ``Runner.run``.
        concurrency: As for ``Runner.run``.
        grace: As for ``Runner.run``.
        shown: A context manager that is entered for the run, if the client is an AsyncClient.
    """
    note(start_line(runner, client, concurrency))
    leave_errors(runner)
    pulse = around_of(runner).pulse
    began = time.monotonic()
    run: Callable[[], Any] = partial(
        runner.run, until_empty=until_empty, concurrency=concurrency, grace=grace
    )
    stopped = partial(Report, runner.counters)
    if not isinstance(client, AsyncClient):
        if not anyio.run(server_reached, client, pulse):
            client.close()
            return stopped(time.monotonic() - began)
        with client:
            report: Report = run()
        return report

    async def main() -> Report:
        if not await server_reached(client, pulse):
            await client.close()
            return stopped(time.monotonic() - began)
        async with client, shown or nullcontext():
            report: Report = await run()
        return report

    return anyio.run(main)


def _show_report(runner: Runner[Any], report: Report, as_json: bool) -> None:
    if as_json:
        emit({"name": runner.name, "seconds": round(report.seconds, 3), "stages": report.stages})
        return
    rows = [{"queue": name, **counters} for name, counters in report.stages.items()]
    columns = list(rows[0])
    table(columns, rows, right=columns[1:])


class WorkerProcess:
    """One process of a pool. It is started again when it dies.

    Args:
        number: The number of the process in the pool, for notes.
        command: The command line of the process.
        lifeline: The read end of a pipe. The process inherits it, and stops when the pipe closes.
    """

    def __init__(self, number: int, command: list[str], lifeline: int) -> None:
        self._number = number
        self._command = command
        self._lifeline = lifeline
        self._delays = RetryDelays(RESTART_BACKOFF)
        self._start()

    def _start(self) -> None:
        self.started_at = time.monotonic()
        #: When to start the process again, or None while it runs.
        self.restart_at: float | None = None
        # In a separate session, because the terminal sends Ctrl-C to the whole process group: the
        # parent passes it on once.
        self.process = subprocess.Popen(
            self._command, pass_fds=[self._lifeline], start_new_session=True
        )

    def stop(self) -> None:
        """Ask the process to stop. A second call makes it stop at once."""
        if self.restart_at is None:
            # SIGTERM and not SIGINT: a module that is being imported may swallow a
            # KeyboardInterrupt.
            self.process.terminate()

    def poll(self, stopping: bool) -> int | None:
        """Check the process, and start it again if that is due.

        Args:
            stopping: Whether the pool is stopping, so that no process is started again.

        Returns:
            None while the process runs or waits for its restart, otherwise its exit status.
        """
        if self.restart_at is not None:
            if stopping:
                return 0
            if time.monotonic() >= self.restart_at:
                self._start()
            return None
        status = self.process.poll()
        # Status 2 is a wrong configuration: the next process would fail as well.
        if status is None or status in (0, 2):
            return status
        if stopping:
            return 0 if self._stopped_early(status) else 1
        self._schedule_restart(status)
        return None

    def _stopped_early(self, status: int) -> bool:
        """Return whether the process was stopped before it handled signals.

        Such a process ends by the signal, or with the status of Python or typer for an interrupt.
        """
        if status in (-signal.SIGTERM, -signal.SIGINT, INTERRUPTED):
            return True
        return status == 1 and time.monotonic() - self.started_at < HEALTHY_AFTER_S

    def _schedule_restart(self, status: int) -> None:
        if time.monotonic() - self.started_at >= HEALTHY_AFTER_S:
            self._delays.reset()
        delay = next(self._delays)
        self.restart_at = time.monotonic() + delay
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        process = f"worker process {self._number} ({self.process.pid})"
        note(f"{process} ended {how}; starting it again in {delay:g} s")

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class WorkerPool:
    """Several worker processes. The parent only watches them.

    Args:
        command: The command line of each process. It gets one more option, ``--lifeline=N``: the
            number of a pipe's read end. A read from it returns when the parent is gone.
        size: The number of processes.
    """

    def __init__(self, command: list[str], size: int) -> None:
        self._command = command
        self._size = size
        self._signals: list[int] = []

    def run(self) -> int:
        """Keep the processes running until SIGTERM or SIGINT, and wait for all of them to stop.

        Returns:
            The highest exit status of a process.
        """
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: self._signals.append(number))
        # The write end stays open as long as this process lives. No other process holds it.
        lifeline, _ = os.pipe()
        command = [*self._command, f"--lifeline={lifeline}"]
        processes: list[WorkerProcess] = []
        try:
            processes.extend(
                WorkerProcess(number, command, lifeline) for number in range(1, self._size + 1)
            )
            return self._watch(processes)
        finally:
            for process in processes:
                process.kill()

    def _watch(self, processes: list[WorkerProcess]) -> int:
        """Watch the processes until all have ended. Return the highest exit status."""
        running = list(processes)
        worst, passed_on = 0, 0
        while running:
            while passed_on < len(self._signals):
                passed_on += 1
                for process in running:
                    process.stop()
            for process in list(running):
                status = process.poll(bool(self._signals))
                if status is not None:
                    running.remove(process)
                    worst = max(worst, status)
                    if status == 2 and not self._signals:
                        self._signals.append(signal.SIGTERM)
            time.sleep(POOL_POLL_INTERVAL_S)
        return worst


# ---- pipeline


def _pipeline(client: Client | AsyncClient, recipe: Path) -> Pipeline:
    sys.path.insert(0, os.getcwd())  # for handlers that are not installed
    try:
        return Pipeline.from_recipe(client, recipe)
    except QueueError:
        raise
    except Exception as error:
        raise import_failed("RECIPE: a module that the recipe names", error) from error


@pipelines.command("run")
def run_(
    context: typer.Context,
    recipe: Recipe,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="Stop when no stage has a message left.")
    ] = False,
    concurrency: Concurrency = None,
    grace: Grace = 30,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline until SIGTERM or Ctrl-C, or until it is empty. Print the counts of each stage.

    The handlers find the server in the environment variables PYQUEUE_URL and PYQUEUE_NAMESPACE.
    """
    url = checked_url(context.with_resource(started(url)))
    os.environ["PYQUEUE_URL"], os.environ["PYQUEUE_NAMESPACE"] = url, namespace
    if until_empty:  # A run that has an end does not wait for its server.
        with connect(url, namespace, signals):
            pass
    client = AsyncClient(url, namespace=namespace, signals=signals)
    pipeline = _pipeline(client, recipe)
    configure(None, None)
    report = run_and_close(
        pipeline,
        client,
        until_empty=until_empty,
        concurrency=concurrency,
        grace=grace,
        shown=progress.shown(pipeline, client),
    )
    _show_report(pipeline, report, as_json)


@pipelines.command()
def show(
    recipe: Recipe,
    format: Annotated[
        Literal["text", "mermaid", "svg"], typer.Option(help="The format of the drawing.")
    ] = "text",
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Draw a pipeline. With --url, add the number of messages in each queue."""
    if url is None:
        # The graph needs a client, but drawing it does not open that client.
        _draw(_pipeline(Client("memory:"), recipe), format, None, as_json)
        return
    with connect(url, namespace) as client:
        pipeline = _pipeline(client, recipe)
        counts = {name: client.queue(name).counts() for name in pipeline.graph.depths()}
        _draw(pipeline, format, counts, as_json)


def _draw(
    pipeline: Pipeline,
    format: Literal["text", "mermaid", "svg"],
    counts: dict[str, Counts] | None,
    as_json: bool,
) -> None:
    if as_json:
        emit(to_json(pipeline, counts))
    else:
        print(pipeline.show(format, counts), end="")


def to_json(pipeline: Pipeline, counts: dict[str, Counts] | None) -> dict[str, Any]:
    """Return the graph of a pipeline, with the numbers of messages if they are known."""
    stages = [
        {"queue": each.name, "kind": each.kind, "handler": each.label, "to": list(each.to)}
        for each in pipeline.graph.stages.values()
    ]
    graph: dict[str, Any] = {
        "name": pipeline.name,
        "stages": stages,
        "outputs": pipeline.graph.outputs,
    }
    if counts is not None:
        states = ("ready", "scheduled", "reserved", "history")
        graph["counts"] = {
            name: {state: getattr(each, state) for state in states} for name, each in counts.items()
        }
    return graph
