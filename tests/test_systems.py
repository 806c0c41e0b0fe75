"""What foedus does on systems where it is not tested: as far as this can be simulated on Linux."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIKE_WINDOWS = """
import os, signal, sys
import joblib, numpy, pandas, pooch, rich.progress, scipy.stats, sklearn.datasets, torch, typer
import filelock, safetensors.torch, skops.io

# what Python does not have on Windows
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "getpgrp", "getuid", "killpg", "register_at_fork", "sched_getaffinity"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP"):
    delattr(signal, name)
sys.modules["foedus.kernels._compiled"] = None  # the loops need pthreads
"""


def simulated(code: str, folder: Path, **environment: str) -> str:
    command = [sys.executable, "-c", LIKE_WINDOWS + code]
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_what_windows_lacks_runs_save_and_resume(tmp_path):
    code = """
import foedus as fd
assert not __import__("foedus.kernels").kernels.ready
fed = fd.split(fd.load("digits"), "iid", clients=4)
how = dict(participation=0.5, seed=3, checkpoint="c.safetensors")
fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=2, **how)
again = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=4, resume=True, **how)
del how["checkpoint"]
whole = fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=4, **how)
assert again.history["loss"].tolist() == whole.history["loss"].tolist()
print(again.history["round"].iloc[-1], again.history["accuracy"].iloc[-1] > 0.8)
"""
    assert simulated(code, tmp_path) == "4 True\n"


def test_a_checkpoint_is_held_by_one_run_without_fcntl_too(tmp_path):
    code = """
from pathlib import Path
from foedus.storage.lock import lock
release = lock(Path("a.lock"))
assert release is not None and lock(Path("a.lock")) is None
release()
assert lock(Path("a.lock")) is not None
"""
    simulated(code, tmp_path)


def test_without_fork_sites_are_refused_with_a_reason(tmp_path):
    code = """
import foedus as fd
from foedus.cli.app import app
from typer.testing import CliRunner
fed = fd.split(fd.load("wine"), "iid", clients=2)
try:
    fd.run(fd.FedAvg(fd.Linear()), fed, rounds=1, engine=fd.Flower(nodes=2))
except fd.FoedusError as error:
    print(error)
done = CliRunner().invoke(app, ["deploy", "init", "new", "--site", "north"])
print(done.exit_code, done.output)
"""
    shown = " ".join(simulated(code, tmp_path).split())
    assert "fd.Flower does not run on this system: it forks" in shown
    assert "2 foedus: error: foedus deploy does not run on this system: it forks" in shown
    assert shown.count("on Windows, WSL has it") == 2 and not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", ["--version", "--help", "doctor"])
def test_commands_without_what_windows_lacks(tmp_path, command):
    code = f"""
import sys
sys.argv = ["foedus", {command!r}]
from foedus.cli import main
main()
"""
    assert "foedus" in simulated(code, tmp_path, HOME=str(tmp_path))


def test_text_is_written_in_utf_8_where_that_is_not_the_default(tmp_path):
    """As on Windows before Python 3.15: here the default is ASCII, so that others are errors."""
    code = """
import locale, sys
assert locale.getencoding() != "UTF-8", locale.getencoding()
import foedus as fd

fed = fd.split(fd.load("wine"), "iid", clients=2)
run = fd.run(fd.FedAvg(fd.Linear()), fed, rounds=2)
run.save("run.safetensors")
comparison = fd.compare({"\\u00e9": fd.FedAvg(fd.Linear())}, fed, rounds=2, seeds=2)
comparison.report("page.html")
"""
    utf8 = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    simulated(code, tmp_path, **utf8)
    assert "±" in (tmp_path / "page.html").read_text(encoding="utf-8")
