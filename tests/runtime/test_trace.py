"""How long operations took, from the events of a trace."""

import jax
import jax.numpy as jnp

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
