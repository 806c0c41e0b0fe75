"""`foedus audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from foedus.cli.app import app
from foedus.cli.output import check_writable, command_of, link_to, print_table, require_plots
from foedus.errors import ConfigError

audit_app = typer.Typer(
    no_args_is_help=True,
    help="Find out what messages tell about a client's rows, and what hostile clients can do.",
)
app.add_typer(audit_app, name="audit")

Out = Annotated[Path | None, Option(help="Also write a page, .html.")]


@audit_app.command("leakage")
def audit_leakage_command(
    context: typer.Context,
    data: Annotated[
        str,
        Argument(metavar="[DATA]", help="Images: a set that `foedus data list` shows, or a file."),
    ] = "digits",
    image: Annotated[int, Option(help="The training row to rebuild.")] = 0,
    message: Annotated[
        list[str] | None,
        Option(help="gradient, l2, l1 or linf; may be repeated. The default is the first three."),
    ] = None,
    radius: Annotated[
        float, Option(help="Radius of the balls. It scales their messages, and tells nothing.")
    ] = 1.0,
    noise: Annotated[
        float, Option(help="Noise on the gradient, relative to its root mean square.")
    ] = 0.0,
    iterations: Annotated[int, Option(help="L-BFGS iterations from each random start.")] = 300,
    restarts: Annotated[
        int, Option(help="Random starts; the one that explains the message best counts.")
    ] = 2,
    message_noise: Annotated[
        float, Option(help="Noise on the message itself, relative to its norm.")
    ] = 0.0,
    seed: Annotated[int, Option(help="Seed of the network, the starts and the noise.")] = 0,
    out: Annotated[
        Path, Option(help="The page to write, or with .svg or .png the picture alone.")
    ] = Path("leakage.html"),
) -> None:
    """Try to rebuild a client's image from its gradient, or from an extreme point of FedFW.

    The attack is Deep Leakage from Gradients. A high PSNR proves that the message reveals the
    image; a low one proves nothing about other attacks. The label is read from the last layer if
    possible, or searched for together with the image. Twins are other training images that send the
    same message.

    Examples:

        foedus audit leakage

        foedus audit leakage mnist --image 7 --noise 0.1 --out seven.png
    """
    from foedus.audit.leakage import audit_leakage
    from foedus.base.threads import one_thread
    from foedus.errors import unknown
    from foedus.geometry import L1Ball, L2Ball, LInfBall
    from foedus.report.plots import check_picture

    balls = {"gradient": None, "l2": L2Ball, "l1": L1Ball, "linf": LInfBall}
    for name in message or ():
        if name not in balls:
            raise ConfigError(unknown("--message", name, balls))
    chosen = dict.fromkeys(message or ("gradient", "l2", "l1"))
    titles = {"gradient": "gradient", "l2": "L2 ball", "l1": "L1 ball", "linf": "L-infinity ball"}
    sets = {titles[name]: ball and ball(radius) for name in chosen for ball in (balls[name],)}
    page = out.suffix.lower() in (".html", ".htm")
    if not page:
        check_picture(out)
    require_plots()
    check_writable(out, "--out")
    with one_thread():
        found = audit_leakage(
            data, image, messages=sets, iterations=iterations, restarts=restarts, noise=noise,
            message_noise=message_noise, seed=seed,
        )  # fmt: skip
    typer.echo(f"{found.data}: training image {found.index}, label {found.label}")
    rows = []
    for name, r in found.messages.items():
        right = "right" if r.label == found.label else "wrong"
        label = f"{r.label} ({right}, {'shown' if r.label_shown else 'searched'})"
        numbers = [f"{value:.1f}" for value in (r.psnr[0], r.psnr[-1], max(r.psnr))]
        rows.append([name, f"{r.bytes:,}", *numbers, label, f"{r.twins:,} of {found.others:,}"])
    rest, average = ["–"] * 3, f"{found.class_average:.1f}"
    rows.append(["none: average image", "0", "–", f"{found.average:.1f}", *rest])
    rows.append(["label only: average of its class", "–", "–", average, *rest])
    headings = ["message", "bytes", "PSNR first", "last", "best", "label", "twins"]
    print_table(headings, rows, text=("message",))
    if page:
        typer.echo(f"page: {link_to(found.report(out, command=command_of(context)))}")
    else:
        typer.echo(f"picture: {link_to(found.picture(out))}")


@audit_app.command("hostile")
def audit_hostile_command(
    context: typer.Context,
    data: Annotated[
        str,
        Argument(
            metavar="[DATA]", help="Labelled rows: a set that `foedus data list` shows, or a file."
        ),
    ] = "digits",
    attack: Annotated[
        list[str] | None,
        Option(help="One of the attacks; may be repeated. The default is all six."),
    ] = None,
    clients: Annotated[int, Option(help="How many clients.")] = 20,
    seed: Annotated[
        int, Option(help="Seed of the division, the training and the choice of hostile clients.")
    ] = 0,
    quick: Annotated[
        bool, Option("--quick", help="Fewer rounds, and 20% and 40% hostile clients only.")
    ] = False,
    out: Out = None,
) -> None:
    """Train with 0 to 40% hostile clients, by plain and robust means.

    Numbers are accuracies after the last round, of FedAvg, and of FedFW with and without its
    membership check. 20 clients, Dirichlet(1.0); a linear model. It takes about a minute on one
    core.

    Examples:

        foedus audit hostile

        foedus audit hostile mnist --attack scale --attack nan --out page.html
    """
    from foedus.audit.hostility import audit_hostile
    from foedus.base.threads import one_thread

    _check_page(out)
    with one_thread():
        found = audit_hostile(data, attacks=attack, clients=clients, seed=seed, quick=quick)
    size = f"{found.rows:,} training rows, {clients} clients"
    typer.echo(f"{found.data}: {size}; accuracy after the last round")
    print_table(found.headings, found.table(), text=("attack", "method"))
    if out:
        typer.echo(f"page: {link_to(found.report(out, command=command_of(context)))}")


@audit_app.command("privacy")
def audit_privacy_command(
    context: typer.Context,
    study: Annotated[
        list[str] | None,
        Argument(
            metavar="[STUDY]...", help="utility, membership or leakage. The default is all three."
        ),
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Smaller, in seconds.")] = False,
    out: Out = None,
) -> None:
    """Measure cost and effect of differential privacy.

    utility: test accuracy of FedAvg, FedFW, FedBoost and FedNewton by epsilon (pendigits, 1,000
    clients). membership: how well the loss on canaries tells which of them took part (digits).
    leakage: PSNR of an image that is rebuilt from a message with noise (digits).

    Examples:

        foedus audit privacy --quick

        foedus audit privacy membership --out page.html
    """
    from foedus.audit.privacy import STUDIES, TITLES
    from foedus.audit.privacy import study as measure
    from foedus.base.threads import one_thread
    from foedus.errors import unknown

    for name in study or ():
        if name not in STUDIES:
            raise ConfigError(unknown("study", name, list(STUDIES)))
    _check_page(out)
    found = {}
    for name in dict.fromkeys(study or STUDIES):
        with one_thread():
            found[name] = table = measure(name, quick)
        typer.echo(TITLES[name])
        forms = {c: "g" if c in ("epsilon", "noise") else ".3f" for c in table}
        shown = [
            [v if isinstance(v, str) else format(v, forms[c]) for c, v in row.items()]
            for row in table.to_dict("records")
        ]
        print_table(list(table.columns), shown, text=("algorithm",))
        typer.echo("")
    if out:
        from foedus.audit.pages import privacy
        from foedus.report.html import write_page

        typer.echo(f"page: {link_to(write_page(out, privacy(found, None, command_of(context))))}")


def _check_page(out: Path | None) -> None:
    if out is not None:
        require_plots()
        check_writable(out, "--out")
