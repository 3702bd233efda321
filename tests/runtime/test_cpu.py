"""How programs are compiled for CPUs."""

import os
import subprocess
import sys

import jax
import pytest

from adaptive_span_jax.runtime import cpu, sharding


@pytest.mark.parametrize("cores_per_device", [1, 2])
def test_a_device_of_one_core_is_compiled_for_as_such(cores_per_device, monkeypatch):
    monkeypatch.setattr(cpu, "_cores", lambda: cores_per_device * jax.local_device_count())
    options = cpu.compiler_options(sharding.make_mesh())
    assert bool(options) == (cores_per_device == 1)
    # XLA refuses options that it does not know.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 2),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 8),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=1"}, 1),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 5),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "5"}, 5),  # as JAX has it
    ],
)
def test_the_users_number_of_devices_wins(environment, expected):
    program = """
from adaptive_span_jax.runtime import cpu
cpu._cores = lambda: 3
cpu.use_cores(streams=16)
print(cpu.jax.device_count())
"""
    others = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    found = subprocess.run([sys.executable, "-c", program], env=others | environment, capture_output=True, text=True)
    assert found.stdout == f"{expected}\n", found.stderr
