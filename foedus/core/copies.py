"""The server's table of the clients' values, for algorithms whose replies change them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foedus.base import tree
from foedus.base.tree import Tree


@tree.node
@dataclass(frozen=True, eq=False)
class Copies:
    """One copy per client, stacked in order of id."""

    value: Tree

    def moved(self, positions: Tensor, points: Tree, rate: float) -> tuple[Copies, Tree]:
        """x_i <- x_i + rate (point_i - x_i) at some clients.

        Args:
            positions: The positions of the clients, each once.
            points: The points, with a leading client dimension.
            rate: The step size.

        Returns:
            The new table, and the sum of the moves.
        """
        value = tree.map(lambda x: x.clone(), self.value)
        moves = tree.map(lambda x, s: rate * (s - x[positions]), value, points)
        tree.map(lambda x, m: x.index_add_(0, positions, m), value, moves)
        return Copies(value), tree.map(lambda m: m.sum(0), moves)
