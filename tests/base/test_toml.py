"""Values as TOML: what is written is read as it was."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from foedus.base.toml import section


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.5),
        np.float32(0.25),
        np.int64(3),
        np.bool_(True),
        [np.int32(1), 2],
        0.1,
        "a\x7f",
    ],
    ids=repr,
)
def test_numbers_of_numpy_are_written_as_numbers(value):
    assert tomllib.loads(section("run", {"it": value}))["run"]["it"] == value


@pytest.mark.parametrize("name", ["a b", 'quo"te', "del\x7f", "tab\t", "ü"])
def test_keys_are_quoted(name):
    assert tomllib.loads(section("run", {name: 1})) == {"run": {name: 1}}
