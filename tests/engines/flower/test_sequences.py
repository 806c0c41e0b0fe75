"""Labels of the steps of sequences at Flower's clients: the numbers of `fd.Local`."""

from __future__ import annotations

import pytest

import foedus as fd

pytest.importorskip("flwr")

from foedus.engines.flower.forms import Forms
from tests.core.test_sequences import federation, tagger
from tests.engines.flower.grid import Here

ALGORITHMS = {
    "FedAvg": fd.FedAvg(tagger(), lr=0.3, batch_size=4),
    "FineTuned": fd.FineTuned(tagger(), lr=0.3, batch_size=4),
}


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_numbers_of_local(name, tmp_path, monkeypatch):
    seen, form_of = [], Forms.of

    def known(self, ask, kind=0):
        seen.append(form_of(self, ask, kind))
        return seen[-1]

    monkeypatch.setattr(Forms, "of", known)
    engine = Here(tmp_path, nodes=2, code="tests.engines.flower.test_sequences:ALGORITHMS")
    found, want = (
        fd.run(ALGORITHMS[name], federation(), 2, engine=e).history for e in (engine, fd.Local())
    )
    for column in ("loss", "accuracy", "own_loss", "own_accuracy", "bytes_up", "bytes_down"):
        if column in want and column in found:
            assert found[column].tolist() == pytest.approx(want[column].tolist(), rel=1e-6), column
    assert seen and all(form is not None for form in seen)  # the server knows what to expect
