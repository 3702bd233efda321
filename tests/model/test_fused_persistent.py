"""The kernels for persistent vectors, interpreted: equal to XLA in values and all gradients; compiled for TPUs."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from adaptive_span_jax.model.attention import persistent
from adaptive_span_jax.model.attention.fused import persistent as fused_persistent
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.layers import SpanAttention
from adaptive_span_jax.model.memory import LayerMemory
from adaptive_span_jax.model.span import AdaptiveSpan
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import sharding
from tests.conftest import needs_libtpu
from tests.support.attention import draw_ring, errors

NAMES = ("context", "log_sum", "query", "key", "value")

slow = pytest.mark.slow


class Case(NamedTuple):
    """What a program is compiled for."""

    length: int
    heads: int
    head_width: int
    vectors: int
    rate: float = 0.3
    streams: int = 2

    def shapes(self) -> dict[str, tuple[int, ...]]:
        by_query = (self.streams, self.length, self.heads, self.head_width)
        key = (self.heads, self.head_width, self.vectors)
        return {
            "context": by_query,
            "log_sum": by_query[:3],
            "query": by_query,
            "key": key,
            "value": (self.heads, self.vectors, self.head_width),
            "d_output": by_query,
        }


def draw(case: Case, seed: int = 0) -> dict[str, Any]:
    """Inputs where context and persistent vectors count about the same, but for two queries: one has no context."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in case.shapes().items()}
    arrays["key"] *= 2 * case.head_width**-0.5
    arrays["value"] *= case.vectors**-0.5
    arrays["log_sum"] += np.log(case.vectors) + 2
    arrays["log_sum"][:, 3], arrays["context"][:, 3] = -3e29, 0
    arrays["log_sum"][:, 5] = 100
    return arrays


def plain_run(path: Any, arrays: dict, seed: jax.Array | int = 1, *, rate: float) -> dict:
    """The output and all gradients of Σ d_output·output."""
    dropout = Dropout.create(rate, seed, 2) if rate else None

    def join(context: jax.Array, log_sum: jax.Array, *others: jax.Array) -> jax.Array:
        return path.join((context, log_sum), *others, dropout)

    output, pull = jax.vjp(join, *(arrays[name] for name in NAMES))
    grads = pull(arrays["d_output"].astype(output.dtype))
    return {"output": output} | {f"d_{name}": grad for name, grad in zip(NAMES, grads, strict=True)}


run: Any = jax.jit(plain_run, static_argnames=("path", "rate"))


def exact(arrays: dict, seed: int, rate: float) -> dict:
    """What XLA computes of the same numbers in float64."""
    with jax.enable_x64(True):
        wide = {name: array.astype(np.float64) for name, array in arrays.items()}
        return jax.device_get(run(persistent, wide, seed, rate=rate))


def check(case: Case, seed: int = 1) -> None:
    arrays = draw(case, seed)
    found = jax.device_get(run(fused_persistent, arrays, seed, rate=case.rate))
    for name, error in errors(found, exact(arrays, seed, case.rate)).items():
        assert error < 1e-5, (name, error)


@pytest.mark.parametrize("seed", [1, 2])
def test_same_as_xla(seed):
    check(Case(length=128, heads=4, head_width=64, vectors=256), seed)


@slow
@pytest.mark.parametrize(
    "case",
    [
        Case(128, 2, 64, 128),
        Case(256, 4, 64, 384, rate=0.0),
        Case(512, 2, 64, 256, streams=3),
        Case(256, 8, 32, 256),
        Case(128, 2, 128, 640, streams=1),
        Case(384, 1, 128, 128, rate=0.0, streams=4),
    ],
)
def test_every_kind_is_the_same_as_xla(case):
    for seed in (1, 2):
        check(case, seed)


def test_dropout_takes_the_bits_of_the_reference():
    case = Case(length=128, heads=2, head_width=128, vectors=128, streams=3)
    arrays = draw(case)
    arrays["log_sum"][:], arrays["context"][:], arrays["key"][:] = -3e29, 0, 0
    arrays["value"][:] = np.eye(128)  # the output's lanes are then the weights
    output = run(fused_persistent, arrays, 7, rate=case.rate)["output"]
    stream, query, head, vector = jnp.ogrid[tuple(slice(size) for size in output.shape)]
    scale = Dropout.create(case.rate, 7, 2).at(stream).at(head).at(query).at(vector).scale()
    np.testing.assert_allclose(output, scale * 128**0.5 / 128, rtol=1e-5)
    assert 0.25 < np.mean(scale == 0) < 0.35


# Both paths round about as often; the mean over several draws tells them apart.
@slow
@pytest.mark.parametrize("head_width", [32, 64])
def test_bfloat16_is_as_exact_as_xla(head_width):
    case = Case(length=256, heads=4, head_width=head_width, vectors=512)
    squares: dict = {fused_persistent: [], persistent: []}
    for seed in range(8):
        arrays = draw(case, seed)
        arrays = {name: array if name == "log_sum" else array.astype(jnp.bfloat16) for name, array in arrays.items()}
        expected = exact(arrays, seed, case.rate)
        for path, found_squares in squares.items():
            found = jax.device_get(run(path, arrays, seed, rate=case.rate))
            found_squares.append(
                {name: np.mean((found[name] - right) ** 2) / np.mean(right**2) for name, right in expected.items()}
            )
    for name in squares[persistent][0]:
        kernels, xla = (np.sqrt(np.mean([each[name] for each in squares[path]])) for path in squares)
        assert kernels < 1.02 * xla, (name, kernels, xla)
        assert kernels < 5e-3, name


@slow
def test_a_layer_with_persistent_vectors_is_the_same_as_the_reference():
    streams, length, width, limit = 2, 128, 128, 300
    rng = np.random.default_rng(0)
    hidden, d_output = (jnp.asarray(rng.standard_normal((streams, length, width)), jnp.float32) for _ in range(2))
    positions = jnp.asarray(rng.standard_normal((limit, width // 2)), jnp.float32)
    memory: LayerMemory = draw_ring(streams, limit, length, width)

    def gradients(path: str) -> dict:
        span = AdaptiveSpan(2, limit)
        span.span_fraction_H[...] = jnp.array([0.0, 0.4])
        attention = SpanAttention(width, 2, span, path=path, persistent=256, rngs=nnx.Rngs(0))

        @nnx.jit
        def found(attention: SpanAttention, hidden: jax.Array) -> Any:
            def loss(attention: SpanAttention, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
                dropout = Dropout.create(0.3, 1, 2)
                output, _ = attention.attend(hidden, memory, positions, dropout=dropout)
                return (output * d_output).sum(), output

            return nnx.grad(loss, argnums=(0, 1), has_aux=True)(attention, hidden)

        (d_attention, d_hidden), output = found(attention, hidden)
        leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(d_attention))
        named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
        return jax.device_get({"output": output, "d_hidden": d_hidden} | named)

    expected = gradients("plain")
    assert sum("persistent" in name for name in expected) == 2
    assert max(errors(gradients("fused"), expected).values()) < 1e-4


# ------------------------------------------------------------------------------------------------ devices and programs


# The simulation of a TPU reports what is read before it is written, and races between copies and programs.
@slow
@pytest.mark.parametrize("cores", [1, 2])
def test_nothing_is_read_before_it_is_written(cores, monkeypatch, capsys):
    case = Case(length=128, heads=4, head_width=64, vectors=256, streams=4)
    arrays = draw(case)
    expected = jax.device_get(run(fused_persistent, arrays, rate=case.rate))
    monkeypatch.setattr(sharding, "cores_per_device", lambda: cores)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=cores)
    interpreted = pl.pallas_call
    monkeypatch.setattr(
        pl, "pallas_call", lambda *args, interpret, **kwargs: interpreted(*args, interpret=params, **kwargs)
    )
    traced = jax.jit(lambda arrays: plain_run(fused_persistent, arrays, rate=case.rate))  # not from a cache
    assert f"grid=({cores}, 2, {4 // cores})" in str(traced.trace(arrays).jaxpr)
    assert max(errors(jax.device_get(traced(arrays)), expected).values()) < 1e-6
    assert "RACE" not in capsys.readouterr().out


def placed(mesh: jax.sharding.Mesh, name: str) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec() if name in ("key", "value") else PartitionSpec(sharding.STREAMS))


def on_mesh(mesh: jax.sharding.Mesh, rate: float) -> Any:
    def found(arrays: dict) -> dict:
        with sharding.on_mesh(mesh):
            return plain_run(fused_persistent, arrays, rate=rate)

    return jax.jit(found)


@slow
def test_eight_devices_compute_what_one_computes():
    case = Case(length=128, heads=2, head_width=64, vectors=128, streams=16)
    arrays = draw(case)
    expected = jax.device_get(run(fused_persistent, arrays, rate=case.rate))
    mesh = sharding.make_mesh()
    assert mesh.size == 8
    on_devices = {name: jax.device_put(array, placed(mesh, name)) for name, array in arrays.items()}
    assert max(errors(on_mesh(mesh, case.rate)(on_devices), expected).values()) < 1e-5


# ---------------------------------------------------------------------------------------------------- compiled for TPUs


@functools.cache
def compile_for(topology: str, case: Case, dtype: str) -> None:
    mesh = sharding.make_mesh(Machine.parse(topology).devices())
    shapes = case._replace(streams=case.streams * mesh.size).shapes()
    arrays = {
        name: jax.ShapeDtypeStruct(shape, np.float32 if name == "log_sum" else dtype, sharding=placed(mesh, name))
        for name, shape in shapes.items()
    }
    program = on_mesh(mesh, case.rate).lower(arrays).compile().as_text() or ""
    for name in ("persistent_forward", "persistent_backward"):
        assert name in program


@slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("head_width", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_compiles_for_tpus(topology, head_width, dtype):
    compile_for(topology, Case(length=256, heads=4, head_width=head_width, vectors=384), dtype)


# The last three take almost all of the VMEM that `unsupported` allows.
@slow
@needs_libtpu
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(512, 8, 64, 1024, streams=8), "bfloat16"),
        (Case(512, 8, 64, 2048, streams=8), "bfloat16"),
        (Case(512, 8, 64, 2048, rate=0.0), "float32"),
        (Case(512, 8, 64, 12_800), "bfloat16"),
        (Case(1024, 8, 64, 6400), "float32"),
        (Case(1024, 16, 32, 5888), "float32"),
    ],
)
def test_every_kind_compiles_for_tpus(case, dtype):
    assert fused_persistent.unsupported(case.length, case.head_width, case.vectors, dtype) is None
    compile_for("v5e:2x2", case, dtype)
