"""Checks whether a run fits into memory, estimated from shapes before anything is allocated.

The estimates are lower bounds: they count arrays that are certainly alive at the same time, but not the compiler's
temporaries, which are as large again or more. What is rejected cannot fit; what is accepted may still be too large.
`--mode=plan` is more precise, but compiles.
"""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from adaptive_span_jax.config import Config
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import sharding
from adaptive_span_jax.runtime.terminal import size

# The memory limit of a container, in both versions of Linux's control groups.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def check(mesh: Mesh, what: str, parts: dict[str, int]) -> None:
    """Raises if `parts`, a description → bytes per device, exceed the memory of this process's devices."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        here, available, where = len(devices), _machine_bytes(), "this machine has"
    else:
        stats = devices[0].memory_stats() or {}
        here, available, where = 1, stats.get("bytes_limit"), f"a {devices[0].device_kind} has"
    needed = here * sum(parts.values())
    if available is None or needed <= available:
        return
    each = [f"{size(here * count)} {name}" for name, count in sorted(parts.items(), key=lambda part: -part[1])]
    raise UserError(
        f"{what} needs at least {size(needed)} of memory, {where} {size(available)}:\n  "
        + "\n  ".join(each)
        + "\nReduce the fields of the largest part"
    )


def _machine_bytes() -> int | None:
    """The physical memory, or the container's limit if that is smaller; None if unknown."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in _CONTAINER_LIMITS:
        if path.is_file() and (limit := path.read_text().strip()).isdecimal():  # or "max"
            limits.append(int(limit))
    return min(limits)


def activation_bytes(
    config: Config, mesh: Mesh, streams: int, positions: int, vocabulary: int, kept_layers: int = 1, groups: int = 1
) -> int:
    """Bytes per device: the input of every layer, and inner states of kept layers and logits of one group of streams.

    Inner states are those of the feed-forward network or, with persistent vectors, the averages over context and these.
    """
    sizes = config.model
    by_stream = sharding.by_stream(mesh, streams)
    (here,) = by_stream.shard_shape((streams,))
    inner = 2 * sizes.width if sizes.persistent else sizes.feedforward
    rows = here * sizes.layers * sizes.width + here // groups * (kept_layers * inner + vocabulary)
    return positions * rows * jnp.dtype(sizes.compute_dtype).itemsize


def named_fields(config: Config, *names: str) -> str:
    """The fields and their values, as written on the command line."""
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in names}
    return ", ".join(f"config.{name} = {value}" for name, value in values.items())


def model_fields(config: Config) -> str:
    """The fields that the size of the layers' parameters depends on, with their values."""
    inner = "model.persistent" if config.model.persistent else "model.feedforward"
    return named_fields(config, "model.layers", "model.width", inner)


def placed(shape: jax.ShapeDtypeStruct, at: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=at)
