"""Ridge regression on features: the clients' factorized systems, DKRR and KRR."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Gt
from torch import Tensor

from foedus.base.rows import Rows
from foedus.base.settings import check_settings
from foedus.base.spec import Spec
from foedus.base.tree import State
from foedus.core.algorithm import Algorithm, Batching, Client
from foedus.core.clients import Clients
from foedus.core.predictor import Predictor
from foedus.export.forms import OnFeatures
from foedus.export.probabilities import simplex_shares
from foedus.models.features import FeatureMap, features_of
from foedus.models.least_squares import DTYPES, Ridge, prepare_ridge, ridge_bytes
from foedus.models.losses import loss_for


@dataclass(frozen=True)
class FeatureRegression(Algorithm):
    """Base of the methods on features: the clients' factorized systems, and the closed-form start.

    Args:
        features: A feature map of foedus, or any `torch.nn.Module`.
        reg: lambda of equation 1, above 0.
        dtype: "float64", or "float32" for half the memory and messages; local solutions are then
            refined with residuals in double precision (those of a client with more rows than
            features solve its system as it is kept, rounded to single precision). Rounded messages
            limit the accuracy to about 1e-7 |b| / reg.
    """

    remedy: ClassVar[str] = "use a larger reg"

    weighs_rows: ClassVar[bool] = True

    features: FeatureMap
    reg: Annotated[float, Gt(0)] = 1e-4
    dtype: Literal["float32", "float64"] = field(default="float64", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", features_of(self.features))
        check_settings(self)

    def seeded(self, seed: int) -> Self:
        return replace(self, features=self.features.seeded(seed))

    def check(self, spec: Spec) -> None:
        self.features.check(spec)

    def batching(self) -> Batching:
        return Batching(footprint=self.footprint)

    def footprint(self, rows: int, row_bytes: int) -> int:
        """Bytes of a client in a batch: its rows, and its factorized system."""
        size = self.features.rough_size(row_bytes // 4)
        return 3 * rows * row_bytes + ridge_bytes(rows, size, DTYPES[self.dtype])

    # -- clients -----------------------------------------------------------------------------------

    def prepare(self, data: Rows) -> Ridge:
        """Line 1: features, the local Hessian and its factor, made once."""
        return prepare_ridge(self.features, self.reg, DTYPES[self.dtype], data)

    def solve(self, client: Client) -> tuple[Tensor, None]:
        """Line 2: the client's own solution, H_j^-1 b_j."""
        return client.prepared["local"], None

    # -- server ------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> State:
        """Lines 2 and 3: the average of the clients' own solutions."""
        return State(w=clients.mean(self.solve), spec=clients.spec)

    def predictor(self, state: State) -> Predictor:
        return Predictor(OnFeatures(self.features, state.w), state.spec, simplex_shares)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return loss_for("squared", None).value(
            outputs, y.to(outputs.dtype) if y.is_floating_point() else y
        )


@dataclass(frozen=True)
class DKRR(FeatureRegression):
    """Distributed kernel ridge regression: the average of the clients' own solutions.

        w = sum_j p_j H_j^-1 b_j

    One message a client, no rounds: later rounds leave w as it is. FedNewton starts there.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.DKRR(fd.RandomFourier(200, bandwidth=4.0), reg=1e-3), fed, rounds=1)
        >>> run.history.accuracy.iloc[-1] > 0.8
        True

    Reference: "Efficient Newton-type federated learning with non-IID data", lines 1 to 3 of
    Algorithm 1.
    """

    def round(self, clients: Clients, state: State) -> State:
        return state


@dataclass(frozen=True)
class KRR(FeatureRegression):
    """Kernel ridge regression on all rows in one place: the reference that FedNewton approaches.

        w = H^-1 b                                                                     (equation 2)

    It is not a federated method: the cost of bringing the data together is not counted.

    Example:
        >>> fed = fd.split(fd.load("digits"), "dirichlet", clients=10, alpha=0.3)
        >>> run = fd.run(fd.KRR(fd.RandomFourier(200, bandwidth=4.0), reg=1e-3), fed, rounds=1)
        >>> run.history.accuracy.iloc[-1] > 0.9
        True
    """

    pooled: ClassVar[bool] = True

    def round(self, clients: Clients, state: State) -> State:
        return state
