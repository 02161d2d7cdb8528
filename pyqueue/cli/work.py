"""The commands that run your code: worker, pipeline run, pipeline show."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import typer

from pyqueue import AsyncClient, Backoff, Client, ConfigurationError, Pipeline
from pyqueue.cli.common import (
    Commands,
    Json,
    Namespace,
    Signals,
    Url,
    connect,
    emit,
    note,
    table,
    target_of,
)
from pyqueue.pipeline import Report, Runner
from pyqueue.retrying import RetryDelays

__all__ = ["app"]

app = typer.Typer(cls=Commands)
pipelines = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Run or show a pipeline that a recipe describes."
)
app.add_typer(pipelines, name="pipeline")

#: Seconds until a worker process that died is started again.
RESTARTS = Backoff(base=1, maximum=60, jitter=0)
#: Seconds after which a worker process counts as healthy.
HEALTHY = 60.0
LOOKS = 0.05

Concurrency = Annotated[int | None, typer.Option(min=1, metavar="N", help="Handlers at once.")]
Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A TOML or YAML file.")]


# ---- worker


@app.command()
def worker(
    name: Annotated[
        str,
        typer.Argument(
            metavar="APP", help="MODULE:OBJECT, where OBJECT is a Worker or a Pipeline."
        ),
    ],
    concurrency: Concurrency = None,
    processes: Annotated[int, typer.Option(min=1, metavar="N", help="So many processes.")] = 1,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="For handlers to end when it is stopped."),
    ] = 30,
    as_json: Json = False,
    lifeline: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C; a second one ends it at once. Exit status 0 if it was stopped.

    With --processes each is a process of its own; one that dies is started again.
    """
    if processes > 1:
        options = [
            f"--grace={grace}",
            *([f"--concurrency={concurrency}"] if concurrency else []),
            *(["--json"] if as_json else []),
        ]
        raise typer.Exit(Family([name, *options], processes).run())
    if lifeline is not None:
        threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()
    runner = _find(name)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _report(runner, _run(runner, runner._client, concurrency=concurrency, grace=grace), as_json)


def _watch(lifeline: int) -> None:
    """Stop when the parent is gone, however it ended: nobody else holds the other end of this pipe."""
    with suppress(OSError):
        os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def _find(name: str) -> Runner:
    """The Worker or Pipeline that MODULE:OBJECT names; modules of the working directory come first."""
    module, colon, path = name.partition(":")
    if not (colon and all(word.isidentifier() for word in (*module.split("."), *path.split(".")))):
        raise ConfigurationError(f"APP: {name!r} is no MODULE:OBJECT, such as shop.worker:worker")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # it is there, and something that it imports is not: a traceback tells more
        raise ConfigurationError(
            f"APP: there is no module {module!r}, here or installed"
        ) from error
    except AttributeError as error:
        raise ConfigurationError(f"APP: {error}") from error
    if not isinstance(found, Runner):
        raise ConfigurationError(
            f"APP: {name!r} is neither a Worker nor a Pipeline, but {type(found).__name__}"
        )
    return found


def _run(runner: Runner, client: Any, **options: Any) -> Report:
    """Run it, and close its client: the process ends here."""
    if not isinstance(client, AsyncClient):
        with client:
            report: Report = runner.run(**options)
        return report

    async def main() -> Report:
        async with client:
            report: Report = await runner.run(**options)
        return report

    return anyio.run(main)


def _report(runner: Runner, report: Report, as_json: bool) -> None:
    """Tell what a run did."""
    if as_json:
        emit({"name": runner.name, "seconds": round(report.seconds, 3), "stages": report.stages})
        return
    rows = [{"queue": name, **counters} for name, counters in report.stages.items()]
    columns = list(rows[0])
    table(columns, rows, right=columns[1:])


class Child:
    """One of several worker processes; started again when it dies."""

    def __init__(self, place: int, command: list[str], lifeline: int) -> None:
        self._place = place
        self._command = command
        self._lifeline = lifeline
        self._delays = RetryDelays(RESTARTS)
        self._start()

    def _start(self) -> None:
        self._begun = time.monotonic()
        #: When it is to be started again; None: it runs.
        self._due: float | None = None
        # In a session of its own: the terminal's Ctrl-C is for the parent, who passes it on once.
        self._process = subprocess.Popen(
            self._command, pass_fds=[self._lifeline], start_new_session=True
        )

    def stop(self) -> None:
        """Have it end: at once if it listens to no signals yet, else as a worker ends. Another time: sooner."""
        if self._due is None:
            self._process.terminate()  # by SIGTERM, never SIGINT: what is being imported may swallow a KeyboardInterrupt

    def look(self, stopping: bool) -> int | None:
        """See to it. The answer is None as long as it runs or will; then its exit status."""
        if self._due is not None:
            if stopping:
                return 0
            if time.monotonic() >= self._due:
                self._start()
            return None
        status = self._process.poll()
        if status is None or status in (0, 2):  # 2: it cannot run, and would not the next time
            return status
        if stopping:
            # Stopped before it had begun to listen to signals, it ends by them; or with 1, as Python and typer end when interrupted.
            early = time.monotonic() - self._begun < HEALTHY
            return (
                0
                if status in (-signal.SIGTERM, -signal.SIGINT, 130) or (early and status == 1)
                else 1
            )
        if time.monotonic() - self._begun >= HEALTHY:
            self._delays.reset()
        delay = next(self._delays)
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        note(
            f"worker process {self._place} ({self._process.pid}) ended {how}; starting it again in {delay:g} s"
        )
        self._due = time.monotonic() + delay
        return None

    def kill(self) -> None:
        """End it in any case."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


class Family:
    """Worker processes, and their parent, who does nothing but look after them."""

    def __init__(self, arguments: list[str], number: int) -> None:
        self._arguments = arguments
        self._number = number
        self._heard: list[int] = []

    def run(self) -> int:
        """Keep them running until SIGTERM or SIGINT, have them end as well, and wait for them. Answers the exit status."""
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, lambda number, frame: self._heard.append(number))
        lifeline, self._other_end = os.pipe()  # its other end is open as long as this process lives
        command = [
            sys.executable,
            "-m",
            "pyqueue.cli",
            "worker",
            *self._arguments,
            f"--lifeline={lifeline}",
        ]
        children: list[Child] = []
        worst, passed = 0, 0
        try:
            children = [Child(place, command, lifeline) for place in range(1, self._number + 1)]
            running = list(children)
            while running:
                while passed < len(self._heard):
                    passed += 1
                    for child in running:
                        child.stop()
                for child in list(running):
                    status = child.look(bool(self._heard))
                    if status is not None:
                        running.remove(child)
                        worst = max(worst, status)
                        if status == 2 and not self._heard:
                            self._heard.append(signal.SIGTERM)
                time.sleep(LOOKS)
        finally:
            for child in children:
                child.kill()
        return worst


# ---- pipeline


def _pipeline(client: Client | AsyncClient, recipe: Path) -> Pipeline:
    sys.path.insert(0, os.getcwd())  # where its handlers are, unless they are installed
    return Pipeline.from_recipe(client, recipe)


@pipelines.command("run")
def run_(
    recipe: Recipe,
    until_empty: Annotated[
        bool, typer.Option("--until-empty", help="End when no stage has a message left.")
    ] = False,
    concurrency: Concurrency = None,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="For handlers to end when it is stopped."),
    ] = 30,
    url: Url = None,
    namespace: Namespace = "pyqueue",
    signals: Signals = None,
    as_json: Json = False,
) -> None:
    """Run a pipeline until SIGTERM or Ctrl-C, or until it is empty. Prints what each stage counted.

    Its handlers find the server in the environment: PYQUEUE_URL and PYQUEUE_NAMESPACE.
    """
    os.environ["PYQUEUE_URL"], os.environ["PYQUEUE_NAMESPACE"] = target_of(url), namespace
    with connect(url, namespace, signals):
        pass  # is anybody there?
    client = AsyncClient(target_of(url), namespace=namespace, signals=signals)
    pipeline = _pipeline(client, recipe)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    _report(
        pipeline,
        _run(pipeline, client, until_empty=until_empty, concurrency=concurrency, grace=grace),
        as_json,
    )


@pipelines.command()
def show(
    recipe: Recipe,
    format: Annotated[Literal["text", "mermaid", "svg"], typer.Option(help="How.")] = "text",
    url: Url = None,
    namespace: Namespace = "pyqueue",
    as_json: Json = False,
) -> None:
    """Draw a pipeline; with a server also how many messages are where."""
    if url is None:
        # It is only drawn: this client is never opened.
        _drawn(_pipeline(Client("memory:"), recipe), format, None, as_json)
        return
    with connect(url, namespace) as client:
        pipeline = _pipeline(client, recipe)
        counts = {name: client.queue(name).counts() for name in pipeline.graph.depths()}
        _drawn(pipeline, format, counts, as_json)


def _drawn(
    pipeline: Pipeline,
    format: Literal["text", "mermaid", "svg"],
    counts: dict[str, Any] | None,
    as_json: bool,
) -> None:
    if not as_json:
        print(pipeline.show(format, counts), end="")
        return
    stages = [
        {"queue": each.name, "kind": each.kind, "handler": each.label, "to": list(each.to)}
        for each in pipeline.graph.stages.values()
    ]
    told: dict[str, Any] = {
        "name": pipeline.name,
        "stages": stages,
        "outputs": pipeline.graph.outputs,
    }
    if counts is not None:
        states = ("ready", "scheduled", "reserved", "history")
        told["counts"] = {
            name: {state: getattr(each, state) for state in states} for name, each in counts.items()
        }
    emit(told)
