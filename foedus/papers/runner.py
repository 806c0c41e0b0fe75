"""Run the cells of an item that are not in the store, over all cores, with progress."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

from foedus.engines.local import Local
from foedus.errors import ConfigError, FoedusError, nearest
from foedus.papers.item import SCALES, Found, Item, Paper, Scale
from foedus.papers.store import Cell, Store, found_in, versions

PAPERS = ("ffgb", "fedres", "fedfw", "fedboost", "fednewton")


def paper(name: str) -> Paper:
    """A paper by its name."""
    if name not in PAPERS:
        known = ", ".join(PAPERS)
        hint = nearest(name, PAPERS)
        raise ConfigError(f"NAME={name!r} is no paper here; there are {known}{hint}")
    return importlib.import_module(f"foedus.papers.{name}").PAPER


def item_of(name: str, item: str) -> Item:
    """An item of a paper by its name."""
    items = paper(name).items
    if item not in items:
        hint = nearest(item, items)
        raise ConfigError(f"ITEM={item!r} is not of {name}; it has {', '.join(items)}{hint}")
    return items[item]


def wanted(
    name: str,
    item: str,
    scale: Scale,
    folder: Path,
    seeds: int | None = None,
    only: dict[str, str] | None = None,
) -> list[Cell]:
    """The cells that an item has at a scale. only: those whose settings have these values."""
    if scale not in SCALES:
        raise ConfigError(f"scale={scale!r} must be one of {', '.join(SCALES)}")
    study = item_of(name, item)
    if seeds is not None and seeds < 1:
        raise ConfigError(f"seeds={seeds} must be at least 1")
    needed = [_needed(name, other, scale, folder) for other in study.needs]
    settings = list(study.cells(scale, *needed))
    for key, value in (only or {}).items():
        known = list(dict.fromkeys(str(s[key]) for s in settings if key in s))
        if not known:
            names = dict.fromkeys(k for s in settings for k in s)
            raise ConfigError(
                f"--only {key}={value}: cells of {name} {item} have no {key}; they have "
                f"{', '.join(names)}"
            )
        if value not in known:
            raise ConfigError(f"--only {key}={value}: {key} is one of {', '.join(known)}")
        settings = [s for s in settings if str(s.get(key)) == value]
    count = study.seeds[scale] if seeds is None else seeds
    counts = [count(s) if callable(count) else count for s in settings]
    return [
        Cell(s, seed)
        for seed in range(max(counts, default=0))
        for s, n in zip(settings, counts, strict=True)
        if seed < n
    ]


def _needed(name: str, item: str, scale: Scale, folder: Path) -> Found:
    """What another item found with the settings of today, with its first seed."""
    kept = Store(folder, name, item, scale, item_of(name, item).fixed).cells
    cells = wanted(name, item, scale, folder, seeds=1)
    return found_in(kept[c.key] for c in cells if c.key in kept)


def run_item(
    name: str,
    item: str,
    scale: Scale = "usual",
    *,
    folder: Path,
    seeds: int | None = None,
    only: dict[str, str] | None = None,
    workers: int | None = None,
    fresh: bool = False,
    device: str = "cpu",
    progress: bool | None = None,
) -> list[Cell]:
    """Run an item, and before it what it needs; returns its cells.

    folder: where finished cells are kept. workers: processes (one for each core, if not given).
    fresh: run its finished cells again.
    device: where its networks are trained ("cuda"); by one worker, unless told.
    """
    if device != "cpu":
        Local(device=device)  # an error now, not in a worker
        if "device" not in inspect.signature(item_of(name, item).cell).parameters:
            raise ConfigError(
                f"--device {device}: {name} {item} trains no large network and runs on the CPU; "
                "leave --device out"
            )
        workers = workers or 1
    for other in item_of(name, item).needs:
        settings = [c.settings for c in wanted(name, other, scale, folder)]
        part = {k: v for k, v in (only or {}).items() if any(str(s.get(k)) == v for s in settings)}
        run_item(name, other, scale, folder=folder, only=part, workers=workers, progress=progress)
    store = Store(folder, name, item, scale, item_of(name, item).fixed)
    cells = wanted(name, item, scale, folder, seeds, only)
    todo = [c for c in cells if fresh or c.key not in store.cells]
    workers = min(workers or os.cpu_count() or 1, max(1, len(todo)))
    more = {"device": device} if device != "cpu" else {}
    if todo:
        with _bar(f"{name} {item}", len(cells), len(cells) - len(todo), progress) as advance:
            _run_all(name, item, todo, workers, store, advance, more)
    return [store.cells[c.key] for c in cells]


def _run_all(
    name: str,
    item: str,
    todo: list[Cell],
    workers: int,
    store: Store,
    advance: Callable[[str], None],
    more: dict[str, str],
) -> None:
    if workers == 1:
        with _threads(1):
            for cell in todo:
                store.add(_run_cell(name, item, cell, more))
                advance(_words(cell))
        return
    # Not forked: a child of a process whose threads hold locks may never return.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
    )
    running: set[Future] = set()
    try:
        queue = iter(todo)
        while True:
            while len(running) < workers and (following := next(queue, None)) is not None:
                running.add(pool.submit(_run_cell, name, item, following, more))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            # errors last: what is finished is kept before one is raised
            for future in sorted(done, key=lambda f: f.exception() is not None):
                cell = future.result()
                store.add(cell)
                advance(_words(cell))
    except BrokenProcessPool as error:
        raise FoedusError(
            f"a process that ran {name} {item} was ended from outside; run the command again"
        ) from error
    finally:
        for process in list((pool._processes or {}).values()):
            process.terminate()  # what was not finished is run again
        pool.shutdown(wait=True, cancel_futures=True)


def _run_cell(name: str, item: str, cell: Cell, more: dict[str, str]) -> Cell:
    start = time.perf_counter()
    rows = item_of(name, item).cell(seed=cell.seed, **cell.settings, **more)
    return Cell(cell.settings, cell.seed, rows, time.perf_counter() - start, versions() | more)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """As in the worker processes, so that numbers are the same with one worker."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _bar(title: str, total: int, done: int, show: bool | None) -> Iterator[Callable[[str], None]]:
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    text, last = progress.TextColumn, progress.TextColumn("{task.fields[last]}", style="dim")
    parts = [text("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()]
    parts += [progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), last]
    hidden = not (console.is_terminal if show is None else show)
    with progress.Progress(*parts, console=console, disable=hidden) as bar:
        task = bar.add_task(title, total=total, completed=done, last="")
        yield lambda last: bar.update(task, advance=1, last=last)


def _words(cell: Cell) -> str:
    values = (str(v) for v in cell.settings.values() if isinstance(v, str | int | float))
    return f"{' '.join(values)[:60]} seed {cell.seed}"
