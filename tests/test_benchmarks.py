"""What the benchmarks keep, and the page that is written from it; nothing is timed here."""

from __future__ import annotations

import json
import pstats
from cProfile import Profile

import pytest
import torch

from benchmarks import store
from benchmarks.__main__ import PAGE, STUDIES
from benchmarks.profiles import largest, name_of
from benchmarks.timing import in_turns, ratio, shown
from benchmarks.workloads import CROWD, WORKLOADS, Limit, Workload, foedus_rounds
from tests.pages import ROOT


def test_the_page_is_that_of_the_results():
    written = (ROOT / "docs" / "results" / "performance.md").read_text()
    assert written == store.page(PAGE), "run `python -m benchmarks --docs`"


def test_all_that_is_stored_is_an_item():
    names = [name for items in PAGE.values() for name in items]
    assert len(set(names)) == len(names)
    assert not set(names) & set(STUDIES)
    for file in store.FOLDER.glob("*.json"):
        found = json.loads(file.read_text())
        assert file.stem in names
        assert found["text"].strip() and found["repeats"] >= 1 and found["versions"]["torch"]


def test_what_is_printed_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    with store.kept("tea", 3):
        print("| a |\n|---|\n| 1 |")
    found = json.loads((tmp_path / "tea.json").read_text())
    assert (found["text"], found["repeats"]) == ("| a |\n|---|\n| 1 |", 3)
    with pytest.raises(RuntimeError), store.kept("tea", 9):
        raise RuntimeError
    # what failed leaves the last result alone
    assert json.loads((tmp_path / "tea.json").read_text()) == found


def test_tables_with_one_head_are_joined():
    one, two, other = "| a |\n|---|\n| 1 |", "| a |\n|---|\n| 2 |", "words\n\n| a |\n|---|\n| 3 |"
    assert store.joined([one, two]) == "| a |\n|---|\n| 1 |\n| 2 |"
    assert store.joined([one, other]) == f"{one}\n\n{other}"


def test_times_are_of_turns():
    clock = iter(range(100))
    taken = in_turns({"a": lambda: float(next(clock)), "b": lambda: float(next(clock))}, 3)
    assert taken == {"a": [2.0, 4.0, 6.0], "b": [3.0, 5.0, 7.0]}
    assert ratio(taken, "b", "a") == 5 / 4
    assert shown([1.0, 2.0, 3.0, 4.0, 5.0]) == "3.00 ± 1.00"
    assert shown([0.5]) == "0.5000 ± 0.0000"


def test_a_profile_names_what_it_finds():
    profile = Profile()
    profile.runcall(
        lambda: [torch.mm(torch.ones(300, 300), torch.ones(300, 300)).add_(1) for _ in range(20)]
    )
    text = largest(pstats.Stats(profile))
    assert "torch.mm" in text and "%" in text
    assert name_of(("/a/foedus/core/run.py", 3, "step")) == "core/run.py step"
    assert name_of(("~", 0, "<method 'add_' of 'torch._C.TensorBase' objects>")) == "Tensor.add_"


@pytest.mark.parametrize("hidden", [None, 7])
def test_by_hand_is_the_same_computation(hidden):
    """All clients, one batch of all rows: no order of rows is left to differ in."""
    import foedus as fd

    model = fd.Linear() if hidden is None else fd.MLP(hidden)
    work = Workload("t", "", 4, 12, 4, model, "none", 3, hidden=hidden, shape=(16,), batch=12)
    fed = work.data()
    limit = Limit(work, fed)
    run = fd.run(fd.FedAvg(model, lr=0.1, batch_size=12), fed, 0, evaluate_every=0)
    names = [("weight", "bias")] if hidden is None else [("weight0", "bias0"), ("weight1", "bias1")]
    limit.weights, limit.biases = ([run.state.w[pair[i]] for pair in names] for i in (0, 1))
    for _ in range(work.rounds):
        limit.round()
    assert torch.allclose(foedus_rounds(work, fed, work.rounds), limit.weights[0], atol=1e-6)


def test_the_crowd_has_the_stated_size():
    assert (CROWD.clients, CROWD.rows, CROWD.cohort) == (100_000, 20, 1000)
    assert set(WORKLOADS) >= {"w1", "w2", "w3", "w4"}
