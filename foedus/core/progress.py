"""The progress bar of a run, and its handling of Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from foedus.core.history import History

if TYPE_CHECKING:
    from rich.progress import Progress


class RoundProgress:
    """A progress bar with the current metric and the bytes so far; hidden without a terminal."""

    def __init__(self, title: str, rounds: int, show: bool | None):
        self.title, self.rounds = title, rounds
        self.show = sys.stderr.isatty() if show is None else show
        self.bar: Progress | None = None

    def __enter__(self) -> Self:
        if self.show:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self.bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.rounds, note="")
        return self

    def update(self, done: int, history: History | None = None) -> None:
        if self.bar is None:
            return
        if history is None:
            self.bar.update(self.task, completed=done)
            return
        shown = next(
            (
                c
                for c in ("accuracy", "mse", "own_accuracy", "own_mse", "loss")
                if c in history.columns
            ),
            None,
        )
        metric = f"{shown} {history.last(shown):.4f}  " if shown else ""
        sent = (history.last("bytes_up") + history.last("bytes_down")) / 1e6
        self.bar.update(self.task, completed=done, note=f"{metric}{sent:,.1f} MB")

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


class Interrupts:
    """A context in which the first Ctrl-C lets the round finish, to be saved.

    A second Ctrl-C stops at once.
    """

    def __init__(self, enabled: bool):
        # Signal handlers can be set in the main thread only.
        self.enabled = enabled and threading.current_thread() is threading.main_thread()
        self.asked = False

    def __enter__(self) -> Self:
        if self.enabled:
            self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number: int, frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        print("\nstopping after this round (Ctrl-C again: at once)", file=sys.stderr)

    def raise_if_asked(self, message: str) -> None:
        if self.asked:
            raise KeyboardInterrupt(message)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            signal.signal(signal.SIGINT, self.before)
