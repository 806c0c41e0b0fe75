"""Given predictors: what FedBoost learns to mix. A server owns q of them, each a map from rows to probabilities.

A collection knows three things of its members: what of them a client needs to know on its own rows (`prepare`, once), the loss
of a mixture of some of them and its gradient in the weights (`loss`), and what has to be sent so that a client has them
(`message`). Nothing is ever pickled: densities and networks travel as arrays, scikit-learn estimators as skops archives, which
are loaded only if every type in them is one that skops trusts.
"""

from __future__ import annotations

import copy
import math
import zipfile
from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from numbers import Integral, Real
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foedus.core.arrays import Sparse
from foedus.core.batching import batched
from foedus.core.rows import Rows, take
from foedus.core.spec import Spec
from foedus.core.tree import Tree
from foedus.errors import ConfigError, DataError, ModelError

LOSSES = ("log", "squared")
_SWELL = 8
"""How many times its size an archive of skops may unpack to."""


class Predictors:
    """Base of the collections. `len` is q.

    A simulation holds one copy of the members for all clients, so that steps need not unpack what they are sent (`at_hand`).
    `remote()` is the same collection as a site sees it, which has nothing but the messages; the numbers are the same.
    """

    at_hand: bool = True

    spread: float = 1.5
    """As `Algorithm.spread`: how unequal the clients of a padded batch may be."""

    def remote(self) -> Self:
        """The collection of a site that has no members of its own."""
        other = copy.copy(self)
        other.at_hand = False
        return other

    def __len__(self) -> int:
        raise NotImplementedError

    def check(self, spec: Spec, loss: str) -> None:
        """Refuse data that the members do not fit."""
        raise NotImplementedError

    def prepare(self, data: Rows, loss: str) -> Tree:
        """What a client derives once from its rows, and from the members where they are at hand."""
        raise NotImplementedError

    def message(self, which: Tensor) -> Tree:
        """What is sent so that a client has the members numbered `which`."""
        raise NotImplementedError

    def loss(
        self,
        prepared: Tree,
        data: Rows,
        which: Tensor,
        models: Tree,
        weight: Tensor,
        loss: str,
        floor: float,
        excess: Tensor | None,
        slope: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Mean loss of sum_k weight_k h_k on a client's rows, over k in `which`; and, with `slope`, its gradient in these weights.

        models: the message with them; None: they are taken from the collection (a simulation holds one copy for all clients).
        excess: for the squared loss, a number for each member; weight_k excess_k mean |h_k|^2 is taken off the loss, and twice
        excess_k mean |h_k|^2 off the gradient.
        """
        raise NotImplementedError

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        """Probabilities (n, classes) of the mixture of all members."""
        raise NotImplementedError

    def nbytes(self) -> list[int]:
        """The encoded length of every member."""
        from foedus.core import wire

        return [wire.nbytes({"models": self.message(torch.tensor([k]))}) for k in range(len(self))]

    def state_dict(self) -> dict[str, Tensor]:
        """All there is of the members, as tensors: two collections are the same if these are."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"


class Densities(Predictors):
    """Distributions over a finite domain: row k of `table` (q, |Y|) is h_k. The features of rows are not looked at.

    background: a distribution that everybody knows, and rest: its share in each h_k (a number, or one for each), as smoothing
    makes it. What is sent of h_k is then h_k - rest_k background, by its non-zero entries: a unigram model costs as many
    bytes as the words it has seen. Point masses and other sparse rows need no background to be short.
    """

    spread = math.inf

    def __init__(self, table: Any, background: Any = None, rest: Any = 0.0) -> None:
        table = _numbers("table", table)
        if table.dim() != 2 or not len(table) or not table.shape[1]:
            raise ModelError(
                f"a table of densities has a row for each predictor and a column for each element, not {tuple(table.shape)}"
            )
        probabilities(table, "predictor")
        self.table, rest = table, _numbers("rest", rest)
        if rest.shape not in ((), (len(table),)) or not bool(((rest >= 0) & (rest <= 1)).all()):
            raise ModelError(f"rest must be a share from 0 to 1, or one for each of the {len(table)} predictors")
        self.rest = rest.expand(len(table)).clone()
        self.background = None if background is None else _numbers("background", background)
        if self.background is not None:
            if self.background.shape != table.shape[1:]:
                raise ModelError(f"background has shape {tuple(self.background.shape)}, the table {table.shape[1]} columns")
            probabilities(self.background.unsqueeze(0), "background")
        elif bool(self.rest.any()):
            raise ModelError("rest is the share of a background: give that too")
        own = table if self.background is None else table - self.rest.unsqueeze(1) * self.background
        own = torch.where(own.abs() <= 1e-6 * table, 0, own)  # what only rounding has left
        self.nonzero = own != 0
        self.counts = self.nonzero.sum(1)
        where = self.nonzero.nonzero()
        self.columns, self.values = where[:, 1].to(torch.int32), own[self.nonzero]
        self.first = torch.cat((torch.zeros(1, dtype=torch.int64), self.counts.cumsum(0)))

    @classmethod
    def of_clients(cls, fed: Any, rest: float = 0.1) -> Densities:
        """One for each client of a federation: its training labels' frequencies, and `rest` of the uniform distribution.

        With a federation of words (`word_federation`), these are smoothed unigram language models.
        """
        classes = _labels(fed)
        if not 0 <= rest <= 1:
            raise ModelError(f"rest={rest!r} must be a share from 0 to 1")
        cells = np.bincount(fed.owners() * classes + fed.data.y_train[fed.rows], minlength=len(fed) * classes)
        table = cells.reshape(len(fed), classes) / fed.sizes[:, None]
        even = np.full(classes, 1 / classes)
        return cls((1 - rest) * table + rest * even, even if rest else None, rest)

    def __len__(self) -> int:
        return len(self.table)

    def check(self, spec: Spec, loss: str) -> None:
        if spec.classes != self.table.shape[1]:
            raise DataError(f"the densities are over {self.table.shape[1]} elements, the data has {spec.classes} labels")

    def prepare(self, data: Rows, loss: str) -> dict[str, Tensor]:
        """The client's own distribution: the elements it has, and the share of each."""
        return _distinct({"index": data.index, "weight": data.weight}, (data.table_y, self.table.shape[1]))

    def message(self, which: Tensor) -> Tree:
        size, counts = self.table.shape[1], self.counts[which]
        if int(counts.sum()) * 2 >= len(which) * size:
            return {"dense": self.table[which].mT.contiguous()}
        # Entry j of member i of `which` is number first[which[i]] + j of all entries.
        starts = torch.repeat_interleave(self.first[which] - (counts.cumsum(0) - counts), counts)
        at = starts + torch.arange(int(counts.sum()))
        place = self.columns[at].long() * len(which) + torch.repeat_interleave(torch.arange(len(which)), counts)
        kind = torch.int32 if size * len(which) < 2**31 else torch.int64
        own = {"own": Sparse(place.to(kind), self.values[at], (size, len(which)))}
        return own if self.background is None else {**own, "rest": self.rest[which]}

    def rows_of(self, models: Tree) -> Tensor:
        """The densities (|Y|, C) that a message holds."""
        if "dense" in models:
            return models["dense"]
        own = models["own"].dense()
        return own if self.background is None else own.addr_(self.background, models["rest"])

    @cached_property
    def upright(self) -> Tensor:
        """The table with a row for each element, as products with few elements of a client want it."""
        return self.table.mT.contiguous()

    def loss(self, prepared, data, which, models, weight, loss, floor, excess, slope=True):
        if models is not None and not self.at_hand:
            columns, some = self.rows_of(models), slice(None)
        elif 3 * len(which) < len(self):
            columns, some = self.upright.index_select(1, which), slice(None)
        else:  # To leave out few columns takes longer than to use them all.
            columns, some = self.upright, which
            weight = torch.zeros(len(self)).index_put((which,), weight)
            excess = None if excess is None else torch.zeros(len(self)).index_put((which,), excess)
        found = _of_elements(prepared, (columns, weight, loss, floor, excess, slope))
        return found["loss"], found["slope"][some] if slope else None

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        return (weight.float() @ self.table).expand(len(x), -1)

    def state_dict(self) -> dict[str, Tensor]:
        return {"table": self.table}


@batched
def _distinct(args: dict[str, Tensor], shared: tuple) -> dict[str, Tensor]:
    table_y, size = shared
    index, weight = args["index"], args["weight"]
    clients = len(index)
    keys = take(table_y, index) + size * torch.arange(clients).unsqueeze(1)
    found, inverse = keys.flatten().unique(return_inverse=True)
    counts = torch.zeros(len(found)).index_add_(0, inverse.flatten(), weight.flatten().float())
    owner = found // size
    first = torch.searchsorted(owner, torch.arange(clients))
    place = torch.arange(len(found)) - first[owner]
    element = torch.zeros(clients, int(place.max()) + 1, dtype=torch.int64)
    share = torch.zeros(element.shape)
    element[owner, place], share[owner, place] = found % size, counts
    return {"element": element, "share": share / weight.sum(1, keepdim=True)}


@batched
def _of_elements(args: dict[str, Tensor], shared: tuple) -> dict[str, Tensor]:
    """Loss and gradient from the elements that clients have: all clients' gradients are one sparse product (an embedding bag)."""
    columns, weight, loss, floor, excess, slope = shared
    mixed = columns @ weight
    real = args["share"] > 0  # clients have different numbers of elements: what follows is one long list of all of them
    element, share, lengths = args["element"][real], args["share"][real], real.sum(1)
    at = mixed[element]
    if loss == "log":
        at += floor
        each, pull = -share * at.log(), -share / at
    else:
        each, pull = -2 * share * at, -2 * share
    owner = torch.repeat_interleave(torch.arange(len(real)), lengths)
    found = {"loss": torch.zeros(len(real)).index_add_(0, owner, each)}
    squares = None if excess is None else columns.square().sum(0)
    if loss == "squared":
        found["loss"] += mixed @ mixed + 1 - (0 if excess is None else (weight * excess) @ squares)
    if not slope:
        return found
    starts = lengths.cumsum(0) - lengths
    found["slope"] = F.embedding_bag(element, columns, starts, per_sample_weights=pull, mode="sum")
    if loss == "squared":
        found["slope"] += 2 * (mixed @ columns)
        if excess is not None:
            found["slope"] -= 2 * excess * squares
    return found


class _Evaluated(Predictors):
    """Members that are functions of a row: a client evaluates them on its rows, once."""

    def likelihoods(self, models: Tree, x: Tensor, y: Tensor) -> Tensor:
        """h_k(y | x) for each member in a message (or for all), (C, n)."""
        return (
            self.outputs(models, x)
            .gather(2, y.expand(len(self) if models is None else len(models), -1).unsqueeze(2))
            .squeeze(2)
        )

    def outputs(self, models: Tree, x: Tensor) -> Tensor:
        """h_k(x) for each member in a message (or for all), (C, n, classes)."""
        raise NotImplementedError

    def prepare(self, data: Rows, loss: str) -> Tensor | None:
        return _evaluate({"index": data.index}, (self, None, data.table_x, data.table_y, loss)) if self.at_hand else None

    def loss(self, prepared, data, which, models, weight, loss, floor, excess, slope=True):
        if prepared is None:
            shared = (self, models, data.table_x, data.table_y, loss)
            each = _evaluate({"index": data.index}, shared)
        else:
            each = prepared.index_select(0, which)
        share = data.weight / data.count
        if loss == "log":
            inside = weight @ each + floor
            return -(share * inside.log()).sum(), -(each @ (share / inside)) if slope else None
        mixed = torch.einsum("c,cnk->nk", weight, each)
        apart = mixed - F.one_hot(data.y, mixed.shape[-1])
        value = (share * apart.square().sum(1)).sum()
        pull = 2 * torch.einsum("cnk,nk->c", each, share.unsqueeze(1) * apart) if slope else None
        if excess is not None:
            squares = torch.einsum("cnk,n->c", each.square(), share)
            value = value - (weight * excess) @ squares
            pull = pull - 2 * excess * squares if slope else None
        return value, pull


@batched
def _evaluate(args: dict[str, Tensor], shared: tuple) -> Tensor:
    members, models, table_x, table_y, loss = shared
    index = args["index"]
    x, y = take(table_x, index.flatten()), take(table_y, index.flatten())
    each = members.likelihoods(models, x, y) if loss == "log" else members.outputs(models, x)
    return each.reshape(len(each), *index.shape, *each.shape[2:]).movedim(1, 0).contiguous()


class Classifiers(_Evaluated):
    """Fitted classifiers: scikit-learn estimators with `predict_proba`, and `torch.nn.Module`s that give logits, in any mixture.

    classes: how many labels there are. An estimator that has seen fewer gives the others probability 0. Networks are used in
    evaluation mode. Estimators with compiled parts (trees and forests, k-d trees) and some others hold types that skops does not
    trust: a simulation evaluates them and counts their bytes, but a site that is sent one refuses it, unless it lists these types
    as trusted: `trusted=["sklearn.tree._tree.Tree"]` takes forests from a server that one trusts with memory of one's own process.
    """

    def __init__(self, members: Sequence[Any], classes: int, trusted: Sequence[str] = ()) -> None:
        if isinstance(trusted, str) or not all(isinstance(name, str) for name in trusted):
            raise ModelError(f"trusted={trusted!r} must be a list of the full names of types")
        if not isinstance(members, list | tuple) or not members:
            raise ModelError(f"members must be a list of at least one fitted classifier, not {members!r}")
        if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 2:
            raise ModelError(f"classes={classes!r} must be a whole number of at least 2")
        for k, member in enumerate(members):
            if isinstance(member, nn.Module):
                continue
            if not hasattr(member, "predict_proba"):
                raise ModelError(f"member {k}, a {type(member).__name__}, gives no probabilities (predict_proba)")
            if not hasattr(member, "classes_"):
                raise ModelError(f"member {k}, a {type(member).__name__}, is not fitted: call its fit first")
            if any(np.ndim(c) for c in member.classes_):
                raise ModelError(f"member {k}, a {type(member).__name__}, predicts several labels for a row: give one for each")
            if not np.isin(member.classes_, np.arange(classes)).all():
                raise ModelError(f"member {k} knows labels {list(member.classes_)[:5]}, which are not in 0 .. {classes - 1}")
        self.members, self.classes, self.trusted = tuple(members), int(classes), tuple(trusted)
        self._archives: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.members)

    def check(self, spec: Spec, loss: str) -> None:
        if spec.classes != self.classes:
            raise DataError(f"the classifiers are for {self.classes} classes, the data has {spec.classes}")
        for k, member in enumerate(self.members):
            try:
                out = self._one(member, None, torch.zeros(2, *spec.shape))
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(f"member {k} cannot take rows of shape {spec.shape}: {error}") from error
            if out.shape != (2, self.classes):
                raise ModelError(f"member {k} gives outputs of shape {tuple(out.shape)} for 2 rows, not (2, {self.classes})")
            probabilities(out, f"the output of member {k} for row")

    def message(self, which: Tensor) -> dict[str, Tree]:
        return {str(k): self._sent(k) for k in which.tolist()}

    def _sent(self, k: int) -> dict[str, Tensor]:
        member = self.members[k]
        if isinstance(member, nn.Module):
            return {name: v.detach() for name, v in member.state_dict().items()}
        if k not in self._archives:
            self._archives[k] = torch.frombuffer(bytearray(_skops().dumps(member)), dtype=torch.uint8)
        return {"skops": self._archives[k]}

    def outputs(self, models: Tree, x: Tensor) -> Tensor:
        chosen = range(len(self)) if models is None else [int(k) for k in models]
        return torch.stack([self._one(self.members[k], None if models is None else models[str(k)], x) for k in chosen])

    def _one(self, member: Any, sent: Tree, x: Tensor) -> Tensor:
        if isinstance(member, nn.Module):
            member.eval()
            with torch.no_grad():
                out = member(x) if sent is None else torch.func.functional_call(member, sent, (x,))
            return out.float().softmax(-1)
        member = member if sent is None else unpack(sent["skops"], self.trusted)
        found = torch.zeros(len(x), self.classes)
        found[:, torch.as_tensor(np.asarray(member.classes_, np.int64))] = torch.from_numpy(
            np.asarray(member.predict_proba(x.flatten(1).numpy()), np.float32)
        )
        return found

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("q,qnk->nk", weight.float(), self.outputs(None, x))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{k}.{name}": v for k in range(len(self)) for name, v in self._sent(k).items()}


def _skops() -> Any:
    try:
        import skops.io
    except ImportError as error:
        raise ModelError("scikit-learn estimators are sent as skops archives: pip install skops") from error
    return skops.io


def unpack(archive: Tensor, trusted: Sequence[str] = ()) -> Any:
    """The estimator in a skops archive. One that needs a type which neither skops nor the caller trusts is refused."""
    io = _skops()
    data = archive.numpy().tobytes()
    try:
        with zipfile.ZipFile(BytesIO(data)) as files:
            size = sum(f.file_size for f in files.infolist())
        if size > _SWELL * len(data):  # skops does not compress, so whoever did means harm
            raise ModelError(
                f"a predictor was sent as an archive of {len(data)} bytes that unpacks to {size}; it is not loaded"
            )
        strange = [name for name in io.get_untrusted_types(data=data) if name not in trusted]
        if not strange:
            return io.loads(data, trusted=list(trusted))
    except ModelError:
        raise
    except Exception as error:  # what a stranger has sent can go wrong in any way
        raise ModelError(f"a predictor was sent that is no readable skops archive: {error!r}") from error
    raise ModelError(
        f"a predictor was sent that needs untrusted types ({', '.join(strange[:3])}); it is not loaded. "
        "If the sender may have a hold on this process, pass them as trusted=[...]"
    )


class NGrams(_Evaluated):
    """Smoothed n-gram language models: h(w | context) interpolates counts of contexts of all lengths up to order - 1.

        h_0(w) = background(w),   h_m(w | c) = (n(c, w) + smoothing h_{m-1}(w | c')) / (n(c) + smoothing)

    with n the counts of member k, c the last m - 1 words and c' the last m - 2 (MacKay and Peto's Dirichlet smoothing): a
    distribution for every context. Rows hold the previous order - 1 words as features, the word as label; a context that begins
    before the text has -1.
    """

    def __init__(self, texts: Sequence[Tensor | np.ndarray], background: Any, order: int = 2, smoothing: float = 10.0) -> None:
        self.background = _numbers("background", background)
        if self.background.dim() != 1 or not len(self.background):
            raise ModelError(f"background is a probability for each word, not of shape {tuple(self.background.shape)}")
        probabilities(self.background.unsqueeze(0), "background")
        if isinstance(order, bool) or not isinstance(order, Integral) or order < 1:
            raise ConfigError(f"order={order!r} must be a whole number of at least 1")
        if isinstance(smoothing, bool) or not isinstance(smoothing, Real) or not 0 < smoothing < math.inf:
            raise ConfigError(f"smoothing={smoothing!r} must be a positive number")
        self.order, self.smoothing = int(order), float(smoothing)
        if (len(self.background) + 1) ** order >= 2**63:
            raise ConfigError(f"order={order!r} is too much for {len(self.background):,} words: contexts cannot be numbered")
        texts = [self._words(k, text) for k, text in enumerate(texts)]
        if not texts:
            raise ModelError("texts must hold at least one text")
        self.counts = [[self._count(text, m) for m in range(1, self.order + 1)] for text in texts]

    @classmethod
    def of_clients(cls, fed: Any, order: int = 2, smoothing: float = 10.0) -> NGrams:
        """One for each client of a federation of words, from its training words; the background is uniform."""
        classes = _labels(fed)
        if fed.settings.get("before", order) < order - 1:
            raise DataError(
                f"order={order!r} needs the {order - 1} words before each: word_federation(..., before={order - 1})"
            )
        texts = [fed.data.y_train[fed.client_rows(i)] for i in range(len(fed))]
        return cls(texts, np.full(classes, 1 / classes), order, smoothing)

    def __len__(self) -> int:
        return len(self.counts)

    def check(self, spec: Spec, loss: str) -> None:
        if loss != "log":
            raise ConfigError(f"loss={loss!r}: n-gram models give the probability of a word, not of all words; use loss='log'")
        if spec.classes != len(self.background) or spec.features < self.order - 1:
            raise DataError(
                f"the models are over {len(self.background):,} words with {self.order - 1} before each; "
                f"the data has {spec.classes} labels and {spec.features} features"
            )

    def _words(self, k: int, text: Any) -> Tensor:
        given = np.asarray(text)
        whole = given.ndim == 1 and (not given.size or given.dtype.kind in "iu")
        if not whole or ((given < 0) | (given >= len(self.background))).any():
            raise ModelError(f"text {k} must be a list of word numbers in 0 .. {len(self.background) - 1}")
        return torch.from_numpy(given.astype(np.int64))

    def _count(self, words: Tensor, length: int) -> dict[str, Tensor]:
        """Numbers of all windows of this length in a text, and how often each occurs."""
        if not len(words):
            return {"keys": torch.zeros(0, dtype=torch.int64), "counts": torch.zeros(0, dtype=torch.int32)}
        before = torch.cat((torch.full((length - 1,), -1, dtype=torch.int64), words))
        keys, counts = self._key(before.unfold(0, length, 1)).unique(return_counts=True)
        return {"keys": keys, "counts": counts.to(torch.int32)}

    def _key(self, windows: Tensor) -> Tensor:
        base = len(self.background) + 1
        return ((windows + 1) * base ** torch.arange(windows.shape[1] - 1, -1, -1)).sum(1)

    def message(self, which: Tensor) -> dict[str, Tree]:
        return {str(k): {str(m): c for m, c in enumerate(self.counts[k])} for k in which.tolist()}

    def likelihoods(self, models: Tree, x: Tensor, y: Tensor) -> Tensor:
        chosen = self.counts if models is None else [[m[str(i)] for i in range(self.order)] for m in models.values()]
        windows = torch.cat((x.flatten(1)[:, x[0].numel() - self.order + 1 :].long(), y.unsqueeze(1)), 1)
        return torch.stack([self._likelihood(counts, windows) for counts in chosen])

    def _likelihood(self, counts: list[dict[str, Tensor]], windows: Tensor) -> Tensor:
        base, h = len(self.background) + 1, self.background[windows[:, -1]]
        for m, table in enumerate(counts, start=1):
            keys, running = table["keys"], torch.cat((torch.zeros(1, dtype=torch.int64), table["counts"].cumsum(0)))
            number = self._key(windows[:, self.order - m :])
            context = number - number % base
            seen = running[torch.searchsorted(keys, number, right=True)] - running[torch.searchsorted(keys, number)]
            of_context = running[torch.searchsorted(keys, context + base)] - running[torch.searchsorted(keys, context)]
            h = (seen + self.smoothing * h) / (of_context + self.smoothing)
        return h

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        """All words for each of n contexts: (n, |Y|), by the same formula for every word."""
        words = torch.arange(len(self.background))
        contexts = x.flatten(1)[:, x[0].numel() - self.order + 1 :]
        keys, of_row = self._key(contexts.long()).unique(return_inverse=True)  # many rows have the same context
        some_row = torch.zeros_like(keys).scatter_(0, of_row, torch.arange(len(x)))
        rows = [weight.float() @ self.likelihoods(None, c.expand(len(words), -1), words) for c in contexts[some_row]]
        return torch.stack(rows)[of_row]

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{k}.{m}.{n}": t for k, each in enumerate(self.counts) for m, c in enumerate(each) for n, t in c.items()}


def _numbers(name: str, values: Any) -> Tensor:
    try:
        return torch.as_tensor(values if isinstance(values, Tensor) else np.asarray(values)).float()
    except (TypeError, ValueError) as error:
        raise ModelError(f"{name} must be an array of numbers: {error}") from error


def _labels(fed: Any) -> int:
    if fed.data.classes is None:
        raise DataError("the data has no labels: predictors give a probability to each of them")
    return fed.data.classes


def probabilities(table: Tensor, what: str) -> None:
    """Refuse rows that are not distributions, naming the first."""
    bad = (table < 0).any(1) | ~((table.double().sum(1) - 1).abs() <= 1e-3)
    if bool(bad.any()):
        k = int(bad.nonzero()[0])
        total, low = float(table[k].double().sum()), float(table[k].min())
        raise ModelError(f"{what} {k} is no distribution: it sums to {total:.6g}, its least entry is {low:.4g}")
