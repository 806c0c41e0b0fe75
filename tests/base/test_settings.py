"""Settings checked by declaration: every kind of hint, what the errors say, and that the hints of
foedus resolve.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import math
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import pytest
import torch
from annotated_types import Ge, Gt, Interval, Le, Len, Lt, MaxLen, MinLen, MultipleOf, Predicate

import foedus as fd
from foedus.base import settings
from foedus.base.settings import Means, Remedy, check_settings, check_value, rules_of
from foedus.core.aggregation import Aggregation
from foedus.core.algorithm import Algorithm
from foedus.core.callbacks import Callback
from foedus.core.describe import subclasses
from foedus.errors import ConfigError, ModelError
from foedus.geometry import Domain, Mirror, ModelDomain
from foedus.models.base import Model
from foedus.models.features import FeatureMap
from foedus.models.oracles import Oracle

if TYPE_CHECKING:
    from decimal import Decimal

INF = math.inf


class HasOpen(Protocol):
    def open(self) -> None: ...


ALLOWED = {
    "positive": (
        Annotated[float, Gt(0)],
        [1, 0.5, 1e300, np.float32(2), np.int64(3), Fraction(1, 3)],
    ),
    "not negative": (Annotated[float, Ge(0)], [0, 0.0, np.float64(0)]),
    "any number": (float, [-1, 0, 2.5, 10**30]),
    "half open": (Annotated[float, Ge(0), Lt(1)], [0, 0.999]),
    "interval": (Annotated[float, Interval(gt=0, le=1)], [1, 1e-9]),
    "infinity declared": (Annotated[float, Gt(0), Le(INF)], [1, INF]),
    "integer": (Annotated[int, Ge(1)], [1, 7, np.int64(3), np.uint8(200)]),
    "even": (Annotated[int, Ge(2), MultipleOf(2)], [2, 40]),
    "bool": (bool, [True, False, np.bool_(True)]),
    "text": (str, ["", "a"]),
    "some text": (Annotated[str, MinLen(1)], ["a"]),
    "names": (Literal["sgd", "adam"], ["sgd", "adam", np.str_("sgd")]),
    "numbers of a list": (Literal[1, 2], [1, 2, np.int64(2)]),
    "optional": (Annotated[int, Ge(1)] | None, [None, 1]),
    "constraints around a union": (Annotated[int | None, Ge(1)], [None, 1]),
    "number or name": (Annotated[float, Ge(0)] | Literal["auto"], ["auto", 0, 1.5]),
    "bool or name": (bool | Literal["auto"], [True, False, "auto"]),
    "tuple": (tuple[Annotated[int, Ge(1)], ...], [(), (1, 2)]),
    "pair": (tuple[str, Annotated[float, Gt(0)]], [("a", 1.0)]),
    "lengths": (Annotated[tuple[int, ...], Len(1, 2)], [(1,), (1, 2)]),
    "list": (list[int], [[], [1]]),
    "sequence": (Sequence[int], [[1], (1,), range(3)]),
    "bare tuple": (float | tuple, [1.0, (1, "x")]),
    "dictionary": (dict[str, Annotated[float, Gt(0)]] | None, [None, {}, {"CPU": 2}]),
    "mapping": (Mapping[int, str], [{1: "a"}]),
    "class": (torch.Tensor, [torch.zeros(1)]),
    "predicate": (Annotated[int, Predicate(lambda v: v % 3 == 0)], [3, 0]),
    "anything": (Any, [None, 3, object()]),
    "protocols and callables are the class's affair": (
        Callable[[int], int] | HasOpen,
        [None, 3, print],
    ),
    "one exotic option leaves all of it to the class": (int | Callable[[], int], ["x", True]),
}


@pytest.mark.parametrize(("hint", "values"), ALLOWED.values(), ids=ALLOWED)
def test_what_is_allowed_passes(hint, values):
    for value in values:
        check_value("x", value, hint)


REFUSED = [
    *[(Annotated[float, Gt(0)], v, f"x={v!r} must be a positive finite number")
      for v in (0, -1.0, INF, math.nan, True, "1", None, 1j, torch.ones(()), np.float64("nan"),
                np.bool_(True))],
    (Annotated[float, Ge(0)], -1, "x=-1 must be a non-negative finite number"),
    (float, INF, "x=inf must be a finite number"),
    (float, -INF, "x=-inf must be a finite number"),
    (Annotated[float, Ge(1)], 0.5, "x=0.5 must be a finite number of at least 1"),
    (Annotated[float, Gt(1)], 1, "x=1 must be a finite number above 1"),
    (Annotated[float, Le(1)], 2, "x=2 must be a finite number of at most 1"),
    (Annotated[float, Le(1)], -INF, "x=-inf must be a finite number of at most 1"),
    (Annotated[float, Lt(0)], 0, "x=0 must be a finite number below 0"),
    (Annotated[float, Gt(0), Le(1)], 1.5, "x=1.5 must be a number above 0 and at most 1"),
    (Annotated[float, Ge(0), Lt(1)], 1, "x=1 must be a number of at least 0 and below 1"),
    (Annotated[float, Interval(ge=0, le=1)], 1.5, "x=1.5 must be a number from 0 to 1"),
    (Annotated[float, Gt(0), Le(INF)], -INF, "x=-inf must be a positive number (math.inf "
                                             "included)"),
    (Annotated[float, Gt(0), Le(INF)], math.nan, "x=nan must be a positive number (math.inf "
                                                 "included)"),
    (int, 1.0, "x=1.0 must be an integer"),
    *[(Annotated[int, Ge(1)], v, f"x={v!r} must be an integer of at least 1")
      for v in (0, 1.0, True, "1", INF, np.float64(3), np.bool_(True))],
    (Annotated[int, Interval(ge=2, le=40)], 41, "x=41 must be an integer from 2 to 40"),
    (Annotated[int, Ge(1)] | None, 0, "x=0 must be an integer of at least 1 or None"),
    (None | Annotated[int, Ge(1)], 0, "x=0 must be an integer of at least 1 or None"),
    (Annotated[int, Ge(2), MultipleOf(2)] | Literal["auto"], 3, "x=3 must be an even integer of at "
                                                                "least 2 or 'auto'"),
    (Annotated[int, MultipleOf(5)], 3, "x=3 must be an integer, a multiple of 5"),
    (bool, 1, "x=1 must be True or False"),
    (bool | Literal["auto"], 1, "x=1 must be True, False or 'auto'"),
    (str, 3, "x=3 must be a string"),
    (Annotated[str, MinLen(1)], "", "x='' must be a non-empty string"),
    (Annotated[str, MaxLen(2)], "abc", "x='abc' must be a string, with at most 2"),
    (Literal["sgd", "adam"], "adm", "x 'adm' is unknown; did you mean 'adam'? (allowed: sgd, "
                                    "adam)"),
    (Literal["sgd", "adam"], "zz", "x 'zz' is unknown (allowed: sgd, adam)"),
    (Literal["sgd", "adam"], 3, "x 3 is unknown (allowed: sgd, adam)"),
    (Literal["sgd", "adam"], ["sgd"], "x ['sgd'] is unknown; did you mean 'sgd'? (allowed: sgd, "
                                      "adam)"),
    (Literal["crop"] | None, "corp", "x 'corp' is unknown; did you mean 'crop'? (allowed: crop, "
                                     "None)"),
    (Literal["crop", None], "corp", "x='corp' must be 'crop' or None; did you mean 'crop'?"),
    (Literal[1, 2], True, "x=True must be 1 or 2"),
    (Literal[1, 2], 1.0, "x=1.0 must be 1 or 2"),
    (Annotated[float, Ge(0)] | Literal["auto"], "atuo",
     "x='atuo' must be a non-negative finite number or 'auto'; did you mean 'auto'?"),
    (Annotated[float, Ge(0)] | Literal["auto"], -1, "x=-1 must be a non-negative finite number or "
                                                    "'auto'"),
    (Annotated[float, Ge(0)] | Literal["auto"], None, "x=None must be a non-negative finite number "
                                                      "or 'auto'"),
    (tuple[Annotated[int, Ge(1)], ...], (3, 0), "x[1]=0 must be an integer of at least 1"),
    (tuple[Annotated[int, Ge(1)], ...], [3], "x=[3] must be a tuple of integers of at least 1"),
    (tuple[Literal["a", "b"], ...], 3, "x=3 must be a tuple of elements, each 'a' or 'b'"),
    (Annotated[tuple[int, ...], MinLen(1)], (), "x=() must be a non-empty tuple of integers"),
    (Annotated[tuple[int, ...], MinLen(2)], (1,), "x=(1,) must be a tuple of integers, with at "
                                                  "least 2"),
    (tuple[str, int], ("a",), "x=('a',) must be a tuple of 2: a string, an integer"),
    (tuple[str, int], ("a", "b"), "x[1]='b' must be an integer"),
    (tuple[tuple[str, Annotated[float, Gt(0)]], ...], (("a", 1), ("b", -1)), "x[1][1]=-1 must be a "
                                                                             "positive finite "
                                                                             "number"),
    (Sequence[int], "12", "x='12' must be a sequence of integers"),
    (list[int] | None, [1, "a"], "x[1]='a' must be an integer"),
    (dict[str, Annotated[float, Gt(0)]] | None, {"CPU": 0}, "x['CPU']=0 must be a positive finite "
                                                            "number"),
    (dict[str, float], {3: 1.0}, "x key=3 must be a string"),
    (dict[str, float], [], "x=[] must be a dictionary of finite numbers"),
    (torch.Tensor, 3, "x=3 must be a Tensor"),
    (fd.Training, 3, "x=3 must be a fd.Training"),
    (fd.Training | None, fd.Training,
     "x=<class 'foedus.models.training.settings.Training'> must be a fd.Training or None; this is "
     "the class: add parentheses"),
    (Annotated[int, Predicate(str.isdigit)] | None, "a", "x='a' must be an integer for which "
                                                         "isdigit holds or None"),
    (Annotated[tuple[Annotated[int, Ge(1)], ...], Means("layer widths, such as (200,)")], (0,),
     "x=(0,) must be layer widths, such as (200,)"),
    (Annotated[Literal["a"], Means("'a', nothing else")], "b", "x='b' must be 'a', nothing else"),
    (Annotated[float, Gt(1), Le(2), Remedy("for p = 1 use Entropy()")], 1,
     "x=1 must be a number above 1 and at most 2; for p = 1 use Entropy()"),
    (Annotated[int, Ge(1), Remedy("leave it out")] | None, 0, "x=0 must be an integer of at least "
                                                              "1 or None; leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    REFUSED,
    ids=[f"{i}-{m[:40]}" for i, (*_, m) in enumerate(REFUSED)],
)
def test_what_is_not_allowed_is_refused_with_the_reason(hint, value, message):
    with pytest.raises(ConfigError) as error:
        check_value("x", value, hint)
    assert str(error.value) == message


def test_long_values_are_shortened():
    with pytest.raises(
        ConfigError, match=r"^x=\(0, 1, .* \.\.\. .*999\) must be an integer$"
    ) as error:
        check_value("x", tuple(range(1000)), int)
    assert len(str(error.value)) < 260


def test_the_class_of_the_error_is_a_choice():
    with pytest.raises(ModelError, match="x=0 must be"):
        check_value("x", 0, Annotated[int, Ge(1)], ModelError)


def test_a_constraint_that_says_nothing_about_a_type_is_a_mistake():
    with pytest.raises(TypeError, match="is not a constraint of a string"):
        check_value("x", "a", Annotated[str, Ge(1)])


@dataclass(frozen=True)
class Base:
    lr: Annotated[float, Gt(0)] = 0.1
    method: Literal["sgd", "adam"] = "sgd"
    kind: ClassVar[int] = "not a field"
    held: list = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class Derived(Base):
    steps: Annotated[int, Ge(1)] | None = None
    method: Literal["sgd", "adam", "lion"] = "lion"


def test_subclasses_inherit_the_check_and_may_declare_a_field_again():
    assert Derived(steps=3).method == "lion"
    for make, message in (
        (lambda: Derived(lr=0), "lr=0 must be a positive finite number"),
        (lambda: Derived(steps=0), "steps=0 must be an integer of at least 1 or None"),
        (
            lambda: Derived(method="lio"),
            "method 'lio' is unknown; did you mean 'lion'? (allowed: sgd, adam, lion)",
        ),
        (lambda: Base(method="lion"), "method 'lion' is unknown (allowed: sgd, adam)"),
        (lambda: dataclasses.replace(Derived(), lr=-1), "lr=-1 must be a positive finite number"),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        assert str(error.value) == message


def test_hints_are_resolved_once_per_class(monkeypatch):
    @dataclass(frozen=True)
    class Local(Base):
        k: Annotated[int, Ge(1)] = 1

    Local()
    monkeypatch.setattr(settings, "hint_of", None)  # would fail if it were called again
    Local(k=2)
    with pytest.raises(ConfigError, match="k=0"):
        Local(k=0)


def test_the_cache_keeps_no_class_alive():
    def make() -> weakref.ref:
        cls = dataclasses.make_dataclass(
            "Passing", [("k", Annotated[int, Ge(1)], 1)], bases=(Base,), frozen=True
        )
        with pytest.raises(ConfigError, match="k=0"):
            cls(k=0)
        return weakref.ref(cls)

    passing = make()
    gc.collect()
    assert passing() is None


@dataclass(frozen=True)
class Loose(fd.FedAvg):
    """What a user may write: loose hints, one that cannot be resolved, one with a constraint."""

    decay: float = None
    scale: int = 0.5
    exact: Decimal = "1"
    share: Annotated[float, Interval(ge=0, le=1)] = 0.5


def test_loose_hints_of_a_users_class_are_not_held_against_it():
    assert Loose(decay="linear", exact=3).lr == 0.1
    with pytest.raises(ConfigError, match="share=2 must be a number from 0 to 1"):
        Loose(share=2)
    with pytest.raises(ConfigError, match="lr=0 must be a positive"):
        Loose(lr=0)


def test_hints_of_foedus_must_resolve(monkeypatch):
    monkeypatch.setattr(Loose, "__module__", "foedus.loose")
    settings._RULES.pop(Loose, None)
    with pytest.raises(
        TypeError,
        match=r"foedus\.loose\.Loose\.\w+: its hint .* cannot be resolved .*TYPE_CHECKING",
    ):
        Loose()
    settings._RULES.pop(Loose, None)


RESULTS = {fd.Comparison, fd.Heterogeneity, fd.Regret, fd.Run, fd.Sharing, fd.Tuning}
"""Public dataclasses that hold what was measured: nobody sets their fields."""


def test_hints_of_all_settings_of_foedus_resolve():
    """Of every public class of settings, whether it checks them already or not."""
    for package in (
        "algorithms",
        "geometry",
        "models",
        "aggregation",
        "engines",
        "diagnosis",
        "tuning",
    ):
        importlib.import_module(f"foedus.{package}")
    public = {
        v
        for v in (getattr(fd, n) for n in fd.__all__)
        if isinstance(v, type) and dataclasses.is_dataclass(v)
    }
    kinds = (
        Algorithm,
        Model,
        Domain,
        ModelDomain,
        Mirror,
        FeatureMap,
        Oracle,
        Aggregation,
        Callback,
    )
    found = public | {c for c in subclasses(*kinds).values() if c.__module__.startswith("foedus.")}
    assert {fd.FedAvg, fd.MLP, fd.L1Ball, fd.Local, fd.Krum, fd.Forest} <= found and len(found) > 50
    for cls in found - RESULTS:
        rules_of(cls)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fd.Scafold, AttributeError, "no attribute 'Scafold'; did you mean 'Scaffold'?"),
        (lambda: fd.SCAFFOLD, AttributeError, "did you mean 'Scaffold'?"),
        (lambda: fd.FedAvg(epoch=2), TypeError, "argument 'epoch'; did you mean 'epochs'?"),
        (lambda: fd.MLP(hiden=(3,)), TypeError, "MLP() got an unexpected keyword argument"),
        (lambda: fd.L1Ball(radus=1.0), TypeError, "did you mean 'radius'?"),
        (lambda: fd.Krum(hostil=1), TypeError, "did you mean 'hostile'?"),
        (lambda: fd.Local(memry=1), TypeError, "did you mean 'memory'?"),
        (lambda: fd.RandomFourier(5, bandwith=1.0), TypeError, "did you mean 'bandwidth'?"),
        (lambda: fd.FedFW(domain=fd.L1Ball(1.0), qq=1), TypeError, "'qq' (allowed: "),
    ],
)
def test_a_mistyped_name_is_reported_with_the_nearest(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_a_class_with_its_own_arguments_takes_them():
    class Loose(fd.Algorithm):
        def __init__(self, size, *, depth=1, **more):
            self.size, self.depth, self.more = size, depth, more

    assert Loose(size=2, depht=3).more == {"depht": 3}

    class Plain(fd.Algorithm):
        pass

    assert isinstance(Plain(), fd.Algorithm)
    for arguments, named in (((1,), {}), ((), {"lr": 1})):
        with pytest.raises(TypeError, match="takes no arguments"):
            Plain(*arguments, **named)
