"""Model cards: read as Markdown, and compared with what is measured otherwise."""

from __future__ import annotations

import tomllib
import types
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

import foedus as fd
from foedus.core import facts as facts_module
from foedus.core.card import FIRST_LINE, card_path
from foedus.core.facts import Facts, SiteFacts
from foedus.core.history import History
from foedus.storage import checkpoint as files
from foedus.version import __version__
from tests.export.families import ONE_VALUE, THREE, run

HOSTILE = "a|b`c\n# <script>x</script> *y* [z](http://evil.example) \\ www.evil.example ![i](j)"
SAFE = HOSTILE.replace("\n", "\\n")


def tokens(card: str) -> list:
    return MarkdownIt("commonmark").enable("table").parse(card)


def text_of(token) -> str:
    """The text of one line; markup would be another kind of token."""
    assert {child.type for child in token.children} <= {"text", "text_special"}, token.content
    return "".join(child.content for child in token.children)


def tables(card: str) -> list[list[list[str]]]:
    """The cells of all tables."""
    found, cell = [], False
    for token in tokens(card):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            cell = True
        elif token.type == "inline" and cell:
            found[-1][-1].append(text_of(token))
            cell = False
    assert all(len({len(row) for row in table}) == 1 for table in found)
    return found


def about(card: str) -> dict[str, str]:
    return dict(tables(card)[0])


def code(card: str, language: str) -> str:
    (block,) = [t.content for t in tokens(card) if t.type == "fence" and t.info == language]
    return block


def section(card: str, title: str) -> str:
    return card.split(f"\n## {title}\n\n")[1].split("\n\n## ")[0].rstrip("\n")


def patients(rows: int, seed: int, site: float) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows).astype(float),
            HOSTILE: rng.choice(["no", HOSTILE], rows),
            "pressure": rng.normal(130, 20, rows),
        }
    )
    risk = frame.age + 30 * (frame[HOSTILE] == "no") + rng.normal(0, site, rows)
    frame["out|come"] = np.where(risk > 75, "ill`", "well")
    frame.loc[::9, "pressure"] = np.nan
    return frame


SITES = {"north": (120, 1, 1.0), HOSTILE: (80, 2, 40.0), "small": (40, 3, 1.0)}
TESTED = {"north": 50, HOSTILE: 50, "small": 10}


@pytest.fixture(scope="module")
def trained() -> fd.Run:
    sites = {name: patients(*how) for name, how in SITES.items()}
    tests = {
        name: patients(50 if name != "small" else 10, 9, how[2]) for name, how in SITES.items()
    }
    fed = fd.Federation.from_clients(
        sites, label="out|come", impute="median", test=tests, name="a `set`", clip=2.5
    )
    made = fd.run(fd.FedAvg(fd.Linear(), lr=0.3), fed, rounds=4, seed=7)
    made.notes.append("went on from a *damaged* checkpoint")
    return made


def test_what_the_model_is(trained):
    card = trained.card("there/model.safetensors")
    found = about(card)
    assert found == {
        "": "",
        "algorithm": "FedAvg",
        "data": "a `set`",
        "training rows": "240",
        "test rows": "110",
        "sites": f"3: north, {SAFE}, small",
        "label": "out|come",
        "classes": "2: ill`, well",
        "rounds": "4",
        "seed": "7",
        "foedus": __version__,
    }
    assert section(card, "Notes of the run") == r"- went on from a \*damaged\* checkpoint"
    assert section(card, "Privacy") == "None: the server saw every reply."
    headings = [t for t in tokens(card) if t.type == "heading_open"]
    assert [t.tag for t in headings] == ["h1", *["h2"] * 8]  # none that a name has made
    assert not [t for t in tokens(card) if t.type == "html_block"][1:]  # but the first line


def test_columns(trained):
    found = trained.preprocess
    _, *rows = tables(trained.card())[3]
    age, text, pressure = rows
    kind = f"category: {SAFE}, no"
    assert text == [SAFE, kind, "none of the categories", "a column of 0 and 1 each"]
    assert age[:3] == ["age", "number", f"{found.fill[0]:.4g}"]
    assert age[3] == f"(x - {found.shift[0]:.6g}) / {found.divisor[0]:.6g}, clipped at 2.5"
    assert pressure[3] == f"(x - {found.shift[1]:.6g}) / {found.divisor[1]:.6g}, clipped at 2.5"


def test_quality_by_site(trained):
    """Against the model's own answers about the raw rows of each site."""
    card = trained.card()
    _, last, sites, *_ = tables(card)
    assert dict(last) == {
        "after round 4": "",
        "loss": f"{trained.history.loss.iloc[-1]:.4g}",
        "accuracy": f"{trained.history.accuracy.iloc[-1]:.4g}",
    }
    assert sites[0] == ["site", "training rows", "test rows", "loss", "accuracy"]
    right = {}
    for name, (rows, _, noise) in SITES.items():
        frame = patients(TESTED[name], 9, noise)
        right[name] = (trained.model.predict(frame) == frame["out|come"]).mean()
        shown = next(row for row in sites if row[0] == name.replace("\n", "\\n"))
        assert shown[1:3] == [str(rows), str(len(frame))]
        assert shown[4] == f"{right[name]:.4g}"
    worst = min(right, key=right.get)
    assert worst == HOSTILE and right[worst] < min(right["north"], right["small"])
    lines = [text_of(t) for t in tokens(card) if t.type == "inline" and "worst" in t.content]
    assert lines == [f"The worst site is {SAFE}, with accuracy {right[worst]:.4g}."]


def test_cost(trained):
    last = trained.history.iloc[-1]
    assert dict(tables(trained.card())[4][1:]) == {
        "rounds": "4",
        "bytes from sites": f"{last.bytes_up:,.0f}",
        "bytes to sites": f"{last.bytes_down:,.0f}",
        "messages from sites": "12",
        "seconds": f"{last.seconds:,.2f}",
    }


def test_replies_left_out_are_counted():
    made = run("fedavg-linear")
    records = History(
        [
            {**row, "dropped": n, "auc_worst_client": 3}
            for row, n in zip(made.records.rows, (0, 2, 0, 3), strict=True)
        ]
    )
    other = fd.Run(made.algorithm, made.spec, made.state, records, made.settings, facts=Facts())
    _, last, cost = tables(other.card())
    assert [row[0] for row in last[1:]] == ["loss", "accuracy"]  # of ids of clients nothing
    assert cost[-1] == ["replies left out", "5"]


def test_settings_can_be_read(trained):
    """The algorithm that they describe is that of the run."""
    found = tomllib.loads(code(trained.card(), "toml"))

    def with_none(value):
        if isinstance(value, dict):
            return {k: with_none(v) for k, v in value.items()}
        return None if value == "none" else value

    assert with_none(found["algorithm"]) == trained.settings["algorithm"]
    assert found["run"] | {"rounds": 4, "seed": 7, "participation": 1.0} == found["run"]
    assert found["federation"]["data"] == "a `set`"


def test_the_lines_of_python_work(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    trained.save('it\'s a "model".safetensors')
    card = Path('it\'s a "model".md').read_text()
    rows = patients(12, 4, 1.0)
    lines = code(card, "python")
    assert len(lines.splitlines()) == 3
    exec(lines, {"rows": rows})
    assert capsys.readouterr().out == f"{trained.model.predict(rows)}\n"


def test_the_lines_of_python_for_arrays_and_own_models(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, model in (("fedavg-linear", "model"), ("independent", "model_of(0)")):
        made, x = run(name), THREE.data.x_test
        made.save("run.safetensors")
        lines = code(Path("run.md").read_text(), "python")
        assert f").{model}\n" in lines
        exec(lines, {"rows": x})
        want = made.model_of(0) if name == "independent" else made.model
        assert capsys.readouterr().out == f"{want.predict(x)}\n"
    made = run("fedavg-module")
    made.save("run.safetensors")
    lines = code(made.card(), "python")
    assert lines.count('import_from=["MODULE"]') == 1
    exec(lines.replace("MODULE", "tests.export.families"), {"rows": x})
    assert capsys.readouterr().out == f"{made.model.predict(x)}\n"


# -- saved and loaded ------------------------------------------------------------------------------


def test_a_loaded_run_gives_the_same_card(trained, tmp_path):
    trained.save(tmp_path / "m.safetensors")
    card = (tmp_path / "m.md").read_text()
    assert card == trained.card("m.safetensors") and card.startswith(FIRST_LINE)
    assert fd.Run.load(tmp_path / "m.safetensors").card("m.safetensors") == card


def test_without_a_card(trained, tmp_path):
    trained.save(tmp_path / "m.safetensors", card=False)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]
    card = fd.Run.load(tmp_path / "m.safetensors").card()
    assert tables(card)[2][0] == ["site", "training rows", "test rows"]
    assert tables(card)[2][1] == ["north", "120", "50"]
    unknown = section(card, "What is not known")
    assert "- Scores by site: they were not measured when the run was saved." in unknown


def test_a_file_that_is_no_card_is_kept(trained, tmp_path):
    notes = tmp_path / "m.md"
    notes.write_text("my own notes")
    with pytest.warns(UserWarning, match=r"m\.md is not a model card, so it is kept"):
        trained.save(tmp_path / "m.safetensors")
    assert notes.read_text() == "my own notes"
    notes.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.save(tmp_path / "m.safetensors")
        notes.write_text(FIRST_LINE + "\nold")
        trained.save(tmp_path / "m.safetensors")
    assert "old" not in notes.read_text().split("\n")
    (tmp_path / "n.md").mkdir()
    with pytest.warns(UserWarning, match="is not a model card"):
        trained.save(tmp_path / "n.safetensors")


@pytest.mark.parametrize(
    ("file", "card"),
    [
        ("m.safetensors", "m.md"),
        ("m.foedus", "m.md"),
        ("m", "m.md"),
        ("a.b.safetensors", "a.b.md"),
        ("lr-0.1", "lr-0.1.md"),  # which has no ending
        ("m.md", "m.md.md"),
    ],
)
def test_where_it_is(file, card):
    assert card_path(Path("there") / file) == Path("there") / card


def test_half_written_cards_are_swept_away(trained, tmp_path):
    left = tmp_path / ".m.md.abc.part"
    left.write_text("half")
    trained.save(tmp_path / "m.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.md", "m.safetensors"]


def test_comparisons_write_runs_alone(tmp_path):
    comparison = fd.compare({"A": fd.FedAvg(fd.Linear())}, THREE, 1, seeds=2)
    comparison.save(tmp_path)
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors"] * 2


@pytest.mark.parametrize(
    "change",
    [
        [],
        {"sites": [{"client": "0"}]},
        {"sites": [{"client": 0, "name": 3}]},
        {"sites": [{"client": 0, "more": 3}]},
        {"sites": {"client": 0}},
        {"rows": "many"},
        {"label": ["y"]},
        {"more": 1},
    ],
)
def test_damaged_facts_are_noticed(change, trained, tmp_path, monkeypatch):
    write = files.write

    def written(path, trees, meta, *more):
        return write(path, trees, {**meta, "facts": change}, *more)

    monkeypatch.setattr(files, "write", written)
    trained.save(tmp_path / "m.safetensors", card=False)
    with pytest.raises(fd.CheckpointError, match="is damaged"):
        fd.Run.load(tmp_path / "m.safetensors")


def test_a_run_of_an_earlier_version(trained, tmp_path, monkeypatch):
    write = files.write
    monkeypatch.setattr(
        files, "write", lambda path, trees, meta: write(path, trees, {**meta, "facts": {}})
    )
    trained.save(tmp_path / "m.safetensors", card=False)
    card = fd.Run.load(tmp_path / "m.safetensors").card()
    found = about(card)
    assert (found["foedus"], found["label"], found["test rows"]) == ("unknown",) * 3
    assert found["training rows"] == "240" and found["sites"] == "3"
    assert "By site: unknown." in section(card, "Quality")


# -- other runs ------------------------------------------------------------------------------------


def test_own_models_by_site():
    """As `per_client` gives them, without an engine."""
    for name in ("independent", "fedres", "fedres-mlp"):
        made = run(name)
        want, card = made.per_client(), made.card()
        metric = "accuracy" if made.spec.classes else "mse"
        shown = next(t for t in tables(card) if t[0][0] == "site")
        assert [row[0] for row in shown[1:]] == [f"client {i}" for i in want.client]
        assert [row[4] for row in shown[1:]] == [f"{v:.4g}" for v in want[metric]]
        assert "on its own test rows, by its own model:" in card


def test_own_models_of_clients_in_another_order():
    fed = THREE.select([2, 0, 1])
    made = fd.run(fd.Independent(fd.Linear(), lr=0.1), fed, rounds=2)
    want = made.per_client()
    assert len(set(want.accuracy)) == len(set(want.test_rows)) == 3
    shown = next(t for t in tables(made.card()) if t[0][0] == "site")[1:]
    assert [row[0] for row in shown] == ["client 0", "client 1", "client 2"]
    assert [row[1] for row in shown] == [str(len(THREE.client_rows(i))) for i in range(3)]
    assert [row[2] for row in shown] == [str(n) for n in want.test_rows]
    assert [row[4] for row in shown] == [f"{v:.4g}" for v in want.accuracy]


def test_numbers_to_predict():
    made = run("fedavg-linear-values")
    card, each = made.card(), made.per_client()
    assert about(card)["predicts"] == "numbers"
    worst = each.loc[each.mse.idxmax()]
    line = f"The worst site is client {worst.client:.0f}, with mean squared error {worst.mse:.4g}."
    assert line in section(card, "Quality")
    assert "None by name: rows are arrays of shape 6." in section(card, "Columns")


def test_what_was_not_measured():
    quiet = fd.run(fd.FedAvg(fd.Linear()), THREE, rounds=1, evaluate_every=0)
    unknown = section(quiet.card(), "What is not known")
    assert r"- Scores by site: the run was not evaluated (evaluate\_every=0)." in unknown
    assert "- How good the model is: the run was not evaluated." in unknown
    assert "Not measured." in section(quiet.card(), "Quality")
    fed = fd.Federation.from_clients([(np.eye(3), [0, 1, 1]), (np.eye(3), [1, 0, 1])])
    untested = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=1)
    assert "- Scores by site: there are no test rows." in untested.card()


def test_an_evaluation_that_fails_does_not_keep_a_run_from_being_saved(tmp_path, monkeypatch):
    made = fd.run(fd.FedAvg(fd.Linear()), THREE, rounds=1)

    def fails(self):
        raise ZeroDivisionError("of the user's own")

    monkeypatch.setattr(fd.Run, "per_client", fails)
    made.save(tmp_path / "m.safetensors")
    card = (tmp_path / "m.md").read_text()
    assert "- Scores by site: measuring them failed (of the user's own)." in card


def test_many_sites(monkeypatch, tmp_path):
    """The file lists the first, and the worst of all."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 20, 2)).astype(np.float32)
    y = (x[..., 0] > 0).astype(int)
    y[4] = 1 - y[4]
    clients = list(zip(x, y, strict=True))
    fed = fd.Federation.from_clients(clients, test=clients)
    made = fd.run(fd.FedAvg(fd.Linear(), lr=0.5), fed, rounds=5)
    monkeypatch.setattr(facts_module, "MOST_SITES", 3)
    made.save(tmp_path / "m.safetensors")
    card = fd.Run.load(tmp_path / "m.safetensors").card()
    shown = [row[0] for row in tables(card)[2][1:]]
    assert shown == ["client 0", "client 1", "client 4"]
    assert "The worst site is client 4, with accuracy 0" in card
    assert "The file of the run has 3 of 6 sites." in card


def test_long_tables_are_cut():
    made = run("fedavg-linear")
    scores = [{"client": i, "accuracy": 0.5} for i in range(130)]
    facts = Facts(sites=tuple(SiteFacts(i, None, 1, 1) for i in range(130)))
    loaded = fd.Run(made.algorithm, made.spec, made.state, made.records, made.settings, facts=facts)
    card = loaded.card(scores=scores)
    assert len(tables(card)[2]) == 101 and "... and 30 more." in card


def test_sites_elsewhere(trained, tmp_path):
    """The server's card has their rows; the file, which every site is sent, has not."""
    sites = types.SimpleNamespace(
        ids=np.array([0, 3]), sizes=np.array([30, 20]), settings={"0": "north", "3": HOSTILE}
    )
    made = run("fedavg-linear")
    made = fd.Run(
        made.algorithm, made.spec, made.state, made.records, made.settings, made.clients, sites
    )
    made.save(tmp_path / "m.safetensors")
    card = (tmp_path / "m.md").read_text()
    assert tables(card)[2][1:] == [["north", "30", "unknown"], [SAFE, "20", "unknown"]]
    assert "- Scores by site: the sites keep their test rows." in card
    _, meta = files.read(tmp_path / "m.safetensors")
    assert meta["facts"]["sites"] == [] and meta["facts"]["rows"] == 50
    # as a deployment asks for them
    scores = [
        {"client": 0, "site": "north", "test_rows": 5, "accuracy": 0.25},
        {"client": 3, "site": "south", "error": "not there"},
        {"site": "all", "test_rows": 5, "accuracy": 0.5},
    ]
    card = made.card(scores=scores)
    assert tables(card)[2][1:] == [
        ["north", "30", "5", "unknown", "0.25"],
        [SAFE, "20", "unknown", "unknown", "unknown"],
    ]
    assert "The worst site is north, with accuracy 0.25." in card


PRIVACY = {
    "differential": (
        {"aggregation": fd.DifferentialPrivacy(clip=1.0, noise=2.0, delta=1e-5)},
        "The server saw every reply; what it made of them is differentially private. Differential "
        "privacy of whole clients: epsilon {epsilon} at delta 1e-05.",
    ),
    "secure": (
        {"aggregation": fd.SecureAggregation()},
        "Secure aggregation: the server saw sums of replies, and no single one. There is no "
        "differential privacy.",
    ),
    "both": (
        {
            "aggregation": fd.SecureAggregation(
                privacy=fd.DifferentialPrivacy(clip=1.0, noise=2.0, delta=1e-5)
            )
        },
        "Secure aggregation: the server saw sums of replies, and no single one. Differential "
        "privacy of whole clients: epsilon {epsilon} at delta 1e-05.",
    ),
    "robust": (
        {"aggregation": fd.Median()},
        "None: the server saw every reply, and combined them by Median. There is no differential "
        "privacy.",
    ),
}


@pytest.mark.parametrize("name", PRIVACY)
def test_privacy(name):
    options, text = PRIVACY[name]
    made = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), THREE, rounds=2, **options)
    epsilon = f"{made.history.epsilon.iloc[-1]:.4g}" if "epsilon" in made.history else ""
    assert section(made.card(), "Privacy") == text.format(epsilon=epsilon)


def test_rows_in_one_place():
    made = fd.run(fd.Central(fd.Linear()), ONE_VALUE, rounds=1)
    assert section(made.card(), "Privacy") == "None: all rows were in one place."
