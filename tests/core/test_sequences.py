"""Labels of each step of a sequence, (n, t): training against plain PyTorch, evaluation by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score, log_loss
from torch import nn
from torch.utils.data import TensorDataset

import foedus as fd
from foedus import testing
from foedus.base import tree
from foedus.diagnosis.heterogeneity import heterogeneity

CLASSES, STEPS = 5, 6


class Tagger(nn.Module):
    """Characters in, one of the classes at every step out."""

    def __init__(self, kind=nn.GRU, classes=CLASSES):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.recurrent = kind(4, 7, batch_first=True)
        self.out = nn.Linear(7, classes)

    def forward(self, x):
        return self.out(self.recurrent(self.embedding(x))[0])


def tagger(kind=nn.GRU, **options):
    torch.manual_seed(0)
    return Tagger(kind, **options)


def rows(n=23, ragged=True, seed=0):
    """x, and labels that depend on this step and the one before; sequences of 1 to 6 steps."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, CLASSES, (n, STEPS))
    y = (x + 2 * np.roll(x, 1, 1)) % CLASSES
    if ragged:
        y[np.arange(STEPS) >= rng.integers(1, STEPS + 1, n)[:, None]] = -100
    return x, y


def federation(sizes=(9, 5, 7, 2), **options):
    x, y = rows(sum(sizes), **options)
    cuts = np.cumsum(sizes)[:-1]
    clients = list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))
    return fd.Federation.from_clients(clients, test=[(a[:2], b[:2]) for a, b in clients])


def by_torch(net, x, y, objective, steps=3, lr=0.5):
    """Plain PyTorch: gradient descent on all rows."""
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        objective(net(x), y).backward()
        optimizer.step()
    return dict(net.named_parameters())


def by_foedus(net, fed, **options):
    algorithm = fd.FedAvg(net, lr=0.5, steps=3, batch_size=None, **options)
    return dict(fd.run(algorithm, fed, 1).model.to_torch().named_parameters())


def alike(one, other, within=1e-6):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], atol=within, rtol=1e-4, msg=name)


def every_step(outputs, y):
    return nn.CrossEntropyLoss()(outputs.flatten(0, 1), y.flatten())


def every_row(outputs, y):
    """The mean over rows of the mean over a row's steps: a row counts once, whatever its length."""
    return torch.stack(
        [F.cross_entropy(o, labels) for o, labels in zip(outputs, y, strict=True)]
    ).mean()


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_sequences_of_one_length_are_trained_as_by_torch(kind):
    x, y = rows(ragged=False)
    fed = fd.Federation.from_clients([(x, y)], test=(x, y))
    alike(by_foedus(tagger(kind), fed), by_torch(tagger(kind), x, y, every_step))


def test_a_row_counts_once_whatever_its_length():
    x, y = rows()
    fed = fd.Federation.from_clients([(x, y)], test=(x, y))
    found = by_foedus(tagger(), fed)
    alike(found, by_torch(tagger(), x, y, every_row))
    other = by_torch(tagger(), x, y, every_step)
    assert not torch.allclose(found["out.weight"], other["out.weight"], atol=1e-4)


def test_weights_of_rows_make_every_step_count_alike():
    """CrossEntropyLoss on all steps: sum over steps / number of steps."""
    x, y = rows()
    length = (y != -100).sum(1)
    fed = fd.Federation.from_clients([(x, y, length)], test=(x, y, length))
    alike(by_foedus(tagger(), fed), by_torch(tagger(), x, y, every_step))
    run = fd.run(fd.FedAvg(tagger()), fed, 0)
    right = (run.model.predict(x) == y)[y != -100]
    assert run.records.last("accuracy") == pytest.approx(right.mean(), abs=1e-12)
    outputs = tagger()(torch.from_numpy(x)).detach()
    want = every_step(outputs, torch.from_numpy(y)).item()
    assert run.records.last("loss") == pytest.approx(want, rel=1e-5)


def test_ignored_steps_do_not_matter():
    """Whatever stands in the input of a step that is behind the last label."""
    x, y = rows()
    other = np.where(y == -100, (x + 1) % CLASSES, x)
    assert (other != x).any()
    found = [
        by_foedus(tagger(), fd.Federation.from_clients([(a, y)], test=(x, y))) for a in (x, other)
    ]
    alike(*found, within=1e-7)


def states_of(run):
    """Of each client, however they are kept."""
    states = run.client_states()
    return [states.get(i) for i in range(len(run.clients["ids"]))]


OWN = {"fd.FedPer": {"shared": "embedding.* recurrent.*"}, "fd.FedRep": {"shared": "embedding.*"}}
ALGORITHMS = [
    fd.FedAvg, fd.FedProx, fd.Scaffold, fd.FedDyn, fd.FedAdam, fd.FedNova, fd.FineTuned, fd.Ditto,
    fd.FedPer, fd.FedRep, fd.Independent, fd.Central, fd.FedDR, fd.ProjectedFedAvg,
]  # fmt: skip


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda k: k.__name__)
def test_batched_or_looped_sequences_are_learned_alike(kind):
    algorithm = kind(tagger(), lr=0.3, batch_size=4, **OWN.get(f"fd.{kind.__name__}", {}))
    found = [
        fd.run(
            algorithm, federation(), 3, participation=0.5, engine=fd.Local(batch=batch),
            metrics=["log_loss"],
        )
        for batch in (True, False)
    ]  # fmt: skip
    for a, b in zip(*(tree.leaves((r.state, states_of(r))) for r in found), strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
    one, two = (r.history.select_dtypes("number").drop(columns="seconds") for r in found)
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


def test_every_check_of_an_algorithm_holds():
    testing.check_algorithm(fd.FedAvg(tagger(), lr=0.3, batch_size=4), federation())


def test_dropout_in_a_sequence_model():
    net = nn.Sequential(nn.Embedding(CLASSES, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))
    found = [
        fd.run(fd.FedAvg(net, batch_size=4), federation(), 2, engine=fd.Local(batch=batch))
        for batch in (True, False)
    ]
    alike(*(r.state.w for r in found), within=1e-5)


def test_an_lstm_is_trained_one_client_after_the_other():
    """PyTorch has no batched LSTM; asked for, it is the same."""
    assert not fd.Module(tagger(nn.LSTM)).batchable and fd.Module(tagger()).batchable
    algorithm = fd.FineTuned(tagger(nn.LSTM), lr=0.3, batch_size=4)
    runs = [fd.run(algorithm, federation(), 1)]
    with pytest.warns(UserWarning, match="performance drop"):
        runs.append(fd.run(algorithm, federation(), 1, engine=fd.Local(batch=True)))
    alike(*(r.state.w for r in runs), within=1e-5)
    one, two = (r.records.last("own_loss") for r in runs)
    assert one == pytest.approx(two, rel=1e-5)


def test_noise_of_differential_privacy_has_the_form_of_a_reply():
    privacy = fd.DifferentialPrivacy(clip=1.0, noise=0.1, delta=1e-3)
    run = fd.run(fd.FedAvg(tagger(), lr=0.3), federation(), 1, aggregation=privacy)
    assert math.isfinite(run.records.last("loss"))


# -- evaluation ------------------------------------------------------------------------------------


class Same(nn.Module):
    """Says that the class of a step is its character: logit 5, and 0 for the others."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(5 * torch.eye(3))

    def forward(self, x):
        return self.table[x]


X = np.array([[0, 1, 2], [2, 2, 1], [1, 1, 1]])
Y = np.array([[0, 1, -100], [0, 2, 1], [1, 0, 0]])  # right are 2 of 2, 2 of 3 and 1 of 3 steps


def small(**options):
    first, second = (X[:2], Y[:2]), (X[2:], Y[2:])
    return fd.Federation.from_clients([first, second], test=[first, second], classes=3, **options)


def test_accuracy_and_loss_by_hand():
    run = fd.run(fd.FedAvg(Same()), small(), 0, per_client=True)
    assert run.records.last("accuracy") == pytest.approx((2 / 2 + 2 / 3 + 1 / 3) / 3, abs=1e-12)
    right, wrong = math.log(1 + 2 * math.exp(-5)), math.log(math.exp(5) + 2)
    each = [right, (2 * right + wrong) / 3, (right + 2 * wrong) / 3]
    assert run.records.last("loss") == pytest.approx(np.mean(each), rel=1e-6)
    assert run.records.last("accuracy_mean") == pytest.approx(((1 + 2 / 3) / 2 + 1 / 3) / 2)
    assert run.records.last("accuracy_worst") == pytest.approx(1 / 3)
    np.testing.assert_allclose(run.per_client().accuracy, [5 / 6, 1 / 3])
    np.testing.assert_allclose(run.per_client().loss, [np.mean(each[:2]), each[2]], rtol=1e-6)


@pytest.mark.parametrize("batch", [True, False])
def test_own_models_by_hand(batch):
    """Before the first round, each client's own model is the one that all start from."""
    run = fd.run(fd.FineTuned(Same()), small(), 0, engine=fd.Local(batch=batch), metrics=["f1"])
    assert run.records.last("own_accuracy") == pytest.approx((2 / 2 + 2 / 3 + 1 / 3) / 3)
    assert run.records.last("own_accuracy_worst") == pytest.approx(1 / 3)
    alone = fd.run(fd.Independent(Same()), small(), 0, engine=fd.Local(batch=batch))
    assert alone.records.last("accuracy") == pytest.approx((2 / 2 + 2 / 3 + 1 / 3) / 3)
    share = [1 / 2] * 2 + [1 / 3] * 6
    want = f1_score(Y[Y >= 0], X[Y >= 0], average="macro", sample_weight=share)
    assert run.records.last("own_f1") == pytest.approx(want)


def test_metrics_are_given_the_steps_that_count():
    seen = []

    def own(y, p):
        seen.append((y.tolist(), p.shape))
        return float((p.argmax(1) == y).mean())

    metrics = ["f1", "log_loss", "auc", own]
    run = fd.run(fd.FedAvg(Same()), small(), 0, metrics=metrics, per_client=True)
    y, said = Y[Y >= 0], X[Y >= 0]
    assert seen[0] == ([0, 1, 0, 2, 1, 1, 0, 0], (8, 3))
    assert [s[0] for s in seen[1:]] == [[0, 1, 0, 2, 1], [1, 0, 0]]
    assert run.records.last("own") == 5 / 8
    share = [1 / 2] * 2 + [1 / 3] * 6  # the steps of a row count together what the row does
    want = f1_score(y, said, average="macro", sample_weight=share)
    assert run.records.last("f1") == pytest.approx(want)
    p = torch.softmax(5 * torch.eye(3)[said], -1).double().numpy()
    want = log_loss(y, p, sample_weight=share)
    assert run.records.last("log_loss") == pytest.approx(want, rel=1e-6)
    # the first client's rows have 2 and 3 steps, the second's 3
    assert run.per_client().own.tolist() == [4 / 5, 1 / 3]


def test_predictions():
    run = fd.run(fd.FedAvg(Same()), small(), 0)
    assert run.model.predict(X).tolist() == X.tolist()
    assert run.model.predict_proba(X).shape == (3, 3, 3)
    np.testing.assert_allclose(run.model.predict_proba(X).sum(-1), 1, rtol=1e-6)
    assert run.model.outputs(X[:0]).shape == (0, 3, 3)
    assert torch.equal(run.model.to_torch()(torch.from_numpy(X)), run.model.outputs(X))
    # blocks of rows get smaller, as their outputs get larger
    assert run.model.block == 8192 // 3
    with pytest.raises(fd.ModelError, match=r"no estimators of sequences.*to_torch\(\)"):
        run.model.to_sklearn()
    with pytest.raises(fd.ModelError, match=r"compare model\.predict\(x\) with y where y is not"):
        run.model.score(X, Y)


def test_a_saved_run_has_its_steps(tmp_path):
    run = fd.run(fd.FedAvg(fd.Module(tagger()), lr=0.3), federation(), 2)
    run.save(tmp_path / "run.safetensors", card=False)
    loaded = fd.Run.load(tmp_path / "run.safetensors", algorithm=run.algorithm)
    assert loaded.spec == run.spec and loaded.spec.steps == STEPS
    x, _ = rows()
    assert (loaded.model.predict(x) == run.model.predict(x)).all()
    assert "one for each step" in run.card()


# -- losses ----------------------------------------------------------------------------------------


def one_a_step(outputs, y):
    return F.cross_entropy(outputs.transpose(1, 2), y, reduction="none")


def one_a_row(outputs, y):
    each = F.cross_entropy(outputs.transpose(1, 2), y, reduction="none")
    return each.sum(1) / (y != -100).sum(1)


def mean_of_all(outputs, y):
    return F.cross_entropy(outputs.flatten(0, 1), y.flatten())


SAME_LOSS = {
    "module": nn.CrossEntropyLoss(),
    "module by step": nn.CrossEntropyLoss(reduction="none"),
    "step": one_a_step,
    "row": one_a_row,
    "mean": mean_of_all,
    "focal": fd.losses.Focal(0.0),
    "weighted": fd.losses.WeightedCrossEntropy([1.0] * CLASSES),
}


@pytest.mark.parametrize("batch", [True, False])
@pytest.mark.parametrize("name", list(SAME_LOSS))
def test_own_losses(name, batch):
    engine, options = fd.Local(batch=batch), {"lr": 0.5, "batch_size": 4}
    runs = [
        fd.run(fd.FedAvg(tagger(), loss=loss, **options), federation(), 2, engine=engine)
        for loss in ("cross_entropy", SAME_LOSS[name])
    ]
    alike(runs[0].state.w, runs[1].state.w, within=1e-5)
    assert runs[0].records.last("loss") == pytest.approx(runs[1].records.last("loss"), rel=1e-5)


def test_a_weighted_loss_by_torch():
    x, y = rows()
    weights = torch.tensor([0.2, 1.0, 2.0, 0.5, 3.0])

    def objective(outputs, y):
        each = F.cross_entropy(outputs.transpose(1, 2), y, weights, reduction="none")
        return (each.sum(1) / (y != -100).sum(1)).mean()

    fed = fd.Federation.from_clients([(x, y)], test=(x, y))
    found = by_foedus(tagger(), fed, loss=fd.losses.WeightedCrossEntropy(weights.tolist()))
    alike(found, by_torch(tagger(), x, y, objective))


def counts_all(outputs, y):
    return F.cross_entropy(outputs.transpose(1, 2), y.clamp(min=0), reduction="none").mean(1)


def cannot_ignore(outputs, y):
    return -outputs.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (counts_all, "counts steps without a label .-100.; leave them out, as F.cross_entropy"),
        (cannot_ignore, r"fails where a step has no label \(-100\)"),
        (nn.CrossEntropyLoss(ignore_index=0), r"ignores label 0, .* np\.where\(y == 0, -100, y\)"),
        (lambda f, y: f.square(), r"shape \(6, 6, 5\) for 6 rows; return one number a step"),
        (lambda f, y: f.square().mean((0, 1)), r"shape \(5,\) for 6 rows"),
        ("bce", "needs real targets"),
        (fd.losses.WeightedCrossEntropy([1.0, 2.0]), "weights for 2 classes, the data has 5"),
    ],
)
def test_losses_that_do_not_fit(loss, why):
    with pytest.raises(fd.ConfigError, match=why):
        fd.run(fd.FedAvg(tagger(), loss=loss), federation(), 1)


# -- data ------------------------------------------------------------------------------------------


def test_the_form_of_the_data():
    x, y = rows()
    data = fd.Data.from_arrays(x, y, x[:3], y[:3])
    assert (data.classes, data.spec.steps, data.spec.outputs) == (CLASSES, STEPS, CLASSES)
    assert data.spec.output_shape == (STEPS, CLASSES)
    assert "5 classes at each of 6 steps" in repr(data)
    # classes are counted in both parts, and ignored steps are none
    assert fd.Data.from_arrays(X, np.minimum(Y, 0), X, Y).classes == 3
    assert fd.Data.from_arrays(X, Y).spec.steps == 3  # without a test part
    assert fd.Data.from_arrays(X, Y, class_names=["a", "b", "c", "d"]).classes == 4
    assert fd.Data.from_arrays(x, y[:, 0].clip(0)).spec.steps is None


@pytest.mark.parametrize(
    ("y", "options", "why"),
    [
        (np.full((3, 3), -100), {"classes": 3}, r"no label at any step of row 0: all are -100 \(3"),
        (np.where(np.arange(3)[:, None] == 1, -100, X), {}, r"step of row 1.*leave these rows out"),
        (X, {"classes": 2}, r"label 2 in row 0, step 2 \(2 such rows\), but there are 2 classes"),
        (np.where(X == 2, -1, X), {}, r"label -1 in row 0, step 2.*or -100 at steps"),
        (X[:, :1], {}, r"shape \(3, 1\); give one label a row, shape \[n\] \(y\[:, 0\]\)"),
        (np.eye(3, dtype=int), {}, r"shape \(3, 3\); give one label a row.*argmax of one-hot"),
        (np.zeros((3, 2, 2), int), {}, r"shape \[n, steps\]"),
        (X > 0, {}, r"dtype bool; labels of the steps of a sequence, \(n, t\), must be integers"),
        (X.astype(str), {}, "must be integers"),
        (X[:2], {}, "y_train of 'data' has 2 rows but x_train has 3"),
    ],
)
def test_labels_that_cannot_be(y, options, why):
    with pytest.raises(fd.DataError, match=why):
        fd.Data.from_arrays(X, y, **options)


def test_a_few_rows_may_look_one_hot():
    """Those of a test part or of a client, where the set as a whole does not."""
    y = np.array([[0, 1], [1, 1], [0, 0]])
    data = fd.Data.from_arrays(X[:, :2], y, X[:1, :2], y[:1], classes=2)
    assert data.spec.steps == 2
    clients = [(X[i : i + 1, :2], y[i : i + 1]) for i in range(3)]
    assert fd.Federation.from_clients(clients, classes=2).spec.steps == 2


def test_ignored_labels_may_come_first():
    """Such as where the first steps are a question, and the others its answer."""
    y = Y.copy()
    y[:, 0] = [-100, -100, 1]
    data = fd.Data.from_arrays(X, y)
    assert (data.y_train == y).all() and data.classes == 3


def test_parts_of_other_lengths_are_refused():
    with pytest.raises(fd.DataError, match=r"y_test of 'data' has rows of shape \(2,\)"):
        fd.Data.from_arrays(X, Y, X, X[:, :2])
    with pytest.raises(fd.DataError, match="give all the same"):
        fd.Federation.from_clients([(X, Y), (X, Y[:, :2])])


def test_a_file_and_torch_data_sets(tmp_path):
    x, y = rows()
    np.savez(tmp_path / "steps.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    with pytest.raises(fd.DataError, match="integers, 6 a row: pass task='classification'"):
        fd.load(tmp_path / "steps.npz", scale=None)
    data = fd.load(tmp_path / "steps.npz", scale=None, task="classification")
    assert data.spec.steps == STEPS and (data.y_train == y).all() and (data.y_test == y[:4]).all()
    held = fd.load(tmp_path / "steps.npz", scale=None, task="classification", test=0.25)
    assert len(held.y_test) == 7 and held.spec.steps == STEPS  # a quarter of 27 rows
    sets = [TensorDataset(*map(torch.from_numpy, (x[i::2], y[i::2]))) for i in range(2)]
    fed = fd.Federation.from_clients(sets)
    assert fed.spec.steps == STEPS and fed.sizes.tolist() == [12, 11]


def test_who_holds_what():
    fed = small()
    # labels 0, 1 and 2: two, two and one of the first client's 5 steps
    assert fed.label_counts().tolist() == [[2, 2, 1], [2, 1, 0]]
    assert "3 classes at each of 3 steps" in repr(fed)
    assert fed.summary()[[0, 1, 2]].to_numpy().tolist() == [[2, 2, 1], [2, 1, 0]]
    assert "a client holds 2 to 3 of 3" in fed.describe()
    assert fed.plot().get_xlabel() == "training steps"
    many = fd.Federation.from_clients([(X, Y), (X[2:], Y[2:])] * 100).plot()
    # of the labels of a client, 4, 3 and 1 of 8 steps, or 2, 1 and 0 of 3
    shares = np.unique(many.images[0].get_array(), axis=1).T
    np.testing.assert_allclose(shares, [[4 / 8, 3 / 8, 1 / 8], [2 / 3, 1 / 3, 0]])


def test_divisions():
    x, y = rows(40)
    data = fd.Data.from_arrays(x, y, x[:9], y[:9])
    for scheme, options in (("iid", {}), ("quantity", {"exponent": 1.0})):
        fed = fd.split(data, scheme, clients=3, **options)
        assert fed.sizes.sum() == 40 and fed.test_sizes.sum() == 9
    for scheme, options in {
        "dirichlet": {"alpha": 0.5}, "homogeneity": {"s": 0.5}, "labels": {"per_client": 1},
        "targets": {"s": 0.5}, "permuted": {},
    }.items():  # fmt: skip
        with pytest.raises(fd.SplitError, match="rows of 'data' have 6 labels each, one for each"):
            fd.split(data, scheme, clients=3, **options)
    held = fd.split(data, "iid", clients=3).holdout(0.2)
    assert held.data.y_test.shape == (len(held.test_rows), STEPS)


def test_fingerprints_see_the_labels():
    x, y = rows()
    other = y.copy()
    other[0, 0] = (other[0, 0] + 1) % CLASSES
    one, two = (fd.Data.from_arrays(x, v) for v in (y, other))
    assert one.checksums != two.checksums


def test_flipped_labels():
    """Class c becomes 2 - c; a step without a label has none afterwards."""
    assert fd.poison(small(), [0]).data.y_train.tolist() == [[2, 1, -100], [2, 0, 1], [1, 0, 0]]


@pytest.mark.parametrize("measure", [fd.diagnose, heterogeneity, fd.sharing])
def test_what_is_for_one_label_a_row(measure):
    with pytest.raises(fd.ConfigError, match="have 3 labels each, one for each step"):
        measure(small())
    with pytest.raises(fd.DataError, match="a bandit of classes needs one label a row"):
        fd.class_bandit(small())


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [fd.FFGB(), fd.FedNewton(fd.Identity()), fd.FedFW(fd.Linear(), fd.L2Ball(1.0))],
    ids=lambda a: type(a).__name__,
)
def test_other_algorithms_refuse(algorithm):
    name = type(algorithm).__name__
    why = rf"{name} predicts one label a row, and this federation has 3 labels a row.*fd\.FedAvg"
    with pytest.raises(fd.ConfigError, match=why):
        fd.run(algorithm, small(), 1)


class Shaped(nn.Module):
    """Outputs of some shape, whatever comes in."""

    def __init__(self, *shape):
        super().__init__()
        self.outputs = nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return self.outputs.expand(len(x), *self.outputs.shape)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (fd.Linear(), r"Linear predicts one label a row, and rows have 3 labels each.*\(n, 3, 3\)"),
        (fd.MLP(4), r"multi-label\), y\.astype"),
        (Shaped(3), r"shape \(2, 3\) for 2 rows, but the data has 3 classes at each of 3 steps"),
        (Shaped(3), "outputs of all steps, not of one, such as of the last"),
        (Shaped(2, 3), r"at each of 3 steps: it must return \(n, 3, 3\): give labels y of shape "),
        (Shaped(3, 4), r"it must return \(n, 3, 3\)"),
    ],
)
def test_models_that_do_not_fit(model, why):
    with pytest.raises(fd.ModelError, match=why):
        fd.run(fd.FedAvg(model), small(), 1)


def test_classes_before_steps_are_noticed():
    x, y = rows()
    fed = fd.Federation.from_clients([(x, y)], test=(x, y))
    with pytest.raises(fd.ModelError, match=r"\(n, 6, 5\), which outputs\.transpose\(1, 2\) does"):
        fd.run(fd.FedAvg(Shaped(CLASSES, STEPS)), fed, 1)


def test_outputs_of_steps_for_one_label_a_row():
    fed = fd.Federation.from_clients([(X, Y[:, 0])], test=(X, Y[:, 0]), classes=3)
    with pytest.raises(fd.ModelError, match=r"must have 3 outputs; for a label at each step give"):
        fd.run(fd.FedAvg(Same()), fed, 1)
