"""`foedus demo`: each family at what averaging cannot do, on data that scikit-learn brings along.

`examples.py` has what is run, one function a family; `claims.py` the sentences, `sections.py` the
pictures, `page.py` what is printed and written.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from foedus.cli.app import app
from foedus.cli.output import check_writable_folder, link_to, require_plots
from foedus.errors import ConfigError, unknown

NAMES = ("ffgb", "fednewton", "fedfw", "fedres", "fedboost", "averaging")


@app.command()
def demo(
    out: Annotated[Path, Option(help="Folder for the page.")] = Path("foedus-demo"),
    only: Annotated[
        list[str] | None,
        Option(metavar="NAME", help=f"One of {', '.join(NAMES)}; may be given several times."),
    ] = None,
    seed: Annotated[
        int, Option(min=0, help="Another one: other clients and other random numbers.")
    ] = 0,
) -> None:
    """Show what each family does that averaging cannot, in about half a minute, without download.

    FFGB adds trees, FedNewton finds the solution of pooled rows, FedFW uploads a few bytes, FedRes
    learns a personal model for each client, and FedBoost chooses among given predictors, each
    beside what it is compared with; then six methods that average, or do not. Every sentence is
    made from the numbers of the run.

    Examples:

        foedus demo

        foedus demo --only ffgb --seed 1 --out trees
    """
    for name in only or ():
        if name not in NAMES:
            raise ConfigError(f"--only: {unknown('example', name, NAMES)}")
    require_plots()
    check_writable_folder(out, "--out")
    from foedus.base.threads import one_thread
    from foedus.cli.demo import page
    from foedus.cli.demo.sections import SECTIONS

    start, sections = time.perf_counter(), []
    names = [name for name in NAMES if not only or name in only]
    with one_thread():
        for i, name in enumerate(names):
            with page.working(f"{name} ({i + 1} of {len(names)})"):
                sections.append(SECTIONS[name](seed))
            page.show(sections[-1])
    page.show_summary(sections)
    with page.working("the page"):
        path = page.write(out / "report.html", sections, seed)
        numbers = page.write_numbers(out / "numbers.json", sections, seed)
    typer.echo(f"\npage: {link_to(path)}\nits numbers: {numbers}")
    typer.echo(f"{time.perf_counter() - start:.0f} seconds")
