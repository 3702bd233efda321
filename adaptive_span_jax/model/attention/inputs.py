"""What the near and the far part of per-head attention read, and the gradients they return."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from adaptive_span_jax.model.dropout import Dropout
from adaptive_span_jax.model.memory import LayerMemory

# Distances 1 … NEAR are read by every head, further ones only by heads that reach them. 64 covers the ramp of 32 at
# which heads start, and then some. Queries are cut into chunks of the same length, so a chunk's window is two blocks.
NEAR = 64

# A far tile is at most so many queries against as many keys. On CPUs, 64 and 128 are within 3 % of each other for heads
# that reach thousands of positions, and 64 computes less in vain for heads that reach a few blocks. On TPUs, 128 is the
# width of a register.
FAR_ON_CPU = 64
FAR_ON_TPU = 128

# On other platforms, GPUs, every turn of a far loop starts some thirty kernels and waits for the host to read whether
# another turn follows. Larger tiles, and tiles of several heads, compute more that is masked out, but take far fewer
# turns.
FAR_ON_GPU = 512
HEADS_ON_GPU = 8


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FarShape:
    """The shape of far tiles: at most `size` queries against `size` keys, of at most `heads` heads."""

    size: int
    heads: int = 1

    @classmethod
    def on(cls, platform: str) -> "FarShape":
        """The shape that a platform computes fastest."""
        return _FAR_ON.get(platform, cls(FAR_ON_GPU, HEADS_ON_GPU))

    @property
    def margin(self) -> int:
        """Zeros beyond both ends of the position table: no tile reaches further out than this."""
        return 2 * self.size

    def keys(self, limit: int) -> int:
        """The rows of a block of memory."""
        return min(self.size, limit)

    def groups(self, heads: int) -> tuple[int, ...]:
        """The numbers of heads that a tile may be of, most first; the most, which are read together, divides H."""
        sizes = [max(size for size in range(1, self.heads + 1) if heads % size == 0)]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 2))
        return tuple(sizes)

    def queries(self, length: int) -> int:
        """The queries of a tile, and the rows of a block of the segment: whole chunks that divide the padded length."""
        chunk = min(NEAR, length)
        return max(size for size in range(chunk, max(self.size, chunk) + 1, chunk) if length % size == 0)

    def one_query_block(self, length: int) -> bool:
        """Whether all queries are in one tile, and there is no loop over blocks of queries.

        Smaller tiles, for CPUs and TPUs, stay in a loop: XLA:CPU might fuse them with what comes next, and compute them
        twice.
        """
        return self.queries(length) == length > FAR_ON_TPU


_FAR_ON = {"cpu": FarShape(FAR_ON_CPU), "tpu": FarShape(FAR_ON_TPU)}


class Inputs(NamedTuple):
    """One layer's attention over the streams of one device; T is padded to whole chunks."""

    query_BHTK: jax.Array  # scaled by 1/√K
    segment_BTD: jax.Array
    memory: LayerMemory
    key_DHK: jax.Array
    value_DHK: jax.Array
    table_PK: jax.Array  # see skew.pad_table
    z_BHT1: jax.Array  # B may be 1
    stream_B: jax.Array  # the streams' numbers among those of all devices
    valid_length: jax.Array | None
    dropout: Dropout | None
    far: FarShape

    def shards(self, stream_shards: int) -> list["Inputs"]:
        """The inputs of equal shares of the streams. Memory is not split: that would copy it."""
        size = self.stream_B.size // stream_shards
        shares = (slice(first, first + size) for first in range(0, self.stream_B.size, size))
        return [
            self._replace(
                query_BHTK=self.query_BHTK[share],
                segment_BTD=self.segment_BTD[share],
                z_BHT1=self.z_BHT1 if self.z_BHT1.shape[0] == 1 else self.z_BHT1[share],
                stream_B=self.stream_B[share],
            )
            for share in shares
        ]

    def of_heads(self, take: Callable[[jax.Array], jax.Array]) -> "Inputs":
        """The inputs of some heads; `take` takes them from an array whose second axis counts heads."""
        arrays = (self.query_BHTK, self.key_DHK, self.value_DHK, self.z_BHT1)
        query_BHTK, key_DHK, value_DHK, z_BHT1 = map(take, arrays)
        return self._replace(query_BHTK=query_BHTK, key_DHK=key_DHK, value_DHK=value_DHK, z_BHT1=z_BHT1)

    @property
    def limit(self) -> int:
        """S."""
        return self.memory.limit

    @property
    def chunk(self) -> int:
        """C, the number of queries in a near tile."""
        return min(NEAR, self.segment_BTD.shape[1])


class InputGradients(NamedTuple):
    """The gradients of `Inputs`; memory has none."""

    query_BHTK: jax.Array
    segment_BTD: jax.Array
    key_DHK: jax.Array
    value_DHK: jax.Array
    table_PK: jax.Array
    z_BHT1: jax.Array


def split(array: jax.Array, stream_shards: int) -> list[jax.Array]:
    """An array whose first axis counts streams, split like `Inputs.shards`."""
    size = array.shape[0] // stream_shards
    return [array[number * size : (number + 1) * size] for number in range(stream_shards)]
