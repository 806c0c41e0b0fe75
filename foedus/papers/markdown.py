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


# -- Markdown --------------------------------------------------------------------------------------


def write_docs(folder: Path, docs: Path, draw: bool = True) -> list[Path]:
    """docs/reproduction.md and a page for each paper, with its pictures, from what is stored. draw:
    write the pictures, too.
    """
    target = docs / "papers"
    target.mkdir(parents=True, exist_ok=True)
    written, lines, totals = (
        [],
        [],
        {(whose, scale): count(()) for whose in ("the papers'", "ours") for scale in SCALES},
    )
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        page = target / f"{name}.md"
        page.write_text(_paper_markdown(name, results))
        written.append(page)
        for result in results if draw else ():
            write_pictures(result, target)
        lines.append(
            f"\n## {paper(name).family}: {paper(name).title}\n\n[All numbers and "
            f"pictures](papers/{name}.md)\n"
        )
        rows, notes = [], []
        for r in results:
            counts = count(r.verdicts)
            for claim, (_, verdict, _) in zip(r.item.claims, r.verdicts, strict=True):
                totals["ours" if claim.ours else "the papers'", r.scale][verdict] += 1
            rows.append(
                [
                    f"[{r.key}](papers/{name}.md#{_anchor(r)})",
                    r.item.title + (" (ours)" if r.item.extra else ""),
                    r.scale,
                    str(r.seeds),
                    minutes(r),
                    in_words(counts) if r.item.claims else "–",
                ]
            )
            for text, verdict, numbers in r.verdicts:
                if verdict == "does not hold":
                    notes.append(f"- **{r.key}**: {text}. *Does not hold*: {numbers}.")
            why = [text for text in r.remarks if text != QUICK]
            if why:
                notes.append(f"- **{r.key}**, why ours may differ: {' '.join(why)}")
        lines.append(markdown(["item", "what it is", "scale", "seeds", "minutes", "claims"], rows))
        lines.append("\n" + "\n".join(notes) if notes else "")
    said = (
        f"of {whose}, at {scale} scale {in_words(c)}"
        for (whose, scale), c in totals.items()
        if sum(c.values())
    )
    head = _HEAD.format("; ".join(said))
    (docs / "reproduction.md").write_text(head + "\n".join(lines).rstrip() + "\n")
    return [docs / "reproduction.md", *written]


_HEAD = """# The papers, reproduced

Every table and figure of the five papers is one command, `foedus paper NAME ITEM`; `foedus paper`
lists them. This page and those behind its links are written by `foedus paper --docs docs` from the
numbers in `results/`, which hold every cell with its settings, seed and versions, and the seconds
that it took where they were taken. Claims are checked by code on our numbers:
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
        "Written by `foedus paper --docs docs`; see [the summary](../reproduction.md).\n",
    ]
    for r in results:
        lines += [
            f"## {r.item.title}\n",
            f"`{r.command}`" + (" (ours, not in the paper)" if r.item.extra else "") + "\n",
        ]
        lines += [text + "\n" for text in r.remarks]
        drawn = drawn_views(r)
        for view in r.item.views:
            table = table_of(view, r.found)
            if view in drawn:
                lines.append(
                    f"![{view.caption or r.item.title}]({file_of(r, drawn.index(view) + 1)})\n"
                )
            if view.caption and (table or view in drawn):
                lines.append(f"{view.caption}\n")
            if table and (
                isinstance(view, Table) or not any(isinstance(v, Table) for v in r.item.views)
            ):
                lines.append(markdown(*table) + "\n")
        if r.verdicts:
            lines.append(markdown(["claim", "", "our numbers"], r.verdicts) + "\n")
        settings = "; ".join(f"{k}: {v}" for k, v in settings_of(r))
        lines.append(
            f"<details><summary>Settings</summary>\n\n{html.escape(settings)}\n\n"
            f"{made_with(r)}\n\n</details>\n"
        )
    return "\n".join(lines)


def made_with(result: Result) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return f"{len(result.cells)} cells, {minutes(result)} minutes of one core; {versions}."
