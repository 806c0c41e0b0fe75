"""Cost and effect of differential privacy, measured: `foedus audit privacy`.

utility       test accuracy of FedAvg, FedFW, FedBoost and FedNewton against epsilon
membership    canaries, clients with a row of noise and a label of chance, are in the federation or
              not; who has the model guesses which, by the loss on their rows
leakage       how much of an image the deep leakage attack rebuilds from a message with noise on it
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from foedus.aggregation.dp.accounting import noise_for
from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.algorithms import FedAvg, FedBoost, FedFW, FedNewton
from foedus.audit.leakage import audit_leakage
from foedus.core.algorithm import Algorithm
from foedus.core.participation import Poisson
from foedus.core.run import run
from foedus.data import Data, Federation, load, split
from foedus.geometry import L2Ball
from foedus.models import Classifiers, Linear, RandomFourier

if TYPE_CHECKING:
    import pandas as pd

DELTA = 1e-5
EPSILONS = (math.inf, 8.0, 2.0, 0.5, 0.1)


@dataclass(frozen=True)
class Trial:
    """An algorithm, its rounds, the norms of its replies, and its averages a round and before."""

    algorithm: Algorithm
    rounds: int
    clip: float | tuple[tuple[str, float], ...]
    exchanges: int = 1
    start: int = 0

    def private(self, epsilon: float, probability: float = 1.0) -> DifferentialPrivacy | None:
        """Noise for this epsilon over all rounds; none at all for an infinite one."""
        if math.isinf(epsilon):
            return None
        counts: dict[str, Any] = {"exchanges": self.exchanges, "start": self.start}
        noise = noise_for(epsilon, DELTA, self.rounds, probability=probability, **counts)
        return DifferentialPrivacy(self.clip, noise, DELTA, budget=epsilon)


def trials(data: Data, public: Data) -> dict[str, Trial]:
    """The four algorithms, configured for data with few features.

    FedBoost's predictors are trees, each fitted on a few public rows.
    """
    from sklearn.base import clone
    from sklearn.tree import DecisionTreeClassifier

    classes = data.classes
    assert classes is not None
    parts = np.array_split(np.random.default_rng(0).permutation(len(public.x_train)), 12)
    tree = DecisionTreeClassifier(max_depth=6, random_state=0)
    trees = [clone(tree).fit(public.x_train[p], public.y_train[p]) for p in parts]
    boost = FedBoost(Classifiers(trees, classes), sampling="all", measure_every=0)
    newton = FedNewton(RandomFourier(100, bandwidth=2.0, unbiased=True), reg=0.1)
    clips = (("solve", 1.0), ("gradient", 0.2), ("direction", 1.0))
    return {
        "FedAvg": Trial(FedAvg(Linear(), lr=4.0, steps=3, batch_size=None), 10, 4.0),
        "FedFW": Trial(FedFW(Linear(), L2Ball(10.0), penalty=1e-5, measure_every=0), 20, 10.0),
        "FedBoost": Trial(boost, 10, 5.0),
        "FedNewton": Trial(newton, 2, clips, exchanges=2, start=1),
    }


def utility(
    data: str = "pendigits",
    clients: int = 1000,
    epsilons: Iterable[float] = EPSILONS,
    repeats: int = 3,
    seed: int = 0,
) -> pd.DataFrame:
    """Test accuracy at each epsilon, for delta = 1e-5: the mean over `repeats` runs of the four.

    A twelfth of the rows is public, for FedBoost's predictors; the rest is divided among the
    clients at random.
    """
    import pandas as pd

    whole = load(data)
    own = np.random.default_rng(seed).permutation(len(whole.x_train)) < len(whole.x_train) // 12
    whole = replace(whole, groups_train=None, groups_test=None)
    private, public = (
        replace(whole, x_train=whole.x_train[rows], y_train=whole.y_train[rows])
        for rows in (~own, own)
    )
    fed = split(private, "iid", clients=min(clients, len(private.x_train)), seed=seed)
    rows = []
    for name, trial in trials(private, public).items():
        row: dict[str, float | str] = {"algorithm": name}
        for epsilon in epsilons:
            mean, last = trial.private(epsilon), trial.rounds
            start = partial(run, trial.algorithm, fed, last, aggregation=mean, evaluate_every=last)
            runs = [start(seed=s) for s in range(repeats if mean else 1)]
            row[_column(epsilon)] = float(np.mean([r.records.last("accuracy") for r in runs]))
        rows.append(row)
    return pd.DataFrame(rows)


def membership(
    data: str = "digits",
    clients: int = 100,
    canaries: int = 100,
    epsilons: Iterable[float] = EPSILONS,
    repeats: int = 4,
    seed: int = 0,
) -> pd.DataFrame:
    """How well a threshold on the loss tells canaries that took part from others, by epsilon.

    Each of the canaries is in the federation with probability 1/2, beside `clients` honest ones;
    all take part in a round with probability 1/2, and FedAvg trains a linear model. advantage: the
    largest difference of true and false positive rates over all thresholds. auc: the probability
    that a canary that took part has the smaller loss. chance: the advantage that 95 of 100 random
    guesses stay below. bound: the largest that (epsilon, delta) allows, (e^epsilon - 1 + 2 delta) /
    (e^epsilon + 1).
    """
    import pandas as pd
    from sklearn.metrics import roc_auc_score

    whole = load(data)
    rows = []
    trial = Trial(FedAvg(Linear(), lr=0.5, steps=5, batch_size=None, weights="uniform"), 20, 2.0)
    guess = np.random.default_rng(seed + 1)
    for epsilon in epsilons:
        options: dict[str, Any] = {"seed": seed, "evaluate_every": trial.rounds}
        options |= {"participation": Poisson(0.5), "aggregation": trial.private(epsilon, 0.5)}
        inside, losses, accuracy = [], [], []
        for fed, x, y, member in _with_canaries(whole, clients, canaries, repeats, seed):
            trained = run(trial.algorithm, fed, trial.rounds, **options)
            # probabilities would underflow, and tie
            logs = trained.model.outputs(x).double().log_softmax(-1).numpy()
            inside.append(member)
            losses.append(-logs[np.arange(len(y)), y])
            accuracy.append(trained.records.last("accuracy"))
        member, loss = np.concatenate(inside), np.concatenate(losses)
        lots = (guess.random(len(member)) for _ in range(200))
        bound = 1.0
        if math.isfinite(epsilon):
            bound = (math.expm1(epsilon) + 2 * DELTA) / (math.exp(epsilon) + 1)
        rows.append(
            {
                "epsilon": epsilon,
                "advantage": _advantage(member, -loss),
                "auc": float(roc_auc_score(member, -loss)),
                "chance": float(np.quantile([_advantage(member, lot) for lot in lots], 0.95)),
                "bound": bound,
                "accuracy": float(np.mean(accuracy)),
            }
        )
    return pd.DataFrame(rows)


def _advantage(member: np.ndarray, score: np.ndarray) -> float:
    """The largest difference of true and false positive rates over all thresholds."""
    from sklearn.metrics import roc_curve

    false, true, _ = roc_curve(member, score)
    return float((true - false).max())


def _with_canaries(
    data: Data, clients: int, canaries: int, repeats: int, seed: int
) -> Iterator[tuple[Federation, np.ndarray, np.ndarray, np.ndarray]]:
    """Federations with about half of the canaries; all canaries' rows, labels, and who is in."""
    draws = np.random.default_rng(seed)
    parts = np.array_split(draws.permutation(len(data.x_train)), clients)
    honest = [(data.x_train[p], data.y_train[p]) for p in parts]
    for _ in range(repeats):
        x = draws.standard_normal((canaries, *data.x_train.shape[1:])).astype(np.float32) * 2
        y = draws.integers(0, data.classes, canaries)
        member = draws.random(canaries) < 0.5
        odd = [(x[i : i + 1], y[i : i + 1]) for i in np.flatnonzero(member)]
        sites, test = [*honest, *odd], (data.x_test, data.y_test)
        fed = Federation.from_clients(sites, test=test, classes=data.classes, name=data.name)
        yield fed, x, y, member


def leakage(
    data: str = "digits",
    image: int = 0,
    noises: Iterable[float] = (0.0, 0.003, 0.03, 0.3),
    iterations: int = 150,
    seed: int = 0,
) -> pd.DataFrame:
    """PSNR of what is rebuilt from a gradient and from FedFW's extreme points, by the noise.

    The noise is `noise` of `fd.DifferentialPrivacy` for a single client: its standard deviation
    divided by the norm of the message.
    """
    import pandas as pd

    rows: list[dict[str, float]] = []
    options: dict[str, Any] = {"iterations": iterations, "seed": seed}
    options |= {"restarts": 1, "others": 0, "progress": False}
    for noise in noises:
        found = audit_leakage(data, image, message_noise=noise, **options)
        ends = {name: r.psnr[-1] for name, r in found.messages.items()}
        rows.append({"noise": noise, **ends, "average image": found.average})
    return pd.DataFrame(rows)


def _column(epsilon: float) -> str:
    return "no noise" if math.isinf(epsilon) else f"{epsilon:g}"


STUDIES: dict[str, Callable[..., pd.DataFrame]] = {
    "utility": utility,
    "membership": membership,
    "leakage": leakage,
}
TITLES = {
    "utility": f"utility: test accuracy by epsilon, at delta = {DELTA:g}",
    "membership": f"membership: guesses of who took part, by epsilon at delta = {DELTA:g}",
    "leakage": "leakage: PSNR (dB) of what is rebuilt from a message, by the noise on it",
}
QUICK: dict[str, dict] = {
    "utility": {"clients": 500, "epsilons": (math.inf, 1.0), "repeats": 1},
    "membership": {"epsilons": (math.inf, 1.0), "repeats": 1},
    "leakage": {"noises": (0.0, 0.03), "iterations": 30},
}


def study(name: str, quick: bool = False, **settings: object) -> pd.DataFrame:
    """Run one of the three audits, in about a minute, or a smaller version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FedNewton may diverge with noise: that is measured here
        return STUDIES[name](**({**QUICK[name], **settings} if quick else settings))
