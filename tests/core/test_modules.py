"""Saved runs with a user's torch modules: which classes are made again, and from where."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import foedus as fd
from foedus.core.modules import find_class, modules_in
from foedus.storage import checkpoint
from tests.export import families
from tests.export.families import THREE, Net, X, run


class Outer:
    class Inner(torch.nn.Module):
        pass


class Wide(torch.nn.Module):
    """Needs an argument."""

    def __init__(self, width):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, width), torch.nn.Linear(width, 3)

    def forward(self, x):
        return self.last(self.first(x).relu())


def saved(name, tmp_path):
    path = tmp_path / "run.safetensors"
    made = run(name)
    made.save(path)
    return made, path


@pytest.mark.parametrize("name", ["fedavg-module", "ffgb-modules", "fednewton-module"])
@pytest.mark.parametrize("where", [families, [families], "tests.export.families"])
def test_a_module_is_made_of_an_allowed_class(name, where, tmp_path):
    made, path = saved(name, tmp_path)
    generator = torch.get_rng_state()
    again = fd.Run.load(path, import_from=where)
    assert torch.equal(generator, torch.get_rng_state())
    torch.testing.assert_close(again.model.outputs(X), made.model.outputs(X), rtol=0, atol=0)
    (mine,), (theirs,) = (modules_in(r.algorithm).values() for r in (again, made))
    assert type(mine) is Net and mine is not theirs
    assert [p.requires_grad for p in mine.parameters()] == [
        p.requires_grad for p in theirs.parameters()
    ]
    for k, v in theirs.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[k], v, rtol=0, atol=0)


def test_parameters_frozen_after_they_were_made_stay_frozen(tmp_path):
    net = families.seeded()
    net.norm.requires_grad_(False)
    made = fd.run(fd.FedAvg(net, lr=0.1), THREE, rounds=1)
    made.save(tmp_path / "run")
    again = fd.Run.load(tmp_path / "run", import_from=families)
    frozen = {n for n, p in again.algorithm.model.module.named_parameters() if not p.requires_grad}
    assert frozen == {"first.bias", "norm.weight", "norm.bias"}


def test_nothing_is_made_without_leave(tmp_path):
    _, path = saved("fedavg-module", tmp_path)
    with pytest.raises(fd.CheckpointError, match=r"pass the algorithm.* where Net is: import_from"):
        fd.Run.load(path)
    with pytest.raises(fd.CheckpointError, match=r"families:Net; math has no class for it"):
        fd.Run.load(path, import_from="math")


def test_nothing_is_imported_because_a_file_says_so(tmp_path):
    _, path = saved("fedavg-module", tmp_path)
    trees, meta = checkpoint.read(path)
    (tmp_path / "surprise_of_a_file.py").write_text("raise SystemExit('imported')\n")
    meta["modules"][0]["class"] = "surprise_of_a_file:Net"
    checkpoint.write(path, trees, meta)
    sys.path.insert(0, str(tmp_path))
    try:
        assert fd.Run.load(path, import_from=families).model is not None  # the one that has Net
    finally:
        sys.path.remove(str(tmp_path))
    assert "surprise_of_a_file" not in sys.modules


def test_a_class_that_needs_arguments(tmp_path):
    algorithm = fd.FedAvg(Wide(4), lr=0.1)
    fd.run(algorithm, THREE, rounds=1).save(tmp_path / "run")
    with pytest.raises(fd.CheckpointError, match=r"Wide\(\) cannot be made without arguments"):
        fd.Run.load(tmp_path / "run", import_from=__name__)
    assert fd.Run.load(tmp_path / "run", algorithm).model.predict(X).shape == (150,)


def homes(**classes):
    """A Python module for each class, which calls it Net."""
    made = []
    for name, cls in classes.items():
        made.append(ModuleType(name))
        made[-1].Net = cls
    return made


class Other(torch.nn.Module):
    """Named as Net is, with other tensors."""


class Sigmoid(Net):
    """The same tensors, another layer."""

    def __init__(self):
        super().__init__()
        self.last[0] = torch.nn.Sigmoid()


@pytest.mark.parametrize(
    ("cls", "words"), [(Other, "does not fit the saved tensors"), (Sigmoid, "is not the .*Net")]
)
def test_a_class_that_has_changed(cls, words, tmp_path):
    _, path = saved("fedavg-module", tmp_path)
    with pytest.raises(fd.CheckpointError, match=words):
        fd.Run.load(path, import_from=homes(mine=cls))


def test_which_class():
    here = sys.modules[__name__]
    assert find_class("elsewhere:Outer.Inner", [here]) is Outer.Inner
    # the class of the module that is named wins; else a name must be that of one class
    both = homes(one=Net, two=Other)
    assert find_class("tests.export.families:Net", both) is Net
    with pytest.raises(fd.ConfigError, match="one, two has 2 classes for it"):
        find_class("__main__:Net", both)
    assert find_class("__main__:Net", homes(one=Net, two=Net)) is Net


@pytest.mark.parametrize(
    "name",
    [
        "tests.core.test_modules:torch.nn.Identity",  # by way of what the module has imported
        "tests.core.test_modules:Outer",  # no torch module
        "tests.core.test_modules:saved",
        "tests.core.test_modules:X.dtype",
        "tests.core.test_modules:Outer.Missing",
        "tests.core.test_modules:test_which_class.<locals>.Net",
        "tests.core.test_modules",
    ],
)
def test_what_is_no_class_of_the_module_is_not_found(name):
    with pytest.raises(fd.ConfigError, match="test_modules has no class for it"):
        find_class(name, [sys.modules[__name__]])


@pytest.mark.parametrize("given", ["no_such_module", [7]])
def test_where_to_look_must_be_modules(given, tmp_path):
    _, path = saved("fedavg-module", tmp_path)
    with pytest.raises(fd.ConfigError, match="import_from="):
        fd.Run.load(path, import_from=given)


def test_files_without_modules_are_read_as_before(tmp_path):
    made, path = saved("fedavg-module", tmp_path)
    trees, meta = checkpoint.read(path)
    del trees["modules"], meta["modules"]
    checkpoint.write(path, trees, meta)
    again = fd.Run.load(path, made.algorithm)
    torch.testing.assert_close(again.model.outputs(X), made.model.outputs(X))
    with pytest.raises(
        fd.CheckpointError, match=r"pass the algorithm: fd.Run.load\(path, algo[^,]*$"
    ):
        fd.Run.load(path)
    run("fedavg-linear").save(path)
    assert "modules" not in checkpoint.read(path)[1]


class Waves(torch.nn.Linear):
    """Has a buffer that files cannot hold."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("turn", torch.tensor([1j]))


def test_a_module_that_a_file_cannot_hold_is_left_out(tmp_path):
    algorithm = fd.FedAvg(Waves(), lr=0.1)
    fd.run(algorithm, THREE, rounds=1).save(tmp_path / "run")
    with pytest.raises(fd.CheckpointError, match="cannot be built from text"):
        fd.Run.load(tmp_path / "run", import_from=__name__)
    assert fd.Run.load(tmp_path / "run", algorithm).model is not None


def test_a_file_that_lacks_the_tensors_is_damaged(tmp_path):
    _, path = saved("fedavg-module", tmp_path)
    trees, meta = checkpoint.read(path)
    for modules in ([], [[]]):
        checkpoint.write(path, {**trees, "modules": modules}, meta)
        with pytest.raises(fd.CheckpointError, match=r"damaged|does not fit"):
            fd.Run.load(path, import_from=families)
