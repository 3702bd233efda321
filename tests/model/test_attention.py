"""Per-head attention against plain attention: values and all gradients, for any sizes, spans, shards and devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from adaptive_span_jax.model import flops
from adaptive_span_jax.model.attention import far_tile, inputs, per_head, reference
from adaptive_span_jax.model.memory import LayerMemory, Memory
from adaptive_span_jax.runtime import cpu, sharding
from tests.conftest import tiny_config
from tests.support.attention import assert_causal, draw, errors, far_tiles_of, plain_run, run, spans


@pytest.fixture
def two_stream_shards(monkeypatch):
    """As many cores as give two shards of streams: with a device per core there is only one."""
    monkeypatch.setattr(cpu, "_cores", lambda: 2 * jax.local_device_count())


@pytest.mark.usefixtures("x64", "two_stream_shards")
@pytest.mark.parametrize(
    ("platform", "length", "limit", "ramp", "kind", "rate", "valid_length", "per_token"),
    [
        ("cpu", 16, 160, 8, "zero", 0.0, None, False),  # one chunk shorter than W
        ("cpu", 130, 300, 32, "any", 0.3, None, False),  # padded to whole chunks
        ("cpu", 256, 300, 32, "one long", 0.3, None, False),
        ("tpu", 256, 300, 32, "any", 0.3, None, False),  # tiles of 128
        pytest.param("cpu", 256, 300, 32, "full", 0.0, None, False, marks=pytest.mark.slow),
        pytest.param("tpu", 256, 300, 32, "full", 0.0, None, False, marks=pytest.mark.slow),
        ("cpu", 256, 31, 5, "any", 0.3, None, True),  # S below W and below the segment
        pytest.param("cpu", 1, 300, 32, "any", 0.3, None, True, marks=pytest.mark.slow),  # one token, as in generation
        ("cpu", 67, 200, 401, "any", 0.0, 0, False),  # R > S, empty memory masked
        ("cpu", 192, 300, 32, "any", 0.3, 100, True),
    ],
)
def test_same_as_plain(platform, length, limit, ramp, kind, rate, valid_length, per_token):
    arrays = draw(2, length, limit)
    z = spans(kind, (2, length, 3) if per_token else (1, 1, 3), limit)
    valid = None if valid_length is None else jnp.asarray(valid_length)
    found, expected = (
        run(path, arrays, z, valid, ramp=ramp, rate=rate, platform=platform) for path in (per_head, reference)
    )
    assert max(errors(found, expected).values()) < 1e-9


@pytest.mark.usefixtures("x64", "two_stream_shards")
@pytest.mark.parametrize(
    ("heads", "length", "limit", "kind", "rate", "valid_length", "per_token"),
    [
        (3, 512, 700, "any", 0.3, None, False),  # a whole tile of queries; S is no multiple of it
        (3, 130, 600, "one long", 0.3, 100, True),  # tiles of 192 queries, padded, against 512 keys
        (8, 192, 2600, "steps", 0.3, 2590, False),  # a block for every group of 8, 4, 2 and 1 heads
        pytest.param(8, 512, 2600, "steps", 0.3, None, True, marks=pytest.mark.slow),
        pytest.param(8, 1024, 1500, "any", 0.3, None, False, marks=pytest.mark.slow),
        pytest.param(12, 192, 2600, "steps", 0.3, None, False, marks=pytest.mark.slow),  # twice up to 6 heads
        pytest.param(11, 192, 600, "any", 0.3, None, False, marks=pytest.mark.slow),  # one by one
        pytest.param(3, 512, 1024, "full", 0.0, None, False, marks=pytest.mark.slow),
        pytest.param(3, 512, 1100, "zero", 0.3, None, False, marks=pytest.mark.slow),
        pytest.param(3, 1024, 600, "any", 0.3, 511, True, marks=pytest.mark.slow),  # several tiles of queries
        pytest.param(3, 640, 513, "full", 0.3, 0, False, marks=pytest.mark.slow),  # tiles of 320 queries
        pytest.param(3, 704, 90, "any", 0.0, None, False, marks=pytest.mark.slow),  # 11 chunks: tiles of 64 queries
        pytest.param(3, 1, 600, "any", 0.3, None, True, marks=pytest.mark.slow),
    ],
)
def test_tiles_for_gpus_are_the_same_as_plain(heads, length, limit, kind, rate, valid_length, per_token):
    arrays = draw(2, length, limit, heads, width=4 * heads)
    z = spans(kind, (2, length, heads) if per_token else (1, 1, heads), limit)
    found, expected = (
        run(
            path,
            arrays,
            z,
            None if valid_length is None else jnp.asarray(valid_length),
            ramp=32,
            rate=rate,
            platform="gpu",
        )
        for path in (per_head, reference)
    )
    assert max(errors(found, expected).values()) < 1e-9


# The newest segment lies before, across and behind the ring's end; blocks of 512 rows are several slices of it.
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("segment", "segments"), [(64, 3), (64, 12), (256, 5), (512, 3)])
def test_tiles_for_gpus_read_a_ring(segment, segments):
    limit = 700
    arrays = draw(2, segment, limit)
    memory = Memory.zeros(2, 2, limit, segment, 12, jnp.float64)
    for number in range(segments):
        new_LBTD = jax.random.normal(jax.random.key(number), (2, 2, segment, 12), jnp.float64)
        memory = memory.advance(new_LBTD, limit)
    read, z = memory.layer(1, limit, segment), spans("any", (1, 1, 3), limit)
    found = run(per_head, arrays | {"memory": read}, z, memory.valid_length, ramp=32, rate=0.3, platform="gpu")
    arrays["memory"] = np.asarray(read.to_array())
    expected = run(reference, arrays, z, memory.valid_length, ramp=32, rate=0.3)
    assert max(errors(found, expected).values()) < 1e-9


def test_each_platform_has_tiles_of_its_size():
    shapes = {platform: inputs.FarShape.on(platform) for platform in ("cpu", "tpu", "gpu", "cuda", "rocm")}
    assert {platform: shape.queries(512) for platform, shape in shapes.items()} == {
        "cpu": 64,
        "tpu": 128,
        "gpu": 512,
        "cuda": 512,
        "rocm": 512,
    }
    lengths = (1, 13, 64, 128, 192, 256, 320, 512, 704, 1024)
    assert [shapes["gpu"].queries(length) for length in lengths] == [1, 13, 64, 128, 192, 256, 320, 512, 64, 512]
    assert [shapes["tpu"].queries(length) for length in lengths] == [1, 13, 64, 128, 64, 128, 64, 128, 64, 128]
    assert [shapes["cpu"].queries(length) for length in lengths] == [1, 13, *[64] * 8]


def test_gpus_read_heads_together():
    shapes = {platform: inputs.FarShape.on(platform) for platform in ("cpu", "tpu", "gpu")}
    assert shapes["cpu"].groups(8) == shapes["tpu"].groups(8) == (1,)
    assert {heads: shapes["gpu"].groups(heads) for heads in (1, 2, 3, 8, 11, 12, 16)} == {
        1: (1,),
        2: (2, 1),
        3: (3, 2, 1),
        8: (8, 4, 2, 1),
        11: (1,),
        12: (6, 3, 2, 1),
        16: (8, 4, 2, 1),
    }


# Each new shape compiles both paths, about two seconds; spans, seeds and dropout bits cost nothing.
@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@settings(max_examples=25, deadline=None)
@given(
    streams=st.integers(1, 3),
    length=st.integers(1, 200),
    limit=st.integers(1, 300),
    ramp=st.integers(1, 80),
    kind=st.sampled_from(["zero", "full", "any", "one long"]),
    per_token=st.booleans(),
    rate=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
@example(streams=1, length=1, limit=1, ramp=1, kind="full", per_token=False, rate=0.0, seed=0)
@example(streams=1, length=128, limit=129, ramp=1, kind="full", per_token=True, rate=0.3, seed=0)
def test_same_as_plain_for_any_size(streams, length, limit, ramp, kind, per_token, rate, seed):
    arrays = draw(streams, length, limit, seed=seed)
    z = spans(kind, (streams, length, 3) if per_token else (1, 1, 3), limit, seed)
    found, expected = (run(path, arrays, z, None, ramp=ramp, rate=rate) for path in (per_head, reference))
    assert max(errors(found, expected).values()) < 1e-9


@pytest.mark.usefixtures("x64")
@settings(max_examples=30, deadline=None)
@given(z=st.lists(st.floats(0, 300), min_size=3, max_size=3), seed=st.integers(0, 99))
@example(z=[0.0, 0.0, 0.0], seed=0)
@example(z=[300.0, 300.0, 300.0], seed=0)
@example(z=[0.0, 300.0, 0.0], seed=0)
@example(z=[31.0, 32.0, 33.0], seed=0)
@example(z=[63.0, 64.0, 255.0], seed=0)
def test_same_as_plain_for_any_span(z, seed):
    arrays = draw(1, 128, 300, seed=seed)
    z = np.array(z)[None, None, :]
    found, expected = (run(path, arrays, z, None, ramp=32, rate=0.3) for path in (per_head, reference))
    assert max(errors(found, expected).values()) < 1e-9


# bfloat16 keeps 8 bits of each product's inputs; both paths round, at different places.
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-5), (jnp.bfloat16, 6e-2)])
def test_lower_precision_stays_near_float64(dtype, tolerance):
    arrays = draw(2, 128, 300)
    z = spans("any", (1, 1, 3), 300)
    with jax.enable_x64(True):
        expected = jax.device_get(run(reference, arrays, z, None, ramp=32, rate=0.3))
    lower = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    found = run(per_head, lower, jnp.asarray(z, jnp.float32), None, ramp=32, rate=0.3)
    assert max(errors(found, expected).values()) < tolerance


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("platform", "length", "limit", "kind", "per_token"),
    [
        ("cpu", 64, 140, "any", False),
        ("gpu", 192, 600, "any", False),  # as with adaptive spans
        pytest.param("gpu", 512, 600, "any", False, marks=pytest.mark.slow),
        pytest.param("gpu", 512, 600, "any", True, marks=pytest.mark.slow),  # as with dynamic ones
        pytest.param("gpu", 512, 600, "full", False, marks=pytest.mark.slow),  # as with fixed ones
    ],
)
def test_eight_devices_compute_what_the_reference_computes(platform, length, limit, kind, per_token):
    arrays = draw(8, length, limit)
    z = spans(kind, (8, length, 3) if per_token else (1, 1, 3), limit)
    expected = jax.device_get(run(reference, arrays, z, None, ramp=32, rate=0.3))
    mesh = sharding.make_mesh()
    assert mesh.size == 8
    by_stream, everywhere = NamedSharding(mesh, PartitionSpec(sharding.STREAMS)), NamedSharding(mesh, PartitionSpec())
    placed = {
        name: jax.device_put(array, everywhere if name in ("key", "value", "positions") else by_stream)
        for name, array in arrays.items()
    }

    def on_mesh(arrays, z):
        with sharding.on_mesh(mesh):
            return plain_run(per_head, arrays, z, None, ramp=32, rate=0.3, platform=platform)

    found = jax.jit(on_mesh)(placed, jax.device_put(z, by_stream if per_token else everywhere))
    assert max(errors(found, expected).values()) < 1e-9


def test_nothing_compiles_again_when_spans_move():
    arrays = draw(1, 64, 140, dtype=np.float32)
    traces = []

    @jax.jit
    def step(z):
        traces.append(z.shape)
        return plain_run(per_head, arrays, z, None, ramp=32, rate=0.0)

    for kind in ("zero", "any", "one long", "full"):
        jax.block_until_ready(step(spans(kind, (1, 1, 3), 140).astype(np.float32)))
    assert len(traces) == 1


@pytest.mark.usefixtures("x64")
def test_nothing_comes_from_later_tokens_nor_from_the_token_itself():
    arrays = draw(1, 70, 90)
    assert_causal(per_head, arrays, spans("full", (1, 1, 3), 90), ramp=8, queries=(0, 1, 63, 64, 69))


@pytest.mark.parametrize(
    ("platform", "heads", "length", "limit"),
    [("cpu", 3, 256, 700), ("cpu", 3, 256, 90), ("gpu", 3, 1024, 1300), ("gpu", 12, 64, 1300)],
)
def test_far_tiles_are_counted_as_they_are_computed(platform, heads, length, limit, monkeypatch):
    config = tiny_config(
        model={"width": 12, "heads": heads}, span={"limit": limit, "ramp": 32}, train={"segment": length}
    )
    arrays = draw(1, length, limit, heads, dtype=np.float32)
    computed = []
    accumulate = far_tile.accumulate

    def counted(running, tile, ramp):
        jax.debug.callback(lambda: computed.append(tile.query_BHCK.shape[1]))
        return accumulate(running, tile, ramp)

    monkeypatch.setattr(far_tile, "accumulate", counted)

    @jax.jit
    def forward(z):
        with far_tiles_of(platform):
            return per_head.attend(
                arrays["query"],
                arrays["segment"],
                LayerMemory.of(arrays["memory"]),
                arrays["key"],
                arrays["value"],
                arrays["positions"],
                z,
                ramp=32,
            )

    for z in ([0.0, 0.0, 0.0], [40.0, 31.0, 32.0], [0.0, 420.5, 0.0], [90.0, 1300.0, 95.0]):
        computed.clear()
        z_H = np.minimum(np.resize(np.array(z, np.float32), heads), limit)
        jax.block_until_ready(forward(z_H[None, None, :]))
        jax.effects_barrier()
        with far_tiles_of(platform):
            assert sum(computed) == int(flops.cost(config, jnp.asarray(z_H)[None], "per_head").far_tiles)
