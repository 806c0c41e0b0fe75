"""Deep leakage: how much of an image can be rebuilt from one message about it.

Zhu, Liu and Han, "Deep Leakage from Gradients", NeurIPS 2019 (DLG), as in Figure 1 of Dadras,
Banerjee, Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm". A client holds one image x with
label y, and sends a message m(g) made from the gradient g = grad_w loss(w; x, y). The observer
knows the network, its parameters w and the rule m, and looks for an image x' and a soft label y'
whose gradient g' explains the message:

    minimize over x', y':   mismatch(m(g), g'),   g' = grad_w loss(w; x', y')

by L-BFGS from a random image, with restarts. The mismatch depends on the message:

    gradient        |g' - g|^2 / |g|^2
    L2 ball         1 - cos(g', -s): s = -r g / |g| keeps the direction
    L1 ball         -log softmax(z)_i over the 2 n signed entries z = (g', -g') / rms(g'), i the
                    entry and sign that s shows
    simplex         the same over the n entries of -g' / rms(g')
    any other set   (<g', s> - min over u in D of <g', u>) / (diameter |g'|), the Frank-Wolfe gap
                    of s at g'

For one entry of an L1 ball, m(g') does not change with x' almost everywhere, and comparing it with
m(g) would have no gradient to follow: an attack on it would fail whatever the message reveals. The
softmax has a gradient everywhere. It requires that the observed entry be the largest in magnitude,
with its sign, and by a wide margin. The gap of the other sets is zero exactly where s is an answer
of the oracle for g', and its slope is s minus that answer.

The observer first reads the label from the last layer where it can (Zhao, Mopuri and Bilen, "iDLG",
2020): with cross-entropy, the derivative in the bias of class c is p_c - [c = y], negative for the
true label only. An extreme point shows it too, often even one with a single entry.

Limits. This is one attack, on one image, at one point w. If it fails, others may still succeed:
they could have priors about images, see many rounds, or know more. It gives no guarantee, unlike
differential privacy. A success proves that the message leaks. `Reconstruction.twins` is a statement
about the message and not about the attack: how many other images of the data set would have sent
the same one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional as F

from foedus import wire
from foedus.algorithms.fedfw.points import noisy
from foedus.base import markup, random
from foedus.base.settings import Means, check_value
from foedus.base.spec import Spec
from foedus.data import Data, load
from foedus.errors import ConfigError, DataError
from foedus.geometry import Domain, L1Ball, L2Ball, ModelDomain, domain_of
from foedus.models.base import Model, Params, model_of
from foedus.report.text import bar

if TYPE_CHECKING:
    import pandas as pd

from foedus.audit.attack import (
    ENOUGH,
    Guess,
    Reconstruction,
    SigmoidLeNet,
    attack,
    blurred,
    gradient,
    label_shown,
    message,
    mismatch,
    opened,
    psnr,
)

_SMALLEST = 64  # pixels: flat rows with fewer features are not treated as images
_CHUNK = 1 << 22  # gradient entries that are held at a time
_SAME = 1e-5  # messages that differ by less, relatively, are the same


@dataclass(frozen=True, eq=False)
class Leakage:
    """How much of one image each message revealed.

    Attributes:
        data: Name of the data.
        index: The training row.
        original: The image, in [0, 1].
        label: Its label.
        messages: By name, what an observer of the message reconstructed.
        average: PSNR of a guess that needs no message: the average image of the training rows,
            without the image itself.
        class_average: PSNR of a guess that needs only the label: the average of the rows with the
            same label, without the image itself.
        others: Number of other training images among which `twins` were looked for.

    Example:
        >>> attack = {"messages": {"gradient": None}, "iterations": 5, "restarts": 1, "others": 10}
        >>> found = fd.audit_leakage("digits", **attack)
        >>> found.table().columns.tolist()[:2]
        ['message', 'bytes']
    """

    data: str
    index: int
    original: Tensor
    label: int
    messages: dict[str, Reconstruction]
    average: float
    class_average: float
    others: int

    def table(self) -> pd.DataFrame:
        """A row for each message, then the guesses that need no attack.

        psnr_best is over iterations: the observer cannot choose it.
        """
        import pandas as pd

        rows = [
            {
                "message": name,
                "bytes": r.bytes,
                "psnr_first": r.psnr[0],
                "psnr_last": r.psnr[-1],
                "psnr_best": max(r.psnr),
                "loss": r.loss[-1],
                "iterations": len(r.psnr) - 1,
                "label": r.label,
                "label_right": r.label == self.label,
                "label_shown": r.label_shown,
                "explained": r.explained,
                "twins": r.twins,
            }
            for name, r in self.messages.items()
        ]
        average, label = "none: average image", "label only: average of its class"
        rows.append({"message": average, "bytes": 0, "psnr_last": self.average})
        rows.append({"message": label, "bytes": None, "psnr_last": self.class_average})
        types = dict.fromkeys(("bytes", "iterations", "label", "twins"), "Int64")
        types |= dict.fromkeys(("label_right", "label_shown", "explained"), "boolean")
        return pd.DataFrame(rows).astype(types)

    def _repr_html_(self) -> str:
        """For notebooks: how close the best guess from each message is."""
        rows: list[list[object]] = [
            [
                name,
                f"{r.bytes:,}",
                f"{r.psnr[-1]:.1f}",
                markup.curve(enumerate(r.psnr), f"PSNR of {name} by iteration"),
            ]
            for name, r in self.messages.items()
        ]
        rows.append(["none: average image", "0", f"{self.average:.1f}", ""])
        rows.append(["label only: average of its class", "–", f"{self.class_average:.1f}", ""])
        return markup.box(
            f"{self.data}: image {self.index}, guessed from what a client sends",
            markup.table(["message", "bytes", "PSNR, dB", "by iteration"], rows),
        )

    def report(self, path: str | os.PathLike, title: str | None = None, command: str = "") -> Path:
        """Write one self-contained HTML page: curves of the attack, images, a table.

        Needs matplotlib.

        Args:
            path: The file.
            title: Of the page; by default the name of the data.
            command: The command that makes the page again, to be shown on it.

        Returns:
            The path of the file.
        """
        from foedus.audit import pages
        from foedus.report.html import write_page

        return write_page(path, pages.leakage(self, title, command))

    def picture(self, path: str | os.PathLike) -> Path:
        """Write the original, guesses over iterations and PSNR curves as SVG or PNG.

        Needs matplotlib.
        """
        from foedus.report.plots import check_picture, require_matplotlib, styles

        path = Path(path)
        check_picture(path)
        require_matplotlib()
        import matplotlib
        from matplotlib.figure import Figure

        columns = 1 + max(len(r.shots) for r in self.messages.values())
        rows = len(self.messages)
        look: dict[Any, Any] = {"font.family": "sans-serif", "font.size": 9}
        with matplotlib.rc_context(look | {"svg.hashsalt": "foedus", "text.parse_math": False}):
            size = (1.25 * columns + 4.2, max(2.8, 1.55 * rows))
            figure = Figure(figsize=size, layout="constrained")
            grid = figure.add_gridspec(rows, columns + 1, width_ratios=[1] * columns + [3.2])
            for i, (name, found) in enumerate(self.messages.items()):
                shots = {f"iteration {n}": shot for n, shot in found.shots.items()}
                for j, (title, shot) in enumerate({"original": self.original, **shots}.items()):
                    ax = figure.add_subplot(grid[i, j])
                    pixels = shot.permute(1, 2, 0).squeeze(-1).numpy()
                    ax.imshow(pixels, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
                    ax.set(xticks=[], yticks=[])
                    ax.set_title(title, fontsize=8)
                    if j == 0:
                        ax.set_ylabel(name)
            ax = figure.add_subplot(grid[:, columns])
            for name, style in styles(list(self.messages)).items():
                line: dict[str, Any] = {"color": style.colour, "linestyle": style.dash}
                ax.plot(self.messages[name].psnr, label=name, **line)
            for value, name, dash in (
                (self.average, "average image", ":"),
                (self.class_average, "average of its class", "-."),
            ):
                ax.axhline(value, color="#777777", linewidth=0.9, linestyle=dash, label=name)
            ax.set(xlabel="iteration", ylabel="PSNR (dB)")
            ax.grid(color="#e3e3e3")
            ax.legend(frameon=False, fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            svg = path.suffix.lower() == ".svg"
            figure.savefig(path, dpi=150, metadata={"Date": None} if svg else None)
        return path


# -- the audit -------------------------------------------------------------------------------------


def audit_leakage(
    data: str | os.PathLike | Data = "digits",
    image: int = 0,
    *,
    messages: Mapping[str, Domain | ModelDomain | None] | None = None,
    radius: float = 1.0,
    model: Model | torch.nn.Module | None = None,
    iterations: int = 300,
    restarts: int = 2,
    noise: float = 0.0,
    message_noise: float = 0.0,
    label: str = "infer",
    others: int = 1000,
    seed: int = 0,
    progress: bool | None = None,
) -> Leakage:
    """Try to rebuild one training image from each of several messages (deep leakage).

    An observer who knows the network, its parameters and the rule of the message looks for an image
    whose gradient explains the message, by L-BFGS from random images (`foedus.audit.leakage`).

    Args:
        data: A name or file of images with labels, or a `fd.Data` whose pixels were not scaled one
            by one.
        image: The training row.
        messages: {name: set}, `None` for the gradient itself; by default the gradient and the L2
            and L1 balls of `radius`.
        radius: The radius of the default sets.
        model: The network; smooth ones serve the observer best, and the default is DLG's LeNet with
            sigmoids.
        iterations: Steps of an attack.
        restarts: Random starts; fewer if one explains the message.
        noise: Standard deviation of noise on the gradient before a message is made of it, relative
            to its root mean square, as in `fd.FedFW`.
        message_noise: Standard deviation of normal noise on every number of the message, relative
            to its norm: what `fd.DifferentialPrivacy` of this `noise` releases of a single client
            (`explained` and `twins` are of the message without it).
        label: "infer" reads it from the last layer if possible, "optimise" searches for it together
            with the image, as DLG does.
        others: Number of training images among which to look for some that send the same message.
        seed: Seed of the network, the starts and the noise.
        progress: Whether to show a bar; by default only on a terminal.

    Returns:
        The reconstructions and how close they are.

    Example:
        >>> found = fd.audit_leakage("digits", image=3, iterations=30, restarts=1, others=10)
        >>> table = found.table()
        >>> len(table) >= 3
        True

    Reference: Zhu, Liu and Han, "Deep leakage from gradients", NeurIPS 2019; Dadras, Banerjee,
    Prakhya and Yurtsever, "Federated Frank-Wolfe Algorithm", Figure 1.
    """
    check_value("iterations", iterations, Annotated[int, Ge(1)])
    check_value("restarts", restarts, Annotated[int, Ge(1)])
    check_value("label", label, Literal["infer", "optimise"])
    check_value("noise", noise, Annotated[float, Ge(0)])
    check_value("message_noise", message_noise, Annotated[float, Ge(0)])
    integer = Annotated[int, Ge(0), Lt(2**63), Means("an integer from 0 to 2^63 - 1")]
    for name, value in (("seed", seed), ("others", others)):
        check_value(name, value, integer)
    if messages is None:
        messages = {"gradient": None, "L2 ball": L2Ball(radius), "L1 ball": L1Ball(radius)}
    if not isinstance(messages, Mapping):
        raise ConfigError(
            f"messages={messages!r} must be a dict {{name: set}}, with None for the gradient itself"
        )
    if not messages:
        raise ConfigError(
            "messages={} must name at least one message, such as {'L1': fd.L1Ball(1.0)}"
        )
    sets = {k: None if domain is None else domain_of(domain) for k, domain in messages.items()}
    name, images, labels, classes = _images(data)
    allowed = Means(f"a training row of {name!r}, from 0 to {len(images) - 1}")
    check_value("image", image, Annotated[int, Ge(0), Lt(len(images)), allowed])

    key = random.key(int(seed))
    original, true = images[image], int(labels[image])
    spec = Spec(tuple(original.shape), classes, classes)
    model = SigmoidLeNet() if model is None else model_of(model)
    model.check(spec)
    params = model.init(spec, random.fold(key, 0))
    for constraint in filter(None, sets.values()):
        constraint.check(params)
    g = gradient(model, params, original, F.one_hot(torch.tensor(true), classes).float())
    g = noisy(g, noise, random.fold(key, 1))
    sent = {name: message(g, domain) for name, domain in sets.items()}
    rest = torch.cat((torch.arange(image), torch.arange(image + 1, len(images))))
    picked = rest[random.permutation(random.fold(key, 2), len(rest))[:others]]
    twins = _twins(model, params, images[picked], labels[picked], sent, sets)

    precise = {name: p.double() for name, p in params.items()}
    found = {}
    with bar(len(sets) * restarts * iterations, progress) as advance:
        for number, (kind, domain) in enumerate(sets.items()):
            exact = opened(sent[kind], domain, params)
            seen = blurred(exact, message_noise, random.fold(key, 4, number))
            shown = label_shown(seen, domain, classes) if label == "infer" else None
            distance = mismatch(seen, domain)

            def explain(
                x: Tensor, soft: Tensor, distance: Callable[[Params], Tensor] = distance
            ) -> Tensor:
                return distance(gradient(model, precise, x, soft, graph=True))

            trails = []
            for restart in range(restarts):
                start = random.fold(key, 3, restart)  # the same starts for every message
                guesses = attack(
                    explain, spec.shape, classes, key=start, iterations=iterations, label=shown
                )
                tick = functools.partial(advance, kind, 1)
                trails.append(_follow(guesses, original, iterations, tick))
                advance(kind, iterations + 1 - len(trails[-1].loss))
                if trails[-1].loss and trails[-1].loss[-1] < ENOUGH:
                    advance(kind, (restarts - 1 - restart) * iterations)
                    break
            best = min((t for t in trails if t.loss), key=lambda t: t.loss[-1], default=None)
            if best is None:
                raise ConfigError(
                    f"the attack on {kind!r} found no finite number: check the model, {model!r}, "
                    "and its parameters"
                )
            assert best.guess is not None  # made with its loss
            guess = best.guess.image[None], torch.tensor([best.guess.label])
            alike = _twins(model, params, *guess, {kind: sent[kind]}, {kind: domain})
            floats = {k: t.float() for k, t in seen.items()}
            found[kind] = Reconstruction(
                bytes=wire.nbytes(floats if message_noise else sent[kind]),
                psnr=best.psnr,
                loss=best.loss,
                image=best.guess.image,
                shots=best.shots,
                label=best.guess.label,
                label_shown=shown is not None,
                explained=bool(alike[kind]),
                twins=twins[kind],
            )
    average = psnr(images[rest].mean(0), original) if len(rest) else math.nan
    same = rest[labels[rest] == true]
    class_average = psnr(images[same].mean(0), original) if len(same) else math.nan
    return Leakage(name, int(image), original, true, found, average, class_average, len(picked))


@dataclass
class _Trail:
    """One start: the numbers after every iteration, a few images, and the last guess."""

    psnr: list[float]
    loss: list[float]
    shots: dict[int, Tensor]
    guess: Guess | None = None


def _follow(
    guesses: Iterator[Guess], original: Tensor, iterations: int, tick: Callable[[], None]
) -> _Trail:
    trail = _Trail([], [], {})
    keep = {0, *(round(iterations ** (part / 4)) for part in (2, 3, 4))}
    for n, guess in enumerate(guesses):
        trail.psnr.append(psnr(guess.image, original))
        trail.loss.append(guess.loss)
        trail.guess = guess
        if n in keep:
            trail.shots[n] = guess.image
        if n:
            tick()
    if trail.guess is not None:
        trail.shots[len(trail.loss) - 1] = trail.guess.image
    return trail


def _twins(
    model: Model,
    params: Params,
    images: Tensor,
    labels: Tensor,
    sent: Mapping[str, Any],
    sets: Mapping[str, ModelDomain | None],
) -> dict[str, int]:
    """For each message, how many of these images send the same one (without noise)."""

    def loss(p: Params, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model.apply(p, x.unsqueeze(0)), y.unsqueeze(0))

    step = max(1, _CHUNK // sum(p.numel() for p in params.values()))
    counts = dict.fromkeys(sets, 0)
    slopes = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    for x, y in zip(images.split(step), labels.split(step), strict=True) if len(images) else ():
        g = slopes(params, x, y)
        for name, domain in sets.items():
            theirs = g if domain is None else domain.dense(domain.lmo(g, batch=1), params)
            ours = opened(sent[name], domain, params)
            gaps = ((theirs[k].double() - t).square() for k, t in ours.items())
            apart = sum(gap.flatten(1).sum(-1) for gap in gaps)
            size = sum(t.square().sum() for t in ours.values())
            counts[name] += int(cast("Tensor", apart <= _SAME**2 * size).sum())
    return counts


def _images(data: str | os.PathLike | Data) -> tuple[str, Tensor, Tensor, int]:
    """Name, training images (n, channels, height, width) in [0, 1], labels, number of classes."""
    if not isinstance(data, Data):
        data = load(data, scale=None)
    elif data.scaling not in (None, "unit"):
        raise DataError(
            f"{data.name!r} was scaled feature by feature ({data.scaling}), so its rows are no "
            f"pictures any more: pass the name, or fd.load({data.name!r}, scale=None)"
        )
    if data.classes is None:
        needed = "the audit needs images with class labels, such as 'digits'"
        raise DataError(f"{data.name!r} has real targets; {needed}")
    if data.spec.steps:
        raise DataError(
            f"rows of {data.name!r} have {data.spec.steps} labels each; the audit needs images "
            "with one class label, such as 'digits'"
        )
    shape = data.x_train.shape[1:]
    side = math.isqrt(math.prod(shape))
    if len(shape) == 1 and side * side == shape[0] >= _SMALLEST:
        shape = (1, side, side)
    elif len(shape) == 2:
        shape = (1, *shape)
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"rows of {data.name!r} have shape {tuple(shape)} and are not images: (height, width), "
            "(1 or 3, height, width), or a "
            f"square number of at least {_SMALLEST} features, such as 'digits'"
        )
    x = torch.as_tensor(data.x_train).float()
    low, high = float(x.min()), float(x.max())
    if low == high:
        raise DataError(f"all pixels of {data.name!r} are {low:g}: there is nothing to rebuild")
    images = ((x - low) / (high - low)).reshape(len(x), *shape)
    return data.name, images, torch.as_tensor(data.y_train), data.classes
