"""Divide a data set among clients: a training row belongs to one client, and no client is empty.

There is a module for each kind of difference between clients: labels, sizes, features, targets,
concepts, tasks; and one for given divisions.
"""

from __future__ import annotations

from foedus.data.partition.base import apportion, deal_test_rows
from foedus.data.partition.concepts import drift
from foedus.data.partition.schemes import SCHEMES, scheme_options, split

__all__ = ["SCHEMES", "apportion", "deal_test_rows", "drift", "scheme_options", "split"]
