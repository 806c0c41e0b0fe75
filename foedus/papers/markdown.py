"""Stored results as Markdown pages of the documentation."""

from __future__ import annotations

import html
import textwrap
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


def prose(text: str, bullet: bool = False) -> str:
    """A paragraph, or an item of a list, in lines of at most 100 columns."""
    return textwrap.fill(
        text,
        width=100,
        initial_indent="- " if bullet else "",
        subsequent_indent="  " if bullet else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_docs(folder: Path, docs: Path, draw: bool = True) -> list[Path]:
    """Write reproduction.md and a page for each paper to the folder `docs`, from stored results.

    draw: also write the figures.
    """
    target = docs / "papers"
    target.mkdir(parents=True, exist_ok=True)
    written, lines = [], []
    totals = {
        (whose, scale): count(()) for whose in ("the papers'", "our") for scale in reversed(SCALES)
    }
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
        lines.append(f"[All numbers and figures](papers/{name}.md)\n")
        rows: list[list[str]] = []
        failed: list[str] = []
        remarks: dict[str, list[str]] = {}
        for r in results:
            title = r.item.title + (" (ours)" if r.item.extra else "")
            claims = in_words(count(r.verdicts)) if r.item.claims else "–"
            link = f"[{r.key}](papers/{name}.md#{_anchor(r)})"
            rows.append([link, title, r.scale, str(r.seeds), minutes(r), claims])
            for claim, (text, verdict, numbers) in zip(r.item.claims, r.verdicts, strict=True):
                totals["our" if claim.ours else "the papers'", r.scale][verdict] += 1
                if verdict == "does not hold":
                    failed.append(prose(f"**{r.key}**: {text}. Our numbers: {numbers}.", True))
            for text in r.remarks:
                if text != QUICK:
                    remarks.setdefault(text, []).append(f"**{r.key}**")
        headings = ["item", "content", "scale", "seeds", "minutes", "claims"]
        lines.append(markdown(headings, rows))
        if failed:
            lines += ["\nClaims that do not hold:\n", *failed]
        if remarks:
            lines.append("\nDifferences from the paper's experiments:\n")
            lines += [prose(f"{', '.join(items)}: {text}", True) for text, items in remarks.items()]
    known = {k: c for k, c in totals.items() if sum(c.values())}
    parts = (
        prose(f'{whose} claims, at scale "{scale}": **{in_words(c)}**', True)
        for (whose, scale), c in known.items()
    )
    head = _HEAD.format("\n".join(parts))
    (docs / "reproduction.md").write_text(head + "\n".join(lines).rstrip() + "\n")
    return [docs / "reproduction.md", *written]


_HEAD = """# Reproduction of the papers

This page says which claims of the five papers hold on our numbers, and which do not. Read it to
judge how far you can trust an algorithm of foedus, or how to repeat an experiment.

Every table and figure of the papers is one command, `foedus paper NAME ITEM`; `foedus paper` lists
them. `foedus paper --docs docs/results` writes this page and the linked ones from `results/`, which
holds every cell with its settings, seed and versions, and with its seconds where they were
measured.

Code checks the claims on our numbers:

{}

Many claims stand for one sentence of a paper, which is tested on each data set, split and protocol.
"(ours)" marks claims and items that are not in a paper.

- **Scale**: "usual" is the paper's scale as far as the available data and two cores allow; the
  differences are listed below. "quick" takes about a minute. `--full` is the paper's own scale,
  with the whole data sets; with it, `--device cuda` trains the networks on a GPU.
- **Minutes** are those of one core that was shared with other work.
- **Figures** show means over seeds. Figures of up to four lines have bands: all seeds, or one
  standard deviation around the mean of the rollouts of one run.
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
        "Written by `foedus paper --docs docs/results`; [summary](../reproduction.md).\n",
    ]
    for r in results:
        ours = " (ours, not in the paper)" if r.item.extra else ""
        lines += [f"## {r.item.title}\n", f"`{r.command}`{ours}\n"]
        lines += [prose(text) + "\n" for text in r.remarks]
        drawn, tables = drawn_views(r), [v for v in r.item.views if isinstance(v, Table)]
        for view in r.item.views:
            table = table_of(view, r.found)
            if view in drawn:
                file = file_of(r, drawn.index(view) + 1)
                lines.append(f"![{view.caption or r.item.title}]({file})\n")
            if view.caption and (table or view in drawn):
                lines.append(f"{prose(view.caption)}\n")
            if table and (isinstance(view, Table) or not tables):
                lines.append(markdown(*table) + "\n")
        if r.verdicts:
            lines.append(markdown(["claim", "result", "our numbers"], r.verdicts) + "\n")
        settings = html.escape("; ".join(f"{k}: {v}" for k, v in settings_of(r)))
        lines.append(f"<details><summary>Settings</summary>\n\n{prose(settings)}\n")
        lines.append(f"{prose(made_with(r))}\n\n</details>\n")
    return "\n".join(lines)


def made_with(result: Result) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return f"{len(result.cells)} cells, {minutes(result)} minutes of one core; {versions}."
