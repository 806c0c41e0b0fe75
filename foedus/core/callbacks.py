"""Callbacks: objects that `fd.run` informs of its progress.

They are trackers, such as `fd.TensorBoard` and `fd.MLflow`, or instances of a user's own class.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from foedus.core.steer import Stop
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.result import Run


class Callback:
    """Base of what `fd.run(..., callbacks=[...])` calls, in this order: `start`, `row`, `end`.

    Override what you need. `row` may stop the run: it returns True or raises `fd.Stop("why")`; the
    run then ends as after its last round, with a checkpoint, and `run.notes` gives the reason.

    Any other exception does not stop the run: there is one warning, and the run continues without
    that callback. `resume=True` gives it what it missed, because `start` receives all rows so far.
    Exceptions that should reach the caller of `fd.run` are listed in `raises`; Optuna's
    `TrialPruned` always is one of them.

    Example:
        >>> class Print(fd.Callback):
        ...     def row(self, row):
        ...         print(row["round"], row["accuracy"] > 0.5)
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> run = fd.run(fd.FedAvg(), fed, rounds=2, callbacks=[Print()])
        0 False
        1 True
        2 True
    """

    raises: ClassVar[tuple[type[Exception], ...]] = ()
    """Exceptions that end the run and reach its caller as they are."""

    def start(self, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Called before the first round.

        A run that was stopped between two checkpoints repeats some rounds: `row` is then called
        with rounds that an earlier process has seen.

        Args:
            name: The algorithm and the seed, such as "FedAvg-seed0".
            settings: `run.settings`.
            rows: The history so far of a run that continues from a checkpoint; else empty.
        """

    def row(self, row: dict[str, Any]) -> bool | None:
        """Called after the start (round 0) and after each round; its checkpoint is written by then.

        Args:
            row: The row of the history.

        Returns:
            True to stop the run.
        """
        return None

    def end(self, run: Run | None, error: BaseException | None) -> None:
        """Called at the end.

        Args:
            run: The result; after an error `None`, or the rounds before a divergence.
            error: The error that stopped the run, if any.
        """


class CallbackWarning(UserWarning):
    """A callback failed; the run continues without it.

    Example:
        >>> issubclass(fd.CallbackWarning, UserWarning)
        True
    """


class Callbacks:
    """The callbacks of one run; one that fails is dropped."""

    def __init__(self, callbacks: Sequence[Callback]):
        self.left, self.started = list(callbacks), False
        self.why: str | None = None  # the reason why a callback stops the run

    def start(self, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.started = True
        # Copies: a callback must not be able to change the run.
        self._call(
            "at the start",
            lambda c: c.start(name, copy.deepcopy(settings), [dict(row) for row in rows]),
        )

    def row(self, row: dict[str, Any]) -> None:
        self._call(f"in round {row['round']}", lambda c: c.row(dict(row)), answers=True)

    def end(self, run: Run | None, error: BaseException | None) -> None:
        if self.started:  # `end` is called once, and only after `start`
            self.started = False
            self._call("at the end", lambda c: c.end(run, error))

    def _call(self, when: str, call: Callable[[Callback], Any], answers: bool = False) -> None:
        meant: Exception | None = None
        for callback in list(self.left):
            inner = callback.callback if isinstance(callback, Named) else callback
            who = type(inner).__name__
            try:
                if call(callback) is True and answers:
                    self.why = self.why or f"{who} asked for it"
            except Stop as stop:
                self.why = self.why or str(stop) or f"{who} asked for it"
            except Exception as error:
                if isinstance(error, inner.raises) or _is_pruning(error):
                    meant = meant or error  # raised after the other callbacks were called
                    continue
                self.left.remove(callback)
                warnings.warn(
                    f"{who} failed {when} and is left out from now on; the run is not affected: "
                    f"{error!r}",
                    CallbackWarning,
                    stacklevel=4,
                )
        if meant is not None:
            raise meant


def _is_pruning(error: Exception) -> bool:
    """Whether an exception is Optuna's `TrialPruned`; Optuna is not imported for that."""
    return any(
        kind.__name__ == "TrialPruned" and kind.__module__.split(".")[0] == "optuna"
        for kind in type(error).__mro__
    )


class Named(Callback):
    """A callback that is given another name for the run."""

    def __init__(self, callback: Callback, name: str):
        self.callback, self.name = callback, name

    def start(self, name: str, settings: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.callback.start(self.name, settings, rows)

    def row(self, row: dict[str, Any]) -> bool | None:
        return self.callback.row(row)

    def end(self, run: Run | None, error: BaseException | None) -> None:
        self.callback.end(run, error)


def check_callbacks(callbacks: Any) -> None:
    """Raise `ConfigError` unless all callbacks are instances of `fd.Callback`."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise ConfigError(
            f"callbacks={callbacks!r} must be a list of callbacks such as [fd.TensorBoard('runs')]"
        )
    for i, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            given = (
                f"the class {callback.__name__}: add parentheses"
                if isinstance(callback, type)
                else repr(callback)
            )
            raise ConfigError(
                f"callbacks[{i}] must be a fd.Callback such as fd.TensorBoard('runs'), not {given}"
            )
