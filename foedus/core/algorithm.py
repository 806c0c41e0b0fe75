"""Algorithms: hyper-parameters, pure client steps, and a server that calls them.

    @dataclass(frozen=True)
    class Mean(Algorithm):
        def total(self, client):                       # a client step: (reply, new client state)
            return {"m": (client.data.weight @ client.data.y) / client.data.count}, client.state

        def start(self, clients):                      # the server's state before the first round
            return State(m=torch.zeros(()))

        def round(self, clients, state):               # one round of exchanges with the clients
            return State(m=clients.mean(self.total)["m"])

No algorithm knows which engine runs it, and no engine knows which algorithm it runs.
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
    """A rough estimate of a client's memory in a batch: three copies of its rows.

    Messages are not included.

    Args:
        rows: The client's number of rows.
        row_bytes: Bytes of a row.

    Returns:
        The number of bytes.
    """
    return 3 * rows * row_bytes


@dataclass(frozen=True)
class Batching:
    """How an engine may put clients into batches; returned by `Algorithm.batching`.

    Args:
        spread: Clients share a padded batch if the largest has at most this many times the rows of
            the smallest. Infinite if steps read rows only through mini-batch loops, which waste
            nothing on unequal clients.
        alike: Whether client states and models have one structure; if not, clients run one by one.
        pays: Whether batching is faster (for a large convolutional model it is not).
        footprint: Bytes that a client needs in a batch, from its number of rows and the bytes of a
            row.

    Example:
        >>> fd.Batching(spread=2.0).footprint(100, 256)
        76800
    """

    spread: float = 1.5
    alike: bool = True
    pays: bool = True
    footprint: Callable[[int, int], int] = three_copies


@dataclass(frozen=True, eq=False)
class Client:
    """One client in one exchange: all that its step may depend on, besides the payload.

    Args:
        id: The number of the client.
        data: Its rows (`x`, `y`, `weight`, `count`), possibly padded; padding has weight 0.
        prepared: What `Algorithm.prepare` made of the rows.
        state: What the client keeps between rounds.
        key: The key of its random numbers in this exchange.
        shared: A key that is the same at all clients and during the whole run.
        spec: The form of the data.
        up: The rounds that its replies take; 0 unless messages are delayed.
        down: The rounds that broadcasts to it take; 0 unless messages are delayed.
        longest: The round trip of the slowest client, in rounds; 0 unless messages are delayed.
        kind: Which of the algorithm's kinds of clients it is (`Algorithm.kinds`).
        round: The round whose broadcast it answers; 0 before the first.

    Example:
        >>> class CountRows(fd.Algorithm):
        ...     def count(self, client):
        ...         return {"rows": client.data.count}, None
        ...     def start(self, clients):
        ...         return fd.State()
        ...     def round(self, clients, state):
        ...         return fd.State(rows=clients.sum(self.count)["rows"])
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> int(fd.run(CountRows(), fed, rounds=1, evaluate_every=0).state.rows)
        1346
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

    - `step(self, client, **payload) -> (reply, state)`: any number of steps, under any names; the
      state `None` means unchanged;
    - `init(client)`: the state of a client that takes part for the first time (`None`: stateless);
    - `prepare(data)`: values derived from the rows alone; a cache that an engine may drop and
      rebuild;
    - `outputs(client, x)`: if `personal`, the outputs of the client's own model on rows `x`;
    - `first_held(spec, shared)`, `absorb(client, **updates)`, `check_updates(spec, **updates)`: for
      held values (`foedus.core.held`).

    Server side: `start(clients)`, `round(clients, state)` and `predictor(state)`. `batching()`
    tells engines how clients may share a batch.

    Example:
        >>> class LabelCounts(fd.Algorithm):
        ...     def count(self, client):
        ...         onehot = torch.nn.functional.one_hot(client.data.y, client.spec.classes)
        ...         return {"n": (client.data.weight.unsqueeze(-1) * onehot).sum(0)}, None
        ...     def start(self, clients):
        ...         return fd.State()
        ...     def round(self, clients, state):
        ...         return fd.State(n=clients.sum(self.count)["n"])
        >>> fed = fd.split(fd.load("wine"), "iid", clients=3)
        >>> state = fd.run(LabelCounts(), fed, rounds=1, evaluate_every=0).state
        >>> state.n.tolist() == np.bincount(fed.data.y_train).tolist()
        True
    """

    if TYPE_CHECKING:  # a constant of the class or a property

        @property
        def personal(self) -> bool:
            """Whether each client ends up with its own model, evaluated on its own test rows."""
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
        """Whether its settings refer to clients by number.

        It then fits only federations that have these clients.
        """
        return False

    def kinds(self, ids: Tensor) -> Tensor | None:
        """The kind of each client; clients of different kinds send different structures.

        Args:
            ids: Client ids.

        Returns:
            A kind for each id, or `None`: there is one kind.
        """
        return None

    def seeded(self, seed: int) -> Algorithm:
        """The algorithm with its one-time draws (random features) fixed by the seed of a run.

        Args:
            seed: The seed of the run.
        """
        return self

    def row_spec(self, spec: Spec) -> Spec:
        """The form in which clients are given rows.

        Integer features become float32 unless an algorithm overrides this.

        Args:
            spec: The form of the data.
        """
        return replace(spec, integers=False)

    def check(self, spec: Spec) -> None:
        """Raise an error, before any work is done, for data that the algorithm cannot handle.

        Args:
            spec: The form of the rows as clients are given them.
        """

    def check_data(self, spec: Spec) -> None:
        """Run `check` on the form of rows that clients are given.

        Args:
            spec: The form of the data.

        Raises:
            ConfigError: Rows have weights, or a label for each step of a sequence, and the
                algorithm would ignore them.
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
        """Values derived from a client's rows alone, which steps find in `client.prepared`.

        They are computed once.

        Args:
            data: The client's rows.
        """
        return None

    def init(self, client: Client) -> Tree:
        """The state of a client that takes part for the first time; `None`: clients are stateless.

        Args:
            client: The client, without a state.
        """
        return None

    def first_held(self, spec: Spec, shared: Tensor) -> dict[str, Tree]:
        """Version 0 of the held values that clients keep as they are, by name.

        Every client can compute it from the shared key, so nothing is sent for it.

        Args:
            spec: The form of the rows.
            shared: The key that all clients have.
        """
        return {}

    def absorb(self, client: Client, **updates: Tree) -> Tree:
        """The new state of a client that keeps something derived from held values.

        It is called with their updates, before the step.

        Args:
            client: The client.
            **updates: The updates of held values, by name.
        """
        raise NotImplementedError(f"{type(self).__name__} keeps held values as they are")

    def check_updates(self, spec: Spec, **updates: Tree) -> None:
        """Check updates from an untrusted server before `absorb` is given them.

        Args:
            spec: The form of the rows.
            **updates: The updates of held values, by name.

        Raises:
            ReplyError: `absorb` must not be given an update.
        """

    def reply_bound(self, step: str, spec: Spec) -> float | None:
        """The largest magnitude of a number in the replies to a step.

        Secure aggregation chooses the range of its fixed-point numbers by it.

        Args:
            step: The name of the step.
            spec: The form of the rows.

        Returns:
            The bound; infinity if it grows with the scale of the rows or the labels; `None`: no
            larger than the entries of a model, 16 at most.
        """
        return None

    def items(self, which: Tensor) -> Tree:
        """The message that carries some of the items of a `HeldItems`.

        Args:
            which: The indices of the items.
        """
        raise NotImplementedError(f"{type(self).__name__} has no items")

    def start(self, clients: Clients) -> State:
        """The server's state before the first round.

        Args:
            clients: All clients, which may be asked for what the state needs
                (`foedus.core.clients`).
        """
        raise NotImplementedError(f"{type(self).__name__} does not define start")

    def round(self, clients: Clients, state: State) -> State:
        """One round: exchanges with the clients, and the server's new state.

        Args:
            clients: The clients that take part (`foedus.core.clients`): `clients.mean(self.step,
                w=w)`.
            state: The server's state.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define round")

    def readmit(self, state: State, ids: Tensor) -> State | None:
        """The server's state when clients that lost their own state come back as new ones.

        Args:
            state: The server's state.
            ids: The ids of these clients.

        Returns:
            The new state, or `None`: they cannot come back.
        """
        return None

    def begin_at(self, state: State, w: Tree) -> State:
        """The first state, with the model w of another run (`fd.run(start=...)`).

        Args:
            state: The state that `start` returned.
            w: The parameters of the other run's model.

        Raises:
            ConfigError: There is no single global model, or the shapes differ.
        """
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
        """The global model, which `fd.run` evaluates; `None`: there is none.

        Args:
            state: The server's state.
        """
        return None

    def outputs(self, client: Client, x: Tensor) -> Tensor:
        """If `personal`, the outputs of the client's own model.

        Args:
            client: The client, with its state.
            x: Rows.

        Returns:
            Raw outputs, (n, outputs).
        """
        raise NotImplementedError(f"{type(self).__name__} is not personal")

    def form(self, client: Client) -> Callable[[Tensor], Tensor]:
        """If `personal`, the client's own model as a function of rows.

        It can be exported if it is one of `foedus.export.forms`.

        Args:
            client: The client, with its state.
        """
        return partial(self.outputs, client)

    def row_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of each row, for evaluation.

        Args:
            outputs: Raw outputs of the model.
            y: Labels or targets.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define row_loss")


def client_step(
    step: Callable | None = None, *, batch: Literal["vmap", "whole", "loop"] = "vmap"
) -> Any:
    """Decorator that sets how a client step runs for many clients; without it, "vmap".

    Args:
        step: The client step, a method of an algorithm.
        batch: "vmap": the step is written for one client and batched by `torch.func.vmap`. "whole":
            the step may be given a whole batch, with a leading client dimension on all tensors of
            `client`; for steps that train by `descend`, which handles batches without vmap (vmap
            takes about a millisecond per round). "loop": one client after the other, for example to
            fit trees.

    Returns:
        The step, marked; or, without `step`, the decorator.

    Example:
        >>> class Largest(fd.Algorithm):
        ...     @fd.client_step(batch="loop")
        ...     def largest(self, client):
        ...         return {"x": client.data.x.max()}, None
        ...     def start(self, clients):
        ...         return fd.State()
        ...     def round(self, clients, state):
        ...         return fd.State(x=torch.stack([r["x"] for r in clients.gather(self.largest)]))
        >>> fed = fd.split(fd.load("digits"), "iid", clients=5)
        >>> fd.run(Largest(), fed, rounds=1, evaluate_every=0).state.x.shape
        torch.Size([5])
    """

    def mark(step: Callable) -> Callable:
        """Decorator for a client step: see `foedus.client_step`.

        Args:
            step: The client step, a method of an algorithm.

        Example:
            >>> class Fit(fd.Algorithm):
            ...     @fd.looped  # as @fd.client_step(batch="loop")
            ...     def fit(self, client):
            ...         return {}, None
            ...     @fd.stacked  # as @fd.client_step(batch="whole")
            ...     def train(self, client):
            ...         return {}, None
            >>> Fit.fit.batch, Fit.train.batch
            ('loop', 'whole')
        """
        step.__dict__["batch"] = batch
        return step

    return mark if step is None else mark(step)


def batch_of(step: Callable) -> str:
    """How a client step runs for many clients: "vmap", "whole" or "loop"."""
    return getattr(step, "batch", "vmap")


looped = client_step(batch="loop")
"""As `client_step(batch="loop")`."""

stacked = client_step(batch="whole")
"""As `client_step(batch="whole")`."""
