"""Secure aggregation at the site: its requirements, and its clients' part of the four phases.

Every message is a new process, and Flower may start two at once, or send an answer before it has
saved `context.state`. A client that is restored to an older state could be made to answer twice,
and so to reveal both secrets of a client. So its state between two messages is a file in the site's
`cache`, which a process removes before it uses it, and writes again before it answers. After the
last phase it is deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tomllib
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foedus import wire
from foedus.aggregation.dp import noise as sampling
from foedus.aggregation.dp.distributed import Share
from foedus.aggregation.dp.mechanism import DifferentialPrivacy
from foedus.aggregation.secure import graph
from foedus.aggregation.secure.fixedpoint import dense
from foedus.aggregation.secure.protocol import Offer, SecureAggregation
from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.describe import from_config
from foedus.engines.flower.account import Account
from foedus.engines.flower.questions import Exchange
from foedus.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    FoedusError,
    ReplyError,
    SecureError,
)
from foedus.storage import checkpoint as files


class Plain(SecureError):  # noqa: N818 - a reason
    """A reply that is not sent in the clear."""


@dataclass(frozen=True)
class Demands:
    """The requirements of a site, from its node config:

    secure="required"          nothing but empty replies in the clear; neighbors as many as "auto"
                               gives
    secure_clients=3           the fewest clients in a sum
    secure_threshold=0.6       the lowest threshold; with secure="required" 2/3 unless given
    secure_noise=1.0           the least noise of differential privacy; nothing is sent without, as
                               with secure="required"
    secure_range=16.0          the least range of fixed-point numbers, with secure="required" 16
                               unless given: whether a reply fits into a range is told
    secure_states=True         with secure="required": also algorithms whose clients remember
                               something. A server can make the memories of others such that the
                               sum shows one reply
    """

    required: bool = False
    clients: int = 2
    threshold: float = 0.5
    noise: float = 0.0
    range: float = 0.0
    states: bool = True

    @classmethod
    def of(cls, config: dict[str, Any]) -> Demands:
        mode = config.get("secure", "offered")
        if mode not in ("required", "offered"):
            raise DataError(f'--node-config: secure={mode!r} must be "required" or "offered"')
        clients = config.get("secure_clients", 2)
        if type(clients) is not int or clients < 2:
            raise DataError(
                f"--node-config: secure_clients={clients!r} must be an integer of at least 2"
            )
        noise = config.get("secure_noise", 0.0)
        if type(noise) not in (int, float) or not 0 <= noise < math.inf:
            raise DataError(
                f"--node-config: secure_noise={noise!r} must be a number that is not negative, "
                "such as 1.0"
            )
        required = mode == "required" or noise > 0
        threshold = config.get("secure_threshold", 2 / 3 if required else 0.5)
        if type(threshold) not in (int, float) or not 0.5 <= threshold <= 1:
            raise DataError(f"--node-config: secure_threshold={threshold!r} must be from 0.5 to 1")
        least = config.get("secure_range", 16.0 if required else 0.0)
        if type(least) not in (int, float) or not 0 <= least < math.inf:
            raise DataError(f"--node-config: secure_range={least!r} must be a number such as 16.0")
        states = config.get("secure_states", not required)
        if type(states) is not bool:
            raise DataError(f"--node-config: secure_states={states!r} must be true or false")
        return cls(required, clients, float(threshold), float(noise), float(least), states)

    def greeting(self, secure: Any) -> None:
        """Refuse, before any training, a run that this site would not answer; `secure`: its
        settings, or None.
        """
        if secure is not None:
            self.settings(secure)
        elif self.required:
            raise SecureError(_DEMANDED)

    def plain(self, step: str, secured: bool) -> None:
        """Refuse to send a reply in the clear if the policy forbids it."""
        if self.required or secured:
            why = _DEMANDED if self.required else "this run is under secure aggregation"
            raise Plain(f"the reply to {step} is not sent in the clear: {why}")

    def settings(self, config: Any) -> SecureAggregation:
        """The settings of a run; raises if they do not meet the requirements of this site."""
        known = {"SecureAggregation": SecureAggregation, "DifferentialPrivacy": DifferentialPrivacy}
        settings = from_config(config, known, "secure")
        if not isinstance(settings, SecureAggregation):
            raise ConfigError(f"secure: {str(config)[:80]!r} is not of secure aggregation")
        if settings.privacy is not None and settings.privacy.entropy is not None:
            raise SecureError("secure: entropy is for tests; this site draws its noise itself")
        if settings.threshold < self.threshold - 1e-9:
            raise SecureError(
                f"threshold={settings.threshold:.3g} is less than the {self.threshold:.3g} that "
                "this site demands"
            )
        widest = settings.fixed_point.range
        if settings.privacy is None and widest < self.range:
            raise SecureError(
                f"range={widest:g} is less than the {self.range:g} that this site demands"
            )
        if self.required and settings.bits < _FEWEST_BITS:
            raise SecureError(
                f"bits={settings.bits} are fewer than the {_FEWEST_BITS} that this site demands: "
                "sums of a few coarse numbers show their terms"
            )
        step = settings.fixed_point.range / 2 ** (settings.bits - 1)
        if self.required and settings.privacy is None and step > _WIDEST_STEP:
            raise SecureError(
                f"range={widest:g} with bits={settings.bits} rounds numbers to {step:.2g}, and "
                f"this site demands at most {_WIDEST_STEP:.2g} (more bits): sums of a few coarse "
                "numbers show their terms"
            )
        given = 0.0 if settings.privacy is None else settings.privacy.noise
        if given < self.noise:
            problem = (
                f"noise={given:.3g} is less than"
                if given
                else "the run has no differential privacy, with"
            )
            raise SecureError(
                f"{problem} the noise of {self.noise:.3g} that this site demands (secure_noise in "
                "its node config)"
            )
        return settings

    def memory(self, remembers: bool) -> None:
        """Refuse algorithms with client states, unless they are allowed."""
        if remembers and not self.states:
            raise SecureError(
                "clients of this algorithm remember something, by which a server could tell one "
                "reply from the others; states = true under [secure] in the policy allows it"
            )

    def offer(self, settings: SecureAggregation, question: Exchange, message: Tree) -> None:
        """Refuse an offer for another exchange than the message, or below the requirements."""
        offer = Offer.read(message)
        if (offer.session, offer.round, offer.exchange) != (
            question.session,
            question.round,
            question.exchange,
        ):
            raise SecureError(
                "the offer is for another session, round or exchange than its message"
            )
        if offer.clients < self.clients:
            raise SecureError(
                f"the sum is of {offer.clients} clients; this site demands {self.clients} at least"
            )
        if settings.degree(offer.clients) + 1 < self.clients:
            raise SecureError(
                f"neighbours={settings.neighbours}: this site would see too few of the "
                f"{self.clients} clients that it demands in a sum"
            )
        if self.required and settings.degree(offer.clients) < (
            least := graph.degree(offer.clients, settings.threshold)
        ):
            raise SecureError(
                f"neighbours={settings.neighbours} are fewer than the {least} that this site "
                "demands"
            )


_FEWEST_BITS = 16
_WIDEST_STEP = 16 / 2 ** (_FEWEST_BITS - 1)
"""That of the default range with the fewest bits."""

_DEMANDED = (
    'this site answers under secure aggregation alone (secure="required" in its node config); '
    'the server\'s remedy is [aggregation] with type = "SecureAggregation"'
)


def signatures(config: dict[str, Any]) -> dict[str, Any]:
    """The functions with which a client signs its keys (`signing_key`, a file), and verifies those
    of others (`peers`, a file of their public keys by number).
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from foedus.aggregation.secure.primitives import verifier

    hooks: dict[str, Any] = {}
    try:
        if "signing_key" in config:
            key = load_pem_private_key(Path(str(config["signing_key"])).read_bytes(), None)
            if not isinstance(key, Ed25519PrivateKey):
                raise ValueError("it is no Ed25519 key")
            hooks["sign"] = key.sign
        if "peers" in config:
            keys = tomllib.loads(Path(str(config["peers"])).read_text())
            hooks["verify"] = verifier({int(i): bytes.fromhex(key) for i, key in keys.items()})
    except (OSError, TypeError, ValueError) as error:
        name = "peers" if "sign" in hooks or "signing_key" not in config else "signing_key"
        raise DataError(f"--node-config: {name}: {error}") from None
    return hooks


class Secrets:
    """Client states between the messages of a secure exchange: at most one for each client, the
    newest.
    """

    def __init__(self, cache: Path | None):
        if cache is None:
            raise ConfigError(
                'secure aggregation needs cache="/folder" in this site\'s node config, where keys '
                "are kept between messages"
            )
        self.account = Account(cache)
        self.folder = cache / "secure"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def take(self, client: int) -> Tree:
        """The state of a client, which is then removed: of two processes, one gets it."""
        mine = self.folder / f".{client}.{uuid.uuid4().hex}"
        try:
            (self.folder / f"{client}.bin").rename(mine)
        except FileNotFoundError:
            raise SecureError(
                f"client {client} has no keys for this: it was not asked to advertise some, or has "
                "used them"
            ) from None
        try:
            return wire.decode(mine.read_bytes())
        finally:
            mine.unlink()

    def takes_part(self, client: int, cohort: str, probability: float) -> bool:
        """Whether a client takes part in a round: drawn once and kept, because all exchanges of a
        round have one cohort.
        """
        path = self.folder / f"{client}.cohort"
        with contextlib.suppress(OSError, ValueError, TypeError):
            known, chance, takes = json.loads(path.read_text())
            if known == cohort:
                if chance != probability:  # accounted for as one chance, drawn by another
                    raise SecureError(f"probability={probability} was {chance} in this cohort")
                return takes
        takes = bool(sampling.bernoulli(probability, 1)[0])
        files.replace(path, [json.dumps([cohort, probability, takes]).encode()])
        return takes

    def put(self, client: int, state: Tree) -> None:
        new = self.folder / f".{client}.{uuid.uuid4().hex}"
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(wire.encode(state))
        new.replace(self.folder / f"{client}.bin")

    @contextlib.contextmanager
    def client(
        self,
        client: int,
        phase: str,
        offer: Tree,
        settings: Callable[[Tree], SecureAggregation],
        **hooks: Any,
    ) -> Iterator[Any]:
        """The client in its current state; its new state is written before the answer is sent.

        offer: in the first phase. settings: of an exchange, by its offer.
        """
        from foedus.aggregation.secure.client import SecureClient

        if phase == "advertise":
            for left in self.folder.glob(f".{client}.*"):  # by a process that was killed
                left.unlink(missing_ok=True)
            found = SecureClient(client, settings(offer), **hooks)
        else:
            state = self.take(client)
            found = SecureClient.restore(state, settings(state["offer"]), **hooks)
        try:
            yield found
        finally:
            if found.state.phase not in ("advertise", "nothing more"):
                self.put(client, found.export())


def phase(
    question: Exchange,
    ids: list[int],
    parts: list[bytes],
    config: dict[str, Any],
    cache: Path | None,
    more: Callable[[int], tuple] = lambda i: (),
) -> tuple[dict[str, Any], bytes]:
    """Header and body of the answer of these clients to one phase; the errors of each are its own.

    parts: the question for each client. more: for `mask`, the reply and the weight of each client.
    With differential privacy all have the same weight, whatever the server says, and replies are
    clipped and get noise.
    """
    demands, name = Demands.of(config), question.phase
    assert name is not None
    settings, secrets, hooks = (
        demands.settings(question.secure),
        Secrets(cache),
        signatures(config),
    )
    if len(parts) != len(ids):
        raise SecureError(f"lengths: there are {len(parts)} questions for {len(ids)} clients")

    def share(offer: Tree) -> Share:
        assert settings.privacy is not None
        return Share(
            settings, settings.privacy.clip_of(str(question.step)), Offer.read(offer).clients
        )

    of = (
        (lambda offer: settings)
        if settings.privacy is None
        else (lambda offer: share(offer).settings)
    )
    answers: dict[int, bytes] = {}
    errors: dict[str, str] = {}
    for i, part in zip(ids, parts, strict=True):
        try:
            message = wire.decode(part)
            if name == "advertise":
                demands.offer(settings, question, message)
            with secrets.client(i, name, message, of, least=demands.clients, **hooks) as client:
                if name == "mask":
                    reply, weight, asked = more(i)
                    noise = clip = None
                    if settings.privacy is not None:
                        mine = share(client.state.offer)
                        weight, noise, clip = 1, mine.noise, mine.clip
                        if not tree.all_finite(reply := dense(reply)):
                            # an error would tell, without noise, of the rows and who takes part
                            warnings.warn("the reply is not finite: 0 in its place", stacklevel=2)
                            reply = tree.map(torch.zeros_like, reply)
                    answer = client.mask(message, reply, weight, noise, clip, asked)
                else:
                    offer = client.state.get("offer")
                    answer = getattr(client, name)(message)
                    if name == "unmask" and settings.privacy is None:
                        secrets.account.sum_of(i, offer["question"], message["survivors"].tolist())
            answers[i] = wire.encode(answer)
        except (DivergenceError, ReplyError) as error:  # its text may quote the reply
            warnings.warn(str(error), stacklevel=2)
            within = f"-{settings.fixed_point.range:g} .. {settings.fixed_point.range:g}"
            errors[str(i)] = (
                f"its reply does not fit into {within}, so nothing was sent; the log of the site "
                "says more"
            )
        except FoedusError as error:
            errors[str(i)] = str(error)
    about = {
        "round": question.round,
        "exchange": question.exchange,
        "phase": name,
        "ids": list(answers),
        "errors": errors,
    }
    return {**about, "lengths": [len(a) for a in answers.values()]}, b"".join(answers.values())


def absent(
    question: Exchange, step: str, ids: list[int], config: dict[str, Any], cache: Path | None
) -> list[int]:
    """The clients that answer but do not take part in this round: none without differential
    privacy.
    """
    if Demands.of(config).settings(question.secure).privacy is None:
        return []
    if question.cohort is None or question.probability is None:
        raise SecureError("the header has no cohort or no probability")
    if question.step != step:
        raise SecureError(f"step: keys were made for {question.step!r}, not for {step}")
    secrets, probability = Secrets(cache), float(question.probability)
    return [i for i in ids if not secrets.takes_part(i, question.cohort, probability)]
