"""Training where the rows lie: on the meta device, which computes nothing but refuses, like a GPU, tensors of two devices in one operation."""

from __future__ import annotations

import pytest
import torch

import foedus as fd
from foedus.core import random, tree
from foedus.core.rows import Rows, take
from foedus.core.spec import Spec
from foedus.models import training
from foedus.models.losses import CrossEntropy, Squared

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
    seen, move = [], training.to

    def to(device, values):
        if device.type != "cpu":
            return move(device, values)
        seen.extend(v.device.type for v in tree.leaves(values))
        return values

    monkeypatch.setattr(training, "to", to)
    return seen


def rows(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(20, 3, 8, 8, device=device), torch.zeros(20, dtype=torch.int64, device=device)


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
    result = training._descend.__wrapped__(args, (HOWS[how], MODELS[model], CrossEntropy(), *rows("meta"), 0.1))
    assert {v.device.type for v in tree.leaves([result["params"], result["memory"]])} == {"meta"}
    assert result["steps"].device.type == "cpu" and result["steps"].tolist() == [3 * HOWS[how].epochs, 2 * HOWS[how].epochs]
    assert "meta" in devices


@pytest.mark.parametrize("model", MODELS)
def test_targets_and_gradients_are_made_on_the_device_of_the_rows(model, devices):
    model, (x, y) = MODELS[model], rows("meta")
    target = torch.zeros(2, 10, 4)
    found = training._descend_to.__wrapped__({**two_clients(model), "target": target}, (HOWS["plain"], model, Squared(), x))
    assert {v.device.type for v in found.values()} == {"meta"}
    w, data = model.init(SPEC, random.key(0)), Rows(x, y, torch.arange(5), torch.ones(5), SPEC)
    value, slope = training.value_and_gradient(model, CrossEntropy(), w, data)
    slopes = [slope, training.gradient(model, CrossEntropy(), w, data)]
    some = two_clients(model)
    slopes.append(training.batch_gradient(model, CrossEntropy(), some["params"], some["index"], some["weight"] / 10, x, y))
    assert {v.device.type for v in tree.leaves([value, slopes])} == {"meta"}


def test_rows_come_to_the_index_and_the_index_goes_to_the_rows():
    x, y = rows("meta")
    with pytest.raises(NotImplementedError):  # nothing comes from there, but it was asked for
        take(x, torch.arange(3))
    assert take(x, torch.arange(3, device="meta")).device.type == "meta"
    assert {v.device.type for v in Rows(x, y, torch.arange(3), torch.ones(3), SPEC).there} == {"meta"}


@pytest.mark.parametrize("device", ["cudo", "cuda:97"])
def test_a_device_that_is_not_there_is_an_error_at_once(device):
    with pytest.raises(fd.ConfigError, match=f"device='{device}' cannot be used here"):
        fd.Local(device=device)
