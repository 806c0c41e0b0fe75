"""`foedus data`."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument

from foedus.cli.app import app
from foedus.cli.output import or_dash, print_table

data_app = typer.Typer(no_args_is_help=True, help="List, fetch and look at data sets.")
app.add_typer(data_app, name="data")


@data_app.command("list")
def data_list() -> None:
    """List the data sets: bundled, present, and to download.

    Data sets are searched in $FOEDUS_DATA, then in the user's cache.

    Example:

        foedus data list
    """
    from foedus.data import catalog

    rows = []
    for info in catalog.names():
        regression = info.where == "bundled" and info.classes is None
        kind = "regression" if regression else or_dash(info.classes)
        sizes = [or_dash(v) for v in (info.rows, info.test_rows, info.features)]
        rows.append([info.name, *sizes, kind, info.where])
    headings = ["name", "rows", "test rows", "features", "classes", "where"]
    print_table(headings, rows, text=("name", "where"))


@data_app.command("get")
def data_get(
    names: Annotated[
        list[str], Argument(metavar="NAME...", help="Sets that `foedus data list` shows.")
    ],
) -> None:
    """Download data sets into the cache and verify their checksums; skips those that are present.

    Example:

        foedus data get mnist letter
    """
    from foedus.data import catalog

    # a wrong name is found before the first download
    known = [catalog.info(name) for name in names]
    for info in known:
        catalog.path_of(info.name)
        where = catalog.info(info.name).where
        typer.echo(f"{info.name}: {where}{', nothing to fetch' if where == 'bundled' else ''}")


@data_app.command("show")
def data_show(
    name: Annotated[
        str, Argument(metavar="NAME", help="A set that `foedus data list` shows, or a file.")
    ],
) -> None:
    """Show what a data set holds: rows, features, labels and their frequencies.

    Examples:

        foedus data show digits

        foedus data show rows.csv
    """
    import numpy as np

    from foedus.base.steps import labels_of
    from foedus.data import load

    data = load(name)
    x, shape = data.x_train, " x ".join(map(str, data.x_train.shape[1:]))
    typer.echo(f"{data.name}: {len(x):,} training rows, {len(data.x_test):,} test rows")
    typer.echo(f"features: {shape}, scaling: {data.scaling or 'none'}")
    typer.echo(f"range: {x.min():.4g} to {x.max():.4g}, mean {x.mean(dtype=np.float64):.4g}")
    if data.groups_train is not None:
        groups = len(np.unique(data.groups_train))
        typer.echo(f"groups: {groups} (scheme 'natural' makes each a client)")
    if data.classes is None:
        for part, y in (("train", data.y_train), ("test", data.y_test)):
            if len(y):
                text = f"y_{part}: {y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}"
                typer.echo(f"{text}, standard deviation {y.std():.4g}")
        return
    parts = [labels_of(y) for y in (data.y_train, data.y_test)]
    counts = [np.bincount(y, minlength=data.classes) for y in parts]
    labels = data.class_names or [str(c) for c in range(data.classes)]
    rows = [[label, f"{a:,}", f"{b:,}"] for label, a, b in zip(labels, *counts, strict=True)]
    what = "steps" if data.spec.steps else "rows"
    print_table(["label", f"training {what}", f"test {what}"], rows, text=("label",))
