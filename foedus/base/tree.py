"""Trees of tensors: everything that is sent, averaged or saved is a tree.

A tree is a tensor, a scalar (`int`, `float`, `bool`, `str`, `None`) or a `dict`, `list`, `tuple`,
`State` or registered node of trees. Payloads, replies, client state and server state are all trees,
so one set of functions serves them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar, cast, overload

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from foedus.errors import CheckpointError

Tree = Any


class Node(Protocol):
    """A dataclass that may be a node of a tree."""

    tree_children: ClassVar[tuple[str, ...]]
    tree_static: ClassVar[tuple[str, ...]]

    def __init__(self, **fields: Any) -> None: ...


Class = TypeVar("Class", bound=type)

NODES: dict[str, type[Node]] = {}
"""Dataclasses that may be in a tree, by name: the only types that files and messages can create."""


class State(dict):
    """A server or client state: a dictionary whose entries are also attributes, as in the papers.

    It is made like a `dict`: of a dictionary, of pairs of names and values, of entries by name.

    Example:
        >>> state = fd.State(w=1.0, step=0)
        >>> state.replace(step=1).step, state.w
        (1, 1.0)
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"this state has no {name!r}, only {', '.join(self)}") from None

    def replace(self, **changes: Tree) -> State:
        """A copy with some entries changed.

        Args:
            **changes: The new entries, by name.
        """
        return State({**self, **changes})


pytree.register_pytree_node(
    State,
    lambda s: ([s[k] for k in s], list(s)),
    lambda values, names: State(zip(names, values, strict=True)),
    serialized_type_name="foedus.State",
)


@overload
def node(cls: Class) -> Class: ...
@overload
def node(*, static: tuple[str, ...] = ()) -> Callable[[Class], Class]: ...
def node(cls: Any = None, *, static: tuple[str, ...] = ()) -> Any:
    """Class decorator: make a dataclass a node of trees.

    Fields in `static` are constants, the others are subtrees.
    """

    def register(cls: Class) -> Class:
        children = [f.name for f in dataclasses.fields(cls) if f.name not in static]
        named = NODES[cls.__name__] = cast("type[Node]", cls)
        named.tree_children, named.tree_static = tuple(children), tuple(static)

        def unflatten(values: Iterable[Any], constants: Any) -> Any:
            # no __init__: a tree may briefly hold values other than tensors, such as vmap's in_dims
            new: Any = object.__new__(cls)
            for name, value in zip(children, values, strict=True):
                object.__setattr__(new, name, value)
            for name, value in zip(static, constants, strict=True):
                object.__setattr__(new, name, value)
            return new

        pytree.register_pytree_node(
            cls,
            lambda n: ([getattr(n, c) for c in children], tuple(getattr(n, s) for s in static)),
            unflatten,
            serialized_type_name=f"foedus.{cls.__name__}",
        )
        return cls

    return register if cls is None else register(cls)


_KINDS: dict[type, Any] = {}
"""How PyTorch flattens and unflattens a type; None for leaves.

Its own functions look this up anew for every node.
"""

Form = tuple | None
"""The form of a tree: (type, context of the type, forms of the parts); None for a leaf."""


def _kind(cls: type) -> Any:
    known = _KINDS.get(cls, _KINDS)
    if known is _KINDS:
        of: Any = pytree.namedtuple if pytree.is_namedtuple_class(cls) else cls
        known = _KINDS[cls] = pytree.SUPPORTED_NODES.get(of)
    return known


def map(f: Callable, tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` to every leaf (and to the values at the same places of `rest`)."""
    values, form = flatten(tree)
    if not rest:
        return unflatten([f(v) for v in values], form)
    columns = (values, *(in_places(other, form) for other in rest))
    return unflatten([f(*row) for row in zip(*columns, strict=True)], form)


def leaves(tree: Tree) -> list:
    """The leaves, in a fixed order."""
    return flatten(tree)[0]


def flatten(tree: Tree, is_leaf: Callable[[Tree], bool] | None = None) -> tuple[list, Form]:
    """The leaves and the form; `unflatten` is the inverse. is_leaf: nodes to take as leaves."""
    values: list = []
    return values, _take_apart(tree, values, is_leaf)


def _take_apart(t: Tree, values: list, is_leaf: Callable[[Tree], bool] | None) -> Form:
    kind = _kind(type(t))
    if kind is None or (is_leaf is not None and is_leaf(t)):
        values.append(t)
        return None
    parts, needs = kind.flatten_fn(t)
    return type(t), needs, [_take_apart(part, values, is_leaf) for part in parts]


def in_places(tree: Tree, form: Form) -> list:
    """The values of a tree at the leaves of a form; entries of dictionaries are matched by name.

    Raises ValueError where they differ.
    """
    values: list = []
    _along(tree, form, values)
    return values


def _along(t: Tree, form: Form, values: list) -> None:
    if form is None:
        values.append(t)
        return
    cls, needs, forms = form
    parts, own = kind.flatten_fn(t) if (kind := _kind(type(t))) is not None else ([], None)
    if own != needs and isinstance(t, dict) and issubclass(cls, dict) and set(own) == set(needs):
        parts, own = [t[k] for k in needs], needs
    alike = type(t) is cls or (isinstance(t, dict) and issubclass(cls, dict))
    if not alike or own != needs or len(parts) != len(forms):
        raise ValueError(
            f"trees differ: a {type(t).__name__} of {own or len(parts)}, not a {cls.__name__} of "
            f"{needs or len(forms)}"
        )
    for part, inner in zip(parts, forms, strict=True):
        _along(part, inner, values)


def unflatten(values: Iterable, form: Form) -> Tree:
    """Put leaves back into a form made by `flatten`."""
    left = iter(values)
    whole = _put_together(left, form)
    if next(left, left) is not left:
        raise ValueError("more leaves than the form of the tree has places")
    return whole


def _put_together(values: Iterator, form: Form) -> Tree:
    if form is None:
        return next(values)
    cls, needs, forms = form
    return _kind(cls).unflatten_fn([_put_together(values, inner) for inner in forms], needs)


def zeros_like(tree: Tree) -> Tree:
    """The same tree with every tensor zero."""
    return map(lambda t: torch.zeros_like(t) if isinstance(t, Tensor) else t, tree)


def add(a: Tree, b: Tree, scale: float = 1.0) -> Tree:
    """`a + scale * b`."""
    return map(lambda x, y: torch.add(x, y, alpha=scale), a, b)


def sub(a: Tree, b: Tree) -> Tree:
    """`a - b`."""
    return map(torch.sub, a, b)


def scale(tree: Tree, factor: float | Tensor) -> Tree:
    """`factor * tree`."""
    return map(lambda x: x * factor, tree)


def all_finite(tree: Tree) -> bool:
    """Whether no floating tensor in the tree holds a NaN or an infinity."""
    return all(finite(t) for t in leaves(tree) if isinstance(t, Tensor) and t.is_floating_point())


def finite(t: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity.

    With NumPy, which is many times faster than torch here and starts no threads.
    """
    if t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64):
        return bool(np.isfinite(t.detach().numpy()).all())
    return bool(torch.isfinite(t).all())


def dissolve(tree: Tree) -> tuple[Any, dict[str, Tensor]]:
    """Split a tree into JSON of its form and named tensors: what a safetensors file can hold."""
    tensors: dict[str, Tensor] = {}

    def walk(t: Tree, path: str) -> Any:
        if isinstance(t, Tensor):
            while path in tensors:  # a key that holds a dot may look like a path
                path += "'"
            tensors[path] = t
            return {"tensor": path}
        if t is None or isinstance(t, bool | int | float | str):
            return {"value": t}
        if type(t).__name__ in NODES:
            parts = {c: walk(getattr(t, c), f"{path}.{c}") for c in t.tree_children}
            constants = {s: walk(getattr(t, s), f"{path}.{s}") for s in t.tree_static}
            return {"node": type(t).__name__, "parts": parts, "static": constants}
        if isinstance(t, Mapping):
            kind = "state" if isinstance(t, State) else "dict"
            return {kind: [[k, walk(v, f"{path}.{k}")] for k, v in t.items()]}
        if isinstance(t, list | tuple):
            kind = "tuple" if isinstance(t, tuple) else "list"
            return {kind: [walk(v, f"{path}.{i}") for i, v in enumerate(t)]}
        raise CheckpointError(
            f"{path} holds a {type(t).__name__}, which cannot be saved; use tensors and scalars"
        )

    return walk(tree, "t"), tensors


def restore(form: Any, tensors: Mapping[str, Tensor]) -> Tree:
    """Rebuild a tree from the two parts that `dissolve` returns.

    Builds plain containers and known nodes only.
    """
    try:
        match form:
            case {"tensor": path}:
                return tensors[path]
            case {"value": value}:
                return value
            case {"state": items}:
                return State({k: restore(v, tensors) for k, v in items})
            case {"dict": items}:
                return {k: restore(v, tensors) for k, v in items}
            case {"tuple": items}:
                return tuple(restore(v, tensors) for v in items)
            case {"list": items}:
                return [restore(v, tensors) for v in items]
            case {"node": name, "parts": parts, "static": constants}:
                fields = {k: restore(v, tensors) for k, v in {**parts, **constants}.items()}
                return NODES[name](**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the saved tree is damaged: {error!r}") from error
    raise CheckpointError(
        f"the saved tree is damaged: {str(form)[:80]!r} is not the form of a tree"
    )
