"""foedus between real sites: a Flower ServerApp and ClientApp for every algorithm.

`foedus.engines.flower.client.app` is the ClientApp, `foedus.engines.flower.server.server_app(file)`
makes a ServerApp; `foedus deploy init` writes a folder with both. `fd.Flower` is the same on
loopback, as an engine of `fd.run`.
"""

from __future__ import annotations

import os

from foedus.errors import FoedusError


def require_posix(what: str) -> None:
    """Raise on systems without `fork`, process groups and file modes: Windows."""
    if not hasattr(os, "fork"):
        raise FoedusError(
            f"{what} does not run on this system: it forks processes, and keeps keys in files "
            "that only their user may read. Use Linux; on Windows, WSL has it"
        )
