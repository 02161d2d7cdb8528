"""The types of handlers. With them, a type checker checks handlers against the model of a queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from pyqueue.delivery import Delivery

if TYPE_CHECKING:
    from types import UnionType
    from typing import _SpecialForm

    from typing_extensions import TypeAliasType

    #: A model that is not a class, such as ``int | None``. Handlers are not checked against it.
    OtherModel = UnionType | _SpecialForm | TypeAliasType | None
else:
    OtherModel = Any

H = TypeVar("H", bound=Callable[..., Any])
M = TypeVar("M")
A = TypeVar("A")

#: A handler of single messages with payloads of type M.
Handler = Callable[[M], Any] | Callable[[M, Delivery[M, Any]], Any]
#: A handler of batches.
BatchHandler = Callable[[list[M]], Any] | Callable[[list[M], list[Delivery[M, Any]]], Any]
#: A handler of single messages or of batches.
AnyHandler = Handler[M] | BatchHandler[M]


class Adds(Protocol[M]):
    """A decorator that takes a handler of single messages and returns it."""

    @overload
    def __call__(self, handler: Callable[[M], A], /) -> Callable[[M], A]: ...
    @overload
    def __call__(
        self, handler: Callable[[M, Delivery[M, Any]], A], /
    ) -> Callable[[M, Delivery[M, Any]], A]: ...


class AddsBatch(Protocol[M]):
    """A decorator that takes a handler of batches and returns it."""

    @overload
    def __call__(self, handler: Callable[[list[M]], A], /) -> Callable[[list[M]], A]: ...
    @overload
    def __call__(
        self, handler: Callable[[list[M], list[Delivery[M, Any]]], A], /
    ) -> Callable[[list[M], list[Delivery[M, Any]]], A]: ...


class AsyncMiddleware(Protocol):
    """A middleware that runs in the event loop."""

    async def __call__(self, delivery: Any, call_next: Callable[[Any], Awaitable[Any]], /) -> Any:
        """Return the answer of the handler, usually the return value of ``call_next``."""


class PlainMiddleware(Protocol):
    """A synchronous middleware, which runs in the thread of a synchronous handler."""

    def __call__(self, delivery: Any, call_next: Callable[[Any], Any], /) -> Any:
        """Return the answer of the handler, usually the return value of ``call_next``."""
