"""The position table as tiles read it: furthest distance first, with zeros beyond both ends.

With the zeros any tile's distances are one slice, also where some of them are below 1 or above S.
"""

import jax
import jax.numpy as jnp


def descending(positions_SK: jax.Array, margin: int) -> jax.Array:
    """Rows for the distances S + margin down to 1 − margin."""
    return jnp.pad(positions_SK[::-1], [(margin, margin), (0, 0)])


def ascending(table_PK: jax.Array, margin: int) -> jax.Array:
    """The inverse of `descending`, for gradients."""
    return table_PK[margin : table_PK.shape[0] - margin][::-1]


def rows(table_PK: jax.Array, margin: int, furthest: jax.Array | int, count: int) -> jax.Array:
    """`count` rows, from the distance `furthest` downwards."""
    return jax.lax.dynamic_slice_in_dim(table_PK, _index(table_PK, margin, furthest), count)


def add_rows(table_PK: jax.Array, margin: int, furthest: jax.Array | int, rows_YK: jax.Array) -> jax.Array:
    """The table with something added to the rows from the distance `furthest` downwards."""
    first = _index(table_PK, margin, furthest)
    both = jax.lax.dynamic_slice_in_dim(table_PK, first, rows_YK.shape[0]) + rows_YK
    return jax.lax.dynamic_update_slice_in_dim(table_PK, both, first, axis=0)


def _index(table_PK: jax.Array, margin: int, distance: jax.Array | int) -> jax.Array | int:
    limit = table_PK.shape[0] - 2 * margin
    return limit + margin - distance
