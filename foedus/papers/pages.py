"""Stored results as HTML pages."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from foedus.papers.figures import pictures
from foedus.papers.item import Table
from foedus.papers.markdown import made_with, minutes
from foedus.papers.results import Result, count, numeric, settings_of, stored, table_of
from foedus.papers.runner import PAPERS, paper

# -- HTML ----------------------------------------------------------------------------------------------------------------------


def write_pages(folder: Path) -> list[Path]:
    """One self-contained page for each paper of which something is stored, and an index of them."""
    from foedus.report.page import document

    written, rows = [], []
    for name in PAPERS:
        results = [r for key in paper(name).items if (r := stored(folder, name, key)) is not None]
        if not results:
            continue
        body = "".join(_item_html(r) for r in results)
        title = f"{paper(name).family}: {paper(name).title}"
        written.append(folder / f"{name}.html")
        written[-1].write_text(
            document(title, "The paper's numbers beside ours.", '<p><a href="index.html">All papers</a></p>' + body)
        )
        for r in results:
            cells = [
                f'<a href="{name}.html#{r.key}">{name} {r.key}</a>',
                html.escape(r.item.title),
                r.scale,
                minutes(r),
                _badges(r),
            ]
            rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{h}</th>" for h in ("item", "what it is", "scale", "minutes", "claims"))
    body = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    written.append(folder / "index.html")
    written[-1].write_text(
        document("The papers, reproduced", "Every table and figure, with the claims that it supports.", body)
    )
    return written


_COLOURS = {"holds": "#1a7f37", "does not hold": "#b3261e", "not measured": "#57606a"}


def _badges(result: Result) -> str:
    counts = count(result.verdicts)
    parts = [
        f'<span style="color:{_COLOURS[k]}">{n} {k if n == 1 else {"holds": "hold", "does not hold": "do not hold"}.get(k, k)}</span>'
        for k, n in counts.items()
        if n
    ]
    return ", ".join(parts) or "–"


def _item_html(r: Result) -> str:
    from foedus.report.plots import drawing, inline

    parts = [
        f'<section id="{r.key}">\n<h2>{html.escape(r.item.title)}{" (ours)" if r.item.extra else ""}</h2>',
        f"<pre>{html.escape(r.command)}</pre>",
    ]
    parts += [f"<p>{html.escape(text)}</p>" for text in r.remarks]
    drawn = pictures(r)
    with drawing():
        for number, view in enumerate(r.item.views):
            if (figure := next((f for v, f in drawn if v is view), None)) is not None:
                caption = view.caption or r.item.title
                svg = inline(figure, f"{r.name} {r.key} {number}")
                width = figure.get_figwidth() * 100
                parts.append(
                    f'<figure class="wide" style="max-width:{width:.0f}px">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'
                )
            table = table_of(view, r.found)
            if table:
                shown = _table_html(*table)
                caption = f'<p class="soft">{html.escape(view.caption)}</p>' if isinstance(view, Table) and view.caption else ""
                parts.append(
                    shown + caption
                    if isinstance(view, Table)
                    else f"<details><summary>Some of its points</summary>{shown}</details>"
                )
    if r.verdicts:
        rows = "".join(
            f'<tr><td class="remark">{html.escape(text)}</td><td style="color:{_COLOURS[verdict]};font-weight:600">{verdict}</td>'
            f'<td class="remark wide">{html.escape(numbers)}</td></tr>'
            for text, verdict, numbers in r.verdicts
        )
        parts.append(
            f'<div class="scroll"><table><thead><tr><th>claim</th><th></th><th>our numbers</th></tr></thead><tbody>{rows}</tbody></table></div>'
        )
    settings = "".join(f"<tr><th>{html.escape(k)}</th><td class='value'>{html.escape(v)}</td></tr>" for k, v in settings_of(r))
    parts.append(
        f"<details><summary>Settings</summary><div class='scroll'><table><tbody>{settings}</tbody></table></div>"
        f'<p class="soft">{html.escape(made_with(r))}</p></details></section>'
    )
    return "\n".join(parts)


def _table_html(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in headings)
    body = "".join(
        "<tr>" + "".join(f"<td{' class=number' if numeric(c) else ''}>{html.escape(c)}</td>" for c in row) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
