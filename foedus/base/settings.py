"""Settings that are checked by declaration: constraints are part of a dataclass field's type hint.

    @dataclass(frozen=True)
    class Descent:
        lr: Annotated[float, Gt(0)] = 0.1
        steps: Annotated[int, Ge(1)] | None = None
        penalty: Annotated[float, Ge(0)] | Literal["auto"] = "auto"

        def __post_init__(self) -> None:
            check_settings(self)

    >>> Descent(lr=0)
    foedus.errors.ConfigError: lr=0 must be a positive finite number

Constraints are those of `annotated_types`: `Gt`, `Ge`, `Lt`, `Le`, `Interval`, `MultipleOf`,
`MinLen`, `MaxLen`, `Len`, `Predicate`. Hints are checked as follows:

    int           an integer, NumPy's too; not a bool
    float         a real number, integers included; not a bool, not NaN;
                  finite unless `Le(math.inf)` is declared
    bool, str     of that type
    Literal       one of the values; the error for another string suggests the nearest
    X | Y, None   any of the options
    tuple[X, ...], tuple[X, Y], list[X], Sequence[X], dict[X, Y]
                  a container of that type whose elements are checked
    a class       an instance of it

Everything else (`Any`, callables, protocols) is left to the class itself. `Means` and `Remedy`
improve the message. A field that is declared outside of foedus is checked only if its hint states a
constraint or a `Literal`: a user's subclass with loose hints keeps working.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import sys
import types
import typing
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Self, cast

import annotated_types as at
import numpy as np

from foedus.errors import ConfigError, FoedusError, nearest, shown, unknown

_BOOLS = (bool, np.bool_)

LOCAL = {"local": True}
"""Metadata of a field that decides what this process trusts: it is written to descriptions of
settings, and never read from one.
"""


@dataclass(frozen=True)
class Means:
    """Metadata of a hint: what is allowed, in place of the description derived from the hint."""

    text: str


@dataclass(frozen=True)
class Remedy:
    """Metadata of a hint: a remedy or reason that is appended to the error."""

    text: str


class Settings:
    """Base of classes whose arguments are settings: a mistyped one is named, with the nearest.

    >>> fd.FedAvg(epoch=2)
    TypeError: FedAvg() got an unexpected keyword argument 'epoch'; did you mean 'epochs'?
    """

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        if cls.__init__ is object.__init__ and (args or settings):  # which takes them silently
            raise TypeError(f"{cls.__name__}() takes no arguments")
        code = getattr(cls.__init__, "__code__", None)
        if code is not None and not code.co_flags & inspect.CO_VARKEYWORDS:
            known = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            for name in settings.keys() - set(known):
                problem = f"{cls.__name__}() got an unexpected keyword argument {name!r}"
                raise TypeError(f"{problem}{nearest(name, known)} (allowed: {', '.join(known)})")
        return super().__new__(cls)


def check_settings(settings: Any, error: type[FoedusError] = ConfigError) -> None:
    """Check the fields of a dataclass instance against their type hints, in order.

    Args:
        settings: The instance; `__post_init__` passes `self`, after it has converted values.
        error: The class of the exception.

    Raises:
        FoedusError: An `error` that states the field, its value and what is allowed.
        TypeError: A hint of a class of foedus cannot be resolved.
    """
    for name, rule in rules_of(type(settings)):
        value = getattr(settings, name)
        if not rule.accepts(value):
            raise error(rule.refusal(name, value))


def check_value(name: str, value: Any, hint: Any, error: type[FoedusError] = ConfigError) -> None:
    """Check an argument of a function: `check_value("seed", seed, Annotated[int, Ge(0)])`."""
    rule = rule_of(hint)
    if rule is not None and not rule.accepts(value):
        raise error(rule.refusal(name, value))


def rules_of(cls: type) -> tuple[tuple[str, Rule], ...]:
    """The checked fields of a dataclass and their rules; resolved once per class."""
    rules = _RULES.get(cls)
    if rules is None:
        found = ((f.name, _field_rule(cls, f.name)) for f in dataclasses.fields(cls) if f.init)
        rules = _RULES[cls] = tuple((name, rule) for name, rule in found if rule is not None)
    return rules


_RULES: weakref.WeakKeyDictionary[type, tuple[tuple[str, Rule], ...]] = weakref.WeakKeyDictionary()


def _field_rule(cls: type, name: str) -> Rule | None:
    owner = next((c for c in cls.__mro__ if name in inspect.get_annotations(c)), None)
    if owner is None:
        return None
    ours = owner.__module__.partition(".")[0] == "foedus"
    try:
        hint = hint_of(owner, name)
    except Exception as problem:
        if not ours:
            return None
        field, written = f"{owner.__qualname__}.{name}", inspect.get_annotations(owner)[name]
        raise TypeError(
            f"{owner.__module__}.{field}: its hint {written!r} cannot be resolved ({problem}); "
            "import its names at run time, not under TYPE_CHECKING"
        ) from problem
    return rule_of(hint) if ours or _constrained(hint) else None


def hint_of(owner: type, name: str) -> Any:
    """The type hint of a field, with metadata, resolved where the field is declared."""
    holder = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    names = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    return typing.get_type_hints(holder, names, dict(vars(owner)), include_extras=True)[name]


def _constrained(hint: Any) -> bool:
    """Whether a hint states a constraint or a `Literal` anywhere."""
    if typing.get_origin(hint) is Annotated:
        inner, *metadata = typing.get_args(hint)
        known = at.BaseMetadata | at.GroupedMetadata
        return any(isinstance(m, known) for m in metadata) or _constrained(inner)
    return typing.get_origin(hint) is Literal or any(map(_constrained, typing.get_args(hint)))


@dataclass(frozen=True)
class Rule:
    """A compiled hint.

    accepts: whether a value is allowed. allowed: the alternatives, described. plural: the
    description of several such values. names: the strings that are allowed. fixed: nothing but
    these (and None) is allowed. locate: the place, value and rule of the element at fault, for a
    container that is otherwise right.
    """

    accepts: Callable[[Any], bool]
    allowed: tuple[str, ...]
    plural: str = ""
    names: tuple[str, ...] = ()
    fixed: bool = False
    remedy: str = ""
    locate: Callable[[Any], tuple[str, Any, Rule] | None] = lambda value: None

    def refusal(self, name: str, value: Any) -> str:
        """The error message for a value that is not allowed."""
        if self.fixed and self.names and not self.remedy:
            none = ["None"] if "None" in self.allowed else []
            return unknown(name, value, [*self.names, *none])
        element = self.locate(value)
        if element is not None:
            place, inner, rule = element
            return rule.refusal(f"{name}{place}", inner)
        word = value[:100] if isinstance(value, str) else ""
        close = difflib.get_close_matches(word, self.names, n=1)
        hints = [f"did you mean {close[0]!r}?"] if close else []
        if isinstance(value, type) and value.__name__ in " ".join(self.allowed):
            hints.append("this is the class: add parentheses")
        hints += [self.remedy] if self.remedy else []
        return "; ".join([f"{name}={shown(value)} must be {_either(self.allowed)}", *hints])


@functools.lru_cache(maxsize=1024)
def rule_of(hint: Any) -> Rule | None:
    """The rule of a type hint; `None`: every value is allowed, or the class checks it itself."""
    return _rule(hint, ())


def _rule(hint: Any, constraints: tuple[Any, ...]) -> Rule | None:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _annotated(inside[0], inside[1:], constraints)
    if origin in (typing.Union, types.UnionType):
        return _union([_rule(option, constraints) for option in inside])
    if origin is Literal:
        return _literal(inside)
    if hint is None or hint is types.NoneType:
        return Rule(lambda v: v is None, ("None",), fixed=True)
    if hint in (int, float):
        return _number(hint, constraints)
    if hint is bool:
        return Rule(lambda v: isinstance(v, _BOOLS), ("True", "False"), "bools")
    if hint is str:
        return _constrain(Rule(lambda v: isinstance(v, str), ("a string",), "strings"), constraints)
    if (origin or hint) in (tuple, list, Sequence, dict, Mapping):
        return _constrain(_container(origin or hint, inside), constraints)
    if hint is Any or hint is object:
        return None
    if origin is None and isinstance(hint, type) and not getattr(hint, "_is_protocol", False):
        name = _class_name(hint)
        a = "an" if name[0] in "AEIOUaeiou" else "a"
        rule = Rule(lambda v: isinstance(v, hint), (f"{a} {name}",), f"{name} objects")
        return _constrain(rule, constraints)
    return None


def _annotated(inner: Any, metadata: tuple[Any, ...], constraints: tuple[Any, ...]) -> Rule | None:
    own: list[Any] = []
    for m in metadata:
        if isinstance(m, at.GroupedMetadata):
            own += m
        elif isinstance(m, at.BaseMetadata):
            own.append(m)
    rule = _rule(inner, (*constraints, *own))
    if rule is None:
        return None
    for m in metadata:
        if isinstance(m, Means):
            rule = dataclasses.replace(
                rule, allowed=(m.text,), plural="", fixed=False, locate=lambda value: None
            )
        elif isinstance(m, Remedy):
            rule = dataclasses.replace(rule, remedy=m.text)
    return rule


def _union(options: list[Rule | None]) -> Rule | None:
    if None in options:
        return None
    # None is described last
    rules = sorted((r for r in options if r is not None), key=lambda r: r.allowed == ("None",))
    tests = [r.accepts for r in rules]

    def locate(value: Any) -> tuple[str, Any, Rule] | None:
        return next((found for r in rules if (found := r.locate(value)) is not None), None)

    return Rule(
        lambda v: any(test(v) for test in tests),
        tuple(a for r in rules for a in r.allowed),
        names=tuple(n for r in rules for n in r.names),
        fixed=all(r.fixed for r in rules),
        remedy="; ".join(r.remedy for r in rules if r.remedy),
        locate=locate,
    )


def _literal(values: tuple[Any, ...]) -> Rule:
    names = tuple(v for v in values if isinstance(v, str))

    def accepts(value: Any) -> bool:
        if isinstance(value, np.generic):
            value = value.item()
        return any(type(value) is type(v) and value == v for v in values)

    return Rule(accepts, tuple(map(repr, values)), names=names, fixed=len(names) == len(values))


def _number(kind: type, constraints: tuple[Any, ...]) -> Rule:
    low, high, above, below = -math.inf, math.inf, True, True
    others = []
    for c in constraints:
        if isinstance(c, at.Gt | at.Ge):
            low, above = cast("float", c.gt if isinstance(c, at.Gt) else c.ge), isinstance(c, at.Gt)
        elif isinstance(c, at.Lt | at.Le):
            below = isinstance(c, at.Lt)
            high = cast("float", c.lt if isinstance(c, at.Lt) else c.le)
        else:
            others.append(c)
    over, under = (operator.lt if above else operator.le), (operator.lt if below else operator.le)
    general = Real if kind is float else Integral

    def accepts(v: Any) -> bool:
        # NaN and, unless declared, infinities fail the comparisons.
        right = type(v) is int or type(v) is kind
        right = right or (isinstance(v, general) and not isinstance(v, bool))
        return right and bool(over(low, v) and under(v, high))

    adjective, bounds = "", ""
    infinite = (math.isinf(high) and not below) or (math.isinf(low) and not above)
    finite = kind is float and (math.isinf(low) or math.isinf(high)) and not infinite
    if math.isinf(high) and low == 0 and kind is float:
        adjective = "positive" if above else "non-negative"
    elif math.isfinite(low) and math.isfinite(high) and not above and not below:
        bounds = f"from {low} to {high}"
    else:
        parts = [f"above {low}" if above else f"of at least {low}"] if math.isfinite(low) else []
        if math.isfinite(high):
            parts += [f"below {high}" if below else f"{'' if parts else 'of '}at most {high}"]
        bounds = " and ".join(parts)
    if infinite:
        bounds = f"{bounds} (math.inf included)".strip()
    noun = "integer" if kind is int else "number"
    words = [w for w in (adjective, "finite" if finite else "", noun) if w]
    article, end = "an" if words[0][0] in "aeiou" else "a", [bounds] if bounds else []
    plural = " ".join([*words[:-1], f"{noun}s", *end])
    rule = Rule(accepts, (" ".join([article, *words, *end]),), plural)
    return _constrain(rule, tuple(others))


def _container(kind: type[Collection[Any]], inside: tuple[Any, ...]) -> Rule:
    """Containers whose elements are checked; an element that is left to the class is not."""
    mapping = kind in (dict, Mapping)
    fixed = kind is tuple and bool(inside) and inside[-1] is not Ellipsis
    names: dict[object, str] = {dict: "dictionary", Mapping: "dictionary", Sequence: "sequence"}
    name = names.get(kind, kind.__name__)
    if mapping:
        rules = [_rule(inside[1], ())] if inside else [None]
        keys = _rule(inside[0], ()) if inside else None
    else:
        rules, keys = [_rule(i, ()) for i in inside if i is not Ellipsis] or [None], None

    def right(value: Any) -> bool:
        if not isinstance(value, kind) or isinstance(value, str | bytes):
            return False
        return len(value) == len(rules) if fixed else True

    def locate(value: Any) -> tuple[str, Any, Rule] | None:
        if not right(value):
            return None
        if mapping:
            items = list(value.items())
            if keys is not None:
                for key in value:
                    if not keys.accepts(key):
                        return " key", key, keys
        else:
            items = list(enumerate(value))
        for i, (key, element) in enumerate(items):
            rule = rules[i] if fixed else rules[0]
            if rule is not None and not rule.accepts(element):
                place, inner, fault = rule.locate(element) or ("", element, rule)
                return f"[{key!r}]{place}", inner, fault
        return None

    if fixed:
        each = ", ".join(_either(r.allowed) if r else "any value" for r in rules)
        allowed = f"a {name} of {len(rules)}: {each}"
    else:
        allowed = f"a {name}"
        if rules[0]:
            plural = rules[0].plural or f"elements, each {_either(rules[0].allowed)}"
            allowed += f" of {plural}"
    return Rule(lambda v: right(v) and locate(v) is None, (allowed,), locate=locate)


def _constrain(rule: Rule, constraints: tuple[Any, ...]) -> Rule:
    """The rule with constraints other than bounds of numbers, and their description."""
    test: Callable[..., Any]
    for c in constraints:
        description = rule.allowed[0]
        if isinstance(c, at.MinLen):
            test = lambda v, n=c.min_length: len(v) >= n  # noqa: E731
            words = description.replace("a ", "a non-empty ", 1)
            words = words if c.min_length == 1 else f"{description}, with at least {c.min_length}"
        elif isinstance(c, at.MaxLen):
            test = lambda v, n=c.max_length: len(v) <= n  # noqa: E731
            words = f"{description}, with at most {c.max_length}"
        elif isinstance(c, at.MultipleOf):
            test = lambda v, n=c.multiple_of: v % n == 0  # noqa: E731
            words = f"{description}, a multiple of {c.multiple_of}"
            if c.multiple_of == 2 and description.startswith("an integer"):
                words = f"an even {description[3:]}"
        elif isinstance(c, at.Predicate):
            test = c.func
            words = f"{description} for which {getattr(c.func, '__name__', c.func)} holds"
        else:
            raise TypeError(f"{c!r} is not a constraint of {description}")
        both = lambda v, first=rule.accepts, then=test: first(v) and bool(then(v))  # noqa: E731
        rule = dataclasses.replace(rule, accepts=both, allowed=(words,), plural="")
    return rule


def _class_name(cls: type) -> str:
    """As a user writes it: fd.Training."""
    public = cls.__module__.startswith("foedus.") and cls.__name__ in sys.modules["foedus"].__all__
    return f"fd.{cls.__name__}" if public else cls.__name__


def _either(alternatives: Sequence[str]) -> str:
    *first, last = alternatives
    return f"{', '.join(first)} or {last}" if first else last
