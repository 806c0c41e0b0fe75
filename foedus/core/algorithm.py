"""What an algorithm is: hyper-parameters, pure client steps, and a server that asks.

    @dataclass(frozen=True)
    class Mean(Algorithm):
        def total(self, client):                       # a client step: (reply, new client state)
            return {"m": (client.data.weight @ client.data.y) / client.data.count}, client.state

        def start(self, clients):                      # the server's state before the first round
            return State(m=torch.zeros(()))

        def round(self, clients, state):               # ask, and move
            return State(m=clients.mean(self.total)["m"])

No algorithm knows which engine runs it; no engine knows which algorithm it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from foedus.base import tree
from foedus.base.rows import Rows
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.clients import Clients

from foedus.core.predictor import Predictor


@dataclass(frozen=True, eq=False)
class Client:
    """One client in one exchange: all that its step may depend on, besides the payload.

    `data` are its rows, `prepared` what `Algorithm.prepare` made of them, `state` what survives between rounds, `key` the
    source of its random numbers in this exchange, `shared` a key that is the same everywhere and all through the run,
    `spec` the form of the data, `id` its number. `up` and `down` are the rounds that its replies and its broadcasts take, and
    `longest` is the round trip of the slowest client: all 0 unless the engine delays messages.
    """

    id: Tensor
    data: Rows
    prepared: Tree
    state: Tree
    key: Tensor
    shared: Tensor
    spec: Spec
    up: Tensor | int = 0
    down: Tensor | int = 0
    longest: int = 0


class Algorithm:
    """Base of every algorithm: a frozen dataclass whose fields are hyper-parameters.

    Client side, pure functions that an engine may batch over clients with `torch.func.vmap`:

    - `step(self, client, **payload) -> (reply, state)`, as many as wanted, under any names; state `None`: unchanged;
    - `init(client)`: the state of a client that takes part for the first time (`None`: it keeps none);
    - `prepare(data)`: what can be derived from the rows alone; a cache that an engine may drop and make again;
    - `outputs(client, x)`: where `personal`, what the client's own model says of rows `x`.

    Server side: `start(clients)`, `round(clients, state)` and `predictor(state)`.
    """

    personal: ClassVar[bool] = False
    """Each client ends up with a model of its own; it is evaluated on the client's own test rows."""

    pooled: ClassVar[bool] = False
    """A reference that sees all rows in one place: it runs on one client who holds them all, and sends nothing."""

    spread: ClassVar[float] = 1.5
    """Clients share a padded batch while the largest has at most this many times the rows of the smallest. Infinite where
    steps read rows only through mini-batch loops, which waste nothing on unequal clients."""

    remedy: ClassVar[str] = "try a smaller lr, or clip=1.0"
    """What to do about numbers that are not finite."""

    @property
    def batchable(self) -> bool:
        """Whether batching clients pays (a large convolutional model is faster one client after the other)."""
        return True

    @property
    def alike(self) -> bool:
        """Whether clients have states and models of one form. If not, they cannot be batched, and go one after the other."""
        return True

    @property
    def names_clients(self) -> bool:
        """Whether its settings speak of clients by number: it then fits no federation without them."""
        return False

    def footprint(self, rows: int, row_bytes: int) -> int:
        """Bytes that a client of so many rows takes in a batch, roughly, besides what is sent: three copies of its rows."""
        return 3 * rows * row_bytes

    def seeded(self, seed: int) -> Algorithm:
        """The algorithm with what it draws once for all (random features) fixed by the seed of a run."""
        return self

    def check(self, spec: Spec) -> None:
        """Refuse, before any work, data that the algorithm cannot handle."""

    def prepare(self, data: Rows) -> Tree:
        return None

    def init(self, client: Client) -> Tree:
        return None

    def start(self, clients: Clients) -> State:
        raise NotImplementedError(f"{type(self).__name__} does not define start")

    def round(self, clients: Clients, state: State) -> State:
        raise NotImplementedError(f"{type(self).__name__} does not define round")

    def readmit(self, state: State, ids: Tensor) -> State | None:
        """The server's state with clients who have lost theirs as newcomers; `None`: they cannot come back."""
        return None

    def begin_at(self, state: State, w: Tree) -> State:
        """The first state, with the model w of another run in place of its own."""
        own = state.get("w")
        if own is None:
            raise ConfigError(f"start= is for algorithms with one global model; {type(self).__name__} has none")
        same = tree.flatten(own)[1] == tree.flatten(w)[1] and all(
            a.shape == b.shape for a, b in zip(tree.leaves(own), tree.leaves(w), strict=True)
        )
        if not same:
            form = lambda t: ", ".join(str(tuple(v.shape)) for v in tree.leaves(t))  # noqa: E731
            raise ConfigError(f"start= holds a model of shapes {form(w)}; {type(self).__name__} learns one of {form(own)}")
        return state.replace(w=tree.map(lambda v, o: v.detach().to(o.dtype).clone(), w, own))

    def predictor(self, state: State) -> Predictor | None:
        return None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} is not personal")

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, for evaluation."""
        raise NotImplementedError(f"{type(self).__name__} does not define row_loss")


def looped(step: Callable) -> Callable:
    """Decorator for a client step that `vmap` cannot batch (it fits trees, say): clients then go one after the other."""
    step.looped = True
    return step


def stacked(step: Callable) -> Callable:
    """Decorator: a client step that may be given a whole batch of clients, all tensors of `client` with a leading dimension.

    For steps that train (`descend` knows batches) and otherwise only do what broadcasts: they need no `vmap` around them, which takes about
    a millisecond a round.
    """
    step.stacked = True
    return step
