"""Kernels and turns of a step on GPUs: by hand for a small program, and for the step as the CUDA compiler makes it."""

import importlib.util

import numpy as np
import pytest

from adaptive_span_jax.planning import gpu_kernels, hlo, roofline
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.topology import CHIPS, Machine
from tests.conftest import tiny_config
from tests.test_config import load

# Three layers. In each: a product, a loop over heads with a copy and a loop over memory blocks with another copy.
PROGRAM = """HloModule jit_train_step

%product (left: bf16[8,64], right: bf16[64,16]) -> f32[8,16] {
  %left = bf16[8,64]{1,0} parameter(0)
  %right = bf16[64,16]{1,0} parameter(1)
  ROOT %dot = f32[8,16]{1,0} dot(%left, %right), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%block (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %copy.1 = f32[1000]{0} copy(%a)
}

%head (b: f32[1000]) -> f32[1000] {
  %b = f32[1000]{0} parameter(0)
  %copy.2 = f32[1000]{0} copy(%b)
  ROOT %while.1 = f32[1000]{0} while(%copy.2), condition=%condition, body=%block
}

%layer (c: f32[1000]) -> f32[1000] {
  %c = f32[1000]{0} parameter(0)
  %d = bf16[8,64]{1,0} constant({...})
  %e = bf16[64,16]{1,0} constant({...})
  %fusion = f32[8,16]{1,0} fusion(%d, %e), kind=kCustom, calls=%product
  ROOT %while.2 = f32[1000]{0} while(%c), condition=%condition, body=%head, metadata={op_name="jvp(turns_0_3)/while"}
}

ENTRY %main (f: f32[1000]) -> f32[1000] {
  %f = f32[1000]{0} parameter(0)
  %copy.3 = f32[1000]{0} copy(%f)
  ROOT %while.3 = f32[1000]{0} while(%copy.3), body=%layer, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_kernels_run_as_often_as_their_loops_turn():
    config = tiny_config(model={"layers": 3, "heads": 2}, span={"limit": 2000, "ramp": 32}, train={"segment": 512})
    z_LH = np.array([[0, 0], [100, 0], [600, 1100]], float)
    step = gpu_kernels.count_step(config, hlo.parse(PROGRAM), z_LH)
    runs = {kernel.name: kernel.runs for kernel in step.kernels}
    heads, blocks = 3, 1 + 2 + 3
    assert runs == pytest.approx({"copy.3": 1, "fusion": 3, "copy.2": heads, "copy.1": blocks})
    assert step.turns == pytest.approx(heads + blocks)
    assert step.conditions == pytest.approx((heads + 3) + (blocks + heads))  # every loop reads one more to end
    product = next(kernel for kernel in step.kernels if kernel.name == "fusion")
    assert product.multiply_adds == 8 * 64 * 16
    assert product.half
    assert product.moved == 2 * (8 * 64 + 64 * 16) + 4 * 8 * 16


def test_loops_of_a_sandwich_turn_by_the_spans_of_their_own_layers():
    config = tiny_config(
        model={"layers": 3, "heads": 2, "sandwich": 2}, span={"limit": 2000, "ramp": 32}, train={"segment": 512}
    )
    z_LH = np.array([[0, 0], [100, 0], [600, 1100]], float)
    # Scans over the first two layers and, inlined because it has a single turn, over the last.
    two = PROGRAM.replace("turns_0_3", "turns_0_2").replace('"n":"3"', '"n":"2"')
    inlined = 'while(%f), body=%head, metadata={op_name="jvp(turns_2_3)/while/body/while"}'
    two = two.replace("%copy.3 =", f"%while.4 = f32[1000]{{0}} {inlined}\n  %copy.3 =")
    step = gpu_kernels.count_step(config, hlo.parse(two), z_LH)
    runs = [(kernel.name, kernel.runs) for kernel in step.kernels]
    assert runs == [
        *(("copy.2", pytest.approx(2)), ("copy.1", pytest.approx(2 + 3)), ("copy.3", 1)),
        *(("fusion", 2), ("copy.2", pytest.approx(1)), ("copy.1", pytest.approx(1))),
    ]
    with pytest.raises(ScheduleError, match="in no layer"):
        gpu_kernels.count_step(config, hlo.parse(two.replace("turns_2_3", "")), z_LH)


def test_products_of_the_library_count_too():
    config = tiny_config(span={"limit": 2000}, train={"segment": 512})
    z_LH = np.zeros((3, 2))
    fusion = "f32[8,16]{1,0} fusion(%d, %e), kind=kCustom, calls=%product"
    library = """(f32[8,16]{1,0}, s8[999]{0}) custom-call(%d, %e), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}"""
    ours, theirs = (
        gpu_kernels.count_step(config, hlo.parse(text), z_LH) for text in (PROGRAM, PROGRAM.replace(fusion, library))
    )
    assert ours == theirs
    with pytest.raises(ScheduleError, match="what this kernel"):
        gpu_kernels.count_step(config, hlo.parse(PROGRAM.replace(fusion, library).replace("cublas", "other")), z_LH)


def test_a_kernel_takes_the_longer_of_arithmetic_and_traffic_and_its_launch():
    chip = CHIPS["a100"]
    arithmetic = gpu_kernels.Kernel("a", 2, 10**12, True, 1)
    traffic = gpu_kernels.Kernel("b", 1, 1, False, 10**12)
    assert arithmetic.seconds(chip) == pytest.approx(2 * (2e12 / (0.4 * 312e12) + 1.5e-6))
    assert traffic.seconds(chip) == pytest.approx(1e12 / (0.7 * 2039e9) + 1.5e-6)
    step = gpu_kernels.Step((arithmetic, traffic), 3, 4)
    assert step.launches == 3
    assert step.seconds(chip) == pytest.approx(arithmetic.seconds(chip) + traffic.seconds(chip) + 4 * 15e-6)
    assert step.most_expensive(chip, 1) == [traffic]


def test_unknown_loops_are_an_error():
    config = tiny_config(span={"limit": 2000}, train={"segment": 512})
    more = PROGRAM.replace(
        "ROOT %copy.1 = f32[1000]{0} copy(%a)",
        """%more = f32[1000]{0} while(%a), body=%other
  %again = f32[1000]{0} while(%a), body=%other""",
    )
    with pytest.raises(ScheduleError, match="none of the far loops"):
        gpu_kernels.count_step(config, hlo.parse(more + "%other (g: f32[]) -> f32[] {\n}\n"), np.full((3, 2), 2000.0))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None,
    reason="needs requirements-cuda-plan.txt",
)
def test_small_model_on_eight_gpus():
    config = load("enwik8").changed({"model.compute_dtype": "bfloat16"})
    program = gpu_kernels.compile_step(config, Machine.parse("a100:8").devices())
    settings = roofline.span_settings(config) | {"2048": np.full((12, 8), 2048.0)}
    steps = {name: gpu_kernels.count_step(config, program, z_LH) for name, z_LH in settings.items()}
    found = {name: (step.turns, step.launches, step.seconds(CHIPS["a100"]) * 1e3) for name, step in steps.items()}
    expected = {"start": (0, 2317, 24.6), "trained profile": (172, 6617, 51.2), "2048": (1152, 31117, 201.2)}
    for name, numbers in expected.items():
        assert found[name] == pytest.approx(numbers, rel=0.05), name
    # Heads that reach no further than the near part must not pay for the far one.
    assert steps["start"].launches <= 2317
