"""Sites with files of their own: what is refused and in which words, and a whole training from
files to the final model.
"""

from __future__ import annotations

import dataclasses
import json
import stat

import numpy as np
import pandas as pd
import pytest
import torch
from cryptography import x509
from flwr.app import Message

import foedus as fd
from foedus.data.preprocess import Preprocessor
from foedus.engines.flower import deploy, keys, messages, server
from foedus.engines.flower.policy import Policy
from foedus.engines.flower.site import Schema, read_site
from tests.engines.flower.grid import HereGrid

COLUMNS, CLASSES = ("age", "pulse", "score"), ("ill", "well")
SCHEMA = Schema(COLUMNS, CLASSES)


def table(seed: int, rows: int = 60, shift: float = 0.0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.normal([50 + shift, 80, 3], [10, 15, 1], size=(rows, 3))
    well = x @ [-0.05, 0.02, 1.0] + rng.normal(0, 0.3, rows) > 2.1
    frame = pd.DataFrame(x, columns=list(COLUMNS)).assign(outcome=np.where(well, "well", "ill"))
    frame.loc[rng.random(rows) < 0.1, "pulse"] = np.nan
    return frame


def written(folder, name: str, frame: pd.DataFrame):
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / f"{name}.csv", index=False)
    return folder / f"{name}.csv"


def config(path, client: int = 0, **more):
    return {"data": str(path), "label": "outcome", "client": client, **more}


def test_a_site_is_read_as_the_schema_says(tmp_path):
    # another order, and a column too many
    frame = table(0)[["score", "outcome", "pulse", "age"]].assign(extra="text", day=pd.Timestamp(0))
    site = read_site(config(written(tmp_path, "north", frame), 7), SCHEMA)
    held = sum(int(n * 0.25 + 0.5) for n in frame.outcome.value_counts())  # a quarter of each class
    assert (site.client, site.name, len(site.y), len(site.y_test)) == (7, "north", 60 - held, held)
    both = np.concatenate([site.x, site.x_test])
    np.testing.assert_allclose(np.sort(both[:, 0]), np.sort(frame.age))
    assert set(site.y) == {0, 1} and np.isnan(site.x).any()
    center, scale = np.array([50.0, 80.0, 3.0]), np.array([10.0, 15.0, 1.0])
    fed = site.federation(Preprocessor(COLUMNS, {}, center, center, scale))
    np.testing.assert_allclose(fed.data.x_train[:, 0], (site.x[:, 0] - 50) / 10, rtol=1e-5)
    assert (fed.data.x_train[np.isnan(site.x)] == 0).all() and fed.ids.tolist() == [7]


def test_labels_are_classes_however_they_are_written():
    schema = Schema(COLUMNS, ("0", "1"))
    for y in (np.array([1.0, 0.0]), np.array([1, 0]), np.array(["1", "0"])):
        assert schema.labels(y, "x.csv").tolist() == [1, 0]


@pytest.mark.parametrize(
    ("change", "more", "why"),
    [
        (lambda f: f.drop(columns="pulse"), {}, "this site has no column 'pulse'"),
        (lambda f: f.rename(columns={"pulse": "Pulse"}), {}, "the file has 'Pulse' instead"),
        (lambda f: f.assign(age="old"), {}, "column 'age' holds text, and the federation takes it"),
        (lambda f: f.assign(age=np.inf), {}, "line 2: column 'age' is infinite"),
        (
            lambda f: f.assign(outcome="dead"),
            {},
            "label 'dead' is none of the classes of the federation",
        ),
        (lambda f: f.assign(age=["?", *f.age[1:]]), {}, "'age' holds numbers, and here '?'"),
        (lambda f: f.iloc[:0], {}, "no rows"),
        (lambda f: f, {"label": "result"}, "result"),
        (lambda f: f, {"client": "first"}, "client='first' must be the number of the site"),
        (lambda f: f, {"client": -1}, "client=-1"),
        (lambda f: f, {"test": 1.5}, "test=1.5 must be a part"),
        (lambda f: f, {"dta": "x"}, "key 'dta' is unknown; did you mean 'data'"),
        (lambda f: f, {"data": "/nowhere/at/all.csv"}, "there is no file 'all.csv'"),
    ],
)
def test_rows_that_cannot_be_used_are_reported(change, more, why, tmp_path):
    path = written(tmp_path, "site", change(table(0)))
    with pytest.raises((fd.DataError, fd.ConfigError)) as error:
        read_site({**config(path), **more}, SCHEMA)
    assert why in f"{error.value} {error.value.__cause__}"


def test_a_missing_setting():
    with pytest.raises(fd.DataError, match="client is missing; such as"):
        read_site({"data": "x.csv"}, SCHEMA)


# -- a training ------------------------------------------------------------------------------------

PLAN = """
[algorithms.FedAvg]
model = { type = "Linear" }
lr = 0.3

[algorithms.Trees]
type = "FFGB"
oracle = { type = "Forest", trees = 2, depth = 3 }

[data]
columns = ["age", "pulse", "score"]
classes = ["ill", "well"]

[run]
rounds = 3

[federation]
clients = 3
min_clients = 2
timeout = 1
patience = 0.3
"""


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(PLAN)
    return server.read_plan(path)


@pytest.fixture
def grid(tmp_path):
    configs = {}
    for n, name in enumerate(("north", "south", "west")):
        path = written(tmp_path / "data", name, table(n, 60 + 20 * n, shift=5.0 * n))
        configs[n + 1] = config(path, n, cache=str(tmp_path / "cache" / name))
    return HereGrid(configs)


def test_a_training_from_files_to_the_final_model(plan, grid, tmp_path):
    runs = server.train(grid, plan, tmp_path / "results")
    assert list(runs) == ["FedAvg", "Trees"]
    # The same as in the simulator, on the same rows with the same scaling.
    sites = [read_site(dict(c.node_config), SCHEMA) for c in grid.contexts.values()]
    x = np.concatenate([s.x for s in sites])
    center = np.nanmean(x, 0)
    filled = np.where(np.isnan(x), center, x)
    spread = filled.std(0)  # of the rows that models are given
    made = Preprocessor(COLUMNS, {}, center, center, spread)
    feds = [s.federation(made) for s in sites]
    whole = fd.Federation.from_clients([(f.data.x_train, f.data.y_train) for f in feds], classes=2)
    local = fd.run(plan.algorithms["FedAvg"], whole, 3)
    torch.testing.assert_close(
        runs["FedAvg"].state.w["weight"], local.state.w["weight"], rtol=1e-4, atol=1e-5
    )
    said = json.loads((tmp_path / "results" / "FedAvg.sites.json").read_text())
    for entry, f in zip(said, feds, strict=True):
        hits = (local.model.predict(f.data.x_test) == f.data.y_test).mean()
        assert entry["accuracy"] == pytest.approx(hits) and entry["test_rows"] == len(f.data.y_test)
    # The saved model takes raw rows of a new site, and says what is written there.
    new = table(9)[["outcome", "pulse", "score", "age"]]
    model = fd.Run.load(tmp_path / "results" / "FedAvg.safetensors").model
    rows = np.nan_to_num((new[list(COLUMNS)].to_numpy() - center) / spread)
    want = np.array(SCHEMA.classes)[local.model.prepared.predict(rows.astype(np.float32))]
    assert model.predict(new).tolist() == want.tolist()
    kept = fd.Run.load(tmp_path / "cache" / "south" / "model.safetensors")
    assert type(kept.algorithm).__name__ == "FFGB"  # the last one
    assert pd.read_csv(tmp_path / "results" / "Trees.csv").bytes_up.iloc[-1] > 0


def test_a_training_goes_on_from_its_checkpoint(plan, grid, tmp_path):
    first = server.train(grid, plan, tmp_path / "results")
    asked = len(grid.asked)
    again = server.train(grid, plan, tmp_path / "results")
    assert len(grid.asked) - asked == 3 + 2 * 3  # the greeting, and the final models; no round
    assert torch.equal(first["FedAvg"].state.w["weight"], again["FedAvg"].state.w["weight"])


def test_a_training_does_not_go_on_with_another_preprocessing(plan, grid, tmp_path):
    server.train(grid, plan, tmp_path / "results")
    other = dataclasses.replace(plan, fit=dataclasses.replace(plan.fit, impute="zero"))
    with pytest.raises(fd.ConfigError, match=r"\[data\] has changed.*impute.*remove the folder"):
        server.train(grid, other, tmp_path / "results")
    roster = tmp_path / "results" / "roster.json"
    for text in ("[]", '{"ids": []}', "{"):
        roster.write_text(text)
        with pytest.raises(fd.ConfigError, match="damaged, or of another version"):
            server.train(grid, plan, tmp_path / "results")


def test_a_site_with_a_bad_file_does_not_stop_the_others(plan, grid, tmp_path):
    written(tmp_path / "data", "south", table(1).drop(columns="age"))
    with pytest.warns(
        UserWarning,
        match=r"node 2 does not take part: schema.columns: this site has no column 'age'",
    ):
        runs = server.train(grid, plan, tmp_path / "results")
    assert runs["FedAvg"].history.clients.tolist()[1:] == [2, 2, 2]


def test_two_sites_with_one_number(plan, grid, tmp_path):
    grid.contexts[3].node_config["client"] = 0
    with pytest.raises(
        fd.ConfigError, match=r"two sites are client 0: 'north' \(node 1\) and 'west' \(node 3\)"
    ):
        server.train(grid, plan, tmp_path / "results")


def test_no_sites_and_too_few(plan, grid, tmp_path):
    with pytest.raises(fd.TooFewClients, match=r"no SuperNode has connected within 0\.3 s"):
        server.train(HereGrid({}), plan, tmp_path / "results")
    del grid.contexts[1], grid.contexts[2]
    with pytest.raises(
        fd.TooFewClients, match=r"1 SuperNodes have connected within 0\.3 s, at least 2 must"
    ):
        server.train(grid, plan, tmp_path / "results")


def test_too_few_good_files(plan, grid, tmp_path):
    for name in ("south", "west"):
        (tmp_path / "data" / f"{name}.csv").unlink()
    with (
        pytest.warns(UserWarning, match="the rows or files of this site cannot answer this"),
        pytest.raises(fd.TooFewClients, match="1 sites can take part, at least 2"),
    ):
        server.train(grid, plan, tmp_path / "results")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("rounds = 3", "rounds = -3", "run.rounds: -3 must be at least 0"),
        (
            "min_clients = 2",
            "min_clients = 4",
            "federation.min_clients: 4 must be from 1 to the 3 clients",
        ),
        (
            "[federation]",
            "[fedration]",
            "section 'fedration' is unknown; did you mean 'federation'",
        ),
        ("lr = 0.3", "rate = 0.3", "key 'rate' is unknown"),
        ('type = "FFGB"', 'type = "Central"', "oracle"),
        ("columns", "colums", "key 'colums' is unknown; did you mean 'columns'"),
    ],
)
def test_bad_plans(old, new, why, tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(PLAN.replace(old, new))
    with pytest.raises(fd.ConfigError) as error:
        server.read_plan(path)
    assert why in str(error.value) and "federation.toml" in str(error.value)


def test_what_needs_all_rows_in_one_place_is_refused(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(
        PLAN.replace(
            'type = "FFGB"\noracle = { type = "Forest", trees = 2, depth = 3 }', 'type = "Central"'
        )
    )
    with pytest.raises(fd.ConfigError, match="Central needs all rows in one place"):
        server.read_plan(path)


# -- tables as people have them --------------------------------------------------------------------


def patients(seed: int, rows: int) -> pd.DataFrame:
    """Numbers, texts that differ by site, booleans, missing values, and text labels."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 90, rows).astype(float),
            "smokes": rng.choice(["no", "daily", f"at times, {seed}"], rows),
            "pressure": rng.normal(130, 20, rows).round(),
            "ward": rng.integers(1, 4, rows),  # a category, though it is written in numbers
            "insured": rng.random(rows) < 0.5,
        }
    )
    risk = frame.age + 30 * (frame.smokes == "daily") + 0.5 * frame.pressure
    frame["outcome"] = np.where(risk + rng.normal(0, 5, rows) > 135, "ill", "well")
    frame.loc[rng.random(rows) < 0.1, "pressure"] = np.nan
    frame.loc[rng.random(rows) < 0.1, "smokes"] = None
    return frame


ROWS = """
import pandas as pd

def rows():
    return pd.read_csv({path!r})
"""

TABLES = """
[algorithm]
type = "FedAvg"
model = {{ type = "Linear" }}
lr = 0.5

[data]
columns = ["age", "smokes", "pressure", "ward", "insured"]
classes = ["ill", "well"]
categories = {categories}
impute = "{impute}"
scale = "standard"

[run]
rounds = 5

[federation]
clients = 3
timeout = 5
patience = 0.3
"""


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("impute", ["mean", "median"])
def test_categories_and_missing_values_between_sites(secure, impute, tmp_path):
    """The run of the simulator on the pooled tables, and a saved model that takes raw rows; of one
    site, a function brings the rows.
    """
    frames = {n: patients(k, 80 + 30 * k) for k, n in enumerate(("north", "south", "west"))}
    configs = {}
    for k, (name, frame) in enumerate(frames.items()):
        path = written(tmp_path / "data", name, frame)
        configs[k + 1] = config(path, k, cache=str(tmp_path / "cache" / name), test=0.0)
    (tmp_path / "mine.py").write_text(ROWS.format(path=configs[3].pop("data")))
    configs[3] |= {"loader": "mine:rows", "folder": str(tmp_path), "name": "west"}
    plan = tmp_path / "federation.toml"
    more = '\n[aggregation]\ntype = "SecureAggregation"\n' * secure
    plan.write_text(TABLES.format(categories='["smokes", "ward"]', impute=impute) + more)
    run = server.train(HereGrid(configs), server.read_plan(plan), tmp_path / "results")["FedAvg"]

    texts = {n: f.assign(ward=f.ward.map(str).astype("category")) for n, f in frames.items()}
    fed = fd.Federation.from_clients(texts, label="outcome", impute=impute, scale="standard")
    made = fed.data.preprocess
    assert run.preprocess.names == made.names
    assert run.preprocess.categories == made.categories
    assert len(made.categories["smokes"]) == 6 and made.categories["ward"] == ("1", "2", "3")
    for name in ("fill", "shift", "divisor"):
        np.testing.assert_allclose(getattr(run.preprocess, name), getattr(made, name), rtol=1e-9)
    local = fd.run(fd.FedAvg(fd.Linear(), lr=0.5), fed, 5, evaluate_every=0)
    torch.testing.assert_close(run.state.w["weight"], local.state.w["weight"], rtol=1e-3, atol=1e-4)
    new = patients(9, 100).sample(frac=1, axis=1, random_state=0)
    model = fd.Run.load(tmp_path / "results" / "FedAvg.safetensors").model
    with pytest.warns(UserWarning, match="'smokes' has categories that no training row has"):
        said = model.predict(new)
    assert (said == new.outcome).mean() > 0.85
    roster = json.loads((tmp_path / "results" / "roster.json").read_text())
    assert roster["fit"]["bytes_up"] > 0
    card = (tmp_path / "results" / "FedAvg.md").read_text()
    assert "for the preprocessing" in card and "| west | 140 |" in card


def test_a_column_of_text_must_be_named(tmp_path):
    """A site whose file has text where the plan says numbers keeps that to itself."""
    path = written(tmp_path, "north", patients(0, 30))
    schema = Schema(("age", "smokes"), CLASSES)
    with pytest.raises(fd.DataError, match=r"'smokes' holds text.*name it under data.categories"):
        read_site(config(path), schema)
    texts = read_site(config(path), dataclasses.replace(schema, texts=("smokes",)))
    assert texts.raw.categories == {"smokes": ("at times, 0", "daily", "no")}


def test_numbers_that_are_categories(tmp_path):
    """Written as numbers at this site, with a hole: 1, 1.0 and "1" are one text."""
    frame = pd.DataFrame({"ward": [2.0, np.nan, 1.0, 2.0], "outcome": ["ill", "well"] * 2})
    schema = Schema(("ward",), CLASSES, ("ward",))
    site = read_site(config(written(tmp_path, "north", frame), test=0), schema)
    assert site.raw.categories == {"ward": ("1", "2")}
    np.testing.assert_array_equal(site.x[:, 0], [1, np.nan, 0, 1])


@pytest.mark.parametrize(
    ("cells", "texts"),
    [
        (["01067", "01069"], ("01067", "01069")),
        (["01067", "K1A"], ("01067", "K1A")),
        (["True", "False"], ("False", "True")),
        (["True", "unknown"], ("True", "unknown")),
        (["1", "2", "3", "3A"], ("1", "2", "3", "3A")),
        (["2.0", ""], ("2",)),
    ],
)
def test_texts_are_what_is_written(cells, texts, tmp_path):
    """Whatever they look like in the file of one site, they are the same at all."""
    lines = "\n".join(f"{cell},ill\n{cell},well" for cell in cells)
    (tmp_path / "north.csv").write_text(f"code,outcome\n{lines}\n")
    site = read_site(config(tmp_path / "north.csv", test=0), Schema(("code",), CLASSES, ("code",)))
    assert site.raw.categories == {"code": texts}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def rows(): return 3", "returned a int; it must return a pandas DataFrame"),
        ("def rows(): raise KeyError('password')", "failed: KeyError('password')"),
        ("def others(): pass", "has no attribute 'rows'"),
        ("def rows(", "failed: SyntaxError"),
    ],
)
def test_loaders_that_fail(code, why, tmp_path):
    (tmp_path / "mine.py").write_text(code)
    about = {"loader": "mine:rows", "folder": str(tmp_path), "label": "outcome", "client": 0}
    with pytest.raises(fd.DataError) as error:
        read_site(about, SCHEMA)
    assert why in str(error.value)


def test_parquet_at_a_site(tmp_path, monkeypatch):
    """Read by pandas, as CSV is; pyarrow need not be installed for this test."""
    frame = table(0)
    (tmp_path / "north.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(pd, "read_parquet", lambda path: frame if path.suffix == ".parquet" else 1)
    site = read_site(config(tmp_path / "north.parquet", test=0), SCHEMA)
    np.testing.assert_array_equal(site.x, frame[list(COLUMNS)].to_numpy())


# -- folders, certificates and keys ----------------------------------------------------------------


def test_a_folder_for_a_federation(tmp_path):
    sites = {n: written(tmp_path / "data", n, table(k)) for k, n in enumerate(("north", "south"))}
    deploy.init(tmp_path / "trial", sites, "outcome", host="fed.example.org", port=4711)
    plan = server.read_plan(tmp_path / "trial" / "federation.toml")
    assert (plan.fit.columns, plan.classes, plan.clients) == (COLUMNS, CLASSES, 2)
    assert plan.listen == "0.0.0.0:4711"
    readme = (tmp_path / "trial" / "README.md").read_text()
    for words in ("fed.example.org:4711", "deploy server trial", "deploy site policy.toml"):
        assert words in readme
    policy = Policy.read(tmp_path / "trial" / "sites" / "south" / "policy.toml")
    assert policy.columns == COLUMNS and policy.classes == CLASSES
    assert policy.sections["server"]["address"] == "fed.example.org:4711"
    about = {k: policy.node_config()[k] for k in ("client", "name", "label", "secure", "data")}
    assert about == {"client": 1, "name": "south", "label": "outcome", "secure": "offered",
                     "data": str(sites["south"])}  # fmt: skip
    certificate = x509.load_pem_x509_certificate(
        (tmp_path / "trial" / "tls" / "server.pem").read_bytes()
    )
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    for secret in ("tls/server.key", "sites/north/north.key", "sites/south/south.sign"):
        assert stat.S_IMODE((tmp_path / "trial" / secret).stat().st_mode) == 0o600
    with pytest.raises(fd.ConfigError, match="not empty"):
        deploy.init(tmp_path / "trial", sites, "outcome")


def test_folders_that_cannot_be_made(tmp_path):
    with pytest.raises(fd.ConfigError, match="at least one site"):
        deploy.init(tmp_path / "a", {})
    with pytest.raises(fd.ConfigError, match="site name 'a b'"):
        deploy.init(tmp_path / "b", {"a b": None})
    with pytest.raises(fd.DataError, match="site north: "):
        deploy.init(tmp_path / "c", {"north": tmp_path / "nothing.csv"})
    with pytest.raises(fd.ConfigError, match=r"no federation\.toml"):
        deploy.up(tmp_path)


def test_an_expired_certificate_is_refused_before_anything_starts(tmp_path):
    deploy.init(
        tmp_path / "trial", {"north": written(tmp_path, "north", table(0))}, "outcome", days=-1
    )
    assert keys.expired(tmp_path / "trial" / "tls" / "server.pem")
    with pytest.raises(fd.FoedusError, match=r"certificate server\.pem expired on"):
        deploy.up(tmp_path / "trial")


GREETINGS = {
    "no test rows": {"test_rows": None},
    "negative rows": {"rows": [-44]},
    "rows as text": {"rows": ["many"]},
    "a fraction of a client": {"clients": [1.5]},
    "a negative client": {"clients": [-1]},
    "no clients": {"clients": []},
    "a strange checksum": {"checksum": 2**70},
    "a long name": {"name": "x" * 1000},
}


@pytest.mark.parametrize("change", GREETINGS.values(), ids=list(GREETINGS))
def test_greetings_of_untrusted_sites(change, plan, grid, tmp_path):
    """They do not take part, and leave no trace in the scaling of the others."""

    def spoil(asked, answer):
        if asked.metadata.message_type == "query.hello" and asked.metadata.dst_node_id == 3:
            return Message(messages.content({**messages.header(answer), **change}), reply_to=asked)
        return answer

    grid.spoil = spoil
    with pytest.warns(UserWarning, match="node 3 does not take part: its greeting has"):
        runs = server.train(grid, plan, tmp_path / "results")
    assert runs["FedAvg"].history.clients.tolist()[1:] == [2, 2, 2]
    roster = json.loads((tmp_path / "results" / "roster.json").read_text())
    assert roster["ids"] == [0, 1] and roster["preprocess"]["names"] == list(COLUMNS)


def test_a_restart_without_one_of_the_sites(plan, grid, tmp_path):
    """The training goes on with the scaling and the roster that it had; the site is left out until
    it is back.
    """
    whole = server.train(grid, plan, tmp_path / "whole")
    few = dataclasses.replace(plan, rounds=1, algorithms={"FedAvg": plan.algorithms["FedAvg"]})
    server.train(grid, few, tmp_path / "results")
    gone = grid.contexts.pop(3)
    with pytest.warns(UserWarning, match=r"client 2 \(west\) is left out: it is not connected"):
        runs = server.train(grid, dataclasses.replace(few, rounds=2), tmp_path / "results")
    assert runs["FedAvg"].history.left_out[2] == "2: it is not connected"
    grid.contexts[3] = gone
    again = server.train(grid, dataclasses.replace(few, rounds=3), tmp_path / "results")
    assert again["FedAvg"].history.left_out.notna().tolist() == [False, False, True, False]
    assert whole["FedAvg"].history.bytes_up[3] > again["FedAvg"].history.bytes_up[3]
    written(tmp_path / "data", "west", table(9))
    with pytest.raises(fd.ConfigError, match=r"the rows of client 2 \(west\) have changed"):
        server.train(grid, dataclasses.replace(few, rounds=4), tmp_path / "results")


def test_numbers_are_predicted_too(grid, tmp_path):
    for name in ("north", "south", "west"):
        frame = pd.read_csv(tmp_path / "data" / f"{name}.csv")
        written(tmp_path / "data", name, frame.assign(outcome=frame.age * 0.1 + frame.score))
    path = tmp_path / "numbers.toml"
    path.write_text(
        PLAN.replace('classes = ["ill", "well"]\n', "").split("[algorithms.Trees]")[0]
        + "[data]"
        + PLAN.split("[data]")[1].replace('classes = ["ill", "well"]\n', "")
    )
    server.train(grid, server.read_plan(path), tmp_path / "results")
    said = json.loads((tmp_path / "results" / "FedAvg.sites.json").read_text())
    assert all(0 < e["mse"] < 10 and "error" not in e for e in said)


def test_a_bad_answer_about_the_final_model_stops_nothing(plan, grid, tmp_path):
    grid.spoil = lambda asked, answer: (
        Message(messages.content({"rows": "x"}), reply_to=asked)
        if asked.metadata.message_type == "evaluate.model" and asked.metadata.dst_node_id == 1
        else answer
    )
    server.train(grid, plan, tmp_path / "results")
    said = json.loads((tmp_path / "results" / "Trees.sites.json").read_text())
    assert "cannot be read" in said[0]["error"] and said[1]["accuracy"] > 0.4


def test_algorithms_that_the_server_imports(tmp_path):
    path = tmp_path / "federation.toml"
    path.write_text(f'{PLAN}\n[code]\nname = "tests.engines.flower.test_session:STATEFUL"\n')
    assert list(server.read_plan(path).algorithms) == ["Scaffold", "FedRes", "FFGB", "FedFW"]
    for code, why in (
        ("nowhere:x", "code='nowhere:x': No module named 'nowhere'"),
        (":x", "code=':x': Empty module name"),
        ("math:pi", "code='math:pi' is not an algorithm or a dictionary of algorithms"),
        ("math:tau2", "code='math:tau2' is not an algorithm"),
    ):
        path.write_text(f'{PLAN}\n[code]\nname = "{code}"\n')
        with pytest.raises(fd.ConfigError, match=why):
            server.read_plan(path)
    path.write_text(f'{PLAN}\n[server]\nlisten = "everywhere"\n')
    with pytest.raises(fd.ConfigError, match=r"server\.listen: 'everywhere' must be HOST:PORT"):
        server.read_plan(path)


def test_classes_have_the_order_of_the_schema():
    schema = Schema(("age",), ("yes", "no", "2"))
    assert schema.labels(np.array(["no", "yes", "no"]), "a").tolist() == [1, 0, 1]
    assert schema.labels(np.array([2.0, 2.0]), "a").tolist() == [2, 2]


@pytest.mark.parametrize("rows", [[0], [-1], [2.0], [True], [3, 3], 3, None])
def test_numbers_of_rows_in_a_greeting(rows):
    good = {"clients": [4], "rows": [3], "name": "a"}
    assert server._wrong(good, False) is None
    assert server._wrong(good | {"rows": rows}, False) == "no numbers of rows"
