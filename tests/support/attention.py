"""Inputs and results of one layer's attention, for comparing paths with each other."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from adaptive_span_jax.model.attention import inputs
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory, Memory, ring_rows

INPUTS = ("query", "segment", "key", "value", "positions", "z")


def draw(
    streams: int,
    length: int,
    limit: int,
    heads: int = 3,
    width: int = 12,
    dtype: Any = np.float64,
    seed: int = 0,
    log_sum: bool = True,
) -> dict:
    """Random inputs of one layer's attention, all but z; without `log_sum`, only outputs are differentiated."""
    rng = np.random.default_rng(seed)
    head_width = width // heads
    shapes = {
        "query": (streams, length, heads, head_width),
        "segment": (streams, length, width),
        "key": (width, heads, head_width),
        "value": (width, heads, head_width),
        "positions": (limit, head_width),
        "memory": (streams, limit, width),
        "d_output": (streams, length, heads, head_width),
    } | ({"d_log_sum": (streams, length, heads)} if log_sum else {})
    arrays = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    for name in ("key", "value"):
        arrays[name] /= np.sqrt(width).astype(dtype)
    return arrays


def draw_ring(streams: int, limit: int, segment: int, width: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    """The memory of the second of two layers, in a ring with its mirror, random in every row; see `with_end`."""
    shape = jax.eval_shape(lambda: Memory.zeros(2, streams, limit, segment, width, np.float32)).hidden_LBMD.shape
    hidden_LBMD: Any = np.random.default_rng(seed + 1).standard_normal(shape).astype(np.float32).astype(dtype)
    ring, zero = ring_rows(limit, segment), jnp.zeros((), jnp.int32)
    hidden_LBMD[:, :, ring:] = hidden_LBMD[:, :, : shape[2] - ring]
    return LayerMemory(hidden_LBMD, zero, zero + 1, limit, ring)


def with_end(arrays: dict, end: int) -> dict:
    """The inputs with the memory's ring at another position."""
    return arrays | {"memory": dataclasses.replace(arrays["memory"], end=np.int32(end))}


def plain_run(
    path: Any,
    arrays: dict,
    z: ArrayLike,
    valid_length: Any = None,
    seed: jax.Array | int = 1,
    *,
    ramp: int,
    rate: float,
    platform: str = "cpu",
) -> dict:
    """The results and all gradients of Σ d_output·output + Σ d_log_sum·log_sum, with the far tiles of a platform."""
    dropout = Dropout.create(rate, seed, 2) if rate else None
    memory = arrays["memory"] if isinstance(arrays["memory"], LayerMemory) else LayerMemory.of(arrays["memory"])

    def attend(query, segment, key, value, positions, z) -> Any:
        results = path.attend(
            query, segment, memory, key, value, positions, z, ramp=ramp, valid_length=valid_length, dropout=dropout
        )
        return results if "d_log_sum" in arrays else results[:1]

    differentiated = [*(arrays[name] for name in ("query", "segment", "key", "value", "positions")), z]
    with far_tiles_of(platform):
        results, pull = jax.vjp(attend, *differentiated)
        d_results = (
            arrays[f"d_{name}"].astype(found.dtype) for name, found in zip(("output", "log_sum"), results, strict=False)
        )
        grads = pull(tuple(d_results))
    found = {"output": results[0]} | dict(zip(INPUTS, grads, strict=True))
    if "d_log_sum" in arrays:
        # That of a query which sees nothing is so low that all others would count as zero beside it.
        found["log_sum"] = jnp.where(results[1] < -1e20, 0, results[1])
    return found


def far_tiles_of(platform: str) -> Any:
    """While tracing: CPUs take the far tiles of another platform."""
    return mock.patch.dict(inputs._FAR_ON, cpu=inputs.FarShape.on(platform))


run: Any = jax.jit(plain_run, static_argnames=("path", "ramp", "rate", "platform"))


def errors(found: dict, expected: dict) -> dict[str, float]:
    """The largest error of each array, relative to its largest number."""
    result = {}
    for name, right in expected.items():
        left, right = np.asarray(found[name], np.float64), np.asarray(right, np.float64)
        assert left.shape == right.shape, name
        assert np.isfinite(left).all(), name
        largest = np.abs(right).max()
        result[name] = float(np.abs(left - right).max() / (largest if largest else 1.0))
    return result


def spans(kind: str, shape: tuple[int, ...], limit: int, seed: int = 0) -> np.ndarray:
    """z in positions."""
    rng = np.random.default_rng(seed)
    z = {
        "zero": np.zeros(shape),
        "full": np.full(shape, 1.0),
        "any": rng.uniform(size=shape),
        "one long": np.zeros(shape),
        "steps": np.zeros(shape),
    }
    if kind == "one long":
        z[kind][..., -1] = 0.93
    if kind == "steps":
        z[kind][...] = rng.permutation(np.linspace(0, 1, shape[-1]))
    return z[kind] * limit


def assert_causal(path: Any, arrays: dict, z: np.ndarray, ramp: int, queries: tuple[int, ...]) -> None:
    """Asserts that queries depend on all tokens of the segment before them, and on no others; spans cover them all.

    Backward passes are written by hand, so a gradient says nothing of the forward pass: both are asked.
    """

    @jax.jit
    def output_and_gradient(segment: jax.Array, d_results: dict) -> tuple[jax.Array, jax.Array]:
        changed = arrays | {"segment": segment} | d_results
        found = plain_run(path, changed, z, ramp=ramp, rate=0.0)
        return found["output"], found["segment"]

    length = arrays["segment"].shape[1]
    all_queries = {name: array for name, array in arrays.items() if name.startswith("d_")}
    output, _ = output_and_gradient(arrays["segment"], all_queries)
    for query in queries:
        d_results = {name: np.zeros_like(array) for name, array in all_queries.items()}
        for name, array in all_queries.items():
            d_results[name][:, query] = array[:, query]
        segment = arrays["segment"].copy()
        segment[:, query:] += 1
        other, _ = output_and_gradient(segment, d_results)
        np.testing.assert_array_equal(other[:, : query + 1], output[:, : query + 1])
        assert query == length - 1 or np.any(other[:, query + 1] != output[:, query + 1])
        _, d_segment = output_and_gradient(arrays["segment"], d_results)
        reached = np.abs(np.asarray(d_segment)).max(axis=(0, 2))
        assert np.all(reached[query:] == 0)
        assert np.all(reached[:query] > 0)
