"""How programs are compiled for machines without accelerators."""

import jax
import pytest

from adaptive_span_jax import cpu, sharding


@pytest.mark.parametrize("cores_per_device", [1, 2])
def test_a_device_of_one_core_is_compiled_for_as_such(cores_per_device, monkeypatch):
    monkeypatch.setattr(cpu, "_cores", lambda: cores_per_device * jax.local_device_count())
    options = cpu.compiler_options(sharding.make_mesh())
    assert bool(options) == (cores_per_device == 1)
    # XLA refuses options that it does not know.
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1) == 2
