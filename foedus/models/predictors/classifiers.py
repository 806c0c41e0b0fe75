"""Predictors that are fitted classifiers: torch modules or scikit-learn estimators."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn import functional as F

from foedus.base.batching import batched
from foedus.base.rows import Rows, take
from foedus.base.settings import check_value
from foedus.base.spec import Spec
from foedus.base.tree import Tree
from foedus.errors import DataError, ModelError
from foedus.models.predictors.base import Predictors, probabilities
from foedus.models.predictors.densities import _SWELL


class _Evaluated(Predictors):
    """Members that are functions of a row: a client evaluates them on its rows, once."""

    def likelihoods(self, models: Tree, x: Tensor, y: Tensor) -> Tensor:
        """h_k(y | x) for each member in a message (or for all), (C, n).

        Args:
            models: The message; `None`: all members.
            x: Rows.
            y: Labels.
        """
        outputs = self.outputs(models, x)
        return outputs.gather(2, y.expand(len(outputs), -1).unsqueeze(2)).squeeze(2)

    def outputs(self, models: Tree, x: Tensor) -> Tensor:
        """h_k(x) for each member in a message (or for all), (C, n, classes).

        Args:
            models: The message; `None`: all members.
            x: Rows.
        """
        raise NotImplementedError

    def prepare(self, data: Rows, loss: str) -> Tensor | None:
        if not self.at_hand:
            return None
        return _evaluate({"index": data.index}, (self, None, data.table_x, data.table_y, loss))

    def loss(self, prepared, data, which, models, weight, loss, floor, excess, slope=True):
        if prepared is None:
            shared = (self, models, data.table_x, data.table_y, loss)
            each = _evaluate({"index": data.index}, shared)
        else:
            each = prepared.index_select(0, which)
        share = data.weight / data.count
        if loss == "log":
            inside = weight @ each + floor
            return -(share * inside.log()).sum(), -(each @ (share / inside)) if slope else None
        mixed = torch.einsum("c,cnk->nk", weight, each)
        apart = mixed - F.one_hot(data.y, mixed.shape[-1])
        value = (share * apart.square().sum(1)).sum()
        pull = 2 * torch.einsum("cnk,nk->c", each, share.unsqueeze(1) * apart) if slope else None
        if excess is not None:
            squares = torch.einsum("cnk,n->c", each.square(), share)
            value = value - (weight * excess) @ squares
            pull = pull - 2 * excess * squares if slope else None
        return value, pull


@batched
def _evaluate(args: dict[str, Tensor], shared: tuple) -> Tensor:
    members, models, table_x, table_y, loss = shared
    index = args["index"]
    x, y = take(table_x, index.flatten()), take(table_y, index.flatten())
    each = members.likelihoods(models, x, y) if loss == "log" else members.outputs(models, x)
    return each.reshape(len(each), *index.shape, *each.shape[2:]).movedim(1, 0).contiguous()


class Classifiers(_Evaluated):
    """Given predictors: scikit-learn classifiers, and modules that return logits.

    Networks are used in evaluation mode. An estimator that was fitted on fewer labels gives the
    others probability 0.

    Estimators with compiled parts (trees and forests, k-d trees) and some others contain types that
    skops does not trust. A simulation evaluates them and counts their bytes, but a site refuses
    them unless it lists these types: `trusted=["sklearn.tree._tree.Tree"]` accepts forests, and so
    relies on the server not to corrupt the memory of this process.

    Args:
        members: The fitted classifiers.
        classes: The number of labels.
        trusted: Full names of types that are loaded from archives besides those that skops trusts.

    Raises:
        ModelError: A member is not a fitted classifier for these labels.

    Example:
        >>> from sklearn.linear_model import LogisticRegression
        >>> fed = fd.split(fd.load("wine"), "iid", clients=3)
        >>> x, y = fed.data.x_train, fed.data.y_train
        >>> members = [LogisticRegression(C=c).fit(x, y) for c in (0.01, 1.0)]
        >>> mix = fd.FedBoost(fd.Classifiers(members, classes=3), budget=1)
        >>> run = fd.run(mix, fed, rounds=2)
        >>> run.model.predict_proba(fed.data.x_test).shape
        (45, 3)
    """

    def __init__(self, members: Sequence[Any], classes: int, trusted: Sequence[str] = ()) -> None:
        if isinstance(trusted, str) or not all(isinstance(name, str) for name in trusted):
            raise ModelError(f"trusted={trusted!r} must be a list of the full names of types")
        if not isinstance(members, list | tuple) or not members:
            raise ModelError(
                f"members must be a list of at least one fitted classifier, not {members!r}"
            )
        check_value("classes", classes, Annotated[int, Ge(2)], ModelError)
        for k, member in enumerate(members):
            if isinstance(member, nn.Module):
                continue
            name = f"member {k}, a {type(member).__name__},"
            if not hasattr(member, "predict_proba"):
                raise ModelError(f"{name} has no predict_proba")
            if not hasattr(member, "classes_"):
                raise ModelError(f"{name} is not fitted: call its fit first")
            if any(np.ndim(c) for c in member.classes_):
                raise ModelError(
                    f"{name} predicts several labels for a row: give one classifier for each"
                )
            if not np.isin(member.classes_, np.arange(classes)).all():
                known = list(member.classes_)[:5]
                text = f"member {k} knows labels {known}, which are not in 0 .. {classes - 1}"
                raise ModelError(text)
        self.members, self.classes, self.trusted = tuple(members), int(classes), tuple(trusted)
        self._archives: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.members)

    @property
    def modules_only(self) -> bool:
        """Whether all members are torch modules."""
        return all(isinstance(m, nn.Module) for m in self.members)

    def check(self, spec: Spec, loss: str) -> None:
        if spec.classes != self.classes:
            raise DataError(
                f"the classifiers are for {self.classes} classes, the data has {spec.classes}"
            )
        for k, member in enumerate(self.members):
            try:
                out = self._one(member, None, torch.zeros(2, *spec.shape))
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(
                    f"member {k} cannot take rows of shape {spec.shape}: {error}"
                ) from error
            if out.shape != (wanted := (2, self.classes)):
                given = f"member {k} gives outputs of shape {tuple(out.shape)}"
                raise ModelError(f"{given} for 2 rows, not {wanted}")
            probabilities(out, f"the output of member {k} for row")

    def message(self, which: Tensor) -> dict[str, Tree]:
        return {str(k): self._sent(k) for k in which.tolist()}

    def _sent(self, k: int) -> dict[str, Tensor]:
        member = self.members[k]
        if isinstance(member, nn.Module):
            return {name: v.detach() for name, v in member.state_dict().items()}
        if k not in self._archives:
            archive = bytearray(_skops().dumps(member))
            self._archives[k] = torch.frombuffer(archive, dtype=torch.uint8)
        return {"skops": self._archives[k]}

    def outputs(self, models: Tree, x: Tensor) -> Tensor:
        sent = dict.fromkeys(range(len(self))) if models is None else models
        return torch.stack([self._one(self.members[int(k)], m, x) for k, m in sent.items()])

    def _one(self, member: Any, sent: Tree, x: Tensor) -> Tensor:
        if isinstance(member, nn.Module):
            member.eval()
            with torch.no_grad():
                out = member(x) if sent is None else torch.func.functional_call(member, sent, (x,))
            return out.float().softmax(-1)
        member = member if sent is None else unpack(sent["skops"], self.trusted)
        found = torch.zeros(len(x), self.classes)
        known = np.asarray(member.predict_proba(x.flatten(1).numpy()), np.float32)
        labels = torch.as_tensor(np.asarray(member.classes_, np.int64))
        found[:, labels] = torch.from_numpy(known)
        return found

    def mixture(self, weight: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("q,qnk->nk", weight.float(), self.outputs(None, x))

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{k}.{name}": v for k in range(len(self)) for name, v in self._sent(k).items()}


def _skops() -> Any:
    try:
        import skops.io
    except ImportError as error:
        raise ModelError(
            "scikit-learn estimators are sent as skops archives: pip install skops"
        ) from error
    return skops.io


def unpack(archive: Tensor, trusted: Sequence[str] = ()) -> Any:
    """The estimator in a skops archive.

    Args:
        archive: The bytes, as a tensor.
        trusted: Full names of types that are loaded besides those that skops trusts.

    Raises:
        ModelError: The archive cannot be read, or needs a type that is not trusted.
    """
    io = _skops()
    data = archive.numpy().tobytes()
    try:
        with zipfile.ZipFile(BytesIO(data)) as files:
            size = sum(f.file_size for f in files.infolist())
        if size > _SWELL * len(data):  # skops does not compress, so this archive is an attack
            raise ModelError(
                f"a predictor was sent as an archive of {len(data)} bytes that unpacks to {size}; "
                "it is not loaded"
            )
        strange = [name for name in io.get_untrusted_types(data=data) if name not in trusted]
        if not strange:
            return io.loads(data, trusted=list(trusted))
    except ModelError:
        raise
    except Exception as error:  # any exception, for bytes of an untrusted client
        text = f"a predictor was sent that is not a readable skops archive: {error!r}"
        raise ModelError(text) from error
    raise ModelError(
        f"a predictor was sent that needs untrusted types ({', '.join(strange[:3])}); it is not "
        "loaded. If the sender is trusted with this process, pass them as trusted=[...]"
    )
