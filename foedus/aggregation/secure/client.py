"""A client of secure aggregation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge
from torch import Tensor

from foedus.aggregation.secure import shamir
from foedus.aggregation.secure.fixedpoint import Noise, dense, dtype_of
from foedus.aggregation.secure.primitives import (
    NONCE,
    add_mask,
    agree,
    bound,
    box_key,
    commitment,
    load,
    pair_key,
    public_key,
    seal,
    self_key,
    unseal,
)
from foedus.aggregation.secure.protocol import (
    BOX,
    SIGNATURE,
    Offer,
    SecureAggregation,
    Sign,
    Verify,
    distinct,
    fields,
    to_bytes,
    to_tensor,
)
from foedus.aggregation.secure.shamir import LIMBS, SECRET, Entropy
from foedus.base import tree
from foedus.base.settings import check_value
from foedus.base.tree import State, Tree
from foedus.errors import SecureError

SECRETS = ("cipher_key", "mask_key", "seed", "shares", "box_keys")
"""The entries of an exported client state that must not leave the client."""


class SecureClient:
    """A client in one exchange: `advertise`, `share`, `mask`, `unmask`, each once and in this
    order.

    `export` returns the state between two messages as a tree of tensors, `restore` makes a client
    from it. The entries in `SECRETS` must stay with the client, and only the newest state may be
    kept: a client restored from an older state could be made to answer twice. Write the state
    before the answer is sent. Keys and seed are deleted after `mask`, the rest after `unmask`.

    sign, verify: sign the client's public keys, and check those of others. least: the fewest
    clients of a sum, as far as this client sees them. entropy: for tests only.
    """

    def __init__(
        self,
        id: int,
        config: SecureAggregation,
        *,
        sign: Sign | None = None,
        verify: Verify | None = None,
        least: int = 2,
        entropy: Entropy = os.urandom,
    ):
        self.id, self.config, self.least = int(id), config, least
        self.sign, self.verify, self.entropy = sign, verify, entropy
        self.state = State(id=self.id, phase="advertise")

    def export(self) -> State:
        """The state to keep until the next message."""
        return self.state.replace()

    @classmethod
    def restore(
        cls, state: Mapping[str, Tree], config: SecureAggregation, **hooks: Any
    ) -> SecureClient:
        """The client that exported this state."""
        new = cls(state["id"], config, **hooks)
        new.state = State(state)
        return new

    def _expect(self, phase: str) -> None:
        if self.state.phase != phase:
            raise SecureError(
                f"client {self.id} is asked to {phase}, but what it can do next is "
                f"{self.state.phase}"
            )

    def _at(self, phase: str) -> tuple[State, Offer, bytes]:
        self._expect(phase)
        offer = Offer(**self.state.offer)
        return self.state, offer, offer.tag(self.config)

    def advertise(self, offer: Tree) -> Tree:
        """Two public keys: one for boxes, one for masks."""
        self._expect("advertise")
        accepted = Offer.read(offer)
        self.config.fixed_point.width(accepted.weight, accepted.clients)
        cipher, mask, tag = self.entropy(SECRET), self.entropy(SECRET), accepted.tag(self.config)
        public = public_key(cipher) + public_key(mask)
        answer = {"tag": to_tensor(tag), "keys": to_tensor(public).view(2, 32)}
        if self.sign is not None:
            answer["signature"] = to_tensor(self.sign(bound(b"keys", tag, self.id) + public))
        self.state = State(
            id=self.id,
            phase="share",
            offer=dict(offer),
            cipher_key=to_tensor(cipher),
            mask_key=to_tensor(mask),
            public=answer["keys"],
        )
        return answer

    def share(self, message: Tree) -> Tree:
        """A box of shares for each neighbor, in the order of the key list."""
        s, offer, tag = self._at("share")
        message = dict(message) if isinstance(message, dict) else message
        signatures = message.pop("signatures", None) if isinstance(message, dict) else None
        spec = {"ids": (torch.int64, None), "keys": (torch.uint8, None, 2, 32)}
        ids, keys = fields(message, "the key list", tag, **spec)
        self._check_list(offer, tag, ids, keys, signatures)
        seed, mask_key, cipher_key = (
            self.entropy(SECRET),
            to_bytes(s.mask_key),
            load(to_bytes(s.cipher_key)),
        )
        shares = shamir.split(
            [mask_key, seed], self.config.needed(len(ids)), len(ids), self.entropy
        )
        boxes, box_keys = bytearray(), np.zeros((len(ids), 32), np.uint8)
        for i, other in enumerate(ids.tolist()):
            if other == self.id:
                own = shares[i].copy()
                continue
            agreed = agree(cipher_key, keys[i, 0].tobytes())
            key = box_key(tag, agreed, self.id, other)
            boxes += seal(key, shares[i].tobytes(), tag, self.id, other, self.entropy(NONCE))
            box_keys[i] = np.frombuffer(box_key(tag, agreed, other, self.id), np.uint8)
        self.state = State(
            id=self.id,
            phase="mask",
            offer=s.offer,
            mask_key=s.mask_key,
            seed=to_tensor(seed),
            shares=torch.from_numpy(own),
            box_keys=torch.from_numpy(box_keys),
            ids=torch.from_numpy(ids.copy()),
            public=torch.from_numpy(keys[:, 1].copy()),
        )
        answer = torch.frombuffer(boxes, dtype=torch.uint8).view(-1, BOX)
        return {
            "tag": to_tensor(tag),
            "boxes": answer,
            "commitment": to_tensor(commitment(tag, seed, self.id)),
        }

    def _check_list(
        self, offer: Offer, tag: bytes, ids: np.ndarray, keys: np.ndarray, signatures: Tree
    ) -> None:
        """Raise if the list of keys was tampered with."""
        if len(keys) != len(ids):
            raise SecureError(
                f"the key list must have as many keys as clients, got {len(keys)} for {len(ids)}"
            )
        distinct(ids, "the key list")
        if len({key.tobytes() for key in keys.reshape(-1, 32)}) < 2 * len(ids):
            raise SecureError("the key list has a key twice")
        own = np.flatnonzero(ids == self.id)
        if not len(own) or keys[own[0]].tobytes() != to_bytes(self.state.public):
            raise SecureError(
                f"the key list does not have the keys of client {self.id} as they were sent"
            )
        most = self.config.degree(offer.clients) + 1
        least = min(most, self.config.needed(offer.clients))
        if not least <= len(ids) <= most:
            raise SecureError(
                f"the key list has {len(ids)} clients; with {offer.clients} in all there must be "
                f"{least} to {most}"
            )
        if self.verify is None:
            return
        shape = (len(ids), SIGNATURE)
        if (
            not isinstance(signatures, Tensor)
            or signatures.dtype != torch.uint8
            or tuple(signatures.shape) != shape
        ):
            raise SecureError("the key list has no signatures")
        for i, other in enumerate(ids.tolist()):
            if not self.verify(
                other, bound(b"keys", tag, other) + keys[i].tobytes(), to_bytes(signatures[i])
            ):
                raise SecureError(
                    f"the keys in the key list of client {other} are not signed by it"
                )

    def mask(
        self,
        message: Tree,
        reply: Tree,
        weight: int = 1,
        noise: Noise | None = None,
        clip: float | None = None,
        question: str | None = None,
    ) -> Tree:
        """The masked reply: a tree in the form of the reply, of integers that look random.

        weight: the factor of the reply. noise: returns integers to add before masking. clip: the
        largest norm of the reply. question: the hash of what this client was asked (`question_of`),
        which must be that of the offer.
        """
        s, offer, tag = self._at("mask")
        if question is not None and question != offer.question:
            raise SecureError(
                f"client {self.id} is asked something else than the offer says, perhaps something "
                "else than the others: nothing is sent"
            )
        sources, boxes = fields(
            message, "the boxes", tag, ids=(torch.int64, None), boxes=(torch.uint8, None, BOX)
        )
        if len(sources) != len(boxes):
            raise SecureError(f"there are {len(boxes)} boxes of {len(sources)} clients")
        distinct(sources, "the boxes")
        ids, keys, box_keys = s.ids.tolist(), s.public.numpy(), s.box_keys.numpy()
        place = {other: i for i, other in enumerate(ids)}
        if others := [i for i in sources.tolist() if i not in place or i == self.id]:
            raise SecureError(f"boxes must come from neighbors; client {others[0]} is not one")
        if len(sources) + 1 < (must := max(self.least, self.config.needed(len(ids)))):
            raise SecureError(
                f"{len(sources) + 1} of {len(ids)} neighbors have shared keys; {must} must"
            )
        shares = [(self.id, s.shares.numpy())]
        for other, box in zip(sources.tolist(), boxes, strict=True):
            data = unseal(box_keys[place[other]].tobytes(), box.tobytes(), tag, other, self.id)
            share = np.frombuffer(data, np.int32).reshape(2, LIMBS)
            if not 0 <= share.min() <= share.max() < shamir.P:
                raise SecureError(f"the shares from client {other} are out of range")
            shares.append((other, share))
        numbers = self._numbers(offer, reply := dense(reply), weight, noise, clip)
        secret, own = load(to_bytes(s.mask_key)), keys[place[self.id]].tobytes()
        add_mask(numbers, self_key(tag, to_bytes(s.seed), self.id))
        for other in sources.tolist():
            key = pair_key(tag, secret, self.id, own, other, keys[place[other]].tobytes())
            add_mask(numbers, key, subtract=other < self.id)
        shares.sort(key=lambda pair: pair[0])
        self.state = State(
            id=self.id,
            phase="unmask",
            offer=s.offer,
            ids=torch.tensor([i for i, _ in shares]),
            shares=torch.from_numpy(np.stack([share for _, share in shares])),
            # If all clients are neighbors, these are all survivors: refuse a sum of fewer clients
            # than the server needs, because part of the noise would be missing.
            needed=max(
                self.least,
                self.config.needed(max(len(ids), offer.clients if self._complete(offer) else 0)),
            ),
        )
        leaves, structure = tree.flatten(reply)
        parts = torch.from_numpy(numbers.view(np.dtype(f"i{numbers.itemsize}"))).split(
            [t.numel() for t in leaves]
        )
        masked = [part.view(t.shape) for part, t in zip(parts, leaves, strict=True)]
        return {
            "tag": to_tensor(tag),
            "reply": tree.unflatten(masked, structure),
            "dtypes": [dtype_of(t) for t in leaves],
        }

    def _numbers(
        self, offer: Offer, reply: Tree, weight: int, noise: Noise | None, clip: float | None
    ) -> np.ndarray:
        check_value("weight", weight, Annotated[int, Ge(0)])
        if weight % offer.unit or weight // offer.unit > offer.weight:
            raise SecureError(
                f"weight={weight} is not {offer.unit} times an integer of at most "
                f"{offer.weight}, as was offered"
            )
        points, width = (
            self.config.fixed_point,
            self.config.fixed_point.width(offer.weight, offer.clients),
        )
        return points.encode(
            reply,
            weight // offer.unit,
            width,
            noise=noise,
            clip=clip,
            entropy=self.entropy,
            round=offer.round,
            client=self.id,
        )

    def _complete(self, offer: Offer) -> bool:
        return self.config.degree(offer.clients) == offer.clients - 1

    def unmask(self, message: Tree) -> Tree:
        """Shares of the seeds of those who survived and of the mask keys of those who dropped out:
        never both of one client.
        """
        s, _, tag = self._at("unmask")
        what = "the unmask request"
        there, gone = fields(
            message, what, tag, survivors=(torch.int64, None), dropped=(torch.int64, None)
        )
        named, ids = np.concatenate([there, gone]), s.ids.numpy()
        if len(np.intersect1d(there, gone)):
            raise SecureError(
                f"{what} asks for both secrets of client {np.intersect1d(there, gone)[0]}"
            )
        distinct(named, what)
        if not np.array_equal(np.sort(named), ids):
            raise SecureError(
                f"{what} does not name exactly the clients whose masks client {self.id} used"
            )
        if self.id in gone:
            raise SecureError(f"{what} says that client {self.id} itself has dropped out")
        if len(there) < s.needed:
            raise SecureError(
                f"{what} leaves {len(there)} survivors of {len(ids)}; {s.needed} are needed"
            )
        shares = s.shares.numpy()
        seeds, keys = shares[np.searchsorted(ids, there), 1], shares[np.searchsorted(ids, gone), 0]
        self.state = State(id=self.id, phase="nothing more", offer=s.offer)
        return {
            "tag": to_tensor(tag),
            "seeds": torch.from_numpy(seeds),
            "keys": torch.from_numpy(keys),
        }
