"""Find the APP of ``pyqueue worker``: a worker, a pipeline, or a function that returns one."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any, cast

from pyqueue import AsyncClient, Client, ConfigurationError, QueueError, Worker
from pyqueue.cli.common import checked_url
from pyqueue.cli.starting import import_failed, show_failure
from pyqueue.pipeline import Runner, client_of, has_client
from pyqueue.pipeline.recipes import missing_module


def find(name: str) -> Runner[Any]:
    """Return the Worker or Pipeline that MODULE:OBJECT names. If OBJECT is a function, call it.

    A module in the working directory comes before an installed module.
    """
    module, colon, path = name.partition(":")
    if not (colon and all(word.isidentifier() for word in (*module.split("."), *path.split(".")))):
        raise ConfigurationError(
            f"APP: invalid name {name!r}; use MODULE:OBJECT, such as shop.worker:worker"
        )
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except QueueError:
        raise
    except Exception as error:
        if (missing := missing_module(module, error)) is not None:
            raise ConfigurationError(f"APP: {missing}") from error
        raise import_failed(f"APP: the module {module!r}", error) from error
    try:
        for part in path.split("."):
            found = getattr(found, part)
    except AttributeError as error:
        raise ConfigurationError(f"APP: {error}") from error
    what = f"APP: {name!r}"
    if callable(found) and not isinstance(found, Runner):
        found, what = _made(name, found), f"APP: the result of {name!r}"
    if not isinstance(found, Runner):
        raise ConfigurationError(
            f"{what} is neither a Worker nor a Pipeline, but {type(found).__name__}; name one of "
            "these, or a function that returns one"
        )
    return found


def _made(name: str, factory: Any) -> Any:
    """Call the function that APP names, and return its result."""
    try:
        inspect.signature(factory).bind()
    except TypeError:
        raise ConfigurationError(
            f"APP: expected a function without arguments that returns a Worker, found {name!r}, "
            "which takes arguments"
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    try:
        made = factory()
    except QueueError:
        raise
    except Exception as error:
        show_failure(error)
        raise ConfigurationError(
            f"APP: {name!r} failed, see above; correct the code, and try again"
        ) from error
    if inspect.iscoroutine(made):
        made.close()
    return made


def client_for(
    runner: Runner[Any], url: str | None, namespace: str, signals: str | None
) -> Client | AsyncClient:
    """Return the client of a worker. A worker without a client gets a new one."""
    if isinstance(runner, Worker) and not has_client(runner):
        runner.bind(AsyncClient(checked_url(url), namespace=namespace, signals=signals))
    return cast("Client | AsyncClient", client_of(runner))
