"""Targets, the databases to which clients connect: check them, and show them without secrets."""

from __future__ import annotations

import re
from typing import Final, TypeGuard
from urllib.parse import unquote_plus

from pyqueue.errors import ConfigurationError

# MongoDB allows none of these characters in a database name, on any system. A dot would begin the
# name of a collection.
_NOT_IN_A_DATABASE = ' "$/\\\0'

#: The URL of a database in memory, without its name.
MEMORY: Final = "memory:"
_MEMORY_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}")


def is_memory_url(target: object) -> TypeGuard[str]:
    """Return whether a target is ``memory:`` or ``memory:NAME``."""
    return isinstance(target, str) and target.startswith(MEMORY)


def check_url(url: str) -> None:
    """Refuse a URL that no client can use, without I/O.

    Raises:
        ConfigurationError: The form of the URL is unknown, its password is not quoted, or its
            database name is not allowed.
    """
    if is_memory_url(url):
        _check_memory_name(url.removeprefix(MEMORY))
        return
    known = url.startswith(("mongodb://", "mongodb+srv://"))
    if not known and not (url.startswith("embedded:") and url != "embedded:"):
        raise invalid(url)
    path = url.partition("://")[2].partition("?")[0].partition("/")[2]
    # Otherwise a part of a password counts as the host or the database, and errors show it.
    if url.startswith("mongodb") and "@" in path:
        raise ConfigurationError(
            'target: the URL has a "/" before an "@"; quote the user name and the password with '
            'urllib.parse.quote_plus, so that "p@ss/word" becomes "p%40ss%2Fword"'
        )
    database = unquote_plus(path).partition(".")[0]
    refused = [char for char in database if char in _NOT_IN_A_DATABASE]
    if url.startswith("mongodb") and refused:
        raise ConfigurationError(
            f"target: {database!r} is not a valid database name; remove {refused[0]!r}"
        )


def _check_memory_name(name: str) -> None:
    if name and not _MEMORY_NAME.fullmatch(name):
        raise ConfigurationError(
            f"target: {redacted(MEMORY + name)!r} is not allowed; use "
            '"memory:NAME" with up to 63 characters of A-Z a-z 0-9 _ -, or "memory:" alone'
        )


def invalid(value: object) -> ConfigurationError:
    """Return the error for a target that a client cannot use."""
    form = type(value)
    shown = f"type {form.__module__}.{form.__name__}".replace("builtins.", "")
    remedy = (
        'use "mongodb://host/db", "mongodb+srv://...", "memory:", "embedded:PATH", or a database '
        "object of pymongo or mongomock (Client), of AsyncMongoClient or motor (AsyncClient)"
    )
    if isinstance(value, str):
        shown = repr(redacted(value))
    elif value is None:
        shown = "None"
    elif hasattr(form, "get_collection"):
        remedy = "use AsyncClient for an async object, and Client for a blocking object"
    elif hasattr(form, "get_database"):
        remedy = 'pass one of its databases, such as mongo["shop"]'
    elif hasattr(form, "find_one_and_update"):
        remedy = "pass its database, and the name of the collection as namespace="
    return ConfigurationError(f"target: {shown} is not allowed; {remedy}")


def redacted(url: str) -> str:
    """Return a URL without secrets: without its options and the credentials before the last "@"."""
    before, at, rest = url.rpartition("@")
    scheme = before.partition("://")[0]
    shown = scheme if scheme.replace("+", "").isalnum() else "***"
    return ((f"{shown}://***@" if at else "") + rest.partition("?")[0])[:200]


def shown(target: object) -> str:
    """Return the name of a target for errors and logs, without secrets."""
    return redacted(target) if isinstance(target, str) else type(target).__name__
