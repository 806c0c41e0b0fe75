"""A federation: a data set divided among clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Lt

from foedus.base import markup
from foedus.base.settings import Means, check_value
from foedus.base.spec import Spec
from foedus.base.steps import IGNORED, labels_of
from foedus.data.dataset import Data
from foedus.data.fingerprint import checksum, form
from foedus.errors import DataError, SplitError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_BARS = 40  # more clients than this are drawn as a heat map
_COLORS = 20  # more labels than this have no distinguishable colors
_NAMED = 10  # the largest number of client names in a description
_COLUMNS = 200  # a heat map of more clients averages neighbors
_LISTED = 12  # more clients, or labels, than this are not listed in a notebook
_HEAT = (40, 100)  # labels and clients of a heat map in a notebook, at most


def group_rows(owner: np.ndarray, clients: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each client, concatenated and ascending within a client, and the clients' offsets.

    Args:
        owner: The client of each row; -1 for a row that no client holds.
        clients: The number of clients.
    """
    offsets = np.zeros(clients + 1, np.int64)
    np.cumsum(np.bincount(owner[owner >= 0], minlength=clients), out=offsets[1:])
    order = np.argsort(owner, kind="stable")
    return order[len(owner) - offsets[-1] :].astype(np.int64, copy=False), offsets


@dataclass(frozen=True, eq=False, repr=False)
class Federation:
    """A data set divided among clients: which client holds which rows.

    `fd.split` and `Federation.from_clients` make one. The client at position p holds the training
    rows `rows[offsets[p]:offsets[p + 1]]` of `data`, and likewise its test rows. Clients keep their
    id through `select`, so results do not depend on their order.

    Args:
        data: The data set whose rows are divided.
        rows: Indices of training rows, client after client.
        offsets: Where each client's training rows begin in `rows`; one entry more than clients.
        test_rows: Indices of test rows, client after client; a client may have none.
        test_offsets: Where each client's test rows begin in `test_rows`.
        ids: The id of each client, unique.
        scheme: The name of the scheme that made the division.
        settings: The options of the scheme; arrays that describe clients are indexed by client id.

    Raises:
        SplitError: A row belongs to two clients, a client has no training rows, or ids repeat.

    Example:
        >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
        >>> len(fed), int(fed.sizes.sum())
        (10, 1346)
    """

    data: Data
    rows: np.ndarray
    offsets: np.ndarray
    test_rows: np.ndarray
    test_offsets: np.ndarray
    ids: np.ndarray
    scheme: str = "given"
    settings: Mapping[str, Any] = field(default_factory=dict)
    origin: str | None = field(default=None, init=False)
    """The sections [data] and [split] of a file that make this federation, if there are such."""

    def __post_init__(self) -> None:
        for name in ("rows", "offsets", "test_rows", "test_offsets", "ids"):
            value = np.ascontiguousarray(getattr(self, name), dtype=np.int64)
            object.__setattr__(self, name, value)
        if len(self.ids) == 0:
            raise SplitError("a federation needs at least one client")
        for kind, rows, offsets, total in (
            ("rows", self.rows, self.offsets, len(self.data.x_train)),
            ("test_rows", self.test_rows, self.test_offsets, len(self.data.x_test)),
        ):
            steps, n = len(self.ids) + 1, len(rows)
            rising = offsets.shape == (steps,) and (np.diff(offsets) >= 0).all()
            if not rising or offsets[0] != 0 or offsets[-1] != n:
                raise SplitError(f"offsets of {kind} must rise from 0 to {n} in {steps} steps")
            if len(rows) and not 0 <= rows.min() <= rows.max() < total:
                raise SplitError(f"{kind} holds a row outside 0 .. {total - 1}")
            if len(rows) and np.bincount(rows).max() > 1:
                twice = f"{kind} holds row {int(np.bincount(rows).argmax())} more than once"
                raise SplitError(f"{twice}; a row belongs to one client")
        if (self.sizes == 0).any():
            empty = f"client {int(self.ids[self.sizes.argmin()])} has no training rows"
            raise SplitError(f"{empty}; leave it out or give it some")
        if len(np.unique(self.ids)) != len(self.ids):
            raise SplitError("ids holds a client twice; each client has an id of its own")

    @classmethod
    def from_owners(
        cls,
        data: Data,
        owner: np.ndarray,
        test_owner: np.ndarray,
        ids: np.ndarray,
        scheme: str,
        settings: Mapping,
    ) -> Federation:
        """The federation in which row i belongs to the client at position `owner[i]`.

        Args:
            data: The data set.
            owner: The client position of each training row; -1: the row is not used.
            test_owner: The client position of each test row; -1: only in the common test set.
            ids: The id of each client.
            scheme: The name of the scheme that made the division.
            settings: The options of the scheme.

        Example:
            >>> data = fd.Data.from_arrays(np.eye(3), [0, 1, 1])
            >>> owner, nobody, ids = np.array([0, 1, 1]), np.zeros(0, int), np.arange(2)
            >>> fd.Federation.from_owners(data, owner, nobody, ids, "by hand", {}).sizes.tolist()
            [1, 2]
        """
        held, test = group_rows(owner, len(ids)), group_rows(test_owner, len(ids))
        return cls(data, *held, *test, ids, scheme, settings)

    @classmethod
    def from_clients(
        cls,
        clients: Mapping[str, Any] | Sequence[Any],
        *,
        test: Any = None,
        classes: int | None = None,
        name: str = "data",
        seed: int = 0,
        **reading: Any,
    ) -> Federation:
        """A federation from the rows that each site brings.

        A client brings one of these:

        - arrays `(x, y)`, or `(x, y, weights)` where rows have weights. They are used as they are:
          sparse matrices become dense, and several arrays are copied into one unless they are
          adjacent slices of one array, such as a memory map;
        - a torch `Dataset` or `DataLoader` of pairs (x, y);
        - a table: a DataFrame or a Hugging Face `Dataset`. Tables are read as by `fd.load`, and
          preprocessing is fitted on the rows of all sites together (`fit=False` leaves the rows
          raw, for `fd.prepare`).

        Args:
            clients: A dictionary of clients by name, or a list.
            test: The test rows of each client, in the form of `clients`; or a single tuple `(x, y)`
                or table of common test rows, dealt to clients in proportion to their training rows
                (of the same label, for classification); or the fraction of its rows that each
                client holds out.
            classes: The number of classes, for arrays; `None`: taken from the labels.
            name: The name of the data set.
            seed: The seed of the rows that are held out.
            **reading: Further arguments of `fd.load` for tables, such as `label`, `scale` and
                `impute`.

        Returns:
            The federation, with the clients in the given order.

        Raises:
            SplitError: The clients or their test rows are not in one of these forms.
            DataError: Rows cannot be used, or clients differ in columns or shapes.

        Example:
            >>> north, south = ([[0.0]], [0]), ([[1.0], [2.0]], [1, 0])
            >>> fed = fd.Federation.from_clients({"north": north, "south": south})
            >>> fed.names, fed.sizes.tolist()
            (('north', 'south'), [1, 2])
        """
        # a circular import at the top
        from foedus.data.clients import federation

        return federation(cls, clients, test, classes, name, seed, reading)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def sizes(self) -> np.ndarray:
        """The number of training rows of each client."""
        return np.diff(self.offsets)

    @property
    def test_sizes(self) -> np.ndarray:
        """The number of test rows of each client."""
        return np.diff(self.test_offsets)

    @property
    def spec(self) -> Spec:
        """What a model has to know of the data: see `Data.spec`."""
        return self.data.spec

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Checksums that tell runs on different federations apart; they are saved with each run.

        "clients" covers which client holds which rows; "training rows" and "test rows" cover the
        rows that are held with their labels, whichever client holds them. They are computed once;
        of very large arrays only a part is read (`foedus.data.fingerprint`). Whoever can guess all
        rows can confirm the guess with them.
        """
        data, (train, test) = self.data, self.data.checksums
        owners = (self.ids, self.offsets, self.rows, self.test_offsets, self.test_rows)

        def held(start: int, rows: np.ndarray, x: np.ndarray, y: np.ndarray) -> str:
            there = np.zeros(len(x), bool)
            there[rows] = True
            return f"{checksum(np.packbits(there), start=start ^ form(x, y)):08x}"

        return {
            "clients": f"{checksum(*owners):08x}",
            "training rows": held(train, self.rows, data.x_train, data.y_train),
            # models are evaluated on all of them, whether or not a client holds them
            "test rows": held(test, np.arange(len(data.x_test)), data.x_test, data.y_test),
        }

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the clients in their order; `None` if the data has no names."""
        called = self.data.group_names
        if called is None or self.scheme not in ("natural", "given"):
            return None
        return tuple(called[i] for i in self.ids)

    @property
    def called(self) -> list[str]:
        """The clients' names, or else their ids, as strings for tables and plots."""
        return [str(name) for name in (self.ids if self.names is None else self.names)]

    def client_columns(self) -> dict[str, Any]:
        """The first columns of a table of clients: their ids and any names."""
        names = {} if self.names is None else {"name": list(self.names)}
        return {"client": self.ids, **names}

    def client_rows(self, position: int) -> np.ndarray:
        """The training rows of the client at a position.

        Args:
            position: The client's position, 0 to `len(fed) - 1`; negative positions count from the
                end.

        Returns:
            Indices into the training part of `data`.
        """
        return self._segment(self.rows, self.offsets, position)

    def test_client_rows(self, position: int) -> np.ndarray:
        """The test rows of the client at a position.

        Args:
            position: The client's position, 0 to `len(fed) - 1`; negative positions count from the
                end.

        Returns:
            Indices into the test part of `data`.
        """
        return self._segment(self.test_rows, self.test_offsets, position)

    def _segment(self, rows: np.ndarray, offsets: np.ndarray, position: int) -> np.ndarray:
        if not -len(self) <= position < len(self):
            raise IndexError(f"client position {position} is outside 0 .. {len(self) - 1}")
        position = int(position) % len(self)
        return rows[offsets[position] : offsets[position + 1]]

    def select(self, positions: Sequence[int] | np.ndarray) -> Federation:
        """The federation of some of the clients, which keep their ids.

        Args:
            positions: Positions of the clients, in the wanted order, or a boolean mask.

        Raises:
            SplitError: No position is given, or one is out of range.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=10)
            >>> fed.select([3, 1]).ids.tolist()
            [3, 1]
        """
        positions = np.asarray(positions)
        if positions.dtype == bool:
            positions = np.flatnonzero(positions)
        if positions.size == 0:
            raise SplitError("positions is empty; select at least one client")
        if positions.dtype.kind not in "iu" or positions.min() < 0 or positions.max() >= len(self):
            allowed, given = f"integers from 0 to {len(self) - 1}", positions.tolist()[:5]
            raise SplitError(f"positions must be {allowed}, not {given}")
        rows, offsets = _take(self.rows, self.offsets, positions)
        test_rows, test_offsets = _take(self.test_rows, self.test_offsets, positions)
        held: dict[str, Any] = {"rows": rows, "offsets": offsets, "ids": self.ids[positions]}
        return replace(self, **held, test_rows=test_rows, test_offsets=test_offsets)

    def pool(self) -> Federation:
        """A federation of one client, id 0, with all rows in the order of the data set."""
        rows, test = np.sort(self.rows), np.sort(self.test_rows)
        ends = ([0, len(rows)], [0, len(test)])
        offsets, test_offsets, ids = map(np.array, (*ends, [0]))
        settings = dict(self.settings)
        return Federation(self.data, rows, offsets, test, test_offsets, ids, "pool", settings)

    def holdout(self, fraction: float = 0.2, seed: int = 0) -> Federation:
        """The same clients, each with some of its training rows held out as its test rows.

        A client gives round(fraction * rows) rows, drawn at random: at least one, but never its
        last (the only row of a client stays a training row). The draw depends on the seed and on
        the client's own rows alone. The new federation does not contain the test rows of this one.

        Args:
            fraction: The fraction of each client's training rows to hold out, above 0 and below 1.
            seed: The seed of the draw.

        Raises:
            SplitError: Every client has a single training row.

        Example:
            >>> fed = fd.split(fd.load("digits"), "iid", clients=10).holdout(0.2)
            >>> len(fed.rows), len(fed.test_rows)
            (1076, 270)
        """
        part = Annotated[float, Gt(0), Lt(1), Means("a number above 0 and below 1, such as 0.2")]
        check_value("fraction", fraction, part, SplitError)
        check_value("seed", seed, Annotated[int, Ge(0)], SplitError)
        data, sizes = self.data, self.sizes
        counts = np.minimum(np.maximum(np.rint(fraction * sizes).astype(np.int64), 1), sizes - 1)
        if not counts.any():
            raise SplitError(
                f"no row of {data.name!r} can be held out: each of the {len(self)} clients has a "
                "single training row; divide the data among fewer clients"
            )
        # one number per row of the data: order and number of clients do not matter
        lot = np.random.default_rng(seed).random(len(data.x_train))[self.rows]
        order = np.lexsort((lot, self.owners()))
        place = np.arange(len(order)) - np.repeat(self.offsets[:-1], sizes)
        drawn = np.zeros(len(self.rows), bool)
        drawn[order[place < np.repeat(counts, sizes)]] = True
        held = np.sort(self.rows[drawn])
        groups = None if data.groups_train is None else data.groups_train[held]
        weights = None if data.weights_train is None else data.weights_train[held]
        validation = replace(
            data, x_test=data.x_train[held], y_test=data.y_train[held], groups_test=groups,
            weights_test=weights,
        )  # fmt: skip
        # rows of the test part that is dropped
        settings = {k: v for k, v in self.settings.items() if k != "source_test_rows"}
        return Federation(
            validation, self.rows[~drawn], _ends(sizes - counts),
            np.searchsorted(held, self.rows[drawn]), _ends(counts), self.ids, self.scheme,
            {**settings, "validation": float(fraction), "validation_seed": int(seed)},
        )  # fmt: skip

    def with_mean_weight_one(self) -> Federation:
        """The same, with row weights scaled to mean 1 over the training rows of all clients.

        Client i's objective is then 1/n_i sum_j w_j loss_j, and the average of these objectives
        weighted by rows is the objective of all rows, sum_j w_j loss_j / sum_j w_j.
        """
        weights = self.data.weights_train
        if weights is None:
            return self
        mean, test = weights[self.rows].mean(), self.data.weights_test
        for part, above in (("training", mean > 0), ("test", test is None or test.any())):
            if not above and (part == "training" or len(self.data.x_test)):
                raise DataError(
                    f"the weights of all {part} rows of {self.data.name!r} are 0; give some rows a "
                    "weight above 0, or leave the weights out"
                )
        return replace(self, data=self.data.with_weights(weights / mean))

    def owners(self) -> np.ndarray:
        """The position of the client that holds each entry of `rows`."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def label_counts(self) -> np.ndarray:
        """The number of training rows by client and label, [clients, classes].

        Where each step of a row has a label, steps are counted in place of rows.

        Raises:
            DataError: The data set is for regression.

        Example:
            >>> fed = fd.split(fd.load("digits"), "labels", clients=10, per_client=3)
            >>> (fed.label_counts() > 0).sum(1).tolist()
            [3, 3, 3, 3, 3, 3, 3, 3, 3, 3]
        """
        if self.data.classes is None:
            raise DataError(f"{self.data.name!r} is a regression set: it has no labels to count")
        shape = (len(self), self.data.classes)
        owner, y = self.owners(), self.data.y_train[self.rows]
        if y.ndim == 2:
            owner, y = np.repeat(owner, (y != IGNORED).sum(1)), labels_of(y)
        cell = owner * self.data.classes + y
        return np.bincount(cell, minlength=shape[0] * shape[1]).reshape(shape)

    def summary(self) -> pd.DataFrame:
        """A table of clients: rows, test rows, and rows per label or mean and spread of y.

        Example:
            >>> fed = fd.split(fd.load("diabetes"), "iid", clients=5)
            >>> list(fed.summary().columns)
            ['client', 'rows', 'test_rows', 'mean_y', 'std_y']
        """
        import pandas as pd

        columns: dict[Any, Any] = self.client_columns()
        columns |= {"rows": self.sizes, "test_rows": self.test_sizes}
        if self.data.classes is None:
            mean, spread = self._target_moments()
            names = [""] if self.data.y_train.ndim == 1 else [f"_{j}" for j in range(mean.shape[1])]
            for j, suffix in enumerate(names):
                columns |= {f"mean_y{suffix}": mean[:, j], f"std_y{suffix}": spread[:, j]}
            return pd.DataFrame(columns)
        labels: list[Any] = list(self.data.class_names or range(self.data.classes))
        counts = pd.DataFrame(self.label_counts(), columns=labels)
        return pd.concat([pd.DataFrame(columns), counts], axis=1)

    def _target_moments(self) -> tuple[np.ndarray, np.ndarray]:
        y = self.data.y_train[self.rows].astype(np.float64).reshape(len(self.rows), -1)
        mean = np.add.reduceat(y, self.offsets[:-1]) / self.sizes[:, None]
        squares = (y - np.repeat(mean, self.sizes, axis=0)) ** 2
        return mean, np.sqrt(np.add.reduceat(squares, self.offsets[:-1]) / self.sizes[:, None])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the label distribution: bars, or a heat map for many clients or labels.

        For regression it plots the mean and the standard deviation of each client's targets.

        Args:
            ax: The axes to draw on; `None`: a new figure.

        Returns:
            The axes.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(7, 4), layout="constrained")[1]
        if self.data.classes is None:
            self._plot_targets(ax)
        elif len(self) <= _BARS and self.data.classes <= _COLORS:
            self._plot_bars(ax)
        else:
            self._plot_heat(ax)
        ax.set_title(f"{self.data.name}: {len(self)} clients, {self._how()}")
        return ax

    def _plot_bars(self, ax: Axes) -> None:
        import matplotlib

        classes = self.data.classes
        assert classes is not None  # regression has another plot
        counts, left = self.label_counts(), np.zeros(len(self))
        colors = matplotlib.colormaps["tab10" if classes <= 10 else "tab20"]
        names, places = self._class_names(classes), np.arange(len(self))
        for label, (name, n) in enumerate(zip(names, counts.T, strict=True)):
            ax.barh(places, n, left=left, color=colors(label), label=name, height=0.85)
            left += n
        ax.set_yticks(places, **self._client_ticks())
        ax.invert_yaxis()
        ax.set(xlabel=f"training {self._counted()}", ylabel="client")
        where: dict[str, Any] = {"bbox_to_anchor": (1.01, 1), "loc": "upper left"}
        columns = 1 + (classes > 10)
        ax.legend(title="label", **where, fontsize=8, frameon=False, ncols=columns)

    def _counted(self) -> str:
        """What `label_counts` counts."""
        return "steps" if self.data.spec.steps else "rows"

    def _class_names(self, classes: int) -> Sequence[str]:
        return self.data.class_names or [str(c) for c in range(classes)]

    def _client_ticks(self) -> dict[str, Any]:
        return {"labels": self.called, "fontsize": 9 if len(self) <= 20 else 6}

    def _plot_heat(self, ax: Axes) -> None:
        classes = self.data.classes
        assert classes is not None
        many, share = len(self) > _BARS, self._shares(_COLUMNS)
        look: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "cmap": "viridis"}
        image = ax.imshow(share.T, vmin=0, extent=(0, len(self), classes, 0), **look)
        ax.figure.colorbar(image, ax=ax, label=f"share of the client's {self._counted()}")
        if classes <= 30:
            ax.set_yticks(np.arange(classes) + 0.5, self._class_names(classes), fontsize=8)
        if not many:
            ax.set_xticks(np.arange(len(self)) + 0.5, **self._client_ticks())
        ax.set(xlabel="clients, ordered by their main label" if many else "client", ylabel="label")

    def _shares(self, most: int) -> np.ndarray:
        """The share of each label in the rows of clients, `[clients, labels]`; of many clients, in
        the order of their main labels and averaged over neighbors, at most `most`.
        """
        share = self.label_counts().astype(float)
        share /= share.sum(1, keepdims=True)
        if len(self) > _BARS:  # neighbors then hold alike labels, and averaging them loses little
            share = share[np.lexsort((share.max(1), share.argmax(1)))]
            starts, counts = _groups(len(share), most)
            share = np.add.reduceat(share, starts) / counts[:, None]
        return share

    def _plot_targets(self, ax: Axes) -> None:
        mean, spread = (m[:, 0] for m in self._target_moments())
        if len(self) <= _BARS:
            ax.errorbar(np.arange(len(self)), mean, spread, fmt="o", capsize=3)
            ax.set_xticks(np.arange(len(self)), **self._client_ticks())
            ax.set(xlabel="client", ylabel="y: mean and standard deviation")
        else:
            ax.scatter(self.sizes, mean, s=8, alpha=0.5)
            ax.set(xlabel="training rows of a client", ylabel="mean of y")

    def _how(self) -> str:
        plain = {k: v for k, v in self.settings.items() if isinstance(v, (int, float, str))}
        shown = [f"{k}={v}" for k, v in plain.items() if k not in ("clients", "seed")]
        return " ".join([self.scheme, *shown])

    def __repr__(self) -> str:
        kind = "regression" if self.data.classes is None else f"{self.data.classes} classes"
        kind += f" at each of {self.spec.steps} steps" if self.spec.steps else ""
        rows = f"{len(self.rows)} rows ({self.sizes.min()} to {self.sizes.max()} each)"
        return f"Federation({self.data.name}: {len(self)} clients, {self._how()}, {rows}, {kind})"

    def _repr_html_(self) -> str:
        """What notebooks show: a table of a few clients, a heat map of many."""
        title, *others = self.describe().splitlines()
        labels = self.data.classes
        parts = [markup.lines(others)]
        if len(self) <= _LISTED and (labels or 0) <= _LISTED:
            parts.append(self._listed())
        elif labels is not None:
            parts += self._heat(labels)
        return markup.box(title, *parts)

    def _listed(self) -> markup.Markup:
        """A row a client; counts of labels are shaded by their share of the client's rows."""
        table = self.summary()
        plain = table.shape[1] - (self.data.classes or 0)
        rows = []
        for row in table.itertuples(index=False):
            total = max(sum(row[plain:]), 1) if self.data.classes else 1
            cells = [f"{v:.4g}" if isinstance(v, float) else v for v in row[:plain]]
            rows.append([*cells, *(markup.Cell(n, n / total) for n in row[plain:])])
        return markup.table(list(table.columns), rows)

    def _heat(self, labels: int) -> list[markup.Markup]:
        share = self._shares(_HEAT[1]).T
        names = self._class_names(labels)
        if labels > _HEAT[0]:
            share, names = np.add.reduceat(share, _groups(labels, _HEAT[0])[0]), ()
        most = share.max()
        how = f"rows: labels; columns: clients{', by main label' if len(self) > _BARS else ''}"
        text = f"{how}; darkest: {most:.0%} of a client's {self._counted()}"
        return [markup.heat((share / most).tolist(), names, text), markup.lines([text])]

    def describe(self) -> str:
        """A few lines of text: what was divided, how, and how unequal the clients are."""

        def spread(numbers: np.ndarray, of: str = "") -> str:
            return f"{numbers.min()} to {numbers.max()}{of} (median {np.median(numbers):g})"

        lines = [
            f"{self.data.name}: {len(self)} clients, {self._how()}",
            f"training rows: {len(self.rows)}; a client has {spread(self.sizes)}",
            f"test rows: {len(self.test_rows)}; a client has {spread(self.test_sizes)}",
        ]
        if self.names is not None:
            more = f", ... ({len(self)} in all)" if len(self) > _NAMED else ""
            lines.insert(1, f"names: {', '.join(self.names[:_NAMED])}{more}")
        if self.data.weights_train is not None:
            weights = self.data.weights_train[self.rows]
            lines.append(f"weights of training rows: {weights.min():g} to {weights.max():g}")
        if self.data.classes is None:
            mean = self._target_moments()[0]
            lines.append(f"mean of y: {mean.min():.4g} to {mean.max():.4g} over clients")
        else:
            held = (self.label_counts() > 0).sum(1)
            lines.append(f"labels: a client holds {spread(held, f' of {self.data.classes}')}")
        return "\n".join(lines)


def _take(
    rows: np.ndarray, offsets: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The segments at `positions`, one after the other, without a loop over clients."""
    sizes = np.diff(offsets)[positions]
    ends = _ends(sizes)
    return rows[np.repeat(offsets[positions] - ends[:-1], sizes) + np.arange(ends[-1])], ends


def _ends(sizes: np.ndarray) -> np.ndarray:
    """The offsets of segments of these sizes."""
    return np.concatenate(([0], np.cumsum(sizes)))


def _groups(count: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """The first places and sizes of at most `most` groups of neighbors."""
    starts = np.linspace(0, count, min(count, most), endpoint=False).astype(int)
    return starts, np.diff([*starts, count])
