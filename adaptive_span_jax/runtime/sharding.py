"""Which array lives where. The only file that decides sharding: everything else is written for whole arrays.

The mesh has two axes, `data` and `fsdp`. Streams are independent of each other, so batches and memory are split by
stream over both. Parameters and optimizer state are replicated over `data` and sharded over `fsdp` by one rule:

    a matrix is split along its longest axis that fsdp divides (the first of equals); vectors stay whole;
    the axis of stacked layers is never split.

A layer's parameters are gathered where they are used (`all_gather`); the compiler sums the gradients. Only the
attention's loops, which the compiler would interrupt with a sum over devices at every turn, are told explicitly to work
on each device's own streams (`per_device`).
"""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.terminal import counted

Tree = TypeVar("Tree")

DATA, FSDP = "data", "fsdp"
# Streams are split over all devices.
STREAMS = (DATA, FSDP)

# Instead of the number of an array's axis of streams: it is the same on every device, or to be summed over them.
REPLICATED, PSUM = "replicated", "psum"


def make_mesh(devices: list[jax.Device] | None = None, fsdp: int = 1) -> Mesh:
    """All devices: data × fsdp of them, neighbors along fsdp."""
    devices = devices or jax.devices()
    if len(devices) % fsdp:
        raise UserError(f"config.mesh.fsdp is {fsdp}, which does not divide the {counted(len(devices), 'device')}")
    shape = (len(devices) // fsdp, fsdp)
    return jax.make_mesh(shape, (DATA, FSDP), axis_types=(AxisType.Auto,) * 2, devices=devices)


def check_streams(mesh: Mesh, streams: int, groups: int) -> None:
    """Rejects a number of training streams that the devices cannot share evenly."""
    if streams % (mesh.size * groups):
        split = f" in {groups} groups each (config.train.grad_accum_steps)" if groups > 1 else ""
        raise UserError(
            f"config.train.batch_size is {streams}, which {counted(mesh.size, 'device')} cannot share evenly{split}; "
            f"make it a multiple of {mesh.size * groups}"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def by_stream(mesh: Mesh, streams: int, axis: int = 0) -> NamedSharding:
    """The axis of streams is split over the devices; too few to go round evenly are held by every device."""
    if streams % mesh.size:
        return replicated(mesh)
    return NamedSharding(mesh, _spec(axis))


def param_sharding(mesh: Mesh, shape: tuple[int, ...], stacked: bool) -> NamedSharding:
    """Where a parameter or its optimizer state lies; `stacked`: its first axis counts layers."""
    layers, own = shape[: int(stacked)], shape[int(stacked) :]
    return NamedSharding(mesh, PartitionSpec(*[None] * len(layers), *_shared_axes(mesh.shape[FSDP], own)))


def all_gather(params: Tree) -> Tree:
    """The parameters, each gathered on every device; their gradients are scattered again at once.

    For parameters without the axis of layers, while tracing `on_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[FSDP] == 1:
        return params
    return jax.tree.map(lambda leaf: _gather(PartitionSpec(*_shared_axes(mesh.shape[FSDP], leaf.shape)), leaf), params)


def place_segment(mesh: Mesh, segment: Tree) -> Tree:
    """Puts a segment's arrays on the devices, split by stream. Each host has the whole and places its own part."""
    return jax.tree.map(lambda array: _place(array, by_stream(mesh, array.shape[0])), segment)


def group(array: jax.Array, axis: int, groups: int, number: jax.Array | int) -> jax.Array:
    """One of several equal groups of streams, `axis` counting streams; every device gives a share of its own."""
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    grouped = array.reshape(*before, _devices(), groups, -1, *after)
    part = jax.lax.dynamic_index_in_dim(grouped, number, axis + 1, keepdims=False)
    return _split_by_stream(part.reshape(*before, -1, *after), axis)


def join_groups(parts: jax.Array, axis: int) -> jax.Array:
    """All streams again, from their groups stacked along a new first axis; `axis` counts streams in each of them."""
    groups, *shape = parts.shape
    parts = parts.reshape(groups, *shape[:axis], _devices(), -1, *shape[axis + 1 :])
    return _split_by_stream(jnp.moveaxis(parts, 0, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :]), axis)


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


def streams_per_device(streams: int) -> int:
    """How many of a batch's streams `per_device` gives to each device: all of them if they cannot be split evenly."""
    return streams if streams % _devices() else streams // _devices()


def per_device(function: Callable, streams: int, axes: Any, out_axes: Any) -> Callable:
    """`function`, called on every device with that device's streams.

    `axes` has the structure of the arguments, `out_axes` that of the result: for each array the number of its axis of
    streams, or REPLICATED or PSUM.
    """
    if _devices() == 1 or streams % _devices():
        return function

    def summed(*arguments: Any) -> Any:
        found = function(*arguments)
        return jax.tree.map(lambda axis, x: jax.lax.psum(x, STREAMS) if axis == PSUM else x, out_axes, found)

    return jax.shard_map(
        summed, in_specs=jax.tree.map(_spec, axes), out_specs=jax.tree.map(_spec, out_axes), check_vma=False
    )


def _spec(axis: int | str) -> PartitionSpec:
    return PartitionSpec() if isinstance(axis, str) else PartitionSpec(*[None] * axis, STREAMS)


def _devices() -> int:
    """How many devices the program being traced is for."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.size


def _split_by_stream(array: jax.Array, axis: int) -> jax.Array:
    return array if _devices() == 1 else jax.lax.with_sharding_constraint(array, _spec(axis))


def _shared_axes(fsdp: int, shape: tuple[int, ...]) -> list[str | None]:
    """Which axis of a parameter is sharded: the longest that `fsdp` divides."""
    fitting = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if fsdp == 1 or len(shape) < 2 or not fitting:
        return []
    longest = max(fitting, key=lambda axis: shape[axis])
    return [FSDP if axis == longest else None for axis in range(len(shape))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(spec: PartitionSpec, parameter: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(parameter, PartitionSpec())


# Without this the compiler might keep every device's gradient whole until the update.
_gather.defvjp(
    lambda spec, parameter: (_gather(spec, parameter), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)


def _place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    parts = sharding.addressable_devices_indices_map(array.shape)
    placed = jax.device_put([array[index] for index in parts.values()], list(parts))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, placed)
