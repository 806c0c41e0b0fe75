"""A worker process: it holds some of the clients and answers for them, with the Local engine.

Every method returns (True, result) or (False, error): errors are returned with their own type.
Results are packed (`foedus.engines.ray.shards.pack`).
"""

from __future__ import annotations

import pickle
import platform
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from foedus.base import tree
from foedus.base.tree import Tree
from foedus.core.algorithm import Algorithm
from foedus.core.delays import SomeDelays
from foedus.core.exchange import Ask
from foedus.core.session import add_up
from foedus.data.federation import Federation
from foedus.engines.local import Local, LocalSession
from foedus.engines.ray.shards import pack, packed_sum, unpack
from foedus.errors import ConfigError, FoedusError
from foedus.storage.spill import nbytes
from foedus.storage.states import States

Answer = tuple[bool, Any]
_CHUNK = 1 << 20
"""Replies are sent together up to this number of bytes: a message for each small reply would take
longer.
"""


def _answers(method: Callable) -> Callable:
    @wraps(method)
    def answer(self: Worker, *args: Any) -> Answer:
        try:
            return True, method(self, *args)
        except Exception as error:
            return False, _portable(error)

    return answer


def _portable(error: Exception) -> Exception:
    """The error itself, if it can be sent; an unexpected one gets its traceback as a note."""
    if not isinstance(error, FoedusError):
        error.add_note("In a worker:\n" + "".join(traceback.format_exception(error)).rstrip())
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = getattr(error, "__notes__", [])
        return plain


class Worker:
    """Some of the clients of one run after another."""

    session: LocalSession

    @_answers
    def open(
        self,
        algorithm: Algorithm,
        fed: Federation,
        seed_key: Any,
        threads: int,
        state_memory: int | None,
        nodes: list[type[tree.Node]],
        local: dict[str, Any] | None = None,
    ) -> None:
        """Load some clients.

        local: settings of `foedus.engines.local.Local`; its device is checked here, where it is.
        """
        torch.set_num_threads(threads)
        # the user's own types of tree nodes, which no import has registered here
        for node in nodes:
            if node.__name__ not in tree.NODES:
                tree.node(static=node.tree_static)(node)
        try:
            engine = Local(**local or {})
        except ConfigError as error:
            raise ConfigError(f"a Ray worker on {platform.node()}: {error}") from error
        self.session = LocalSession(engine, algorithm, fed, unpack(seed_key))
        self.state_memory = state_memory
        self._forget()

    def _forget(self) -> None:
        many = len(self.session.ids)
        self.session.states = States(many, self.state_memory)
        self.changed, self.copied = torch.zeros(many, dtype=torch.bool), 0

    @_answers
    def release(self) -> None:
        """Release the clients."""
        del self.session

    @_answers
    def delay(self, delays: Any, longest: int) -> None:
        """Set the delays of the clients' messages (`fd.Delayed`)."""
        up, down = unpack(delays)
        self.session.delay(SomeDelays(up, down, longest))

    # -- exchanges ---------------------------------------------------------------------------------

    def _asked(self, ask: dict[str, Any], payload: Tree) -> Ask:
        """The exchange; marks its clients' states as changed."""
        received = Ask(**unpack(ask), payload=unpack(payload))
        self.changed[torch.searchsorted(self.session.ids, received.ids)] = True
        return received

    @_answers
    def reduce(self, ask: dict[str, Any], payload: Tree, weights: Any) -> Any:
        """The weighted sum of the replies, in double precision; the number of clients that replied,
        and their bytes.
        """
        session = self.session
        return packed_sum(
            add_up(session, self._asked(ask, payload), unpack(weights), session.algorithm.remedy)
        )

    def exchange(self, ask: dict[str, Any], payload: Tree) -> Iterator[Answer]:
        """The replies, in lists of (ids, reply, whether stacked)."""
        try:
            chunk, held = [], 0
            for batch in self.session.exchange(self._asked(ask, payload)):
                chunk.append(pack(batch))
                held += nbytes(batch)
                if held >= _CHUNK:
                    yield True, chunk
                    chunk, held = [], 0
            yield True, chunk
        except Exception as error:
            yield False, _portable(error)

    @_answers
    def repeat(self, ask: dict[str, Any], payload: Tree) -> None:
        """Repeat an exchange for its states only; its replies are already known."""
        for _ in self.session.exchange(self._asked(ask, payload)):
            pass

    # -- evaluation of personal models -------------------------------------------------------------

    @_answers
    def evaluate_own(self, metrics: Sequence[str] = ()) -> Any:
        return pack(self._evaluated(self.session.evaluate_own, metrics))

    @_answers
    def evaluate_global(self, rows: Any) -> Any:
        return pack(self._evaluated(self.session.evaluate_global, *unpack(rows)))

    def _evaluated(self, evaluate: Callable, *args: Any) -> Any:
        """Clients that have not taken part yet get their first state by it."""
        before = self.session.states.slot >= 0
        found = evaluate(*args)
        self.changed |= (self.session.states.slot >= 0) & ~before
        return found

    # -- copies of the states, for the process that replaces this one if it is lost ---------------

    @_answers
    def copy(self, whole: bool) -> Any:
        """The states: all of them, or those that may have changed since the last copy if that is
        much less.
        """
        states = self.session.states
        changed = torch.nonzero(self.changed & (states.slot >= 0)).flatten()
        self.changed.zero_()
        self.copied += len(changed)
        if whole or self.copied > 2 * states.used:
            self.copied = 0
            return pack({"saved": states.save()})
        # put back in this order, new ones get the places that they have here
        changed = changed[states.slot[changed].argsort()]
        if states.tensors is not None:
            return pack({"positions": changed, "states": states.get_many(changed)})
        return pack({"separate": {p: states.get(p) for p in changed.tolist()}})

    @_answers
    def restore(self, *copies: Answer) -> None:
        """Restore the states from copies, the oldest first."""
        for _, copy in copies:
            copy = unpack(copy)
            if "saved" in copy:
                self._forget()
                self.session.states.load(copy["saved"])
            elif "states" in copy:
                self.session.states.put_many(copy["positions"], copy["states"])
            else:
                for p, state in copy["separate"].items():
                    self.session.states.put(p, state)
