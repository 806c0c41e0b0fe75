"""`foedus deploy`, and what every command says of errors."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

import foedus as fd
from foedus.cli import main
from foedus.cli.app import app

pytest.importorskip("flwr")

from foedus.engines.flower import deploy


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
        f"{folder}: app, certificates and keys for 2 sites; {folder / 'README.md'} says what to do "
        "next\n"
    )
    plan = (folder / "app" / "federation" / "federation.toml").read_text()
    assert 'columns = ["age"]' in plan and "clients = 2" in plan
    readme = (folder / "README.md").read_text()
    assert "Server: `fed.example.org:4711`" in readme and "valid for 2 days" in readme
    sites = (folder / "sites.toml").read_text()
    assert f'data = "{tmp_path / "north.csv"}"\nlabel = "ill"' in sites
    assert '[south]\nclient = 1\ndata = "/path/to/south.csv"' in sites


def test_a_site_that_is_named_twice(cli, tmp_path):
    error = cli(
        "deploy", "init", tmp_path / "trial", "--site", "north", "--site", "north=a.csv", code=2
    ).stderr
    assert error == (
        "foedus: error: --site names 'north' twice; give each site a name of its own\n"
    )
    assert not (tmp_path / "trial").exists()


def test_up_says_what_the_run_says(cli, monkeypatch):
    def up(folder: Path, say):
        say(f"running {folder.name}")

    monkeypatch.setattr(deploy, "up", up)
    assert cli("deploy", "up", "trial").output == "running trial\n"


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
