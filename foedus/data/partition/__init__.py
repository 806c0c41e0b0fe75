"""Divide a data set among clients: a training row goes to one client, and no client is empty.

A module for each kind of difference between clients: labels, sizes, features, targets, concepts,
tasks; and divisions that are given.
"""

from __future__ import annotations

from foedus.data.partition.base import apportion, deal_test_rows
from foedus.data.partition.concepts import drift
from foedus.data.partition.schemes import SCHEMES, scheme_options, split

__all__ = ["SCHEMES", "apportion", "deal_test_rows", "drift", "scheme_options", "split"]
