"""`foedus paper`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foedus.errors import ConfigError, FoedusError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foedus.papers.item import Scale


from foedus.cli.app import app
from foedus.cli.output import link_to, print_table, require_plots


@app.command("paper")
def paper_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A paper; `all` for all of them.")
    ] = None,
    item: Annotated[
        str | None,
        typer.Argument(metavar="ITEM", help="A table or figure of it; `all` for all of them."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="About a minute: fewer rows, rounds and seeds, the same shape."
        ),
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="The paper's own scale.")] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many, if not the item's own number.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING=VALUE", help="Only cells with this setting, such as data=mnist."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of results, pictures and pages.")] = Path(
        "results"
    ),
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; one for each core, if not given.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished cells again.")] = False,
    device: Annotated[
        str, typer.Option(help="Where networks are trained: `--full --device cuda`.")
    ] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Run nothing, show what is stored.")] = False,
    docs: Annotated[
        Path | None,
        typer.Option(help="Run nothing, write Markdown of all that is stored to this folder."),
    ] = None,
) -> None:
    """Reproduce a table or figure of a paper: its numbers beside ours, and whether its claims hold.

    Without ITEM, lists what there is. Finished cells are kept in --out: a run that was stopped goes
    on where it was.

    Examples:

        foedus paper

        foedus paper fedfw table1 --quick

        foedus paper fednewton table3 --only data=letter --seeds 10
    """
    from foedus.papers import runner

    if docs is not None:
        from foedus.papers.markdown import write_docs

        require_plots()
        for path in write_docs(out, docs):
            typer.echo(str(path))
        return
    if quick and full:
        raise ConfigError("--quick and --full exclude each other; give one of them")
    papers = runner.PAPERS if name in (None, "all") else (name,)
    if item is None:
        _list_papers(papers, out)
        return
    pairs = [o.partition("=") for o in only or []]
    if wrong := [
        o
        for o, (key, sign, value) in zip(only or [], pairs, strict=True)
        if not (key and sign and value)
    ]:
        raise ConfigError(f"--only {wrong[0]} must be SETTING=VALUE, such as data=mnist")
    if len({key for key, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"--only {' --only '.join(only or [])}: give each setting once")
    chosen = [(p, i) for p in papers for i in (runner.paper(p).items if item == "all" else (item,))]
    for p, i in chosen:
        runner.item_of(p, i)
    require_plots()
    scale: Scale = "quick" if quick else "full" if full else "usual"
    # ended or interrupted, workers are not left behind
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from foedus.papers.figures import write_pictures
    from foedus.papers.pages import write_pages
    from foedus.papers.results import Result, stored

    for p, i in chosen:
        if show:
            result = stored(out, p, i, [scale] if quick or full else ["full", "usual", "quick"])
            if result is None:
                raise FoedusError(
                    f"nothing of {p} {i} is stored in {out}; without --show it is run"
                )
        else:
            where = {key: value for key, _, value in pairs}
            try:
                cells = runner.run_item(
                    p,
                    i,
                    scale,
                    folder=out,
                    seeds=seeds,
                    only=where,
                    workers=workers,
                    fresh=fresh,
                    device=device,
                )
            except KeyboardInterrupt:
                typer.echo(
                    f"stopped; finished cells are kept in {out}: the same command goes on from "
                    "there",
                    err=True,
                )
                raise typer.Exit(130) from None
            result = Result(
                p, i, runner.item_of(p, i), scale, tuple(cells), len(cells), runner.found_in(cells)
            )
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
            rows.append(
                [name, key, item.title + (" (ours)" if item.extra else ""), *times, kept, claims]
            )
    print_table(
        ["paper", "item", "what it is", "--quick", "usual", "--full", "stored", "claims"],
        rows,
        ("paper", "item", "what it is", "stored", "claims"),
    )
    typer.echo("Durations are for two cores. Run one: foedus paper NAME ITEM [--quick]")


def _show_item(result: Any) -> None:
    """Tables, claims and where the numbers come from."""
    from rich.console import Console
    from rich.text import Text

    from foedus.papers.item import Table
    from foedus.papers.results import settings_of, table_of

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(Text.assemble("\n", (result.item.title, "bold"), f"  ({result.command})"))
    for view in result.item.views:
        table = table_of(view, result.found)
        if table and (
            isinstance(view, Table) or not any(isinstance(v, Table) for v in result.item.views)
        ):
            print_table(
                *table,
                tuple(
                    h
                    for k, h in enumerate(table[0])
                    if not _looks_numeric([r[k] for r in table[1]])
                ),
            )
            if view.caption:
                console.print(Text(view.caption, "dim"))
    for text, verdict, numbers in result.verdicts:
        colour = {"holds": "green", "does not hold": "red"}.get(verdict, "yellow")
        console.print(Text.assemble((verdict, colour), f": {text}  ", (numbers, "dim")))
    for text in result.remarks:
        console.print(Text(text, "dim"))
    console.print(Text("; ".join(f"{name}: {value}" for name, value in settings_of(result)), "dim"))
    ran = f"{len(result.cells)} cells" + (
        f", {result.seconds / 60:.1f} minutes of one core" if result.seconds else ""
    )
    console.print(
        Text(f"{ran}; {', '.join(f'{k} {v}' for k, v in result.versions.items())}", "dim")
    )


def _looks_numeric(column: list[str]) -> bool:
    return all(
        c == "–" or c.startswith("not reached") or c.lstrip("-+")[:1].isdigit() for c in column
    )
