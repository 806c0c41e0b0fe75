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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from foedus.base import tree
from foedus.base.rows import Rows
from foedus.base.settings import Settings
from foedus.base.spec import Spec
from foedus.base.tree import State, Tree
from foedus.errors import ConfigError

if TYPE_CHECKING:
    from foedus.core.clients import Clients

from foedus.core.predictor import Predictor


def three_copies(rows: int, row_bytes: int) -> int:
    """Bytes that a client with `rows` rows takes in a batch, roughly, besides what is sent."""
    return 3 * rows * row_bytes


@dataclass(frozen=True)
class Batching:
    """How clients may share a batch.

    spread: they share a padded batch while the largest has at most this many times the rows of the
    smallest; infinite where steps read rows only through mini-batch loops, which waste nothing on
    unequal clients. alike: whether states and models have one form; if not, clients go one after
    the other. pays: whether batching is faster (a large convolutional model is not). footprint:
    bytes of a client in a batch, from its rows and the bytes of a row.
    """

    spread: float = 1.5
    alike: bool = True
    pays: bool = True
    footprint: Callable[[int, int], int] = three_copies


@dataclass(frozen=True, eq=False)
class Client:
    """One client in one exchange: all that its step may depend on, besides the payload.

    `data` are its rows, `prepared` what `Algorithm.prepare` made of them, `state` what survives
    between rounds, `key` the source of its random numbers in this exchange, `shared` a key that is
    the same everywhere and all through the run, `spec` the form of the data, `id` its number,
    `kind` which of the algorithm's kinds of clients it is, `round` the round whose broadcast it
    answers (0 before the first). `up` and `down` are the rounds that its
    replies and its broadcasts take, and `longest` is the round trip of the slowest client: all 0
    unless messages are late.
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
    kind: int = 0
    round: int = 0


class Algorithm(Settings):
    """Base of every algorithm: a frozen dataclass whose fields are hyper-parameters.

    Client side, pure functions that an engine may batch over clients with `torch.func.vmap`:

    - `step(self, client, **payload) -> (reply, state)`, as many as wanted, under any names; state
      `None`: unchanged;
    - `init(client)`: the state of a client that takes part for the first time (`None`: it keeps
      none);
    - `prepare(data)`: what can be derived from the rows alone; a cache that an engine may drop and
      make again;
    - `outputs(client, x)`: where `personal`, what the client's own model says of rows `x`;
    - `first_held(spec, shared)`, `absorb(client, **updates)`, `check_updates(spec, **updates)`: for
      held values (`foedus.core.held`).

    Server side: `start(clients)`, `round(clients, state)` and `predictor(state)`. `batching()` says
    how clients may share a batch.
    """

    if TYPE_CHECKING:  # a constant of the class or a property

        @property
        def personal(self) -> bool:
            """Each client ends up with a model of its own; it is evaluated on the client's own
            test rows.
            """
    else:
        personal: bool = False

    pooled: ClassVar[bool] = False
    """A reference that sees all rows in one place: it runs on one client who holds them all, and
    sends nothing.
    """

    takes_raw: ClassVar[bool] = False
    """It works on the raw rows of tables (`Data.raw`), not on those that models are given."""

    weighs_rows: ClassVar[bool] = False
    """Its clients' objective is that of `Rows`, with the rows' own weights; an algorithm without it
    refuses a federation whose rows have weights.
    """

    takes_sequences: ClassVar[bool] = False
    """It can learn labels of each step of a sequence, (n, t); an algorithm without it refuses
    them.
    """

    remedy: ClassVar[str] = "try a smaller lr, or clip=1.0"
    """What to do about numbers that are not finite."""

    def batching(self) -> Batching:
        """How clients may share a batch."""
        return Batching()

    @property
    def stateful(self) -> bool:
        """Whether clients keep a state between rounds."""
        return type(self).init is not Algorithm.init

    @property
    def names_clients(self) -> bool:
        """Whether its settings speak of clients by number: it then fits no federation without
        them.
        """
        return False

    def kinds(self, ids: Tensor) -> Tensor | None:
        """Which kind each client is of, where clients of different kinds reply in different forms;
        `None`: they are all alike.
        """
        return None

    def seeded(self, seed: int) -> Algorithm:
        """The algorithm with what it draws once for all (random features) fixed by the seed of a
        run.
        """
        return self

    def row_spec(self, spec: Spec) -> Spec:
        """What rows are to the clients, of data of this form: where the features are integers, an
        algorithm that is not made for them is given float32 numbers.
        """
        return replace(spec, integers=False)

    def check(self, spec: Spec) -> None:
        """Refuse, before any work, data that the algorithm cannot handle."""

    def check_data(self, spec: Spec) -> None:
        """`check`, for the form of rows that clients are given; refuses rows with weights of their
        own where the algorithm would ignore them, and labels of sequences where it knows none.
        """
        if spec.steps and not self.takes_sequences:
            raise ConfigError(
                f"{type(self).__name__} predicts one label a row, and this federation has "
                f"{spec.steps} labels a row, one for each step of a sequence; use fd.FedAvg or "
                "another algorithm that trains a torch.nn.Module, or predict one step a row"
            )
        if spec.weighted and not self.weighs_rows:
            raise ConfigError(
                f"{type(self).__name__} does not use the weights of rows, and this federation has "
                "some; drop weight= where the data is loaded, or use another algorithm, such as "
                "fd.FedAvg"
            )
        self.check(self.row_spec(spec))

    def prepare(self, data: Rows) -> Tree:
        return None

    def init(self, client: Client) -> Tree:
        return None

    def first_held(self, spec: Spec, shared: Tensor) -> dict[str, Tree]:
        """Version 0 of the held values that clients keep as they are, by name: what everybody can
        make from the shared key.
        """
        return {}

    def absorb(self, client: Client, **updates: Tree) -> Tree:
        """The new state of a client that keeps something derived from held values: called with
        their updates, before the step.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps held values as they are")

    def check_updates(self, spec: Spec, **updates: Tree) -> None:
        """Refuse, with a `ReplyError`, updates from an untrusted server that `absorb` must not be
        given.
        """

    def items(self, which: Tensor) -> Tree:
        """The message of some of the items of a `HeldItems`."""
        raise NotImplementedError(f"{type(self).__name__} has no items")

    def start(self, clients: Clients) -> State:
        raise NotImplementedError(f"{type(self).__name__} does not define start")

    def round(self, clients: Clients, state: State) -> State:
        raise NotImplementedError(f"{type(self).__name__} does not define round")

    def readmit(self, state: State, ids: Tensor) -> State | None:
        """The server's state with clients who have lost theirs as newcomers; `None`: they cannot
        come back.
        """
        return None

    def begin_at(self, state: State, w: Tree) -> State:
        """The first state, with the model w of another run in place of its own."""
        own = state.get("w")
        if own is None:
            raise ConfigError(
                f"start= is for algorithms with one global model; {type(self).__name__} has none"
            )
        same = tree.flatten(own)[1] == tree.flatten(w)[1] and all(
            a.shape == b.shape for a, b in zip(tree.leaves(own), tree.leaves(w), strict=True)
        )
        if not same:
            form = lambda t: ", ".join(str(tuple(v.shape)) for v in tree.leaves(t))  # noqa: E731
            raise ConfigError(
                f"start= holds a model of shapes {form(w)}; {type(self).__name__} learns one of "
                f"{form(own)}"
            )
        return state.replace(w=tree.map(lambda v, o: v.detach().to(o.dtype).clone(), w, own))

    def predictor(self, state: State) -> Predictor | None:
        return None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} is not personal")

    def form(self, client: Client) -> Callable[[Tensor], Tensor]:
        """Where `personal`, the client's own model; it can be exported if it is one of
        `foedus.export.forms`.
        """
        return partial(self.outputs, client)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, for evaluation."""
        raise NotImplementedError(f"{type(self).__name__} does not define row_loss")


def client_step(
    step: Callable | None = None, *, batch: Literal["vmap", "whole", "loop"] = "vmap"
) -> Any:
    """Decorator that says how a client step is run for many clients; without it, "vmap".

    batch: "vmap", written for one client and batched by `torch.func.vmap`; "whole", may be given a
    whole batch, all tensors of `client` with a leading dimension (for steps that train: `descend`
    knows batches; they need no vmap around them, which takes about a millisecond a round); "loop",
    one client after the other (it fits trees, say).
    """

    def mark(step: Callable) -> Callable:
        step.__dict__["batch"] = batch
        return step

    return mark if step is None else mark(step)


def batch_of(step: Callable) -> str:
    """How a client step is run for many clients."""
    return getattr(step, "batch", "vmap")


looped = client_step(batch="loop")
"""As `client_step(batch="loop")`."""

stacked = client_step(batch="whole")
"""As `client_step(batch="whole")`."""
