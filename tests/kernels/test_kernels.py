"""Compiled loops: known answers, the same by hand and in Python, and what they must refuse."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foedus as fd
from foedus import kernels
from foedus.base import random
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.engines.batches import Table
from foedus.models.losses import CrossEntropy, Huber, Logistic, Squared
from foedus.models.training import compiled
from foedus.models.training.descend import descend
from foedus.models.training.gradients import gradient

pytestmark = pytest.mark.skipif(
    not kernels.ready, reason="foedus was installed without a compiler, or FOEDUS_COMPILED=0"
)


WAYS = {
    "as it comes": (True, True),
    "plain vectors": (False, True),
    "threads of its own": (True, False),
}


@pytest.fixture(scope="module", autouse=True, params=WAYS.values(), ids=list(WAYS))
def way(request):
    """With vectors of eight or without, with PyTorch's threads or others: whatever of it the
    machine has.
    """
    if kernels._compiled.choose(*request.param) != request.param:
        pytest.skip("this machine has no such thing")
    yield
    kernels._compiled.choose(True, True)


@pytest.fixture
def in_python(monkeypatch):
    """Switches compiled loops off."""
    return lambda: monkeypatch.setattr(kernels, "ready", False)


def without(function, *args):
    """What a function says without compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ready", False)
        return function(*args)


# -- random words and orders -----------------------------------------------------------------------


def test_words_are_the_known_answers_of_random123():
    zero, ones = np.zeros((1, 2), np.int64), np.full((1, 2), 0xFFFFFFFF)
    assert kernels.words(zero, 4)[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert kernels.fold(ones, np.full((1, 4), 0xFFFFFFFF))[0].tolist() == [0x408F276D, 0x41C83B0E]
    pi = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]])
    assert kernels.fold(np.array([[0xA4093822, 0x299F31D0]]), pi)[0].tolist() == [
        0xD16CFE09,
        0x94FDCCEB,
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 40), st.integers(0, 50))
def test_words_are_those_of_python(seed, clients, count):
    keys = random.fold(random.key(seed), torch.arange(clients))
    assert torch.equal(random.words(keys, count), without(random.words, keys, count))
    assert torch.equal(keys, without(random.fold, random.key(seed), torch.arange(clients)))
    assert torch.equal(random.fold(keys, 7, 8), without(random.fold, keys, 7, 8))


def test_keys_and_counters_of_several_dimensions():
    keys = random.fold(random.key(1), torch.arange(6)).view(2, 3, 2)
    there = torch.arange(15).view(5, 1, 3)
    for args in (
        (keys[0], there),
        (keys[:, :1], torch.arange(4)),
        (keys[0, 0], there),
        (keys[0, :1], 3),
        (keys[:1, :1], there),
    ):
        found, expected = random.fold(*args), without(random.fold, *args)
        assert found.shape == expected.shape and torch.equal(found, expected)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 700), st.data())
def test_compiled_permutations_equal_those_in_python(seed, epochs, clients, n, data):
    keys = random.fold(random.key(seed), torch.arange(epochs * clients)).view(epochs, clients, 2)
    sizes = torch.tensor(data.draw(st.lists(st.integers(0, n), min_size=clients, max_size=clients)))
    valid = torch.arange(n) < sizes.unsqueeze(1)
    if data.draw(st.booleans()):
        valid = valid.flip(1)
    for some in (
        None,
        valid,
        valid[0],
        valid.expand(epochs, -1, -1),
        valid[:1].expand(epochs, 1, -1),
    ):
        found = random.permutation(keys, n, some)
        assert torch.equal(found, without(random.permutation, keys, n, some))
        assert torch.equal(found.sort(-1).values, torch.arange(n).expand_as(found))


def test_valid_places_come_first_in_the_order_of_their_words():
    keys = random.key(3).unsqueeze(0)
    valid = torch.tensor([[True, False, True, True, False, True]])
    words = random.words(keys, 6)[0].tolist()
    first = sorted((i for i in range(6) if valid[0, i]), key=words.__getitem__)
    assert random.permutation(keys, 6, valid)[0].tolist() == [*first, 1, 4]


# -- training --------------------------------------------------------------------------------------

LOSSES = [CrossEntropy(), Squared(), Logistic(), Huber(0.3)]


def train(
    x, y, used, shares, steps, weight, bias=None, more=(None, None), *, loss=0, lr=0.5, keep=1.0
):
    """A linear model's weights and bias after training."""
    layers = [(weight.clone(), None if bias is None else bias.clone())]
    kernels.train(layers, [more], x, y, used, shares, steps, loss=loss, lr=lr, keep=keep)
    return layers[0]


@pytest.fixture
def counted(monkeypatch):
    """How often compiled training was called."""
    calls, run = [], kernels.train
    monkeypatch.setattr(
        kernels, "train", lambda *args, **options: (calls.append(1), run(*args, **options))
    )
    return calls


def test_two_steps_of_softmax_regression_by_hand():
    """One client, one feature, two classes, rows x = 1 (class 0) and x = 2 (class 1), one a step,
    from 0.

    First p = (1/2, 1/2): slopes (-1/2, 1/2), W = (1/4, -1/4), b the same. Then outputs are (3/4,
    -3/4), p_0 = 1 / (1 + e^-1.5).
    """
    used, shares = torch.tensor([[[0]], [[1]]]), torch.ones(2, 1, 1)
    x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1])
    weight, bias = train(
        x, y, used, shares, torch.tensor([2]), torch.zeros(1, 2, 1), torch.zeros(1, 2)
    )
    p = 1 / (1 + np.exp(-1.5))
    np.testing.assert_allclose(weight[0, :, 0], [0.25 - p, -0.25 + p], rtol=1e-6)
    np.testing.assert_allclose(bias[0], [0.25 - p / 2, -0.25 + p / 2], rtol=1e-6)


def test_terms_of_a_step_by_hand():
    """Squared loss, f = 3 * 2 + 1 = 7, y = 5, slope 2 with weight 1/4: w <- 0.9 * 3 - 0.1 (0.5 * 2
    + 10), b <- 0.9 * 1 - 0.1 (0.5 - 1).
    """
    more = (torch.full((1, 1, 1), 10.0), torch.full((1, 1), -1.0))
    weight, bias = train(
        torch.tensor([[2.0]]), torch.tensor([5.0]), torch.tensor([[[0]]]),
        torch.full((1, 1, 1), 0.25), torch.tensor([1]), torch.full((1, 1, 1), 3.0),
        torch.ones(1, 1), more, loss=1, lr=0.1, keep=0.9,
    )  # fmt: skip
    assert float(weight) == pytest.approx(2.7 - 0.1 * 11) and float(bias) == pytest.approx(
        0.9 + 0.05
    )


def test_a_step_of_a_network_by_hand():
    """One feature, x = 2; hidden units 1 * 2 + 1 = 3 and -1 * 2 + 1 < 0, which says 0; f = 2 * 3 +
    5 * 0 - 4 = 2, y = 1: the slope is 1.

    Only the first unit passes it back: lr = 0.1 takes 0.1 * 2 * 2 off its weight and 0.1 * 2 off
    its bias; on top, 0.1 * 3, 0 and 0.1.
    """
    layers = [
        (torch.tensor([[[1.0], [-1.0]]]), torch.ones(1, 2)),
        (torch.tensor([[[2.0, 5.0]]]), torch.full((1, 1), -4.0)),
    ]
    none = [(None, None)] * 2
    one = torch.ones(1, 1, 1)
    kernels.train(
        layers,
        none,
        torch.tensor([[2.0]]),
        torch.tensor([1.0]),
        one.long() - 1,
        one,
        torch.tensor([1]),
        loss=1,
        lr=0.1,
        keep=1.0,
    )
    (w, b), (v, a) = layers
    np.testing.assert_allclose(w[0, :, 0], [1 - 0.4, -1], rtol=1e-6)
    np.testing.assert_allclose(b[0], [1 - 0.2, 1], rtol=1e-6)
    np.testing.assert_allclose(v[0, 0], [2 - 0.3, 5], rtol=1e-6)
    assert float(a) == pytest.approx(-4.1)


# The same examples every time, and few steps: where a unit's input is next to 0, rounding may
# decide whether it passes anything on.
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.sampled_from(LOSSES),
    st.integers(1, 70),  # features: below one vector, whole vectors, and what is left over
    st.lists(st.integers(1, 40), max_size=3),
    st.integers(1, 18),
    st.integers(1, 5),
    st.integers(1, 300),
    st.sampled_from([1, 4, 32, None]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
def test_training_is_that_of_pytorch(
    counted, loss, d, hidden, k, clients, n, batch, bias, labels, seed
):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(clients * n, d, generator=rng)
    labels = labels or isinstance(loss, CrossEntropy)
    y = (
        torch.randint(k, (clients * n,), generator=rng)
        if labels
        else torch.randn(clients * n, k, generator=rng)
    )
    if not labels and k == 1 and seed % 2:
        y = y.flatten()
    sizes = torch.randint(1, n + 1, (clients, 1), generator=rng)
    index, weight = torch.arange(clients * n).view(clients, n), (torch.arange(n) < sizes).float()
    model = fd.MLP(tuple(hidden)) if hidden else fd.Linear(bias=bias, zero_start=False)
    spec = Spec((d,), k, k)
    start = model.init(spec, random.key(seed))
    how = fd.Training(lr=0.2 / max(d, *hidden, 0), batch_size=batch, steps=5, weight_decay=0.01)
    correction = {
        name: 0.1 * torch.randn(clients, *v.shape, generator=rng) for name, v in start.items()
    }
    keys = random.fold(random.key(seed), torch.arange(clients))
    rows = Rows(x, y, index, weight, spec)

    def learned():
        return descend(how, model, loss, start, rows, keys, prox=0.1, correction=correction)

    counted.clear()
    ours, theirs = learned(), without(learned)
    assert counted == [1]
    assert torch.equal(ours["steps"], theirs["steps"])
    for name in start:
        torch.testing.assert_close(
            ours["params"][name], theirs["params"][name], rtol=2e-4, atol=2e-5
        )


@pytest.mark.parametrize("model", [fd.Linear(), fd.MLP((20, 6))])
def test_many_clients_of_unequal_size(model, counted):
    """More clients than threads: each thread takes several at a time."""
    sizes = torch.arange(200) % 37 + 1
    x = torch.randn(int(sizes.sum()), 11, generator=torch.Generator().manual_seed(0))
    y, real = torch.arange(len(x)) % 3, torch.arange(37) < sizes.unsqueeze(1)
    rows = Rows(
        x,
        y,
        torch.zeros(real.shape, dtype=torch.int64).masked_scatter(real, torch.arange(len(x))),
        real.float(),
        Spec((11,), 3, 3),
    )
    start, keys = (
        model.init(rows.spec, random.key(0)),
        random.fold(random.key(0), torch.arange(200)),
    )
    how = fd.Training(batch_size=8, epochs=2)
    learned = lambda: descend(how, model, CrossEntropy(), start, rows, keys)  # noqa: E731
    ours, theirs = learned(), without(learned)
    assert counted == [1] and len(ours["steps"].unique()) > 1
    for name in start:
        torch.testing.assert_close(
            ours["params"][name], theirs["params"][name], rtol=1e-4, atol=1e-5
        )


def test_what_it_does_not_know_goes_to_pytorch(counted):
    """Other losses of the same name, other precisions and layouts, gradients that are asked for:
    all train, and as PyTorch does.
    """

    class Squared(fd.models.losses.Squared):
        pass

    x, y = torch.randn(20, 5, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 1, 20)
    spec, index, ones = Spec((5,), None, 1), torch.arange(20).view(2, 10), torch.ones(2, 10)
    model, keys = fd.Linear(), random.fold(random.key(0), torch.arange(2))
    start = model.init(spec, random.key(0))

    def learned(x=x, y=y, weight=ones, loss=LOSSES[1], **more):
        return descend(
            fd.Training(batch_size=4),
            model,
            loss,
            start,
            Rows(x, y, index, weight, spec),
            keys,
            **more,
        )["params"]

    known = learned()
    assert counted == [1]
    strange = torch.stack([y, y], 1)[:, 0]
    for other in (
        learned(loss=Squared()), learned(x=x.T.contiguous().T), learned(y=strange),
        learned(weight=ones.double()),
        learned(correction={k: torch.zeros_like(v, dtype=torch.float64) for k, v in start.items()}),
        learned(correction={k: torch.zeros_like(v, requires_grad=True) for k, v in start.items()}),
    ):  # fmt: skip
        for name in start:
            torch.testing.assert_close(other[name].float(), known[name])
    assert counted == [1]


def test_few_clients_with_large_steps_go_to_pytorch_whose_threads_share_them(counted, monkeypatch):
    monkeypatch.setattr(compiled, "_LARGE_STEP", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    fd.run(fd.FedAvg(fd.Linear()), fed, 1, evaluate_every=0)
    assert counted == [1]
    fd.run(fd.FedAvg(fd.Linear()), fed, 1, participation=0.5, evaluate_every=0)
    assert counted == [1]


def test_networks_that_no_cache_holds_go_to_pytorch(counted, monkeypatch):
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    monkeypatch.setattr(compiled, "_LARGE_NET", 74 * 8)  # 64 x 8 and 8 x 10
    fd.run(fd.FedAvg(fd.MLP(8)), fed, 1, evaluate_every=0)
    assert counted == [1]
    fd.run(fd.FedAvg(fd.MLP(9)), fed, 1, evaluate_every=0)
    assert counted == [1]


@pytest.mark.parametrize("batch", [7, None])
@pytest.mark.parametrize("model", [fd.Linear(), fd.MLP(20)])
def test_a_client_alone_and_in_any_company_learns_the_same_bits(model, batch):
    data, sizes = fd.load("digits"), [9, 40, 17, 33, 8]
    x, y = (torch.from_numpy(v[: sum(sizes)]) for v in (data.x_train, data.y_train))
    real = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
    index = torch.zeros(real.shape, dtype=torch.int64).masked_scatter(real, torch.arange(len(x)))
    how, spec = fd.Training(batch_size=batch, epochs=3), Spec((64,), 10, 10)
    start, keys = model.init(spec, random.key(0)), random.fold(random.key(0), torch.arange(5))

    def learned(clients: list[int], width: int) -> dict[str, torch.Tensor]:
        rows = Rows(x, y, index[clients, :width], real[clients, :width].float(), spec)
        return descend(how, model, CrossEntropy(), start, rows, keys[clients])["params"]

    alone, threads = [learned([i], n) for i, n in enumerate(sizes)], torch.get_num_threads()
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            for company in ([0, 1, 2, 3, 4], [4, 1, 0], [3, 2]):
                together = learned(company, 40)
                for place, i in enumerate(company):
                    assert all(torch.equal(together[k][place], alone[i][k][0]) for k in start)
    finally:
        torch.set_num_threads(threads)


def slopes(outputs: torch.Tensor, loss: int, label: int = 0) -> torch.Tensor:
    """Minus the slope at these outputs: what one step adds to biases of 0, with outputs as weights
    of the only feature, 1.
    """
    k = len(outputs)
    one = torch.ones(1, 1, 1)
    args = (
        torch.ones(1, 1),
        torch.tensor([label]),
        torch.zeros(1, 1, 1, dtype=torch.int64),
        one,
        torch.tensor([1]),
    )
    return train(*args, outputs.view(1, k, 1), torch.zeros(1, k), loss=loss, lr=1.0)[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("clients", "n"), [(1, 1), (7, 1023), (3, 1024), (5, 9000), (300, 2)])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_of_replies_are_two_sums_in_order(clients, n, dtype, threads):
    """Bit by bit: rounded products, then Knuth's two-sum, one client after the other."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(clients, n, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(clients, generator=generator, dtype=torch.float64)
    total, rest = torch.randn(2, n, generator=generator, dtype=torch.float64)
    want, lost = total.numpy().copy(), rest.numpy().copy()
    for w, row in zip(weights.numpy(), x.double().numpy(), strict=True):
        p = w * row
        new = want + p
        grown = new - want
        lost += (want - (new - grown)) + (p - grown)
        want = new
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        kernels.sum_replies(total, rest, x, weights)
    finally:
        torch.set_num_threads(before)
    assert np.array_equal(total.numpy(), want) and np.array_equal(rest.numpy(), lost)


def test_sums_of_sparse_replies_by_hand():
    total, rest = torch.zeros(2, 3, dtype=torch.float64)
    indices = torch.tensor([[2, 0], [2, 2]])
    values = torch.tensor([[2.0**60, 1.0], [1.0, 3.0]])
    kernels.sum_sparse(total, rest, indices, values, torch.tensor([1.0, 0.5], dtype=torch.float64))
    assert total.tolist() == [1.0, 0.0, 2.0**60]
    assert rest.tolist() == [0.0, 0.0, 2.0]  # 0.5 and 1.5, less than doubles near 2^60 can hold
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match="an index is out of range"):
            kernels.sum_sparse(
                total, rest, torch.tensor([[wrong]]), torch.ones(1, 1), torch.ones(1).double()
            )


@pytest.mark.parametrize("model", [fd.Linear(), fd.Linear(bias=False), fd.MLP((5, 4))], ids=str)
@pytest.mark.parametrize("loss", [CrossEntropy(), Squared(), Logistic(), Huber(0.1)], ids=str)
def test_full_gradients_are_those_of_pytorch_and_the_same_bits_in_any_company(model, loss):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=6, alpha=0.3, seed=1)
    table = Table(fed.data.x_train, fed.data.y_train, fed.rows, fed.offsets, np.arange(6), fed.spec)
    params = model.init(fed.spec, random.key(3))
    params = {k: v + 0.1 for k, v in params.items()}

    def gradients(positions, width=0):
        index, weight = table.index(torch.tensor(positions), width)
        one = lambda i, w: gradient(  # noqa: E731
            model, loss, params, Rows(table.x, table.y, i, w, fed.spec)
        )
        return torch.func.vmap(one)(index, weight)

    together = gradients(range(6))
    for name, there in without(gradients, range(6)).items():
        torch.testing.assert_close(together[name], there, rtol=1e-5, atol=1e-5)
    for positions, width in (([4], 0), ([0, 5], 0), ([3, 2, 1], 700)):
        for name, alone in gradients(positions, width).items():
            assert torch.equal(alone, together[name][positions])


def test_exponentials_within_a_few_units_in_the_last_place():
    z = torch.linspace(-60, 60, 100_001)
    found = slopes(z, 2, label=100_000)[:-1].double()
    exact = -torch.sigmoid(z.double())[:-1]
    assert float(((found - exact) / exact).abs().max()) < 5e-7


def test_outputs_far_apart_neither_overflow_nor_vanish_into_nan():
    found = slopes(torch.tensor([3e38, -3e38, 0.0, 1e30]), 0, label=1)
    np.testing.assert_allclose(found, [-1, 1, 0, 0], atol=1e-30)
    found = slopes(torch.tensor([1e9, -1e9]), 2, label=1)
    np.testing.assert_allclose(found, [-1, 1], atol=1e-30)


@pytest.mark.parametrize("loss", range(4))
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nans_propagate(loss, bad):
    """A run must stop at it: it may not be turned into a number on the way."""
    found = slopes(torch.tensor([0.0, bad, 1.0]), loss)
    if loss in (0, 1) or np.isnan(bad):
        assert not torch.isfinite(found[1])


def test_diverging_training_names_its_clients():
    fed = fd.split(fd.load("diabetes"), "iid", clients=4)
    with pytest.raises(fd.DivergenceError, match="not finite"):
        fd.run(fd.FedAvg(fd.Linear(), lr=1e6, epochs=20), fed, 5)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"used": torch.tensor([[[3]]])}, IndexError),
        ({"used": torch.tensor([[[-1]]])}, IndexError),
        ({"y": torch.tensor([0, 2, 0])}, IndexError),
        ({"y": torch.tensor([0, -1, 0])}, IndexError),
        ({"y": torch.tensor([0, 1])}, ValueError),
        ({"y": torch.zeros(3, 2)}, ValueError),  # cross-entropy wants labels
        ({"steps": torch.tensor([2])}, ValueError),
        ({"steps": torch.tensor([0])}, ValueError),
        ({"shares": torch.ones(1, 1, 2)}, ValueError),
        ({"x": torch.zeros(3, 4)}, ValueError),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, error):
    args = {
        "x": torch.zeros(3, 5), "y": torch.tensor([0, 1, 0]), "used": torch.tensor([[[1]]]),
        "shares": torch.ones(1, 1, 1), "steps": torch.tensor([1]),
    }  # fmt: skip
    train(**args, weight=torch.zeros(1, 2, 5))
    with pytest.raises(error):
        train(**args | changes, weight=torch.zeros(1, 2, 5))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("words", (np.zeros(4, np.int64), np.zeros(2, np.int64), 1, 5)),
        # the product is 0 in 64 bits
        ("words", (np.zeros(0, np.int64), np.zeros(8, np.int64), 4, 1 << 62)),
        ("words", (np.zeros(1, np.int64), np.zeros(2, np.int64), -1, -1)),
        ("fold", (np.zeros(4, np.int64), np.zeros(4, np.int64), np.zeros(4, np.int64), 2)),
        ("order", (np.zeros(6, np.int64), np.zeros(4, np.int64), np.ones(2, bool), 2, 3, 1, 1)),
        ("pack_trees", (np.zeros((2, 4), np.int32), *[np.zeros(1, np.int32)] * 5, 1, 1, 1)),
        (
            "sum_trees",
            (np.zeros(1, np.float32), *[np.zeros(4, np.float32)] * 5, (1, 4, 1, 1, 1, 1), 1),
        ),
        ("sum_replies", (*[np.zeros(3)] * 4, 1, 3, True, 1)),
        ("sum_replies", (*[np.zeros(3)] * 3, np.zeros(1), 1, 3, False, 1)),
        ("sum_sparse", (*[np.zeros(3)] * 2, *[np.zeros(2, np.int64)] * 3, 1, 2, 3, True)),
    ],
)
def test_buffers_of_another_size_are_refused(name, args):
    with pytest.raises(ValueError, match="were due"):
        getattr(kernels._compiled, name)(*args)


def test_roots_that_are_no_nodes_and_rows_of_nothing_are_refused():
    nodes = np.array([[0, 0, 0, 0]], np.int32)
    rest = np.ones(1, np.float32), np.ones((1, 1), np.float32), 1
    assert kernels.sum_trees(
        np.zeros((2, 3), np.float32), nodes, np.array([0], np.int32), *rest
    ).tolist() == [[1], [1]]
    for x, root in (
        (np.zeros((2, 3), np.float32), 1),
        (np.zeros((2, 3), np.float32), -1),
        (np.zeros((2, 0), np.float32), 0),
    ):
        with pytest.raises(ValueError, match="root"):
            kernels.sum_trees(x, nodes, np.array([root], np.int32), *rest)


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedAvg(fd.Linear(), epochs=2),
        fd.FedProx(fd.Linear(), mu=0.1, weight_decay=0.01),
        fd.Scaffold(fd.Linear(), batch_size=None),
        fd.FedDyn(fd.Linear(bias=False)),
        fd.FedAvg(fd.MLP(30), epochs=2),
        fd.Scaffold(fd.MLP((10, 5))),
        fd.FFGB(fd.Forest(trees=3)),
    ],
    ids=lambda a: type(a).__name__,
)
def test_runs_are_those_without_compiled_loops(algorithm, in_python):
    fed = fd.split(fd.load("digits"), "dirichlet", clients=8, alpha=0.3)
    runs = [fd.run(algorithm, fed, 3, participation=0.5)]
    in_python()
    runs.append(fd.run(algorithm, fed, 3, participation=0.5))
    a, b = (r.history.drop(columns="seconds") for r in runs)
    assert a[["bytes_up", "bytes_down", "messages_up"]].equals(
        b[["bytes_up", "bytes_down", "messages_up"]]
    )
    np.testing.assert_allclose(
        a["loss"], b["loss"], rtol=0 if isinstance(algorithm, fd.FFGB) else 1e-4
    )


# -- normalization ---------------------------------------------------------------------------------


def normalized(x, weight, bias, real, eps):
    """By the formulas, in double precision, of one client's x (b, channels, n)."""
    x = x.double()
    chosen = x[real].transpose(0, 1).flatten(1)
    mean, var = chosen.mean(1).view(1, -1, 1), chosen.var(1, correction=0).view(1, -1, 1)
    out = (x - mean) / (var + eps).sqrt() * weight.double().view(1, -1, 1)
    return out + bias.double().view(1, -1, 1), mean.flatten(), chosen.var(1)


@pytest.mark.parametrize("n", [1, 5, 64])
@pytest.mark.parametrize("channels", [3, 70])
@pytest.mark.parametrize("padded", [False, True])
def test_normalization_is_by_the_formula(n, channels, padded):
    """Of clients whose means are far from 0, where E x^2 - (E x)^2 would lose all digits."""
    x = random.normal(random.key(1), (3, 6, channels, n)) * 0.1 + 30.0
    weight, bias, slope = (
        random.normal(random.key(k), shape)
        for k, shape in enumerate([(3, channels), (3, channels), tuple(x.shape)], 2)
    )
    real = torch.ones(3, 6, dtype=torch.uint8)
    if padded:
        real[0, 4:], real[1, 1] = 0, 0
        slope = slope * real.view(3, 6, 1, 1)  # the loss does not depend on padding
    count = real.sum(1) * n
    given = real if padded else None
    out, made = kernels.normalize(x, weight, bias, None, None, given, count, 1e-5)
    got = kernels.normalize_back(x, slope, weight, made, given, count)
    for i in range(3):
        leaves = [t[i].double().requires_grad_() for t in (x, weight, bias)]
        want, mean, var = normalized(*leaves, real[i].bool(), 1e-5)
        torch.testing.assert_close(out[i].double(), want, rtol=0, atol=2e-4)
        torch.testing.assert_close(made[0, i].double(), mean, rtol=1e-6, atol=0)
        torch.testing.assert_close(made[1, i].double(), var, rtol=1e-3, atol=0)
        slopes = torch.autograd.grad((want * slope[i].double()).sum(), leaves)
        for a, b in zip(got, slopes, strict=True):
            torch.testing.assert_close(a[i].double(), b, rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("n", [1, 4])
def test_one_value_is_normalized_by_what_is_given(n):
    """(7 - 2) / sqrt(4 - 0.0) = 2.5, times 3 plus 1; and its slope is 3 / 2."""
    x = torch.full((2, 2, 1, n), 7.0)
    weight, bias = torch.full((2, 1), 3.0), torch.full((2, 1), 1.0)
    mean, var = torch.full((2, 1), 2.0), torch.full((2, 1), 4.0)
    out, made = kernels.normalize(x, weight, bias, mean, var, None, 0, 0.0)
    assert torch.equal(out, torch.full_like(x, 8.5))
    # and the running statistics stay
    assert made.flatten().tolist() == [2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 2.0, 2.0, 4.0, 4.0]
    of_x, of_weight, of_bias = kernels.normalize_back(x, torch.ones_like(x), weight, made, None, 0)
    assert torch.equal(of_x, torch.full_like(x, 1.5))
    assert of_weight.tolist() == [[5.0 * n], [5.0 * n]] and of_bias.tolist() == [[2.0 * n]] * 2


@pytest.mark.parametrize("n", [1, 2])
def test_running_statistics_move_by_the_momentum(n):
    """1, 3, 1, 3 have mean 2 and unbiased variance 4/3 (1 and 3 alone: 2); a tenth of the way from
    0 and 1.
    """
    x = torch.tensor([1.0, 3.0]).repeat(n).view(1, 2, 1, n)
    mean, var = torch.zeros(1, 1), torch.ones(1, 1)
    _, made = kernels.normalize(x, None, None, mean, var, None, 2 * n, 0.0, 0.1)
    unbiased = 2.0 if n == 1 else 4 / 3
    torch.testing.assert_close(made[3:].flatten(), torch.tensor([0.2, 0.9 + 0.1 * unbiased]))
    _, made = kernels.normalize(x, None, None, None, None, None, 2 * n, 0.0, 0.1)
    torch.testing.assert_close(made[3:].flatten(), torch.tensor([2.0, unbiased]))


def test_a_first_row_far_from_the_others_costs_no_digits():
    """Deviations are taken from the mean of a row at first, and the first row is far away.

    Of 400 rows one is at 1000, the others alternate between -1 and 1 around 0.
    """
    x = torch.tensor([-1.0, 1.0]).repeat(400, 1, 1, 8).clone()
    x[0] += 1000
    _, made = kernels.normalize(x.view(1, 400, 1, 16), None, None, None, None, None, 6400, 0.0)
    want = x.double().flatten()
    torch.testing.assert_close(made[0].item(), want.mean().item(), rtol=1e-6, atol=0)
    torch.testing.assert_close(made[1].item(), want.var().item(), rtol=1e-6, atol=0)


def test_normalization_refuses_what_is_not_there():
    x, ones = torch.ones(1, 2, 3, 1), torch.ones(1, 3)
    nobody = torch.zeros(1, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="no rows to take statistics of"):
        kernels.normalize(x, None, None, None, None, None, 1, 0.0)
    with pytest.raises(ValueError, match="no rows to take statistics of"):
        kernels.normalize(x, None, None, ones, ones, nobody, 2, 0.0)
    with pytest.raises(ValueError, match="weight has 8 bytes"):
        kernels.normalize(x, torch.ones(1, 2), None, ones, ones, None, 2, 0.0)
    with pytest.raises(ValueError, match="slope has 4 bytes"):
        kernels.normalize_back(x, torch.ones(1), None, torch.ones(5, 1, 3), None, 2)


def test_they_can_be_left_out_of_a_process(monkeypatch):
    there = kernels._compiled is not None and kernels._compiled.version() == kernels._VERSION
    for value, ready in (("0", False), ("1", there)):
        monkeypatch.setenv("FOEDUS_COMPILED", value)
        assert importlib.reload(kernels).ready == ready
    monkeypatch.undo()
    importlib.reload(kernels)
