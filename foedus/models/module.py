"""Any `torch.nn.Module` as a model."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from foedus.base.spec import Spec
from foedus.errors import ModelError
from foedus.models.base import Drops, Model, Params, derives_within
from foedus.models.dropout import Record, with_layers
from foedus.models.norms import (
    UPDATED,
    Norm,
    batch_norms,
    check_norms,
    layers_of,
    rows_of_call,
    statistics_of,
    with_groups,
    with_statistics,
)
from foedus.models.products import linear_layers, with_products
from foedus.models.unbatched import call

# Activations of convolutions are large, so a batch of clients takes much memory and gains little:
# `make bench ARGS=batching` measures 1.1 to 1.5 times for them, 1.4 to 5 for other layers.
# `Local(batch=True)` batches them all the same.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# PyTorch batches no nn.LSTM over clients: it calls one after the other, two to three times slower
# than a loop does (nn.GRU and nn.RNN are eight times faster in batches of 50 clients).
_APART = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.LSTM)
_COPIES, _CPU = threading.local(), torch.device("cpu")
_RANDOM = "draws from the global random generator, so runs could not be repeated"


@dataclass(frozen=True, eq=False)
class Module(Model):
    """A `torch.nn.Module` as a model, trained from its parameters at the start of the run.

    Algorithms wrap a plain module automatically; use this class for `norm` and `trainable`. The
    module itself is never changed: parameters are copied, clients train a copy in training mode,
    and everything else uses a copy in evaluation mode.

    Rows reach the module as they are in the data: flat features as (n, d), images as (n, channels,
    height, width); as float32, or integer features (int32, int64) as int64 if the module takes
    them, as one that begins with `nn.Embedding` does. Parameters that do not require a gradient are
    neither trained nor sent. Dropout draws from the clients' keys (`foedus.models.dropout`).
    Modules that draw other random numbers, or change buffers that are not running statistics, are
    refused.

    Args:
        module: The module.
        norm: The policy for BatchNorm. "average": clients update the running statistics, which are
            sent and averaged like weights. "local": BatchNorm layers stay at their client, which so
            has its own model (FedBN: Li, Jiang, Zhang, Kamp and Dou, ICLR 2021). "silo": only their
            statistics stay, and their weights are averaged (SiloBN: Andreux, Ogier du Terrail,
            Beguier and Tramel, DCL 2020). "frozen": the module's statistics are used in training,
            too, and do not change. "group": BatchNorm is replaced by GroupNorm of the same
            channels, in groups of at least 16 channels, with BatchNorm's weights. `None`: a module
            with BatchNorm is refused.
        trainable: The parameters that are trained and sent: a list of glob patterns for their
            names, or a string of such patterns with spaces, "head.* *.norm.*". Others do not
            change; running statistics follow `norm` alone. `None`: all parameters that require a
            gradient.

    Raises:
        ModelError: A pattern matches no parameter; or, for given data, the module cannot take the
            rows, returns another number of outputs, or is not a pure function.

    Example:
        >>> layers = torch.nn.Linear(64, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10)
        >>> net = torch.nn.Sequential(*layers)
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> run = fd.run(fd.FedAvg(fd.Module(net, trainable="2.*"), lr=0.1), fed, rounds=1)
        >>> sorted(run.state.w)
        ['2/bias', '2/weight']
    """

    module: nn.Module
    norm: Norm | None = None
    trainable: str | tuple[str, ...] | None = None

    trains_apart: ClassVar[bool] = True
    sequences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.trainable, list):
            object.__setattr__(self, "trainable", tuple(self.trainable))
        super().__post_init__()
        if self.trainable is not None:
            check_trainable(self.module, self.trainable)

    @property
    def batchable(self) -> bool:
        """Whether it has no convolution and no LSTM, for which batches of clients do not pay."""
        return not any(isinstance(m, _APART) for m in self.module.modules())

    @cached_property
    def recurrent(self) -> bool:  # type: ignore[override]
        """Whether it has a recurrent layer."""
        return any(isinstance(m, nn.RNNBase) for m in self.module.modules())

    @cached_property
    def row_major(self) -> frozenset[str]:  # type: ignore[override]
        return _slashed([f"{n}.weight" if n else "weight" for n in linear_layers(self.module)])

    def takes_integers(self, spec: Spec) -> bool:
        return not self._refusal(spec, torch.int64) or bool(self._refusal(spec, torch.float32))

    def _refusal(self, spec: Spec, dtype: torch.dtype) -> str:
        """The module's error message for two rows of zeros of this type; empty if it takes them."""
        generator = torch.get_rng_state()
        try:
            with torch.no_grad():
                self.apply(self.init(spec, None), torch.zeros(2, *spec.shape, dtype=dtype))
        except Exception as error:
            return str(error) or type(error).__name__
        finally:
            torch.set_rng_state(generator)
        return ""

    def check(self, spec: Spec) -> None:
        check_norms(self.module, self.norm)
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ModelError(f"{type(self.module).__name__} has no parameters to train")
        forget_copies(self.module)  # its tensors may have been replaced
        name, generator = type(self.module).__name__, torch.get_rng_state()
        buffers = [(b, b.clone()) for b in self.module.buffers()]
        whole = spec.integers and self.takes_integers(spec)
        rows = torch.zeros(2, *spec.shape, dtype=torch.int64 if whole else torch.float32)
        try:
            with torch.no_grad():
                params = self.init(spec, None)
                out = self.apply(params, rows)
                self.train_outputs(params, rows, torch.ones(2), False, Record(2))
        except ModelError:
            raise
        except Exception as error:
            fits = "; give integer features (int64), which stay integers"
            whole = not spec.integers and not self._refusal(spec, torch.int64)
            raise ModelError(
                f"{name} cannot take rows of shape {spec.shape}, so its first layer does not fit: "
                f"{error}{fits if whole else ''}"
            ) from error
        if not torch.equal(generator, torch.get_rng_state()):
            torch.set_rng_state(generator)
            raise ModelError(
                f"{name} {_RANDOM}; take the random part out, or use PyTorch's dropout functions, "
                "whose draws foedus makes itself"
            )
        if not all(torch.equal(b, before) for b, before in buffers):
            with torch.no_grad():
                for b, before in buffers:
                    b.copy_(before)
            raise ModelError(
                f"{name} changes its buffers when it is called; a client step must be pure, and "
                "only the running statistics of BatchNorm have a policy (norm=...)"
            )
        if not isinstance(out, Tensor):
            raise ModelError(
                f"{name} returns a {type(out).__name__}; it must return a tensor of "
                f"{spec.outputs} outputs a row: take the one that counts in forward"
            )
        if tuple(out.shape) != (2, *spec.output_shape):
            want = f"{spec.classes} classes" if spec.classes else f"{spec.outputs} target(s)"
            raise ModelError(
                f"{name} gives outputs of shape {tuple(out.shape)} for 2 rows, but the data has "
                f"{want}{_remedy(tuple(out.shape[1:]), spec)}"
            )

    def drops(self, spec: Spec) -> bool:
        whole = spec.integers and self.takes_integers(spec)
        rows = torch.zeros(2, *spec.shape, dtype=torch.int64 if whole else torch.float32)
        record = Record(2)
        with torch.no_grad():
            self.train_outputs(self.init(spec, None), rows, torch.ones(2), False, record)
        return bool(record.sites)

    @property
    def statistics(self) -> frozenset[str]:
        """Names of the running statistics that training updates, where `norm` lets it."""
        return _slashed(statistics_of(self.module)) if self.norm in UPDATED else frozenset()

    @property
    def kept(self) -> frozenset[str]:
        """Names of the parameters and statistics that stay at their client."""
        if self.norm == "silo":
            return self.statistics
        return _slashed(layers_of(self.module)) if self.norm == "local" else frozenset()

    def init(self, spec: Spec, key: Tensor | None) -> Params:
        # Names with dots would nest in saved files; the module's own naming comes back in `apply`.
        trained: Params = dict(trained_parameters(self.module, self.trainable))
        if self.norm in UPDATED:
            kept = set(statistics_of(self.module))
            trained |= {n: b for n, b in self.module.named_buffers() if n in kept}
        return {n.replace(".", "/"): p.detach().to(_CPU, copy=True) for n, p in trained.items()}

    def ready(self, device: torch.device) -> None:
        self._own(False, device)

    def apply(self, params: Params, x: Tensor) -> Tensor:
        own = self._own(False, x.device)
        try:
            return self._call(own, params, x)
        except ModelError:
            if not self.recurrent:
                raise
            # PyTorch batches recurrent layers over clients where it takes derivatives, only
            return torch.func.vjp(lambda params: self._call(own, params, x), params)[0]

    def train_outputs(
        self, params: Params, x: Tensor, weight: Tensor, padded: bool, drops: Drops | None
    ) -> tuple[Tensor, Params]:
        own = self._own(True, x.device)
        with nullcontext() if drops is None else drops:
            again = None if drops is None else drops.sites.clear
            if self.norm in (None, "group"):
                return self._call(own, params, x, again), {}
            compiled = not derives_within(self, params)
            with rows_of_call(weight, padded, compiled) as found:
                outputs = self._call(own, params, x, again)
        return outputs, {n.replace(".", "/"): v for n, v in found.items()}

    def _call(
        self, own: nn.Module, params: Params, x: Tensor, again: Callable[[], Any] | None = None
    ) -> Tensor:
        named = {n.replace("/", "."): p for n, p in params.items()}
        try:
            return call(type(self.module).__name__, functional_call, own, named, (x,), again=again)
        except RuntimeError as error:
            if "same device" not in str(error):
                raise
            raise ModelError(
                f"{type(self.module).__name__} uses tensors on another device than its rows, which "
                f"are on {x.device}: make them there (torch.arange(n, device=x.device)), or let "
                f"them be buffers (register_buffer), which are moved: {error}"
            ) from error

    def dropout_calls(self, params: Params, x: Tensor, weight: Tensor, padded: bool) -> Record:
        plans = vars(self._own(True, x.device)).setdefault("_dropout_calls", {})
        form = (tuple(x.shape), x.dtype)
        if form not in plans:
            plans[form] = Record(len(x))
            with torch.no_grad():
                self.train_outputs(params, x, weight, padded, plans[form])
        return plans[form]

    def exported(self, params: Params) -> nn.Module:
        """A copy of the module with these parameters, in evaluation mode.

        Args:
            params: The parameters, by name.
        """
        module = copy.deepcopy(self.module)
        if self.norm == "group":
            module = with_groups(module)
        named = {name.replace("/", "."): p.detach() for name, p in params.items()}
        module.load_state_dict(named, strict=False)  # other parameters do not change
        return module.eval()

    def _own(self, training: bool, device: torch.device) -> nn.Module:
        """This thread's copy of the module in training or evaluation mode, for one device.

        A call puts parameters into the module, so threads need copies. Tensors are shared with the
        user's module if they are on the device.
        """
        copies = vars(_COPIES).setdefault("of", weakref.WeakKeyDictionary())
        known = copies.setdefault(self.module, {})
        kind = (training, self.norm, self.trainable, device)
        if kind not in known:
            known[kind] = self._copied(training, device)
        return known[kind]

    def _copied(self, training: bool, device: torch.device) -> nn.Module:
        tensors = (*self.module.parameters(), *self.module.buffers())
        memo: dict[int, object] = {id(t): _there(t, device) for t in tensors}
        if self.trainable is not None:  # no gradients for parameters that are not trained
            still = set(tensors) - set(trained_parameters(self.module, self.trainable).values())
            moved = {id(t): _there(t.detach(), device) for t in still if t.requires_grad}
            memo |= {k: nn.Parameter(t, False) for k, t in moved.items()}
        made = copy.deepcopy(self.module, memo).train(training)
        with_products(made)
        if training:
            with_layers(made)
        if self.norm == "group":
            return with_groups(made).train(training)
        with_statistics(made)
        for m in batch_norms(made).values() if self.norm == "frozen" else ():
            m.eval()
        return made


def trained_parameters(
    module: nn.Module, trainable: str | Iterable[str] | None
) -> dict[str, nn.Parameter]:
    """The parameters that are trained, each by its first name; a pattern may match any of them."""
    globs = ("*",) if trainable is None else globs_of(trainable)
    every = module.named_parameters(remove_duplicate=False)
    hit = {p for n, p in every if any(fnmatchcase(n, glob) for glob in globs)}
    return {n: p for n, p in module.named_parameters() if p.requires_grad and p in hit}


def globs_of(trainable: str | Iterable[str]) -> tuple[str, ...]:
    """The patterns of `trainable`."""
    return tuple((trainable if isinstance(trainable, str) else " ".join(trainable)).split())


def check_trainable(module: nn.Module, trainable: str | tuple[str, ...]) -> None:
    """Raise `ModelError` for a pattern that matches no parameter that can be trained."""
    globs = globs_of(trainable)
    unmatched = [glob for glob in globs if not trained_parameters(module, (glob,))]
    if globs and not unmatched:
        return
    names = [n for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    fixed = [n for n, p in module.named_parameters() if not p.requires_grad]
    asked = repr(unmatched[0]) if unmatched else "it"
    known = f"{type(module).__name__} has {', '.join(names) or 'none'}"
    more = f" (requires_grad=False: {', '.join(fixed)})" if fixed else ""
    raise ModelError(
        f"trainable={trainable!r}: {asked} matches no parameter that can be trained; {known}{more}"
    )


def _there(t: Tensor, device: torch.device) -> Tensor:
    """A tensor of the user's module, itself unless it is on another device."""
    if t.device == device:
        return t
    moved = t.detach().to(device)
    return nn.Parameter(moved, t.requires_grad) if isinstance(t, nn.Parameter) else moved


def _remedy(found: tuple[int, ...], spec: Spec) -> str:
    """The remedy for outputs of another shape than the data's."""
    if spec.steps is None:
        several = spec.classes and len(found) == 2 and found[1] == spec.outputs
        each = "; for a label at each step give y of shape (n, t)" if several else ""
        return f": its last layer must have {spec.outputs} outputs{each}"
    want = f" at each of {spec.steps} steps: it must return (n, {spec.steps}, {spec.outputs})"
    if found == (spec.outputs, spec.steps):
        return f"{want}, which outputs.transpose(1, 2) does"
    if found == (spec.outputs,):
        return f"{want}: the outputs of all steps, not of one, such as of the last"
    if len(found) == 2 and found[1] == spec.outputs:
        return f"{want}: give labels y of shape (n, {found[0]}), or outputs of all steps"
    return want


def _slashed(names: list[str]) -> frozenset[str]:
    """Names of parameters as they are in a tree."""
    return frozenset(name.replace(".", "/") for name in names)


def forget_copies(module: nn.Module) -> None:
    """Drop this thread's copies of a module."""
    vars(_COPIES).get("of", {}).pop(module, None)
