"""Integer features stay integers until a model needs numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import foedus as fd

LARGE = 2**24 + 1  # the first integer that float32 cannot hold


class Words(nn.Module):
    """Embeds the first token of a row, modulo the vocabulary."""

    def __init__(self, vocabulary=8, width=3):
        super().__init__()
        torch.manual_seed(0)
        self.size = vocabulary
        self.table = nn.Embedding(vocabulary, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        assert x.dtype == torch.int64
        return self.out(self.table(x % self.size)[..., 0, :])


def tokens(rows=30, seed=0, dtype=np.int64):
    """Rows of three tokens; the label is the parity of the first, which float32 would lose."""
    rng = np.random.default_rng(seed)
    x = LARGE - 1 + rng.integers(0, 8, (rows, 3)).astype(dtype)
    return x, x[:, 0] % 2


def federation(dtype=np.int64):
    sites = {name: tokens(n, n, dtype) for name, n in (("a", 30), ("b", 21), ("c", 14))}
    return fd.Federation.from_clients(sites, test=tokens(40, 9, dtype))


def step_by_hand(module, fed, lr):
    """One round of FedAvg with one full-batch step at each client, by autograd."""
    x, y = torch.from_numpy(fed.data.x_train), torch.from_numpy(fed.data.y_train)
    grads = None
    for k in range(len(fed)):
        rows = fed.client_rows(k)
        loss = nn.functional.cross_entropy(module(x[rows]), y[rows])
        own = torch.autograd.grad(loss, list(module.parameters()))
        part = [g * (len(rows) / len(fed.rows)) for g in own]
        grads = part if grads is None else [a + b for a, b in zip(grads, part, strict=True)]
    with torch.no_grad():
        for p, g in zip(module.parameters(), grads, strict=True):
            p -= lr * g
    return module


@pytest.mark.parametrize("engine", [fd.Local(batch=True), fd.Local(batch=False)])
def test_a_module_is_given_integers_exactly(engine):
    fed = federation()
    assert fed.data.x_train.dtype == np.int64 and fed.spec.integers
    run = fd.run(fd.FedAvg(Words(), lr=0.5, batch_size=None), fed, 3, engine=engine)
    twin = Words()
    for _ in range(3):
        step_by_hand(twin, fed, 0.5)
    x = torch.from_numpy(fed.data.x_test)
    with torch.no_grad():
        wanted = twin(x)
    assert np.allclose(run.model.outputs(fed.data.x_test), wanted, atol=1e-6)
    hits = (wanted.argmax(1).numpy() == fed.data.y_test).mean()
    assert run.history.accuracy.iloc[-1] == pytest.approx(hits)


def test_padded_and_shuffled_mini_batches_and_late_rows_stay_integers():
    fed = federation()
    algorithm = fd.Scaffold(Words(), lr=0.5, batch_size=4, epochs=2)
    run = fd.run(algorithm, fed, 12, participation=0.7)
    assert run.history.accuracy.iloc[-1] > 0.9  # the parity of a number above 2**24


@pytest.mark.parametrize(
    "algorithm",
    [
        fd.FedProx(Words(), mu=0.1),
        fd.FedFW(Words(), fd.L2Ball(20.0), begin="projected"),
        fd.Independent(Words()),
        fd.Central(Words()),
    ],
    ids=lambda a: type(a).__name__,
)
def test_methods_that_train_one_model_know_integers(algorithm):
    run = fd.run(algorithm, federation(np.int32), 2)  # the module itself asserts the type
    assert run.spec.integers


def test_a_model_of_integers_is_saved_and_takes_lists(tmp_path):
    fed = federation()
    algorithm = fd.FedAvg(Words())
    run = fd.run(algorithm, fed, 2)
    run.save(tmp_path / "run.safetensors")
    again = fd.Run.load(tmp_path / "run.safetensors", algorithm)
    x = fed.data.x_test
    wanted = run.model.predict(x)
    assert again.spec.integers and (again.model.predict(x.tolist()) == wanted).all()
    assert (run.model.predict(torch.from_numpy(x)) == wanted).all()
    assert (run.model.predict(x.astype(np.float64)) == wanted).all()
    with pytest.raises(fd.DataError, match="x holds fractions"):
        run.model.predict(x + 0.5)


@pytest.mark.parametrize("model", [fd.Linear(), nn.Linear(3, 2)], ids=["ours", "torch"])
def test_other_models_are_given_the_same_numbers_as_before(model):
    """Integers or the same numbers as floats: every bit of the result is the same."""
    x, y = np.arange(60).reshape(20, 3), np.arange(20) % 2
    made = [
        fd.run(fd.FedAvg(model, lr=0.01), fd.Federation.from_clients([(part, y)]).holdout(), 3)
        for part in (x, x.astype(np.float32))
    ]
    first, second = (run.state.w for run in made)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert not made[0].spec.integers


@pytest.mark.parametrize("dtype", [np.uint8, bool, np.int16, np.float64])
def test_all_other_types_become_float32(dtype):
    data = fd.Data.from_arrays(np.ones((4, 2), dtype), [0, 1, 0, 1])
    assert data.x_train.dtype == np.float32 and not data.spec.integers


def test_both_parts_have_one_type():
    x, y = np.arange(6).reshape(3, 2), [0, 1, 0]
    data = fd.Data.from_arrays(x, y, x[:1] + 0.5, [0])
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    data = fd.Data.from_arrays(x.astype(np.int32), y, x[:1], [0])
    assert data.x_train.dtype == data.x_test.dtype == np.int64


def test_data_sets_of_torch_keep_their_integers():
    x, y = map(torch.from_numpy, tokens())
    rows = torch.utils.data.TensorDataset(x, y)
    for given in (rows, torch.utils.data.DataLoader(rows, batch_size=7)):
        data = fd.Federation.from_clients([given]).data
        assert data.x_train.dtype == np.int64 and (data.x_train == x.numpy()).all()


def test_a_module_that_needs_integers_says_what_to_give():
    x, y = tokens()
    fed = fd.Federation.from_clients([(x.astype(np.float32), y)]).holdout()
    with pytest.raises(fd.ModelError, match=r"cannot take rows.*give integer features \(int64\)"):
        fd.run(fd.FedAvg(nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(6, 2))), fed, 1)


def test_shards_of_other_engines_keep_integers(tmp_path):
    from foedus.engines.flower.site import read_shard, write_shard
    from foedus.engines.ray.shards import part_of

    fed = federation()
    write_shard(tmp_path / "one.npz", fed)
    for part in (part_of(fed, np.arange(3)), read_shard(tmp_path, "one")):
        assert part.data.x_train.dtype == part.data.x_test.dtype == np.int64
        assert (part.data.x_train[part.rows] == fed.data.x_train[fed.rows]).all()


def test_a_model_of_integers_as_an_onnx_file(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    fed = federation()
    run = fd.run(fd.FedAvg(Words(), lr=0.5), fed, 2)
    run.model.prepared.to_onnx(tmp_path / "words.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "words.onnx")
    assert session.get_inputs()[0].type == "tensor(int64)"
    (found,) = session.run(["outputs"], {"x": fed.data.x_test})
    np.testing.assert_allclose(found, run.model.outputs(fed.data.x_test), atol=1e-6)
