"""Where the user's cache is."""

import subprocess
import sys
from pathlib import Path

import pytest

from adaptive_span_jax.runtime import user_cache

SHOW = (
    "import jax; from adaptive_span_jax.runtime import user_cache; user_cache.keep_compiled(); "
    "print(jax.config.values['jax_compilation_cache_dir'])"
)


def test_the_directory_follows_the_standard(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.directory() == tmp_path / "adaptive_span_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert user_cache.directory() == Path("/home/somebody/.cache/adaptive_span_jax")


@pytest.mark.parametrize("told", ["", "elsewhere"])
def test_compiled_programs_are_kept_unless_told_otherwise(told, monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if told:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", told)
    found = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == (told or f"{tmp_path}/adaptive_span_jax/jax")
