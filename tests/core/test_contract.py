"""The contract between algorithms and engines, held by walking the syntax trees of the packages."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import foedus
from foedus.core.session import Session
from foedus.engines.hostile import HostileSession
from foedus.engines.local import LocalSession
from foedus.engines.ray.engine import RaySession
from foedus.testing import EncodingSession

ROOT = Path(foedus.__file__).parent

CONDITIONS = {
    "aggregator", "conditions", "delays", "device", "faults", "free", "hidden", "holdings",
    "ledger", "longest", "mail", "measures", "network", "quantise", "seed_key", "session", "taking",
    "checks_replies", "trusted",
}  # fmt: skip
"""What engines and aggregators know of a run; algorithms must not read it from `clients`."""

FAMILIES = sorted(p for p in (ROOT / "algorithms").rglob("*.py") if p.name != "__init__.py")


def trees(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def engine_conditions(module: ast.Module) -> list[str]:
    """Reads of engine conditions from anything called `clients`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute)
        and node.attr in CONDITIONS
        and isinstance(node.value, ast.Name)
        and node.value.id == "clients"
    ]


def session_probes(module: ast.Module) -> list[str]:
    """`getattr(session, name, default)` and `hasattr(session, name)`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(module)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3))
        and any(word in ast.unparse(node.args[0]) for word in ("session", "inner"))
    ]


def test_an_algorithm_knows_no_engine():
    found = {
        str(path): bad
        for path, module in trees("algorithms", "papers")
        if (bad := engine_conditions(module))
    }
    assert not found
    spoilt = ast.parse(
        "def round(self, clients, state):\n    return clients.longest or clients.network.mail"
    )
    assert len(engine_conditions(spoilt)) == 2


def test_sessions_are_not_probed():
    found = {
        str(path): bad
        for path, module in trees("core", "engines", "aggregation")
        if (bad := session_probes(module))
    }
    assert not found
    assert (
        len(
            session_probes(
                ast.parse('getattr(self.session, "late", None)\nhasattr(session, "phase")')
            )
        )
        == 2
    )


def test_sessions_forward_nothing_blindly():
    """Wrappers implement the whole contract: no `__getattr__`, and every abstract method is
    there.
    """
    for path, module in trees("core", "engines"):
        names = {node.name for node in ast.walk(module) if isinstance(node, ast.FunctionDef)}
        assert "__getattr__" not in names, path
    for session in (LocalSession, HostileSession, RaySession, EncodingSession):
        assert issubclass(session, Session) and not inspect.isabstract(session), session
    with pytest.raises(TypeError, match="abstract"):
        Session()


def test_private_names_stay_in_their_module():
    for path, module in trees("core", "engines", "aggregation", "algorithms"):
        for node in ast.walk(module):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foedus."):
                private = [
                    a.name for a in node.names if a.name.startswith("_") and a.name != "_compiled"
                ]
                assert not private or private == ["__version__"], (path, private)


@pytest.mark.parametrize("path", FAMILIES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_are_short_and_rounds_read_like_their_papers(path):
    """At most 300 lines a file, the docstrings of its classes apart, which describe every setting
    on a line of its own; and 20 a `round`, its docstring apart.
    """
    text = path.read_text()
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    docstrings = [node.body[0] for node in classes if ast.get_docstring(node)]
    described = sum(doc.end_lineno - doc.lineno + 1 for doc in docstrings)
    assert len(text.splitlines()) - described <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == "round":
            body = node.body[1:] if ast.get_docstring(node) else node.body
            assert node.body[-1].end_lineno - body[0].lineno + 2 <= 20, (
                f"{path}: line {node.lineno}"
            )
