"""Any `torch.nn.Module` as a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from foedus.core.spec import Spec
from foedus.errors import ModelError
from foedus.models.base import Model, Params

# A grouped convolution over clients, or a large weight for each, is slower than one client after the other.
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_LIMIT = 2_000_000


@dataclass(frozen=True, eq=False)
class Module(Model):
    """A `torch.nn.Module`, trained from the parameters it has when the run starts (they are copied, not changed).

    Rows reach the module as they are in the data: flat features as (n, d), images as (n, channels, height, width).
    A client step is a pure function, so modules that keep running statistics (BatchNorm) or draw random numbers
    (Dropout) are refused.
    """

    module: nn.Module

    @property
    def batchable(self) -> bool:
        size = sum(p.numel() for p in self.module.parameters())
        return size <= _BATCH_LIMIT and not any(isinstance(m, _CONVOLUTIONS) for m in self.module.modules())

    def check(self, spec: Spec) -> None:
        for name, m in self.module.named_modules():
            where = f"layer {name!r} ({type(m).__name__})"
            if getattr(m, "track_running_stats", False):
                raise ModelError(
                    f"{where} keeps running statistics, which have no meaning when clients with different data are averaged; "
                    "use GroupNorm or LayerNorm, or pass track_running_stats=False"
                )
            if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0:
                raise ModelError(
                    f"{where} draws from the global random generator, so runs could not be repeated; remove it or set p=0"
                )
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ModelError(f"{type(self.module).__name__} has no parameters to train")
        try:
            with torch.no_grad():
                out = self.apply(self.init(spec, None), torch.zeros(2, *spec.shape))
        except Exception as error:
            raise ModelError(f"{type(self.module).__name__} cannot take rows of shape {spec.shape}: {error}") from error
        if tuple(out.shape) != (2, spec.outputs):
            want = f"{spec.classes} classes" if spec.classes else f"{spec.outputs} target(s)"
            raise ModelError(
                f"{type(self.module).__name__} gives outputs of shape {tuple(out.shape)} for 2 rows, but the data has {want}: "
                f"its last layer must have {spec.outputs} outputs"
            )

    def init(self, spec: Spec, key: Tensor | None) -> Params:
        # Names with dots would nest in saved files; the module's own naming comes back in `apply`.
        return {n.replace(".", "/"): p.detach().clone() for n, p in self.module.named_parameters()}

    def apply(self, params: Params, x: Tensor) -> Tensor:
        return functional_call(self.module, {n.replace("/", "."): p for n, p in params.items()}, (x,))
