"""How many rounds a full pass over the clients takes, and what is said when that is too long."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from foedus.core.clients import Clients

SLOW = 5  # times the expected rounds: fewer than one pass in a thousand takes as long by chance
NAMED = 10
LATE = "waits too long"


def expected_rounds(clients: Clients) -> float:
    """About how many rounds a full pass takes.

    N clients, each in a round with the probability p, have all been there after 1 + 1/2 + ... + 1/N
    times -1 / ln(1 - p) rounds. Under secure aggregation the last ones come in pairs: if two given
    clients meet with the probability q, k of them that are left with k (k - 1) q / 2, and the sum
    of its inverses over even k is 2 ln(2) / q.

    Args:
        clients: The clients of a round.
    """
    n, p, network = clients.total, clients.participation, clients.network
    rounds = 1.0
    if p < 1:
        rounds = max(1.0, sum(1 / k for k in range(1, n + 1)) / -math.log1p(-p))
        if network.aggregator is not None and network.aggregator.hides:
            meet = p * (p * n - 1) / max(n - 1, 1)
            rounds = max(rounds, 2 * math.log(2) / meet if meet > 0 else math.inf)
    return rounds + (0 if network.mail is None else network.mail.delays.longest)


def foresee(clients: Clients) -> None:
    """Warn in the first round if the run is too short for a pass.

    Args:
        clients: The clients of the round.
    """
    expected, network = expected_rounds(clients), clients.network
    if clients.round == 1 and expected > network.rounds:
        _warn(
            clients,
            f"{_name(clients)}: a pass over all {clients.total} clients takes about {expected:.3g} "
            f"rounds with {100 * clients.participation:.3g}% of them in a round, and the run has "
            f"{network.rounds}: the model will be that of the start. Use a larger participation, "
            "or more rounds",
        )


def watch(clients: Clients, first: bool, since: int, missing: Tensor) -> None:
    """Warn once if a pass is slow, and in the last round if the first iteration is not complete.

    Args:
        clients: The clients of the round.
        first: Whether this is the first iteration.
        since: The round in which the pass began.
        missing: The ids of the clients that have not answered it.
    """
    names = ", ".join(map(str, missing[:NAMED].tolist())) + (" ..." if len(missing) > NAMED else "")
    who = f"{len(missing)} of {clients.total} clients have not answered ({names})"
    network, expected = clients.network, expected_rounds(clients)
    said = any(LATE in note for note in network.notes)
    if clients.round - since + 1 > SLOW * expected and not said:
        _warn(
            clients,
            f"round {clients.round}: {_name(clients)} {LATE}: since round {since} {who}, and a "
            f"pass takes about {expected:.3g} rounds. Check these clients, or use a larger "
            "participation",
        )
    if first and clients.round == network.rounds:
        _warn(
            clients,
            f"round {clients.round}: {_name(clients)} has completed no iteration, and the model is "
            f"that of the start: {who}. Use a larger participation or more rounds, and check these "
            "clients",
        )


def _name(clients: Clients) -> str:
    return type(clients.network.algorithm).__name__


def _warn(clients: Clients, text: str) -> None:
    clients.network.notes.append(text)
    warnings.warn(text, stacklevel=6)
