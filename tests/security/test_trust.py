"""What a file or a message says may never decide what a process trusts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import skops.io
import torch
from sklearn.dummy import DummyRegressor

import foedus as fd
from foedus.core.describe import to_config
from foedus.core.result import known_algorithm
from foedus.models.oracles import Sklearn
from foedus.storage import checkpoint as files


class Payload:
    """What an attacker packs: a regressor by its looks, that makes a file when it is unpacked."""

    def __init__(self, path: str):
        self.path = path

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        open(self.path, "w").close()

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.zeros(len(x))


NAME = f"{Payload.__module__}.{Payload.__qualname__}"


def archive(path) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(skops.io.dumps(Payload(str(path))), np.uint8).copy())


def test_the_attack_works_where_somebody_trusts_the_type(tmp_path):
    """So that the tests below would notice."""
    mark = tmp_path / "mark"
    skops.io.loads(archive(mark).numpy().tobytes(), trusted=[NAME])
    assert mark.exists()


@pytest.mark.parametrize("trusted", [[NAME], ["builtins.eval"], NAME])
def test_a_message_cannot_name_trusted_types(trusted):
    """The settings of an algorithm in a header, as a site builds it."""
    config = to_config(fd.FFGB(Sklearn(None)))
    config["oracle"]["estimator"], config["oracle"]["trusted"] = None, trusted
    with pytest.raises(fd.ConfigError, match="never taken from a file or a message"):
        known_algorithm(config)


def test_a_saved_run_cannot_name_trusted_types(tmp_path):
    """A run whose ensemble was replaced by an archive of the attacker's, with the type trusted."""
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    fed = fd.split(fd.Data.from_arrays(rows, rows[:, 0], rows, rows[:, 0]), "iid", clients=2)
    run = fd.run(fd.FFGB(Sklearn(DummyRegressor())), fed, 1, progress=False)
    path, mark = tmp_path / "run.safetensors", tmp_path / "mark"
    run.save(path)
    trees, meta = files.read(path)
    oracle = meta["settings"]["algorithm"]["oracle"]
    oracle["estimator"], oracle["trusted"] = None, [NAME]
    files.write(tmp_path / "evil.safetensors", trees, meta)
    with pytest.raises(fd.FoedusError, match="never taken from a file or a message"):
        fd.Run.load(tmp_path / "evil.safetensors").predict(rows)
    assert not mark.exists()


def test_fields_of_trust_are_marked():
    """Whatever is called `trusted`, in any class that text can describe, is local."""
    from foedus.core.algorithm import Algorithm
    from foedus.core.describe import subclasses
    from foedus.models import FeatureMap, Model, Oracle

    for cls in subclasses(Algorithm, FeatureMap, Model, Oracle).values():
        for f in dataclasses.fields(cls):
            assert f.name != "trusted" or f.metadata.get("local"), cls
