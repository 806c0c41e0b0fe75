"""The form of the replies to an exchange, computed without asking an untrusted client."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from foedus import wire
from foedus.base.spec import Spec
from foedus.base.tree import leaves
from foedus.core.algorithm import Algorithm
from foedus.core.exchange import Ask
from foedus.data.dataset import Data
from foedus.data.federation import Federation
from foedus.engines.local import Local, LocalSession
from foedus.storage.states import States
from foedus.wire.checks import Form, form_of


class Forms:
    """A client at the server with one row of zeros: it runs client steps to show the form of
    replies.

    A form is kept for each step and each form (and the integers) of its payload, so most steps run
    once.
    """

    def __init__(self, algorithm: Algorithm, spec: Spec, seed_key: Tensor):
        self.algorithm, self.spec, self.seed_key = algorithm, spec, seed_key
        self.known: dict[tuple, Form | None] = {}

    def of(self, ask: Ask, kind: int = 0) -> Form | None:
        """The form of a reply of a client of this kind; None if one row is not enough to compute
        it.
        """
        # which of several forms, say
        choices = tuple(t for t in leaves(ask.payload) if isinstance(t, int | str))
        sort = (ask.step, ask.quantise, form_of(ask.payload), tuple(ask.held), choices, kind)
        if sort not in self.known:
            try:
                self.session.states = States(1)  # it takes part for the first time
                self.session.kinds = torch.tensor([kind])
                ((_, reply, stacked),) = self.session.exchange(
                    replace(ask, ids=torch.tensor([0]), updates=[])
                )
                self.known[sort] = form_of(
                    wire.dequantise(reply) if ask.quantise else reply, stacked
                )
            # a step may need more than this row; then replies are compared with each other
            except Exception:
                self.known[sort] = None
        return self.known[sort]

    @cached_property
    def session(self) -> LocalSession:
        spec, one = self.spec, np.array([0, 1])
        x = np.zeros((1, *spec.shape), np.int64 if spec.integers else np.float32)
        if spec.classes:
            y = np.zeros((1, spec.steps) if spec.steps else 1, np.int64)
        else:
            y = np.zeros((1, spec.outputs) if spec.outputs > 1 else 1, np.float32)
        data = Data.from_arrays(x, y, classes=spec.classes)
        fed = Federation(
            data, np.array([0]), one, np.array([], np.int64), np.array([0, 0]), np.array([0])
        )
        return Local(batch=False).open(self.algorithm, fed, self.seed_key)
