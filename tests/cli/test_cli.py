from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import foedus as fd
from foedus.audit import leakage
from foedus.cli.app import app
from foedus.config import experiment
from foedus.papers import markdown, runner
from foedus.report import compare
from foedus.version import __version__

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = """
data   = {{ name = "wine" }}
split  = {{ scheme = "iid", clients = 4 }}
run    = {{ rounds = 2 }}
{}
"""


@pytest.fixture
def cli(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FOEDUS_DEBUG", raising=False)

    def call(*arguments: str, code: int = 0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return call


def test_version_names_what_it_runs_on_without_loading_it(cli):
    said = cli("--version").output.strip()
    torch, python = importlib.metadata.version("torch"), platform.python_version()
    assert said.startswith(f"foedus {__version__} (Python {python}, torch {torch}, ")
    code = "import sys, foedus.cli.doctor as d; d.version_line(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    module = [sys.executable, "-m", "foedus", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout.strip() == said


@pytest.mark.parametrize(
    "command",
    ["demo", "run", "compare", "tune", "diagnose", "report", "data list", "data get", "data show"],
)
def test_help_has_an_example(cli, command):
    text = cli(*command.split(), "--help").output
    assert "Example" in text
    assert text.count(f"foedus {command}") >= 1


def commands(command, path=()):
    """Every command below one, with the words that call it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def test_help_shows_what_is_in_brackets(cli, monkeypatch):
    """Rich takes [run] for markup, and drops it."""
    monkeypatch.setenv("COLUMNS", "300")
    seen = []
    for path, command in commands(typer.main.get_command(app)):
        shown = " ".join(cli(*path, "--help").output.split())
        texts = [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
        brackets = Counter(re.findall(r"\[[^\]\n]*\]", "\n".join(texts)))
        assert all(shown.count(b) >= n for b, n in brackets.items()), (path, brackets)
        seen += brackets
    assert {"[run]", "[tune.options]", "[0.01, 0.1, 1.0]"} <= set(seen)


def test_help_lists_the_commands(cli):
    text = cli("--help").output
    for command in ("demo", "run", "compare", "tune", "report", "data"):
        assert re.search(rf"\b{command}\b", text)


def test_run_then_report(cli, tmp_path):
    (tmp_path / "c.toml").write_text(
        CONFIG.format('algorithm = { type = "FedAvg" }\noutput = { run = "a.safetensors" }')
    )
    result = cli("run", "c.toml")
    assert "accuracy" in result.output
    assert "run:  a.safetensors\ncard: a.md\n" in result.output
    assert Path("a.md").read_text() == fd.Run.load("a.safetensors").card("a.safetensors")
    assert len(fd.Run.load("a.safetensors").records) == 3
    cli("run", "c.toml", "--out", "b.safetensors")
    result = cli("report", "a.safetensors", "--out", "p.html", "--target", "0.5")
    assert "target: accuracy at least 0.5000" in result.output
    assert (tmp_path / "p.html").is_file()
    assert (
        "already among the runs" in cli("report", "a.safetensors", "b.safetensors", code=2).stderr
    )


def test_the_seed_of_the_file_is_that_of_the_run(cli, tmp_path):
    text = CONFIG.format('algorithm = { type = "FedAvg" }\noutput = { run = "a.safetensors" }')
    (tmp_path / "c.toml").write_text(text.replace("rounds = 2", "rounds = 2, seed = 3"))
    cli("run", "c.toml")
    assert fd.Run.load("a.safetensors").settings["seed"] == 3


def test_run_shows_metrics_and_why_it_has_stopped(cli, tmp_path):
    text = CONFIG.format('algorithm = { type = "FedAvg", lr = 1e-9 }')
    asked = 'rounds = 9, metrics = ["auc"], stop = { rounds = 2, metric = "loss", minimum = 0.1 }'
    (tmp_path / "c.toml").write_text(text.replace("rounds = 2", asked))
    output = cli("run", "c.toml").output
    assert " auc\n" in output
    assert "stopped after round 2: loss has not improved on" in output


def test_run_writes_a_page_when_asked(cli, tmp_path):
    (tmp_path / "c.toml").write_text(
        CONFIG.format('algorithm = { type = "FedAvg" }\noutput = { report = "p.html" }')
    )
    cli("run", "c.toml")
    assert (tmp_path / "p.html").is_file()
    cli("run", "c.toml", "--report", "q.html")
    assert (tmp_path / "q.html").is_file()
    assert "--report: cannot write" in cli("run", "c.toml", "--report", "no/q.html", code=2).stderr


def test_compare_and_report_on_its_folder(cli, tmp_path):
    text = (
        'algorithms.FedAvg = { lr = 0.1 }\nalgorithms.Central = {}\noutput = { runs = "runs", '
        'report = "p.html" }'
    )
    (tmp_path / "c.toml").write_text(CONFIG.format(text))
    first = cli("compare", "c.toml").output
    assert "2 files in runs" in first
    assert (tmp_path / "p.html").is_file()
    second = cli("report", "runs", "--out", "q.html").output
    row = next(line for line in first.splitlines() if "FedAvg" in line)
    assert row.split() in [line.split() for line in second.splitlines()]


def test_the_configs_in_the_help_work(cli, tmp_path):
    for command in ("run", "compare", "tune"):
        text = cli(command, "--help").output
        lines = [line.strip() for line in text.splitlines() if re.match(r"\s+[\w.]+\s*= \{", line)]
        config = (
            "\n".join(lines).replace("rounds = 30", "rounds = 1").replace("seeds = 3", "seeds = 1")
        )
        assert set(tomllib.loads(config)) >= {"data", "split", "run"}
        (tmp_path / "c.toml").write_text(config)
        cli(command, "c.toml")


def test_examples_are_checked_by_the_commands(cli):
    result = cli("run", EXAMPLES / "compare.toml", code=2)
    assert "use foedus compare" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "none.toml"), "none.toml: cannot be read"),
        (("report", "none.safetensors"), "none.safetensors: there is no such file"),
        (("data", "show", "digist"), "did you mean 'digits'"),
        (("data", "get", "digist"), "did you mean 'digits'"),
        (("demo", "--only", "fedfv"), "did you mean 'fedfw'"),
    ],
)
def test_errors_are_one_message_and_exit_code_2(cli, arguments, message):
    result = cli(*arguments, code=2)
    assert result.stderr.startswith("foedus: error: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_config_errors(cli, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.format('algorithm = { type = "FedAvg", lr = "0.1" }'))
    result = cli("run", "c.toml", code=2)
    assert result.stderr.strip() == (
        "foedus: error: c.toml: algorithm.lr: '0.1' is text, but must be a number or a table "
        "{ type = ... } with type one of Cosine, Step, WarmUp"
    )


def test_unwritable_page(cli, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.format("algorithms.FedAvg = {}"))
    (tmp_path / "file").write_text("")
    assert "file" in cli("compare", "c.toml", "--out", "file/p.html", code=2).stderr


def test_outputs_are_checked_before_the_work(cli, tmp_path, monkeypatch):
    """A folder that is absent or closed is named with its option and a remedy, and nothing runs."""

    def work(*arguments, **options):
        raise AssertionError("the work has begun")

    monkeypatch.setattr(experiment.Experiment, "federation", work)
    monkeypatch.setattr(compare, "compare", work)
    monkeypatch.setattr(runner, "run_item", work)
    monkeypatch.setattr(markdown, "write_docs", work)
    monkeypatch.setattr(leakage, "audit_leakage", work)
    monkeypatch.setattr(fd.Comparison, "load", work)
    single = CONFIG.format('algorithm = { type = "FedAvg" }\noutput = { report = "no/p.html" }')
    (tmp_path / "one.toml").write_text(single)
    (tmp_path / "plain.toml").write_text(PLAIN)
    (tmp_path / "c.toml").write_text(CONFIG.format("algorithms.FedAvg = {}"))
    (tmp_path / "runs.toml").write_text(
        CONFIG.format('algorithms.FedAvg = {}\noutput = { runs = "no/runs" }')
    )
    (tmp_path / "file").write_text("")
    for key, *arguments in (
        ("--out", "compare", "c.toml", "--out", "no/p.html"),
        ("--out", "demo", "--out", "no/demo"),
        ("--out", "report", "runs", "--out", "no/p.html"),
        ("--out", "run", "plain.toml", "--out", "no/run.safetensors"),
        ("output.report", "run", "one.toml"),
        ("output.runs", "compare", "runs.toml"),
        ("--out", "diagnose", "c.toml", "--out", "no/p.html"),
        ("--plot", "diagnose", "c.toml", "--plot", "no/p.svg"),
        ("--out", "paper", "ffgb", "theorem43", "--quick", "--out", "no/results"),
        ("--docs", "paper", "--docs", "no/docs"),
        ("--out", "audit", "leakage", "--out", "no/p.svg"),
    ):
        message = cli(*arguments, code=2).stderr
        assert f"{key}: cannot write 'no/" in message, message
        assert "there is no folder 'no'; create it (mkdir -p no)" in message
        if "no" in (Path(a).parts[0] for a in arguments):
            closed = [a.replace("no/", "file/") for a in arguments]
            message = cli(*closed, code=2).stderr
            assert f"{key}: cannot write 'file/" in message and "choose another" in message
    assert not (tmp_path / "no").exists()


def test_a_folder_that_refuses_files_is_noticed(cli, tmp_path):
    (tmp_path / "c.toml").write_text(CONFIG.format("algorithms.FedAvg = {}"))
    message = cli("compare", "c.toml", "--out", "/proc/p.html", code=2).stderr
    assert "/proc is not a folder that can be written to" in message


def test_report_leaves_damaged_files_of_a_folder_out(cli, tmp_path):
    text = CONFIG.format('algorithms.FedAvg = {}\nalgorithms.FedProx = {}\noutput.runs = "runs"')
    (tmp_path / "c.toml").write_text(text)
    cli("compare", "c.toml")
    broken = tmp_path / "runs" / "FedProx-seed0.safetensors"
    broken.write_bytes(broken.read_bytes()[:-1])
    result = cli("report", "runs")
    assert "FedAvg" in result.stdout and re.search(r"left out: .*FedProx-seed0", result.stderr)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"Left out: .*FedProx-seed0.safetensors", page)
    assert "FedProx-seed0" in cli("report", "runs", broken, code=2).stderr  # asked for by name


def test_report_does_not_mix_federations(cli, tmp_path):
    text = CONFIG.format('algorithms.FedAvg = {}\noutput = { runs = "RUNS" }')
    for folder, clients in (("a", 4), ("b", 5)):
        changed = text.replace("RUNS", folder).replace("clients = 4", f"clients = {clients}")
        (tmp_path / "c.toml").write_text(changed)
        cli("compare", "c.toml")
    message = cli("report", "a", "b", code=2).stderr
    assert "different federations" in message and "clients is 4 in" in message
    assert "and 5 in" in message and "each federation alone" in message


def test_divergence_has_exit_code_1(cli, tmp_path):
    bad = '{ type = "FedAvg", lr = 1e30, model = { type = "MLP", hidden = [8] } }'
    (tmp_path / "c.toml").write_text(CONFIG.format(f"algorithm = {bad}"))
    result = cli("run", "c.toml", code=1)
    assert "round" in result.stderr
    (tmp_path / "c.toml").write_text(
        CONFIG.format(f"algorithms.bad = {bad}\nalgorithms.Central = {{}}")
    )
    result = cli("compare", "c.toml")  # the others are worth having
    assert "diverged in round" in result.output
    (tmp_path / "c.toml").write_text(CONFIG.format(f"algorithms.bad = {bad}"))
    cli("compare", "c.toml", code=1)


@pytest.mark.parametrize("by", ["flag", "variable"])
def test_debug_shows_the_traceback(cli, monkeypatch, by):
    if by == "variable":
        monkeypatch.setenv("FOEDUS_DEBUG", "1")
    arguments = [*(["--debug"] if by == "flag" else []), "run", "none.toml"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, fd.ConfigError)


def test_data_commands(cli):
    listing = cli("data", "list").output
    assert re.search(r"digits\s+1,346\s+451\s+64\s+10\s+bundled", listing)
    assert re.search(r"diabetes\s.*regression\s+bundled", listing)
    shown = cli("data", "show", "wine").output
    assert "133 training rows, 45 test rows" in shown
    assert re.search(r"class_0\s+44\s+15", shown)
    assert "standard deviation" in cli("data", "show", "diabetes").output
    assert "bundled" in cli("data", "get", "digits").output


PLAIN = """
[data]
name = "digits"
[split]
scheme = "iid"
clients = 4
[run]
rounds = 2
[algorithm]
type = "FedAvg"
"""


def test_the_examples_run_in_a_process_of_their_own(tmp_path):
    """Classes are known by name although nothing has used them yet."""
    import subprocess
    import sys
    from pathlib import Path

    example = Path(__file__).parents[2] / "examples" / "run.toml"
    done = subprocess.run(
        [sys.executable, "-m", "foedus.cli", "run", str(example)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout


def test_results_that_could_not_be_written_are_noticed_first(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(PLAIN)
    done = CliRunner().invoke(app, ["run", str(config), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "--out: cannot write" in done.output
    assert "it is a folder" in done.output


def test_split_errors_name_the_file_and_the_key(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(PLAIN.replace("clients = 4", "clients = 5000"))
    done = CliRunner().invoke(app, ["run", str(config)])
    assert done.exit_code == 2
    assert f"{config}: split.clients: clients=5000 is more than" in done.output.replace("\n", " ")


def test_resume_from_the_command_line(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(PLAIN)
    missing = CliRunner().invoke(app, ["run", str(config), "--resume"])
    assert "run.checkpoint is missing" in missing.output
    where = str(tmp_path / "kept.safetensors")
    config.write_text(PLAIN.replace("rounds = 2", f"rounds = 2\ncheckpoint = {where!r}"))
    assert CliRunner().invoke(app, ["run", str(config)]).exit_code == 0
    again = CliRunner().invoke(app, ["run", str(config)])
    assert "pass resume=True to go on" in again.output.replace("\n", " ")
    assert CliRunner().invoke(app, ["run", str(config), "--resume"]).exit_code == 0
    for path in tmp_path.glob("kept*"):
        path.unlink()
    gone = CliRunner().invoke(app, ["run", str(config), "--resume"])
    assert gone.exit_code == 2
    assert "there is no checkpoint to go on from" in " ".join(gone.output.split())
    auto = f"rounds = 2\nresume = 'auto'\ncheckpoint = {where!r}"
    config.write_text(PLAIN.replace("rounds = 2", auto))
    assert [CliRunner().invoke(app, ["run", str(config)]).exit_code for _ in "ab"] == [0, 0]


# -- diagnose --------------------------------------------------------------------------------------


FEDERATION = """
data  = { name = "wine" }
split = { scheme = "labels", clients = 4, per_client = 2 }
"""


def test_diagnose_measures_and_advises(cli, tmp_path):
    (tmp_path / "f.toml").write_text(FEDERATION)
    (tmp_path / "d").mkdir()
    output = cli(
        "diagnose", "f.toml", "--iterations", 8, "--out", "d/p.html", "--plot", "p.svg"
    ).output
    assert "wine: 4 clients, labels per_client=2" in output
    for measure in (
        "label TV",
        "omega_TV",
        "omega_W1",
        "Delta_D",
        "Delta_f",
        "spectral radius",
        "task similarity",
    ):
        assert re.search(rf"^.*{measure}.*  -?[\d.]+  \S", output, re.M), measure
    found = fd.diagnose(fd.split(fd.load("wine"), "labels", clients=4, per_client=2), iterations=8)
    assert str(found) in output
    assert "<h1>The federation wine</h1>" in (tmp_path / "d" / "p.html").read_text(encoding="utf-8")
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


def test_diagnose_looks_at_the_features_of_the_file(cli):
    output = cli("diagnose", EXAMPLES / "fednewton.toml", "--iterations", 8).output
    assert re.search(
        r"spectral radius +[\d.]+  plain Newton diverges; fd.RandomFourier\(500, bandwidth=4.0\), "
        r"reg=0.0001",
        output,
    )
    assert re.search(r"one model for all: fd.FedNewton\(.*solver='cg'\)", output)


@pytest.mark.parametrize("example", ["run.toml", "compare.toml"])
def test_diagnose_takes_the_files_of_the_other_commands(cli, example):
    assert "label TV" in cli("diagnose", EXAMPLES / example, "--iterations", 2).output


def test_diagnose_errors(cli, tmp_path):
    (tmp_path / "f.toml").write_text(FEDERATION)
    assert (
        "a picture must be named .svg or .png, not 'p.gif'"
        in cli("diagnose", "f.toml", "--plot", "p.gif", code=2).stderr
    )
    assert "--out: cannot write" in cli("diagnose", "f.toml", "--out", tmp_path, code=2).stderr
    (tmp_path / "f.toml").write_text(FEDERATION.replace("labels", "label"))
    assert (
        "split.scheme: scheme 'label' is unknown; did you mean 'labels'"
        in cli("diagnose", "f.toml", code=2).stderr
    )
    (tmp_path / "f.toml").write_text('data = { name = "wine" }')
    assert "the section [split] is missing" in cli("diagnose", "f.toml", code=2).stderr


def test_the_fednewton_example_runs(cli):
    output = cli("run", EXAMPLES / "fednewton.toml").output
    assert "<Run FedNewton: 8 rounds" in output
    assert Path("fednewton.safetensors").exists()


def test_papers_are_listed_with_their_durations(cli):
    output = cli("paper").output
    assert "theorem43" in output and "--quick" in output and "Table 1: softmax regression" in output


def test_an_item_of_a_paper(cli):
    first = cli("paper", "ffgb", "theorem43", "--quick", "--only", "T=4", "--workers", 1)
    assert (
        "with residual" in first.output
        and "not measured" not in first.output.split("does not hold")[0]
    )
    assert (
        Path("results/quick/ffgb-theorem43.json").exists() and Path("results/index.html").exists()
    )
    assert list(Path("results/quick/figures").glob("ffgb-theorem43*.svg"))
    again = cli("paper", "ffgb", "theorem43", "--show", "--quick")
    assert "with residual" in again.output
    cli("paper", "--docs", "docs")
    assert "theorem43" in Path("docs/reproduction.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fedx", "table1"), "NAME='fedx' is no paper here"),
        (("fedfww",), "fedboost, fednewton; did you mean 'fedfw'?"),
        (("fedfw", "table9"), "ITEM='table9' is not of fedfw"),
        (("fedfw", "tabel1"), "did you mean 'table1'?"),
        (("fedfw", "table1", "--quick", "--full"), "exclude each other"),
        (("fedfw", "table1", "--only", "data"), "must be SETTING=VALUE"),
        (("fedfw", "table1", "--only", "data=mars"), "data is one of mnist, synthetic, cifar10"),
        (("fedfw", "table1", "--show"), "nothing of fedfw table1 is stored"),
    ],
)
def test_bad_input_to_paper(cli, arguments, words):
    result = cli("paper", *arguments, code=2)
    assert words in " ".join(result.output.split())


def test_a_closed_pipe_ends_a_command_quietly():
    """`foedus data list | head`: the reader is gone before anything is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "foedus.cli", "data", "list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.stderr == ""


def test_audit_hostile(cli, monkeypatch):
    from foedus.audit import hostility as hostile

    some = {
        k: v
        for k, v in hostile.methods(6, quick=True).items()
        if k in ("FedAvg, mean", "FedAvg, median", "FedFW")
    }
    monkeypatch.setattr(hostile, "methods", lambda clients, quick: some)
    command = "audit hostile --attack scale --attack nan --clients 6 --quick --out page.html"
    out = cli(*command.split()).stdout
    assert f"foedus {command}</pre>" in Path("page.html").read_text()
    lines = [line.split() for line in out.splitlines() if line.strip().startswith(("scale", "nan"))]
    assert len(lines) == 6
    found = {(line[0], " ".join(line[1:-3])): [float(v) for v in line[-3:]] for line in lines}
    assert found["scale", "FedAvg, median"][-1] > found["scale", "FedAvg, mean"][-1]
    assert "is unknown" in cli("audit", "hostile", "--attack", "flip", code=2).stderr
