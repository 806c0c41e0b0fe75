"""The four hospitals of the UCI heart-disease set as four files, as if each had its own.

    python examples/hospitals/split.py FOLDER          writes cleveland.csv, hungarian.csv,
                                                       switzerland.csv, va.csv

The set is found as `heart_disease_4sites.npz` in $FOEDUS_DATA. By Janosi, Steinbrunn, Pfisterer and
Detrano (UCI, CC BY 4.0).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from foedus.data.catalog import locate


def main(folder: Path) -> dict[str, Path]:
    """Write one file a hospital; a column `disease` says whether there is any (the usual binary
    task).
    """
    found = locate("heart_disease_4sites")
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with np.load(found, allow_pickle=False) as f:
        columns = [str(c) for c in f["feature_names"]]
        for number, name in enumerate(f["client_names"]):
            parts = []
            for part in ("train", "test"):
                own = f[f"client_{part}"] == number
                rows = pd.DataFrame(f[f"x_{part}"][own], columns=columns)
                parts.append(rows.assign(disease=(f[f"y_{part}"][own] > 0).astype(int)))
            paths[str(name)] = folder / f"{name}.csv"
            pd.concat(parts).to_csv(paths[str(name)], index=False)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, path in main(Path(sys.argv[1])).items():
        print(f"{name}: {path}")
