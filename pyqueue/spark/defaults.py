"""Default options from the settings of a Spark session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyqueue.errors import ConfigurationError

#: The options for which a session may have defaults, as ``spark.pyqueue.NAME``.
_OPTIONS: Final = ("uriEnv", "namespace", "numPartitions", "maxMessagesPerBatch", "maxWaitMs")


def with_defaults(given: dict[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Add the defaults of options that are not given, without ``uriEnv`` if a URI is given."""
    names = {name.lower() for name in given}
    if names & {"uri", "url"}:
        names.add("urienv")
    options = given.copy()
    options.update({name: defaults[name] for name in defaults if name.lower() not in names})
    return options


def session_defaults(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the default options that the settings of a Spark session contain.

    Raises:
        ConfigurationError: A setting names an option that cannot have a default, such as ``uri``,
            whose value may contain a password.
    """
    prefix = "spark.pyqueue."
    defaults = {
        name.removeprefix(prefix): value
        for name, value in settings.items()
        if name.startswith(prefix)
    }
    if unknown := sorted(defaults.keys() - set(_OPTIONS)):
        raise ConfigurationError(
            f"{prefix}{unknown[0]}: not allowed as a setting, because only {', '.join(_OPTIONS)} "
            "can be settings; set an option instead. To give the address in a setting, use uriEnv, "
            "because Spark shows the values of settings"
        )
    return defaults
