"""The public names of the package, and that importing it is cheap."""

import subprocess
import sys

import pytest

import adaptive_span_jax


def test_every_public_name_is_there():
    for name in adaptive_span_jax.__all__:
        assert getattr(adaptive_span_jax, name).__name__ == name
        assert name in dir(adaptive_span_jax)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = adaptive_span_jax.nothing


def test_importing_the_package_does_not_import_jax():
    program = "import sys, adaptive_span_jax; print(sorted({'jax', 'flax', 'orbax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
