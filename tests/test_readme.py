"""The README's example runs and prints what the README says."""

from __future__ import annotations

from tests.pages import ROOT, read_page, run_page


def test_the_example_prints_what_it_says(tmp_path, monkeypatch):
    page = read_page(ROOT / "README.md")
    shown = [block for block in page.blocks if block.language == "python"]
    assert shown and all(block.output is not None and block.is_run() for block in shown)
    run_page(page, tmp_path, monkeypatch)
    assert (tmp_path / "scaffold.safetensors").exists()
