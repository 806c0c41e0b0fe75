"""Fitted preprocessing as transformers of scikit-learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MaxAbsScaler,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

from foedus.data.formats.frames import as_text, numbers_of
from foedus.data.preprocess import UNSEEN, Preprocessor, category_name, no_value
from foedus.errors import DataError

if TYPE_CHECKING:
    import pandas as pd


def column_transformer(preprocess: Preprocessor) -> ColumnTransformer:
    """A fitted `ColumnTransformer` of raw DataFrames: columns of numbers, then categories."""
    import pandas as pd

    if preprocess.names is None:
        raise DataError(
            "the columns of this data have no names, so there is no ColumnTransformer of them; "
            "preprocess.apply(x) takes arrays"
        )
    numbers = [name for name in preprocess.names if name not in preprocess.categories]
    texts = [name for name in preprocess.names if name in preprocess.categories]
    parts = []
    if numbers:
        parts.append(("numbers", Pipeline(_number_steps(preprocess)), numbers))
    if texts:
        steps = [("text", _function(texts_of_columns)), ("encode", _encoder(preprocess, texts))]
        parts.append(("categories", Pipeline(steps), texts))
    made = ColumnTransformer(parts, sparse_threshold=0, verbose_feature_names_out=False)
    # Fitted to one row for its structure; then the fitted numbers of the training rows are put in.
    row = {name: "" if name in texts else 0.0 for name in preprocess.names}
    made.fit(pd.DataFrame([row]))
    if numbers:
        _put_in(made.named_transformers_["numbers"].named_steps, preprocess)
    return made


def _number_steps(preprocess: Preprocessor) -> list[tuple[str, Any]]:
    filled = preprocess.fill is not None
    steps = [("number", _function(numbers_of_columns, complete=not filled))]
    if filled:
        # the rule that gave the values is unknown; fitted again, it would take the median
        steps.append(("impute", SimpleImputer(strategy="median")))
    if preprocess.divisor is not None:
        scalers = {"minmax": MinMaxScaler(), "robust": RobustScaler()}
        other = MaxAbsScaler() if preprocess.shift is None else StandardScaler()
        steps.append(("scale", scalers.get(preprocess.scaling or "", other)))
    if preprocess.clip is not None:
        steps.append(("clip", _function(np.clip, a_min=-preprocess.clip, a_max=preprocess.clip)))
    return steps


def _encoder(preprocess: Preprocessor, texts: list[str]) -> OneHotEncoder | OrdinalEncoder:
    known = [np.array(preprocess.categories[name], object) for name in texts]
    if preprocess.encode == "onehot":
        return OneHotEncoder(
            categories=known, handle_unknown="ignore", sparse_output=False,
            feature_name_combiner=category_name,
        )  # fmt: skip
    return OrdinalEncoder(
        categories=known, handle_unknown="use_encoded_value", unknown_value=int(UNSEEN)
    )


def _put_in(steps: Any, preprocess: Preprocessor) -> None:
    """Replace what was fitted to one made-up row by what was fitted to the training rows."""
    if preprocess.fill is not None:
        steps["impute"].statistics_ = np.array(preprocess.fill, np.float64)
    if preprocess.divisor is None:
        return
    scaler, width = steps["scale"], steps["number"].n_features_in_
    divisor = np.broadcast_to(np.float64(preprocess.divisor), width).copy()
    shift = np.zeros(width) if preprocess.shift is None else np.array(preprocess.shift, np.float64)
    match scaler:
        case MinMaxScaler():
            fitted = {"scale_": 1 / divisor, "min_": -shift / divisor}
            fitted |= {"data_min_": shift, "data_max_": shift + divisor, "data_range_": divisor}
        case RobustScaler():
            fitted = {"center_": shift, "scale_": divisor}
        case MaxAbsScaler():
            fitted = {"max_abs_": divisor, "scale_": divisor}
        case _:
            fitted = {"mean_": shift, "scale_": divisor, "var_": divisor**2}
    for name, value in fitted.items():
        setattr(scaler, name, value)


def _function(function: Any, **settings: Any) -> FunctionTransformer:
    return FunctionTransformer(function, kw_args=settings, feature_names_out="one-to-one")


# -- functions that scikit-learn lacks, defined here so that they can be pickled ------------------


def numbers_of_columns(frame: pd.DataFrame, complete: bool) -> np.ndarray:
    """Columns as numbers, from booleans or text, too; NaN where a value is missing.

    Args:
        frame: The columns.
        complete: Whether missing numbers are refused.
    """
    found = np.column_stack([numbers_of(frame[name], "the table") for name in frame.columns])
    if complete and np.isnan(found).any():
        row, column = np.argwhere(np.isnan(found))[0].tolist()
        raise no_value(row, str(frame.columns[column]))
    return found


def texts_of_columns(frame: pd.DataFrame) -> np.ndarray:
    """Columns as texts, `None` where a value is missing."""
    import pandas as pd

    out = np.empty(frame.shape, object)
    for place, name in enumerate(frame.columns):
        codes, values = pd.factorize(frame[name])
        texts = np.array([*(as_text(v) for v in values), None], object)
        out[:, place] = texts[codes]
    return out
