"""The command line: `foedus demo`, `run`, `compare`, `tune`, `diagnose`, `paper`, `data`, `report`, `audit`, `deploy`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from foedus.errors import ConfigError, DivergenceError, FoedusError, SplitError
from foedus.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foedus.core.run import Run
    from foedus.report.compare import Comparison

# Whatever computes is imported by the command that needs it, so that --help is not kept waiting.


class _Commands(TyperGroup):
    """Turns errors that a user can mend into one message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever read the output has seen enough: the caller ends quietly
            raise
        except (FoedusError, OSError) as error:
            if ctx.params.get("debug") or os.environ.get("FOEDUS_DEBUG", "0") not in ("", "0"):
                raise
            _complain(error)
            raise typer.Exit(1 if isinstance(error, DivergenceError) else 2) from None
        except KeyboardInterrupt as stop:
            saved = f"{stop} (foedus run CONFIG.toml --resume)" if str(stop) else "stopped at once"
            typer.echo(saved, err=True)
            raise typer.Exit(130) from None


def _complain(error: BaseException) -> None:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or ''}: {error.strerror}".lstrip(": ")
    typer.echo("\n".join([f"foedus: error: {text}", *getattr(error, "__notes__", [])]), err=True)


app = typer.Typer(
    cls=_Commands,
    name="foedus",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(no_args_is_help=True, help="List, fetch and look at data sets.")
app.add_typer(data_app, name="data")
audit_app = typer.Typer(
    no_args_is_help=True, help="Find out what messages tell about a client's rows, and what hostile clients can do."
)
app.add_typer(audit_app, name="audit")
deploy_app = typer.Typer(no_args_is_help=True, help="A federation of real sites, on Flower.")
app.add_typer(deploy_app, name="deploy")

Config = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The experiment; see examples/ for some.")]


def _writable(path: Path, key: str) -> None:
    """Find out before the work, not after it, that its result could not be written."""
    folder = next(p for p in (path.absolute().parent, *path.absolute().parents) if p.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"{folder} is not a folder that can be written to"
        raise ConfigError(f"{key}: cannot write {str(path)!r}: {why}; choose another place")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"foedus {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Begin with: foedus demo. Every command explains itself: foedus run --help. "
    "Exit codes: 0 done, 1 a run diverged, 2 something must be mended first, 130 stopped by Ctrl-C."
)
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error (also FOEDUS_DEBUG=1).")] = False,
) -> None:
    """foedus: federated learning beyond averaging.

    Compare federated algorithms on the same data and seeds, with every byte counted.
    """


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page.")] = Path("foedus-demo"),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 30,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each algorithm.")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="Clients that hold the data.")] = 10,
    alpha: Annotated[float, typer.Option(help="Dirichlet parameter: the smaller, the more unequal the clients.")] = 0.1,
) -> None:
    """Compare six algorithms on handwritten digits; takes well under a minute and needs no download.

    FedAvg, FedProx, Scaffold and FedDyn train one network together; Independent lets every client train alone;
    Central has all data in one place, as a reference. Half of the clients take part in each round.

    Examples:

        foedus demo

        foedus demo --alpha 10 --seeds 5 --out equal-clients
    """
    import foedus as fd
    from foedus.core.threads import one_thread
    from foedus.report.compare import compare
    from foedus.report.plots import require_matplotlib

    require_matplotlib()
    _writable(out / "report.html", "--out")
    training: dict[str, Any] = {"model": fd.MLP((64,)), "lr": 0.1, "epochs": 5}
    algorithms = {
        "FedAvg": fd.FedAvg(**training),
        "FedProx": fd.FedProx(**training, mu=0.1),
        "Scaffold": fd.Scaffold(**training),
        "FedDyn": fd.FedDyn(**training, alpha=0.1),
        "Independent": fd.Independent(**training),
        "Central": fd.Central(**training),
    }
    data = fd.load("digits")
    least = max(1, min(10, len(data.x_train) // clients))  # a client with one row says little
    fed = fd.split(data, "dirichlet", clients=clients, alpha=alpha, min_rows=least, seed=0)
    typer.echo(fed.describe() + "\n")
    with one_thread():
        comparison = compare(algorithms, fed, rounds, seeds=seeds, participation=0.5)
    _show(comparison, out / "report.html", "foedus demo: digits, divided unequally")


@app.command("run")
def run_command(
    config: Config,
    out: Annotated[Path | None, typer.Option(help="File for the run; the default is output.run of the file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from run.checkpoint of the file.")] = False,
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

        foedus run examples/run.toml --out fedprox.safetensors && foedus report fedprox.safetensors

    With checkpoint = "FILE" under [run], Ctrl-C finishes the round and saves; --resume goes on from there.
    """
    from foedus.config_file import read_config
    from foedus.core.run import run
    from foedus.report.compare import Comparison

    experiment = read_config(config, "run")
    page, file = experiment.output.get("report"), out or experiment.output.get("run")
    if page:
        _require_plots()
    for target, key in ((page, "output.report"), (file, "--out" if out else "output.run")):
        if target:
            _writable(Path(target), key)
    options = experiment.options | ({"resume": True} if resume else {})
    if resume and "checkpoint" not in options:
        raise ConfigError(f"{config}: run.checkpoint is missing: --resume needs the file to go on from")
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    (algorithm,) = experiment.algorithms.values()
    try:
        result = run(algorithm, fed, experiment.rounds, seed=experiment.seeds[0], target=experiment.target, **options)
    except DivergenceError as error:
        if len(error.run.records):
            _print_history(error.run)
        raise
    _print_history(result)
    if file:
        result.save(file)
        typer.echo(f"\nrun:  {file}")
    if page:
        comparison = Comparison({type(algorithm).__name__: [result]}, fed, experiment.target)
        typer.echo(f"page: {_where(comparison.report(page))}")


@app.command("compare")
def compare_command(
    config: Config,
    out: Annotated[
        Path | None, typer.Option(help="The page; the default is output.report of the file, or report.html.")
    ] = None,
) -> None:
    """Run several algorithms on the same data and seeds as a TOML file says; print the table and write the page.

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
    from foedus.config_file import read_config
    from foedus.report.compare import compare

    experiment = read_config(config, "compare")
    page = out or Path(experiment.output.get("report", "report.html"))
    _require_plots()
    _writable(page, "--out" if out else "output.report")
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    comparison = compare(
        experiment.algorithms,
        fed,
        experiment.rounds,
        seeds=experiment.seeds,
        target=experiment.target,
        **experiment.options,
    )
    if folder := experiment.output.get("runs"):
        typer.echo(f"runs: {len(comparison.save(folder))} files in {folder}")
    _show(comparison, page)


@app.command("tune")
def tune_command(config: Config) -> None:
    """Choose settings of an algorithm on rows that clients hold out of their training rows; print what to put into the file.

    The file is one for `foedus run` that also says what to try. The field of a field has a dot in its name:

    \b
        data      = { name = "digits" }
        split     = { scheme = "dirichlet", clients = 10, alpha = 0.3 }
        run       = { rounds = 30, participation = 0.5 }
        algorithm = { type = "FedAvg", epochs = 5, model = "MLP" }
        tune      = { lr = [0.01, 0.1, 1.0], model.hidden = [[32], [128]] }

    Instead of a list, { loguniform = [1e-4, 1.0] } draws from a range. \\[tune.options] has trials (so many combinations, drawn
    at random; needed with ranges), seeds, validation (0.2), halving (3, or "none"), metric and workers, as help(fd.tune)
    explains.

    Example:

        foedus tune examples/fednewton.toml
    """
    from foedus.config_file import algorithm_section, read_config
    from foedus.tuning import tune

    experiment = read_config(config, "tune")
    (algorithm,) = experiment.algorithms.values()
    fed = experiment.federation()
    typer.echo(fed.describe() + "\n")
    options = {k: v for k, v in experiment.options.items() if k in ("engine", "participation", "quantise")}
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


@app.command("diagnose")
def diagnose_command(
    config: Annotated[Path, typer.Argument(metavar="FED.toml", help="A file with data and split; see above.")],
    out: Annotated[Path | None, typer.Option(help="Also write a page with pictures, .html.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also write the pictures alone, .svg or .png.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Rounds of power iterations for FedNewton's measures.")] = 30,
) -> None:
    """Tell how unlike the clients of a federation are, and which algorithms to try on it first.

    It measures distances between the clients' labels and features, the shifts and the spectral radius that decide about
    FedNewton, which kinds of models predict held-out rows, and whether clients share a task.

    The file is one for `foedus run` or `foedus compare`; data and split are enough. Where an algorithm in it works on
    features (FedNewton), they are the ones that are looked at:

    \b
        data  = { name = "digits" }
        split = { scheme = "dirichlet", clients = 10, alpha = 0.1 }

    Examples:

        foedus diagnose examples/run.toml

        foedus diagnose examples/fednewton.toml --out page.html
    """
    from foedus.algorithms.fednewton import FeatureRegression
    from foedus.config_file import read_config
    from foedus.report.plots import check_picture
    from foedus.report.survey import survey

    experiment = read_config(config, "diagnose")
    if plot:
        check_picture(plot)
    for target, key in ((out, "--out"), (plot, "--plot")):
        if target:
            _require_plots()
            _writable(target, key)
    fed = experiment.federation()
    on_features = [
        a
        for a in experiment.algorithms.values()
        if isinstance(a, FeatureRegression) and getattr(a, "loss", "squared") == "squared"
    ]
    given = {"features": on_features[0].features, "reg": on_features[0].reg} if on_features else {}
    engine = experiment.options.get("engine")
    found = survey(fed, **given, iterations=iterations, seed=experiment.seeds[0], engine=engine)
    typer.echo(str(found))
    for name, target, write in (("page", out, found.report), ("picture", plot, found.plot)):
        if target:
            typer.echo(f"{name}: {_where(write(target))}")


@app.command("paper")
def paper_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A paper; `all` for all of them.")] = None,
    item: Annotated[str | None, typer.Argument(metavar="ITEM", help="A table or figure of it; `all` for all of them.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="About a minute: fewer rows, rounds and seeds, the same shape.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="The paper's own scale.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, if not the item's own number.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="SETTING=VALUE", help="Only cells with this setting, such as data=mnist.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of results, pictures and pages.")] = Path("results"),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one for each core, if not given.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run finished cells again.")] = False,
    device: Annotated[str, typer.Option(help="Where networks are trained: `--full --device cuda`.")] = "cpu",
    show: Annotated[bool, typer.Option("--show", help="Run nothing, show what is stored.")] = False,
    docs: Annotated[Path | None, typer.Option(help="Run nothing, write Markdown of all that is stored to this folder.")] = None,
) -> None:
    """Reproduce a table or figure of a paper: its numbers beside ours, and whether its claims hold.

    Without ITEM, lists what there is. Finished cells are kept in --out: a run that was stopped goes on where it was.

    Examples:

        foedus paper

        foedus paper fedfw table1 --quick

        foedus paper fednewton table3 --only data=letter --seeds 10
    """
    from foedus.papers import runner

    if docs is not None:
        from foedus.papers.render import write_docs

        _require_plots()
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
    if wrong := [o for o, (key, sign, value) in zip(only or [], pairs, strict=True) if not (key and sign and value)]:
        raise ConfigError(f"--only {wrong[0]} must be SETTING=VALUE, such as data=mnist")
    if len({key for key, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"--only {' --only '.join(only or [])}: give each setting once")
    chosen = [(p, i) for p in papers for i in (runner.paper(p).items if item == "all" else (item,))]
    for p, i in chosen:
        runner.item_of(p, i)
    _require_plots()
    scale = "quick" if quick else "full" if full else "usual"
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended or interrupted, workers are not left behind
    from foedus.papers.render import Result, stored, write_pages, write_pictures

    for p, i in chosen:
        if show:
            result = stored(out, p, i, (scale,) if quick or full else ("full", "usual", "quick"))
            if result is None:
                raise FoedusError(f"nothing of {p} {i} is stored in {out}; without --show it is run")
        else:
            where = {key: value for key, _, value in pairs}
            try:
                cells = runner.run_item(
                    p, i, scale, folder=out, seeds=seeds, only=where, workers=workers, fresh=fresh, device=device
                )
            except KeyboardInterrupt:
                typer.echo(f"stopped; finished cells are kept in {out}: the same command goes on from there", err=True)
                raise typer.Exit(130) from None
            result = Result(p, i, runner.item_of(p, i), scale, tuple(cells), len(cells), runner.found_in(cells))
            write_pictures(result, out / "figures" if scale == "usual" else out / scale / "figures")
        _show_item(result)
    typer.echo(f"pages: {_where(write_pages(out)[-1])}")


def _list_papers(papers: Iterable[str], out: Path) -> None:
    from foedus.papers import runner
    from foedus.papers.render import count, duration, in_words, stored

    rows = []
    for name in papers:
        for key, item in runner.paper(name).items.items():
            result = stored(out, name, key)
            kept = "–" if result is None else result.scale
            claims = "–" if result is None or not item.claims else in_words(count(result.verdicts))
            times = [duration(item.minutes.get(s)) for s in ("quick", "usual", "full")]
            rows.append([name, key, item.title + (" (ours)" if item.extra else ""), *times, kept, claims])
    _print_table(
        ["paper", "item", "what it is", "--quick", "usual", "--full", "stored", "claims"],
        rows,
        ("paper", "item", "what it is", "stored", "claims"),
    )
    typer.echo("Durations are for two cores. Run one: foedus paper NAME ITEM [--quick]")


def _show_item(result: Any) -> None:
    """Tables, claims and where the numbers come from."""
    from rich.console import Console
    from rich.text import Text

    from foedus.papers.render import settings_of, table_of
    from foedus.papers.study import Table

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(Text.assemble("\n", (result.item.title, "bold"), f"  ({result.command})"))
    for view in result.item.views:
        table = table_of(view, result.found)
        if table and (isinstance(view, Table) or not any(isinstance(v, Table) for v in result.item.views)):
            _print_table(*table, tuple(h for k, h in enumerate(table[0]) if not _looks_numeric([r[k] for r in table[1]])))
            if view.caption:
                console.print(Text(view.caption, "dim"))
    for text, verdict, numbers in result.verdicts:
        colour = {"holds": "green", "does not hold": "red"}.get(verdict, "yellow")
        console.print(Text.assemble((verdict, colour), f": {text}  ", (numbers, "dim")))
    for text in result.remarks:
        console.print(Text(text, "dim"))
    console.print(Text("; ".join(f"{name}: {value}" for name, value in settings_of(result)), "dim"))
    ran = f"{len(result.cells)} cells" + (f", {result.seconds / 60:.1f} minutes of one core" if result.seconds else "")
    console.print(Text(f"{ran}; {', '.join(f'{k} {v}' for k, v in result.versions.items())}", "dim"))


def _looks_numeric(column: list[str]) -> bool:
    return all(c == "–" or c.startswith("not reached") or c.lstrip("-+")[:1].isdigit() for c in column)


@app.command("report")
def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Saved runs, or folders of them.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    target: Annotated[float | None, typer.Option(help="State the cost of reaching this metric.")] = None,
) -> None:
    """Make a page from saved runs; runs that differ only in the seed count as one algorithm.

    Examples:

        foedus report fedavg.safetensors scaffold.safetensors --out page.html

        foedus report runs/ --target 0.9
    """
    from foedus.report.compare import Comparison

    _require_plots()
    _writable(out, "--out")
    _show(Comparison.load(*runs, target=target), out)


# -- data --------------------------------------------------------------------------------------------------------------


@data_app.command("list")
def data_list() -> None:
    """List the data sets: bundled, at hand, and to be downloaded.

    Sets are looked for in $FOEDUS_DATA, then in the user's cache.

    Example:

        foedus data list
    """
    from foedus.data import datasets

    rows = []
    for info in datasets.names():
        kind = "regression" if info.where == "bundled" and info.classes is None else _or_dash(info.classes)
        sizes = [_or_dash(v) for v in (info.rows, info.test_rows, info.features)]
        rows.append([info.name, *sizes, kind, info.where])
    _print_table(["name", "rows", "test rows", "features", "classes", "where"], rows, text=("name", "where"))


@data_app.command("get")
def data_get(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Sets that `foedus data list` shows.")],
) -> None:
    """Download data sets into the cache, checked; does nothing for those that are at hand.

    Example:

        foedus data get mnist letter
    """
    from foedus.data import datasets

    known = [datasets.info(name) for name in names]  # a wrong name is found before the first download
    for info in known:
        datasets.path_of(info.name)
        after = datasets.info(info.name)
        typer.echo(f"{info.name}: {'bundled, nothing to fetch' if after.where == 'bundled' else after.where}")


@data_app.command("show")
def data_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A set that `foedus data list` shows, or a file.")],
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
    typer.echo(f"features: {' x '.join(map(str, data.x_train.shape[1:]))}, scaling: {data.scaling or 'none'}")
    typer.echo(f"range: {data.x_train.min():.4g} to {data.x_train.max():.4g}, mean {data.x_train.mean(dtype=np.float64):.4g}")
    if data.groups_train is not None:
        typer.echo(f"groups: {len(np.unique(data.groups_train))} (scheme 'natural' makes each a client)")
    if data.classes is None:
        for part in ("train", "test"):
            y = getattr(data, f"y_{part}")
            if len(y):
                typer.echo(f"y_{part}: {y.min():.4g} to {y.max():.4g}, mean {y.mean():.4g}, standard deviation {y.std():.4g}")
        return
    counts = [np.bincount(y, minlength=data.classes) for y in (data.y_train, data.y_test)]
    labels = data.class_names or [str(c) for c in range(data.classes)]
    rows = [[label, f"{a:,}", f"{b:,}"] for label, a, b in zip(labels, *counts, strict=True)]
    _print_table(["label", "training rows", "test rows"], rows, text=("label",))


# -- audit -------------------------------------------------------------------------------------------------------------


@audit_app.command("leakage")
def audit_leakage_command(
    data: Annotated[
        str, typer.Argument(metavar="[DATA]", help="Images: a set that `foedus data list` shows, or a file.")
    ] = "digits",
    image: Annotated[int, typer.Option(help="The training row to rebuild.")] = 0,
    message: Annotated[
        list[str] | None, typer.Option(help="gradient, l2, l1 or linf; may be repeated. The default is the first three.")
    ] = None,
    radius: Annotated[float, typer.Option(help="Radius of the balls. It scales their messages, and tells nothing.")] = 1.0,
    noise: Annotated[float, typer.Option(help="Noise on the gradient, relative to its root mean square.")] = 0.0,
    iterations: Annotated[int, typer.Option(help="L-BFGS iterations from each random start.")] = 300,
    restarts: Annotated[int, typer.Option(help="Random starts; the one that explains the message best counts.")] = 2,
    message_noise: Annotated[float, typer.Option(help="Noise on the message itself, relative to its norm.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the network, the starts and the noise.")] = 0,
    out: Annotated[Path, typer.Option(help="The picture to write, .svg or .png.")] = Path("leakage.svg"),
) -> None:
    """Try to rebuild a client's image from one message: its gradient, or an extreme point as FedFW sends it.

    The attack is Deep Leakage from Gradients. A high PSNR proves that the message gives the image away; a low one proves
    nothing about other attacks. A label is shown by the last layer, or else searched for together with the image. Twins are
    other training images that send the very same message.

    Examples:

        foedus audit leakage

        foedus audit leakage mnist --image 7 --noise 0.1 --out seven.png
    """
    from foedus.core.threads import one_thread
    from foedus.errors import unknown
    from foedus.geometry import L1Ball, L2Ball, LInfBall
    from foedus.privacy.leakage import audit_leakage
    from foedus.report.plots import check_picture

    balls = {"gradient": None, "l2": L2Ball, "l1": L1Ball, "linf": LInfBall}
    for name in message or ():
        if name not in balls:
            raise ConfigError(unknown("--message", name, balls))
    chosen = dict.fromkeys(message or ("gradient", "l2", "l1"))
    titles = {"gradient": "gradient", "l2": "L2 ball", "l1": "L1 ball", "linf": "L-infinity ball"}
    sets = {titles[name]: balls[name] and balls[name](radius) for name in chosen}
    check_picture(out)
    _require_plots()
    _writable(out, "--out")
    with one_thread():
        options = {"iterations": iterations, "restarts": restarts, "noise": noise, "message_noise": message_noise, "seed": seed}
        found = audit_leakage(data, image, messages=sets, **options)
    typer.echo(f"{found.data}: training image {found.index}, label {found.label}")
    rows = []
    for name, r in found.messages.items():
        label = f"{r.label} ({'right' if r.label == found.label else 'wrong'}, {'shown' if r.label_shown else 'searched'})"
        numbers = [f"{value:.1f}" for value in (r.psnr[0], r.psnr[-1], max(r.psnr))]
        rows.append([name, f"{r.bytes:,}", *numbers, label, f"{r.twins:,} of {found.others:,}"])
    rows.append(["none: average image", "0", "–", f"{found.average:.1f}", "–", "–", "–"])
    rows.append(["label only: average of its class", "–", "–", f"{found.class_average:.1f}", "–", "–", "–"])
    headings = ["message", "bytes", "PSNR first", "last", "best", "label", "twins"]
    _print_table(headings, rows, text=("message",))
    typer.echo(f"picture: {_where(found.picture(out))}")


@audit_app.command("hostile")
def audit_hostile_command(
    data: Annotated[
        str, typer.Argument(metavar="[DATA]", help="Labelled rows: a set that `foedus data list` shows, or a file.")
    ] = "digits",
    attack: Annotated[
        list[str] | None, typer.Option(help="One of the attacks; may be repeated. The default is all six.")
    ] = None,
    clients: Annotated[int, typer.Option(help="How many clients.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the division, the training and the choice of hostile clients.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds, and 20% and 40% hostile clients only.")] = False,
) -> None:
    """Train with 0 to 40% hostile clients, by plain and robust means: FedAvg, and FedFW with and without its membership check.

    Numbers are accuracies after the last round. 20 clients, Dirichlet(1.0); a linear model. It takes about a minute on one core.

    Examples:

        foedus audit hostile

        foedus audit hostile mnist --attack scale --attack nan
    """
    from foedus.core.threads import one_thread
    from foedus.report.hostile import audit_hostile

    with one_thread():
        found = audit_hostile(data, attacks=attack, clients=clients, seed=seed, quick=quick)
    typer.echo(f"{found.data}: {found.rows:,} training rows, {clients} clients; accuracy after the last round")
    _print_table(found.headings, found.table(), text=("attack", "method"))


@audit_app.command("privacy")
def audit_privacy_command(
    study: Annotated[
        list[str] | None, typer.Argument(metavar="[STUDY]...", help="utility, membership or leakage. The default is all three.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller, in seconds.")] = False,
) -> None:
    """Measure what differential privacy costs and what it buys.

    utility: test accuracy of FedAvg, FedFW, FedBoost and FedNewton by epsilon (pendigits, 1,000 clients). membership: how well the loss on
    canaries tells which of them took part (digits). leakage: PSNR of an image that is rebuilt from a message with noise (digits).

    Examples:

        foedus audit privacy --quick

        foedus audit privacy membership
    """
    from foedus.core.threads import one_thread
    from foedus.errors import unknown
    from foedus.privacy.study import STUDIES, TITLES
    from foedus.privacy.study import study as measure

    for name in study or ():
        if name not in STUDIES:
            raise ConfigError(unknown("study", name, list(STUDIES)))
    for name in dict.fromkeys(study or STUDIES):
        with one_thread():
            table = measure(name, quick)
        typer.echo(TITLES[name])
        shown = [
            [v if isinstance(v, str) else f"{v:g}" if c in ("epsilon", "noise") else f"{v:.3f}" for c, v in row.items()]
            for row in table.to_dict("records")
        ]
        _print_table(list(table.columns), shown, text=("algorithm",))
        typer.echo("")


# -- deploy ------------------------------------------------------------------------------------------------------------


@deploy_app.command("init")
def deploy_init_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    site: Annotated[list[str], typer.Option(help="NAME or NAME=FILE.csv; once for each site.")],
    label: Annotated[str, typer.Option(help="The column to predict.")] = "target",
    host: Annotated[str, typer.Option(help="Name or address under which sites reach the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 9091,
    days: Annotated[float, typer.Option(help="How long the certificates are valid.")] = 30,
) -> None:
    """Write a folder for a federation: a Flower app, certificates, keys, settings, and a README with the commands for each site.

    Example:

        foedus deploy init trial --site north=north.csv --site south=south.csv --label outcome
    """
    deploy = _flower("deploy")
    sites: dict[str, Path | None] = {}
    for entry in site:
        name, _, path = entry.partition("=")
        if name in sites:
            raise ConfigError(f"--site names {name!r} twice; give each site a name of its own")
        sites[name] = Path(path) if path else None
    deploy.init(folder, sites, label, host, port, days)
    typer.echo(f"{folder}: app, certificates and keys for {len(sites)} sites; {folder / 'README.md'} says what to do next")


@deploy_app.command("up")
def deploy_up_command(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `foedus deploy init`.")]) -> None:
    """Run the federation of a folder with the server and all sites on this machine, with TLS and keys."""
    _flower("deploy").up(folder, typer.echo)


def _flower(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"foedus.flower.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("flwr", "cryptography"):
            raise
        raise FoedusError("a federation of sites needs Flower: pip install 'foedus[flower]'") from None


# -- output ------------------------------------------------------------------------------------------------------------


def _require_plots() -> None:
    from foedus.report.plots import require_matplotlib

    require_matplotlib()


def _show(comparison: Comparison, page: Path, title: str | None = None) -> None:
    """The table, the page, and a last word about what diverged."""
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(comparison)  # fits the table to the terminal
    else:
        typer.echo(f"{comparison!r}\n")
    typer.echo(f"page: {_where(comparison.report(page, title))}")
    lost = [message for messages in comparison.diverged.values() for message in messages.values()]
    if lost:
        typer.echo(f"foedus: {len(lost)} of {sum(map(len, comparison.runs.values()))} runs diverged: {lost[0]}", err=True)
        if not any(comparison.finished(name) for name in comparison.runs):
            raise typer.Exit(1)


def _where(page: Path) -> str:
    return f"{page} ({page.resolve().as_uri()})"


def _print_history(run: Run) -> None:
    frame = run.history
    shown = [c for c in ("round", "seconds", "bytes_up", "bytes_down", "clients", "loss", "accuracy", "mse") if c in frame]
    shown += [c for c in ("own_accuracy", "own_mse") if c in frame]
    typer.echo(frame[shown].tail(5).to_string(index=False, na_rep="–"))
    typer.echo(f"\n{run!r}")


def _or_dash(value: int | None) -> str:
    return "–" if value is None else f"{value:,}"


def _print_table(headings: list[str], rows: list[list[str]], text: tuple[str, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)


def main() -> None:
    """Entry point of the `foedus` command."""
    try:
        app()
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `foedus paper | head`: nothing more is to be written, not even by the interpreter at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
