"""What pages contain of others is as it was published, with its license."""

from __future__ import annotations

import hashlib
from importlib import resources

FOLDER = resources.files("foedus.report") / "static"
PUBLISHED = {
    "d3.min.js": "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
    "plot.min.js": "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
}


def test_nobody_has_edited_the_libraries():
    for name, digest in PUBLISHED.items():
        assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == digest, name


def test_versions_and_licenses_are_beside_them():
    notice = (FOLDER / "NOTICE").read_text(encoding="utf-8")
    for name, package, version in (
        ("d3.min.js", "d3", "7.9.2"),
        ("plot.min.js", "@observablehq/plot", "0.6.17"),
    ):
        assert f"v{version}" in (FOLDER / name).read_text(encoding="utf-8")[:100]
        assert f"{package} {version}" in notice and f"-- {package} --" in notice
    assert notice.count("Permission to use, copy, modify") >= 4


def test_our_own_scripts_are_strict_and_never_parse_markup():
    for name in ("kinds.js", "charts.js", "tables.js"):
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert text.startswith('"use strict";')
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            ".html(",
        ):
            assert word not in text, (name, word)
