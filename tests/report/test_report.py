"""The numbers of a report equal those of the run, computed in another way."""

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.checkpoint.metadata import CheckpointMetadata
from adaptive_span_jax.commands import report as report_command
from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.segments import Position
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.model import flops, transformer
from adaptive_span_jax.model.memory import shift_in
from adaptive_span_jax.report import probe, report, result
from adaptive_span_jax.report.figures.attention import attention_patterns, short_and_long_head
from adaptive_span_jax.report.figures.drawing import BLUE, GREEN, PINK, RED, shades
from adaptive_span_jax.report.figures.passage import passage_spans
from adaptive_span_jax.report.figures.spans import span_history, spans_by_layer
from adaptive_span_jax.report.figures.sweep import Point, span_sweep
from adaptive_span_jax.report.paper_tables import FOOTNOTES, PUBLISHED, Row, shown, tables
from adaptive_span_jax.report.sample import shown_parts
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.training.evaluation import score
from adaptive_span_jax.training.step import make_eval_step
from tests.conftest import random_params, tiny_config
from tests.support.report_files import rows_of


def test_report_needs_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="has no checkpoints"):
        report_command.report(tmp_path, "latest")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("adaptive", {}),
        pytest.param("adaptive", {"sandwich": 2}, marks=pytest.mark.slow),
        pytest.param("adaptive", {"persistent": 7}, marks=pytest.mark.slow),
        pytest.param("dynamic", {}, marks=pytest.mark.slow),
    ],
)
def test_observation_is_plain_attention_over_the_text(kind, sizes):
    """Weights and spans found by hand, layer by layer, with a memory that is a plain array."""
    config = tiny_config(span={"kind": kind}, model=sizes, data={"max_bytes": 6500})
    text = corpus.load(config.data)
    params = random_params(config, len(text.vocabulary))
    seen = probe.probe_model(config, params, text)
    limit, segment = config.span.limit, config.train.segment
    assert seen.weight_LHS.shape == (3, 2, limit)
    if "persistent" not in sizes:
        assert_allclose(seen.weight_LHS.sum(axis=-1), 1, rtol=1e-5)

    streams = 2
    length = text.dev.size // streams
    tokens = text.dev[: streams * length].reshape(streams, length)
    count = min((length - 1) // segment, -(-limit // segment) + 8)
    first = max(count - 8, 0)
    memory_LBSD = [jnp.zeros((streams, limit, config.model.width))] * 3
    state, weights, spans = transformer.init_memory(config, streams), [], []
    for number in range(count):
        part = tokens[:, number * segment : (number + 1) * segment].astype(np.int32)
        inputs = transformer.apply(config, params, part, state).inputs_LBTD
        state = state.advance(inputs, limit)
        if number >= first:
            found = [
                by_hand(config, params, layer, np.asarray(inputs[layer]), np.asarray(memory_LBSD[layer]))
                for layer in range(3)
            ]
            weights.append([weight for weight, _ in found])
            spans.append([z for _, z in found])
        memory_LBSD = [shift_in(old, new) for old, new in zip(memory_LBSD, inputs, strict=True)]
    assert_allclose(seen.weight_LHS, np.mean(weights, axis=0), rtol=1e-4, atol=1e-7)
    z_NLBTH = np.array(spans)
    assert_allclose(seen.furthest_z_LH, z_NLBTH.max(axis=(0, 2, 3)), rtol=1e-4)
    passage = tokens[0, first * segment : count * segment]
    assert seen.passage == text.decode(passage)[: len(seen.passage)]
    span_T = np.minimum(z_NLBTH + config.span.ramp, limit).mean(axis=(1, 4))[:, 0].ravel()
    assert_allclose(seen.passage_span_T, span_T[: len(seen.passage)], rtol=1e-4)
    assert (np.ptp(seen.passage_span_T) > 1) == (kind == "dynamic")


def by_hand(config, params, layer, hidden_BTD, memory_BSD):
    """One layer's mean weights by distance and its spans, token by token."""
    at = jax.tree.map(lambda leaf: np.asarray(leaf[layer], np.float64), params[transformer.LAYERS]["attention"])
    limit, heads, positions = config.span.limit, config.model.heads, np.asarray(params["positions_SK"], np.float64)
    streams, segment, _ = hidden_BTD.shape
    if config.span.kind == "adaptive":
        z_BTH = np.broadcast_to(limit * at["span"]["span_fraction_H"], (streams, segment, heads))
    else:
        z_BTH = limit / (1 + np.exp(-(hidden_BTD @ at["span"]["weight_DH"] + at["span"]["bias_H"])))
    context = np.concatenate([memory_BSD, hidden_BTD], axis=1)
    total_HS = np.zeros((heads, limit))
    for stream, token, head in np.ndindex(streams, segment, heads):
        query = hidden_BTD[stream, token] @ at["query_DHK"][:, head]
        seen = context[stream, token : token + limit][::-1]  # the previous token first
        score = (seen @ at["key_DHK"][:, head] + positions) @ query / np.sqrt(config.head_width)
        distance = np.arange(1, limit + 1)
        mask = np.clip((config.span.ramp + z_BTH[stream, token, head] + 1 - distance) / config.span.ramp, 0, 1)
        weight = mask * np.exp(score)
        constant = np.exp(query @ at["persistent"]["key_HKU"][head]) if config.model.persistent else np.zeros(0)
        total_HS[head] += weight / (weight.sum() + constant.sum())
    return total_HS / (streams * segment), z_BTH


def test_the_attention_that_persistent_vectors_get_is_in_the_caption():
    weight_LHS = np.zeros((1, 2, 9))
    weight_LHS[0, 0, :2], weight_LHS[0, 1, :9] = 0.25, 0.75 / 9
    drawing = attention_patterns(weight_LHS, np.array([[0.0, 5.0]]), 4, 100, "dev", persistent=13)
    assert "The rest of their attention, 50% and 25%, is to their 13 persistent vectors." in drawing.caption
    assert "looks 2 positions back on average, head 2 of layer 1 5." in drawing.alt  # 1.5 and 5 of what is left
    assert "persistent" not in attention_patterns(weight_LHS, np.array([[0.0, 5.0]]), 4, 100, "dev").caption


def test_short_and_long_head_are_chosen_by_span_and_then_by_distance():
    weight_LHS = np.full((1, 4, 3), 1 / 3)
    weight_LHS[0, 1] = [0.9, 0.05, 0.05]
    weight_LHS[0, 2] = [0, 0, 1]
    assert short_and_long_head(weight_LHS, np.array([[7.0, 9, 3, 5]])) == ((0, 2), (0, 1))
    assert short_and_long_head(weight_LHS, np.full((1, 4), 8.0)) == ((0, 1), (0, 2))


def test_a_full_length_model_can_be_drawn():
    """24 layers, S = 8192, spans from none to all, one of them exactly at the limit."""
    z_LH = np.linspace(0, 8192, 24 * 8).reshape(24, 8)
    svg = spans_by_layer(z_LH, 32, 8192).svg()
    ElementTree.fromstring(svg)
    weight_LHS = np.full((24, 8, 8192), 1 / 8192)
    ElementTree.fromstring(attention_patterns(weight_LHS, z_LH, 32, 100, "dev").svg())


def test_any_byte_can_be_shown():
    drawing = passage_spans(bytes(range(256)), np.ones(256))
    ElementTree.fromstring(drawing.svg())
    assert drawing.rows[ord("a")][2] == "a"
    assert drawing.rows[200][2] == "·"


def test_data_is_visible_on_light_and_on_dark():
    """The contrast of lines and dots to the page's two backgrounds: at least 3, as WCAG asks of graphics."""

    def luminance(color):
        channels = np.array(to_rgb(color))
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return linear @ [0.2126, 0.7152, 0.0722]

    for color in (BLUE, GREEN, RED, PINK, *shades(4), *shades(24)):
        for background in ("#ffffff", "#181c22"):
            low, high = sorted((luminance(color[:3] if not isinstance(color, str) else color), luminance(background)))
            assert (high + 0.05) / (low + 0.05) > 3, (color, background)


def test_a_phone_shows_letters_of_eight_dots():
    weight_LHS = np.full((24, 8, 64), 1 / 64)
    z_NLH = np.ones((3, 24, 8))
    for drawing in (
        spans_by_layer(z_NLH[0], 5, 37),
        span_history(np.arange(3), z_NLH, 5, 37),
        attention_patterns(weight_LHS, z_NLH[0], 32, 100, "dev"),
    ):
        svg = drawing.svg()
        width = float(re.findall(r'viewBox="0 0 ([0-9.]+)', svg)[0])
        sizes = [float(size) for size in re.findall(r"font-size: ([0-9.]+)px", svg)]
        # 320 dots: a narrow phone's 360 but for the margins of page and card.
        assert min(sizes) * 320 / width >= 8, drawing.name


@pytest.mark.parametrize("kind", ["adaptive", "dynamic"])
def test_report_has_the_spans_of_devs_evaluation(kind, tmp_path, one_device, monkeypatch):
    """One number in result, report and `spans()`, whether the run has been evaluated or not."""
    config = tiny_config(span={"kind": kind}, data={"max_bytes": 6500}, model={"layers": 2, "attention": "plain"})
    text = corpus.load(config.data)
    params = random_params(config, len(text.vocabulary))
    mesh = sharding.make_mesh()
    dev = score(config, params, text.dev, "exact", make_eval_step(config, mesh), mesh)
    finished = result.make_result(config, text, dev, dev, 0.0, 0.0)

    saved = CheckpointMetadata(6, Position(), 0.0, text.fingerprint, "", {})
    monkeypatch.setattr(report_command, "load_params", lambda *_: (config, saved, params))
    monkeypatch.setattr(report_command.workdir, "check_same_run", lambda *_: [])
    monkeypatch.setattr(report, "draw", lambda run: drawn.append(run) or [])
    drawn: list[Any] = []
    assert report_command.report(tmp_path, "latest") == 0
    result.write_result(tmp_path, finished)
    assert report_command.report(tmp_path, "latest") == 0
    # A result of another step says nothing about this checkpoint.
    result.write_result(tmp_path, finished | {"steps": 7, "z_LH": [[0.0, 0.0]] * 2, "dev_bits": 99.0})
    assert report_command.report(tmp_path, "latest") == 0
    assert [run.dev_bits for run in drawn] == [None, dev.bits, None]
    for run in drawn:
        summary = report._summary(run, [])
        for name in ("average_span", "shortest_span", "longest_span"):
            assert summary[name] == pytest.approx(finished[name], rel=1e-4), name
    drawing = spans_by_layer(drawn[0].z_LH, config.span.ramp, config.span.limit)
    assert f"between {finished['shortest_span']:.1f} and {finished['longest_span']:.1f} positions" in drawing.alt


def test_figures_take_the_color_of_the_text_around_them():
    svg = spans_by_layer(np.ones((2, 2)), 5, 37).svg()
    assert "currentColor" in svg
    assert not re.findall(r"#(?:000000|1c2024)\b", svg), "ink that a dark page would swallow"


def test_tables_show_published_numbers_and_the_run():
    run = Row("this run", 4, 36.5, 848_496, 816_000.0, 2.2421, None)
    text8, enwik8, dynamic = PUBLISHED
    assert [shown(text8.rows[1], column) for column in text8.columns[1:]] == ["1.05", "1.11", "12", "314", "38M", "42M"]
    assert [shown(enwik8.rows[-1], column) for column in enwik8.columns[1:]] == ["1.00", "0.98", "24", "209M", "181M"]
    assert [shown(row, "average_span") for row in dynamic.rows] == ["123", "149"]
    assert [shown(run, column) for column in text8.columns] == ["this run", "2.242", "–", "4", "36.5", "848k", "816k"]
    assert "217M" in FOOTNOTES[int(text8.rows[-1].notes) - 1]


def test_models_of_later_papers_stand_in_the_table_of_their_text():
    _, enwik8, _ = PUBLISHED
    rows = {row.model: [shown(row, column) for column in enwik8.columns[1:]] for row in enwik8.rows}
    assert rows["All-attention (S = 8192, N = 1024)"] == ["1.03", "1.01", "18", "39M", "–"]
    assert rows["All-attention (S = 8192, N = 2048)"] == ["1.00", "0.98", "36", "114M", "–"]
    assert rows["Sandwich, Adaptive-Span (S = 8192)"] == ["–", "0.968", "24", "209M", "–"]
    sources = {row.model.split()[0]: FOOTNOTES[int(row.notes) - 1] for row in enwik8.rows if row.notes}
    assert "arXiv:1907.01470" in sources["All-attention"]
    assert "arXiv:1911.03864" in sources["Sandwich,"]


def test_a_run_is_in_the_tables_of_its_own_text_only():
    run = Row("this run", 4, 36.5, 848_496, 816_000.0, 2.2421, None)
    assert [(table.title[:7], table.run) for table in tables("enwik8", run)] == [("Table 2", run)]
    assert [(table.title[:7], table.run) for table in tables("text8", run)] == [("Table 1", run), ("Table 3", run)]
    for other in ("stdlib", "files"):
        assert [table.run for table in tables(other, run)] == [None, None, None]


def test_spans_along_a_passage_are_drawn_for_dynamic_spans_only(monkeypatch):
    monkeypatch.setattr(report, "cost_by_limit", lambda *_: spans_by_layer(np.ones((1, 1)), 5, 37))  # takes long
    seen = probe.Probe(np.full((3, 2, 37), 1 / 37), np.ones((3, 2)), 9, b"abc", np.array([1.0, 2.0, 3.0]))
    for kind in ("fixed", "adaptive", "dynamic"):
        config = tiny_config(span={"kind": kind})
        run = report.Run(
            "run", config, "stdlib", "byte", 1, 1, 2.0, 2.0, 2.0, np.ones((3, 2)), [], [], seen, "dev", None
        )
        assert ("passage" in [drawing.name for drawing in report.draw(run)]) == (kind == "dynamic"), kind


def test_a_sample_is_text_whatever_its_bytes():
    assert shown_parts(b"caf\xc3", b"\xa9 \xff\x00\x1b\n\tend\xe2\x82") == ("caf", "é \ufffd\ufffd\ufffd\n\tend\ufffd")


def test_neighboring_layers_have_colors_that_can_be_told_apart():
    """Distance in OKLab, where 0.02 is just noticeable side by side, and lines of one dot need several times that."""
    to_cones = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
    to_lab = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]
    for layers in (2, 4, 8, 12, 24, 36):
        colors = shades(layers)[:, :3]
        linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
        lab = np.cbrt(linear @ np.transpose(to_cones)) @ np.transpose(to_lab)
        assert np.linalg.norm(np.diff(lab, axis=0), axis=1).min() > 0.1, layers


@pytest.mark.parametrize("history", [False, True])
def test_the_axis_of_spans_fits_them(history):
    def draw(z_LH, ramp, limit):
        if history:
            return span_history(np.arange(2), np.stack([z_LH, z_LH]), ramp, limit)
        return spans_by_layer(z_LH, ramp, limit)

    drawing = draw(np.array([[0.0, 3.0], [20.0, 60.0]]), 32, 2048)
    low, high = drawing.figure.axes[0].get_ylim()
    assert 20 < low < 32 < 92 < high < 105
    assert "S = 2,048 ↑" in drawing.svg()
    assert ">R = 32<" in drawing.svg()
    drawing = draw(np.array([[1000.0, 1500.0], [2000.0, 2048.0]]), 32, 2048)
    low, high = drawing.figure.axes[0].get_ylim()
    assert 800 < low < 1032 < 2048 < high < 2300
    assert ">S = 2,048<" in drawing.svg()
    assert "R = 32 ↓" in drawing.svg()


def test_the_axis_of_distances_ends_where_attention_does():
    weight_LHS = np.zeros((1, 2, 2048))
    weight_LHS[0, 0, :33], weight_LHS[0, 1, :60] = 1 / 33, 1 / 60
    drawing = attention_patterns(weight_LHS, np.array([[0.0, 27.0]]), 32, 100, "dev")
    assert 60 < drawing.figure.axes[0].get_xlim()[1] < 75
    assert "S = 2,048 →" in drawing.svg()


def test_sweep_draws_what_it_was_given(tmp_path):
    points = [Point(kind, limit, 1, 800, 3 - limit / 1e4, 3.0, 40.0, 50.0, 1e6, 60.0) for kind in ("dynamic", "fixed")
              for limit in (256, 64)]  # fmt: skip
    span_sweep(points, "byte").save(tmp_path / "new")
    rows = rows_of(tmp_path / "new" / "span_sweep.csv")
    assert [(row["kind"], row["limit"]) for row in rows] == [
        ("fixed", "64"),
        ("fixed", "256"),
        ("dynamic", "64"),
        ("dynamic", "256"),
    ]
    assert float(rows[1]["dev_bits"]) == pytest.approx(2.9744)


def test_sweep_of_two_seeds_draws_their_mean_and_range():
    points = [Point("fixed", 64, seed, 800, bits, 3.0, 64.0, 64.0, 1e6, 60.0) for seed, bits in ((1, 2.0), (2, 2.5))]
    (bars,) = span_sweep(points, "byte").figure.axes[0].containers
    line, _, (ranges,) = bars
    assert_array_equal(line.get_xydata(), [[64, 2.25]])
    assert_array_equal(ranges.get_segments()[0][:, 1], [2.0, 2.5])


def test_cost_is_the_papers():
    from adaptive_span_jax.report.figures.cost import cost_by_limit

    config = tiny_config(span={"limit": 64, "kind": "fixed"})
    rows = cost_by_limit(config, np.full((3, 2), 64.0), np.full((3, 2), 64.0)).rows
    assert rows[0][:3] == (64, flops.paper_flops(config, 64), flops.paper_flops(config, 64))
    limits = [row[0] for row in rows]
    assert_array_equal(limits, 2 ** np.arange(6, 14))
    assert len({row[2] for row in rows}) == 1, "a model's own spans do not grow with the limit"
    rows = cost_by_limit(tiny_config(span={"limit": 64}), np.full((3, 2), 20.0), np.full((3, 2), 20.0)).rows
    assert {row[2] for row in rows} == {flops.paper_flops(config, 20 + config.span.ramp)}
    started_long = tiny_config(span={"limit": 128, "initial": 100.0})
    assert cost_by_limit(started_long, np.full((3, 2), 20.0), np.full((3, 2), 20.0)).rows[0][0] == 64
