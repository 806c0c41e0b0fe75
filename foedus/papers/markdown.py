"""Stored results as Markdown pages of the documentation."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from foedus.papers.figures import drawn_views, file_of, write_pictures
from foedus.papers.item import SCALES, Table
from foedus.papers.results import (
    QUICK,
    Result,
    count,
    in_words,
    numeric,
    settings_of,
    stored,
    table_of,
)
from foedus.papers.runner import PAPERS, paper


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers to the right."""
    rows = [list(r) for r in rows]
    right = [all(numeric(r[i]) for r in rows) for i in range(len(headings))]
    lines = [headings, ["---:" if r else "---" for r in right], *rows]
    return "\n".join(
        "| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines
    )


def write_docs(folder: Path, docs: Path, draw: bool = True) -> list[Path]:
    """Write reproduction.md and a page for each paper to the folder `docs`, from what is stored.

    draw: also write the pictures.
    """
    target = docs / "papers"
    target.mkdir(parents=True, exist_ok=True)
    written, lines = [], []
    totals = {(whose, scale): count(()) for whose in ("the papers'", "ours") for scale in SCALES}
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        page = target / f"{name}.md"
        page.write_text(_paper_markdown(name, results))
        written.append(page)
        for result in results if draw else ():
            write_pictures(result, target)
        lines.append(f"\n## {paper(name).family}: {paper(name).title}\n")
        lines.append(f"[All numbers and pictures](papers/{name}.md)\n")
        rows, notes = [], []
        for r in results:
            title = r.item.title + (" (ours)" if r.item.extra else "")
            claims = in_words(count(r.verdicts)) if r.item.claims else "–"
            link = f"[{r.key}](papers/{name}.md#{_anchor(r)})"
            rows.append([link, title, r.scale, str(r.seeds), minutes(r), claims])
            for claim, (text, verdict, numbers) in zip(r.item.claims, r.verdicts, strict=True):
                totals["ours" if claim.ours else "the papers'", r.scale][verdict] += 1
                if verdict == "does not hold":
                    notes.append(f"- **{r.key}**: {text}. *Does not hold*: {numbers}.")
            if why := [text for text in r.remarks if text != QUICK]:
                notes.append(f"- **{r.key}**, why ours may differ: {' '.join(why)}")
        lines.append(markdown(["item", "what it is", "scale", "seeds", "minutes", "claims"], rows))
        lines.append("\n" + "\n".join(notes) if notes else "")
    known = {k: c for k, c in totals.items() if sum(c.values())}
    parts = (f"of {whose}, at {scale} scale {in_words(c)}" for (whose, scale), c in known.items())
    head = _HEAD.format("; ".join(parts))
    (docs / "reproduction.md").write_text(head + "\n".join(lines).rstrip() + "\n")
    return [docs / "reproduction.md", *written]


_HEAD = """# The papers, reproduced

Every table and figure of the five papers is one command, `foedus paper NAME ITEM`; `foedus paper`
lists them. This page and those behind its links are written by `foedus paper --docs docs/results`
from the numbers in `results/`, which hold every cell with its settings, seed and versions, and the
seconds that it took where they were taken. Claims are checked by code on our numbers:
**{}**.
Many stand for one sentence of a paper, tested on each set, split and protocol; "(ours)" stands
behind those that no paper makes.

*Scale*: "usual" is the paper's, as far as the data at hand and two cores allow (what was cut down
is said below); "quick" takes about a minute; `--full` is the paper's own, where the whole sets are
at hand; there, `--device cuda` trains the networks on a GPU. *Minutes* are those of one core that
was shared with other work.
"""


def _anchor(result: Result) -> str:
    title = "".join(c for c in result.item.title.lower() if c.isalnum() or c in " -_")
    return title.replace(" ", "-")


def minutes(result: Result) -> str:
    seconds = result.seconds
    return f"{seconds / 60:.1f}" if seconds else "–"


def _paper_markdown(name: str, results: list[Result]) -> str:
    lines = [
        f"# {paper(name).family}: {paper(name).title}\n",
        "Written by `foedus paper --docs docs/results`; see [the summary](../reproduction.md).\n",
    ]
    for r in results:
        ours = " (ours, not in the paper)" if r.item.extra else ""
        lines += [f"## {r.item.title}\n", f"`{r.command}`{ours}\n"]
        lines += [text + "\n" for text in r.remarks]
        drawn, tables = drawn_views(r), [v for v in r.item.views if isinstance(v, Table)]
        for view in r.item.views:
            table = table_of(view, r.found)
            if view in drawn:
                file = file_of(r, drawn.index(view) + 1)
                lines.append(f"![{view.caption or r.item.title}]({file})\n")
            if view.caption and (table or view in drawn):
                lines.append(f"{view.caption}\n")
            if table and (isinstance(view, Table) or not tables):
                lines.append(markdown(*table) + "\n")
        if r.verdicts:
            lines.append(markdown(["claim", "", "our numbers"], r.verdicts) + "\n")
        settings = html.escape("; ".join(f"{k}: {v}" for k, v in settings_of(r)))
        lines.append(f"<details><summary>Settings</summary>\n\n{settings}\n")
        lines.append(f"{made_with(r)}\n\n</details>\n")
    return "\n".join(lines)


def made_with(result: Result) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return f"{len(result.cells)} cells, {minutes(result)} minutes of one core; {versions}."
