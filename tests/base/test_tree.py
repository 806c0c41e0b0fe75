from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from foedus.base import tree
from foedus.base.tree import State
from foedus.errors import CheckpointError


@tree.node(static=("degree",))
@dataclass(frozen=True, eq=False)
class Poly:
    coefficients: Tensor
    degree: int


def test_state_reads_as_attributes():
    state = State(w=1, v=2)
    assert (state.w, state["v"]) == (1, 2)
    assert state.replace(w=3) == {"w": 3, "v": 2}
    assert state.w == 1
    assert isinstance(copy.deepcopy(state), State)
    with pytest.raises(AttributeError, match="no 'x', only w, v"):
        state.x  # noqa: B018


def test_leaves_and_map_see_every_container():
    t = State(a=torch.ones(2), b=[1.0, (torch.zeros(1), {"c": 2})], p=Poly(torch.ones(3), 2))
    assert len(tree.leaves(t)) == 5
    doubled = tree.map(lambda x: 2 * x, t)
    assert isinstance(doubled, State)
    assert isinstance(doubled.p, Poly)
    assert doubled.p.degree == 2
    assert doubled.p.coefficients.tolist() == [2, 2, 2]
    assert doubled.b[1][1] == {"c": 4}
    values, structure = tree.flatten(t)
    assert tree.unflatten(values, structure).b[0] == 1.0


def test_forms_tell_trees_apart():
    form = lambda t: tree.flatten(t)[1]  # noqa: E731
    assert form({"a": 1, "b": [2]}) == form({"a": 5, "b": [6]})
    different = [
        {"a": 1, "b": [2, 3]},
        {"a": 1, "c": [2]},
        {"a": 1, "b": (2,)},
        State(a=1, b=[2]),
        [1, [2]],
        1,
    ]
    assert all(form(t) != form({"a": 1, "b": [2]}) for t in different)
    assert form(Poly(torch.ones(1), 2)) != form(Poly(torch.ones(1), 3))


def test_map_meets_other_trees_by_name_and_refuses_other_forms():
    assert tree.map(lambda a, b: a - b, {"x": 5, "y": [7]}, {"y": [1], "x": 2}) == {
        "x": 3,
        "y": [6],
    }
    assert tree.map(lambda a, b: (a, b), [1], [{"deep": 2}]) == [(1, {"deep": 2})]
    for other in (
        {"x": 1},
        {"x": 1, "z": [2]},
        {"x": 1, "y": [2, 3]},
        {"x": 1, "y": (2,)},
        4,
        [1, [2]],
    ):
        with pytest.raises(ValueError, match="trees differ"):
            tree.map(lambda a, b: a, {"x": 5, "y": [7]}, other)


def test_flatten_stops_at_given_nodes_and_unflatten_needs_every_leaf():
    values, form = tree.flatten([Poly(torch.ones(3), 2), 4], is_leaf=lambda t: isinstance(t, Poly))
    assert isinstance(values[0], Poly)
    assert tree.unflatten(["p", "q"], form) == ["p", "q"]
    with pytest.raises(ValueError, match="more leaves"):
        tree.unflatten([1, 2, 3], form)


def test_nodes_go_through_vmap():
    stacked = Poly(torch.arange(6.0).reshape(2, 3), 2)
    out = vmap(lambda p: State(p=Poly(p.coefficients * 2, p.degree)))(stacked)
    assert torch.equal(out.p.coefficients, stacked.coefficients * 2)


def test_arithmetic_by_hand():
    a, b = {"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([10.0, 20.0])}
    assert tree.add(a, b, scale=0.5)["x"].tolist() == [6, 12]
    assert tree.sub(b, a)["x"].tolist() == [9, 18]
    assert tree.scale(a, 3.0)["x"].tolist() == [3, 6]


def test_zeros_like_leaves_scalars_alone():
    zero = tree.zeros_like({"x": torch.ones(2, dtype=torch.int64), "n": 3, "none": None})
    assert zero["x"].tolist() == [0, 0]
    assert zero["x"].dtype == torch.int64
    assert zero["n"] == 3
    assert zero["none"] is None


def test_all_finite():
    assert tree.all_finite({"x": torch.ones(2), "i": torch.ones(3, dtype=torch.int64), "s": "nan"})
    assert not tree.all_finite([torch.tensor([1.0, float("nan")])])
    assert not tree.all_finite((torch.tensor(float("inf")),))


def test_dissolve_and_restore_are_inverse():
    t = State(
        w=torch.ones(2),
        l=[1, 2.5, True, None, "s"],
        t=(torch.zeros(()),),
        d={"x": State()},
        p=Poly(torch.ones(1), 4),
    )
    form, tensors = tree.dissolve(t)
    back = tree.restore(json.loads(json.dumps(form)), tensors)
    assert isinstance(back, State)
    assert isinstance(back.d["x"], State)
    assert isinstance(back.t, tuple)
    assert back.l == t.l
    assert back.p.degree == 4
    assert torch.equal(back.w, t.w)
    assert torch.equal(back.t[0], t.t[0])


def test_dissolve_keeps_tensors_apart_whose_paths_look_alike():
    t = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, "a.b'": torch.tensor(3.0)}
    back = tree.restore(*tree.dissolve(t))
    assert [back["a.b"].item(), back["a"]["b"].item(), back["a.b'"].item()] == [1, 2, 3]


def test_dissolve_refuses_what_cannot_be_saved():
    with pytest.raises(CheckpointError, match=r"t\.f holds a set"):
        tree.dissolve({"f": {1}})


@pytest.mark.parametrize(
    "form",
    [
        {"tensor": "missing"},
        {"node": "Unknown", "parts": {}, "static": {}},
        {"node": "Poly", "parts": {}, "static": {}},
        {"dict": 3},
        {"strange": 1},
        None,
    ],
)
def test_restore_refuses_damage(form):
    with pytest.raises(CheckpointError, match="damaged"):
        tree.restore(form, {})
