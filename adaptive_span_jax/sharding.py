"""Which array lives where. The only file that knows devices: everything else is written for whole arrays.

Streams are independent of each other, so batches and memory are split by stream over the mesh and everything else is
held by every device; the compiler adds up the gradients. Only the attention's loops, which the compiler would
interrupt with a sum over devices at every turn, are told explicitly to work on each device's own streams
(`per_device`).
"""

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.memory import Memory

Tree = TypeVar("Tree")

DATA_AXIS = "data"

# Instead of the number of an array's axis of streams: it is the same on every device, or to be summed over them.
SAME, SUM = "same", "sum"


def use_cpu_cores(streams: int) -> None:
    """Where there is no accelerator, makes one device of every core, as far as the streams go round evenly.

    XLA runs much of a program, batched small products above all, on one core per device. Call it before anything else.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", max(n for n in range(1, cores + 1) if streams % n == 0))


def make_mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """All devices along one axis, `data`."""
    devices = devices or jax.devices()
    return jax.make_mesh((len(devices),), (DATA_AXIS,), axis_types=(AxisType.Auto,), devices=devices)


def check_streams(mesh: Mesh, streams: int, field: str) -> None:
    """Refuses a number of streams that cannot be shared out evenly."""
    if streams % mesh.size:
        raise UserError(
            f"{field} is {streams}, which {mesh.size} devices cannot share evenly; make it a multiple of {mesh.size}"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_stream(mesh: Mesh, streams: int, axis: int = 0) -> NamedSharding:
    """The axis of streams is split over the devices; too few to go round evenly are held by every device."""
    if streams % mesh.size:
        return replicated(mesh)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA_AXIS))


def memory_sharding(mesh: Mesh, streams: int) -> Any:
    """The shardings of a memory's arrays, in a `Memory`."""
    at: Any = Memory
    return at(by_stream(mesh, streams, axis=1), replicated(mesh), replicated(mesh))


def place_segment(mesh: Mesh, segment: Tree) -> Tree:
    """Puts a segment's arrays on the devices, split by stream."""
    return jax.device_put(segment, jax.tree.map(lambda leaf: _segment_sharding(mesh, leaf), segment))


def total_bytes(tree: Any) -> int:
    """What the tree's arrays take when each is stored once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """The number of bytes that the tree's arrays, or abstract arrays, take on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def platform() -> str:
    """What kind of device a program is traced for: that of the mesh, which need not be this machine's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def on_mesh(mesh: Mesh) -> AbstractContextManager:
    """While tracing within it, `per_device` knows the devices."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def per_device(function: Callable, streams: int, axes: Any, out_axes: Any) -> Callable:
    """`function`, called on every device with that device's streams.

    `axes` has the structure of the arguments, `out_axes` that of the result: for each array the number of its axis of
    streams, or SAME or SUM.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or streams % mesh.size:
        return function

    def summed(*arguments: Any) -> Any:
        found = function(*arguments)
        return jax.tree.map(lambda axis, x: jax.lax.psum(x, DATA_AXIS) if axis == SUM else x, out_axes, found)

    return jax.shard_map(
        summed, in_specs=jax.tree.map(_spec, axes), out_specs=jax.tree.map(_spec, out_axes), check_vma=False
    )


def _spec(axis: int | str) -> PartitionSpec:
    return PartitionSpec() if isinstance(axis, str) else PartitionSpec(*[None] * axis, DATA_AXIS)


def _segment_sharding(mesh: Mesh, leaf: Any) -> NamedSharding:
    return by_stream(mesh, leaf.shape[0]) if leaf.ndim else replicated(mesh)
