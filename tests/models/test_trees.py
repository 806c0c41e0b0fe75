"""Trees as arrays: scikit-learn's own predictions, arrays that must be refused, and the way over
the wire.
"""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.tree import DecisionTreeRegressor, ExtraTreeRegressor

import foedus as fd
from foedus import kernels, wire
from foedus.models import trees as module
from foedus.models.trees import check_trees, fit_trees, from_sklearn, join, predict_trees
from foedus.wire.arrays import Trees

pytestmark = pytest.mark.usefixtures("compiled_or_not")


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


def by_hand(**changes) -> Trees:
    """x0 <= 0.5: 1; else x1 <= 2: 10, else 100."""
    made = Trees(
        ints(0, -1, 1, -1, -1), torch.tensor([0.5, 0, 2, 0, 0]), ints(1, -1, 3, -1, -1),
        ints(2, -1, 4, -1, -1), torch.tensor([[1.0], [10], [100]]), ints(0), 2,
    )  # fmt: skip
    return replace(made, **changes)


def walk(tree: Trees, root: int, row: np.ndarray) -> np.ndarray:
    """One row through one tree, node after node."""
    at = root
    while tree.feature[at] >= 0:
        yes = row[int(tree.feature[at])] <= float(tree.threshold[at])
        at = int(tree.left[at] if yes else tree.right[at])
    return tree.value[int((tree.feature[:at] < 0).sum())].double().numpy()


def neighbors(thresholds: np.ndarray) -> np.ndarray:
    """Every threshold rounded to float32, and the numbers of float32 next to it on both sides."""
    near = thresholds.astype(np.float32)
    return np.concatenate(
        [near, np.nextafter(near, np.float32(-np.inf)), np.nextafter(near, np.float32(np.inf))]
    )


@pytest.mark.parametrize("kind", [DecisionTreeRegressor, ExtraTreeRegressor])
@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("depth", [1, 4, None])
def test_predictions_are_those_of_scikit_learn(kind, outputs, depth):
    rng = np.random.default_rng(outputs)
    # Neighbors of float32: thresholds lie halfway between them, where rounding could change sides.
    base = rng.normal(size=(40, 3)).astype(np.float32)
    x = np.concatenate(
        [base, np.nextafter(base, np.float32(np.inf)), rng.normal(size=(40, 3)).astype(np.float32)]
    )
    y = rng.normal(size=(len(x), outputs))
    tree = kind(random_state=0, max_depth=depth).fit(x, y if outputs > 1 else y[:, 0])
    inner = tree.tree_.children_left >= 0
    rows = np.repeat(neighbors(tree.tree_.threshold[inner]), 3).reshape(-1, 3)
    rows = np.concatenate([x, rows, rng.normal(size=(100, 3)).astype(np.float32)])
    want = tree.predict(rows).reshape(len(rows), outputs)
    arrays = from_sklearn(tree.tree_)
    got = predict_trees(arrays, torch.from_numpy(rows))
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), want.astype(np.float32))
    check_trees(arrays, 3, outputs, 1)
    walked = np.stack([walk(arrays, 0, row) for row in rows])
    np.testing.assert_array_equal(got.numpy(), walked.astype(np.float32))


@pytest.mark.parametrize("kind", [DecisionTreeRegressor, ExtraTreeRegressor])
def test_rows_on_both_sides_of_a_threshold_between_neighbors(kind):
    """0.1 and the next number of float32: the threshold lies between the two, and rounds to one of
    them or the other.
    """
    for low in (
        np.float32(0.1),
        np.float32(1 / 3),
        np.float32(1e-30),
        np.float32(-7.7),
        np.nextafter(np.float32(2), np.float32(0)),
    ):
        high = np.nextafter(low, np.float32(np.inf))
        x = np.array([[low], [high]], np.float32)
        tree = kind(random_state=0).fit(x, [0.0, 1.0])
        got = predict_trees(from_sklearn(tree.tree_), torch.from_numpy(x))
        np.testing.assert_array_equal(got[:, 0].numpy(), tree.predict(x).astype(np.float32))


@settings(max_examples=60, deadline=None)
@given(st.floats(-1e30, 1e30, allow_nan=False), st.integers(-2, 2))
def test_a_threshold_of_double_precision_is_rounded_down(threshold, steps):
    """x <= t for x of float32 is x <= the largest float32 that is not above t."""
    tree = DecisionTreeRegressor(max_depth=1).fit([[0.0], [1.0]], [0.0, 1.0]).tree_
    state = tree.__getstate__()
    state["nodes"]["threshold"][0] = threshold
    tree.__setstate__(state)
    row = np.float32(threshold)
    for _ in range(abs(steps)):
        row = np.nextafter(row, np.float32(np.inf if steps > 0 else -np.inf))
    want = 0.0 if float(row) <= threshold else 1.0
    got = predict_trees(from_sklearn(tree), torch.tensor([[float(row)]]))
    assert float(got) == want


def test_a_tree_by_hand():
    rows = torch.tensor([[0.5, 9.0], [0.6, 2.0], [0.6, 2.1], [-3.0, 0.0]])
    assert predict_trees(by_hand(), rows)[:, 0].tolist() == [1, 10, 100, 1]
    assert predict_trees(by_hand(), rows, torch.tensor([-0.5]))[:, 0].tolist() == [
        -0.5,
        -5,
        -50,
        -0.5,
    ]


def test_only_leaves_speak():
    arrays = from_sklearn(
        DecisionTreeRegressor(max_depth=2).fit(np.arange(8.0)[:, None], np.arange(8.0) ** 2).tree_
    )
    inner = arrays.feature >= 0
    assert inner.sum() == 3 and (arrays.threshold[~inner] == 0).all()
    # 0 1 4, 9 16, 25 36 and 49
    np.testing.assert_allclose(arrays.value[:, 0], [5 / 3, 25 / 2, 61 / 2, 49], rtol=1e-6)
    assert (
        (arrays.left[~inner] == -1).all()
        and (arrays.right[~inner] == -1).all()
        and (arrays.feature[~inner] == -1).all()
    )


def forest(seed: int, count: int = 3, outputs: int = 2) -> Trees:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(50, 4)).astype(np.float32), rng.normal(size=(50, outputs))
    return fit_trees(x, y, count, seed, depth=4, extra=True)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("depth", [4, None])
@pytest.mark.parametrize(("leaf", "features"), [(1, 0.5), (5, 1.0), (1, 0.01)])
def test_trees_are_those_of_scikit_learn_one_after_the_other_from_one_generator(
    extra, depth, leaf, features
):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(50, 4)).astype(np.float32), rng.normal(size=(50, 2))
    options = {"max_depth": depth, "min_samples_leaf": leaf, "max_features": features}
    generator, splitter = np.random.RandomState(7), "random" if extra else "best"
    fits = [
        DecisionTreeRegressor(random_state=generator, splitter=splitter, **options).fit(x, y)
        for _ in range(3)
    ]
    got = fit_trees(x, y, 3, 7, depth=depth, leaf=leaf, extra=extra, features=features)
    want = from_sklearn(*(fit.tree_ for fit in fits))
    for name in ("feature", "threshold", "left", "right", "value", "roots"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    total = sum(w * fit.predict(x) for w, fit in zip((1.0, 2.0, -1.0), fits, strict=True))
    np.testing.assert_allclose(
        predict_trees(got, torch.from_numpy(x), torch.tensor([1.0, 2.0, -1.0])), total, atol=1e-5
    )


def test_a_seed_may_have_more_than_32_bits():
    assert len(forest((1 << 32) + 7, count=1).roots) == 1


def test_joins_of_joins():
    a, b, c = forest(0), forest(1, count=1), forest(2, count=2)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.5, -1, 2, 3, -0.25, 7])
    whole = join([a, join([b, c])])
    other = join([join([a, b]), c])
    for name in ("feature", "threshold", "left", "right", "value", "roots"):
        assert torch.equal(getattr(whole, name), getattr(other, name))
    check_trees(whole, 4, 2, 6)
    parts = [
        predict_trees(t, x, w) for t, w in zip((a, b, c), weights.split([3, 1, 2]), strict=True)
    ]
    np.testing.assert_allclose(predict_trees(whole, x, weights), sum(parts), atol=1e-5)
    walked = [
        sum(float(w) * walk(whole, int(r), row) for w, r in zip(weights, whole.roots, strict=True))
        for row in x.numpy()
    ]
    np.testing.assert_allclose(predict_trees(whole, x, weights), np.stack(walked), atol=1e-5)
    assert join([a]) is a


def test_roots_in_another_order_are_refused():
    both = join([by_hand(), by_hand(value=torch.tensor([[2.0], [20], [200]]))])
    weights, x = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    assert predict_trees(both, x, weights)[:, 0].tolist() == [1, 100]
    with pytest.raises(fd.ReplyError, match="roots of trees must rise"):
        check_trees(replace(both, roots=both.roots.flip(0)), 2, 1)


def test_one_thread_and_two_give_the_same():
    trees = join([forest(s) for s in range(4)])  # 12 trees
    x = torch.randn(module._THREADS_FROM // 12 + 1, 4, generator=torch.Generator().manual_seed(0))
    weights = torch.linspace(-1, 1, 12)
    alone, two, five = (predict_trees(trees, x, weights, threads=n) for n in (1, 2, 5))
    np.testing.assert_allclose(two, alone, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(five, alone, rtol=1e-6, atol=1e-6)
    few = x[:50]
    np.testing.assert_allclose(predict_trees(trees, few, weights, threads=1), alone[:50], atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 300), st.integers(1, 30), st.integers(1, 70))
def test_every_row_ends_where_it_goes_node_after_node(seed, rows, outputs, count):
    """Blocks of rows that are not full, and trees of one leaf; compiled and not, to the same
    bits.
    """
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(40, 3)).astype(np.float32), rng.normal(size=(40, outputs))
    some = fit_trees(x, y, 4, seed, depth=int(rng.integers(1, 12)), extra=True)
    alone = fit_trees(x[:1], y[:1], 1, seed)
    trees = join([some] * (count // 4) + [alone] * (count % 4 + 1))
    weights = rng.normal(size=len(trees.roots))
    asked = rng.normal(size=(rows, 3)).astype(np.float32)
    exact = sum(
        w * np.stack([walk(trees, int(r), row) for row in asked[:20]])
        for w, r in zip(weights, trees.roots, strict=True)
    )
    found = predict_trees(trees, torch.from_numpy(asked), torch.from_numpy(weights))
    assert found.shape == (rows, outputs)
    np.testing.assert_allclose(found[:20], exact, rtol=1e-4, atol=1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_THREADS_FROM", 0)
        assert torch.equal(
            found,
            predict_trees(trees, torch.from_numpy(asked), torch.from_numpy(weights), threads=3),
        )
    if kernels.ready:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "ready", False)
            assert torch.equal(
                found, predict_trees(trees, torch.from_numpy(asked), torch.from_numpy(weights))
            )
    torch.testing.assert_close(
        found[-1:], predict_trees(trees, torch.from_numpy(asked[-1:]), torch.from_numpy(weights))
    )


def test_rows_with_other_features_are_refused():
    with pytest.raises(fd.ReplyError, match="2 features were asked about rows of 3"):
        predict_trees(by_hand(), torch.zeros(1, 3))


def test_no_rows_no_predictions():
    assert predict_trees(by_hand(), torch.zeros(0, 2)).shape == (0, 1)


def test_a_number_that_is_none_goes_right():
    assert predict_trees(by_hand(), torch.tensor([[float("nan"), 0.0]])).tolist() == [[10]]


def test_over_the_wire_and_back():
    trees = join([forest(0), forest(1)])
    message = wire.encode({"functions": [trees]})
    assert wire.nbytes({"functions": [trees]}) == len(message)
    back = wire.decode(message)["functions"][0]
    assert isinstance(back, Trees) and back.features == 4
    for name in ("feature", "threshold", "left", "right", "value", "roots"):
        assert (
            torch.equal(getattr(trees, name), getattr(back, name))
            and getattr(trees, name).dtype == getattr(back, name).dtype
        )
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(predict_trees(trees, x), predict_trees(back, x))


HOSTILE = {
    "a child backwards": {"left": ints(1, -1, 1, -1, -1)},
    "a child that is itself": {"right": ints(2, -1, 2, -1, -1)},
    "a child out of range, left": {"left": ints(1, -1, 5, -1, -1)},
    "a child out of range, right": {"right": ints(5, -1, 4, -1, -1)},
    "a negative child of an inner node": {"left": ints(-1, -1, 3, -1, -1)},
    "a feature out of range": {"feature": ints(0, -1, 2, -1, -1)},
    "a feature below -1": {"feature": ints(0, -2, 1, -1, -1)},
    "a value that is NaN": {"value": torch.tensor([[1], [float("nan")], [100]])},
    "an infinite value": {"value": torch.tensor([[1], [float("inf")], [100]])},
    "a threshold that is NaN": {"threshold": torch.tensor([float("nan"), 0, 2, 0, 0])},
    "two outputs": {"value": torch.zeros(3, 2)},
    "other features": {"features": 3},
    "two trees": {"roots": ints(0, 2)},
    "no trees": {"roots": ints(dtype=torch.int32)},
    "a root out of range": {"roots": ints(5)},
    "a negative root": {"roots": ints(-1)},
    "children of another length": {"left": ints(1, -1, 3, -1)},
    "a value too many": {"value": torch.zeros(4, 1)},
    "a value too few": {"value": torch.zeros(2, 1)},
    "values without rows": {"value": torch.zeros(3)},
    "thresholds of double precision": {"threshold": torch.zeros(5, dtype=torch.float64)},
    "features that are not whole": {"feature": torch.zeros(5)},
    "a batch of trees": {
        "feature": ints(0, -1, 1, -1, -1)[None], "threshold": torch.zeros(1, 5),
        "left": ints(1, -1, 3, -1, -1)[None], "right": ints(2, -1, 4, -1, -1)[None],
        "value": torch.zeros(1, 3, 1), "roots": ints(0)[None],
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_arrays_are_refused(changes):
    check_trees(by_hand(), 2, 1, 1)
    with pytest.raises(fd.ReplyError):
        check_trees(by_hand(**changes), 2, 1, 1)


STRUCTURAL = [
    name
    for name in HOSTILE
    if "child " in name or "a feature out" in name or "root" in name or "value too" in name
]


@pytest.mark.parametrize("name", [*STRUCTURAL, "two trees", "no trees"])
def test_hostile_nodes_are_never_walked_through(name):
    """Whoever forgets the check gets an error, and no memory that is not a tree's."""
    with pytest.raises(fd.ReplyError):
        predict_trees(by_hand(**HOSTILE[name]), torch.ones(3, 2))


def test_a_root_behind_the_last_node_is_refused():
    with pytest.raises(fd.ReplyError, match="side by side"):
        predict_trees(by_hand(roots=ints(0, 5)), torch.ones(3, 2))


def test_arrays_of_any_layout_and_width():
    wide = {
        k: getattr(by_hand(), k).long().repeat_interleave(2)[::2]
        for k in ("feature", "left", "right")
    }
    strange = by_hand(**wide, threshold=by_hand().threshold.repeat_interleave(2)[::2])
    x = torch.tensor([[0.0, 0.0], [1.0, 2.0], [1.0, 3.0]])
    assert predict_trees(strange, x)[:, 0].tolist() == [1, 10, 100]


def test_trees_deeper_than_asked_for_are_refused():
    """The tree by hand has two levels below its root; a chain has as many as half its nodes."""
    check_trees(by_hand(), 2, 1, 1, depth=2)
    with pytest.raises(fd.ReplyError, match="deeper than the 1 levels"):
        check_trees(by_hand(), 2, 1, 1, depth=1)
    n, at = 401, torch.arange(401, dtype=torch.int32)
    inner = (at % 2 == 0) & (at < n - 1)
    children = [torch.where(inner, at + step, -1) for step in (1, 2)]
    chain = Trees(
        torch.where(inner, 0, -1), torch.zeros(n), *children, torch.zeros(201, 1), ints(0), 1
    )
    check_trees(chain, 1, 1, 1, depth=200)
    with pytest.raises(fd.ReplyError, match="deeper than the 12 levels"):
        check_trees(chain, 1, 1, 1, depth=12)
    with pytest.raises(fd.ReplyError, match="deeper"):
        fd.Forest(trees=1).accept(
            replace(chain, features=2),
            fd.Federation.from_clients([(np.zeros((2, 2)), np.zeros(2))]).spec,
        )


@pytest.mark.parametrize(
    "changes", [{"right": ints(2, -1, 3, -1, -1)}, {"left": ints(2, -1, 3, -1, -1)}]
)
def test_nodes_with_two_parents_or_none_are_refused(changes):
    with pytest.raises(fd.ReplyError, match="the child of one other"):
        check_trees(by_hand(**changes), 2, 1, 1)


def test_any_number_of_trees_if_none_is_required():
    check_trees(join([by_hand()] * 3), 2, 1)
    check_trees(join([by_hand()] * 3), 2, 1, 3)


def test_a_child_in_another_trees_nodes_is_refused():
    """Nodes 0 .. 4 and 5 .. 9 are two trees; the first goes on in the second."""
    both = join([by_hand(), by_hand()])
    astray = replace(both, right=both.right.index_fill(0, torch.tensor([2]), 9))
    with pytest.raises(fd.ReplyError, match="side by side"):
        predict_trees(astray, torch.ones(1, 2))


# The trees of a reply are checked once, when they come; the compiled code must then be safe with
# them. These are not.


def test_a_child_in_another_trees_nodes_does_not_pass_the_check():
    both = join([by_hand(), by_hand()])
    astray = replace(both, right=both.right.index_fill(0, torch.tensor([2]), 9))
    with pytest.raises(fd.ReplyError):
        check_trees(astray, 2, 1, 2)


def test_two_trees_with_one_root_do_not_pass_the_check():
    with pytest.raises(fd.ReplyError):
        check_trees(by_hand(roots=ints(0, 0)), 2, 1, 2)


def test_small_integers_do_not_wrap_when_joined():
    def small(t):
        return t.to(torch.int8)

    tree = by_hand(
        feature=small(by_hand().feature),
        left=small(by_hand().left),
        right=small(by_hand().right),
        roots=small(ints(0)),
    )
    check_trees(tree, 2, 1, 1)
    many = join([tree] * 40)  # 200 nodes
    assert (many.roots.long() == 5 * torch.arange(40)).all()
    check_trees(many, 2, 1, 40)


def test_one_child_on_both_sides_is_refused():
    """Node 0 goes to node 1, a leaf, either way: a node with two parents where none is without
    one.
    """
    fields = {"feature": ints(0, -1), "left": ints(1, -1), "right": ints(1, -1), "roots": ints(0)}
    trees = Trees(**fields, threshold=torch.zeros(2), value=torch.ones(1, 1), features=2)
    with pytest.raises(fd.ReplyError, match="the child of one other"):
        check_trees(trees, 2, 1, 1)


def test_a_pickled_copy_is_checked_and_packed_anew():
    x = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    trees = fit_trees(x, x[:, :1].astype(np.float64), 2, seed=0)
    before = predict_trees(trees, torch.from_numpy(x))
    again = pickle.loads(pickle.dumps(trees))
    assert set(vars(again)) == {f.name for f in fields(trees)} < set(vars(trees))
    torch.testing.assert_close(predict_trees(again, torch.from_numpy(x)), before)
