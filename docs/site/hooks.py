"""What MkDocs calls while it builds the site: pages that stand elsewhere, links, the reference.

The pages are written for the repository, where every link leads to a file. Here the same links
lead to pages of the site; a linked file that is no page is copied into it.
"""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import api
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from foedus.version import __version__

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "README.md": "overview.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "reference/contributing.md",
    "SECURITY.md": "reference/security.md",
    "examples/hospitals/README.md": "tutorials/hospitals.md",
}
"""Pages of the site that stand outside docs/."""

SECTIONS = {
    "tutorials": "Tutorials",
    "notebooks": "Notebooks",
    "how-to": "How-to guides",
    "explanation": "Explanations",
    "results": "Results",
}
BOOST = {
    "how-to/": 2.0,
    "explanation/": 2.0,
    "reference/api/averaging.md": 5.0,
    "reference/api/index.md": 0.5,
    "reference/changelog.md": 0.5,
    "results/papers/": 0.2,
}
"""How much a page counts in the search (1 for others): guides before long tables of results."""

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
"""Each is a page too, with the outputs that it has."""

FENCED = re.compile(r"^(```|~~~).*?^\1 *$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
COMMENT = re.compile(r"^<!--.*?-->\n?", re.M | re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.site_name = f"foedus {__version__}"
    config.nav = navigation()
    if "MIKE_DOCS_VERSION" in os.environ:  # built by `mike deploy`: there is a list of versions
        config.extra["version"] = {"provider": "mike"}
    return config


def navigation() -> list[Any]:
    """The pages by folder, in the order in which docs/index.md lists them."""
    pages = (ROOT / "docs/index.md").read_text().split("\n## All pages\n")[1]
    listed = [target.replace(".ipynb", ".md") for target, _ in LINK.findall(pages)]
    nav: list[Any] = [{"Start": ["index.md", {"Overview": "overview.md"}]}]
    for folder, title in SECTIONS.items():
        pages = [target for target in listed if target.startswith(f"{folder}/")]
        pages += [uri for uri in ELSEWHERE.values() if uri.startswith(f"{folder}/")]
        if pages := [*dict.fromkeys(page for page in pages if page.endswith(".md"))]:
            nav.append({title: pages})
    reference = [
        {"API": ["reference/api/index.md", *[f"reference/api/{g.file}.md" for g in api.GROUPS]]}
    ]
    reference += [target for target in listed if target.startswith("reference/")]
    reference += [uri for uri in ELSEWHERE.values() if uri.startswith("reference/")]
    return [*nav, {"Reference": [*reference]}]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, uri in ELSEWHERE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for path in NOTEBOOKS:
        uri = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, uri, content=notebook_text(path)))
    for page in list(files.documentation_pages()):
        for path in linked_files(page):
            if files.get_file_from_path(f"files/{path}") is None:
                file = File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path))
                files.append(file)
    for group in api.GROUPS:
        uri = f"reference/api/{group.file}.md"
        files.append(File.generated(config, uri, content=api.page_text(group)))
    files.append(File.generated(config, "reference/api/index.md", content=api.index_text()))
    return files


def outputs_of(path: Path) -> list[tuple[str, str]]:
    """The outputs of a notebook in order: what stands for each in the page, and its HTML."""
    outputs = []
    for cell in json.loads(path.read_text())["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            shown = {kind: "".join(text) for kind, text in data.items() if "json" not in kind}
            if "text/html" in shown:
                made = shown["text/html"]
            elif "image/svg+xml" in shown:
                made = shown["image/svg+xml"]
            elif "image/png" in shown:
                made = f'<img alt="" src="data:image/png;base64,{shown["image/png"].strip()}">'
            else:
                made = f"<pre><code>{html.escape(shown.get('text/plain', ''))}</code></pre>"
            outputs.append((f"OUTPUT{len(outputs)}OF{path.stem}", made))
    return outputs


def notebook_text(path: Path) -> str:
    """A notebook as a page in Markdown."""
    cells = json.loads(path.read_text())["cells"]
    names = iter([name for name, _ in outputs_of(path)])
    parts = []
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [next(names) for _ in cell.get("outputs", ())]
        if len(parts) == 1:
            parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts)


def place_of(file: File) -> str:
    """The path in the repository of a page of the site."""
    for path, uri in ELSEWHERE.items():
        if file.src_uri == uri:
            return path
    return f"docs/{file.src_uri}"


def linked_files(page: File) -> Iterator[str]:
    """The files of the repository that a page links to and that are no pages."""
    for text, is_code in parts(page.content_string):
        for target, _ in () if is_code else LINK.findall(text):
            path = os.path.normpath(os.path.join(os.path.dirname(place_of(page)), target))
            is_file = ":" not in target and (ROOT / path).is_file()
            if is_file and not path.startswith("docs/") and path not in ELSEWHERE:
                yield path


def parts(text: str) -> Iterator[tuple[str, bool]]:
    """A text in pieces, and whether each is a fenced block."""
    at = 0
    for block in FENCED.finditer(text):
        yield text[at : block.start()], False
        yield block.group(), True
        at = block.end()
    yield text[at:], False


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = place_of(page.file)
    boosts = [b for start, b in BOOST.items() if page.file.src_uri.startswith(start)]
    page.meta["search"] = {"boost": boosts[0] if boosts else 1.0}
    return "".join(
        text
        if is_code
        else api.linked_names(
            api.escaped(relinked(COMMENT.sub("", text), place, page.file.src_uri))
        )
        for text, is_code in parts(markdown)
    )


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Anchors that lead nowhere are no links; the outputs of notebooks are put in."""
    for path in NOTEBOOKS:
        if page.file.src_uri == f"notebooks/{path.stem}.md":
            for name, made in outputs_of(path):
                html = html.replace(f"<p>{name}</p>", f'<div class="output">{made}</div>')
    return re.sub(r'<p><a href="" (id="fd\.[\w.]+")></a>\s*</p>', r"<span \1></span>", html)


def relinked(text: str, place: str, uri: str) -> str:
    """The links of a page that stands at `place` in the repository, as links between pages."""

    def replaced(link: re.Match) -> str:
        target, anchor = link.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(place), target))
        if ":" in target or not (ROOT / path).exists():
            return link.group()
        if path in ELSEWHERE:
            there = ELSEWHERE[path]
        elif path.endswith(".ipynb") and path != place.replace(".md", ".ipynb"):
            there = path.removeprefix("docs/").replace(".ipynb", ".md")
        else:
            there = path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"
        return os.path.relpath(there, os.path.dirname(uri) or ".") + anchor

    return LINK.sub(replaced, text)
