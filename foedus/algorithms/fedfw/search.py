"""FedFW with a line search: step_size="line_search".

A client makes K steps on its penalized objective

    phi_i(x) = f_i(x) / n + lambda/2 |x - center|^2 + <y_i, x>      (y_i = 0 unless "augmented")
    x_i <- x_i + gamma d,   gamma = argmin over [0, most] of phi_i(x_i + gamma d)

along d = s - x_i, with most = 1, or d = s - v (pairwise), with most the weight of the active vertex
v. It sends how x_i has moved in the round, and the center, the average of all x_i, moves by 1 / n
of the sum of what arrives.

With variant="augmented" this is the alternating direction method of multipliers for

    minimize sum_i f_i(x_i) / n over x_i in D, all x_i equal (3)

whose subproblems are solved by Frank-Wolfe: y_i <- y_i + lambda/2 (x_i - center), and lambda does
not grow. Half of lambda, as what K steps have not solved yet would enter y_i as well (with lambda,
IID digits went on with an error of 0.1). Solved exactly, the average of its iterates is within
(lambda/2 |X* - X^1|^2 + |Y*|^2 / (2 lambda)) / T of the minimum in the Lagrangian at any duals of
size |Y*| (He and Yuan, SIAM J. Numer. Anal. 2012), X the matrix of all x_i. That is smallest at

    lambda = |Y*| / |X* - X^1|,    Y*_i = -(grad f_i(x*) - grad F(x*)) / n up to a normal of D,

where |Y*| is at most |(grad f_i(x*) / n)_i|. penalty="auto" takes the iterates for the solution:

    lambda <- |(grad f_i(x_i) / n)_i| / |X - X^1|,  after round t by a factor of exp(2 / t^1.5) at
                                                    most

Each client sends the two squares for its own i: two more numbers a message. A lambda that goes on
changing with the iterates can keep them from converging (on IID digits it did); changes whose
logarithms have a finite sum cannot (He, Yang and Wang, J. Optim. Theory Appl. 2000). Theirs is at
most exp(2 zeta(3/2)) = 186 in all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foedus.algorithms.fedfw.local import vectors_of, weighted_sum
from foedus.algorithms.fedfw.points import MEMBER
from foedus.base import tree
from foedus.base.tree import State, Tree
from foedus.core.algorithm import Client
from foedus.core.clients import Clients
from foedus.core.exchange import Accept
from foedus.core.held import shortest
from foedus.models.base import Params

if TYPE_CHECKING:
    from foedus.algorithms.fedfw.fedfw import FedFW


DUAL = 0.5
"""The part of lambda by which duals move."""

CHANGE = 2.0
"""The logarithm of the largest factor by which lambda changes after round 1: 7.4, then 2.0, 1.5."""


def dot(a: Params, b: Params) -> Tensor:
    """<a, b> over all tensors."""
    return reduce(torch.add, ((a[k] * b[k]).sum() for k in a))


def searched(
    algorithm: FedFW, client: Client, center: Params, pace: Tensor
) -> tuple[dict[str, Any], dict[str, Params]]:
    """The client's part of a round."""
    pull, last_pull, share = pace.unbind()
    x, state = client.state["x"], dict(client.state)
    if algorithm.variant == "augmented":
        apart = tree.sub(x, center)
        state["y"] = tree.map(lambda y, a: y + DUAL * last_pull * a, state["y"], apart)
    start = x = center if algorithm.begin_round == "center" else x
    raw = x

    def slope(z: Params) -> Params:
        nonlocal raw
        raw = tree.map(lambda g: g * share, algorithm.slope(client, z))
        g = tree.map(lambda g, z, c: g + pull * (z - c), raw, z, center)
        return tree.add(g, state["y"]) if algorithm.variant == "augmented" else g

    moves: list[tuple[Tensor, Tree, Tree]] = []
    for _ in range(algorithm.local_steps):
        g = slope(x)
        norm = dot(raw, raw)
        d, most, parts = direction(algorithm, g, x, state)
        along = lambda gamma, x=x, d=d: dot(slope(moved(x, gamma, d)), d)  # noqa: E731
        gamma = least(along, dot(g, d), most)
        x = moved(x, gamma, d)
        moves.append((gamma, *parts))
    reply = {"move": tree.sub(x, start) if not parts else sparse_move(moves)}
    state["x"] = x
    if algorithm.penalty == "auto":
        far = tree.sub(x, algorithm.first(client.spec, client.shared))
        reply |= {"slope": norm, "far": dot(far, far)}
    return reply, state


def moved(x: Params, gamma: Tensor, d: Params) -> Params:
    """x + gamma d."""
    return tree.map(lambda x, d: x + gamma * d, x, d)


def direction(
    algorithm: FedFW, g: Params, x: Params, state: dict[str, Params]
) -> tuple[Params, Tensor, tuple]:
    """d, how far along it x stays in the set, and for a pairwise direction the two vertices."""
    domain = algorithm.set
    if algorithm.direction == "pairwise":
        toward, away, most = domain.pairwise(g, x)
        return tree.sub(domain.dense(toward, x), domain.dense(away, x)), most, (toward, away)
    point = domain.lmo(g, warm=state["v"] if algorithm.warm else None)
    if algorithm.warm:
        state["v"] = vectors_of(point, state["v"])
    return tree.sub(domain.dense(point, x), x), torch.ones(()), ()


def sparse_move(moves: list[tuple[Tensor, Tree, Tree]]) -> Tree:
    """The sum of gamma_k (s_k - v_k), as sparse as its vertices."""
    weights = [w for gamma, _, _ in moves for w in (gamma, -gamma)]
    return weighted_sum(weights, [point for _, s, v in moves for point in (s, v)])


def least(along: Callable[[Tensor], Tensor], first: Tensor, most: Tensor) -> Tensor:
    """About the gamma in [0, most] at which a convex function with derivative `along` is least.

    first: the derivative at 0. Two steps of false position, with two derivatives: exact for a
    quadratic function. It is `most` where the derivative there is not positive, and 0 where it is
    not negative at 0.
    """
    low, high = torch.zeros_like(most), most
    at_low, at_high = first, along(high)

    def crossing() -> Tensor:
        cut = (low * at_high - high * at_low) / (at_high - at_low)
        return torch.where(at_high <= 0, high, torch.where(at_low >= 0, low, cut))

    middle = crossing()
    value = along(middle)
    before = value <= 0
    low, at_low = torch.where(before, middle, low), torch.where(before, value, at_low)
    high, at_high = torch.where(before, high, middle), torch.where(before, at_high, value)
    return torch.minimum(crossing().clamp(min=0), most)


def search_round(algorithm: FedFW, clients: Clients, state: State) -> State:
    """The server's part of a round."""
    _, factor, _ = algorithm.steps(clients.round, clients.participation)
    pace = torch.tensor([state.penalty * factor, state.pull, 1 / clients.total])
    sent = {"center": state.center, "pace": pace, "weights": "uniform"}
    reply = clients.mean(algorithm.search, accept=too_far(algorithm, state.center.value), **sent)
    move = dense_move(algorithm, reply["move"], state.center.value)
    # absent clients do not move: 1 / n of the sum
    center = state.center.moved(1.0, shortest(tree.scale(move, clients.share("uniform"))))
    penalty = state.penalty
    if algorithm.penalty == "auto" and float(reply["far"]) > 0:
        wanted, factor = float(reply["slope"] / reply["far"]) ** 0.5, most_change(clients.round)
        penalty = min(max(wanted, penalty / factor), factor * penalty)
    clients.log(penalty=penalty)
    algorithm.log(clients, center.value, penalty)
    return state.replace(center=center, penalty=penalty, pull=float(pace[0]))


def most_change(round: int) -> float:
    """The largest factor by which lambda changes after a round; the product of all is finite."""
    return math.exp(CHANGE / round**1.5)


def dense_move(algorithm: FedFW, move: Tree, like: Params) -> Params:
    """A move as parameters; clients' moves have a leading dimension."""
    return algorithm.set.dense(move, like) if algorithm.direction == "pairwise" else move


def too_far(algorithm: FedFW, like: Params) -> Accept:
    """No two points of the set are further apart than its diameter."""
    most = algorithm.set.diameter_of(like) * (1 + MEMBER)

    def accept(ids: Tensor, reply: Tree) -> dict[int, str]:
        move = dense_move(algorithm, reply["move"], like)
        each = [v.double().flatten(1).square().sum(1) for v in move.values()]
        places = torch.nonzero(~(torch.stack(each).sum(0).sqrt() <= most)).flatten().tolist()
        return dict.fromkeys(places, "its x moves further than the set is wide")

    return accept
