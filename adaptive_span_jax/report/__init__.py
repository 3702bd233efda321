"""The report of a run: a page, figures, tables.

In: a run's logs, result and parameters. Out: `report/index.html`, and every figure as SVG, PNG and CSV. Start with
`report.py`, which chooses figures (`draw`) and numbers (`_summary`). `result.py` writes result.json; `figures/` has a
file per figure; `page.py` has the layout and the headline numbers, `paper_tables.py` the paper's numbers. `probe.py`
measures what heads attend to, and `sample.py` generates a short text.
"""
