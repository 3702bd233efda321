"""The report as a self-contained HTML page: no network, no scripts, light and dark mode, phones and desktops."""

from collections.abc import Sequence
from html import escape
from typing import Any

from adaptive_span_jax.report.figures.drawing import Drawing
from adaptive_span_jax.report.paper_tables import FOOTNOTES, Table, shown
from adaptive_span_jax.training.diagnostics import Concern

_HEADINGS = {
    "model": "Model",
    "layers": "Layers",
    "average_span": "Average span",
    "parameters": "Parameters",
    "flops": "FLOPS",
    "dev": "Dev bits",
    "test": "Test bits",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6470; --paper: #f5f6f7; --card: #fff; --line: #d9dde2;
  --warn: #fff4d6; --warn-line: #e69f00; --mark: #e8f2fa; --prompt: #cde4f5 }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #9aa4b0; --paper: #101317; --card: #181c22;
  --line: #2c333c; --warn: #2d2510; --warn-line: #e69f00; --mark: #16283a; --prompt: #1f4768 } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.2rem; max-width: 76rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: anywhere }
h1 { font-size: 1.5rem; margin: .2rem 0 } h2 { font-size: 1.05rem; margin: 0 0 .3rem }
p { margin: .3rem 0 } .soft, figcaption, small { color: var(--soft); font-size: .86rem }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .7rem; margin: 1rem 0 }
.facts div, figure, section { background: var(--card); border: 1px solid var(--line); border-radius: .6rem;
  padding: .8rem 1rem; margin: 0 }
.facts dt { color: var(--soft); font-size: .86rem } .facts dd { margin: 0; font-size: 1.25rem; font-weight: 600 }
.facts dl { margin: 0 }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: .9rem;
  align-items: start }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); margin: .4rem 0 }
.concern { background: var(--warn); border-color: var(--warn-line); margin: .7rem 0 }
.tables { margin-top: .9rem; display: grid; grid-template-columns: minmax(0, 1fr); gap: .9rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .3rem .55rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { white-space: normal; overflow-wrap: normal }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem; position: sticky; left: 0;
  background: var(--card) }
tr.run, tr.run td { background: var(--mark); font-weight: 600 }
.apart { border: 2px dashed var(--line); border-radius: .6rem; padding: .8rem 1rem }
.apart table, .apart h2 { color: var(--soft) } .notes p { margin: .3rem 0 }
.cue { display: none; text-align: right; margin: 0 }
#sample { margin-top: .9rem } .prompt { background: var(--prompt); color: var(--ink); border-radius: .2rem }
pre { margin: .4rem 0; white-space: pre-wrap; font: .86rem/1.45 ui-monospace, monospace }
a { color: inherit }
@media (max-width: 36rem) { .cue { display: block } }
@media (max-width: 40rem) { body, .apart, .facts div, figure, section { padding: .6rem }
  table { font-size: .86rem } th, td { padding: .3rem .4rem } }
"""


def _facts(summary: dict[str, Any]) -> dict[str, str]:
    """The headline numbers of the page, with their units."""

    def bits(part: str) -> str:
        value = summary[f"{part}_bits"]
        return "–" if value is None else f"{value:.3f}"

    average, cost, fixed = (summary[name] for name in ("average_span", "flops_per_token", "flops_per_token_fixed"))
    facts = {
        f"dev, bits per {summary['unit']}": bits("dev"),
        f"test, bits per {summary['unit']}": bits("test"),
        f"baseline: order-2 entropy of train, bits per {summary['unit']}": bits("order2"),
        f"average span, of S = {summary['limit']:,}": "not finite" if average is None else f"{average:,.1f}",
        "million multiply-adds per token": "not finite" if cost is None else f"{cost / 1e6:.2f}",
    }
    if cost is not None and summary["kind"] != "fixed":
        saved = f"multiply-adds saved compared with fixed spans of S = {summary['limit']:,}"
        facts[saved] = f"{100 * (1 - cost / fixed):.0f} %"
    return facts


def page(
    summary: dict[str, Any], concerns: Sequence[Concern], drawings: Sequence[Drawing], tables: Sequence[Table]
) -> str:
    """The whole page."""
    name = escape(summary["run"])
    cards = "".join(
        f"<div><dl><dt>{escape(what)}</dt><dd>{escape(value)}</dd></dl></div>"
        for what, value in _facts(summary).items()
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{name} – adaptive span</title>
<style>{_STYLE}</style>
</head>
<body>
<header><h1>{name}</h1>
<p class="soft">{escape(summary["kind"])} spans of at most {summary["limit"]:,} positions ·
{summary["parameters"]:,} parameters · {escape(summary["corpus"])} ·
step {summary["step"]:,} of {summary["steps"]:,}</p></header>
<main>
{"".join(_concern(concern) for concern in concerns)}
<div class="facts">{cards}</div>
<div class="figures">
{"".join(_figure(drawing) for drawing in drawings)}
</div>
{_sample(summary["sample"])}
{_tables(summary["corpus"], tables)}
</main>
<footer class="soft"><p>The tables as <a href="tables.csv">tables.csv</a>; the numbers of this page as
<a href="summary.json">summary.json</a>.{_input_share(summary["input_share"])}</p></footer>
</body>
</html>
"""


def _concern(concern: Concern) -> str:
    text = f"<h2>{escape(concern.found)}</h2><p>{escape(concern.advice)}.</p>"
    return f'<section class="concern" role="alert">{text}</section>\n'


def _figure(drawing: Drawing) -> str:
    links = ", ".join(f'<a href="{drawing.name}.{form}">{form.upper()}</a>' for form in ("svg", "png", "csv"))
    svg = drawing.svg().replace("<svg ", f'<svg role="img" aria-label="{escape(drawing.alt)}" ', 1)
    return (
        f'<figure id="{drawing.name}"><h2>{escape(drawing.title)}</h2>\n{svg}'
        f"<figcaption>{escape(drawing.caption)} {links}</figcaption></figure>\n"
    )


def _input_share(share: float | None) -> str:
    return "" if share is None else f" Fetching text took {100 * share:.2g} % of training time."


def _sample(sample: dict[str, Any] | None) -> str:
    if sample is None:
        text = "<p>No sample: the model's parameters or predictions are not finite.</p>"
    else:
        text = (
            f'<pre><span class="prompt">{escape(sample["prompt"])}</span>{escape(sample["continuation"])}</pre>\n'
            '<p class="soft"><span class="prompt">Shaded</span>: the prompt, from the start of '
            f"{escape(sample['source'])}. The rest was generated at temperature {sample['temperature']:g}.</p>"
        )
    return f'<section id="sample"><h2>A generated sample</h2>\n{text}</section>\n'


def _tables(corpus: str, tables: Sequence[Table]) -> str:
    """The paper's tables; visually separated if none of them is for the run's corpus."""
    shown_tables = "".join(_table(table) for table in tables)
    notes = "".join(f"<p><sup>{number}</sup> {escape(note)}</p>" for number, note in enumerate(FOOTNOTES, 1))
    notes = (
        f'<div class="soft notes">{notes}<p>FLOPS are counted as in the paper: multiply-adds per predicted token, '
        "L·(4d² + 2·d·FF + 2·span·d). With N persistent vectors per head, 2·d·N takes the place of 2·d·FF.</p></div>"
    )
    if any(table.run for table in tables):
        return f'<div class="tables">{shown_tables}{notes}</div>'
    return (
        '<div class="tables apart"><h2>For reference only: the paper\'s results on other text</h2>'
        f"<p>This run was trained on {escape(corpus)}, which is in none of these tables. Bits on different texts are "
        f"not comparable.</p>{shown_tables}{notes}</div>"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_HEADINGS[column]}</th>' for column in table.columns)
    body = ""
    for row in (*table.rows, *([table.run] if table.run else [])):
        cells = [escape(shown(row, column)) for column in table.columns]
        if row.notes:
            cells[table.columns.index("flops")] += f"<sup>{row.notes}</sup>"
        is_run = ' class="run"' if row is table.run else ""
        body += f"<tr{is_run}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n"
    title = escape(table.title)
    cue = '<p class="cue soft">scroll for more columns →</p>' if len(table.columns) > 4 else ""
    return (
        f'<section><h2>{title}</h2>{cue}<div class="wide" tabindex="0" role="region" aria-label="{title}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>\n"
    )
