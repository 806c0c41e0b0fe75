"""What py.typed promises: type checkers and editors see the public names, though they are loaded
when first used.
"""

import ast
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jedi
import pytest

import foedus

ROOT = Path(foedus.__file__).resolve().parents[1]
PROGRAM = """\
import foedus as fd

fed = fd.split(fd.load("digits"), "iid", clients=10)
reveal_type(fd.run(fd.FedAvg(fd.Linear(), lr=0.1), fed, rounds=5))
fd.run(1, 2, 3, nonsense=4)
fd.FedAverage
"""
# Only the types of foedus are read here: those of PyTorch and pandas take mypy a minute.
MYPY = """\
[mypy]
mypy_path = {root}
python_version = 3.11
follow_imports = skip
ignore_missing_imports = true
[mypy-foedus.*]
follow_imports = silent
"""


def test_the_stub_has_every_public_name_from_the_module_that_init_loads_it_from():
    tree = ast.parse((ROOT / "foedus" / "__init__.pyi").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == len(tree.body)
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert homes == {**foedus._HOME, "__version__": "foedus.version"}
    # `as`: exported again
    assert all(alias.asname == alias.name for node in imports for alias in node.names)
    assert sum(len(node.names) for node in imports) == len(homes)


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def diagnostics(tool, program):
    """What a tool says of each line of the program."""
    done = subprocess.run(
        tool, cwd=program.parent, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr  # 0: found no error; others: did not run
    said = {}
    for line in done.stdout.splitlines():
        if "program.py:" in line:
            number, text = line.split("program.py:")[1].split(":", 1)
            said[int(number)] = f"{said.get(int(number), '')}{text}\n"
    return said


@pytest.mark.slow
def test_mypy_sees_the_types(program):
    (program.parent / "mypy.ini").write_text(MYPY.format(root=ROOT))
    said = diagnostics([sys.executable, "-m", "mypy", program.name], program)
    assert list(said) == [4, 5, 6]
    assert 'Revealed type is "foedus.core.result.Run"' in said[4]
    assert 'Unexpected keyword argument "nonsense" for "run"' in said[5]
    assert 'Module has no attribute "FedAverage"' in said[6]


def test_pyright_sees_the_types(program):
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (program.parent / "pyrightconfig.json").write_text(json.dumps(settings))
    tool = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, program.name]
    said = diagnostics(tool, program)
    assert list(said) == [4, 5, 6]
    assert said[4].endswith('is "Run"\n')
    assert 'No parameter named "nonsense"' in said[5]
    assert '"FedAverage" is not a known attribute of module "foedus"' in said[6]


def script(last_line):
    project = jedi.Project(ROOT, smart_sys_path=False, added_sys_path=[str(ROOT)])
    return jedi.Script(f"import foedus as fd\n{last_line}", project=project)


def test_jedi_completes_public_names():
    assert {each.name for each in script("fd.FedAv").complete()} == {"FedAvg", "FedAvgDistill"}


def test_jedi_shows_the_settings_of_an_algorithm():
    (signature,) = script("fd.FedAvg(").get_signatures()
    assert Path(signature.module_path) == ROOT / "foedus" / "algorithms" / "fedavg.py"
    shown = {each.name: each.description for each in signature.params}
    assert set(shown) == {field.name for field in dataclasses.fields(foedus.FedAvg) if field.init}
    assert shown["server_lr"] == "param server_lr: Annotated[float, Gt(0)]=1.0"
