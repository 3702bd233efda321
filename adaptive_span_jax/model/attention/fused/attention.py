"""The fused kernels behind the signature of the reference attention: packing, devices and the derivative."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from adaptive_span_jax.model.attention.fused.backward import backward
from adaptive_span_jax.model.attention.fused.backward_arrays import Gradients, Residuals, vmem_bytes
from adaptive_span_jax.model.attention.fused.forward import forward
from adaptive_span_jax.model.attention.fused.layout import USABLE_VMEM_BYTES, Operands
from adaptive_span_jax.model.attention.fused.program import Scalars
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, Sizes, walk
from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory
from adaptive_span_jax.runtime import sharding

# Programs unroll their query blocks.
_LONGEST_SEGMENT = 1024


def unsupported(segment: int, width: int, heads: int, limit: int, ring: int, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot compute attention of these sizes, or None if they can."""
    if segment % BLOCK or segment > _LONGEST_SEGMENT:
        return f"train.segment = {segment} is not a multiple of {BLOCK} up to {_LONGEST_SEGMENT}"
    if ring % BLOCK:
        return f"a memory of {ring} positions is not a multiple of {BLOCK}"
    if width % BLOCK or width // heads > BLOCK:
        return f"model.width = {width} is not a multiple of {BLOCK} with heads of at most {BLOCK}"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"model.compute_dtype = {jnp.dtype(dtype)} is neither float32 nor bfloat16"
    sizes = Sizes(
        streams=1,
        cores=1,
        segment=segment,
        heads=heads,
        head_width=width // heads,
        width=width,
        limit=limit,
        ramp=1,
        ring=ring,
        dropout=0.0,
        per_query=False,
        has_valid_length=False,
        interpret=False,
    )
    needed = vmem_bytes(sizes, dtype, jnp.float32)
    if needed > USABLE_VMEM_BYTES:
        mebibytes = f"{needed / 2**20:.0f} MiB of VMEM, of which {USABLE_VMEM_BYTES / 2**20:.0f} MiB can be used"
        return f"span.limit = {limit} and model.width = {width} would need {mebibytes}"
    return None


def attend(
    query_BTHK: jax.Array,
    segment_BTD: jax.Array,
    memory: LayerMemory,
    key_DHK: jax.Array,
    value_DHK: jax.Array,
    positions_SK: jax.Array,
    z_BTH: jax.Array,
    *,
    ramp: int,
    valid_length: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(output_BTHK, log_sum_BTH); arguments and results as of `reference.attend`.

    On other platforms than TPUs the kernels are interpreted, which is slow.
    """
    streams, length, heads, head_width = query_BTHK.shape
    word_BH = jnp.zeros((streams, heads), jnp.uint32)
    if dropout is not None:
        word_BH = dropout.at(dropout.streams(streams)[:, None]).at(jnp.arange(heads)[None, :]).word
    inputs = _Inputs(
        # Heads stay side by side: with an axis of their own, XLA would pad their few lanes, and copy.
        query_BTQ=query_BTHK.reshape(streams, length, heads * head_width),
        segment_BTD=segment_BTD,
        memory=memory,
        key_DHK=key_DHK,
        value_DHK=value_DHK,
        positions_SK=positions_SK,
        z_BTH=z_BTH.astype(jnp.float32),
        valid_length=valid_length,
        word_BH=word_BH,
    )
    setting = _Setting(ramp, dropout.rate if dropout else 0.0, interpret=sharding.platform() != "tpu")
    output_BTQ, log_sum_BH1T = _attend(setting, inputs)
    return output_BTQ.reshape(query_BTHK.shape), jnp.moveaxis(log_sum_BH1T[:, :, 0], 1, 2)


class _Setting(NamedTuple):
    ramp: int
    dropout: float
    interpret: bool


class _Inputs(NamedTuple):
    query_BTQ: jax.Array
    segment_BTD: jax.Array
    memory: LayerMemory
    key_DHK: jax.Array
    value_DHK: jax.Array
    positions_SK: jax.Array
    z_BTH: jax.Array  # B and T may be 1
    valid_length: jax.Array | None
    word_BH: jax.Array


class _Projected(NamedTuple):
    """Keys and values, streams first."""

    segment_BTE: Any
    newest_BJE: Any


class _Kept(NamedTuple):
    """What the forward pass keeps for the backward pass besides the inputs, streams first."""

    output_BTQ: Any
    log_sum_BH1T: Any  # in base 2
    projected: _Projected | None  # None: projected again, see `_keeps_projected`


_DIFFERENTIABLE = ("query_BTQ", "segment_BTD", "key_DHK", "value_DHK", "positions_SK", "z_BTH")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(setting: _Setting, inputs: _Inputs) -> tuple[jax.Array, jax.Array]:
    return _outputs(_run(setting, inputs))


def _run(setting: _Setting, inputs: _Inputs) -> _Kept:
    def run(inputs: _Inputs) -> _Kept:
        sizes = _sizes(setting, inputs)
        weights_DE = _weights(sizes, inputs)
        projected = _project(sizes, inputs, weights_DE)
        output_BTQ, log_sum_BH1T = forward(
            sizes, _scalars(sizes, inputs), _operands(sizes, inputs, weights_DE, projected)
        )
        return _Kept(output_BTQ, log_sum_BH1T, projected if _keeps_projected(inputs) else None)

    return sharding.per_device(run, inputs.query_BTQ.shape[0], (_axes(inputs),), _kept_axes(inputs))(inputs)


def _outputs(kept: _Kept) -> tuple[jax.Array, jax.Array]:
    return kept.output_BTQ, kept.log_sum_BH1T * math.log(2)


def _forward(setting: _Setting, perturbed: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[_Inputs, _Kept]]:
    inputs = jax.tree.map(lambda each: each.value, perturbed)
    kept = _run(setting, inputs)
    return _outputs(kept), (inputs, kept)


def _backward(setting: _Setting, saved: tuple[_Inputs, _Kept], d_outputs: tuple[Any, Any]) -> tuple[_Inputs]:
    def run(inputs: _Inputs, kept: _Kept, d_output_BTQ: jax.Array, d_log_sum_BH1T: Any) -> dict[str, jax.Array]:
        sizes = _sizes(setting, inputs)
        weights_DE = _weights(sizes, inputs)
        projected = kept.projected or _project(sizes, inputs, weights_DE)
        operands = _operands(sizes, inputs, weights_DE, projected)
        log_sums = [kept.log_sum_BH1T] if d_log_sum_BH1T is None else [kept.log_sum_BH1T, d_log_sum_BH1T]
        residuals = Residuals(kept.output_BTQ, jnp.concatenate(log_sums, axis=2), d_output_BTQ)
        grads = backward(sizes, _scalars(sizes, inputs), operands, residuals)
        return _unpack(sizes, inputs, weights_DE, grads)

    inputs, kept = saved
    d_output_BTQ, d_log_sum_BH1T = d_outputs
    if isinstance(d_output_BTQ, SymbolicZero):
        d_output_BTQ = jnp.zeros_like(kept.output_BTQ)
    # Where nothing uses the log-sum-exp, as without persistent vectors, the kernel has nothing to read.
    d_log_sum_BH1T = None if isinstance(d_log_sum_BH1T, SymbolicZero) else d_log_sum_BH1T
    axes = _axes(inputs)
    in_axes = (axes, _kept_axes(inputs), 0, None if d_log_sum_BH1T is None else 0)
    out_axes = {name: getattr(axes, name) for name in _DIFFERENTIABLE}
    out_axes = {name: sharding.PSUM if axis == sharding.REPLICATED else axis for name, axis in out_axes.items()}
    run_on_devices = sharding.per_device(run, inputs.query_BTQ.shape[0], in_axes, out_axes)
    # Memory, valid length and dropout have no gradient.
    grads = run_on_devices(inputs, kept, d_output_BTQ, d_log_sum_BH1T)
    return (_Inputs(**dict.fromkeys(_Inputs._fields) | grads),)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _sizes(setting: _Setting, inputs: _Inputs) -> Sizes:
    streams, length, width = inputs.segment_BTD.shape
    _, heads, head_width = inputs.key_DHK.shape
    cores = sharding.cores_per_device()
    return Sizes(
        streams=streams,
        cores=cores if streams % cores == 0 else 1,
        segment=length,
        heads=heads,
        head_width=head_width,
        width=width,
        limit=inputs.memory.limit,
        ramp=setting.ramp,
        ring=inputs.memory.ring,
        dropout=setting.dropout,
        per_query=inputs.z_BTH.shape[:2] != (1, 1),
        has_valid_length=inputs.valid_length is not None,
        interpret=setting.interpret,
    )


def _axes(inputs: _Inputs) -> _Inputs:
    """The axis of each input that counts streams."""
    axes = jax.tree.map(lambda _: sharding.REPLICATED, inputs)
    return axes._replace(
        query_BTQ=0,
        segment_BTD=0,
        memory=axes.memory.with_stream_axis(1),
        z_BTH=sharding.REPLICATED if inputs.z_BTH.shape[0] == 1 else 0,
        word_BH=0,
    )


def _kept_axes(inputs: _Inputs) -> _Kept:
    return _Kept(0, 0, _Projected(0, 0) if _keeps_projected(inputs) else None)


def _keeps_projected(inputs: _Inputs) -> bool:
    """In float32, keys and values take twice the memory, but not longer to project again."""
    return inputs.segment_BTD.dtype == jnp.bfloat16


def _scalars(sizes: Sizes, inputs: _Inputs) -> Scalars:
    z_BTH = jax.lax.stop_gradient(inputs.z_BTH)
    steps_H, full_H = walk(z_BTH.min(axis=(0, 1)), z_BTH.max(axis=(0, 1)), sizes.ramp, sizes.limit, inputs.valid_length)
    valid_length = 0 if inputs.valid_length is None else inputs.valid_length
    place = jnp.stack([jnp.asarray(n, jnp.int32) for n in (inputs.memory.index, inputs.memory.end, valid_length)])
    return Scalars(place, steps_H, full_H, z_BTH[0, 0], inputs.word_BH.reshape(-1))


def _operands(sizes: Sizes, inputs: _Inputs, weights_DE: jax.Array, projected: _Projected) -> Operands:
    z_BTH = jnp.broadcast_to(inputs.z_BTH, (sizes.streams, sizes.segment, sizes.heads))
    return Operands(
        inputs.query_BTQ,
        *projected,
        _table(sizes, inputs),
        weights_DE,
        inputs.memory.hidden_LBMD,
        jnp.moveaxis(z_BTH, 2, 1)[:, :, None, :],
    )


def _weights(sizes: Sizes, inputs: _Inputs) -> jax.Array:
    """Each head's key and value projections side by side, padded to whole or half registers: weights_DE."""
    padding = [(0, 0), (0, 0), (0, sizes.part - sizes.head_width)]
    parts = [jnp.pad(weight_DHK, padding) for weight_DHK in (inputs.key_DHK, inputs.value_DHK)]
    return jnp.concatenate(parts, axis=-1).reshape(sizes.width, -1)


def _project(sizes: Sizes, inputs: _Inputs, weights_DE: jax.Array) -> _Projected:
    """Keys, scaled so that their products with queries are scores in base 2, and values."""
    is_value_E = jnp.arange(weights_DE.shape[1]) // sizes.part % 2
    scale_E = jnp.where(is_value_E == 1, 1.0, sizes.score_scale)

    def project(rows_BJD: jax.Array) -> jax.Array:
        product_BJE = jnp.einsum("BJD,DE->BJE", rows_BJD, weights_DE, preferred_element_type=jnp.float32)
        # Scaled before it is rounded, or bfloat16 would be rounded twice.
        return (product_BJE * scale_E[None, None, :]).astype(rows_BJD.dtype)

    return _Projected(project(inputs.segment_BTD), project(_newest(inputs)))


def _newest(inputs: _Inputs) -> jax.Array:
    return jax.lax.stop_gradient(inputs.memory.newest(BLOCK)).astype(inputs.segment_BTD.dtype)


def _table(sizes: Sizes, inputs: _Inputs) -> jax.Array:
    table_SK = (inputs.positions_SK * sizes.score_scale).astype(inputs.query_BTQ.dtype)
    rest, missing = sizes.distance_blocks * BLOCK - sizes.limit, BLOCK - sizes.head_width
    # Furthest first, so that skewing is a roll to the right.
    table_XJK = jnp.pad(table_SK, [(0, rest), (0, missing)]).reshape(-1, BLOCK, BLOCK)[:, ::-1]
    return jnp.swapaxes(table_XJK, 1, 2)


def _unpack(sizes: Sizes, inputs: _Inputs, weights_DE: jax.Array, grads: Gradients) -> dict[str, jax.Array]:
    """The gradients of the inputs, from what the kernel wrote."""
    key_scale = 1 / math.sqrt(sizes.head_width)
    d_segment_BTD = jnp.einsum("BTE,DE->BTD", grads.segment_BTE, weights_DE, preferred_element_type=jnp.float32)
    d_weights_DE = _weight_gradient(inputs.segment_BTD, grads.segment_BTE)
    d_weights_DE += _weight_gradient(_newest(inputs), grads.newest_BJE)
    d_weights_DHPK = d_weights_DE.reshape(sizes.width, sizes.heads, 2, sizes.part)[..., : sizes.head_width]
    older_HPKD = grads.weights_CHED.sum(axis=0).reshape(sizes.heads, 2, sizes.rows, sizes.width)[
        :, :, : sizes.head_width
    ]
    older_DHPK = jnp.transpose(older_HPKD, (3, 0, 1, 2))
    d_table_XJK = jnp.swapaxes(grads.table_CXKJ.sum(axis=0), 1, 2)[:, ::-1, : sizes.head_width]
    d_z_BTH = jnp.moveaxis(grads.z_BH1T[:, :, 0], 1, 2)
    shared = tuple(axis for axis in (0, 1) if inputs.z_BTH.shape[axis] == 1)
    found = {
        "query_BTQ": grads.query_BTQ,
        "segment_BTD": d_segment_BTD,
        "key_DHK": d_weights_DHPK[:, :, 0] + older_DHPK[:, :, 0] * key_scale,
        "value_DHK": d_weights_DHPK[:, :, 1] + older_DHPK[:, :, 1],
        "positions_SK": d_table_XJK.reshape(-1, sizes.head_width)[: sizes.limit] * key_scale,
        "z_BTH": d_z_BTH.sum(axis=shared, keepdims=True) if shared else d_z_BTH,
    }
    return {name: gradient.astype(getattr(inputs, name).dtype) for name, gradient in found.items()}


def _weight_gradient(rows_BJD: jax.Array, d_product_BJE: jax.Array) -> jax.Array:
    return jnp.einsum("BJD,BJE->DE", rows_BJD, d_product_BJE, preferred_element_type=jnp.float32)
