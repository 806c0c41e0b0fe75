"""`foedus run`, `compare`, `tune`, `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from foedus.cli.app import Config, app
from foedus.cli.output import (
    check_writable,
    check_writable_folder,
    link_to,
    print_history,
    require_plots,
    show_comparison,
)
from foedus.errors import ConfigError, DivergenceError, SplitError


@app.command("run")
def run_command(
    config: Config,
    out: Annotated[
        Path | None, Option(help="File for the run; the default is output.run of the file.")
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on from run.checkpoint of the file.")
    ] = False,
    report: Annotated[
        Path | None,
        Option(help="Also write a page; the default is output.report of the file."),
    ] = None,
) -> None:
    """Run one algorithm as a TOML file says, print the last rounds and save the run.

    The file, such as this one, is checked before any work starts:

    \b
        data      = { name = "digits" }
        split     = { scheme = "dirichlet", clients = 10, alpha = 0.3 }
        run       = { rounds = 30, seed = 0, participation = 0.5 }
        algorithm = { type = "FedAvg", lr = 0.1, model = "Linear" }
        output    = { run = "fedavg.safetensors", report = "page.html" }

    Examples:

        foedus run examples/run.toml

        foedus run examples/run.toml --report page.html

        foedus run examples/run.toml --out fedprox.safetensors && foedus report fedprox.safetensors

    With checkpoint = "FILE" under \\[run], Ctrl-C finishes the round and saves; --resume goes on
    from there. With resume = "auto" under \\[run], a run goes on if there is such a file, and
    begins if there is none.
    """
    from foedus.config.experiment import read_config
    from foedus.core.card import card_path
    from foedus.core.run import run
    from foedus.report.compare import Comparison

    experiment = read_config(config, "run")
    page, file = report or experiment.output.get("report"), out or experiment.output.get("run")
    if page:
        require_plots()
    keys = "--report" if report else "output.report", "--out" if out else "output.run"
    for target, key in zip((page, file), keys, strict=True):
        if target:
            check_writable(Path(target), key)
    options = experiment.options | ({"resume": True} if resume else {})
    if resume and "checkpoint" not in options:
        needed = "--resume needs the file to go on from"
        raise ConfigError(f"{config}: run.checkpoint is missing: {needed}")
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    (algorithm,) = experiment.algorithms.values()
    options |= {"seed": experiment.seeds[0], "target": experiment.target}
    try:
        result = run(algorithm, fed, experiment.rounds, **options)
    except DivergenceError as error:
        if len(error.run.records):
            print_history(error.run)
        raise
    print_history(result)
    if file:
        result.save(file)
        typer.echo(f"\nrun:  {file}\ncard: {card_path(Path(file))}")
    if page:
        comparison = Comparison({type(algorithm).__name__: [result]}, fed, experiment.target)
        typer.echo(f"page: {link_to(comparison.report(page))}")


@app.command("compare")
def compare_command(
    config: Config,
    out: Annotated[
        Path | None,
        Option(help="The page; the default is output.report of the file, or report.html."),
    ] = None,
) -> None:
    """Run several algorithms on the same data and seeds as a TOML file says; write a page.

    The file, such as this one, is checked before any work starts:

    \b
        data   = { name = "digits" }
        split  = { scheme = "dirichlet", clients = 10, alpha = 0.3 }
        run    = { rounds = 30, seeds = 3, participation = 0.5 }
        output = { report = "page.html", runs = "runs" }
        algorithms.FedAvg   = { lr = 0.1, epochs = 5 }
        algorithms.Scaffold = { lr = 0.1, epochs = 5 }

    Examples:

        foedus compare examples/compare.toml

        foedus compare examples/compare.toml --out digits.html
    """
    from foedus.config.experiment import read_config
    from foedus.report.compare import compare

    experiment = read_config(config, "compare")
    page = out or Path(experiment.output.get("report", "report.html"))
    require_plots()
    check_writable(page, "--out" if out else "output.report")
    folder = experiment.output.get("runs")
    if folder:
        check_writable_folder(Path(folder), "output.runs")
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    options = {"seeds": experiment.seeds, "target": experiment.target, **experiment.options}
    comparison = compare(experiment.algorithms, fed, experiment.rounds, **options)
    if folder:
        typer.echo(f"runs: {len(comparison.save(folder))} files in {folder}")
    show_comparison(comparison, page)


@app.command("tune")
def tune_command(
    config: Config,
    out: Annotated[
        Path | None,
        Option(help="Also write a page; the default is output.report of the file."),
    ] = None,
) -> None:
    """Choose settings of an algorithm on held-out training rows; print what to put into the file.

    The file is one for `foedus run` that also says what to try. The field of a field has a dot in
    its name:

    \b
        data      = { name = "digits" }
        split     = { scheme = "dirichlet", clients = 10, alpha = 0.3 }
        run       = { rounds = 30, participation = 0.5 }
        algorithm = { type = "FedAvg", epochs = 5, model = "MLP" }
        tune      = { lr = [0.01, 0.1, 1.0], model.hidden = [[32], [128]] }

    Instead of a list, { loguniform = [1e-4, 1.0] } draws from a range. \\[tune.options] has trials
    (how many combinations, drawn at random; needed with ranges), seeds, validation (0.2), halving
    (3, or "none"), metric and workers, as help(fd.tune) explains.

    Examples:

        foedus tune examples/fednewton.toml

        foedus tune examples/fednewton.toml --out page.html
    """
    from foedus.config.experiment import algorithm_section, read_config
    from foedus.tuning.tune import tune

    experiment = read_config(config, "tune")
    page = out or experiment.output.get("report")
    if page:
        require_plots()
        check_writable(Path(page), "--out" if out else "output.report")
    (algorithm,) = experiment.algorithms.values()
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    kept = ("engine", "participation", "quantise")
    options = {k: v for k, v in experiment.options.items() if k in kept}
    options = {"seeds": experiment.seeds, **options, **experiment.tune_options}
    try:
        found = tune(algorithm, fed, experiment.rounds, grid=experiment.grid, **options)
    except (ConfigError, SplitError) as error:
        raise ConfigError(f"{config}: tune: {error}") from error
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(found)
    else:
        typer.echo(str(found))
    typer.echo(f"\n{algorithm_section(found.best, found.values)}")
    if page:
        typer.echo(f"\npage: {link_to(found.report(page))}")


@app.command("report")
def report_command(
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Saved runs, or folders of them.")],
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    target: Annotated[float | None, Option(help="State the cost of reaching this metric.")] = None,
) -> None:
    """Make a page from saved runs; runs that differ only in the seed count as one algorithm.

    Examples:

        foedus report fedavg.safetensors scaffold.safetensors --out page.html

        foedus report runs/ --target 0.9
    """
    from foedus.report.compare import Comparison

    require_plots()
    check_writable(out, "--out")
    show_comparison(Comparison.load(*runs, target=target), out)
