"""Any `torch.nn.Module` as a model."""

from __future__ import annotations

import copy
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from foedus.base.spec import Spec
from foedus.errors import ModelError
from foedus.models.base import Model, Params

# Activations of convolutions are large, so a batch of clients takes much memory and gains little:
# `make bench ARGS=batching` measures 1.1 to 1.5 times for them, 1.4 to 5 for other layers.
# `Local(batch=True)` batches them all the same.
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_INSTANCE = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_COPIES = threading.local()
_RANDOM = "draws from the global random generator, so runs could not be repeated"


@dataclass(frozen=True, eq=False)
class Module(Model):
    """A `torch.nn.Module`, trained from its parameters at the start of the run (they are copied).

    Rows reach the module as they are in the data: flat features as (n, d), images as (n, channels,
    height, width); as float32, or integer features (int32, int64) as int64, if the module takes
    them, as one that begins with `nn.Embedding` does. Parameters that do not require a gradient
    stay as they are and are not sent. A client step is a pure function of rows that may be padded,
    so modules that mix the rows of a batch (BatchNorm), draw random numbers (Dropout) or change
    their buffers are refused.
    """

    module: nn.Module

    @property
    def batchable(self) -> bool:
        return not any(isinstance(m, _CONVOLUTIONS) for m in self.module.modules())

    def takes_integers(self, spec: Spec) -> bool:
        return not self._refusal(spec, torch.int64) or bool(self._refusal(spec, torch.float32))

    def _refusal(self, spec: Spec, dtype: torch.dtype) -> str:
        """What the module says of two rows of zeros of this type; nothing, if it takes them."""
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
        for name, m in self.module.named_modules():
            where = f"layer {name!r} ({type(m).__name__})"
            by_row = isinstance(m, _INSTANCE) and not m.track_running_stats
            if isinstance(m, nn.modules.batchnorm._NormBase) and not by_row:
                raise ModelError(
                    f"{where} mixes the rows of a batch, and its running statistics have no "
                    "meaning when clients with "
                    "different data are averaged; use GroupNorm or LayerNorm"
                )
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0:
                raise ModelError(f"{where} {_RANDOM}; remove it or set p=0")
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ModelError(f"{type(self.module).__name__} has no parameters to train")
        name, generator = type(self.module).__name__, torch.get_rng_state()
        buffers = [b.clone() for b in self.module.buffers()]
        whole = spec.integers and self.takes_integers(spec)
        rows = torch.zeros(2, *spec.shape, dtype=torch.int64 if whole else torch.float32)
        try:
            with torch.no_grad():
                out = self.apply(self.init(spec, None), rows)
        except Exception as error:
            fits = "; give integer features (int64), which stay integers"
            whole = not spec.integers and not self._refusal(spec, torch.int64)
            raise ModelError(
                f"{name} cannot take rows of shape {spec.shape}, so its first layer does not fit: "
                f"{error}{fits if whole else ''}"
            ) from error
        if not torch.equal(generator, torch.get_rng_state()):
            torch.set_rng_state(generator)
            raise ModelError(f"{name} {_RANDOM}; take the random part out")
        if not all(map(torch.equal, buffers, self.module.buffers())):
            raise ModelError(
                f"{name} changes its buffers when it is called; a client step must be pure"
            )
        if tuple(out.shape) != (2, spec.outputs):
            want = f"{spec.classes} classes" if spec.classes else f"{spec.outputs} target(s)"
            raise ModelError(
                f"{name} gives outputs of shape {tuple(out.shape)} for 2 rows, but the data has "
                f"{want}: its last layer must have {spec.outputs} outputs"
            )

    def init(self, spec: Spec, key: Tensor | None) -> Params:
        # Names with dots would nest in saved files; the module's own naming comes back in `apply`.
        trained = ((n, p) for n, p in self.module.named_parameters() if p.requires_grad)
        return {n.replace(".", "/"): p.detach().clone() for n, p in trained}

    def apply(self, params: Params, x: Tensor) -> Tensor:
        named = {n.replace("/", "."): p for n, p in params.items()}
        return functional_call(self._own(), named, (x,))

    def _own(self) -> nn.Module:
        """The module, or this thread's copy of it: a call puts its parameters into the module."""
        if threading.current_thread() is threading.main_thread():
            return self.module
        copies = vars(_COPIES).setdefault("of", weakref.WeakKeyDictionary())
        if self.module not in copies:
            tensors = (*self.module.parameters(), *self.module.buffers())
            # the tensors are shared
            copies[self.module] = copy.deepcopy(self.module, {id(t): t for t in tensors})
        return copies[self.module]
