"""The ring buffer against plain shifting: every block after every segment, and a memory that must not change."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from adaptive_span_jax.model.memory import MIRRORED, Memory, shift_in

LAYERS, STREAMS, WIDTH = 2, 3, 5

# Segments of which several, one and less than one fill the mirror; a limit that is no multiple of the segment.
SIZES = [(320, 64), (300, 150), (400, 16), (130, 1), (37, 13)]


def inputs(number: int, segment: int) -> jax.Array:
    return jax.random.normal(jax.random.key(number), (LAYERS, STREAMS, segment, WIDTH))


@pytest.mark.parametrize(("limit", "segment"), SIZES)
def test_every_block_is_that_of_a_shifted_memory(limit, segment):
    memory = Memory.zeros(LAYERS, STREAMS, limit, segment, WIDTH, jnp.float32)
    plain_LBSD = jnp.zeros((LAYERS, STREAMS, limit, WIDTH))
    advance = jax.jit(Memory.advance, static_argnums=2)
    for number in range(2 * limit // segment + 3):
        new_LBTD = inputs(number, segment)
        memory = advance(memory, new_LBTD, limit)
        plain_LBSD = jax.vmap(shift_in)(plain_LBSD, new_LBTD)
        for layer in range(LAYERS):
            read = memory.layer(layer, limit, segment)
            assert_array_equal(read.to_array(), plain_LBSD[layer])
            # A block of one slice, and one of several.
            for size in {min(MIRRORED, limit), limit - 1}:
                for back in {limit, size, (limit + size) // 2}:
                    assert_array_equal(read.block(back, size), plain_LBSD[layer, :, limit - back :][:, :size])


@pytest.mark.parametrize("segments", [0, 3])
def test_a_bad_segment_leaves_every_bit(segments):
    limit, segment = 192, 64
    memory = Memory.zeros(LAYERS, STREAMS, limit, segment, WIDTH, jnp.float32)
    advance = jax.jit(Memory.advance, static_argnums=2)
    for number in range(segments):
        memory = advance(memory, inputs(number, segment), limit, True)
    after = advance(memory, jnp.full((LAYERS, STREAMS, segment, WIDTH), np.nan), limit, False)
    jax.tree.map(assert_array_equal, after, memory)
    assert advance(memory, inputs(9, segment), limit, True).end == segment
