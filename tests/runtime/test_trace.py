"""How long operations took, from the events of a trace."""

import jax
import jax.numpy as jnp
import pytest

from adaptive_span_jax.runtime import trace
from adaptive_span_jax.runtime.trace import Event, Operation


def test_an_operation_is_charged_without_those_inside_it():
    loop = [Event("while", 0, 100), Event("dot", 10, 30), Event("add", 40, 5), Event("dot", 50, 30)]
    nested = [Event("call", 200, 50), Event("while", 200, 50), Event("add", 210, 10)]
    other_thread = [Event("dot", 20, 7)]
    found = trace.total([loop + nested, other_thread])
    assert found == [Operation("while", 2, 75e-9), Operation("dot", 3, 67e-9), *found[2:]]
    assert {operation.name: operation.count for operation in found} == {"while": 2, "dot": 3, "add": 2, "call": 1}
    assert sum(operation.seconds for operation in found) * 1e9 == 100 + 50 + 7
    assert found[-1].name == "call"


def test_the_source_of_an_operation_is_its_own():
    program = """
ENTRY %main (p: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), metadata={op_name="x"}
  %no.1 = f32[2]{0} copy(%p)
  %fusion.2 = f32[2]{0} fusion(%no.1), calls=%c, metadata={op_type="add" op_name="jit(f)/add" source_line=3}
  ROOT dot.3 = f32[2]{0} dot(%fusion.2, %p), metadata={op_name="jit(f)/dot_general"}
}
"""
    assert trace.sources(program) == {"p": "x", "fusion.2": "jit(f)/add", "dot.3": "jit(f)/dot_general"}


def test_a_recorded_trace_has_the_operations_of_the_program(tmp_path):
    function = jax.jit(lambda x: jnp.sort(x @ x, axis=0))
    x = jnp.ones((64, 64))
    compiled = function.lower(x).compile()
    jax.block_until_ready(compiled(x))
    with trace.recording(tmp_path) as session:
        for _ in range(3):
            jax.block_until_ready(compiled(x))
    found = {operation.name: operation for operation in trace.read_operations(tmp_path, session)}
    products = {
        name for name, source in trace.sources(compiled.as_text() or "").items() if source.endswith("/dot_general")
    }
    # Some of them are inside a fusion, which is one operation.
    assert [found[name].count for name in products & set(found)] == [3]
    assert all(0 < operation.seconds < 1 for operation in found.values())


# As the profilers of other platforms write it.
TPU = """
planes {
  name: "/device:TPU:0"
  event_metadata { key: 1 value { id: 1 name: "%while.2 = (s32[], bf16[8]) while(%tuple)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.3 = bf16[8,128] fusion(%p), kind=kLoop" } }
  event_metadata { key: 3 value { id: 3 name: "jit_train_step(123)" } }
  lines { name: "XLA Modules" events { metadata_id: 3 offset_ps: 0 duration_ps: 9000000 } }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 8000000 }
    events { metadata_id: 2 offset_ps: 1000000 duration_ps: 2000000 }
    events { metadata_id: 2 offset_ps: 5000000 duration_ps: 2000000 }
  }
}
"""
GPU = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gemm_fusion_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "dot.7" } }
  lines {
    name: "Stream #13(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 3000000 stats { metadata_id: 1 ref_value: 2 } }
    events { metadata_id: 2 offset_ps: 3000000 duration_ps: 1000000 }
  }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "cuLaunchKernel" } }
  lines { name: "python" events { metadata_id: 1 offset_ps: 0 duration_ps: 9000000 } }
}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TPU, [Operation("fusion.3", 2, 4e-6), Operation("while.2", 1, 4e-6)]),
        (GPU, [Operation("dot.7", 1, 3e-6), Operation("MemcpyD2D", 1, 1e-6)]),
    ],
)
def test_operations_of_other_platforms_are_found(text, expected, tmp_path):
    folder = tmp_path / "plugins" / "profile" / "session"
    folder.mkdir(parents=True)
    (folder / "host.xplane.pb").write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(text))
    assert sorted(trace.read_operations(tmp_path, "session")) == sorted(expected)
