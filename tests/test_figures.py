"""The diagrams of the documentation: one script draws all of them, and every one is used."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest

pytest.importorskip("matplotlib")

from tests.pages import ROOT

FOLDER = ROOT / "docs" / "figures"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("figures_of_the_docs", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_script_draws_every_figure_that_is_committed(script, tmp_path):
    drawn = script.make(tmp_path)
    assert [p.name for p in drawn] == list(script.FIGURES)
    for path in drawn:
        text = path.read_text()
        committed = FOLDER / path.name
        assert committed.exists(), f"{path.name}: run `python docs/figures/make.py`"
        size = re.compile(r'viewBox="([^"]*)"')
        assert size.search(text)[1] == size.search(committed.read_text())[1]


def test_every_figure_is_on_a_page_and_described(script):
    found: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for alt, name in re.findall(r"!\[([^\]]*)\]\(\S*figures/([\w-]+\.svg)\)", page.read_text()):
            found.setdefault(name, []).append(alt)
    for name in script.FIGURES:
        assert found.get(name), f"no page shows {name}"
        assert all(len(alt) >= 40 for alt in found[name]), f"{name} needs a description"


def luminance(color: str) -> float:
    """Relative luminance by WCAG 2.1."""
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_luminance_is_that_of_the_standard():
    assert luminance("#ffffff") == pytest.approx(1)
    assert luminance("#000000") == 0
    assert luminance("#ff0000") == pytest.approx(0.2126)
    assert luminance("#808080") == pytest.approx(0.21586, abs=1e-4)  # ((0.502 + .055) / 1.055)^2.4


@pytest.mark.parametrize("background", ["#ffffff", "#0d1117", "#1e2129"])
def test_figures_are_readable_on_white_and_on_dark(script, background):
    for path in FOLDER.iterdir():
        if path.name not in script.FIGURES:
            continue
        colors = set(re.findall(r"#[0-9a-f]{6}\b", path.read_text()))
        assert colors >= {script.GREY}
        for color in colors:
            light, dark = sorted((luminance(color), luminance(background)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, f"{path.name}: {color} on {background}"
