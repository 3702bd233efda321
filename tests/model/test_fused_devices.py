"""The fused kernels on two cores and on eight devices, compiled once, and compiled for TPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adaptive_span_jax.model.attention import fused
from adaptive_span_jax.model.memory import LayerMemory, Memory, ring_rows
from adaptive_span_jax.planning.topology import Machine
from adaptive_span_jax.runtime import sharding
from tests.conftest import needs_libtpu
from tests.support.attention import errors, plain_run, run, spans, with_end
from tests.support.fused import RAMP, Case, inputs, simulate

slow = pytest.mark.slow


@slow
def test_nothing_compiles_again_when_spans_move():
    case = Case(length=128, limit=300, heads=2, head_width=64)
    traces = []

    @jax.jit
    def step(arrays, z, seed):
        traces.append(z.shape)
        return plain_run(fused, arrays, z, None, seed, ramp=RAMP, rate=case.rate)

    for number, kind in enumerate(("zero", "any", "one long", "full")):
        arrays = with_end(inputs(case), case.ends[number % 3])
        jax.block_until_ready(step(arrays, spans(kind, (1, 1, 2), 300).astype(np.float32), number))
    assert len(traces) == 1


@slow
@pytest.mark.parametrize("per_token", [False, True])
def test_two_cores_compute_what_one_computes(per_token, monkeypatch, capsys):
    case = Case(length=128, limit=640, heads=2, head_width=64, streams=4, per_token=per_token)
    z = spans("any", (4, 128, 2) if per_token else (1, 1, 2), 640).astype(np.float32)
    arrays = with_end(inputs(case), 256)

    def found(cores: int) -> dict:
        monkeypatch.setattr(sharding, "cores_per_device", lambda: cores)
        traced = jax.jit(lambda arrays: plain_run(fused, arrays, z, ramp=RAMP, rate=case.rate))  # not from a cache
        assert f"grid=({cores}, {4 // cores}, 2)" in str(traced.trace(arrays).jaxpr)
        return jax.device_get(traced(arrays))

    one = found(1)
    assert max(errors(found(2), one).values()) < 1e-6
    # And at the same time.
    simulated = simulate(monkeypatch, arrays, z, case.rate, num_cores_or_threads=2)
    assert max(errors(simulated, one).values()) < 1e-6
    assert "RACE" not in capsys.readouterr().out


@slow
def test_eight_devices_compute_what_one_computes():
    case = Case(length=128, limit=300, heads=2, head_width=64, streams=8)
    arrays, z = with_end(inputs(case), 128), np.array([[[300, 20]]], np.float32)
    expected = jax.device_get(run(fused, arrays, z, None, 1, ramp=RAMP, rate=case.rate))
    mesh = sharding.make_mesh()
    assert mesh.size == 8
    axes = dict.fromkeys(arrays, 0) | dict.fromkeys(("key", "value", "positions"), None)

    def placed(array: Any, axis: int | None) -> jax.Array:
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, sharding.STREAMS)
        return jax.device_put(array, NamedSharding(mesh, spec))

    memory: LayerMemory = arrays["memory"]
    on_devices = {name: placed(array, axes[name]) for name, array in arrays.items() if name != "memory"}
    on_devices["memory"] = jax.tree.map(lambda array: placed(array, 1 if np.ndim(array) else None), memory)

    def on_mesh(arrays, z):
        with sharding.on_mesh(mesh):
            return plain_run(fused, arrays, z, ramp=RAMP, rate=case.rate)

    found = jax.jit(on_mesh)(on_devices, placed(z, None))
    assert max(errors(found, expected).values()) < 1e-5


def compile_for(topology: str, case: Case, dtype: Any) -> None:
    """Compiles output and gradients, with two streams for each chip."""
    mesh = sharding.make_mesh(Machine.parse(topology).devices())
    streams = 2 * mesh.size

    def abstract(*shape: int, stream_axis: int | None = 0, dtype: Any = dtype) -> Any:
        spec = PartitionSpec() if stream_axis is None else PartitionSpec(*[None] * stream_axis, sharding.STREAMS)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    number = abstract(stream_axis=None, dtype=np.int32)
    rows = jax.eval_shape(lambda: Memory.zeros(1, 1, case.limit, case.length, 1, dtype)).hidden_LBMD.shape[2]
    hidden_LBMD = abstract(2, streams, rows, case.width, stream_axis=1, dtype=case.memory_dtype)
    weights = abstract(case.width, case.heads, case.head_width, stream_axis=None)
    by_query = abstract(streams, case.length, case.heads, case.head_width)
    arrays = {
        "query": by_query,
        "segment": abstract(streams, case.length, case.width),
        "memory": LayerMemory(hidden_LBMD, number, number, case.limit, ring_rows(case.limit, case.length)),
        "key": weights,
        "value": weights,
        "positions": abstract(case.limit, case.head_width, stream_axis=None, dtype=np.float32),
        "d_output": by_query,
    }
    if case.log_sum:
        arrays["d_log_sum"] = abstract(streams, case.length, case.heads, dtype=np.float32)
    z = abstract(1, 1, case.heads, stream_axis=None, dtype=np.float32)
    if case.per_token:
        z = abstract(streams, case.length, case.heads, dtype=np.float32)

    def on_mesh(arrays, z, valid_length, seed):
        with sharding.on_mesh(mesh):
            return plain_run(fused, arrays, z, valid_length, seed, ramp=RAMP, rate=case.rate)

    lowered = jax.jit(on_mesh).lower(arrays, z, number if case.masks_empty else None, number)
    program = lowered.compile().as_text() or ""
    for name in ("span_forward", "span_backward"):
        assert name in program


@slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2", "v5p:2x2x1"])
@pytest.mark.parametrize("head_width", [32, 64, 96])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_compiles_for_tpus(topology, head_width, dtype):
    compile_for(topology, Case(256, 900, 4, head_width, memory_dtype=dtype), dtype)


@slow
@needs_libtpu
def test_only_v5p_has_two_cores():
    for topology, cores in {"v5e:2x2": 1, "v6e:2x2": 1, "v5p:2x2x1": 2}.items():
        with sharding.on_mesh(sharding.make_mesh(Machine.parse(topology).devices())):
            assert (sharding.platform(), sharding.cores_per_device()) == ("tpu", cores)


@slow
@needs_libtpu
@pytest.mark.parametrize(
    "case",
    [
        Case(512, 8192, 8, 64),
        Case(512, 8192, 8, 64, log_sum=True),
        Case(512, 8192, 8, 96),
        Case(1024, 32_768, 8, 64),
        Case(256, 900, 2, 128),
        Case(128, 100, 2, 64, rate=0.0),
        Case(256, 900, 4, 64, masks_empty=True),
        Case(256, 900, 4, 64, per_token=True),
        Case(384, 900, 4, 96, per_token=True, masks_empty=True, log_sum=True),
    ],
)
def test_every_kind_compiles_for_tpus(case):
    compile_for("v5e:2x2", case._replace(memory_dtype=np.float32), jnp.bfloat16)
