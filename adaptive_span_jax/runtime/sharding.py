"""How arrays are sharded. Only this file decides it: all other code is written for whole arrays.

The mesh has two axes, `data` and `fsdp`. Streams are independent of each other, so batches and memory are split by
stream over both. Parameters and optimizer state are replicated over `data` and sharded over `fsdp` by one rule:

    a matrix is split along its longest axis that fsdp divides (the first one if several are equally long);
    vectors are replicated; the axis of stacked layers is never split.

A layer's parameters are all-gathered where they are used (`all_gather`); the compiler sums the gradients. Only the
attention's loops use `shard_map` (`per_device`): otherwise the compiler would sum over devices in every iteration.
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

# In place of an array's stream axis: the array is the same on every device, or must be summed over devices.
REPLICATED, PSUM = "replicated", "psum"


def make_mesh(devices: list[jax.Device] | None = None, fsdp: int = 1) -> Mesh:
    """The mesh of all devices, data × fsdp, with neighboring devices along fsdp."""
    devices = devices or jax.devices()
    if len(devices) % fsdp:
        raise UserError(f"config.mesh.fsdp is {fsdp}, which does not divide the {counted(len(devices), 'device')}")
    shape = (len(devices) // fsdp, fsdp)
    return jax.make_mesh(shape, (DATA, FSDP), axis_types=(AxisType.Auto,) * 2, devices=devices)


def check_streams(mesh: Mesh, streams: int, groups: int) -> None:
    """Raises if the training streams cannot be split evenly over devices and groups."""
    if streams % (mesh.size * groups):
        split = f" × {groups} groups (config.train.grad_accum_steps)" if groups > 1 else ""
        raise UserError(
            f"config.train.batch_size is {streams}, which cannot be split evenly over {counted(mesh.size, 'device')}"
            f"{split}; make it a multiple of {mesh.size * groups}"
        )


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds completely."""
    return NamedSharding(mesh, PartitionSpec())


def by_stream(mesh: Mesh, streams: int, axis: int = 0) -> NamedSharding:
    """The sharding that splits the stream axis over the devices; replicated if it cannot be split evenly."""
    if streams % mesh.size:
        return replicated(mesh)
    return NamedSharding(mesh, _spec(axis))


def param_sharding(mesh: Mesh, shape: tuple[int, ...], stacked: bool) -> NamedSharding:
    """The sharding of a parameter or its optimizer state; `stacked`: its first axis is that of layers."""
    layers, own = shape[: int(stacked)], shape[int(stacked) :]
    return NamedSharding(mesh, PartitionSpec(*[None] * len(layers), *_shared_axes(mesh.shape[FSDP], own)))


def all_gather(params: Tree) -> Tree:
    """The parameters, all-gathered; their gradients are resharded immediately.

    For parameters without the axis of layers, while tracing in `on_mesh`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.shape[FSDP] == 1:
        return params
    return jax.tree.map(lambda leaf: _gather(PartitionSpec(*_shared_axes(mesh.shape[FSDP], leaf.shape)), leaf), params)


def place_segment(mesh: Mesh, segment: Tree) -> Tree:
    """A segment's arrays on the devices, split by stream. Each host has the whole segment and places its own part."""
    return jax.tree.map(lambda array: _place(array, by_stream(mesh, array.shape[0])), segment)


def group(array: jax.Array, axis: int, groups: int, number: jax.Array | int) -> jax.Array:
    """One of several equal groups of streams, taken evenly from every device; `axis` is the stream axis."""
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    grouped = array.reshape(*before, _devices(), groups, -1, *after)
    part = jax.lax.dynamic_index_in_dim(grouped, number, axis + 1, keepdims=False)
    return _split_by_stream(part.reshape(*before, -1, *after), axis)


def join_groups(parts: jax.Array, axis: int) -> jax.Array:
    """The inverse of `group`: all streams, from groups stacked along a new first axis; `axis` is the stream axis."""
    groups, *shape = parts.shape
    parts = parts.reshape(groups, *shape[:axis], _devices(), -1, *shape[axis + 1 :])
    return _split_by_stream(jnp.moveaxis(parts, 0, axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :]), axis)


def total_bytes(tree: Any) -> int:
    """The bytes of the tree's arrays, each counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """The bytes of the tree's arrays, or abstract arrays, on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def platform() -> str:
    """The platform that is traced for: that of the mesh, which may differ from this machine's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def platform_of(mesh: Mesh) -> str:
    """What kind of devices a mesh has."""
    return mesh.devices.flat[0].platform


def cores_per_device() -> int:
    """How many cores a device has that a program is traced for: two on TPU v5p, where a kernel must use both itself."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return 1 if device is None else device.num_cores or 1


def on_mesh(mesh: Mesh) -> AbstractContextManager:
    """The context for tracing in which `per_device` and `all_gather` know the mesh."""
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def streams_per_device(streams: int) -> int:
    """The number of streams that `per_device` passes to each device: all of them if they cannot be split evenly."""
    return streams if streams % _devices() else streams // _devices()


def per_device(function: Callable, streams: int, axes: Any, out_axes: Any) -> Callable:
    """`function`, called on every device with that device's streams.

    `axes` has the structure of the arguments, `out_axes` that of the result: for each array its stream axis, or
    REPLICATED or PSUM.
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
    """The number of devices that are traced for."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.size


def _split_by_stream(array: jax.Array, axis: int) -> jax.Array:
    return array if _devices() == 1 else jax.lax.with_sharding_constraint(array, _spec(axis))


def _shared_axes(fsdp: int, shape: tuple[int, ...]) -> list[str | None]:
    """The partition spec of a parameter: its longest axis that `fsdp` divides is sharded."""
    fitting = [axis for axis, size in enumerate(shape) if size % fsdp == 0]
    if fsdp == 1 or len(shape) < 2 or not fitting:
        return []
    longest = max(fitting, key=lambda axis: shape[axis])
    return [FSDP if axis == longest else None for axis in range(len(shape))]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(spec: PartitionSpec, parameter: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(parameter, PartitionSpec())


# Without this, the compiler might keep the complete gradient on every device until the update.
_gather.defvjp(
    lambda spec, parameter: (_gather(spec, parameter), None),
    lambda spec, _, gradient: (jax.lax.with_sharding_constraint(gradient, spec),),
)


def _place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    parts = sharding.addressable_devices_indices_map(array.shape)
    placed = jax.device_put([array[index] for index in parts.values()], list(parts))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, placed)
