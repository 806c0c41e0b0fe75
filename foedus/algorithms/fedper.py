"""FedPer: Arivazhagan, Aggarwal, Singh and Choudhary, "Federated learning with personalization
layers", 2019, Algorithms 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from annotated_types import MinLen

from foedus.algorithms.own_model import OwnModel
from foedus.base import random
from foedus.base.spec import Spec
from foedus.errors import ConfigError
from foedus.models.base import Params


@dataclass(frozen=True)
class FedPer(OwnModel):
    """FedAvg of some layers; the others never leave their client (Arivazhagan et al., 2019).

    With the shared layers, the body, as b and the layers of client i, the head, as h_i:

        client i:  (b_i, h_i) <- (b, h_i), then local training of both;  sends b_i - b
                   keeps (b_i, h_i), its own model
        server:    as FedAvg, on b alone

    Only the body travels, and only its bytes are counted. There is no global model: `own_accuracy`
    is that of the clients' own models on their own test rows, `accuracy` their average on all.

    Further settings: `model`, `loss`, `weights`, and those of `fd.Training` (`lr`, `epochs`, ...).

    Args:
        shared: The names of the body's parameters, as globs separated by spaces: "body.*" for those
            of the submodule `body` of a `torch.nn.Module`, "*0 *1" for the first two layers of
            `fd.MLP`.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.FedPer(fd.MLP(20), shared="*0", lr=0.3), fed, rounds=10)
        >>> run.history.own_accuracy.iloc[-1] > 0.8
        True

    Reference: Arivazhagan, Aggarwal, Singh and Choudhary, "Federated learning with personalization
    layers", 2019, Algorithms 1 and 2.
    """

    divided: ClassVar[bool] = True

    shared: Annotated[str, MinLen(1)] = "*0"

    def check(self, spec: Spec) -> None:
        super().check(spec)
        names = self.model.init(spec, random.key(0))
        body = self.body(names)
        if len(body) in (0, len(names)):
            found = "none" if not body else "all"
            known = ", ".join(name.replace("/", ".") for name in names)
            raise ConfigError(
                f"shared={self.shared!r} matches {found} of the model's parameters, and "
                f"{type(self).__name__} needs shared and own ones; the parameters are {known}"
            )

    def body(self, w: Params) -> Params:
        globs = self.shared.split()
        return {
            name: value
            for name, value in super().body(w).items()
            if any(fnmatchcase(name.replace("/", "."), glob) for glob in globs)
        }
