"""Small compiled programs, as the compilers of accelerators write them down."""

from adaptive_span_jax.planning import bundles, hlo
from adaptive_span_jax.planning.dump import Dump
from tests.conftest import tiny_config

# Three layers of two heads. In each: a product, and a loop over heads that are read together. In it: a copy, and first
# for both heads, then for one, a loop over blocks of memory and a loop over the segment, each with a copy of its own.
GPU_PROGRAM = """HloModule jit_train_step

%product (left: bf16[8,64], right: bf16[64,16]) -> f32[8,16] {
  %left = bf16[8,64]{1,0} parameter(0)
  %right = bf16[64,16]{1,0} parameter(1)
  ROOT %dot = f32[8,16]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%block.two (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %copy.1 = f32[1000]{0} copy(%a)
}

%segment.two (g: f32[1000]) -> f32[1000] {
  %g = f32[1000]{0} parameter(0)
  ROOT %copy.4 = f32[1000]{0} copy(%g)
}

%block.one (h: f32[1000]) -> f32[1000] {
  %h = f32[1000]{0} parameter(0)
  ROOT %copy.5 = f32[1000]{0} copy(%h)
}

%segment.one (i: f32[1000]) -> f32[1000] {
  %i = f32[1000]{0} parameter(0)
  ROOT %copy.6 = f32[1000]{0} copy(%i)
}

%head (b: f32[1000]) -> f32[1000] {
  %b = f32[1000]{0} parameter(0)
  %copy.2 = f32[1000]{0} copy(%b)
  %while.1 = f32[1000]{0} while(%copy.2), condition=%condition, body=%block.two
  %while.5 = f32[1000]{0} while(%while.1), condition=%condition, body=%segment.two
  %while.6 = f32[1000]{0} while(%while.5), condition=%condition, body=%block.one
  ROOT %while.7 = f32[1000]{0} while(%while.6), condition=%condition, body=%segment.one
}

%layer (c: f32[1000]) -> f32[1000] {
  %c = f32[1000]{0} parameter(0)
  %d = bf16[8,64]{1,0} constant({...})
  %e = bf16[64,16]{1,0} constant({...})
  %fusion = f32[8,16]{1,0} fusion(%d, %e), kind=kCustom, calls=%product
  ROOT %while.2 = f32[1000]{0} while(%c), condition=%condition, body=%head, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/while"}
}

ENTRY %main (f: f32[1000]) -> f32[1000] {
  %f = f32[1000]{0} parameter(0)
  %copy.3 = f32[1000]{0} copy(%f)
  ROOT %while.3 = f32[1000]{0} while(%copy.3), body=%layer, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while"}, backend_config={"known_trip_count":{"n":"3"}}
}
"""

# The same on a TPU: in each layer a product, near attention, and the loops over far heads.
FAR_PROGRAM = """
%limit.3 (c: (s32[])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %c = (s32[]{:T(128)}) parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%c), index=0
  ROOT %less = pred[]{:T(512)} compare(%turn, %three), direction=LT
}

%limit.segment (d: (s32[])) -> pred[] {
  %blocks = s32[]{:T(128)} constant(2)
  %d = (s32[]{:T(128)}) parameter(0)
  %turn.1 = s32[]{:T(128)} get-tuple-element(%d), index=0
  ROOT %less.1 = pred[]{:T(512)} compare(%turn.1, %blocks), direction=LT
}

%limit.value (e: (s32[], s32[])) -> pred[] {
  %e = (s32[]{:T(128)}, s32[]{:T(128)}) parameter(0)
  %turn.2 = s32[]{:T(128)} get-tuple-element(%e), index=0
  %end = s32[]{:T(128)} get-tuple-element(%e), index=1
  ROOT %less.2 = pred[]{:T(512)} compare(%turn.2, %end), direction=LT
}

%tile.memory (f: (s32[])) -> (s32[]) {
  %f = (s32[]{:T(128)}) parameter(0)
  ROOT %in.memory.tile = f32[8,128]{1,0:T(8,128)S(1)} copy(%f)
}

%tile.segment (g: (s32[])) -> (s32[]) {
  %g = (s32[]{:T(128)}) parameter(0)
  ROOT %in.segment.tile = f32[8,128]{1,0:T(8,128)S(1)} copy(%g)
}

%over.memory (h: (s32[])) -> (s32[]) {
  %h = (s32[]{:T(128)}) parameter(0)
  %in.memory = f32[8,128]{1,0:T(8,128)S(1)} copy(%h)
  ROOT %while.5 = (s32[]{:T(128)}) while(%h), condition=%limit.value, body=%tile.memory
}

%over.segment (j: (s32[])) -> (s32[]) {
  %j = (s32[]{:T(128)}) parameter(0)
  %in.segment = f32[8,128]{1,0:T(8,128)S(1)} copy(%j)
  ROOT %while.6 = (s32[]{:T(128)}) while(%j), condition=%limit.value, body=%tile.segment
}

%over.heads (k: (s32[])) -> (s32[]) {
  %k = (s32[]{:T(128)}) parameter(0)
  %in.head = f32[8,128]{1,0:T(8,128)S(1)} copy(%k)
  %while.3 = (s32[]{:T(128)}) while(%k), condition=%limit.value, body=%over.memory
  ROOT %while.4 = (s32[]{:T(128)}) while(%k), condition=%limit.segment, body=%over.segment
}

%layer (l: (s32[])) -> (s32[]) {
  %l = (s32[]{:T(128)}) parameter(0)
  %product = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/dot"}
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/shard_map/add"}
  %norm = f32[8,128]{1,0:T(8,128)S(1)} copy(%l), metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/add"}
  ROOT %while.2 = (s32[]{:T(128)}) while(%l), condition=%limit.value, body=%over.heads, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while/body/shard_map/while"}
}

ENTRY %main (m: (s32[])) -> (s32[]) {
  %m = (s32[]{:T(128)}) parameter(0)
  %adagrad = f32[8,128]{1,0:T(8,128)} copy(%m), metadata={op_name="jit(train_step)/add"}
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%m)
  ROOT %while.1 = (s32[]{:T(128)}) while(%m), condition=%limit.3, body=%layer, \
metadata={op_name="jit(train_step)/jvp(turns_0_3)/while"}
}
"""

# The config of FAR_PROGRAM.
FAR_CONFIG = tiny_config(
    model={"layers": 3, "heads": 2},
    span={"limit": 512, "ramp": 5},
    train={"batch_size": 4, "segment": 256},
)


def straight(cycles: int, rows: int = 0) -> bundles.Block:
    """A schedule without loops."""
    return bundles.Block(bundles.Count(cycles, rows), (), ())


def far_dump(text: str = FAR_PROGRAM) -> Dump:
    """The program with made-up schedules."""
    names = ("memory.tile", "segment.tile", "memory", "segment", "head")
    schedules = {f"in.{name}": straight(100 + number) for number, name in enumerate(names)}
    schedules |= {"near": straight(7), "norm": straight(11), "adagrad": straight(13), "all-reduce.1": straight(17)}
    schedules["product"] = straight(1000, rows=8000)
    return Dump(hlo.parse(text), bundles.Block(bundles.Count(5), (), ("adagrad",)), schedules)
