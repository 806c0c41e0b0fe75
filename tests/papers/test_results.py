"""What is stored and committed: every item, and the pages that are written from it."""

from __future__ import annotations

import pytest

from foedus.papers import results as render
from foedus.papers import runner
from foedus.papers.markdown import write_docs
from tests.pages import ROOT

RESULTS = ROOT / "results"


@pytest.mark.parametrize(
    ("name", "key"), [(n, k) for n in runner.PAPERS for k in runner.paper(n).items]
)
def test_every_item_is_stored(name, key):
    quick = render.stored(RESULTS, name, key, ("quick",))
    assert quick is not None, f"foedus paper {name} {key} --quick"
    assert all(c.versions and c.rows is not None for c in quick.cells)
    # with the settings of today
    assert len(quick.cells) == len(runner.wanted(name, key, "quick", RESULTS))
    for view in quick.item.views:
        render.table_of(view, quick.found)


def test_the_pages_are_those_of_the_results(tmp_path):
    for path in write_docs(RESULTS, tmp_path, draw=False):
        committed = ROOT / "docs" / "results" / path.relative_to(tmp_path)
        assert committed.read_text() == path.read_text(), (
            f"{committed.name}: run `foedus paper --docs docs/results`"
        )


def test_every_picture_of_the_pages_is_there():
    for page in (ROOT / "docs" / "results" / "papers").glob("*.md"):
        for line in page.read_text().splitlines():
            if line.startswith("!["):
                assert (page.parent / line.rsplit("(", 1)[1].rstrip(")")).exists(), line
