"""Training where the rows lie: on the meta device, which computes nothing but refuses, like a GPU,
tensors of two devices in one operation.
"""

from __future__ import annotations

import pytest
import torch

import foedus as fd
from foedus import kernels
from foedus.base import random, tree
from foedus.base.rows import Rows, take
from foedus.base.spec import Spec
from foedus.models import linear
from foedus.models.linear import affine
from foedus.models.losses import CrossEntropy, Squared
from foedus.models.training import descend, gradients
from foedus.models.training import descend as descent
from foedus.models.training.memory import fresh_memory
from foedus.models.training.optimizers import update_parameters
from foedus.models.training.schedule import batch_schedule

SPEC = Spec((3, 8, 8), 4, 4)
MODELS = {"CNN": fd.CNN((4,), hidden=(8,), padding="same"), "MLP": fd.MLP(8), "Linear": fd.Linear()}
HOWS = {
    "adam": fd.Training(optimizer="adam", epochs=2, batch_size=4, clip=1.0, augment="crop_flip"),
    "momentum": fd.Training(momentum=0.5, batch_size=4, weight_decay=0.1),
    "plain": fd.Training(batch_size=4),
}


@pytest.fixture
def devices(monkeypatch):
    """The devices from which results come home: nothing can be copied from the meta device."""
    seen, move = [], gradients.to

    def to(device, values):
        if device.type != "cpu":
            return move(device, values)
        seen.extend(v.device.type for v in tree.leaves(values))
        return values

    for module in (gradients, descend):
        monkeypatch.setattr(module, "to", to)
    return seen


def rows(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(20, 3, 8, 8, device=device), torch.zeros(
        20, dtype=torch.int64, device=device
    )


def two_clients(model: fd.Model) -> dict:
    params = {k: torch.stack([v, v]) for k, v in model.init(SPEC, random.key(0)).items()}
    weight = torch.ones(2, 10)
    weight[1, 5:] = 0
    keys = torch.stack([random.key(1), random.key(2)])
    return {"params": params, "index": torch.arange(20).view(2, 10), "weight": weight, "key": keys}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("model", MODELS)
def test_all_of_a_training_is_on_the_device_of_the_rows(model, how, devices):
    args = two_clients(MODELS[model])
    args["correction"] = tree.map(torch.zeros_like, args["params"])
    result = descend._descend.__wrapped__(
        args, (HOWS[how], MODELS[model], CrossEntropy(), *rows("meta"), 0.1)
    )
    assert {v.device.type for v in tree.leaves([result["params"], result["memory"]])} == {"meta"}
    assert result["steps"].device.type == "cpu" and result["steps"].tolist() == [
        3 * HOWS[how].epochs,
        2 * HOWS[how].epochs,
    ]
    assert "meta" in devices


@pytest.mark.parametrize("model", MODELS)
def test_targets_and_gradients_are_made_on_the_device_of_the_rows(model, devices):
    model, (x, y) = MODELS[model], rows("meta")
    target = torch.zeros(2, 10, 4)
    found = descend._descend_to.__wrapped__(
        {**two_clients(model), "target": target}, (HOWS["plain"], model, Squared(), x)
    )
    assert {v.device.type for v in found.values()} == {"meta"}
    w, data = model.init(SPEC, random.key(0)), Rows(x, y, torch.arange(5), torch.ones(5), SPEC)
    value, slope = gradients.value_and_gradient(model, CrossEntropy(), w, data)
    slopes = [slope, gradients.gradient(model, CrossEntropy(), w, data)]
    some = two_clients(model)
    slopes.append(
        gradients.batch_gradient(
            model, CrossEntropy(), some["params"], some["index"], some["weight"] / 10, x, y
        )
    )
    assert {v.device.type for v in tree.leaves([value, slopes])} == {"meta"}


def test_rows_come_to_the_index_and_the_index_goes_to_the_rows():
    x, y = rows("meta")
    with pytest.raises(NotImplementedError):  # nothing comes from there, but it was asked for
        take(x, torch.arange(3))
    assert take(x, torch.arange(3, device="meta")).device.type == "meta"
    assert {v.device.type for v in Rows(x, y, torch.arange(3), torch.ones(3), SPEC).there} == {
        "meta"
    }


@pytest.mark.parametrize("device", ["cudo", "cuda:97"])
def test_a_device_that_is_not_there_is_an_error_at_once(device):
    with pytest.raises(fd.ConfigError, match=f"device='{device}' cannot be used here"):
        fd.Local(device=device)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("model", ["MLP", "Linear"])
def test_how_many_clients_are_trained_at_a_time_changes_nothing(model, how, monkeypatch):
    """Seven clients of 3 to 10 rows, with a correction each and a pull to the start: three at a
    time as all at once; in PyTorch.
    """
    monkeypatch.setattr(kernels, "ready", False)
    x = random.normal(random.key(3), (70, 3, 8, 8))
    params = {
        k: v + random.normal(random.key(5), (7, *v.shape))
        for k, v in MODELS[model].init(SPEC, random.key(0)).items()
    }
    args = {
        "params": params,
        "correction": tree.map(lambda v: 0.1 * torch.ones_like(v), params),
        "index": torch.arange(70).view(7, 10),
        "weight": (torch.arange(10) < torch.tensor([4, 10, 3, 9, 10, 6, 5]).unsqueeze(1)).float(),
        "key": random.fold(random.key(1), torch.arange(7)),
    }
    shared = (HOWS[how], MODELS[model], CrossEntropy(), x, torch.arange(70) % 4, 0.1)
    whole = descend._descend.__wrapped__(args, shared)
    monkeypatch.setattr(descend, "_STEP_BYTES", 1)
    monkeypatch.setattr(descend, "_FEWEST", 3)
    for block in (descend._BLOCK_BYTES, 1):  # rows of several steps collected at once, and of one
        monkeypatch.setattr(descend, "_BLOCK_BYTES", block)
        parts = descend._descend.__wrapped__(args, shared)
        for a, b in zip(tree.leaves(whole), tree.leaves(parts), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert not torch.allclose(
        whole["params"]["bias" if model == "Linear" else "bias0"],
        params["bias" if model == "Linear" else "bias0"],
    )


def test_adam_of_clients_that_made_other_numbers_of_steps_is_that_of_pytorch():
    """The first client makes four steps alone, then both make three."""
    how = fd.Training(lr=0.07, optimizer="adam")
    params = {"w": random.normal(random.key(0), (2, 5))}
    leaves = [v.clone().requires_grad_() for v in params["w"]]
    adams = [torch.optim.Adam([v], lr=0.07) for v in leaves]
    memory = fresh_memory(how, params, (2,))
    for t in range(7):
        clients = 1 if t < 4 else 2
        grads = random.normal(random.key(t + 1), (clients, 5))
        now = {"w": params["w"][:clients]}
        update_parameters(how, how.lr, now, {"w": grads.clone()}, memory, clients, even=t < 4)
        for leaf, adam, g in zip(leaves, adams, grads, strict=False):
            leaf.grad = g
            adam.step()
    torch.testing.assert_close(params["w"], torch.stack([v.detach() for v in leaves]))


@pytest.mark.parametrize("bias", [True, False])
def test_both_products_of_an_affine_map_are_one(bias):
    x, weight = (
        random.normal(random.key(1), (3, 40, 150)),
        random.normal(random.key(2), (3, 10, 150)),
    )
    add = random.normal(random.key(3), (3, 10)) if bias else None
    expected = torch.einsum("cnd,ckd->cnk", x.double(), weight.double()) + (
        0 if add is None else add.double().unsqueeze(1)
    )
    found = affine(x, weight, add)
    assert x.numel() * 10 >= linear._LARGE and found.is_contiguous()
    assert torch.allclose(found.double(), expected, atol=1e-4)
    assert torch.allclose(affine(x[:, :5], weight, add), found[:, :5], atol=1e-4)


def test_every_epoch_has_a_permutation_of_its_own():
    """Three epochs of 40 rows in batches of one: each holds every row once, and no two in the same
    order.
    """
    index, key = torch.arange(40).view(1, -1), random.key(3).view(1, 2)
    used, _, steps = batch_schedule(
        fd.Training(epochs=3, batch_size=1), index, torch.ones(1, 40), key
    )
    epochs = used.view(3, 40)
    assert steps.tolist() == [120] and all(torch.equal(e.sort().values, index[0]) for e in epochs)
    assert len({tuple(e.tolist()) for e in epochs}) == 3


def test_every_step_has_crops_of_its_own(monkeypatch):
    """Three epochs of six images in batches of two: nine steps, each with another key."""
    keys, crop_flip = [], descent.crop_flip
    monkeypatch.setattr(
        descent, "crop_flip", lambda x, key: keys.append(key.reshape(-1, 2)) or crop_flip(x, key)
    )
    spec = Spec((1, 8, 8), 2, 2)
    images = random.uniform(random.key(1), (6, 1, 8, 8))
    data = Rows(images, torch.zeros(6, dtype=torch.int64), torch.arange(6), torch.ones(6), spec)
    how = fd.Training(epochs=3, batch_size=2, augment="crop_flip")
    model = fd.Linear()
    descent.descend(
        how, model, CrossEntropy(), model.init(spec, random.key(0)), data, random.key(2)
    )
    assert len(torch.cat(keys)) == len(torch.cat(keys).unique(dim=0)) == 9
