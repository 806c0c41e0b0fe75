"""The errors foedus raises on purpose; each names the argument, the value and the remedy.

All of them derive from `FoedusError`, so `except fd.FoedusError` catches what a user can mend and
lets bugs through.
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
    """Base of every error that foedus raises on purpose."""


class DataError(FoedusError, ValueError):
    """Data that cannot be used: missing set, NaN features, labels out of range, a malformed
    file.
    """


class SplitError(FoedusError, ValueError):
    """A partition that cannot be made: unknown scheme, more clients than rows, an empty client."""


class ModelError(FoedusError, ValueError):
    """A model that does not fit the data, or that cannot be trained as a pure function."""


class ConfigError(FoedusError, ValueError):
    """A setting that is unknown or outside its range; in a configuration file, with the file and
    the key.
    """


class WireError(FoedusError, ValueError):
    """Bytes that are not a message of ours, or a tree that cannot become one."""


class ReplyError(FoedusError, ValueError):
    """A client's reply that must not be used: wrong structure, shape, dtype or size."""


class DivergenceError(FoedusError, ArithmeticError):
    """A reply or a loss that is no longer finite. `round` and `clients` say where it began.

    `run` is what was reached before that round. Only what clients remember (`run.clients`) may be
    of the round itself: keeping it as it was would take a copy of all states in every round.
    """

    run: Run
    what: str  # is not finite, where it is something that clients have sent or keep

    def __init__(self, message: str, round: int, clients: Iterable[int] = ()):
        super().__init__(message)
        self.round = round
        self.clients = tuple(clients)

    def __reduce__(self) -> tuple:
        """It may come from another process, and must come whole."""
        return type(self), (str(self), self.round, self.clients), vars(self)


class TooFewClients(FoedusError):  # noqa: N818 - says it all
    """Fewer sites answered than must; with a checkpoint, the run can go on when they are back."""


class SecureError(FoedusError):
    """A message of secure aggregation that is refused: altered, repeated, of another round, or
    asking for too much.
    """


class CheckpointError(FoedusError, ValueError):
    """A checkpoint or saved run that is missing, damaged, or belongs to another run."""


def unknown(what: str, value: object, allowed: Iterable[object]) -> str:
    """The sentence for a name that is not one of `allowed`, with the closest one as a
    suggestion.
    """
    names = [str(a) for a in allowed]
    return f"{what} {shown(value)} is unknown{nearest(value, names)} (allowed: {', '.join(names)})"


def nearest(value: object, allowed: Iterable[str]) -> str:
    """The end of an error about an unknown name: "; did you mean ...?", or nothing."""
    names = {name.casefold(): name for name in allowed}
    # a peer's value may be of any length
    close = difflib.get_close_matches(str(value)[:_LONGEST].casefold(), names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as errors show it: all of it, or its beginning and end; a function by its name."""
    text = value.__name__ if isinstance(value, _FUNCTIONS) else repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 20]} ... {text[-12:]}"


def is_number(value: object) -> bool:
    """Whether a value is a real number, and not a bool.

    (To type checkers a float is not a `Real`.)
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
