"""The site that `make docs` builds: strict, complete, and without anything from a network."""

from __future__ import annotations

import html.parser
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import foedus as fd
from tests.pages import ROOT
from tests.public import PUBLIC

pytest.importorskip("mkdocs", reason="the site needs foedus[docs]")
pytest.importorskip("mkdocstrings", reason="the site needs foedus[docs]")

ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""What a browser loads without being asked, by tag."""


def load_groups():
    spec = importlib.util.spec_from_file_location("api", ROOT / "docs/site/api.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["api"] = module  # where dataclasses look for the names in annotations
    spec.loader.exec_module(module)
    return module.GROUPS


class Reader(html.parser.HTMLParser):
    """Anchors, links, assets, comments and the visible text of a page."""

    def __init__(self, path: Path):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.assets: list[str] = []
        self.comments: list[str] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in ASSETS and given.get(ASSETS[tag]):
            self.assets.append(given[ASSETS[tag]])

    def handle_comment(self, data):
        self.comments.append(data)

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Reader]:
    """All pages by path in the site."""
    return {p.relative_to(site).as_posix(): Reader(p) for p in site.rglob("*.html")}


def test_every_public_name_stands_in_the_reference_once():
    names = [name for g in load_groups() for names in g.sections.values() for name in names]
    assert len(names) == len(set(names))
    assert {*fd.__all__, *PUBLIC} == set(names)


def test_every_public_name_has_an_anchor_in_one_page(pages):
    for name in {*fd.__all__, *PUBLIC}:
        having = [path for path, page in pages.items() if f"fd.{name}" in page.anchors]
        assert len(having) == 1 and having[0].startswith("reference/api/"), f"{name}: {having}"


def test_texts_of_docstrings_are_shown_whole(pages):
    """No formula is taken for emphasis, or for a tag of HTML."""
    shown = {
        path: re.sub(r"\s+", " ", page.text)
        for path, page in pages.items()
        if path.startswith("reference/api/")
    }
    for name, value in PUBLIC.items():
        paragraphs = re.split(r"\n\n+", inspect.cleandoc(value.__doc__ or ""))
        for paragraph in paragraphs:
            if re.match(r"[A-Z]\w*:$|    |[-*] |\|", paragraph.split("\n")[0]):
                continue  # a section, a formula, a list or a table
            text = re.sub(r"\s+", " ", re.sub(r"`|\*\*(?=\w)|(?<=\w)\*\*", "", paragraph))
            assert any(text in page for page in shown.values()), f"fd.{name}: {text}"


def test_only_public_members_are_shown(pages):
    hidden = r"foedus\.(?:\w+\.)*[A-Z]\w*\._\w+"
    shown = {a for page in pages.values() for a in page.anchors if re.fullmatch(hidden, a)}
    assert not shown
    assert "foedus.core.result.Run.per_client" in pages["reference/api/results.html"].anchors


def test_settings_of_base_classes_are_in_the_reference(pages):
    text = pages["reference/api/averaging.html"].text
    assert "fd.FedProx" in text and "Inherited settings" in text


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        outside = [a for a in page.assets if re.match(r"(?:\w+:)?//", a)]
        assert not outside, f"{path} loads {outside}"
    for style in site.rglob("*.css"):
        outside = re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^)\"']*)", style.read_text())
        assert not outside, f"{style.name} loads {outside}"


def test_links_and_assets_lead_somewhere(site, pages):
    for path, page in pages.items():
        for link in [*page.links, *page.assets]:
            if re.match(r"\w+:", link) or path == "404.html":
                continue
            target, anchor = urldefrag(link)
            there = (
                (site / path).parent.joinpath(unquote(target)).resolve() if target else site / path
            )
            assert there.exists(), f"{path} links to {link}"
            if anchor and there.suffix == ".html":
                known = pages[there.relative_to(site).as_posix()].anchors
                assert unquote(anchor) in known or anchor.startswith("__"), f"{path}: {link}"


def test_pages_of_the_repository_are_pages_of_the_site(site, pages):
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    for name in ("overview", "reference/changelog", "reference/contributing", "reference/security"):
        assert f"{name}.html" in pages
    assert not list(site.rglob("*.py")) and not list(site.rglob("*.md"))


def test_notebooks_are_pages_that_link_to_each_other_with_their_outputs(site, pages):
    notebooks = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
    for path in notebooks:
        page = pages[f"notebooks/{path.stem}.html"]
        downloads = [link for link in page.links if link.endswith(".ipynb")]
        assert downloads == [path.name]
        assert (site / "notebooks" / path.name).read_bytes() == path.read_bytes()
        outputs = [o for c in json.loads(path.read_text())["cells"] for o in c.get("outputs", ())]
        text = (site / f"notebooks/{path.stem}.html").read_text()
        assert text.count('<div class="output">') == len(outputs) and "OUTPUT" not in page.text
    assert "tables-with-ffgb.html" in pages["notebooks/start-here.html"].links
    assert "notebooks/start-here.html" in pages["index.html"].links


def test_comments_that_steer_tests_do_not_show(pages):
    for path, page in pages.items():
        assert not [c for c in page.comments if re.match(r" (varies|not run|slow|needs) ", c)], path
        assert not re.search(r"^<!--", page.text, re.M) or path.startswith("reference/contributing")


def test_lists_and_tables_of_the_pages_are_lists_and_tables(pages):
    """Markdown on GitHub forgives a missing blank line; the site's does not."""
    for path, page in pages.items():
        assert "|---|" not in page.text, path


def test_the_search_finds_names_and_pages(site):
    index = json.loads((site / "search/search_index.json").read_text())
    titles = {document["title"] for document in index["docs"]}
    assert {f"fd.{name}" for name in PUBLIC} <= titles
    script = (site / "search/search_index.js").read_text()  # for a folder that is opened as a file
    assert json.loads(script.removeprefix("var __index = ")) == index
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text()
