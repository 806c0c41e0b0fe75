"""The server of secure aggregation."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from foedus.aggregation.secure import graph, shamir
from foedus.aggregation.secure.primitives import (
    add_mask,
    bound,
    commitment,
    load,
    pair_key,
    public_key,
    self_key,
)
from foedus.aggregation.secure.protocol import (
    BOX,
    SIGNATURE,
    Offer,
    SecureAggregation,
    Verify,
    fields,
    to_bytes,
    to_tensor,
)
from foedus.aggregation.secure.shamir import LIMBS, Entropy
from foedus.base import tree
from foedus.base.settings import check_value
from foedus.base.tree import Tree
from foedus.errors import ConfigError, FoedusError, SecureError, TooFewClients
from foedus.wire import layout


@dataclass(frozen=True, eq=False)
class Total:
    """The result: the weighted sum (float64), the total weight and the ids of the clients in it."""

    sum: Tree
    weight: int
    ids: tuple[int, ...]
    dtypes: tuple[str, ...]

    def mean(self) -> Tree:
        """The weighted mean, in the types of the replies."""
        return self.cast(self.weight)

    def cast(self, divisor: float = 1) -> Tree:
        """The weighted sum over a divisor, in the types of the replies."""
        leaves, structure = tree.flatten(self.sum)
        return tree.unflatten(
            [(t / divisor).to(layout.NAMES[d]) for t, d in zip(leaves, self.dtypes, strict=True)],
            structure,
        )


_SILENT = "it did not answer"


@dataclass
class _Sum:
    """Masked replies of one form, added up."""

    numbers: np.ndarray
    structure: Any
    shapes: list[tuple[int, ...]]
    dtypes: tuple[str, ...]
    ids: list[int] = field(default_factory=list)


class SecureServer:
    """The server in one exchange: `offer`, `keys`, `boxes`, `add` for each masked reply, `request`,
    `total`, in this order.

    Messages to clients are {id: message}; answers are {id: answer}, with an exception in place of a
    missing answer. Clients whose answer is missing or invalid are left out and named in `faults`;
    too few are an error (`TooFewClients`), and nothing is unmasked.

    weights: integers, of the clients that are asked. They are divided by their greatest common
    divisor, to keep the modulus small. question: the hash of the question (`question_of`).
    """

    def __init__(
        self,
        config: SecureAggregation,
        weights: Mapping[int, int],
        *,
        session: str,
        round: int = 0,
        exchange: int = 0,
        question: str = "0" * 64,
        verify: Verify | None = None,
        entropy: Entropy = os.urandom,
    ):
        for i, weight in weights.items():
            check_value(f"weights[{i}]", weight, Annotated[int, Ge(0)])
        if len(weights) < 2:
            raise ConfigError(
                f"secure aggregation needs at least 2 clients, got {len(weights)}: the sum would "
                "be the reply"
            )
        if not any(weights.values()):
            raise ConfigError("weights must not all be 0")
        self.config, self.verify, self.entropy = config, verify, entropy
        self.weights = {int(i): int(weight) for i, weight in weights.items()}
        unit = math.gcd(*self.weights.values())
        self.asked = Offer(
            session,
            int(round),
            int(exchange),
            len(weights),
            sum(self.weights.values()) // unit,
            unit,
            question,
        )
        self.tag, self.minimum = self.asked.tag(config), config.needed(len(weights))
        self.width = config.fixed_point.width(self.asked.weight, self.asked.clients)
        self.faults: dict[int, str] = {}
        self.alive = sorted(self.weights)
        self.sums: dict[tuple, _Sum] = {}

    def offer(self) -> Tree:
        """The first message, the same for all."""
        return dict(vars(self.asked))

    def _gather(
        self, phase: str, answers: Mapping[int, Tree], read: Callable[[int, Tree], Any]
    ) -> dict[int, Any]:
        """The valid answers of the remaining clients; the others are left out."""
        good = {}
        for i in self.alive:
            try:
                answer = answers[i] if i in answers else SecureError(_SILENT)
                if isinstance(answer, FoedusError):
                    raise answer
                good[i] = read(i, answer)
            except FoedusError as error:
                self.faults[i] = f"{phase}: {error}"
        self._enough(phase, good)
        return good

    def _enough(self, phase: str, left: Collection[int]) -> None:
        self.alive = sorted(left)
        if len(left) < self.minimum:
            why = "; ".join(f"client {i}: {self.faults[i]}" for i in sorted(self.faults)[:5])
            raise TooFewClients(
                f"round {self.asked.round}: {phase}: {len(left)} of {self.asked.clients} clients "
                f"are left, threshold={self.config.threshold:.3g} needs {self.minimum}; nothing "
                f"was unmasked ({why})"
            )

    def keys(self, adverts: Mapping[int, Tree]) -> dict[int, Tree]:
        """From public keys to each client's list of its neighbors' keys."""
        signatures: dict[int, bytes] = {}

        def read(i: int, advert: Tree) -> np.ndarray:
            advert = dict(advert) if isinstance(advert, dict) else advert
            signature = advert.pop("signature", None) if isinstance(advert, dict) else None
            (keys,) = fields(advert, "its keys", self.tag, keys=(torch.uint8, 2, 32))
            if (
                isinstance(signature, Tensor)
                and signature.dtype == torch.uint8
                and tuple(signature.shape) == (SIGNATURE,)
            ):
                signatures[i] = to_bytes(signature)
            if self.verify is not None and not self.verify(
                i, bound(b"keys", self.tag, i) + keys.tobytes(), signatures.get(i, b"")
            ):
                raise SecureError("its keys are not signed by it")
            return keys

        found = self._gather("advertise", adverts, read)
        owners: dict[bytes, list[int]] = {}
        for i, keys in found.items():
            for key in keys:
                owners.setdefault(key.tobytes(), []).append(i)
        for i in {i for same in owners.values() if len(same) > 1 for i in same}:
            del found[i]
            self.faults[i] = "advertise: another key is the same as its"
        self._enough("advertise", found)
        self.ids = np.array(self.alive)
        self.public = np.stack([found[i] for i in self.alive])
        self.k = self.config.degree(self.asked.clients)
        self.order = graph.ring(len(self.ids), self.entropy)
        self.around = graph.neighborhoods(self.order, self.k)
        self.place = {i: p for p, i in enumerate(self.alive)}
        self.needed = self.config.needed(self.around.shape[1])
        signed = (
            np.stack([np.frombuffer(signatures.get(i, bytes(64)), np.uint8) for i in self.alive])
            if signatures
            else None
        )
        lists = {}
        for i, near in zip(self.alive, self.around, strict=True):
            lists[i] = self._message(ids=self.ids[near], keys=self.public[near])
            if signed is not None:
                lists[i]["signatures"] = torch.from_numpy(signed[near])
        return lists

    def _message(self, **arrays: np.ndarray) -> Tree:
        return {
            "tag": to_tensor(self.tag),
            **{name: torch.from_numpy(a) for name, a in arrays.items()},
        }

    def boxes(self, shares: Mapping[int, Tree]) -> dict[int, Tree]:
        """From each client's boxes to those that are for each client."""
        rows = self.around.shape[1] - 1
        spec = {"commitment": (torch.uint8, 32), "boxes": (torch.uint8, rows, BOX)}
        found = self._gather(
            "share", shares, lambda i, m: fields(m, "its shares", self.tag, **spec)
        )
        self.shared = np.isin(self.ids, self.alive)
        self.commitments = {i: c.tobytes() for i, (c, _) in found.items()}
        inboxes = {}
        for i in self.alive:
            p = self.place[i]
            near = [q for q in self.around[p] if q != p and self.shared[q]]
            mine = np.empty((len(near), BOX), np.uint8)
            # the place of p's box in q's message: its place among q's neighbors, without q
            for n, q in enumerate(near):
                mine[n] = found[int(self.ids[q])][1][np.searchsorted(self.around[q], p) - (q < p)]
            inboxes[i] = self._message(ids=self.ids[near], boxes=mine)
        return inboxes

    def add(self, client: int, message: Tree) -> None:
        """Add one masked reply to the sum; an invalid one is left out."""
        try:
            if isinstance(message, FoedusError):
                raise message
            if client not in self.commitments or any(client in s.ids for s in self.sums.values()):
                raise SecureError("it was not asked for a masked reply, or has sent one")
            if not isinstance(message, dict) or set(message) != {"tag", "reply", "dtypes"}:
                raise SecureError("its masked reply must have the fields tag, reply, dtypes")
            fields({"tag": message["tag"]}, "its masked reply", self.tag)
            leaves, structure = tree.flatten(message["reply"])
            dtypes, whole = message["dtypes"], torch.int32 if self.width == 32 else torch.int64
            if not isinstance(dtypes, list) or [
                d for d in dtypes if d not in ("float16", "bfloat16", "float32", "float64")
            ]:
                raise SecureError("its masked reply names no known types")
            if len(dtypes) != len(leaves) or not all(
                isinstance(t, Tensor) and t.dtype == whole for t in leaves
            ):
                raise SecureError(f"its masked reply must be tensors of {whole}")
        except FoedusError as error:
            self.faults[client] = f"mask: {error}"
            return
        shapes = [tuple(t.shape) for t in leaves]
        form = (str(structure), tuple(shapes), tuple(dtypes))
        if form not in self.sums:
            numbers = np.zeros(sum(t.numel() for t in leaves), np.dtype(f"u{self.width // 8}"))
            self.sums[form] = _Sum(numbers, structure, shapes, tuple(dtypes))
        total = self.sums[form]
        total.ids.append(client)
        at = 0
        for t in leaves:
            part = total.numbers[at : at + t.numel()]
            part += t.reshape(-1).numpy().view(part.dtype)
            at += t.numel()

    def request(self) -> dict[int, Tree]:
        """The clients about which each survivor is asked.

        Replies whose form differs from that of the majority are left out.
        """
        forms = sorted(self.sums.values(), key=lambda s: -len(s.ids))
        for other in forms[1:]:
            self.faults |= dict.fromkeys(
                other.ids, "mask: its reply has another form than the others'"
            )
        there = sorted(forms[0].ids) if forms else []
        for i in self.alive:
            if i not in there:
                self.faults.setdefault(i, f"mask: {_SILENT}")
        self._enough("mask", there)
        if not any(self.weights[i] for i in there):
            raise TooFewClients(
                f"round {self.asked.round}: those who are left have weight 0; nothing was unmasked"
            )
        self.masked = forms[0]
        self.there = np.isin(self.ids, there)
        self._hold(self.there, "mask")
        if not graph.connected(self.order, self.k, self.there):
            raise TooFewClients(
                f"round {self.asked.round}: the survivors' graph fell apart, so parts of the sum "
                "would be seen"
            )
        questions = {}
        for i in there:
            near = self.around[self.place[i]]
            near = near[self.shared[near]]
            survived = self.there[near]
            questions[i] = self._message(
                survivors=self.ids[near[survived]], dropped=self.ids[near[~survived]]
            )
        self.questions = questions
        return questions

    def _hold(self, present: np.ndarray, phase: str) -> None:
        """Raise if the secrets of a client could no longer be rebuilt."""
        holders = present[self.around].sum(1)
        short = np.flatnonzero(self.shared & (holders < self.needed))
        if len(short):
            p = short[0]
            raise TooFewClients(
                f"round {self.asked.round}: {phase}: {holders[p]} of the {self.around.shape[1]} "
                "holders of the secrets of client "
                f"{self.ids[p]} are left, {self.needed} are needed; nothing was unmasked"
            )

    def total(self, answers: Mapping[int, Tree]) -> Total:
        """Rebuild the secrets that are needed, remove the masks, and return the sum."""

        def read(i: int, answer: Tree) -> list[np.ndarray]:
            there, gone = self.questions[i]["survivors"], self.questions[i]["dropped"]
            spec = {
                "seeds": (torch.int32, len(there), LIMBS),
                "keys": (torch.int32, len(gone), LIMBS),
            }
            found = fields(answer, "its shares", self.tag, **spec)
            if any(len(a) and not 0 <= a.min() <= a.max() < shamir.P for a in found):
                raise SecureError("its shares are out of range")
            return [there.numpy(), gone.numpy(), *found]

        found = self._gather("unmask", answers, read)
        self._hold(np.isin(self.ids, self.alive), "unmask")
        shares: dict[int, list[tuple[int, np.ndarray]]] = {}
        for i, (there, gone, seeds, keys) in found.items():
            for owner, share in zip(
                (*there.tolist(), *gone.tolist()), (*seeds, *keys), strict=True
            ):
                shares.setdefault(owner, []).append((self.place[i], share))
        numbers = self.masked.numbers
        for owner, held in shares.items():
            p = self.place[owner]
            points = np.searchsorted(self.around[p], [q for q, _ in held[: self.needed]]) + 1
            try:
                secret = shamir.combine(
                    points, np.stack([share for _, share in held[: self.needed]])
                )
                (self._survived if self.there[p] else self._dropped)(numbers, p, secret)
            except SecureError as error:
                raise SecureError(
                    f"round {self.asked.round}: the secret of client {owner} is not right: {error}"
                ) from None
        ids = tuple(sorted(self.masked.ids))
        real = torch.from_numpy(self.config.fixed_point.decode(numbers)).mul_(self.asked.unit)
        parts = real.split([math.prod(shape) for shape in self.masked.shapes])
        leaves = [part.view(shape) for part, shape in zip(parts, self.masked.shapes, strict=True)]
        weight = sum(self.weights[i] for i in ids)
        return Total(tree.unflatten(leaves, self.masked.structure), weight, ids, self.masked.dtypes)

    def _survived(self, numbers: np.ndarray, p: int, seed: bytes) -> None:
        """Remove a survivor's own mask."""
        client = int(self.ids[p])
        if commitment(self.tag, seed, client) != self.commitments[client]:
            raise SecureError("shares of its seed were altered")
        add_mask(numbers, self_key(self.tag, seed, client), subtract=True)

    def _dropped(self, numbers: np.ndarray, p: int, secret: bytes) -> None:
        """Remove the pairwise masks between survivors and a client that dropped out."""
        public, client = self.public[p, 1].tobytes(), int(self.ids[p])
        if public_key(secret) != public:
            raise SecureError("shares of its key were altered")
        loaded = load(secret)
        for q in self.around[p]:
            if self.there[q]:
                other = int(self.ids[q])
                key = pair_key(self.tag, loaded, client, public, other, self.public[q, 1].tobytes())
                add_mask(numbers, key, subtract=other < client)
