"""The one tree of errors. Each class has one gRPC code and survives the wire as the same class.

    StrettoError                     INTERNAL
    +-- InvalidArgumentError         INVALID_ARGUMENT      the caller's mistake; do not retry
    |   +-- RecipeError                                    key, value, rule, nearest valid key
    +-- NotFoundError                NOT_FOUND
    +-- RefusedError                 FAILED_PRECONDITION   the state forbids it; the message says which
    |   +-- FencedError                                    a newer incarnation took over; stop
    |   +-- StaleError                                     held weights or step are too old
    +-- CorruptError                 DATA_LOSS             bytes do not match their digest
    +-- FullError                    RESOURCE_EXHAUSTED    a queue or slot limit is reached; retry later
    +-- DeadlineError                DEADLINE_EXCEEDED     a wait ended by its limit
    +-- UnavailableError             UNAVAILABLE           the peer cannot be reached; retry
        +-- DeposedError                                   another instance of this service leads; ask it

The docstring of a class is its default message. `stretto/rpc.py` carries (class name, message) in trailing metadata.
"""

from __future__ import annotations

from typing import ClassVar


class StrettoError(Exception):
    """Stretto failed."""

    code: ClassVar[str] = "INTERNAL"
    """Name of the grpc.StatusCode."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())

    @property
    def message(self) -> str:
        return str(self.args[0])


class InvalidArgumentError(StrettoError, ValueError):
    """The request is not valid."""

    code = "INVALID_ARGUMENT"


class RecipeError(InvalidArgumentError):
    """The recipe is not valid."""


class NotFoundError(StrettoError):
    """There is no such thing."""

    code = "NOT_FOUND"


class RefusedError(StrettoError):
    """The present state forbids this."""

    code = "FAILED_PRECONDITION"


class FencedError(RefusedError):
    """A newer incarnation took over this role; stop this one."""


class StaleError(RefusedError):
    """What the caller holds is too old."""


class CorruptError(StrettoError):
    """Bytes do not match their digest."""

    code = "DATA_LOSS"


class FullError(StrettoError):
    """A limit is reached; try again later."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineError(StrettoError):
    """A wait ended at its deadline."""

    code = "DEADLINE_EXCEEDED"


class UnavailableError(StrettoError):
    """The peer cannot be reached."""

    code = "UNAVAILABLE"


class DeposedError(UnavailableError):
    """Another instance of this service took over; callers ask again, this one stops."""


def _tree(root: type[StrettoError]) -> dict[str, type[StrettoError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def by_name(name: str) -> type[StrettoError] | None:
    """The class that travels under `name`, or None for one this build does not know."""
    return _tree(StrettoError).get(name)


def by_code(code: str) -> type[StrettoError]:
    """The general class for a gRPC code name; StrettoError when none fits."""
    for cls in _tree(StrettoError).values():
        if cls.__dict__.get("code") == code:
            return cls
    return StrettoError
