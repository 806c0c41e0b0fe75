"""Flower's Grid without its processes: messages are answered at once, in this process, by the same
ClientApp.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import foedus as fd
from foedus.core.describe import to_config
from foedus.engines.flower.client import SiteApp
from foedus.engines.flower.server import greet
from foedus.engines.flower.session import Line, SitesEngine
from foedus.engines.flower.site import write_shard


class HereGrid:
    """Nodes by number, each with a node config; `spoil` may change an answer, or swallow it by
    returning None.
    """

    def __init__(self, configs: dict[int, dict[str, Any]], code: str | None = None):
        self.contexts = {
            n: Context(
                run_id=1,
                node_id=n,
                node_config=c,
                state=RecordDict(),
                run_config={"code": code} if code else {},
            )
            for n, c in configs.items()
        }
        self.app, self.box = SiteApp(), {}
        self.spoil: Callable[[Message, Message], Message | None] = lambda asked, answer: answer
        self.asked: list[Message] = []

    def speak(self) -> None:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def push_messages(self, messages: list[Message]) -> list[str]:
        ids = []
        for message in messages:
            id_ = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = id_
            self.asked.append(message)
            ids.append(id_)
            answer = self.spoil(
                message, self.app(message, self.contexts[message.metadata.dst_node_id])
            )
            if answer is not None:
                self.box[id_] = answer
        return ids

    def pull_messages(self, ids: list[str]) -> list[Message]:
        return [self.box.pop(i) for i in ids if i in self.box]

    def restart(self, node: int) -> None:
        """A SuperNode that was started again has nothing in memory."""
        self.contexts[node].state = RecordDict()


class Here:
    """`fd.Flower` with `HereGrid` in the place of processes: clients are dealt out to nodes in the
    same way.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        code: str | None = None,
        cache: bool = True,
        **options: Any,
    ):
        self.folder, self.nodes, self.options = folder, nodes, options
        configs = {}
        for n in range(nodes):
            (folder / str(n)).mkdir(parents=True, exist_ok=True)
            configs[n + 1] = {"shards": str(folder / str(n))}
        self.grid = HereGrid(configs, code)
        self.line: Line | None = None

    def open(self, algorithm: fd.Algorithm, fed: fd.Federation, seed_key: torch.Tensor) -> Any:
        if algorithm.pooled:
            return fd.Local().open(algorithm, fed, seed_key)
        name, order = uuid.uuid4().hex, np.argsort(fed.ids, kind="stable")
        for n in range(self.nodes):
            if len(mine := order[n :: self.nodes]):
                write_shard(self.folder / str(n) / f"{name}.npz", fed.select(mine))
        low, high = seed_key.tolist()
        self.line = Line(self.grid, {}, common={"shard": name}, **{"timeout": 0.3, **self.options})
        used = list(self.grid.contexts)[: len(fed)]
        question = {
            "shard": name,
            "algorithm": to_config(algorithm),
            "seed": low | high << 32,
            "session": "",
        }
        said = greet(self.line, used, question)
        assert len(said) == len(used)
        return SitesEngine(self.line).open(algorithm, fed, seed_key)
