"""Errors that foedus raises on purpose; each message names the argument, the value and the remedy.

All of them derive from `FoedusError`, so `except fd.FoedusError` catches what a user can correct
and lets bugs through.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foedus.core.result import Run


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_LONGEST = 200
"""Characters of a value that an error shows."""


class FoedusError(Exception):
    """Base of every error that foedus raises on purpose.

    Example:
        >>> try:
        ...     fd.load("digit")
        ... except fd.FoedusError as error:
        ...     print(type(error).__name__, "digits" in str(error))
        DataError True
    """


class DataError(FoedusError, ValueError):
    """Data cannot be used: an unknown set, NaN features, labels out of range, a malformed file.

    Example:
        >>> try:
        ...     fd.Data.from_arrays([[1.0], [2.0]], [0])
        ... except fd.DataError as error:
        ...     print(error)
        y_train of 'data' has 1 rows but x_train has 2; give one entry a row
    """


class SplitError(FoedusError, ValueError):
    """A data set cannot be divided: unknown scheme, more clients than rows, an empty client.

    Example:
        >>> try:
        ...     fd.split(fd.load("digits"), "dirichlet", clients=10)
        ... except fd.SplitError as error:
        ...     print(error)
        scheme 'dirichlet' needs alpha=, for example alpha=0.5
    """


class ModelError(FoedusError, ValueError):
    """A model does not fit the data, or cannot be trained as a pure function.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=2)
        >>> try:
        ...     fd.run(fd.FedAvg(torch.nn.Linear(3, 10)), fed, rounds=1)
        ... except fd.ModelError as error:
        ...     print("(2x64 and 3x10)" in str(error))
        True
    """


class ConfigError(FoedusError, ValueError):
    """A setting is unknown or out of range; in a configuration file, with the file and the key.

    Example:
        >>> try:
        ...     fd.FedAvg(lr=-1.0)
        ... except fd.ConfigError as error:
        ...     print(error)
        lr=-1.0 must be a positive finite number or a schedule of fd.schedules
    """


class WireError(FoedusError, ValueError):
    """Bytes are not a message of foedus, or a tree cannot be encoded as one.

    Example:
        >>> from foedus import wire
        >>> try:
        ...     wire.decode(b"not a message")
        ... except fd.WireError as error:
        ...     print(error)
        expected b'fd' at byte 0, where a message starts, got b'no'
    """


class ReplyError(FoedusError, ValueError):
    """A client's reply must not be used: wrong structure, shape, dtype or size.

    Example:
        >>> issubclass(fd.ReplyError, fd.FoedusError)
        True
    """


class DivergenceError(FoedusError, ArithmeticError):
    """A reply or a loss is no longer finite.

    The attributes `round` and `clients` say where it began, and `run` is the result up to the round
    before. Only client states (`run.clients`) may be those of the failed round itself: keeping the
    earlier ones would take a copy of all states in every round.

    Args:
        message: The message.
        round: The round in which it happened.
        clients: The ids of the clients whose replies are not finite, if known.

    Example:
        >>> fed = fd.split(fd.load("diabetes"), "iid", clients=2)
        >>> try:
        ...     fd.run(fd.FedAvg(fd.Linear(), lr=1e6, epochs=5), fed, rounds=3)
        ... except fd.DivergenceError as error:
        ...     print(error.round)
        1
    """

    run: Run
    what: str  # is not finite, where it is something that clients have sent or keep

    def __init__(self, message: str, round: int, clients: Iterable[int] = ()):
        super().__init__(message)
        self.round = round
        self.clients = tuple(clients)

    def __reduce__(self) -> tuple:
        """Pickle all attributes: the error may be raised in a worker process."""
        return type(self), (str(self), self.round, self.clients), vars(self)


class TooFewClients(FoedusError):  # noqa: N818 - a readable name
    """Fewer sites answered than required; with a checkpoint the run can be resumed later.

    Example:
        >>> issubclass(fd.TooFewClients, fd.FoedusError)
        True
    """


class SecureError(FoedusError):
    """A message of secure aggregation is refused.

    It was altered, repeated, belongs to another round, or asks for too much.

    Example:
        >>> issubclass(fd.SecureError, fd.FoedusError)
        True
    """


class CheckpointError(FoedusError, ValueError):
    """A checkpoint or saved run is missing, damaged, or belongs to another run.

    Example:
        >>> try:
        ...     fd.Run.load("nowhere.safetensors")
        ... except fd.CheckpointError as error:
        ...     print(error)
        nowhere.safetensors: there is no such file
    """


def unknown(what: str, value: object, allowed: Iterable[object]) -> str:
    """The message for a name that is not one of `allowed`, with the closest one as a suggestion."""
    names = [str(a) for a in allowed]
    return f"{what} {shown(value)} is unknown{nearest(value, names)} (allowed: {', '.join(names)})"


def nearest(value: object, allowed: Iterable[str]) -> str:
    """The end of a message about an unknown name: "; did you mean ...?", or nothing."""
    names = {name.casefold(): name for name in allowed}
    # a peer's value may be of any length
    close = difflib.get_close_matches(str(value)[:_LONGEST].casefold(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as errors show it: in full, or its beginning and end; a function by its name."""
    text = value.__name__ if isinstance(value, _FUNCTIONS) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]} ... {text[-12:]}"


def is_number(value: object) -> bool:
    """Whether a value is a real number and not a bool.

    It is not a `TypeGuard` because type checkers do not regard a float as a `Real`.
    """
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether a value is an integer, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def positive(name: str, value: object) -> None:
    """Refuse a setting that is not a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, Real) or value <= 0 or not value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a positive finite number")


def whole_number(name: str, value: object, least: int = 1) -> None:
    """Refuse a setting that is not an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ConfigError(f"{name}={value!r} must be an integer of at least {least}")
