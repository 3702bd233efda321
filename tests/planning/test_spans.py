"""The settings of the spans at which a step is counted."""

import dataclasses

import numpy as np
import pytest

from adaptive_span_jax.planning import spans
from tests.conftest import tiny_config


@pytest.mark.parametrize(("layers", "heads", "limit"), [(12, 8, 8192), (24, 8, 8192), (8, 4, 1024), (5, 3, 100)])
def test_profile_keeps_its_order_and_the_limit(layers, heads, limit):
    config = tiny_config(model={"layers": layers, "heads": heads, "width": 24 * heads}, span={"limit": limit})
    z_LH = spans.spans(config, spans.TRAINED)
    assert z_LH.shape == (layers, heads)
    assert z_LH.max() <= limit
    assert z_LH[0].max() == 0 < z_LH[-1].max() or layers < 8  # low layers stay at the ramp
    if (layers, heads) == (12, 8):
        assert round(float(np.minimum(np.ceil(z_LH.mean(axis=1)) + 32, limit).mean())) == 314


def test_settings_follow_the_kind_of_span():
    config = tiny_config(span={"limit": 8192, "ramp": 32})
    adaptive, dynamic, fixed = (
        spans.settings(dataclasses.replace(config, span=dataclasses.replace(config.span, kind=kind)))
        for kind in ("adaptive", "dynamic", "fixed")
    )
    assert list(adaptive) == ["start", "trained", "2048", "limit"]
    assert adaptive["start"].max() == 0
    assert (adaptive["2048"] == 2048).all()
    np.testing.assert_allclose(dynamic["start"], 8192 * 0.01798621, rtol=1e-6)
    assert list(fixed) == ["limit"]
    assert (fixed["limit"] == 8192).all()


def test_start_is_the_configs():
    assert (spans.spans(tiny_config(span={"limit": 100, "initial": 7.0}), "start") == 7).all()


def test_a_short_limit_has_no_longer_setting():
    config = tiny_config(span={"limit": 2048, "ramp": 32})
    assert list(spans.settings(config)) == ["start", "trained", "limit"]
    np.testing.assert_array_equal(spans.spans(config, "2048"), spans.spans(config, "limit"))
    assert spans.spans(tiny_config(span={"limit": 100}), "2048").max() == 100
