"""A data set: training and test rows, checked once so that nothing downstream has to."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foedus.base.spec import RawSpec, Spec
from foedus.base.steps import IGNORED
from foedus.data.fingerprint import checksum
from foedus.data.finite import first_not_finite
from foedus.data.labels import numbered, one_hot, refuse_one_hot, step_classes
from foedus.data.preprocess import Preprocessor
from foedus.data.unprepared import Unprepared
from foedus.errors import DataError

# A client's identity is folded into random keys, whose words have 32 bits.
_LARGEST_GROUP = 2**32 - 1


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """Training and test rows of one data set, converted and checked when it is made.

    `fd.load` makes one from a name, a file or a DataFrame, `Data.from_arrays` from arrays. With
    weights the objective is sum_i w_i loss_i / sum_i w_i; without them all w_i are 1.

    Args:
        name: The name of the set, for messages, tables and plots.
        x_train: Training features, shape [n, *shape]. int32 and int64 (such as token ids) are kept
            if both parts have them; everything else becomes float32. Models receive float32, except
            that a `torch.nn.Module` which takes integers (`nn.Embedding`) receives int64.
        y_train: Training labels. Classification: int64 [n], or [n, t] with one label for each step
            of a sequence and -100 at steps without a label. Regression: float32 [n] or [n, k].
        x_test: Test features; the test part may be empty.
        y_test: Test labels.
        classes: The number of classes; `None` for regression.
        class_names: The name of each class.
        groups_train: The group (an integer) of each training row, for the natural split.
        groups_test: The group of each test row.
        group_names: `group_names[g]` is the name of group `g`.
        scaling: The name of the scaling that was applied to the features.
        class_values: `class_values[k]` is class k as it was written in the source, if not the
            number k.
        preprocess: The fitted preprocessing that turned raw rows into these features.
        label: The column of the table that is predicted.
        weights_train: The weight of each training row (float64, not negative); `None`: all equal.
        weights_test: The weight of each test row; given if and only if `weights_train` is.
        raw: If given, features are raw rows of a table in float64 that `fd.prepare` still has to
            preprocess.

    Raises:
        DataError: Values are not finite, a label is out of range, or shapes and lengths do not
            match.

    Example:
        >>> x, y = np.eye(3), np.array([0, 1, 1])
        >>> fd.Data("tiny", x, y, x, y, classes=2).spec.outputs
        2
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    groups_train: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    group_names: tuple[str, ...] | None = None
    scaling: str | None = None
    class_values: tuple[Any, ...] | None = None
    preprocess: Preprocessor | None = None
    label: str | None = None
    weights_train: np.ndarray | None = None
    weights_test: np.ndarray | None = None
    raw: Unprepared | None = None
    origin: Mapping[str, Any] | None = dataclasses.field(default=None, init=False)
    """The section [data] of a file that loads these rows; `None` for rows from elsewhere."""

    def __post_init__(self) -> None:
        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        k = self.classes
        if k is not None and (isinstance(k, bool) or int(k) != k or k < 1):
            needed = "give a positive integer, or None for regression"
            raise DataError(f"classes of {self.name!r} is {k!r}; {needed}")
        for field in ("x_train", "x_test"):
            x, where = getattr(self, field), f"{field} of {self.name!r}"
            raw = self.raw
            put(field, _features(x, field, self.name) if raw is None else raw.checked(x, where))
        if self.x_train.dtype != self.x_test.dtype:
            kinds = {p.dtype.kind for p in (self.x_train, self.x_test) if len(p)}
            common = np.int64 if kinds == {"i"} else np.float32
            for field in ("x_train", "x_test"):
                put(field, getattr(self, field).astype(common, copy=False))
        if len(self.x_train) == 0:
            raise DataError(f"x_train of {self.name!r} has no rows; give at least one training row")
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"x_test of {self.name!r} has rows of shape {self.x_test.shape[1:]}, x_train of "
                f"shape {self.x_train.shape[1:]}; give both the same features"
            )
        labels: Callable[[Any, str, str, Any], np.ndarray] = _targets if k is None else _labels
        for part in ("train", "test"):
            field = f"y_{part}"
            put(field, labels(getattr(self, field), field, self.name, k))
            if (groups := getattr(self, f"groups_{part}")) is not None:
                checked = _groups(groups, f"groups_{part}", self.name, self.group_names)
                put(f"groups_{part}", checked)
            rows = len(getattr(self, f"x_{part}"))
            if (weights := getattr(self, f"weights_{part}")) is not None:
                put(f"weights_{part}", _weights(weights, f"weights_{part}", self.name))
            for field in (f"y_{part}", f"groups_{part}", f"weights_{part}"):
                value = getattr(self, field)
                given = rows if value is None else len(value)
                if given != rows:
                    raise DataError(
                        f"{field} of {self.name!r} has {given} rows but x_{part} has {rows}; give "
                        "one entry a row"
                    )
        if self.y_train.shape[1:] != self.y_test.shape[1:]:
            raise DataError(
                f"y_test of {self.name!r} has rows of shape {self.y_test.shape[1:]}, y_train of "
                f"shape {self.y_train.shape[1:]}; give both the same targets"
            )
        self._check_weights()
        for field in ("class_names", "group_names"):
            if getattr(self, field) is not None:
                put(field, tuple(str(name) for name in getattr(self, field)))
        for field in ("class_names", "class_values"):
            given = getattr(self, field)
            if given is not None and len(given) != self.classes:
                raise DataError(
                    f"{field} of {self.name!r} has {len(given)} names for {self.classes} classes; "
                    "give one a class"
                )

    def _check_weights(self) -> None:
        given = {"train": self.weights_train, "test": self.weights_test}
        if not len(self.x_test):  # no test rows
            given["test"] = None if given["train"] is None else np.zeros(0)
            object.__setattr__(self, "weights_test", given["test"])
        lacking = [part for part, weights in given.items() if weights is None]
        if len(lacking) == 1:
            raise DataError(
                f"weights_{lacking[0]} of {self.name!r} is missing, and the other part has "
                "weights; give both parts weights, or neither"
            )

    def with_weights(self, train: np.ndarray) -> Data:
        """The same rows with other training weights, which are not checked again.

        Args:
            train: The weight of each training row.
        """
        new = copy.copy(self)
        vars(new).pop("checksums", None)
        object.__setattr__(new, "weights_train", train)
        return new

    @classmethod
    def from_arrays(
        cls,
        x_train,
        y_train,
        x_test=None,
        y_test=None,
        *,
        classes: int | None = None,
        name: str = "data",
        class_names: Sequence[str] | None = None,
        groups=None,
        groups_test=None,
        group_names: Sequence[str] | None = None,
        scaling: str | None = None,
        weights=None,
        weights_test=None,
    ) -> Data:
        """A data set from arrays, CPU tensors or lists.

        Integer or boolean labels mean classification: the classes are 0 to the largest label or,
        where 0 does not occur or few of these numbers do, the distinct labels ({3, 7} are two
        classes). Integer `y` of shape (n, t) has a label for each step of a sequence: classes 0 to
        the largest, and -100 at steps without a label. Floating-point `y` without `classes` means
        regression.

        Contiguous arrays of float32, int32 or int64 are not copied: a memory map stays on disk. Do
        not modify such arrays while the data set is in use.

        Args:
            x_train: Training features, one row per example.
            y_train: Training labels or targets.
            x_test: Test features; without them the test part is empty.
            y_test: Test labels; given if and only if `x_test` is.
            classes: The number of classes; `None`: taken from the labels.
            name: The name of the set.
            class_names: The name of each class; without `classes` they also give the number of
                classes.
            groups: The group (an integer) of each training row, for the natural split.
            groups_test: The group of each test row.
            group_names: The name of each group.
            scaling: The name of the scaling that was applied to the features, for the record.
            weights: The weight of each training row, not negative.
            weights_test: The weight of each test row.

        Returns:
            The data set.

        Raises:
            DataError: The arrays do not fit together, or hold NaN, infinities or labels out of
                range.

        Example:
            >>> fd.Data.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 1]).classes
            2
        """
        x_train, y_train = np.asarray(x_train), np.asarray(y_train)
        if (x_test is None) != (y_test is None):
            raise DataError(
                f"{'x_test' if x_test is None else 'y_test'} of {name!r} is missing; give both "
                "x_test and y_test, or neither"
            )
        empty_x, empty_y = (np.zeros((0, *v.shape[1:]), v.dtype) for v in (x_train, y_train))
        x_test = empty_x if x_test is None else np.asarray(x_test)
        y_test = empty_y if y_test is None else np.asarray(y_test)
        values = None
        if classes is None and y_train.dtype.kind == "f" and one_hot(y_train):
            warnings.warn(
                f"y_train of {name!r} has {y_train.shape[1]} columns, of which one is 1 in each "
                "row: they are treated as regression targets; if they are classes, give "
                "y.argmax(1)",
                stacklevel=2,
            )
        numbers = classes is None and y_train.dtype.kind == "f" and y_train.ndim == 1
        if numbers and set(np.unique(y_train[:1000]).tolist()) == {0.0, 1.0} == {
            *np.unique(y_train)
        }:
            warnings.warn(
                f"y_train of {name!r} is 0.0 and 1.0: they are treated as regression targets; for "
                "two classes give integers",
                stacklevel=2,
            )
        if y_train.ndim == 2 and y_train.shape[1] == (classes or y_train.shape[1]):
            refuse_one_hot(y_train, "y_train", name)
        if classes is None and y_train.dtype.kind in "iubU" and y_train.size:
            if class_names is not None:
                classes = len(class_names)
            elif y_train.ndim > 1:
                classes = step_classes([y_train, y_test], name)
            else:
                text = y_train.dtype.kind == "U"
                alike = y_test.ndim == 1 and y_test.dtype.kind in ("U" if text else "iub")
                # otherwise an error below
                both = np.concatenate([y_train, y_test]) if alike else y_train
                codes, about = numbered(both, name)
                y_test = codes[len(y_train) :] if alike else y_test
                y_train = codes[: len(y_train)]
                classes, class_names = about["classes"], about.get("class_names")
                values = about.get("class_values")
        return cls(
            name, x_train, y_train, x_test, y_test, classes,
            None if class_names is None else tuple(class_names), groups, groups_test,
            None if group_names is None else tuple(group_names), scaling, values,
            weights_train=weights, weights_test=weights_test,
        )  # fmt: skip

    @cached_property
    def checksums(self) -> tuple[int, int]:
        """Checksums of training and test rows with their labels (`foedus.data.fingerprint`)."""
        found = checksum(self.x_train, self.y_train), checksum(self.x_test, self.y_test)
        if self.weights_train is None or self.weights_test is None:
            return found
        weights = (self.weights_train, self.weights_test)
        train, test = (checksum(w, start=c) for w, c in zip(weights, found, strict=True))
        return train, test

    @property
    def spec(self) -> Spec:
        """What a model has to know: the shape of a row, the number of classes and of outputs."""
        targets = 1 if self.y_train.ndim == 1 else self.y_train.shape[1]
        outputs = targets if self.classes is None else self.classes
        weighted = self.weights_train is not None
        shape = self.x_train.shape[1:]
        steps = self.y_train.shape[1] if self.classes and self.y_train.ndim == 2 else None
        if self.raw is not None:
            texts = self.raw.texts
            return RawSpec(
                shape, self.classes, outputs, weighted=weighted, steps=steps, texts=texts
            )
        return Spec(shape, self.classes, outputs, self.x_train.dtype.kind == "i", weighted, steps)

    def refuse_raw(self) -> None:
        """Raise `DataError` if the rows are raw, that is, not yet preprocessed."""
        if self.raw is not None:
            raise DataError(
                f"{self.name!r} holds raw rows (fit=False), which models cannot take; fit their "
                "preprocessing first: fed = fd.prepare(fed)"
            )

    def __repr__(self) -> str:
        kind = "regression" if self.classes is None else f"{self.classes} classes"
        kind += f" at each of {self.spec.steps} steps" if self.spec.steps else ""
        shape = "x".join(str(s) for s in self.x_train.shape[1:])
        text = f"{len(self.x_train)} + {len(self.x_test)} rows, {shape} features, {kind}"
        if self.groups_train is not None:
            text += f", {len(np.unique(self.groups_train))} groups"
        if self.weights_train is not None:
            text += ", weighted"
        made = f"scaling={self.scaling}" if self.raw is None else "raw"
        return f"Data({self.name}: {text}, {made})"


def _numeric(value, field: str, name: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "fiub":
        remedy = "encode text and ragged rows first"
        if field.startswith("y") and array.dtype.kind in "UO":
            remedy = "or of texts for classes: y.astype(str)"
        raise DataError(
            f"{field} of {name!r} has dtype {array.dtype}; give an array of numbers ({remedy})"
        )
    return array


def _features(value, field: str, name: str) -> np.ndarray:
    x = _numeric(value, field, name)
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise DataError(
            f"{field} of {name!r} has shape {x.shape}; give rows of at least one feature, shape "
            "[n, features]"
        )
    if x.dtype.kind == "i" and x.dtype.itemsize >= 4:
        return np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    # a number too large for float32 becomes infinite, which is reported next
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    bad = first_not_finite(x)
    if bad:
        count, row, column = bad
        raise DataError(
            f"{field} of {name!r} holds {count} NaN or infinite value{'s' * (count > 1)}, first "
            f"{x.reshape(len(x), -1)[row, column]} in row {row}, column {column}; remove those "
            "rows or fill them in (load has impute='median', fitted on training rows)"
        )
    return x


def _labels(value, field: str, name: str, classes: int) -> np.ndarray:
    y = _numeric(value, field, name)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise DataError(
            f"{field} of {name!r} has shape {y.shape}; give one label a row, shape [n], or one for "
            "each step of a sequence, shape [n, steps]"
        )
    if y.shape[1:] == (1,):
        raise DataError(
            f"{field} of {name!r} has shape {y.shape}; give one label a row, shape [n] (y[:, 0])"
        )
    whole = y if y.dtype.kind != "f" else np.where(np.isfinite(y), y, 0.5)
    wrong = (whole < 0) | (whole >= classes) | (whole != np.floor(whole))
    if y.ndim == 2:
        wrong &= y != IGNORED
    if wrong.any():
        row, *step = np.argwhere(wrong)[0].tolist()
        rows = (wrong.any(1) if step else wrong).sum()
        raise DataError(
            f"{field} of {name!r} holds label {y[(row, *step)]} in row {row}"
            f"{f', step {step[0]}' if step else ''} ({rows} such "
            f"rows), but there are {classes} classes: labels must be integers from 0 to "
            f"{classes - 1}{f', or {IGNORED} at steps that do not count' if step else ''}; "
            "renumber them or pass a larger classes="
        )
    if y.ndim == 2 and len(empty := np.flatnonzero((y == IGNORED).all(1))):
        raise DataError(
            f"{field} of {name!r} has no label at any step of row {empty[0]}: all are {IGNORED} "
            f"({len(empty)} such rows); leave these rows out"
        )
    return np.ascontiguousarray(y, dtype=np.int64)


def _targets(value, field: str, name: str, classes: None) -> np.ndarray:
    y = _numeric(value, field, name)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise DataError(
            f"{field} of {name!r} has shape {y.shape}; give targets of shape [n] or [n, k]"
        )
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(y, dtype=np.float32)
    bad = first_not_finite(y)
    if bad:
        raise DataError(
            f"{field} of {name!r} holds {bad[0]} NaN or infinite targets, first in row {bad[1]}; "
            "remove those rows"
        )
    return y


def _weights(value, field: str, name: str) -> np.ndarray:
    weights = np.asarray(value)
    if weights.ndim != 1 or weights.dtype.kind not in "fiub":
        raise DataError(
            f"{field} of {name!r} has dtype {weights.dtype} and shape {weights.shape}; give one "
            "number a row, not negative"
        )
    weights = np.ascontiguousarray(weights, dtype=np.float64)
    wrong = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(wrong):
        raise DataError(
            f"{field} of {name!r} holds {weights[wrong[0]]} in row {wrong[0]} ({len(wrong)} such "
            "rows); weights must be finite and not negative: correct them, or remove those rows"
        )
    return weights


def _groups(value, field: str, name: str, names: Sequence[str] | None) -> np.ndarray:
    groups = np.asarray(value)
    if groups.ndim != 1 or groups.dtype.kind not in "iu":
        raise DataError(
            f"{field} of {name!r} has dtype {groups.dtype} and shape {groups.shape}; give one "
            "integer a row"
        )
    limit = _LARGEST_GROUP if names is None else len(names) - 1
    if groups.size and not 0 <= groups.min() <= groups.max() <= limit:
        wrong = groups[np.flatnonzero((groups < 0) | (groups > limit))[0]]
        raise DataError(
            f"{field} of {name!r} holds group {wrong}; groups must be numbers from 0 to {limit}"
        )
    return np.ascontiguousarray(groups, dtype=np.int64)
