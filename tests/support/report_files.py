"""The files of a report."""

import csv

FIGURES = ("spans", "span_history", "attention", "cost", "training", "passage")


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
