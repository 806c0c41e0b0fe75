"""What is looked at before a stranger's reply is used: its form, its size once dense, and whether it is finite.

Round, sender and form are the business of the engine that brings a reply (`foedus.flower.session`). `foedus.core.clients` then looks at
the numbers, and asks the algorithm what a reply may say (`accept` of `Clients.mean` and `gather`).
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from foedus.core import tree
from foedus.core.arrays import STRUCTURED, LowRank, Signs, Sparse
from foedus.core.tree import Tree

MOST = 1 << 27
"""Numbers that a reply of unknown form may stand for once dense: a few bytes can describe far more."""

Form = tuple[str, tuple]


def form_of(reply: Tree, stacked: bool = False) -> Form:
    """Structure, shapes and types of one client's reply."""
    leaves, form = tree.flatten(reply)
    parts = ((tuple(t.shape)[stacked:], str(t.dtype)) if isinstance(t, Tensor) else (type(t).__name__,) for t in leaves)
    return str(form), tuple(parts)


def shown(form: Form) -> str:
    """The first few tensors of a form, for people."""
    return ", ".join(f"{leaf[1].removeprefix('torch.')} {list(leaf[0])}" if len(leaf) == 2 else leaf[0] for leaf in form[1][:4])


def misfits(replies: dict[int, Tree], right: Form | None) -> dict[int, str]:
    """Which clients' replies have another form than the right one, and why they must go.

    Where the right form is not known, it is that of more than half of the clients; without such a one nobody can be believed.
    """
    forms = {i: form_of(reply) for i, reply in replies.items()}
    if right is None and forms:
        right, count = Counter(forms.values()).most_common(1)[0]
        if 2 * count <= len(forms):
            return dict.fromkeys(forms, "the replies have several forms, none of them more than half")
    return {i: f"its reply has the form {shown(f)}, not {shown(right)}" for i, f in forms.items() if f != right}


def dense_size(reply: Tree) -> int:
    """How many numbers a reply stands for once its structured arrays are dense."""
    arrays = [t for t in tree.pytree.tree_leaves(reply, is_leaf=_structured) if isinstance(t, STRUCTURED)]
    sizes = [math.prod(t.shape) for t in arrays if isinstance(t, Sparse | Signs)]
    sizes += [t.left.shape[-2] * t.right.shape[-2] for t in arrays if isinstance(t, LowRank)]
    return sum(sizes)


def finite(reply: Tree, clients: int) -> Tensor:
    """Which of so many stacked replies are finite, once dense: products and sums of finite numbers may not be."""
    good = torch.ones(clients, dtype=torch.bool)
    for leaf in tree.leaves(dense(reply)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            good &= torch.isfinite(leaf.reshape(clients, -1)).all(1)
    return good


def dense(reply: Tree) -> Tree:
    """A reply with a tensor in the place of every structured array that has a mean."""
    return tree.pytree.tree_map(lambda t: t.dense() if _averaged(t) else t, reply, is_leaf=_averaged)


def _averaged(t: Tree) -> bool:
    return hasattr(t, "weighted_sum")


def _structured(t: Tree) -> bool:
    return isinstance(t, STRUCTURED)
