"""What a run looks like: a page, figures, tables.

In: a run's logs, its result, its parameters. Out: `report/index.html`, and every figure as SVG, PNG and CSV. Start
with `report.py`, which chooses figures (`draw`) and numbers (`_summary`); `result.py` is result.json; `figures/` has a
file per figure, `page.py` the layout and the headline numbers, `paper_tables.py` the paper's numbers, `probe.py` what
heads attend to, `sample.py` a generated text.
"""
