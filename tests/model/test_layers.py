"""The attention layer alone in another Flax model, as docs/layer.md shows it; LayerNorm against Flax's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from adaptive_span_jax.model.layers import LayerNorm, SpanAttention
from adaptive_span_jax.model.span import AdaptiveSpan, DynamicSpan, FixedSpan, project


class Theirs(nnx.Module):
    """A model that knows nothing of ours but one layer."""

    def __init__(self, span, rngs: nnx.Rngs):
        self.positions_SK = nnx.Param(jax.random.normal(rngs.params(), (40, 4)))
        self.attention = SpanAttention(width=12, heads=3, span=span, ramp=8, rngs=rngs)
        self.out = nnx.Linear(12, 12, rngs=rngs)

    def __call__(self, hidden_BTD, memory_BSD):
        mixed, memory_BSD, z_BTH = self.attention(hidden_BTD, memory_BSD, self.positions_SK[...])
        return self.out(mixed), memory_BSD, self.attention.penalty(z_BTH)


def test_attention_in_another_model_trains_and_remembers():
    hidden = jax.random.normal(jax.random.key(1), (2, 7, 12))
    for span in (FixedSpan(3, 40), AdaptiveSpan(3, 40), DynamicSpan(12, 3, 40)):
        theirs = Theirs(span, nnx.Rngs(0))
        optimizer = nnx.Optimizer(theirs, optax.sgd(5.0), wrt=nnx.Param)

        @nnx.jit
        def step(theirs, optimizer, memory):
            def loss(theirs):
                output, after, penalty = theirs(hidden, memory)
                # A loss that wants long spans, whose update overshoots without the projection.
                return jnp.square(output - hidden[:, ::-1]).mean() - 0.1 * penalty, after

            (value, after), gradients = nnx.value_and_grad(loss, has_aux=True)(theirs)
            optimizer.update(theirs, gradients)
            nnx.update(theirs, project(nnx.state(theirs)))
            return value, after

        memory, losses = jnp.zeros((2, 40, 12)), []
        for _ in range(3):
            value, memory = step(theirs, optimizer, memory)
            losses.append(float(value))
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]
        assert_array_equal(memory[:, -7:], hidden)
        assert_array_equal(memory[:, -14:-7], hidden)
        assert_array_equal(memory[:, :-21], 0)
        if isinstance(span, AdaptiveSpan):
            assert_array_equal(span.span_fraction_H[...], 1)


def test_layer_norm_and_its_gradients_equal_those_of_flax(x64):
    keys = jax.random.split(jax.random.key(2), 4)
    x_BTD, d_y_BTD = (jax.random.normal(key, (2, 3, 11), float) + 5 for key in keys[:2])
    norms: Any = LayerNorm(11, float), nnx.LayerNorm(11, epsilon=1e-5, param_dtype=float, rngs=nnx.Rngs(0))
    for norm in norms:
        norm.scale[...], norm.bias[...] = (jax.random.normal(key, (11,), float) for key in keys[2:])

    def loss(norm, x_BTD):
        y_BTD = norm(x_BTD)
        return (y_BTD * d_y_BTD).sum(), y_BTD

    found, expected = (nnx.grad(loss, argnums=(0, 1), has_aux=True)(norm, x_BTD) for norm in norms)
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, expected)
