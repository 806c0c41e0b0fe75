"""Where sites have names, tables and pictures show them."""

from __future__ import annotations

import matplotlib as mpl
import numpy as np
import pytest

import foedus as fd

mpl.use("Agg")
NAMES = ["Zagreb", "Basel", "Oslo"]


def sites(regression=False):
    rng = np.random.default_rng(0)
    parts = {}
    for name, n in zip(NAMES, (30, 20, 40), strict=True):
        x = rng.standard_normal((n, 3)).astype(np.float32)
        parts[name] = x, x[:, 0] if regression else (x[:, 0] > 0).astype(int)
    return fd.Federation.from_clients(parts, test=0.25)


@pytest.fixture(scope="module")
def fed():
    return sites()


def test_tables_of_clients(fed):
    run = fd.run(fd.FedAvg(fd.Linear()), fed, 1)
    for table in (fed.summary(), run.per_client()):
        assert table.columns[:2].tolist() == ["client", "name"]
        assert table.name.tolist() == NAMES
    turned = fed.select([2, 0])
    assert turned.called == ["Oslo", "Zagreb"]
    assert turned.summary().name.tolist() == ["Oslo", "Zagreb"]
    assert fd.run(fd.FedAvg(fd.Linear()), turned, 1).per_client().name.tolist() == [
        "Zagreb",
        "Oslo",
    ]  # in order of their ids


@pytest.mark.parametrize("regression", [False, True])
def test_ticks_of_pictures(regression):
    ax = sites(regression).plot()
    ticks = ax.get_xticklabels() if regression else ax.get_yticklabels()
    assert [t.get_text() for t in ticks] == NAMES


def test_a_description_names_the_clients(fed):
    assert "names: Zagreb, Basel, Oslo" in fed.describe()
    many = {f"site {k}": ([[float(k)]], [k % 2]) for k in range(12)}
    described = fd.Federation.from_clients(many).describe()
    assert "site 9, ... (12 in all)" in described and "site 10" not in described


def test_a_diagnosis_names_the_clients(fed):
    found = fd.diagnose(fed)
    for table in (found.per_client(), found.distances.per_client, found.sharing.per_client):
        assert table.name.tolist() == NAMES
    assert found.newton.columns["name"] == NAMES
    from foedus.diagnosis.figures import inline_panels

    drawn = "".join(str(panel) for panel in inline_panels(found))
    assert drawn.count("Basel") >= 3  # who holds what, label TV, W1


def test_pages_show_names(fed, tmp_path):
    fd.compare({"FedAvg": fd.FedAvg(fd.Linear())}, fed, 1).report(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert all(name in text for name in NAMES)


def test_clients_without_names_are_shown_by_number():
    fed = fd.split(fd.load("digits"), "iid", clients=3)
    assert fed.called == ["0", "1", "2"] and "names:" not in fed.describe()
    assert "name" not in fed.summary()
