"""`foedus diagnose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from foedus.cli.app import app
from foedus.cli.output import check_writable, link_to, require_plots


@app.command("diagnose")
def diagnose_command(
    config: Annotated[
        Path, Argument(metavar="FED.toml", help="A file with data and split; see above.")
    ],
    out: Annotated[Path | None, Option(help="Also write a page with pictures, .html.")] = None,
    plot: Annotated[
        Path | None, Option(help="Also write the figures to a file, .svg or .png.")
    ] = None,
    iterations: Annotated[
        int, Option(min=1, help="Rounds of power iterations for FedNewton's measures.")
    ] = 30,
) -> None:
    """Measure how much the clients of a federation differ, and recommend algorithms to try first.

    The same as fd.diagnose(fed) in Python. It measures distances between the clients' labels and
    features, the shifts and the spectral radius that decide about FedNewton, which kinds of models
    predict held-out rows, and whether clients share a task.

    The file is one for `foedus run` or `foedus compare`; data and split are enough. If an algorithm
    in it works on features (FedNewton), those features are used:

    \b
        data  = { name = "digits" }
        split = { scheme = "dirichlet", clients = 10, alpha = 0.1 }

    Examples:

        foedus diagnose examples/run.toml

        foedus diagnose examples/fednewton.toml --out page.html
    """
    from foedus.algorithms.fednewton.regression import FeatureRegression
    from foedus.config.experiment import read_config
    from foedus.diagnosis.diagnose import diagnose
    from foedus.report.plots import check_picture

    experiment = read_config(config, "diagnose")
    if plot:
        check_picture(plot)
    for target, key in ((out, "--out"), (plot, "--plot")):
        if target:
            require_plots()
            check_writable(target, key)
    fed = experiment.federation()
    regressions = [a for a in experiment.algorithms.values() if isinstance(a, FeatureRegression)]
    squared = (a for a in regressions if getattr(a, "loss", "squared") == "squared")
    algorithm, engine = next(squared, None), experiment.options.get("engine")
    found = diagnose(fed, algorithm, iterations=iterations, seed=experiment.seeds[0], engine=engine)
    typer.echo(str(found))
    for name, target, write in (("page", out, found.report), ("picture", plot, found.plot)):
        if target:
            typer.echo(f"{name}: {link_to(write(target))}")
