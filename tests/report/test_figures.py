"""Every figure handles non-finite and missing numbers, and shows why a panel is empty."""

import re
import warnings
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from adaptive_span_jax.report.figures.attention import attention_patterns, short_and_long_head
from adaptive_span_jax.report.figures.cost import cost_by_limit
from adaptive_span_jax.report.figures.drawing import pixels
from adaptive_span_jax.report.figures.passage import passage_spans
from adaptive_span_jax.report.figures.spans import span_heat_map, span_history, spans_by_layer
from adaptive_span_jax.report.figures.sweep import Point, span_sweep
from adaptive_span_jax.report.figures.training import training_curves
from tests.conftest import tiny_config

NAN, INF = float("nan"), float("inf")
BAD = pytest.mark.parametrize("bad", [NAN, -INF])
EMPTY_LH = np.zeros((0, 0))


@pytest.fixture(autouse=True)
def no_warnings():
    """A number that is not finite must be seen, not run into."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def text_in(drawing, directory):
    """All the words of a figure, after its files were written without an error."""
    drawing.save(directory)
    svg = (directory / f"{drawing.name}.svg").read_text()
    ElementTree.fromstring(svg)
    return " ".join(re.findall(r">([^<>]+)</text>", svg))


def with_bad(z_LH, bad):
    z_LH = z_LH.copy()
    z_LH[0, 0] = bad
    return z_LH


FINE_LH = np.array([[1.0, 9.0], [3.0, 30.0]])


@BAD
def test_spans(bad, tmp_path):
    drawing = spans_by_layer(with_bad(FINE_LH, bad), 5, 37)
    assert "1 of 4 heads has a span that is not finite" in drawing.caption
    assert "between 8.0 and 35.0 positions" in drawing.alt
    assert "no span is finite" not in text_in(drawing, tmp_path)
    assert "no span is finite" in text_in(spans_by_layer(np.full((2, 2), bad), 5, 37), tmp_path)
    assert "no heads" in text_in(spans_by_layer(EMPTY_LH, 5, 37), tmp_path)


@BAD
def test_span_history(bad, tmp_path):
    steps = np.array([1, 2])
    drawing = span_history(steps, np.stack([FINE_LH, with_bad(FINE_LH, bad)]), 5, 37)
    assert "nan" not in drawing.alt
    text_in(drawing, tmp_path)
    assert "no span is finite" in text_in(span_history(steps, np.full((2, 2, 2), bad), 5, 37), tmp_path)
    assert "no spans" in text_in(span_history(np.zeros(0), np.zeros((0, 2, 2)), 5, 37), tmp_path)


@BAD
def test_heat_map(bad):
    for z_LH in (with_bad(FINE_LH, bad), np.full((2, 2), bad), EMPTY_LH):
        assert pixels(span_heat_map(z_LH, 5, 37)).min() < 100, "nothing is drawn"


@BAD
def test_attention(bad, tmp_path):
    weight_LHS = np.full((2, 2, 37), 1 / 37)
    assert short_and_long_head(weight_LHS, with_bad(FINE_LH, bad)) == ((1, 0), (1, 1))
    text_in(attention_patterns(weight_LHS, with_bad(FINE_LH, bad), 5, 9, "dev"), tmp_path)
    weight_LHS[0] = bad
    assert "layer 2, head 1: span 8.0" in text_in(attention_patterns(weight_LHS, FINE_LH, 5, 9, "dev"), tmp_path)
    for weights in (np.full((2, 2, 37), bad), np.zeros((2, 2, 37))):
        drawing = attention_patterns(weights, FINE_LH, 5, 9, "dev")
        assert "no head" in text_in(drawing, tmp_path)
        assert "no head" in drawing.alt
    assert "no head" in text_in(attention_patterns(np.zeros((0, 0, 37)), EMPTY_LH, 5, 9, "dev"), tmp_path)


@BAD
def test_cost(bad, tmp_path):
    config = tiny_config(span={"limit": 64})
    for z_LH in (np.full((3, 2), bad), with_bad(np.ones((3, 2)), bad), EMPTY_LH):
        drawing = cost_by_limit(config, z_LH, z_LH)
        words = text_in(drawing, tmp_path)
        assert "fixed spans of S" in words
        assert "this model's spans" not in words
        assert "not finite" in drawing.caption
        assert "nan" not in drawing.alt


@BAD
def test_passage(bad, tmp_path):
    drawing = passage_spans(b"abc", np.array([1.0, bad, 4.0]))
    assert "between 1.0 and 4.0" in drawing.alt
    text_in(drawing, tmp_path)
    assert "no span is finite" in text_in(passage_spans(b"abc", np.full(3, bad)), tmp_path)
    assert "no text" in text_in(passage_spans(b"", np.zeros(0)), tmp_path)


@pytest.mark.parametrize("bad", [NAN, INF, None])
def test_training(bad, tmp_path):
    """None: how JSON writes a number that is not finite."""
    names = ("train_bits", "dev_bits", "learning_rate", "tokens_per_second")
    fine = {"step": 1, **dict.fromkeys(names, 2.0)}
    for lines in ([fine, {"step": 2, **dict.fromkeys(names, bad)}], [fine, {"step": 2, "train_bits": 2.0}]):
        drawing = training_curves(lines, "byte")
        assert "2.000 bits on train" in drawing.alt
        assert "nan" not in drawing.alt
        text_in(drawing, tmp_path)
    for lines in ([{"step": 2, **dict.fromkeys(names, bad)}], []):
        assert text_in(training_curves(lines, "byte"), tmp_path).count("no finite numbers") == 3


@BAD
def test_sweep(bad, tmp_path):
    points = [
        Point("adaptive", limit, 1, 8, bits, bits, bits, bits, 1e6, 60.0) for limit, bits in ((64, 3.0), (128, bad))
    ]
    assert "no finite numbers" not in text_in(span_sweep(points, "byte"), tmp_path)
    assert text_in(span_sweep(points[1:], "byte"), tmp_path).count("no finite numbers") == 2
    assert text_in(span_sweep([], "byte"), tmp_path).count("no finite numbers") == 3
