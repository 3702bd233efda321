"""The attention of one layer as two fused Pallas kernels for TPUs, one forward and one backward.

**The walk.** A program handles one stream and one head. All queries of the segment stay in VMEM, in blocks of 128. The
program walks away from them by distance: step d handles the distances 128 d + 1 … 128 d + 128 of every query at once.
For query c of block i these are 128 consecutive keys, which straddle the key blocks i − d − 1 and i − d. Exactly one
of the two keys with column j is among them, and cell [c, j] of the step's tile is that key's:

              key block i − d − 1   key block i − d             the tile of query block i in step d
    query 0   ■ ■ ■ ■ ■ ■ ■ ■       · · · · · · · ·             ▒ ▒ ▒ ▒ ▒ ▒ ▒ ▒
          1   · ■ ■ ■ ■ ■ ■ ■       ■ · · · · · · ·             ■ ▒ ▒ ▒ ▒ ▒ ▒ ▒       ■ j < c: block i − d
          2   · · ■ ■ ■ ■ ■ ■       ■ ■ · · · · · ·      →      ■ ■ ▒ ▒ ▒ ▒ ▒ ▒       ▒ else:  block i − d − 1
          3   · · · ■ ■ ■ ■ ■       ■ ■ ■ · · · · ·             ■ ■ ■ ▒ ▒ ▒ ▒ ▒

- *Content scores* are computed one key block at a time. The step before has computed the product with block i − d, so
  each step computes one product and selects: the carried scores where j < c, the new ones elsewhere.
- *Position scores* are computed one block of distances at a time: one product with the 128 rows of the position table
  for this step, whose row c is then rolled right by c, a single instruction (tiles.skew).
- *Mask and dropout* depend on (c, j, d) alone, so one mask serves all query blocks.
- *Values* need whole key blocks. The weights on and right of the diagonal (j ≥ c) are carried to the next step, where
  they complete the tile of their key block. The backward pass carries score gradients the same way.

There are no half-empty tiles on a diagonal: a head of reach r takes ⌈r / 128⌉ steps. Steps that lie within the span of
every query are *full* and need no mask; with one z per head and a ramp of 32, all but the last one or two are. The last
step is separate (`Program.end`): nothing follows that would use what it carries.

**Cost.** A head of reach 64 or less, like most heads of a trained model, takes a path without steps or carries: every
query looks at 128 keys, in 1,445 cycles on v5e for the 512 queries of one stream. A step does the same work in 741,
because its phases overlap those of the steps before and after it. Set-up and the last step take 2,321. So a head that
reads 4,000 positions, in 32 steps, costs 25,300 cycles, 17.5 times as many as one that reads 40. docs/performance.md
has the table, also of the backward kernel.

**Memory.** Every head reads some of the newest 128 positions of memory, so XLA projects them together with the segment.
Older blocks are copied from the ring in HBM ahead of their step, by the heads that reach them, and are projected for
that head inside the kernel.

**Persistent vectors** (`model.persistent`) have no distance, mask or memory, so they have two small kernels of their
own. These continue the softmax of the kernels above, which return its log-sum-exp and take that one's gradient, over
all N vectors of a head, at the same cost for any span. Scores never leave VMEM; by XLA, each layer's go through HBM
several times. persistent.py and persistent_kernels.py have them.

Read sizes.py (how far each head walks), tiles.py (operations on one tile), program.py (what both kernels share), then
forward.py and backward.py. attention.py puts them behind the signature of the reference.
"""

from adaptive_span_jax.model.attention.fused.attention import attend, unsupported

__all__ = ["attend", "unsupported"]
