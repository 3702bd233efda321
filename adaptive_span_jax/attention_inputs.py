"""What the near and the far part of per-head attention work on, and what they find: inputs and their gradients."""

from typing import NamedTuple

import jax

from adaptive_span_jax.dropout import Dropout
from adaptive_span_jax.memory import MIRRORED, LayerMemory

# Distances 1 … NEAR are read by every head, further ones only by heads that reach them. 64 covers the ramp of 32 at which
# heads start, and then some. Queries are cut into chunks of the same length, so that a chunk's window is two blocks of keys.
NEAR = 64

# Far tiles are FAR queries against FAR keys, which is as much as memory gives in one block.
FAR = MIRRORED

# Zeros beyond both ends of the position table: no tile reaches further out than this.
MARGIN = 2 * FAR


class Inputs(NamedTuple):
    """One layer's attention over the streams of one device; T is padded to whole chunks."""

    query_BHTK: jax.Array  # scaled by 1/√K
    segment_BTD: jax.Array
    memory: LayerMemory
    key_DHK: jax.Array
    value_DHK: jax.Array
    table_PK: jax.Array  # see position_table.py
    z_BHT1: jax.Array  # B may be 1
    stream_B: jax.Array  # the streams' numbers among those of all devices
    filled: jax.Array | None
    dropout: Dropout | None

    @property
    def limit(self) -> int:
        """S."""
        return self.memory.limit

    @property
    def chunk(self) -> int:
        """C, the number of queries in a near tile."""
        return min(NEAR, self.segment_BTD.shape[1])


class InputGradients(NamedTuple):
    """The gradients of `Inputs`; memory takes none."""

    query_BHTK: jax.Array
    segment_BTD: jax.Array
    key_DHK: jax.Array
    value_DHK: jax.Array
    table_PK: jax.Array
    z_BHT1: jax.Array
