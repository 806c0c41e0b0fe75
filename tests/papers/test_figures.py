"""What the pictures of the papers show, read from the drawn objects."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex

from foedus.papers.figures import drawn_views, figure_of, file_of, pictures, write_pictures
from foedus.papers.item import Bars, Circles, Found, Images, Item, Lines, Table
from foedus.papers.results import Result

NAN = float("nan")


def drawn(view, rows: list[dict]):
    """The panels of a view, and the labels of its legend."""
    figure = figure_of(view, Found(pd.DataFrame([{"seed": 0, **r} for r in rows])))
    legend = [t.get_text() for group in figure.legends for t in group.get_texts()]
    return [a for a in figure.axes if a.get_visible()], legend


def points(line) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


# -- lines -----------------------------------------------------------------------------------------


def test_lines_are_means_over_seeds_with_a_band_of_all():
    rows = [
        {"x": x, "y": y, "method": m, "seed": s}
        for m, s, x, y in (
            ("a", 0, 1, 1.0), ("a", 1, 1, 3.0), ("a", 0, 2, 2.0), ("a", 1, 2, 6.0),
            ("b", 0, 1, 5.0), ("b", 0, 2, 7.0),
        )
    ]  # fmt: skip
    [panel], legend = drawn(Lines("x", "y", "method"), rows)
    assert [points(line) for line in panel.lines] == [[(1, 2), (2, 4)], [(1, 5), (2, 7)]]
    assert legend == ["a", "b"]
    [band] = panel.collections  # b has one seed
    low, high = band.get_datalim(panel.transData).intervaly
    assert (low, high) == (1.0, 6.0)
    assert (panel.get_xlabel(), panel.get_ylabel(), panel.get_title()) == ("x", "y", "")
    assert panel.get_xscale() == panel.get_yscale() == "linear"


def test_a_spread_inside_one_run_is_a_band_around_it():
    rows = [{"x": x, "y": 2.0 * x, "y spread": 0.5, "m": "a"} for x in (1, 2)]
    [panel], _ = drawn(Lines("x", "y", "m"), rows)
    [band] = panel.collections
    # 2 - 0.5 and 4 + 0.5
    assert tuple(band.get_datalim(panel.transData).intervaly) == (1.5, 4.5)


@pytest.mark.parametrize(("lines", "bands"), [(4, 4), (5, 0)])
def test_more_than_four_lines_have_no_bands(lines, bands):
    rows = [
        {"x": x, "y": float(x + s), "m": name, "seed": s}
        for name in "abcde"[:lines]
        for x in (1, 2)
        for s in (0, 1)
    ]
    [panel], _ = drawn(Lines("x", "y", "m"), rows)
    assert (len(panel.lines), len(panel.collections)) == (lines, bands)


def test_what_does_not_depend_on_x_is_a_line_across():
    rows = [{"x": x, "y": float(x), "m": "a"} for x in (1, 2)] + [{"x": 1, "y": 9.0, "m": "KRR"}]
    [panel], legend = drawn(Lines("x", "y", "m"), rows)
    across = panel.lines[1]
    assert across.get_ydata() == [9.0, 9.0] and list(across.get_xdata()) == [0, 1]
    assert to_hex(across.get_color()) == "#333333"  # a reference on pooled data
    assert legend == ["a", "KRR"]


def test_one_value_of_x_is_a_point():
    [panel], _ = drawn(Lines("x", "y", "m"), [{"x": 1, "y": 2.0, "m": "a"}])
    assert points(panel.lines[0]) == [(1, 2)] and panel.lines[0].get_marker() == "o"


def test_logarithmic_axes_leave_out_what_is_not_positive():
    rows = [{"x": x, "y": 10.0**x, "m": "a"} for x in (0, 1, 2)]
    rows += [{"x": 0, "y": 1.0, "m": "only zero"}, {"x": 1, "y": NAN, "m": "only zero"}]
    [panel], legend = drawn(Lines("x", "y", "m", log="xy"), rows)
    assert panel.get_xscale() == panel.get_yscale() == "log"
    assert points(panel.lines[0]) == [(1, 10), (2, 100)]
    assert legend == ["a"] and len(panel.lines) == 1


def test_long_curves_have_no_markers():
    rows = [{"x": x, "y": 1.0, "m": "a"} for x in range(13)]
    [panel], _ = drawn(Lines("x", "y", "m"), rows)
    assert panel.lines[0].get_marker() == "None"


def test_panels_are_filled_row_by_row_and_named():
    rows = [{"x": x, "y": float(x * p), "m": 0.5, "part": p} for x in (1, 2) for p in (10, 20, 30)]
    view = Lines("x", "y", "m", panel="part", columns=2, limits=lambda f: (0.0, f.y.max()))
    panels, legend = drawn(view, rows)
    assert [p.get_title() for p in panels] == ["part = 10", "part = 20", "part = 30"]  # of four
    assert [p.get_ylim() for p in panels] == [(0, 20), (0, 40), (0, 60)]
    assert points(panels[2].lines[0]) == [(1, 30), (2, 60)]
    assert legend == ["m = 0.5"]  # once for all panels


def test_yes_and_no_are_shown_with_their_column():
    rows = [{"x": x, "y": 1.0, "late": v} for x in (1, 2) for v in (True, False)]
    _, legend = drawn(Lines("x", "y", "late"), rows)
    assert legend == ["late: yes", "late: no"]


# -- other pictures --------------------------------------------------------------------------------


def test_bars_stand_side_by_side():
    rows = [
        {"set": s, "y": y, "m": m, "seed": seed}
        for s, m, seed, y in (
            ("A", "a", 0, 1.0), ("A", "a", 1, 3.0), ("A", "b", 0, 5.0), ("B", "b", 0, 7.0)
        )
    ]  # fmt: skip
    [panel], legend = drawn(Bars("set", "y", "m", low=0.5), rows)
    # two bars of width 0.4 around 0 and 1; there is no a in B
    shown = [(round(b.get_x(), 6), b.get_height()) for b in panel.patches]
    assert shown[:1] + shown[2:] == [(-0.4, 2.0), (0.0, 5.0), (1.0, 7.0)]
    assert shown[1][0] == 0.6 and np.isnan(shown[1][1])
    assert [t.get_text() for t in panel.get_xticklabels()] == ["A", "B"]
    assert panel.get_ylim()[0] == 0.5 and panel.get_ylabel() == "y"
    assert legend == ["a", "b"]


def test_circles_have_the_area_of_their_counts():
    rows = [
        {"client": c, "label": k, "rows": n, "split": s}
        for s, c, k, n in (("one", 0, 1, 10), ("one", 1, 0, 40), ("two", 0, 0, 20))
    ]
    rows.append({"client": 0, "label": 0, "rows": 40, "split": "two", "seed": 1})  # not shown
    panels, _ = drawn(Circles("client", "label", "rows", "split"), rows)
    assert [p.get_title() for p in panels] == ["one", "two"]
    [first], [second] = (
        [c for c in p.collections if isinstance(c, PathCollection)] for p in panels
    )
    assert first.get_offsets().tolist() == [[0, 1], [1, 0]]
    # 400 for the largest, which is 40
    assert first.get_sizes().tolist() == [100.0, 400.0] and second.get_sizes().tolist() == [200.0]
    assert panels[0].get_xticks().tolist() == [0, 1] and panels[1].get_yticks().tolist() == [0]


def test_images_are_grey_and_named():
    rows = [
        {"set": s, "message": m, "picture": [[[v], [255]], [[0], [v]]]}
        for s, m, v in (("A", "first", 51), ("A", "second", 102), ("B", "first", 153),
                        ("B", "second", 204))
    ]  # fmt: skip
    rows.append({"set": "A", "message": "none", "picture": None})
    panels, _ = drawn(Images("picture", "set", "message"), rows)
    assert [p.get_title() for p in panels] == ["first", "second", "first", "second"]
    shown = [np.asarray(p.images[0].get_array()) for p in panels]
    assert shown[0].tolist() == [[0.2, 1.0], [0.0, 0.2]]  # 51 / 255
    assert [s[0, 0] for s in shown] == [0.2, 0.4, 0.6, 0.8]
    assert panels[0].images[0].get_clim() == (0, 1)


@pytest.mark.parametrize(
    "view",
    [Table(("x",)), Lines("x", "y", "m", select=lambda f: f[f.x > 5])],
    ids=["table", "none"],
)
def test_views_without_a_picture(view):
    assert figure_of(view, Found(pd.DataFrame([{"seed": 0, "x": 1, "y": 1.0, "m": "a"}]))) is None


# -- files -----------------------------------------------------------------------------------------


def test_pictures_are_numbered_files(tmp_path):
    views = (
        Lines("x", "y", "m"),
        Table(("x",)),
        Lines("x", "y", "m", select=lambda f: f[f.x > 5]),
        Bars("x", "y", "m"),
    )
    item = Item(title="", cell=list, cells=list, views=views)
    frame = pd.DataFrame([{"seed": 0, "x": x, "y": 1.0, "m": "a"} for x in (1, 2)])
    result = Result("fedfw", "figure2", item, "usual", (), 0, Found(frame))
    assert drawn_views(result) == [views[0], views[3]]
    assert [view for view, _ in pictures(result)] == [views[0], views[3]]
    assert file_of(result, 3) == "fedfw-figure2-3.svg"
    write_pictures(result, tmp_path / "new")
    files = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert files == ["fedfw-figure2-2.svg", "fedfw-figure2.svg"]
    text = (tmp_path / "new" / files[1]).read_text()
    assert text.startswith("<?xml") and "dc:date" not in text  # the same file every time
