"""`foedus paper`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from foedus.errors import ConfigError, FoedusError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foedus.papers.item import Scale


from foedus.cli.app import app
from foedus.cli.output import check_writable_folder, link_to, print_table, require_plots


@app.command("paper")
def paper_command(
    name: Annotated[
        str | None, Argument(metavar="NAME", help="A paper; `all` for all of them.")
    ] = None,
    item: Annotated[
        str | None, Argument(metavar="ITEM", help="A table or figure of it; `all` for all of them.")
    ] = None,
    quick: Annotated[
        bool,
        Option("--quick", help="About a minute: fewer rows, rounds and seeds, the same shape."),
    ] = False,
    full: Annotated[bool, Option("--full", help="The paper's own scale.")] = False,
    seeds: Annotated[
        int | None, Option(min=1, help="How many, if not the item's own number.")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(metavar="SETTING=VALUE", help="Only cells with this setting, such as data=mnist."),
    ] = None,
    out: Annotated[Path, Option(help="Folder of results, pictures and pages.")] = Path("results"),
    workers: Annotated[
        int | None, Option(min=1, help="Processes; one for each core, if not given.")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Run finished cells again.")] = False,
    device: Annotated[
        str, Option(help="Where networks are trained: `--full --device cuda`.")
    ] = "cpu",
    show: Annotated[bool, Option("--show", help="Run nothing, show what is stored.")] = False,
    docs: Annotated[
        Path | None,
        Option(help="Run nothing, write Markdown of all that is stored to this folder."),
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper: its numbers next to ours, and whether its claims
    hold.

    Without ITEM, lists the items. Finished cells are kept in --out, so an interrupted run resumes.

    Examples:

        foedus paper

        foedus paper fedfw table1 --quick

        foedus paper fednewton table3 --only data=letter --seeds 10
    """
    from foedus.papers import runner

    if docs is not None:
        from foedus.papers.markdown import write_docs

        require_plots()
        check_writable_folder(docs, "--docs")
        for path in write_docs(out, docs):
            typer.echo(str(path))
        return
    if quick and full:
        raise ConfigError("--quick and --full exclude each other; give one of them")
    papers = runner.PAPERS if name in (None, "all") else (name,)
    if item is None:
        _list_papers(papers, out)
        return
    where: dict[str, str] = {}
    for entry in only or ():
        key, _, value = entry.partition("=")
        if not key or not value:
            raise ConfigError(f"--only {entry} must be SETTING=VALUE, such as data=mnist")
        if key in where:
            raise ConfigError(f"--only {' --only '.join(only or [])}: give each setting once")
        where[key] = value
    chosen = [(p, i) for p in papers for i in (runner.paper(p).items if item == "all" else (item,))]
    for p, i in chosen:
        runner.item_of(p, i)
    require_plots()
    check_writable_folder(out, "--out")
    scale: Scale = "quick" if quick else "full" if full else "usual"
    options: dict[str, Any] = {"seeds": seeds, "workers": workers, "fresh": fresh, "device": device}
    # ended or interrupted, workers are not left behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from foedus.papers.figures import write_pictures
    from foedus.papers.pages import write_pages
    from foedus.papers.results import Result, stored

    for p, i in chosen:
        if show:
            result = stored(out, p, i, [scale] if quick or full else ["full", "usual", "quick"])
            if result is None:
                text = f"nothing of {p} {i} is stored in {out}; without --show it is run"
                raise FoedusError(text)
        else:
            try:
                cells = runner.run_item(p, i, scale, folder=out, only=where, **options)
            except KeyboardInterrupt:
                text = f"stopped; finished cells are kept in {out}: the same command goes on there"
                typer.echo(text, err=True)
                raise typer.Exit(130) from None
            study, found = runner.item_of(p, i), runner.found_in(cells)
            result = Result(p, i, study, scale, tuple(cells), len(cells), found)
            write_pictures(result, out / "figures" if scale == "usual" else out / scale / "figures")
        _show_item(result)
    typer.echo(f"pages: {link_to(write_pages(out)[-1])}")


def _list_papers(papers: Iterable[str], out: Path) -> None:
    from foedus.papers import runner
    from foedus.papers.results import count, duration, in_words, stored

    rows = []
    for name in papers:
        for key, item in runner.paper(name).items.items():
            result = stored(out, name, key)
            kept = "–" if result is None else result.scale
            claims = "–" if result is None or not item.claims else in_words(count(result.verdicts))
            times = [duration(item.minutes.get(s)) for s in ("quick", "usual", "full")]
            title = item.title + (" (ours)" if item.extra else "")
            rows.append([name, key, title, *times, kept, claims])
    names, durations, end = (
        ["paper", "item", "what it is"],
        ["--quick", "usual", "--full"],
        ["stored", "claims"],
    )
    print_table([*names, *durations, *end], rows, text=(*names, *end))
    typer.echo("Durations are for two cores. Run one: foedus paper NAME ITEM [--quick]")


def _show_item(result: Any) -> None:
    """Tables, claims and where the numbers come from."""
    from rich.console import Console
    from rich.text import Text

    from foedus.papers.item import Table
    from foedus.papers.results import numeric, settings_of, table_of

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(Text.assemble("\n", (result.item.title, "bold"), f"  ({result.command})"))
    tables = [view for view in result.item.views if isinstance(view, Table)]
    for view in tables or result.item.views:
        if table := table_of(view, result.found):
            headings, rows = table
            columns = zip(headings, *rows, strict=True)
            print_table(headings, rows, tuple(h for h, *c in columns if not all(map(numeric, c))))
            if view.caption:
                console.print(Text(view.caption, "dim"))
    for text, verdict, numbers in result.verdicts:
        colour = {"holds": "green", "does not hold": "red"}.get(verdict, "yellow")
        console.print(Text.assemble((verdict, colour), f": {text}  ", (numbers, "dim")))
    for text in result.remarks:
        console.print(Text(text, "dim"))
    time = f", {result.seconds / 60:.1f} minutes of one core" if result.seconds else ""
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    console.print(Text("; ".join(f"{name}: {value}" for name, value in settings_of(result)), "dim"))
    console.print(Text(f"{len(result.cells)} cells{time}; {versions}", "dim"))
