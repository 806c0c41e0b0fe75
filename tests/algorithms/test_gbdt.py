"""FederatedGBDT against histogram boosting of pooled rows, written in NumPy with the same bins."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

import foedus as fd
from foedus import wire
from foedus.algorithms.gbdt.binning import PARTS, REFINEMENTS, counted, find_edges
from foedus.algorithms.gbdt.checks import check_histograms
from foedus.algorithms.gbdt.growing import Growing, leaves_of
from foedus.models.histograms import SplitRule, sum_histograms, summed_plainly
from foedus.models.trees import predict_trees


def softmax(f):
    e = np.exp(f - f.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class Pooled:
    """Boosting of all rows: trees are nested tuples (feature, threshold, left, right) or values.

    Everything is found by going through features and edges one by one.
    """

    def __init__(self, how: fd.FederatedGBDT, edges, loss, classes=None):
        self.how, self.edges, self.loss, self.classes = how, edges, loss, classes

    def start(self, y):
        if self.loss == "cross_entropy":
            logs = np.log(np.bincount(y, minlength=self.classes) / len(y))
            return logs - logs.mean()
        mean = y.mean(0, keepdims=y.ndim == 1)
        return np.log(mean) if self.loss == "poisson" else mean

    def derivatives(self, f, y):
        """g, h (n, trees), and what each tree adds to the outputs."""
        if self.loss == "cross_entropy":
            p = softmax(f)
            g, h = p - np.eye(self.classes)[y], p * (1 - p)
            if self.classes == 2:  # by z = f_1 - f_0
                return g[:, 1:], h[:, 1:], np.array([[-0.5, 0.5]])
            return g, h, np.eye(self.classes)
        y = y.reshape(len(y), -1)
        mean = np.exp(f) if self.loss == "poisson" else f
        h = mean if self.loss == "poisson" else np.ones_like(f)
        return mean - y, h, np.eye(f.shape[1])

    def tree(self, x, g, h, depth):
        how, best = self.how, (1e-9, None)
        score = lambda i: g[i].sum() ** 2 / (h[i].sum() + how.l2)  # noqa: E731
        value = -how.lr * g.sum() / (h.sum() + how.l2)
        if not depth:
            return value
        whole = np.ones(len(g), bool)
        for j, edges in enumerate(self.edges):
            for edge in edges:
                left = x[:, j] <= edge
                if min(left.sum(), (~left).sum()) < how.leaf:
                    continue
                gain = score(left) + score(~left) - score(whole)
                if gain > best[0] * (1 + 2e-6):
                    best = (gain, (j, edge, left))
        if best[1] is None:
            return value
        j, edge, left = best[1]
        parts = (self.tree(x[i], g[i], h[i], depth - 1) for i in (left, ~left))
        return (j, float(edge), *parts)

    def said(self, tree, x):
        if not isinstance(tree, tuple):
            return np.full(len(x), tree)
        j, edge, left, right = tree
        return np.where(x[:, j] <= edge, self.said(left, x), self.said(right, x))

    def run(self, x, y, rounds, at):
        f = np.tile(self.start(y), (len(x), 1))
        out, grown = np.tile(self.start(y), (len(at), 1)), []
        for _ in range(rounds):
            g, h, ways = self.derivatives(f, y)
            trees = [self.tree(x, g[:, t], h[:, t], self.how.depth) for t in range(len(ways))]
            f = f + sum(np.outer(self.said(t, x), w) for t, w in zip(trees, ways, strict=True))
            out = out + sum(np.outer(self.said(t, at), w) for t, w in zip(trees, ways, strict=True))
            grown.append(trees)
        return out, grown


def nested(trees, t, ways):
    """Tree t of a round as `Pooled` has it, without the values of leaves."""
    leaf = (trees.feature < 0).cumsum(0) - 1

    def node(i):
        if trees.feature[i] < 0:
            return int(leaf[i])
        children = (node(int(trees.left[i])), node(int(trees.right[i])))
        return (int(trees.feature[i]), float(trees.threshold[i]), *children)

    return node(int(trees.roots[t]))


def shape(tree):
    """Features and thresholds alone."""
    return (tree[0], tree[1], shape(tree[2]), shape(tree[3])) if isinstance(tree, tuple) else None


def federation(kind, n=240, seed=5):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    x[:, 2] = rng.integers(0, 2, n)  # a category as 0 and 1
    x[:, 3] = rng.integers(0, 5, n)
    score = x[:, 0] + x[:, 2] * x[:, 1] - 0.3 * x[:, 3] + 0.5 * rng.normal(size=n)
    y = {
        "values": lambda: score.astype(np.float32),
        "two values": lambda: np.stack([score, x[:, 1] ** 2], 1).astype(np.float32),
        "counts": lambda: rng.poisson(np.exp(0.4 * score + 0.5)).astype(np.float32),
        "two classes": lambda: (score > 0.2).astype(np.int64),
        "three classes": lambda: np.digitize(score, [-1.0, 0.4]),
    }[kind]()
    classes = {"two classes": 2, "three classes": 3}.get(kind)
    order = np.argsort(score)  # clients see different targets
    parts = np.split(order, [31, 90, 200])
    test = (x[:50], y[:50])
    fed = fd.Federation.from_clients([(x[p], y[p]) for p in parts], test=test, classes=classes)
    return fed, x, y, classes


LOSS = {"counts": "poisson", "two classes": "cross_entropy", "three classes": "cross_entropy"}
KINDS = ["values", "two values", "counts", "two classes", "three classes"]


@pytest.mark.parametrize("kind", KINDS)
def test_trees_are_those_of_pooled_rows_split_for_split(kind):
    fed, x, y, classes = federation(kind)
    loss = LOSS.get(kind, "squared")
    how = fd.FederatedGBDT(loss=loss, lr=0.37, depth=3, leaf=7, l2=0.6, bins=12)
    run = fd.run(how, fed, 4, evaluate_every=0)
    edges = [r[:w].numpy() for r, w in zip(run.state.edges, run.state.widths, strict=True)]
    reference = Pooled(how, edges, loss, classes)
    want, trees = reference.run(x.astype(float), y, 4, x[:50].astype(float))
    np.testing.assert_allclose(run.model.outputs(x[:50]), want, atol=2e-5)
    for part, grown in zip(run.state.f.parts[1:], trees, strict=True):
        for t, tree in enumerate(grown):
            assert shape(nested(part, t, None)) == shape(tree)
    splits = sum(isinstance(tree, tuple) for grown in trees for tree in grown)
    assert splits == sum(map(len, trees))  # none is a single leaf


@pytest.mark.parametrize("kind", ["values", "three classes"])
def test_how_rows_are_divided_does_not_matter(kind):
    fed, x, y, classes = federation(kind)
    one = fd.Federation.from_clients([(x, y)], test=(x[:50], y[:50]), classes=classes)
    how = fd.FederatedGBDT(depth=3, leaf=7, bins=12)
    a, b = (fd.run(how, f, 5, evaluate_every=0) for f in (fed, one))
    assert torch.equal(a.state.edges, b.state.edges)
    np.testing.assert_allclose(a.model.outputs(x), b.model.outputs(x), atol=1e-5)


def test_a_stump_by_hand():
    """y = 0, 0, 6, 6 at x = 0, 1, 2, 3: f^0 = 3, g = 3, 3, -3, -3, h = 1. With l2 = 1 the split
    at 1 gains 36 / 3 + 36 / 3 - 0; leaves say -+6 / 3 = -+2, of which a tenth is made.
    """
    x = np.array([[0], [1], [2], [3]], np.float32)
    y = np.array([0, 0, 6, 6.0], np.float32)
    fed = fd.Federation.from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], test=(x, y))
    run = fd.run(fd.FederatedGBDT(depth=1, leaf=1, l2=1.0), fed, 1)
    np.testing.assert_allclose(run.model.outputs(x)[:, 0], [2.8, 2.8, 3.2, 3.2], rtol=1e-6)
    assert run.history.mse.tolist() == pytest.approx([9.0, 2.8**2])


def test_weights_of_rows_are_repetitions():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(60, 2)).astype(np.float32), rng.normal(size=60).astype(np.float32)
    weight = rng.integers(1, 4, 60)
    some = fd.FederatedGBDT(depth=2, leaf=1, l2=1.0)
    twice = fd.Federation.from_clients([(x.repeat(weight, 0), y.repeat(weight))], test=(x, y))
    w = weight.astype(float)
    data = fd.Data.from_arrays(x, y, x, y)
    data = dataclasses.replace(data, weights_train=w, weights_test=w)
    weighted = fd.split(data, "iid", clients=2, seed=0)
    # weights have mean 1, so that l2 must be as much smaller as the sums are
    mean = weight.mean()
    ours = fd.FederatedGBDT(depth=2, leaf=1, l2=1 / mean)
    a = fd.run(ours, weighted, 3, evaluate_every=0)
    b = fd.run(some, twice, 3, evaluate_every=0)
    np.testing.assert_allclose(a.model.outputs(x), b.model.outputs(x), atol=1e-4)


# -- bins ------------------------------------------------------------------------------------------


def test_edges_are_quantiles_of_all_rows():
    """Each bin has between half and twice its part of the rows; few values have a bin each."""
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=4000), np.exp(3 * rng.normal(size=4000)),
                  rng.integers(0, 2, 4000), rng.integers(-3, 4, 4000), np.full(4000, 7.5),
                  1000 + rng.uniform(size=4000)], 1).astype(np.float32)  # fmt: skip
    asked = []

    def count(thresholds):
        asked.append(thresholds.shape)
        return counted(x, thresholds)

    edges = find_edges(count, 6, 16)
    assert len(asked) == REFINEMENTS + 1 and max(w for _, w in asked[1:]) <= 2 * 16 * (PARTS + 2)
    sizes = [np.bincount(np.searchsorted(e, c), minlength=len(e) + 1) for e, c in zip(edges, x.T)]  # noqa: B905
    for j in (0, 1, 5):
        assert len(edges[j]) == 15
        assert sizes[j].min() > 4000 / 16 / 2 and sizes[j].max() < 4000 / 16 * 2, sizes[j]
    assert [len(edges[j]) for j in (2, 3, 4)] == [1, 6, 0]
    assert sizes[2].tolist() == np.bincount(x[:, 2].astype(int)).tolist()
    assert all((np.diff(e) > 0).all() for e in edges)


def test_noise_in_every_cell_does_not_multiply_them():
    """Differential privacy: counts of nobody's rows, negative ones too."""
    rng = np.random.default_rng(0)
    widths = []

    def count(thresholds):
        widths.append(thresholds.shape[1])
        return 30 * rng.normal(size=thresholds.shape)

    edges = find_edges(count, 2, 16)
    assert max(widths[1:]) <= 2 * 8 * 16 + 2 * 16 * (PARTS - 1)
    assert all(len(e) <= 15 and np.isfinite(e).all() for e in edges)


def test_counted_by_hand():
    """-1 and 0 are in (-inf, 0], 0.5 and 1 in (0, 1], 2 beyond."""
    x = np.array([[-1], [0], [0.5], [1], [2]], np.float32)
    assert counted(x, np.array([[0, 1, np.inf]], np.float32)).tolist() == [[2, 2, 1]]


def test_histograms_compiled_and_plain():
    rng = np.random.default_rng(2)
    bins = np.stack([rng.integers(0, b, 500) for b in (3, 256, 1)]).astype(np.uint8)
    offsets, node = np.array([0, 3, 259, 260]), rng.integers(-1, 4, 500).astype(np.int32)
    values = rng.normal(size=(500, 3))
    a = sum_histograms(bins, offsets, node, values, 4)
    b = summed_plainly(bins, offsets, node, values, 4)
    assert a.shape == (4, 260, 3)
    np.testing.assert_array_equal(a, b)
    one = values[(node == 2) & (bins[1] == 17)].sum(0)
    np.testing.assert_allclose(a[2, 3 + 17], one, atol=1e-12)
    for bad in (bins + 1, bins):
        nodes = 4 if bad is not bins else 3
        if fd.kernels.ready:
            with pytest.raises(ValueError, match="a bin or a node is out of range"):
                sum_histograms(bad.astype(np.uint8), offsets, node, values, nodes)


# -- what travels ----------------------------------------------------------------------------------


def test_bytes_up_are_histograms_of_the_smaller_children():
    """12 bins of 2 channels (gradients and rows: the second derivative is 1) of 4 bytes. Depth 2:
    the root, then the smaller of its children; the last level is never asked for.
    """
    x = np.arange(12, dtype=np.float32)[:, None]
    y = (x[:, 0] > 8).astype(np.float32) * 5 + x[:, 0]
    fed = fd.Federation.from_clients([(x[::2], y[::2]), (x[1::2], y[1::2])], test=(x, y))
    run = fd.run(fd.FederatedGBDT(depth=2, leaf=1), fed, 2, evaluate_every=0)
    assert run.state.edges.shape == (1, 11)
    one = wire.nbytes({"sums": torch.zeros(1, 12, 2)})
    first, second = run.records.values("bytes_up")[-2:]
    assert second - first == 2 * 2 * one  # two clients, two exchanges
    assert run.records.last("messages_up") - run.records.values("messages_up")[-2] == 4


def test_the_smaller_child_is_asked_for():
    """y jumps at 2 of 12 rows: the root's children have 2 and 10 rows, and the histogram that the
    second exchange brings has 2.
    """
    x = np.arange(12, dtype=np.float32)[:, None]
    y = (x[:, 0] > 9).astype(np.float32) * 50 + x[:, 0]
    growing = Growing([np.arange(11.0)], torch.eye(1), SplitRule(leaf=1))
    asked = []

    def ask(trees, nodes):
        node = predict_trees(trees, torch.from_numpy(x)).numpy()[:, 0].round().astype(int) - 1
        values = np.stack([y.mean() - y, np.ones(12), np.ones(12)], 1)
        bins = np.arange(12, dtype=np.uint8)[None]
        found = sum_histograms(bins, np.array([0, 12]), node, values, nodes)
        asked.append(found[..., 2].sum(1).tolist())
        return found, (0,)

    growing.grow(2, ask, 1.0)
    assert asked == [[12.0], [2.0]]


def test_leaves_of_noisy_sums_are_those_that_were_tested():
    """The root's split at edge 1 says that its left child has the sums (-6, 6, 6). With other noise
    they are (-5, 3, 3), and a split at edge 0 has (-4, 1.5, 1.5) and (-1, 1.5, 1.5): the second
    leaf has not -6 + 4.
    """
    growing = Growing([np.arange(3.0)], torch.eye(1), SplitRule(leaf=1, l2=0.0))
    root = np.array([[-3, 3, 3], [-3, 3, 3], [3, 3, 3], [3, 3, 3.0]])
    child = np.array([[-4, 1.5, 1.5], [-1, 1.5, 1.5], [0, 0, 0], [0, 0, 0.0]])
    answers = iter([root, child])
    growing.grow(2, lambda trees, nodes: (next(answers)[None], (0,)), 1.0)
    nodes = growing.trees[0]
    left = nodes[nodes[0]["child"]]
    leaves = [nodes[left["child"] + i]["sums"].tolist() for i in (0, 1)]
    assert leaves == [[-4, 1.5, 1.5], [-1, 1.5, 1.5]]


def test_values_of_noisy_sums_by_hand():
    """H = -0.9 is cut off at 1e-3: 5 / (0.001 + 1), not 5 / 0.1, and 5 / 0.001 without l2."""
    sums = np.array([-5.0, -0.9, 10.0])
    assert SplitRule(l2=1.0).value(sums) == pytest.approx(5 / 1.001)
    assert SplitRule(l2=0.0).value(sums) == pytest.approx(5000)
    assert SplitRule(l2=1.0).value(np.array([-5.0, 4, 10])) == pytest.approx(1.0)


def test_noise_does_not_make_it_diverge():
    fed, *_ = federation("two classes")
    draws = np.random.default_rng(1).bytes
    privacy = fd.DifferentialPrivacy(clip=0.5, noise=0.05, delta=1e-5, entropy=draws)
    how = fd.FederatedGBDT(depth=4, leaf=7, bins=12)
    loss = fd.run(how, fed, 10, aggregation=privacy).history.loss
    assert max(loss) < 2


def test_a_client_lost_between_levels_is_not_counted_to_the_larger_child():
    """Two clients have the same 12 rows; the second is lost after the root. Each child is then
    asked for, and the leaves have 1, 1 and 3, 7 rows of the first client, not 3 + 12 and 7.
    """
    x = np.arange(12, dtype=np.float32)[:, None]
    y = (x[:, 0] > 9).astype(np.float32) * 50 + 3 * (x[:, 0] > 6) + 0.01 * x[:, 0]
    growing = Growing([np.arange(11.0)], torch.eye(1), SplitRule(leaf=1, l2=0.0))
    asked = []

    def ask(trees, nodes):
        node = predict_trees(trees, torch.from_numpy(x)).numpy()[:, 0].round().astype(int) - 1
        values = np.stack([y.mean() - y, np.ones(12), np.ones(12)], 1)
        bins = np.arange(12, dtype=np.uint8)[None]
        found = sum_histograms(bins, np.array([0, 12]), node, values, nodes)
        asked.append(nodes)
        return (found, (0,)) if len(asked) > 1 else (2 * found, (0, 1))

    growing.grow(2, ask, 1.0)
    assert asked == [1, 1, 2]
    leaves = [node["sums"][2] for node in growing.trees[0] if node["feature"] < 0]
    assert sum(leaves) == 12 and sorted(leaves) == [1, 1, 3, 7]


def test_histograms_of_trees_share_an_array():
    """Node 1 is of tree 0, node 2 of tree 1, which has x > 0.5: -g are targets."""
    how = fd.FederatedGBDT()
    x = torch.tensor([[0.0], [1.0], [2.0]])
    data = SimpleNamespace(x=x, y=torch.tensor([[1.0, 5], [2, 6], [4, 8]]), worth=None,
                           weight=torch.ones(3), index=torch.arange(3))  # fmt: skip
    bins = torch.tensor([[0, 1, 1]], dtype=torch.uint8)
    state = {"f": torch.zeros(3, 2), "bins": bins, "widths": torch.tensor([1])}
    client = SimpleNamespace(spec=fd.Spec((1,), None, 2), data=data, state=state)
    edges, ways = [np.array([0.5])], torch.eye(2)
    growing = Growing(edges, ways, SplitRule())
    tree = growing.trees[1]
    tree[0] |= {"feature": 0, "threshold": 0.5, "child": 1}
    tree += [{"feature": -1}, {"feature": -1}]
    sent = growing._numbered([(0, 0), (1, 2)])
    found = how.histograms(client, trees=sent, nodes=2, scale=1.0)[0]["sums"]
    assert found.tolist() == [[[-1, 1], [-6, 2]], [[0, 0], [-14, 2]]]


def test_secure_aggregation_gives_the_same_trees():
    fed, x, _, _ = federation("three classes")
    how = fd.FederatedGBDT(depth=2, leaf=7, bins=8)
    clear = fd.run(how, fed, 2, evaluate_every=0)
    secure = fd.run(how, fed, 2, evaluate_every=0, aggregation=fd.SecureAggregation())
    np.testing.assert_allclose(secure.model.outputs(x), clear.model.outputs(x), atol=1e-3)


def test_secure_aggregation_of_targets_of_any_scale():
    """Sums of targets around 1000 do not fit the range of models."""
    _, x, y, _ = federation("values")
    y = 1000 + 50 * y
    halves = [(x[i::2], y[i::2]) for i in (0, 1)]
    fed = fd.Federation.from_clients(halves, test=(x[:50], y[:50]))
    how = fd.FederatedGBDT(depth=2, leaf=7, bins=8)
    clear = fd.run(how, fed, 2, evaluate_every=0)
    secure = fd.run(how, fed, 2, evaluate_every=0, aggregation=fd.SecureAggregation())
    np.testing.assert_allclose(secure.model.outputs(x), clear.model.outputs(x), atol=0.05)


# -- hostile clients and servers -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", ["sign_flip", "scale"])
def test_impossible_sums_are_left_out(kind, attack):
    fed, *_ = federation(kind)
    how = fd.FederatedGBDT(loss=LOSS.get(kind, "squared"), depth=2, leaf=7, bins=8)
    engine = fd.Hostile(clients=[2], attack=attack)
    left_out = fd.run(how, fed, 2, engine=engine).history.left_out.tolist()
    why = "negative" if attack == "sign_flip" else "more rows than it has"
    assert all(why in text and "2: " in text for text in left_out[1:])
    honest = fd.run(how, fed, 2, engine=fd.Hostile(clients=[], attack=attack)).history
    assert "left_out" not in honest or not honest.left_out.astype(bool).any()


HONEST = [[[1, 0.5, 2], [0, 0.5, 1], [3, 1, 1], [-2, 0, 2.0]]]  # 3 rows, 2 features of 2 bins


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [((0, 0, 0), 1.0, None), ((0, 0, 0), 1.5, "different totals"),
     ((0, 0, 1), -0.5, "negative"), ((0, 3, 2), -2.0, "negative"), ((0, 0, 2), 3.0, "more rows"),
     ((0, 0, 0), float("nan"), "not finite")],
)  # fmt: skip
def test_histograms_that_cannot_be(at, value, why):
    sums = torch.tensor(HONEST)
    sums[at] = value
    offsets = np.array([0, 2, 4])
    check = lambda nodes: check_histograms({"sums": sums}, 3.0, nodes, offsets, 3)  # noqa: E731
    if why is None:
        check(1)
        with pytest.raises(fd.ReplyError, match="shape"):
            check(2)
    else:
        with pytest.raises(fd.ReplyError, match=why):
            check(1)


def test_sites_refuse_what_would_fill_their_memory():
    how = fd.FederatedGBDT(depth=16)
    data = SimpleNamespace(x=torch.zeros(4, 2), y=torch.zeros(4, 1), worth=None)
    client = SimpleNamespace(spec=fd.Spec((2,), None, 1), data=data, state={})
    edges = torch.zeros(2, 3)
    for widths in (torch.tensor([-1, 3]), torch.tensor([1, 4]), torch.tensor([1.0, 2.0])):
        with pytest.raises(fd.ReplyError, match="edges"):
            how.begin(client, edges=edges, widths=widths, scale=1.0)
    trees = leaves_of(torch.ones(1, 1), 2)
    for nodes in (0, 2, 1 << 16):
        with pytest.raises(fd.ReplyError, match="nodes"):
            how.histograms(client, trees=trees, nodes=nodes, scale=1.0)


# -- accuracy and refusals -------------------------------------------------------------------------


def test_near_pooled_boosting_on_real_data_that_is_sorted_by_label():
    data = fd.load("digits")
    fed = fd.split(data, "homogeneity", clients=10, s=0.1, seed=0)
    run = fd.run(fd.FederatedGBDT(lr=0.3, l2=0.0), fed, 20, evaluate_every=20)
    pooled = HistGradientBoostingClassifier(learning_rate=0.3, max_iter=20)
    want = pooled.fit(data.x_train, data.y_train).score(data.x_test, data.y_test)
    assert run.history.accuracy.iloc[-1] > want - 0.015


def test_rare_classes_do_not_make_it_diverge():
    """Three of 400 rows have the third class: its second derivatives vanish before its slopes do.
    The default l2 keeps leaves below lr |G|.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    y[:3] = 2
    fed = fd.Federation.from_clients([(x[:150], y[:150]), (x[150:], y[150:])], test=(x, y))
    loss = fd.run(fd.FederatedGBDT(lr=0.5), fed, 60).history.loss.tolist()
    assert loss[-1] < 0.2 * loss[0] and max(loss[20:]) < 0.3 * loss[0]


def test_near_pooled_boosting_on_values():
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True)
    x, y = x.astype(np.float32), y.astype(np.float32)
    data = fd.Data.from_arrays(x[:330], y[:330], x[330:], y[330:])
    run = fd.run(fd.FederatedGBDT(depth=4), fd.split(data, "targets", clients=5, s=0.1), 40)
    pooled = HistGradientBoostingRegressor(max_iter=40, max_depth=4).fit(x[:330], y[:330])
    want = ((pooled.predict(x[330:]) - y[330:]) ** 2).mean()
    assert run.history.mse.iloc[-1] < 1.1 * want < run.history.mse.iloc[0]


@pytest.mark.parametrize("changes", [{"lr": 0.0}, {"depth": 0}, {"leaf": 0}, {"l2": -1.0},
                                     {"bins": 1}, {"bins": 257}], ids=str)  # fmt: skip
def test_bad_settings_are_refused(changes):
    with pytest.raises(fd.ConfigError, match=next(iter(changes))):
        fd.FederatedGBDT(**changes)


@pytest.mark.parametrize("loss", ["quantile", "focal", lambda f, y: (f - y).square().sum(-1)])
def test_losses_without_a_second_derivative_by_output_are_refused(loss):
    fed, *_ = federation("three classes" if loss == "focal" else "values")
    with pytest.raises(fd.ConfigError, match="no second derivative by output"):
        fd.run(fd.FederatedGBDT(loss=loss), fed, 1)
