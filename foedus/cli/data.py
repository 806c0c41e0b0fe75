"""`foedus data`."""

from __future__ import annotations

from typing import Annotated

import typer

from foedus.cli.app import app
from foedus.cli.output import or_dash, print_table

data_app = typer.Typer(no_args_is_help=True, help="List, fetch and look at data sets.")
app.add_typer(data_app, name="data")


# -- data ------------------------------------------------------------------------------------------


@data_app.command("list")
def data_list() -> None:
    """List the data sets: bundled, at hand, and to be downloaded.

    Sets are looked for in $FOEDUS_DATA, then in the user's cache.

    Example:

        foedus data list
    """
    from foedus.data import catalog

    rows = []
    for info in catalog.names():
        kind = (
            "regression"
            if info.where == "bundled" and info.classes is None
            else or_dash(info.classes)
        )
        sizes = [or_dash(v) for v in (info.rows, info.test_rows, info.features)]
        rows.append([info.name, *sizes, kind, info.where])
    print_table(
        ["name", "rows", "test rows", "features", "classes", "where"], rows, text=("name", "where")
    )


@data_app.command("get")
def data_get(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Sets that `foedus data list` shows.")
    ],
) -> None:
    """Download data sets into the cache, checked; does nothing for those that are at hand.

    Example:

        foedus data get mnist letter
    """
    from foedus.data import catalog

    # a wrong name is found before the first download
    known = [catalog.info(name) for name in names]
    for info in known:
        catalog.path_of(info.name)
        after = catalog.info(info.name)
        typer.echo(
            f"{info.name}: "
            f"{'bundled, nothing to fetch' if after.where == 'bundled' else after.where}"
        )


@data_app.command("show")
def data_show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A set that `foedus data list` shows, or a file.")
    ],
) -> None:
    """Show what a data set holds: rows, features, labels and their frequencies.

    Examples:

        foedus data show digits

        foedus data show rows.csv
    """
    import numpy as np

    from foedus.data import load

    data = load(name)
    typer.echo(f"{data.name}: {len(data.x_train):,} training rows, {len(data.x_test):,} test rows")
    typer.echo(
        f"features: {' x '.join(map(str, data.x_train.shape[1:]))}, scaling: "
        f"{data.scaling or 'none'}"
    )
    typer.echo(
        f"range: {data.x_train.min():.4g} to {data.x_train.max():.4g}, mean "
        f"{data.x_train.mean(dtype=np.float64):.4g}"
    )
    if data.groups_train is not None:
        typer.echo(
            f"groups: {len(np.unique(data.groups_train))} (scheme 'natural' makes each a client)"
        )
    if data.classes is None:
        for part in ("train", "test"):
            y = getattr(data, f"y_{part}")
            if len(y):
                typer.echo(
                    f"y_{part}: {y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}, standard "
                    f"deviation {y.std():.4g}"
                )
        return
    counts = [np.bincount(y, minlength=data.classes) for y in (data.y_train, data.y_test)]
    labels = data.class_names or [str(c) for c in range(data.classes)]
    rows = [[label, f"{a:,}", f"{b:,}"] for label, a, b in zip(labels, *counts, strict=True)]
    print_table(["label", "training rows", "test rows"], rows, text=("label",))
