"""``QueueSpec``: the name, the model and the options of a queue, written once for a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Generic, TypeVar, Unpack, overload

from pyqueue import arguments
from pyqueue.errors import ConfigurationError, suggestion
from pyqueue.messages import Backoff, QueueOptions

T = TypeVar("T")

#: The default options of ``Client.queue``.
DEFAULTS: Final[QueueOptions] = {
    "lease": 60,
    "max_tries": 20,
    "dead_letter": None,
    "history": None,
    "backoff": Backoff(),
    "poll": 15,
    "kind": None,
    "strict": None,
    "on_failure": None,
    "pack": None,
    "limit": None,
    "auto_delete": None,
}


class QueueSpec(Generic[T]):
    """The description of a queue that the parts of a program share. It belongs to no client.

    ``Client.queue``, ``Worker.on`` and the stages of a pipeline accept it in place of a name. A
    stage also accepts it as a target.

    Args:
        name: The name of the queue.
        model: The type of the payloads, as for ``Client.queue``, or None for any BSON value.
        options: The options of ``Client.queue``.

    Raises:
        InvalidName: The name is not allowed.
        ConfigurationError: An option is unknown. Values are checked when the queue is created.
    """

    __slots__ = ("model", "name", "options")

    @overload
    def __init__(self, name: str, model: type[T], **options: Unpack[QueueOptions]) -> None: ...
    @overload
    def __init__(
        self: QueueSpec[Any], name: str, model: object = None, **options: Unpack[QueueOptions]
    ) -> None: ...
    def __init__(self, name: str, model: object = None, **options: Unpack[QueueOptions]) -> None:
        #: The name of the queue.
        self.name = arguments.queue_name(name)
        #: The type of the payloads, or None.
        self.model = model
        if unknown := [each for each in options if each not in DEFAULTS]:
            remedy = suggestion(unknown[0], DEFAULTS)
            raise ConfigurationError(f"{unknown[0]}: a queue has no such option; {remedy}")
        #: The options that were given.
        self.options: QueueOptions = options

    def __repr__(self) -> str:
        return f"QueueSpec({self.name!r})"

    def refuse_more(self, given: Mapping[str, object]) -> None:
        """Refuse options that are given in addition to this spec.

        Raises:
            ConfigurationError: An option differs from the default of ``Client.queue``.
        """
        defaults: Mapping[str, object] = {"model": None, **DEFAULTS}
        if more := [each for each, value in given.items() if value != defaults.get(each)]:
            raise ConfigurationError(
                f"{more[0]}: queue {self.name!r} is given as a QueueSpec; set the option in that "
                "QueueSpec"
            )
