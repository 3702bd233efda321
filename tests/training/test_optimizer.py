"""Adagrad with clipped steps and its schedule, against a float64 oracle written from the published rules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.training.optimizer import make_optimizer, make_schedule
from tests.conftest import tiny_config

GRADIENTS = np.random.default_rng(5).standard_normal((4, 7)) * np.array([[0.001], [0.1], [1.0], [0.01]])


def oracle(gradients, learning_rate, clip, warmup):
    """Positions after each update of one tensor that starts at 0."""
    value, squares, path = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1]), []
    for n, g in enumerate(gradients):
        squares = squares + g**2
        c = min(1.0, clip / (np.sqrt((g**2).sum()) + 1e-10))
        value = value - learning_rate * min(1.0, (n + 1) / warmup) * c * g / (np.sqrt(squares) + 1e-10)
        path.append(value)
    return np.array(path)


def run(optimizer, gradients, wrap=lambda g: {"embedding_VD": g}):
    params = wrap(jnp.zeros(gradients.shape[1:]))
    state, path = optimizer.init(params), []
    for g in gradients:
        updates, state = optimizer.update(wrap(jnp.asarray(g)), state)
        params = optax.apply_updates(params, updates)
        path.append(jax.tree.leaves(params)[0])
    return np.array(path)


def config(**train):
    return tiny_config(train={"learning_rate": 0.07, "warmup_steps": 3, "clip": 0.03} | train).train


def test_equals_the_oracle(x64):
    expected = oracle(GRADIENTS, 0.07, 0.03, 3)
    assert_allclose(run(make_optimizer(config()), GRADIENTS), expected, rtol=1e-12)
    # The textbook chain clips what is accumulated, and is another optimizer.
    naive = optax.chain(optax.clip_by_global_norm(0.03), optax.adagrad(0.07, 0.0, 1e-10))
    assert np.abs(run(naive, GRADIENTS) - expected).max() > 0.01


def test_every_layer_is_clipped_on_its_own(x64):
    stacked = np.stack([GRADIENTS, 100 * GRADIENTS], axis=1)  # [update, layer, parameter]
    found = run(make_optimizer(config()), stacked, wrap=lambda g: {"layers": {"key_DHK": g}})
    assert_allclose(found[:, 0], oracle(GRADIENTS, 0.07, 0.03, 3), rtol=1e-12)
    assert_allclose(found[:, 1], oracle(100 * GRADIENTS, 0.07, 0.03, 3), rtol=1e-12)


def test_zero_gradients_do_not_move_anything():
    assert_allclose(run(make_optimizer(config()), np.zeros((2, 3))), 0)


def test_an_update_that_is_not_good_leaves_every_bit(x64):
    optimizer = make_optimizer(config())
    params = {"layers": {"a": jnp.ones((2, 3))}, "b": jnp.ones(4)}
    _, before = optimizer.update(params, optimizer.init(params))
    for bad in (np.nan, np.inf, 1e300):
        gradients = {"layers": {"a": jnp.full((2, 3), bad)}, "b": jnp.full(4, 0.1)}
        updates, after = optimizer.update(gradients, before, good=jnp.asarray(False))
        jax.tree.map(lambda update: assert_array_equal(update, 0), updates)
        jax.tree.map(
            assert_array_equal, optax.tree.get(after, "sum_of_squares"), optax.tree.get(before, "sum_of_squares")
        )


def test_state_keeps_its_types():
    optimizer, params = make_optimizer(config()), {"layers": {"a": jnp.ones((2, 3))}, "b": jnp.ones(4)}
    before = optimizer.init(params)
    _, after = optimizer.update(params, before)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"warmup_steps": 4}, {0: 0.07 / 4, 2: 0.07 * 3 / 4, 3: 0.07, 1000: 0.07}),
        ({"warmup_steps": 0}, {0: 0.07, 5: 0.07}),
        ({"warmup_steps": 2, "cooldown_start": 10}, {0: 0.035, 9: 0.07, 10: 0.007, 99: 0.007}),
    ],
)
def test_schedule(train, expected):
    schedule = make_schedule(config(**train))
    for update, rate in expected.items():
        assert_allclose(schedule(jnp.asarray(update)), rate, rtol=1e-6)
