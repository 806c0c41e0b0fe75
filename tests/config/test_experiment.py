from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import foedus as fd
from foedus.config import reader
from foedus.config.experiment import algorithm_section, read_config

BASE = {
    "data": 'name = "wine"',
    "split": 'scheme = "dirichlet"\nclients = 4\nalpha = 0.5',
    "run": "rounds = 3",
    "algorithm": 'type = "FedAvg"\nlr = 0.1',
}


def write(tmp_path: Path, text: str | None = None, **sections: str | None) -> Path:
    path = tmp_path / "exp.toml"
    if text is None:
        parts = {**BASE, **sections}
        text = "\n".join(
            f"[{name.replace('__', '.')}]\n{body}"
            for name, body in parts.items()
            if body is not None
        )
    path.write_text(text, encoding="utf-8")
    return path


def test_a_run(tmp_path):
    path = write(
        tmp_path,
        run='rounds = 3\nseed = 7\nparticipation = { poisson = 0.5 }\nquantise = "int8"\ntarget = '
        "1",
        algorithm='type = "FedProx"\nlr = 1\nmu = 0.2\nbatch_size = "none"\nmodel = { type = '
        '"MLP", hidden = [8, 4] }',
        engine="batch = false\nmemory = 1000",
        output='run = "r.safetensors"',
    )
    experiment = read_config(path, "run")
    assert experiment.algorithms == {
        "": fd.FedProx(fd.MLP((8, 4)), lr=1.0, mu=0.2, batch_size=None)
    }
    assert (experiment.rounds, experiment.seeds, experiment.target) == (3, [7], 1)
    assert experiment.options == {
        "participation": fd.Poisson(0.5),
        "quantise": "int8",
        "engine": fd.Local(batch=False, memory=1000),
    }
    assert experiment.output == {"run": "r.safetensors"}
    fed = experiment.federation()
    assert len(fed) == 4
    assert fed.data.name == "wine"


def test_schedules_and_a_server_optimizer(tmp_path):
    algorithm = """type = "FedOpt"
optimizer = "adamw"
decay = "weights"
server_optimizer = "AdamW"
server_options = { weight_decay = 0.1, betas = [0.5, 0.9] }

[algorithm.lr]
type = "WarmUp"
over = 3
by = "step"
then = { type = "Cosine", lr = 0.1, over = 20, end = 0.01 }"""
    algorithm = read_config(write(tmp_path, algorithm=algorithm), "run").algorithms[""]
    lr = fd.schedules.WarmUp(3, fd.schedules.Cosine(0.1, over=20, end=0.01), by="step")
    options = {"weight_decay": 0.1, "betas": (0.5, 0.9)}
    assert algorithm == fd.FedOpt(
        lr=lr, optimizer="adamw", decay="weights", server_optimizer="AdamW", server_options=options
    )
    # and back, as `foedus tune` writes it
    text = algorithm_section(algorithm).replace("[algorithm]\n", "")
    assert read_config(write(tmp_path, algorithm=text), "run").algorithms[""] == algorithm


def test_sets_for_all_parameters_or_for_each_tensor(tmp_path):
    fedfw = 'type = "FedFW"\ndomain = '
    ball = '{ type = "L2Ball", radius = 3.0 }'
    each = f'{{ weight = {ball}, bias = {{ type = "Box", lo = -1.0, hi = 2.0 }} }}'
    for text, domain in (
        (ball, fd.L2Ball(3.0)),
        (f'{{ type = "PerLayer", domains = {ball} }}', fd.PerLayer(fd.L2Ball(3.0))),
        (
            f'{{ type = "PerLayer", domains = {each} }}',
            fd.PerLayer({"weight": fd.L2Ball(3.0), "bias": fd.Box(-1.0, 2.0)}),
        ),
    ):
        experiment = read_config(write(tmp_path, algorithm=fedfw + text), "run")
        assert experiment.algorithms == {"": fd.FedFW(domain=domain)}
        experiment.algorithms[""].check(experiment.federation().spec)


def test_how_replies_are_averaged(tmp_path):
    section = 'type = "SecureAggregation"\nthreshold = 0.8\nrange = 4'
    for command, change in (
        ("run", {}),
        ("compare", {"algorithm": None, "algorithms__FedAvg": ""}),
    ):
        experiment = read_config(write(tmp_path, aggregation=section, **change), command)
        assert experiment.options["aggregation"] == fd.SecureAggregation(threshold=0.8, range=4.0)
    robust = read_config(write(tmp_path, aggregation='type = "TrimmedMean"\npart = 0.1'), "run")
    assert robust.options["aggregation"] == fd.TrimmedMean(0.1)


def test_a_comparison(tmp_path):
    sections = {
        "algorithm": None,
        "algorithms__FedAvg": "",
        'algorithms__"tuned, 1"': 'type = "FedAvg"\nmodel = "MLP"',
    }
    path = write(tmp_path, run="rounds = 3\nseeds = 2", **sections)
    experiment = read_config(path, "compare")
    assert experiment.algorithms == {"FedAvg": fd.FedAvg(), "tuned, 1": fd.FedAvg(fd.MLP())}
    assert experiment.seeds == [0, 1]
    assert read_config(write(tmp_path, run="rounds = 1\nseeds = [4, 2]", **sections)).seeds == [
        4,
        2,
    ]


def test_options_reach_load_and_split(tmp_path):
    path = write(
        tmp_path,
        data='name = "wine"\nscale = "none"\ntest = 0.5',
        split='scheme = "labels"\nclients = 3\nper_client = 2',
    )
    experiment = read_config(path, "run")
    assert experiment.data == {"source": "wine", "scale": None, "test": 0.5}
    assert experiment.split == {"scheme": "labels", "clients": 3, "per_client": 2}


@pytest.mark.parametrize(
    ("data", "split"),
    [
        ("digits", 'scheme = "rotations"\nangles = [0, 45.0]'),
        ("digits", 'scheme = "rotations"\nangles = 30'),
        ("digits", 'scheme = "covariate"\ntilt = 2\ndirection = 3'),
        ("digits", 'scheme = "covariate"\ntilt = 0.5\ndirection = "none"'),
        ("digits", 'scheme = "permuted"\nkinds = 2'),
        ("digits", 'scheme = "quantity"\nexponent = 2\nmin_rows = 5'),
        ("wine", 'scheme = "lognormal"\nsigma = 0.5'),
        ("wine", 'scheme = "noise"\nsigma = 0.5'),
        ("diabetes", 'scheme = "targets"\ns = 0.5'),
        ("diabetes", 'scheme = "quantiles"\nalpha = 0.5\nbins = 4'),
    ],
)
def test_every_scheme_can_be_written_in_a_file(tmp_path, data, split):
    path = write(tmp_path, data=f'name = "{data}"', split=f"{split}\nclients = 4")
    fed = read_config(path, "run").federation()
    assert len(fed) == 4 and f'"{fed.scheme}"' in split


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        (
            {"dta": ""},
            "dta",
            ["section 'dta' is unknown", "did you mean 'data'", "allowed: data, split"],
        ),
        ({"data": None}, "data", ["section [data] is missing"]),
        (
            {"data": 'nam = "wine"'},
            "data.nam",
            ["did you mean 'name'", "allowed: name, path, scale"],
        ),
        ({"data": 'name = "wien"'}, "data.name", ["did you mean 'wine'", "digits"]),
        ({"data": "name = 3"}, "data.name", ["3 is an integer, but must be text"]),
        ({"data": ""}, "data", ["either name", "or path"]),
        ({"data": 'name = "wine"\npath = "x"'}, "data", ["either name", "or path"]),
        ({"data": 'path = "no/such.csv"'}, "data.path", ["no file or folder 'no/such.csv'"]),
        (
            {"data": 'name = "wine"\nscale = "standart"'},
            "data.scale",
            ["did you mean 'standard'", "minmax", "none"],
        ),
        (
            {"split": 'scheme = "dirichle"\nclients = 3'},
            "split.scheme",
            ["did you mean 'dirichlet'", "allowed: iid"],
        ),
        ({"split": "clients = 3"}, "split.scheme", ["is missing", "allowed: iid, dirichlet"]),
        ({"split": 'scheme = "dirichlet"\nclients = 3'}, "split.alpha", ["is missing", "a number"]),
        ({"split": 'scheme = "iid"'}, "split.clients", ["is missing", "an integer"]),
        (
            {"split": 'scheme = "iid"\nclients = 3\nalpha = 1'},
            "split.alpha",
            ["key 'alpha' is unknown", "allowed: scheme, clients"],
        ),
        (
            {"split": 'scheme = "iid"\nclients = 3.5'},
            "split.clients",
            ["3.5 is a number, but must be an integer"],
        ),
        ({"run": "round = 3"}, "run.round", ["did you mean 'rounds'"]),
        ({"run": ""}, "run.rounds", ["is missing", "an integer"]),
        (
            {"run": "rounds = true"},
            "run.rounds",
            ["True is true or false, but must be an integer"],
        ),
        ({"run": "rounds = -1"}, "run.rounds", ["at least 0"]),
        ({"run": "rounds = 1\nparticipation = 0"}, "run.participation", ["(0, 1]", "poisson"]),
        (
            {"run": "rounds = 1\nparticipation = { poison = 1 }"},
            "run.participation.poison",
            ["did you mean 'poisson'"],
        ),
        (
            {"run": "rounds = 1\nparticipation = { poisson = 2 }"},
            "run.participation.poisson",
            ["at most 1"],
        ),
        ({"run": 'rounds = 1\nquantise = "int4"'}, "run.quantise", ["float16, bfloat16, int8"]),
        ({"run": "rounds = 1\nseeds = 2"}, "run.seeds", ["foedus compare"]),
        ({"run": "rounds = 1\nresume = true"}, "run.resume", ["run.checkpoint"]),
        (
            {"aggregation": 'type = "SecureAgregation"'},
            "aggregation.type",
            ["did you mean 'SecureAggregation'"],
        ),
        ({"aggregation": "range = 4"}, "aggregation.type", ["is missing", "SecureAggregation"]),
        (
            {"aggregation": 'type = "SecureAggregation"\nthreshold = 0.4'},
            "aggregation.threshold",
            ["above 0.5 and at most 1", "two halves"],
        ),
        (
            {"aggregation": 'type = "SecureAggregation"\nbits = "many"'},
            "aggregation.bits",
            ["integer"],
        ),
        ({"engine": 'type = "Ry"'}, "engine.type", ["did you mean 'Ray'"]),
        (
            {"engine": 'type = "Ray"\nworkers = 0'},
            "engine.workers",
            ["workers=0 must be an integer of at least 1 or None"],
        ),
        ({"engine": "bach = true"}, "engine.bach", ["did you mean 'batch'"]),
        ({"engine": 'batch = "always"'}, "engine.batch", ["True, False or 'auto'"]),
        ({"algorithm": None}, "algorithm", ["section [algorithm] is missing"]),
        ({"algorithm": "lr = 1"}, "algorithm.type", ["is missing", "FedAvg"]),
        (
            {"algorithm": 'type = "FedAvrg"'},
            "algorithm.type",
            ["did you mean 'FedAvg'", "allowed:"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlearning = 1'},
            "algorithm.learning",
            ["key 'learning' is unknown", "lr, epochs"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlr = "0.1"'},
            "algorithm.lr",
            ["'0.1' is text, but must be a number"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlr = -1'},
            "algorithm.lr",
            ["must be a positive finite number"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nsteps = 1.5'},
            "algorithm.steps",
            ['an integer or "none"'],
        ),
        (
            {"algorithm": 'type = "FedAvg"\noptimizer = "adm"'},
            "algorithm.optimizer",
            ["'adm' is unknown", "'adam'?", "sgd"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\noptimizer = 3'},
            "algorithm.optimizer",
            ['must be one of "sgd", "adam"'],
        ),
        (
            {"algorithm": 'type = "Scaffold"\noption = 3'},
            "algorithm.option",
            ["option=3 must be 1 (gradient at x) or 2"],
        ),
        (
            {"algorithm": 'type = "Scaffold"\noption = true'},
            "algorithm.option",
            ["must be one of 1, 2"],
        ),
        (
            {"algorithm": 'type = "FedDR"\nweights = "rows"'},
            "algorithm.weights",
            ["must be 'uniform'", "count alike"],
        ),
        (
            {"aggregation": 'type = "NormBound"\nbound = "mean"'},
            "aggregation.bound",
            ["a positive finite number or 'median'"],
        ),
        (
            {"aggregation": 'type = "NormBound"\nbound = true'},
            "aggregation.bound",
            ['a number or one of "median"'],
        ),
        (
            {"algorithm": 'type = "FedAvg"\noptimizer = "sdg"'},
            "algorithm.optimizer",
            ["did you mean 'sgd'"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nmodel = "MPL"'},
            "algorithm.model.type",
            ["did you mean 'MLP'", "CNN, Linear, MLP"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nmodel = 5'},
            "algorithm.model",
            ["one of CNN, Linear, MLP"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nmodel = { hidden = [8] }'},
            "algorithm.model.type",
            ["is missing"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nmodel = { type = "MLP", hidden = [8, "x"] }'},
            "algorithm.model.hidden[1]",
            ["integer"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nmodel = { type = "MLP", hidden = [] }'},
            "algorithm.model.hidden",
            ["positive layer widths"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlr = { type = "Cosin", lr = 0.1, over = 9 }'},
            "algorithm.lr.type",
            ["did you mean 'Cosine'?", "Step, WarmUp"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlr = { type = "Cosine", lr = 0.1 }'},
            "algorithm.lr.over",
            ["is missing", "an integer"],
        ),
        (
            {"algorithm": 'type = "FedAvg"\nlr = "fast"'},
            "algorithm.lr",
            ["type", "Cosine, Step, WarmUp"],
        ),
        ({"output": 'rnu = "x"'}, "output.rnu", ["did you mean 'run'"]),
        ({"output": 'runs = "x"'}, "output.runs", ["allowed: run, report"]),
        (
            {"algorithm": 'type = "FedFW"\ndomain = { type = "PerLayr" }'},
            "algorithm.domain.type",
            ["did you mean 'PerLayer'?", "L1Ball"],
        ),
        (
            {"algorithm": 'type = "FedFW"\ndomain = { type = "PerLayer", domains = { w = 3 } }'},
            "algorithm.domain.domains.w",
            ["3 is an integer", "L1Ball"],
        ),
    ],
)
def test_mistakes_name_file_key_and_what_is_allowed(tmp_path, sections, key, words):
    path = write(tmp_path, **sections)
    with pytest.raises(fd.ConfigError) as caught:
        read_config(path, "run")
    message = str(caught.value)
    assert message.startswith(f"{path}: {key}: "), message
    for word in words:
        assert word in message, message


def test_allowed_algorithms_are_those_that_can_run(tmp_path):
    with pytest.raises(fd.ConfigError) as caught:
        read_config(write(tmp_path, algorithm='type = "x"'), "run")
    assert "LocalTraining" not in str(caught.value)
    assert "Scaffold" in str(caught.value)


def test_names_with_spaces_are_quoted_in_keys(tmp_path):
    path = write(tmp_path, algorithm=None, **{'algorithms__"My own"': 'type = "FedAvg"\nlr = "a"'})
    with pytest.raises(fd.ConfigError, match=r'algorithms\."My own"\.lr'):
        read_config(path)


def test_the_other_command_is_named(tmp_path):
    with pytest.raises(fd.ConfigError, match="use foedus run"):
        read_config(write(tmp_path), "compare")
    with pytest.raises(fd.ConfigError, match="use foedus compare"):
        read_config(write(tmp_path, algorithm=None, algorithms__FedAvg=""), "run")


@pytest.mark.parametrize(
    ("section", "value", "why"),
    [
        ("algorithm", "type = [1]", r"algorithm\.type: type \[1\] is unknown"),
        (
            "algorithm",
            f'type = "FedAvg"\nlr = {"9" * 400}',
            r"algorithm\.lr: 9{20}\.\.\. is too large",
        ),
        ("run", f"rounds = {1 << 65}", r"run\.rounds: \d+\.\.\. is too large"),
        ("run", f"rounds = {'9' * 5000}", "not valid TOML"),
        ("run", f"rounds = {'[' * 3000}{']' * 3000}", "not valid TOML"),
    ],
    ids=["a list as type", "float", "integer", "digits", "nesting"],
)
def test_what_mutated_files_have_found(tmp_path, section, value, why):
    with pytest.raises(fd.ConfigError, match=why):
        read_config(write(tmp_path, **{section: value}), "run")


def test_seeds_without_end(tmp_path):
    with pytest.raises(fd.ConfigError, match=r"run\.seeds: 1000000000000 seeds are too many"):
        read_config(
            write(
                tmp_path,
                run="rounds = 1\nseeds = 1000000000000",
                algorithm=None,
                algorithms__FedAvg="",
            ),
            "compare",
        )


def test_syntax_errors_have_their_line(tmp_path):
    with pytest.raises(fd.ConfigError, match=r"exp\.toml: not valid TOML: .*line 2"):
        read_config(write(tmp_path, "[data]\nname = \n"), "run")
    with pytest.raises(fd.ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.toml")
    (tmp_path / "exp.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fd.ConfigError, match="UTF-8"):
        read_config(tmp_path / "exp.toml")


def test_a_section_must_be_a_table(tmp_path):
    with pytest.raises(
        fd.ConfigError, match=r"algorithm: must be a section \[algorithm\], not text"
    ):
        read_config(write(tmp_path, 'algorithm = "FedAvg"'), "run")


@pytest.mark.parametrize(("name", "command"), [("run", "run"), ("compare", "compare")])
def test_examples_are_valid(name, command):
    path = Path(__file__).parents[2] / "examples" / f"{name}.toml"
    assert read_config(path, command).algorithms
    assert tomllib.loads(path.read_text())


def test_classes_of_our_own_use_are_not_offered():
    """The probe of a diagnosis is an algorithm, too."""
    from foedus.diagnosis.spectral import _Probe

    assert issubclass(_Probe, fd.Algorithm)
    assert not [name for name in reader.concrete(fd.Algorithm) if name.startswith("_")]


def test_what_is_measured_and_when_to_stop(tmp_path):
    text = """rounds = 3
metrics = ["auc", "f1"]
per_client = true
stop = { rounds = 5, metric = "auc", minimum = 0.001 }
keep_best = false
stop_on_growth = true"""
    options = read_config(write(tmp_path, run=text), "run").options
    assert options == {
        "metrics": ("auc", "f1"),
        "per_client": True,
        "stop": fd.Patience(5, "auc", minimum=0.001),
        "keep_best": False,
        "stop_on_growth": True,
    }
    for line, message in (
        ("stop = { rounds = 0 }", r"run\.stop\.rounds: "),
        ("stop = { round = 5 }", r"run\.stop.*did you mean 'rounds'"),
        ('metrics = "auc"', r"run\.metrics"),
    ):
        with pytest.raises(fd.ConfigError, match=message):
            read_config(write(tmp_path, run=f"rounds = 3\n{line}"), "run")
    tuned = write(tmp_path, run='rounds = 3\nmetrics = ["auc"]', tune="lr = [0.1, 1.0]")
    with pytest.raises(fd.ConfigError, match=r"run\.metrics: foedus tune does not take this"):
        read_config(tuned, "tune")
