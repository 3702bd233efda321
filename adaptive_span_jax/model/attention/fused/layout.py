"""How the kernels' arrays lie in VMEM, and how programs read them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from adaptive_span_jax.model.attention.fused.program import Ref, rows
from adaptive_span_jax.model.attention.fused.sizes import BLOCK, SHORT, Sizes

# Half of a v5e's VMEM. The position table, its gradient and the weights' gradients stay there for a whole call, more
# than the compiler's default limit of 16 MiB.
VMEM_BYTES = 64 * 2**20
# The compiler's own temporaries need some of it, too.
USABLE_VMEM_BYTES = VMEM_BYTES - 8 * 2**20


class Operands(NamedTuple):
    """What both kernels read. Q: all heads' queries side by side; E: a head's keys and values side by side."""

    query_BTQ: Any
    segment_BTE: Any  # projected, heads side by side; keys are scaled to scores in base 2
    newest_BJE: Any  # the same of the newest 128 positions of memory
    table_XKJ: (
        Any  # position table: block x has the distances 128 x + 1 … 128 x + 128, furthest in column 0; scaled like keys
    )
    weights_DE: Any  # key and value projections, heads side by side
    memory_LBMD: Any
    z_BH1T: Any


def operand_specs(sizes: Sizes) -> list[pl.BlockSpec]:
    """Where `Operands` lie in VMEM for a program, but for the memory, which stays in HBM."""
    lanes = sizes.heads * 2 * sizes.part
    return list(
        Operands(
            query_BTQ=by_stream(sizes),
            segment_BTE=by_head(sizes, sizes.segment),
            newest_BJE=by_head(sizes, BLOCK),
            table_XKJ=resident((sizes.distance_blocks, BLOCK, BLOCK)),
            weights_DE=resident((sizes.width, lanes)),
            memory_LBMD=pl.BlockSpec(memory_space=pl.ANY),
            z_BH1T=by_query(sizes),
        )
    )


def by_stream(sizes: Sizes) -> pl.BlockSpec:
    """All heads of a stream: [1, T, Q]."""
    shape = (1, sizes.segment, sizes.heads * sizes.head_width)
    return pl.BlockSpec(shape, lambda core, number, head, *_: (core * sizes.streams_per_core + number, 0, 0))


def by_head(sizes: Sizes, positions: int) -> pl.BlockSpec:
    """One head of a stream: [1, positions, E]."""
    shape = (1, positions, 2 * sizes.part)
    return pl.BlockSpec(shape, lambda core, number, head, *_: (core * sizes.streams_per_core + number, 0, head))


def by_query(sizes: Sizes, numbers: int = 1) -> pl.BlockSpec:
    """One or more numbers per query of a head: [1, 1, numbers, T]."""
    shape = (1, 1, numbers, sizes.segment)
    return pl.BlockSpec(shape, lambda core, number, head, *_: (core * sizes.streams_per_core + number, head, 0, 0))


def resident(shape: tuple[int, ...]) -> pl.BlockSpec:
    """The whole array, the same for all programs, and so in VMEM once."""
    return pl.BlockSpec(shape, lambda core, number, head, *_: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def per_core(shape: tuple[int, ...]) -> pl.BlockSpec:
    """An array for the sums of all programs of a core: [1, *shape] of [cores, *shape]."""
    return pl.BlockSpec(
        (1, *shape), lambda core, number, head, *_: (core, *(0,) * len(shape)), pipeline_mode=pl.Buffered(1)
    )


def grid(sizes: Sizes) -> tuple[int, int, int]:
    """(core, stream of the core, head)."""
    return sizes.cores, sizes.streams_per_core, sizes.heads


def compiler_params() -> pltpu.CompilerParams:
    """A core runs its programs one after the other: they hand memory blocks and sums over streams to each other."""
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary", "arbitrary"),
        vmem_limit_bytes=VMEM_BYTES,
        disable_bounds_checks=True,
    )


def split(refs: tuple[Ref, ...], *kinds: Any) -> list[Any]:
    """A kernel's arguments, as the named tuples that they were passed in."""
    parts = []
    for kind in kinds:
        parts.append(kind(*refs[: len(kind._fields)]))
        refs = refs[len(kind._fields) :]
    return parts


def key(block_JE: jax.Array) -> jax.Array:
    """The register of a projected block that holds keys; where values share it, queries are 0 in their lanes."""
    return block_JE[:, :BLOCK]


def value(block_JE: jax.Array) -> jax.Array:
    """The register that holds values; where keys share it, their lanes of the product are not used."""
    return block_JE[:, -BLOCK:]


def short_keys(inputs: Operands, i: int) -> tuple[jax.Array, jax.Array]:
    """The 128 keys in reach of the first and of the second half of query block i, for heads of reach 64 or less.

    In the first, the keys of the block before stand in the columns that the tile of step 0 has for them.
    """
    own = inputs.segment_BTE[0, rows(i), :]
    before = inputs.segment_BTE[0, rows(i - 1), :] if i else inputs.newest_BJE[0]
    return jnp.concatenate([own[:SHORT], before[SHORT:]]), own
