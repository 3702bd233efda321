"""Kernels and turns of a step on GPUs, by hand for a small program."""

import numpy as np
import pytest

from adaptive_span_jax.planning import gpu_kernels, hlo
from adaptive_span_jax.planning.bundles import ScheduleError
from adaptive_span_jax.planning.topology import CHIPS
from tests.conftest import tiny_config
from tests.support.programs import GPU_PROGRAM


def test_kernels_run_as_often_as_their_loops_turn():
    config = tiny_config(model={"layers": 3, "heads": 2}, span={"limit": 2000, "ramp": 32}, train={"segment": 512})
    z_LH = np.array([[0, 0], [100, 0], [600, 1100]], float)
    step = gpu_kernels.count_step(config, hlo.parse(GPU_PROGRAM), z_LH)
    runs = {kernel.name: kernel.runs for kernel in step.kernels}
    # Of the second layer one head is read, of the third both, and the third block of that by one alone.
    far = {"copy.2": 2, "copy.1": 2, "copy.4": 1, "copy.5": 1 + 1, "copy.6": 1}
    assert runs == pytest.approx({"copy.3": 1, "fusion": 3} | far)
    assert step.turns == pytest.approx(sum(far.values()))
    assert step.conditions == pytest.approx(sum(far.values()) + 3 + 4 * 2)  # every loop reads one more to end
    assert {kernel.name: kernel.place for kernel in step.kernels} == {
        "copy.3": gpu_kernels.OUTSIDE,
        "fusion": gpu_kernels.LAYERS,
        **dict.fromkeys(far, gpu_kernels.FAR_LOOPS),
    }
    assert step.launches_in(gpu_kernels.FAR_LOOPS) == pytest.approx(sum(far.values()))
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
    two = GPU_PROGRAM.replace("turns_0_3", "turns_0_2").replace('"n":"3"', '"n":"2"')
    inlined = 'while(%f), body=%head, metadata={op_name="jvp(turns_2_3)/while/body/while"}'
    two = two.replace("%copy.3 =", f"%while.4 = f32[1000]{{0}} {inlined}\n  %copy.3 =")
    step = gpu_kernels.count_step(config, hlo.parse(two), z_LH)
    runs = [(kernel.name, kernel.runs) for kernel in step.kernels]
    assert runs == [
        *zip(("copy.2", "copy.1", "copy.4", "copy.5", "copy.6"), (1, 2, 1, 1, 0), strict=True),
        ("copy.3", 1),
        ("fusion", 2),
        *zip(("copy.2", "copy.1", "copy.4", "copy.5", "copy.6"), (1, 0, 0, 1, 1), strict=True),
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
        gpu_kernels.count_step(config, hlo.parse(text), z_LH)
        for text in (GPU_PROGRAM, GPU_PROGRAM.replace(fusion, library))
    )
    assert ours == theirs
    with pytest.raises(ScheduleError, match="what this kernel"):
        gpu_kernels.count_step(config, hlo.parse(GPU_PROGRAM.replace(fusion, library).replace("cublas", "other")), z_LH)


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
    assert (arithmetic.limit(chip), traffic.limit(chip)) == (gpu_kernels.ARITHMETIC, gpu_kernels.BANDWIDTH)
    assert gpu_kernels.Kernel("c", 1, 1, True, 1).limit(chip) == gpu_kernels.LAUNCHES
    assert list(step.limits(chip)) == ["bandwidth", "arithmetic", "conditions", "launches"]
    assert step.limits(chip) == pytest.approx(
        {
            "bandwidth": 1e12 / (0.7 * 2039e9),
            "arithmetic": 2 * 2e12 / (0.4 * 312e12),
            "conditions": 60e-6,
            "launches": 4.5e-6,
        }
    )


def test_unknown_loops_are_an_error():
    config = tiny_config(span={"limit": 2000}, train={"segment": 512})
    more = GPU_PROGRAM.replace(
        "ROOT %copy.1 = f32[1000]{0} copy(%a)",
        """%more = f32[1000]{0} while(%a), body=%other
  %again = f32[1000]{0} while(%a), body=%other""",
    )
    with pytest.raises(ScheduleError, match="none of the far loops"):
        gpu_kernels.count_step(config, hlo.parse(more + "%other (g: f32[]) -> f32[] {\n}\n"), np.full((3, 2), 2000.0))
