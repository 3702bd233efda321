"""Scores by key and scores by distance: how one becomes the other without a gather, and the position table.

Content scores come by key: column j is key j. Position scores come by distance: one product of the queries with rows of
the position table, furthest distance first. The next query stands one position later, so the same distance is one key
further right, and the same key is one distance further left. Laid out as one line of numbers, moving every row by one
more column than the row above means breaking the line into rows that are one number longer or shorter. That is a pad
or a slice and a reshape.

There are two shapes. In a *band*, each of C queries sees the W keys before it and no others. By distance that is a
rectangle [C, W], by key a band in [C, W + C] (the reference, with W = S, and the near part of per-head attention):

    by key  a b c . . .      by distance  a b c      a b c . . . . d e f . . . . g h i .
            . d e f . .   ↔               d e f      └────────────┴────────────┴────────     rows of W + C + 1
            . . g h i .                   g h i

In a *tile*, each of C queries meets each of J keys. By key that is a rectangle [C, J], by distance a band in [C, Y]
with Y = C + J (far tiles, and chunks that read a KV cache):

    by distance  . . a b c .      by key  a b c      . . a b c . . d e f . . g h i . . .
                 . d e f . .   ↔          d e f          └─────────┴─────────┴───────        drop C − 1 numbers,
                 g h i . . .              g h i                                              then rows of Y − 1
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def band_by_distance(by_key: jax.Array) -> jax.Array:
    """[…, C, W + C] by key → […, C, W] by distance: row c keeps the columns c … c + W − 1."""
    *outer, queries, keys = by_key.shape
    line = jnp.pad(by_key.reshape(*outer, queries * keys), [(0, 0)] * len(outer) + [(0, queries)])
    return line.reshape(*outer, queries, keys + 1)[..., : keys - queries]


def band_by_key(by_distance: jax.Array) -> jax.Array:
    """[…, C, W] by distance → […, C, W + C] by key, 0 beside the band: the transpose of `band_by_distance`."""
    *outer, queries, width = by_distance.shape
    keys = width + queries
    wide = jnp.pad(by_distance, [(0, 0)] * (len(outer) + 1) + [(0, queries + 1)])
    return wide.reshape(*outer, queries * (keys + 1))[..., : queries * keys].reshape(*outer, queries, keys)


def tile_by_key(by_distance: jax.Array, keys: int) -> jax.Array:
    """[…, C, Y] by distance → […, C, J] by key: row c starts at column C − 1 − c."""
    *outer, queries, rows = by_distance.shape
    line = by_distance.reshape(*outer, queries * rows)[..., queries - 1 : -1]
    return line.reshape(*outer, queries, rows - 1)[..., :keys]


def tile_by_distance(by_key: jax.Array, scratch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[…, C, J] by key → […, C, Y] by distance, 0 elsewhere: the transpose of `tile_by_key`; and the scratch to reuse.

    The scratch has the rows the right distance apart, so the result is one slice of it. It is carried from tile to
    tile because XLA:CPU would otherwise fuse the padding with everything that computes `by_key`, and compute all of
    it twice.
    """
    *outer, queries, keys = by_key.shape
    scratch = jax.lax.dynamic_update_slice(scratch, by_key, [0] * len(outer) + [1, 0])
    line = scratch.reshape(*outer, -1)[..., keys : keys + queries * (queries + keys)]
    return line.reshape(*outer, queries, queries + keys), scratch


def make_scratch(outer: tuple[int, ...], queries: int, keys: int, dtype: DTypeLike) -> jax.Array:
    """What `tile_by_distance` writes into: zeros, of which it only ever overwrites the same rectangle."""
    return jnp.zeros((*outer, queries + 2, queries + keys - 1), dtype)


def pad_table(positions_SK: jax.Array, margin: int) -> jax.Array:
    """The position table by distance, S + margin down to 1 − margin: table_PK.

    Rows of distances outside 1 … S are zeros. With them the distances of any tile are one slice.
    """
    return jnp.pad(positions_SK[::-1], [(margin, margin), (0, 0)])


def table_rows(table_PK: jax.Array, margin: int, furthest: jax.Array | int, count: int) -> jax.Array:
    """`count` rows of a padded table, from the distance `furthest` downwards."""
    return jax.lax.dynamic_slice_in_dim(table_PK, _row(table_PK, margin, furthest), count)


def add_to_table(table_PK: jax.Array, margin: int, furthest: jax.Array | int, rows_YK: jax.Array) -> jax.Array:
    """A padded table with `rows_YK` added to its rows from the distance `furthest` downwards."""
    first = _row(table_PK, margin, furthest)
    total_YK = jax.lax.dynamic_slice_in_dim(table_PK, first, rows_YK.shape[0]) + rows_YK
    return jax.lax.dynamic_update_slice_in_dim(table_PK, total_YK, first, axis=0)


def _row(table_PK: jax.Array, margin: int, distance: jax.Array | int) -> jax.Array | int:
    limit = table_PK.shape[0] - 2 * margin
    return limit + margin - distance
