"""The pages of a comparison and of a survey: one HTML file that needs nothing else, on a desk and on a phone."""

from __future__ import annotations

import html
import math
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Any

from foedus.core.describe import flatten
from foedus.report import plots
from foedus.report.compare import Comparison, Curve, words
from foedus.version import __version__

if TYPE_CHECKING:
    from foedus.diagnosis.survey import Survey
    from foedus.report.plots import Style

_CSS = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; --wash: #f6f8fa; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 24px 16px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 40px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--line); }
p { margin: 0 0 12px; max-width: 75ch; }
.soft, figcaption { color: var(--soft); font-size: .875rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: 0 0 12px; width: fit-content; max-width: 100%; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
thead th { background: var(--wash); vertical-align: bottom; }
tbody th { font-weight: 600; position: sticky; left: 0; background: var(--paper); }
thead th:first-child { position: sticky; left: 0; z-index: 1; }
.number { text-align: right; }
.remark { white-space: normal; min-width: 11rem; max-width: 22rem; }
.value { white-space: pre-wrap; overflow-wrap: anywhere; max-width: 22rem; }
.differs th::after { content: " *"; color: #b35900; }
.differs td { background: #fff8e6; }
.best { font-weight: 700; }
.key { width: 24px; height: 8px; margin: 0 8px 0 -32px; vertical-align: middle; }
tbody th.named { padding-left: 42px; min-width: 9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 24px 20px; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; max-width: 560px; height: auto; }
figcaption { margin-top: 4px; max-width: 560px; }
figure.wide svg, figure.wide figcaption { max-width: none; }
.remark.wide { max-width: 44rem; }
h3 { font-size: 1rem; margin: 20px 0 8px; }
.advice { margin: 0 0 16px; }
.advice p { margin-top: 6px; }
pre { margin: 0; padding: 10px 12px; background: var(--wash); border-radius: 6px; overflow-x: auto; font-size: .8125rem; }
details { margin: 12px 0; }
summary { cursor: pointer; }
.error { border-left: 4px solid #b3261e; padding: 4px 12px; background: #fdf1f0; overflow-wrap: anywhere; max-width: none; }
@media (max-width: 700px) { th, td { padding: 5px 9px; } tbody th { white-space: normal; max-width: 10rem; } }
@media print { main { max-width: none; } .figures { grid-template-columns: 1fr 1fr; } figure { break-inside: avoid; } }
"""


def render(comparison: Comparison, title: str | None = None) -> str:
    """The page as text."""
    series = comparison.curves()
    pooled = [n for n in comparison.runs if comparison.is_pooled(n)]
    style = plots.styles(list(comparison.runs), pooled)
    title = title or f"Comparison on {comparison.federation_settings().get('data', 'saved runs')}"
    sections = [
        _section("Results", _results(comparison, style)),
        _section("Curves", _curves(comparison, series, style)),
        _section("The data and its division", _federation(comparison)),
        _section("Settings", _settings(comparison)),
        _section("Every run", _every_run(comparison)),
        _section("Made with", _versions()),
    ]
    return document(title, comparison.title(), "".join(sections))


def render_survey(survey: Survey) -> str:
    """The page of a survey as text."""
    drawn = [_figure(svg, caption) for svg, caption in plots.survey(survey)]
    sections = [
        _section("What to try", _advice(survey)),
        _section("Pictures", f'<div class="figures">{"".join(drawn)}</div>'),
        _section("Measures", _measures(survey)),
        _section("Every client", _every_client(survey)),
        _section("Made with", _versions()),
    ]
    return document(f"The federation {survey.fed.data.name}", survey.fed.describe().splitlines()[0], "".join(sections))


def document(title: str, subtitle: str, body: str) -> str:
    """A whole page that needs nothing else; the body is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{_text(title)}</title>\n<link rel="icon" href="data:,">\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n'
        f'<h1>{_text(title)}</h1>\n<p class="soft">{_text(subtitle)}</p>\n{body}</main>\n</body>\n</html>\n'
    )


def _text(value: Any) -> str:
    return html.escape(str(value))


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{_text(heading)}</h2>\n{body}\n</section>\n" if body else ""


def _table(headings: Iterable[str], rows: Iterable[str]) -> str:
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{"".join(headings)}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _head(text: str, number: bool = False) -> str:
    kind = ' class="number"' if number else ""
    return f'<th scope="col"{kind}>{_text(text).replace(chr(10), "<br>")}</th>'


# Results


def _results(comparison: Comparison, style: dict[str, Style]) -> str:
    headings, rows = comparison.cells()
    best = _best(comparison)
    body = []
    for row in rows:
        cells = [f'<th scope="row" class="named">{plots.sample(style[row[0]])}{_text(row[0])}</th>']
        for heading, value in zip(headings[1:], row[1:], strict=True):
            kind = "remark" if heading == "remark" else "number"
            if heading == headings[1] and row[0] == best:
                kind += " best"
            cells.append(f'<td class="{kind}">{_text(value)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    several = max(len(runs) for runs in comparison.runs.values()) > 1
    notes = [
        f"{_capital(words(comparison.metric))} of the last round on the test set"
        + (", mean ± standard deviation over seeds. " if several else ". "),
        f"{_capital(comparison.describe_target())}; a dash means that not every seed reaches it. ",
        "MB are 10⁶ bytes as encoded, up and down together. Seconds are those of computing, without evaluation.",
    ]
    if comparison.own_metric:
        notes.append(" “Own rows”: each client's own model on that client's test rows.")
    errors = "".join(
        f'<p class="error">{_text(name)}, seed {_text(comparison.runs[name][i].settings.get("seed"))}: {_text(message)}</p>'
        for name, messages in comparison.diverged.items()
        for i, message in messages.items()
    )
    head = [_head(h, h not in ("algorithm", "remark")) for h in headings]
    return f'{_table(head, body)}\n<p class="soft">{_text("".join(notes))}</p>{errors}'


def _best(comparison: Comparison) -> str | None:
    """The algorithm with the best final metric, references aside."""
    table = comparison.table()[comparison.metric]
    table = table[[n for n in table.index if not comparison.is_pooled(n)]].dropna()
    if len(table) < 2:
        return None
    return table.idxmax() if comparison.higher_is_better else table.idxmin()


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# Figures


def _curves(comparison: Comparison, series: Sequence[Curve], style: dict[str, Style]) -> str:
    if not series:
        return "<p>No run was evaluated, so there is nothing to draw.</p>"
    metric, several = comparison.metric, max(len(r) for r in comparison.runs.values()) > 1
    band = " Lines are means over seeds, bands reach from the least to the largest seed." if several else ""
    figures = []

    def add(caption: str, against: str, **options: Any) -> None:
        drawn = plots.curves(series, against, metric, style, target=comparison.target, **options)
        figures.append(_figure(drawn, caption))

    add(f"{_capital(words(metric))} after each round.{band}", "rounds")
    if (limits := _close_up(comparison, series)) is not None:
        add("The same, close up around the target and the best.", "rounds", limits=limits)
    if any(c.megabytes[-1] > 0 for c in series):
        silent = any(c.megabytes[-1] == 0 for c in series)
        level = " A level line shows the last value of what sends nothing." if silent else ""
        add(f"{_capital(words(metric))} for what has been sent, by all clients and to them.{level}", "megabytes")
    if any(c.seconds[-1] > 0 for c in series):
        add(f"{_capital(words(metric))} for the time spent computing, evaluation left out.", "seconds")
    return f'<div class="figures">{"".join(figures)}</div>'


def _close_up(comparison: Comparison, series: Sequence[Curve]) -> tuple[float, float] | None:
    """Limits that show the end of the race, where the whole range hides it."""
    whole = [v for c in series for v in (*c.low, *c.high)]
    ends = [c.mean[-1] for c in series]
    best = max(ends) if comparison.higher_is_better else min(ends)
    if comparison.target is None or not math.isfinite(comparison.target):
        return None
    margin = best - comparison.target
    if (margin <= 0) == comparison.higher_is_better or abs(margin) * 5 > max(whole) - min(whole):
        return None
    limits = (comparison.target - margin, best + 0.5 * margin)
    return (min(limits), min(max(limits), 1.0) if comparison.higher_is_better else max(limits))


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>"


def _federation(comparison: Comparison) -> str:
    fed, parts = comparison.fed, []
    recorded = flatten(comparison.federation_settings())
    rows = [_pair(k, v) for k, v in {k.removeprefix("settings."): v for k, v in recorded.items() if k}.items()]
    if fed is not None:
        parts.append(_figure(plots.partition(fed), "Training rows of each client, by what they are labelled."
                             if fed.data.classes else "Targets of the training rows of each client."))  # fmt: skip
        rows.append(_pair("features", " x ".join(map(str, fed.spec.shape))))
        rows.append(_pair("classes", fed.data.classes if fed.data.classes else "none (regression)"))
        rows.append(_pair("test rows", len(fed.data.x_test)))
        rows.append(_pair("scaling", fed.data.scaling))
        rows.append(_pair("rows of a client", f"{fed.sizes.min()} to {fed.sizes.max()}"))
    table = _table([_head("setting"), _head("value")], rows) if rows else ""
    summary = ""
    if fed is not None:
        summary = f"<details><summary>In words</summary><pre>{_text(fed.describe())}</pre></details>"
    parts.append(f"<div>{table}{summary}</div>")
    return f'<div class="figures">{"".join(parts)}</div>'


# Surveys


def _advice(survey: Survey) -> str:
    parts = []
    for aim in dict.fromkeys(a.aim for a in survey.advice):
        parts.append(f"<h3>{_text(_capital(aim))}</h3>")
        for advice in survey.advice:
            if advice.aim == aim:
                call = "" if advice.algorithm is None else f"<pre>{_text(advice.code)}</pre>"
                parts.append(f'<div class="advice">{call}<p>{_text(advice.text)}</p></div>')
    return "\n".join(parts)


def _measures(survey: Survey) -> str:
    rows = [
        f'<tr><th scope="row">{_text(name)}</th><td class="number">{_text(value)}</td><td class="remark">{_text(note)}</td></tr>'
        for name, value, note in survey.measures()
    ]
    notes = [f"<pre>{_text(survey.fed.describe())}</pre>"]
    if survey.sampled:
        notes.append(f'<p class="soft">{_text(_capital(survey.sampled))}.</p>')
    return f"{''.join(notes)}<p></p>{_table([_head('measure'), _head('value', True), _head('to hold it against')], rows)}"


def _every_client(survey: Survey) -> str:
    frame = survey.per_client()
    rows = []
    for row in frame.to_dict("records"):
        cells = "".join(f'<td class="number">{_text(_cell(v))}</td>' for v in list(row.values())[1:])
        rows.append(f'<tr><th scope="row">{_text(row["client"])}</th>{cells}</tr>')
    table = _table([_head(c.replace("_", " "), i > 0) for i, c in enumerate(frame.columns)], rows)
    note = (
        "Label TV, W1 and Delta_D: distances of the client's labels and features from those of all; Delta_f: how far its own model is from that of all; "
        "shared, private, both: share of the variance of y there that linear models explain on held-out rows."
    )
    body = f'{table}<p class="soft">{_text(note)}</p>'
    return f"<details><summary>{len(rows)} clients, one by one</summary>{body}</details>" if len(rows) > 20 else body


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.3g}"
    return str(value)


# Settings


def _pair(key: str, value: Any) -> str:
    return f'<tr><th scope="row">{_text(key)}</th><td class="value">{_text(_value(value))}</td></tr>'


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _settings(comparison: Comparison) -> str:
    """One column an algorithm; rows in which they differ are marked."""
    columns = {}
    for name, runs in comparison.runs.items():
        recorded = runs[0].settings
        shared = {k: v for k, v in recorded.items() if k not in ("algorithm", "federation", "seed")}
        columns[name] = {
            **flatten(recorded.get("algorithm", {})),
            **flatten(shared),
            "rounds": max(len(r.records) - 1 for r in runs),
            "seeds": [r.settings.get("seed") for r in runs],
        }
    keys = dict.fromkeys(k for c in columns.values() for k in c if k)
    rows = []
    for key in keys:
        values = [_value(c[key]) if key in c else "–" for c in columns.values()]
        differs = ' class="differs"' if len(set(values)) > 1 and key != "type" else ""
        cells = "".join(f'<td class="value">{_text(v)}</td>' for v in values)
        rows.append(f'<tr{differs}><th scope="row">{_text(key)}</th>{cells}</tr>')
    note = '<p class="soft">Rows marked * differ between algorithms; a dash: the algorithm has no such setting.</p>'
    return _table([_head("setting"), *map(_head, columns)], rows) + (note if len(columns) > 1 else "")


def _every_run(comparison: Comparison) -> str:
    columns = [c for c in (comparison.metric, comparison.own_metric, "loss") if c]
    rows = []
    for name, runs in comparison.runs.items():
        for i, run in enumerate(runs):
            records = run.records
            sent = [f"{records.last(c) / 1e6:,.3f}" for c in ("bytes_up", "bytes_down")]
            values = [f"{records.last(c):.4f}" for c in columns]
            cells = [run.settings.get("seed"), len(records) - 1, *values, *sent, f"{records.last('seconds'):.2f}"]
            cells.append("diverged" if i in comparison.diverged.get(name, {}) else "finished")
            numbers = "".join(f'<td class="number">{_text("–" if c == "nan" else c)}</td>' for c in cells)
            rows.append(f'<tr><th scope="row">{_text(name)}</th>{numbers}</tr>')
    headings = ["seed", "rounds", *map(words, columns), "MB up", "MB down", "seconds", "end"]
    table = _table([_head("algorithm"), *(_head(h, True) for h in headings)], rows)
    return f"<details><summary>{len(rows)} runs, one by one</summary>{table}</details>" if len(rows) > 6 else table


def _versions() -> str:
    found = {"foedus": __version__, "Python": platform.python_version()}
    for package in ("torch", "numpy", "pandas", "matplotlib"):
        found[package] = metadata.version(package)
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} processors"
    return f'<p class="soft">{_text(", ".join(f"{k} {v}" for k, v in found.items()))}. {_text(machine)}.</p>'
