"""The list of algorithms that must pass the checks of `foedus.testing`: one entry each, by name."""

from __future__ import annotations

import foedus as fd

ALGORITHMS: dict[str, fd.Algorithm] = {
    "FedAvg": fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16),
    "FedAvg, MLP, server momentum": fd.FedAvg(fd.MLP(12), lr=0.05, batch_size=16, server_momentum=0.5, server_lr=0.7),
    "FedAvg, Adam, clipping": fd.FedAvg(fd.Linear(), lr=0.01, optimizer="adam", steps=5, batch_size=8, clip=1.0),
    "FedProx": fd.FedProx(fd.Linear(), lr=0.1, mu=0.1, batch_size=16),
    "Scaffold": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16),
    "Scaffold, option 1": fd.Scaffold(fd.Linear(), lr=0.1, batch_size=16, option=1),
    "FedDyn": fd.FedDyn(fd.Linear(), lr=0.1, batch_size=16, alpha=0.1),
    "Independent": fd.Independent(fd.Linear(), lr=0.1, momentum=0.5, batch_size=16),
    "Central": fd.Central(fd.Linear(), lr=0.1, momentum=0.9, batch_size=16),
}

ENGINES = {"Local": fd.Local()}
