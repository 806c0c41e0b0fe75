"""What each section of `foedus demo` says: one sentence, made from the numbers of the run.

Where the numbers do not support what a family is said to do, the sentence says so.
"""

from __future__ import annotations

from dataclasses import dataclass

CLASS = 0.02
"""Accuracies that differ by no more are called equal."""


@dataclass(frozen=True)
class Claim:
    """A sentence, and whether the numbers in it support the claim."""

    holds: bool
    text: str


def claim(holds: bool, promise: str, numbers: str) -> Claim:
    """A claim with its numbers.

    Args:
        holds: Whether the numbers support it.
        promise: What is claimed, after "that"; printed only if it does not hold.
        numbers: What was measured, a sentence.
    """
    if holds:
        return Claim(True, numbers)
    return Claim(False, f"It does not hold in this run that {promise}. Measured: {numbers}")


def percent(part: float) -> str:
    """A distance, relative to what it is from: 0.20%, 2.3%, 144%."""
    value = 100 * part
    return f"{value:.2f}%" if value < 1 else f"{value:.1f}%" if value < 10 else f"{value:.0f}%"


def ffgb(trees: float, network: float, later: float, bagging: float) -> Claim:
    """Args: accuracies of FFGB and FedAvg after 10 rounds, of FedAvg after 50, of bagging."""
    return claim(
        trees > max(network, bagging),
        "FFGB is above FedAvg and bagging",
        f"At clients with unlike labels, FFGB's trees reach accuracy {trees:.3f} in 10 rounds, "
        f"bagging as many trees {bagging:.3f}, and FedAvg of a network {network:.3f} ({later:.3f} "
        "after 50 rounds).",
    )


def fednewton(cg: float, fedavg: float, newton: float, start: float) -> Claim:
    """Args: distances of predictions from the pooled solution's; start: that of all at round 0."""
    apart = newton > start
    plain = f"{'diverges' if apart else 'does not diverge'} ({percent(newton)} after 4)"
    return claim(
        cg < fedavg and apart,
        "FedNewton comes closer in 4 rounds than FedAvg in 50, also where plain Newton diverges",
        f"After 4 rounds FedNewton's predictions differ by {percent(cg)} from those of the pooled "
        f"solution, FedAvg's by {percent(fedavg)} after 50 rounds; plain Newton {plain}.",
    )


def fedfw(
    sent: float, dense: float, sparse: float, fedavg: float, weights: int, total: int
) -> Claim:
    """Args: bytes of an upload of either, their accuracies, weights that are not 0, of how many."""
    return claim(
        10 * sent < dense and 10 * weights < total and sparse >= fedavg - CLASS,
        "FedFW is as accurate as FedAvg with a tenth of its bytes and of its weights",
        f"An upload of FedFW has {sent:,.0f} bytes and one of FedAvg {dense:,.0f}; FedFW ends with "
        f"accuracy {sparse:.3f} (FedAvg {fedavg:.3f}) and {weights:,} of {total:,} weights that "
        "are not zero.",
    )


def fedres(both: float, late: float, alone: float, one: float) -> Claim:
    """Args: accuracies on clients' own rows: FedRes, if late, Independent, Central."""
    return claim(
        both > alone and late >= alone and min(both, late) > one,
        "FedRes is above Independent and Central, also with late messages",
        f"A shared and a private model together predict {both:.1%} of the clients' own test rows "
        f"correctly, and {late:.1%} if messages are 7 rounds late; clients alone {alone:.1%}, one "
        f"model for all {one:.1%}.",
    )


def fedboost(
    weight: float, chosen: float, equal: float, everything: float, sent: float, megabytes: float
) -> Claim:
    """Args: weight of the three, accuracies, predictors a round, megabytes as part of all."""
    return claim(
        weight > 0.5 and chosen > equal and chosen >= everything - CLASS and megabytes < 1,
        "FedBoost finds the right predictors and is as accurate as if all were sent",
        f"Of twelve given classifiers, three were fitted to upright digits: they get {weight:.0%} "
        f"of the weight, and accuracy goes from {equal:.3f} with equal weights to {chosen:.3f} "
        f"({everything:.3f} if all are sent) with {sent:.1f} sent a round, {megabytes:.0%} of the "
        "megabytes.",
    )


def averaging(best: str, accuracy: float, fedavg: float, alone: float, own: float) -> Claim:
    """Args: the best federated method, accuracies, and those of clients alone: all and own rows."""
    other = "" if best == "FedAvg" else f", FedAvg with {fedavg:.3f}"
    return claim(
        accuracy > alone,
        "averaging is above clients alone on everybody's rows",
        f"{best} ends with accuracy {accuracy:.3f}{other}; models of clients alone have "
        f"{alone:.3f} on everybody's rows and {own:.3f} on their own.",
    )
