"""TensorBoard and MLflow: every number once, also of a resumed run, read back by their own
packages.
"""

from __future__ import annotations

import importlib.util

import pytest

import foedus as fd
from foedus.config.experiment import read_config

ALGORITHM = fd.FedAvg(fd.Linear(), lr=0.1, batch_size=16)
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed: pip install 'foedus[tensorboard]'",
)
needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None,
    reason="mlflow is not installed: pip install 'foedus[mlflow]'",
)


class Killed(BaseException):
    """As if the process had died."""


class Stop(fd.Callback):
    """Ends the run in a round, after all other callbacks were told of it."""

    def __init__(self, round):
        self.round = round

    def row(self, row):
        if row["round"] == self.round:
            raise Killed


def expected(run):
    """Name and steps of what should be shown, from the history."""
    columns = [c for c in run.records.columns if c != "round"]
    return {
        c: [(row["round"], pytest.approx(row[c], rel=1e-6)) for row in run.records.rows if c in row]
        for c in columns
    }


# -- TensorBoard -----------------------------------------------------------------------------------


def shown(folder):
    """Scalars by name, as TensorBoard reads them, and all tags."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }, events


@needs_tensorboard
def test_tensorboard_has_the_history(fed, tmp_path):
    run = fd.run(ALGORITHM, fed, 4, evaluate_every=2, callbacks=[fd.TensorBoard(tmp_path)])
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("FedAvg-seed0-")
    scalars, events = shown(folder)
    assert scalars == expected(run)
    assert [step for step, _ in scalars["loss"]] == [0, 2, 4]
    (text,) = events.Tensors("settings/text_summary")
    words = text.tensor_proto.string_val[0].decode()
    assert "| algorithm.lr | 0.1 |" in words
    assert f"| foedus | {fd.__version__} |" in words
    data = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"batch_size" in data and b"participation" in data


@needs_tensorboard
def test_tensorboard_shows_a_resumed_run_once(fed, tmp_path):
    path, board = tmp_path / "c.safetensors", fd.TensorBoard(tmp_path / "runs")
    options = {"checkpoint": path, "checkpoint_every": 3}
    with pytest.raises(Killed):
        # rounds 4 and 5 are shown, and not saved
        fd.run(ALGORITHM, fed, 6, callbacks=[board, Stop(5)], **options)
    run = fd.run(ALGORITHM, fed, 6, resume=True, callbacks=[board], **options)
    (folder,) = (tmp_path / "runs").iterdir()
    assert shown(folder)[0] == expected(run)


@needs_tensorboard
def test_other_settings_have_another_folder(fed, tmp_path):
    board = fd.TensorBoard(tmp_path)
    cmp = fd.compare({"a/b": ALGORITHM, "b": fd.FedAvg(lr=0.3)}, fed, 1, callbacks=[board])
    fd.compare({"b": fd.FedAvg(lr=0.2)}, fed, 1, callbacks=[board])
    assert [f.name.rsplit("-", 1)[0] for f in sorted(tmp_path.iterdir())] == [
        "a%2Fb-seed0",
        "b-seed0",
        "b-seed0",
    ]
    assert len(cmp.runs) == 2


# -- MLflow ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One database for all tests: making it takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'm.db'}"


def recorded(store, experiment):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, found


@needs_mlflow
def test_mlflow_has_settings_history_and_status(fed, store):
    run = fd.run(ALGORITHM, fed, 4, seed=3, evaluate_every=2, callbacks=[fd.MLflow("first", store)])
    client, (record,) = recorded(store, "first")
    assert record.info.status == "FINISHED"
    assert record.info.run_name == "FedAvg-seed3"
    assert record.data.params["lr"] == "0.1"
    assert record.data.params["model.type"] == "Linear"
    assert record.data.params["participation"] == "1.0"
    tags = record.data.tags
    assert (tags["foedus.version"], tags["foedus.seed"]) == (fd.__version__, "3")
    assert (tags["foedus.federation.scheme"], tags["foedus.federation.settings.alpha"]) == (
        "dirichlet",
        "0.5",
    )
    history = {
        c: [(m.step, m.value) for m in client.get_metric_history(record.info.run_id, c)]
        for c in record.data.metrics
    }
    assert history == expected(run)


@needs_mlflow
def test_mlflow_goes_on_in_the_record_of_a_resumed_run(fed, store, tmp_path):
    path, tracker = tmp_path / "c.safetensors", fd.MLflow("resumed", store)
    options = {"checkpoint": path, "checkpoint_every": 3}
    with pytest.raises(Killed):
        fd.run(ALGORITHM, fed, 6, callbacks=[tracker, Stop(5)], **options)
    client, (record,) = recorded(store, "resumed")
    assert record.info.status == "FAILED"
    run = fd.run(ALGORITHM, fed, 6, resume=True, callbacks=[tracker], **options)
    client, (record,) = recorded(store, "resumed")
    assert record.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(record.info.run_id, "seconds")] == list(
        range(7)
    )
    assert [
        (m.step, m.value) for m in client.get_metric_history(record.info.run_id, "loss")
    ] == expected(run)["loss"]
    # A record that is missing is made from the history.
    fd.run(ALGORITHM, fed, 6, resume=True, callbacks=[fd.MLflow("late", store)], **options)
    client, (record,) = recorded(store, "late")
    assert [m.step for m in client.get_metric_history(record.info.run_id, "loss")] == list(range(7))
    # The same run once more is another record.
    fd.run(ALGORITHM, fed, 1, callbacks=[fd.MLflow("late", store)])
    assert len(recorded(store, "late")[1]) == 2


@needs_mlflow
def test_mlflow_knows_what_diverged_and_what_was_stopped(fed, store):
    with pytest.raises(fd.DivergenceError):
        fd.run(fd.FedAvg(fd.MLP(8), lr=1e30), fed, 3, callbacks=[fd.MLflow("bad", store)])

    class CtrlC(fd.Callback):
        def row(self, row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fd.run(ALGORITHM, fed, 3, callbacks=[fd.MLflow("bad", store), CtrlC()])
    assert {r.info.status for r in recorded(store, "bad")[1]} == {"FAILED", "KILLED"}


@needs_mlflow
def test_a_store_that_is_away_costs_no_run(fed):
    with pytest.warns(fd.CallbackWarning, match="MLflow failed at the start"):
        run = fd.run(ALGORITHM, fed, 1, callbacks=[fd.MLflow(uri="nosuchscheme://host")])
    assert len(run.records) == 2


# -- settings --------------------------------------------------------------------------------------

FILE = """
data  = { name = "wine" }
split = { scheme = "iid", clients = 2 }
run   = { rounds = 1 }
algorithm = { type = "FedAvg" }
"""


def from_file(tmp_path, track):
    path = tmp_path / "c.toml"
    path.write_text(FILE + track)
    return read_config(path, "run")


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        fd.FoedusError, match=r"needs the package tensorboard: pip install 'foedus\[tensorboard\]'"
    ):
        fd.TensorBoard("runs")
    with pytest.raises(
        fd.FoedusError, match=r"needs the package mlflow: pip install 'foedus\[mlflow\]'"
    ):
        fd.MLflow()


def test_settings_are_checked(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    for folder in ("", 3, None):
        with pytest.raises(fd.ConfigError, match=f"folder={folder!r} must be the path of a folder"):
            fd.TensorBoard(folder)
    with pytest.raises(fd.ConfigError, match="experiment='' must be a non-empty string"):
        fd.MLflow("")
    with pytest.raises(fd.ConfigError, match="uri=5 must be a string or None"):
        fd.MLflow(uri=5)
    board, flow = from_file(
        tmp_path, 'track = { tensorboard = "runs", mlflow = { experiment = "wine" } }'
    ).options["callbacks"]
    assert (board.folder, flow.experiment, flow.uri) == ("runs", "wine", None)
    with pytest.raises(
        fd.ConfigError,
        match=r"track.tensorbord: key 'tensorbord' is unknown; did you mean 'tensorboard'",
    ):
        from_file(tmp_path, 'track = { tensorbord = "runs" }')
    with pytest.raises(
        fd.ConfigError, match=r"track.mlflow.url: key 'url' is unknown; did you mean 'uri'"
    ):
        from_file(tmp_path, 'track = { mlflow = { url = "http://host" } }')
    with pytest.raises(
        fd.ConfigError, match=r"track.tensorboard: 3 is an integer, but must be text"
    ):
        from_file(tmp_path, "track = { tensorboard = 3 }")


@needs_tensorboard
def test_a_file_can_ask_for_tensorboard(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from foedus.cli.app import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(FILE + 'track = { tensorboard = "runs" }')
    done = CliRunner().invoke(app, ["run", "c.toml"])
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(shown(folder)[0]["accuracy"]) == 2
