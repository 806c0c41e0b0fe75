"""Three sites with policies of their own, and a server that may say whatever it likes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Message

from foedus.engines.flower import deploy, messages
from foedus.engines.flower.client import SiteApp
from foedus.engines.flower.policy import Policy
from tests.engines.flower.grid import HereGrid
from tests.engines.flower.test_site import table, written

NAMES = ("north", "south", "west")
COLUMNS = ["age", "pulse", "score"]


def scaled(center: tuple = (50.0, 80.0, 3.0), scale: tuple = (10.0, 15.0, 1.0)) -> dict[str, Any]:
    """What a header says of a fitted scaling."""
    shift, divisor = ({"shape": [3], "values": list(values)} for values in (center, scale))
    about = {"names": COLUMNS, "categories": {}, "scaling": "standard", "encode": "onehot"}
    return {**about, "clip": None, "fill": shift, "shift": shift, "divisor": divisor}


class PolicyGrid(HereGrid):
    """Sites that answer as `deploy site` does; `change` may change a message on its way to one."""

    def __init__(self, policies: dict[int, Path]):
        self.policies = policies
        super().__init__({n: Policy.read(path).node_config() for n, path in policies.items()})
        self.app = self.answer
        self.change: Callable[[int, str, dict, bytes], tuple[dict, bytes] | None] = (
            lambda node, kind, header, body: None
        )

    def answer(self, message: Message, context: Any) -> Message:
        policy = Policy.read(self.policies[context.node_id])
        context.node_config = policy.node_config()
        kind, header = message.metadata.message_type, messages.header(message)
        new = self.change(context.node_id, kind, header, messages.body(message))
        if new is not None:
            message = sent(context.node_id, kind, *new, message.metadata.message_id)
        return SiteApp(policy)(message, context)

    def ask(self, node: int, kind: str, header: dict[str, Any], body: bytes = b"") -> dict:
        """What a site answers to one message: its header."""
        self.speak()
        return messages.header(self.app(sent(node, kind, header, body), self.contexts[node]))


def sent(node: int, kind: str, header: dict[str, Any], body: bytes, id_: str = "x") -> Message:
    message = Message(messages.content(header, body), dst_node_id=node, message_type=kind)
    message.metadata.__dict__["_message_id"] = id_
    return message


def federation(
    folder: Path, plan: str, names: tuple[str, ...] = NAMES, **changes: str
) -> PolicyGrid:
    """Sites of a folder of `deploy init`; `changes`: text of the policies, old="new" by line."""
    sites = {n: written(folder / "data", n, table(k, 60 + 20 * k)) for k, n in enumerate(names)}
    deploy.init(folder / "trial", sites, "outcome")
    (folder / "trial" / "federation.toml").write_text(plan)
    for name in names:
        path = folder / "trial" / "sites" / name / "policy.toml"
        lines = path.read_text().splitlines()
        for key, value in changes.items():
            section, _, entry = key.partition("__")
            at = lines.index(f"[{section}]") if f"[{section}]" in lines else None
            if at is None:
                lines += [f"[{section}]"]
                at = len(lines) - 1
            rest = [i for i in range(at + 1, len(lines)) if lines[i].startswith(f"{entry} =")]
            if rest:
                lines[rest[0]] = f"{entry} = {value}"
            else:
                lines.insert(at + 1, f"{entry} = {value}")
        path.write_text("\n".join(lines) + "\n")
        tomllib.loads(path.read_text())
    paths = {k + 1: folder / "trial" / "sites" / n / "policy.toml" for k, n in enumerate(names)}
    return PolicyGrid(paths)


def log(grid: PolicyGrid, node: int) -> list[dict]:
    path = Policy.read(grid.policies[node]).log
    return [json.loads(line) for line in path.read_text().splitlines()]
