"""What the near and the far part of per-head attention work on, and what they find: inputs and their gradients."""

import os
from typing import NamedTuple

import jax

from adaptive_span_jax import sharding
from adaptive_span_jax.dropout import Dropout
from adaptive_span_jax.memory import MIRRORED, LayerMemory

# Distances 1 … NEAR are read by every head, further ones only by heads that reach them. 64 covers the ramp of 32 at
# which heads start, and then some. Queries are cut into chunks of the same length, so a chunk's window is two blocks.
NEAR = 64

# Far tiles are FAR queries against FAR keys, which is as much as memory gives in one block.
FAR = MIRRORED

# Zeros beyond both ends of the position table: no tile reaches further out than this.
MARGIN = 2 * FAR

# Each lane is compiled separately.
MOST_LANES = 4


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

    def lanes(self) -> list["Inputs"]:
        """The same for a share of the streams each. Memory stays whole: to split it would be to copy it."""
        streams = self.stream_B.size
        size = streams // _lane_count(streams)
        shares = (slice(first, first + size) for first in range(0, streams, size))
        return [
            self._replace(
                query_BHTK=self.query_BHTK[share],
                segment_BTD=self.segment_BTD[share],
                z_BHT1=self.z_BHT1 if self.z_BHT1.shape[0] == 1 else self.z_BHT1[share],
                stream_B=self.stream_B[share],
            )
            for share in shares
        ]

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


def split(array: jax.Array, lanes: list[Inputs]) -> list[jax.Array]:
    """An array of all streams, shared out as `lanes` are."""
    size = lanes[0].stream_B.size
    return [array[number * size : (number + 1) * size] for number in range(len(lanes))]


def _lane_count(streams: int) -> int:
    # XLA on CPU spreads a large product over the cores, but runs a batch of small ones on a single core. Independent
    # ones run side by side, so there streams are worked on in as many lanes as there are cores for each device.
    if sharding.platform() != "cpu":
        return 1
    wanted = min(MOST_LANES, (os.cpu_count() or 1) // jax.local_device_count())
    return max(count for count in range(1, max(wanted, 1) + 1) if streams % count == 0)
