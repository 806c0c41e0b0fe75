"""`fd.run`: rounds of one algorithm on one federation, evaluated, checkpointed and repeatable."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.arguments import (
    NO_TEST_ROWS,
    WEIGHTED,
    asks,
    check_arguments,
    check_measures,
    checkpoint_file,
    ignores_weights,
    nothing_to_test,
    refuse_to_begin,
    refuse_to_overwrite,
)
from foedus.core.callbacks import Callback, Callbacks
from foedus.core.participation import Poisson
from foedus.core.progress import Interrupts, RoundProgress
from foedus.core.steer import Patience
from foedus.errors import DivergenceError, shown
from foedus.storage import checkpoint as files
from foedus.storage.lock import locked

if TYPE_CHECKING:
    from foedus.core.session import Engine
    from foedus.data.federation import Federation

from foedus.core.loop import Loop
from foedus.core.result import Run, start_model


def run(
    algorithm: Algorithm,
    fed: Federation,
    rounds: int,
    *,
    seed: int = 0,
    engine: Engine | None = None,
    participation: float | Poisson = 1.0,
    evaluate_every: int = 1,
    target: float | None = None,
    metrics: Sequence[str | Callable[..., Any]] = (),
    per_client: bool = False,
    stop: Patience | None = None,
    keep_best: str | Literal[False] | None = None,
    stop_on_growth: bool = False,
    quantise: str | None = None,
    aggregation: Aggregation | None = None,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int = 1,
    resume: bool | Literal["auto"] = False,
    start: Run | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Run:
    """Run an algorithm on a federation.

    The same arguments give the same numbers. With a checkpoint, Ctrl-C finishes the round, writes
    the checkpoint and stops.

    Args:
        algorithm: The algorithm, such as `fd.FedAvg(fd.Linear())`.
        fed: The federation.
        rounds: The number of rounds.
        seed: The seed of everything random.
        engine: Where clients run; `None`: `fd.Local()`, in this process.
        participation: The fraction of clients drawn without replacement in each round, or
            `fd.Poisson(p)`.
        evaluate_every: Evaluate after each such number of rounds, and after the last (0: never). A
            federation without test rows is not evaluated, which a warning and `run.notes` say.
        target: Stop when the accuracy reaches this value (or the mean squared error falls to it).
        metrics: More columns of the history, such as ["auc", "f1", my_function]; see
            `foedus.core.metrics`.
        per_client: Also evaluate every client on its own test rows: columns of the mean over
            clients, the worst client and more, and `run.per_client(round=...)`.
        stop: `fd.Patience(5, "auc")` ends a run that no longer improves.
        keep_best: The metric by whose best round `run.best` is chosen; by default that of `stop`;
            `False`: none is kept.
        stop_on_growth: End a run whose loss has become 1,000 times that of the start; otherwise
            there is only a warning.
        quantise: Send replies as "float16", "bfloat16" or "int8", rounded stochastically without
            bias.
        aggregation: How replies are combined: secure, private or robust aggregation (see
            `foedus.core.aggregation`); `None`: they are added up.
        checkpoint: A file, written atomically. The checkpoint before it is kept as PATH.previous
            and used if the newest is damaged; `run.notes` then says so.
        checkpoint_every: Write the checkpoint after each such number of rounds.
        resume: `True` continues from the checkpoint, to the numbers of an uninterrupted run; "auto"
            also begins if there is none.
        start: A finished run whose global model this one starts from (a warm start); what that run
            sent is not counted.
        callbacks: Objects that are informed of the start, of every row of the history and of the
            end, such as `[fd.TensorBoard("runs")]`; see `fd.Callback`.
        progress: Show a progress bar; `None`: only on a terminal.

    Returns:
        The result: history, model, state and settings.

    Raises:
        ConfigError: An argument is unknown or out of range.
        ModelError: The model does not fit the data.
        DivergenceError: A reply or a loss is no longer finite; the error has the rounds before.
        CheckpointError: The checkpoint is damaged, belongs to another run, or would be overwritten.
        TooFewClients: Fewer sites answered than required.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.5)
        >>> run = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=5, participation=0.5)
        >>> bool(run.history.accuracy.iloc[-1] > 0.8)
        True
    """
    check_arguments(
        algorithm,
        fed,
        rounds,
        seed=seed,
        engine=engine,
        participation=participation,
        evaluate_every=evaluate_every,
        target=target,
        quantise=quantise,
        aggregation=aggregation,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        callbacks=callbacks,
    )
    found = check_measures(
        algorithm, fed, evaluate_every, metrics, per_client, stop, keep_best, stop_on_growth
    )
    rounds, seed = int(rounds), int(seed)
    algorithm.check_data(fed.spec)
    if fed.spec.weighted:
        fed = fed.with_mean_weight_one()
    if algorithm.pooled:
        fed, participation, quantise, aggregation = fed.pool(), 1.0, None, None
    if engine is None:
        from foedus.engines.local import Local  # imported only when needed

        engine = Local()
    path, listeners, name = (
        checkpoint_file(checkpoint),
        Callbacks(callbacks),
        f"{type(algorithm).__name__}-seed{seed}",
    )
    if path and resume is True:
        refuse_to_begin(path)
    with locked(path):
        loop = Loop(
            algorithm, fed, rounds, seed, engine, participation, evaluate_every, target, quantise,
            found, per_client, stop, keep_best, stop_on_growth,
            bool(evaluate_every) and asks(
                algorithm, metrics, per_client, stop, keep_best, stop_on_growth
            ),
        )  # fmt: skip
        loop.first = None if start is None else start_model(start)
        try:
            loop.open(aggregation, path, bool(resume))
            if fed.spec.weighted:
                loop.notes.append(WEIGHTED)
                loop.notes += [
                    f"{m.name} does not use weights" for m in found if ignores_weights(m)
                ]
            if nothing_to_test(algorithm, fed, evaluate_every):
                loop.notes.append(NO_TEST_ROWS)
                warnings.warn(NO_TEST_ROWS, stacklevel=2)
            if path:
                files.sweep(path)
            if path and resume and files.exists(path):
                loop.resume(path)
                listeners.start(name, loop.settings, loop.history.rows)
            else:
                if path:
                    refuse_to_overwrite(path)
                listeners.start(name, loop.settings, [])
                loop.start()
                if path:
                    loop.save(path)
                listeners.row(loop.history.rows[-1])
            if listeners.why is not None:
                _end_here(loop, listeners.why, path)
            with (
                RoundProgress(type(algorithm).__name__, rounds, progress) as bar,
                Interrupts(enabled=path is not None) as interrupts,
            ):
                bar.update(loop.done, loop.history)
                while loop.done < rounds and not loop.stopped:
                    made = loop.step()
                    bar.update(loop.done, loop.history)
                    finished = loop.done == rounds or loop.stopped
                    if path and (interrupts.asked or finished or loop.done % checkpoint_every == 0):
                        loop.save(path)
                    if made:
                        listeners.row(loop.history.rows[-1])
                    if listeners.why is not None:
                        _end_here(loop, listeners.why, path)
                    interrupts.raise_if_asked(
                        f"stopped after round {loop.done}; go on with resume=True and "
                        f"checkpoint={str(path)!r}"
                    )
            result = loop.result()
            listeners.end(result, None)
            return result
        except DivergenceError as error:
            _name_loss(error, algorithm)
            error.run = loop.result()
            if path and path.exists():
                error.add_note(
                    f"The last good state is in {path}; error.run holds the rounds before."
                )
            listeners.end(error.run, error)
            raise
        except BaseException as error:
            listeners.end(None, error)
            raise
        finally:
            loop.session.close()


def _name_loss(error: DivergenceError, algorithm: Algorithm) -> None:
    """Note that a user's own loss may be the cause of numbers that are not finite."""
    loss = vars(algorithm).get("loss")
    if callable(loss):
        error.args = (
            f"{error}; or loss={shown(loss)} itself gives NaN: logarithms and roots need arguments "
            "above 0, denominators must not be 0",
        )


def _end_here(loop: Loop, why: str, path: Path | None) -> None:
    """End a run after the round that has just been made."""
    loop.end_here(why)
    if path:
        loop.save(path)
