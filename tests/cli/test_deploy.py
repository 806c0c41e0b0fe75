"""`foedus deploy`, and what every command says of errors."""

from __future__ import annotations

import errno
import importlib
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foedus as fd
from foedus.cli import main
from foedus.cli.app import app

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.serialization import load_pem_private_key

from foedus.engines.flower import auditlog, deploy
from foedus.engines.flower.policy import Policy


@pytest.fixture
def cli(monkeypatch):
    monkeypatch.delenv("FOEDUS_DEBUG", raising=False)

    def call(*arguments: object, code: int = 0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return call


def test_init_writes_a_folder(cli, tmp_path):
    (tmp_path / "north.csv").write_text("age,ill\n50,1\n60,0\n")
    folder = tmp_path / "trial"
    said = cli(
        "deploy", "init", folder, "--site", f"north={tmp_path / 'north.csv'}", "--site", "south",
        "--label", "ill", "--host", "fed.example.org", "--port", 4711, "--days", 2,
    ).output  # fmt: skip
    assert said == (
        f"{folder}: plan, certificates, and keys and policies of 2 sites; {folder / 'README.md'} "
        "says what to do next\n"
    )
    plan = (folder / "federation.toml").read_text()
    assert 'columns = ["age"]' in plan and "clients = 2" in plan and '"0.0.0.0:4711"' in plan
    readme = (folder / "README.md").read_text()
    assert "reached at `fed.example.org:4711`" in readme and "valid for 2 days" in readme
    north, south = (Policy.read(folder / "sites" / n / "policy.toml") for n in ("north", "south"))
    assert north.file("site", "data") == tmp_path / "north.csv"
    assert north.sections["site"]["label"] == "ill"
    assert south.sections["site"]["client"] == 1
    assert south.sections["site"]["data"] == "/path/to/south.csv"


def test_a_site_that_is_named_twice(cli, tmp_path):
    error = cli(
        "deploy", "init", tmp_path / "trial", "--site", "north", "--site", "north=a.csv", code=2
    ).stderr
    assert error == (
        "foedus: error: --site names 'north' twice; give each site a name of its own\n"
    )
    assert not (tmp_path / "trial").exists()


@pytest.mark.parametrize("command", ["up", "server", "site"])
def test_commands_say_what_is_going_on(command, cli, monkeypatch):
    def work(path: Path, say):
        say(f"running {path.name}")

    monkeypatch.setattr(deploy, command, work)
    assert cli("deploy", command, "trial").output == "running trial\n"


def test_keys_of_a_site_are_made_there(cli, tmp_path):
    """Their public parts are printed, and what is secret is not."""
    said = cli("deploy", "keys", "north", "--folder", tmp_path / "own").output
    names = {path.name for path in (tmp_path / "own").iterdir()}
    assert names == {"north.key", "north.key.pub", "north.sign"}
    public = (tmp_path / "own" / "north.key.pub").read_text()
    key = load_pem_private_key((tmp_path / "own" / "north.sign").read_bytes(), None)
    peer = key.public_key().public_bytes_raw().hex()
    assert said == (
        f"for the server, as admitted/north.pub:\n{public}\nfor peers.toml of all sites:\n{peer}\n"
    )


# -- the log of a site -----------------------------------------------------------------------------


@pytest.fixture
def policy(tmp_path) -> Policy:
    deploy.init(tmp_path / "trial", {"north": None})
    return Policy.read(tmp_path / "trial" / "sites" / "north" / "policy.toml")


def test_the_log_of_a_site(cli, policy):
    for n in range(25):
        auditlog.append(policy.log, asked=f"question {n}", answer="given", sent=n)
    said = cli("deploy", "log", policy.path).output.splitlines()
    assert len(said) == 21 and said[-1] == "25 entries; each follows from the one before it"
    assert re.fullmatch(r"20\d\d-\S+  question 5  answer=given sent=5", said[0])
    assert len(cli("deploy", "log", policy.path, "--last", 3).output.splitlines()) == 4


def test_a_log_that_was_changed(cli, policy):
    for n in range(3):
        auditlog.append(policy.log, asked=f"question {n}", answer="refused")
    text = policy.log.read_text()
    policy.log.write_text(text.replace("refused", "given", 1))
    assert cli("deploy", "log", policy.path, code=2).stderr == (
        "foedus: error: log.jsonl, line 2: does not follow from the line before it; the log was "
        "changed here\n"
    )


def test_a_log_after_a_crash(cli, policy):
    auditlog.append(policy.log, asked="question")
    policy.log.write_bytes(policy.log.read_bytes() + b'{"time": "20')
    auditlog.append(policy.log, asked="another")
    _, cut, another, _ = cli("deploy", "log", policy.path).output.splitlines()
    assert cut == 'cut short, by a crash while it was written:  {"time": "20'
    assert another.endswith("another  after_cut=True")


def test_a_site_that_was_asked_nothing(cli, policy):
    error = cli("deploy", "log", policy.path, code=2).stderr
    assert error == (
        f"foedus: error: {policy.log} does not exist yet: this site was asked nothing so far\n"
    )


@pytest.mark.parametrize("missing", ["flwr.app", "cryptography"])
def test_flower_that_is_not_installed(missing, cli, monkeypatch):
    def fail(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(importlib, "import_module", fail)
    assert cli("deploy", "up", "trial", code=2).stderr == (
        "foedus: error: a federation of sites needs Flower: pip install 'foedus[flower]'\n"
    )


def test_another_module_that_is_missing_is_a_bug(cli, monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'numpyy'", name="numpyy")

    monkeypatch.setattr(importlib, "import_module", fail)
    result = cli("deploy", "up", "trial", code=1)
    assert isinstance(result.exception, ModuleNotFoundError)


# -- errors of any command -------------------------------------------------------------------------


def failing(error: BaseException, monkeypatch) -> None:
    """`foedus deploy up` fails so."""

    def up(folder, say):
        raise error

    monkeypatch.setattr(deploy, "up", up)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (fd.ConfigError("lr=-1 must be positive"), "lr=-1 must be positive"),
        (PermissionError(13, "Permission denied", "a.toml"), "a.toml: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("the disk is gone"), "the disk is gone"),
    ],
    ids=repr,
)
def test_an_error_is_one_message(error, message, cli, monkeypatch):
    failing(error, monkeypatch)
    assert cli("deploy", "up", "trial", code=2).stderr == f"foedus: error: {message}\n"


def test_notes_come_with_the_message(cli, monkeypatch):
    error = fd.ConfigError("no such column")
    error.add_note("the file has: age, ill")
    failing(error, monkeypatch)
    assert cli("deploy", "up", "trial", code=2).stderr == (
        "foedus: error: no such column\nthe file has: age, ill\n"
    )


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (KeyboardInterrupt(), "stopped at once"),
        (
            KeyboardInterrupt("stopped after round 3; saved in a"),
            "stopped after round 3; saved in a (foedus run CONFIG.toml --resume)",
        ),
    ],
    ids=["at once", "after a round"],
)
def test_ctrl_c_says_how_to_go_on(stop, message, cli, monkeypatch):
    failing(stop, monkeypatch)
    assert cli("deploy", "up", "trial", code=130).stderr == f"{message}\n"


def test_a_closed_pipe_is_no_error_of_the_user(cli, monkeypatch):
    failing(BrokenPipeError(errno.EPIPE, "Broken pipe"), monkeypatch)
    assert cli("deploy", "up", "trial", code=1).output == ""


def test_the_entry_point_runs_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["foedus", "--version"])
    with pytest.raises(SystemExit) as info:
        main()
    assert info.value.code == 0
    assert capsys.readouterr().out.startswith("foedus ")


def test_keys_are_not_overwritten_and_names_are_no_paths(cli, tmp_path):
    cli("deploy", "keys", "north", "--folder", tmp_path)
    before = (tmp_path / "north.key").read_bytes()
    again = cli("deploy", "keys", "north", "--folder", tmp_path, code=2)
    assert "is there already" in " ".join(again.output.split())
    assert (tmp_path / "north.key").read_bytes() == before
    away = cli("deploy", "keys", "../x", "--folder", tmp_path / "in", code=2)
    assert "letters, digits, - and _ only" in " ".join(away.output.split())
