"""Four hospitals as four sites of a real federation, with TLS and keys, on this machine.

    python examples/hospitals/run.py FOLDER

writes one file for each hospital, creates a federation with `foedus deploy` and runs the four
algorithms of federation.toml. Then it compares, on each hospital's own test rows, the federated
models with models of each hospital alone and of all rows in one place.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression

from foedus.data.preprocess import Preprocessor
from foedus.engines.flower import deploy
from foedus.engines.flower.server import read_plan
from foedus.engines.flower.site import Schema, read_site

HERE = Path(__file__).parent


def main(folder: Path) -> pd.DataFrame:
    """Run everything and return the table of accuracies."""
    sys.path.insert(0, str(HERE))
    from split import main as split

    paths = split(folder / "data")
    trial = folder / "federation"
    deploy.init(trial, paths, label="disease")
    shutil.copy(HERE / "federation.toml", trial / "federation.toml")
    results = deploy.up(trial)
    plan = read_plan(trial / "federation.toml")
    rows = {}
    for name in plan.algorithms:
        said = json.loads((results / f"{name}.sites.json").read_text())
        rows[name] = {e["site"]: e["accuracy"] for e in said}
    made = Preprocessor.from_json(json.loads((results / "roster.json").read_text())["preprocess"])
    schema = Schema(plan.fit.columns, plan.classes)
    return table({**rows, **apart(paths, schema, made)}, paths, schema)


def apart(
    paths: dict[str, Path], schema: Schema, made: Preprocessor
) -> dict[str, dict[str, float]]:
    """What each hospital could do alone, and what one could do with all rows in one place; the same
    rows, the same preprocessing.
    """
    sites = {
        n: read_site({"data": str(p), "label": "disease", "client": i}, schema)
        for i, (n, p) in enumerate(paths.items())
    }
    data = {n: s.federation(made).data for n, s in sites.items()}
    x, y = (
        np.concatenate([getattr(d, part) for d in data.values()]) for part in ("x_train", "y_train")
    )
    found = {}
    for title, make in (
        ("logistic regression", lambda: LogisticRegression(max_iter=1000)),
        ("boosted trees", lambda: HistGradientBoostingClassifier(random_state=0)),
    ):
        found[f"alone, {title}"] = {
            n: make().fit(d.x_train, d.y_train).score(d.x_test, d.y_test) for n, d in data.items()
        }
        pooled = make().fit(x, y)
        found[f"pooled, {title}"] = {n: pooled.score(d.x_test, d.y_test) for n, d in data.items()}
    return found


def table(
    rows: dict[str, dict[str, float]], paths: dict[str, Path], schema: Schema
) -> pd.DataFrame:
    """Accuracies by hospital, and over the test rows of all."""
    config = {"label": "disease", "client": 0}
    size = {n: len(read_site({"data": str(p), **config}, schema).y_test) for n, p in paths.items()}
    frame = pd.DataFrame(rows).T[list(paths)]
    frame["all"] = sum(frame[n] * size[n] for n in paths) / sum(size.values())
    return frame.rename(columns={n: f"{n} ({k})" for n, k in size.items()}).round(3)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(main(Path(sys.argv[1])).to_string())
