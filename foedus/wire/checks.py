"""Checks of an untrusted reply: its form, its size once dense, and whether it is finite.

Round, sender and form are the business of the engine that brings a reply
(`foedus.engines.flower.session`). `foedus.core.clients` then looks at the numbers, and asks the
algorithm what a reply may say (`accept` of `Clients.mean` and `gather`).
"""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.errors import ReplyError
from foedus.wire.arrays import STRUCTURED, LowRank, Signs, Sparse

MOST = 1 << 27
"""Numbers that a reply of unknown form may stand for once dense: few bytes can describe more."""

Form = tuple[str, tuple]


def form_of(reply: Tree, stacked: bool = False) -> Form:
    """Structure, shapes and types of one client's reply."""
    leaves, form = tree.flatten(reply)
    parts = (
        (tuple(t.shape)[stacked:], str(t.dtype)) if isinstance(t, Tensor) else (type(t).__name__,)
        for t in leaves
    )
    return str(form), tuple(parts)


def shown(form: Form) -> str:
    """The first few tensors of a form, for messages."""
    return ", ".join(
        f"{leaf[1].removeprefix('torch.')} {list(leaf[0])}" if len(leaf) == 2 else leaf[0]
        for leaf in form[1][:4]
    )


def misfits(replies: dict[int, Tree], right: Form | None) -> dict[int, str]:
    """The clients whose replies do not have the right form, with the reason.

    If the right form is not known, it is that of more than half of the clients; without such a
    majority, all replies are rejected.
    """
    forms = {i: form_of(reply) for i, reply in replies.items()}
    if right is None and forms:
        right, count = Counter(forms.values()).most_common(1)[0]
        if 2 * count <= len(forms):
            text = "the replies have several forms, none of them more than half"
            return dict.fromkeys(forms, text)
    if right is None:
        return {}
    wrong = {i: form for i, form in forms.items() if form != right}
    return {i: f"its reply has the form {shown(f)}, not {shown(right)}" for i, f in wrong.items()}


def dense_size(reply: Tree) -> int:
    """How many numbers a reply stands for once its structured arrays are dense.

    Leading dimensions count: beside an empty one they take no bytes of the message.
    """
    total = 0
    for t in tree.pytree.tree_leaves(reply, is_leaf=lambda t: isinstance(t, STRUCTURED)):
        if isinstance(t, Sparse):
            total += math.prod((*t.values.shape[:-1], *t.shape))
        elif isinstance(t, Signs):
            total += math.prod((*t.scale.shape, *t.shape))
        elif isinstance(t, LowRank):
            total += math.prod((*t.left.shape[:-1], t.right.shape[-2]))
    return total


def finite(reply: Tree, clients: int) -> Tensor:
    """Which of the stacked replies are finite once dense: products and sums may not be."""
    good = torch.ones(clients, dtype=torch.bool)
    for leaf in tree.leaves(dense(reply)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            good &= torch.isfinite(leaf.reshape(clients, -1)).all(1)
    return good


def dense(reply: Tree) -> Tree:
    """A reply with a tensor in the place of every structured array that has a mean."""

    def averaged(t: Tree) -> bool:
        return hasattr(t, "dense")

    return tree.pytree.tree_map(lambda t: t.dense() if averaged(t) else t, reply, is_leaf=averaged)


def validate_like(tree: Tree, expected: Tree, what: str) -> None:
    """Raise `ReplyError` unless `tree` has the structure, shapes and dtypes of `expected`.

    Numbers and text may differ.

    Only shapes are looked at, so `expected` may hold tensors on the meta device. Names of keys
    count in their order.
    """

    def differ(path: str, got: str, want: str) -> ReplyError:
        return ReplyError(f"{what}: at {path or 'the top'} got {got}, expected {want}")

    def walk(t: Tree, e: Tree, path: str) -> None:
        if isinstance(e, Tensor):
            if not isinstance(t, Tensor) or t.shape != e.shape or t.dtype != e.dtype:
                raise differ(path, _describe(t), _describe(e))
            return
        if type(t) is not type(e):
            raise differ(path, _describe(t), _describe(e))
        if isinstance(e, dict):
            if list(t) != list(e):
                raise differ(path, f"the keys {list(t)}", f"{list(e)}")
            pairs = [(name, t[name], e[name]) for name in e]
        elif isinstance(e, list | tuple):
            if len(t) != len(e):
                raise differ(path, f"{len(t)} items", f"{len(e)}")
            pairs = [(str(i), a, b) for i, (a, b) in enumerate(zip(t, e, strict=True))]
        elif hasattr(e, "tree_children"):
            for name in e.tree_static:
                got, want = getattr(t, name), getattr(e, name)
                if got != want:
                    raise differ(f"{path}.{name}".lstrip("."), f"{got!r}", f"{want!r}")
            pairs = [(name, getattr(t, name), getattr(e, name)) for name in e.tree_children]
        else:
            return
        for name, a, b in pairs:
            walk(a, b, f"{path}.{name}".lstrip("."))

    walk(tree, expected, "")


def _describe(t: Tree) -> str:
    if not isinstance(t, Tensor):
        return f"a {type(t).__name__}"
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
