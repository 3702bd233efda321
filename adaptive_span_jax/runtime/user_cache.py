"""The user's cache: prepared data and compiled programs."""

import os
from pathlib import Path


def directory() -> Path:
    """`~/.cache/adaptive_span_jax`, or below `XDG_CACHE_HOME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "adaptive_span_jax"


def keep_compiled() -> None:
    """Enables JAX's compilation cache in this directory, unless `JAX_COMPILATION_CACHE_DIR` is set.

    Entries are keyed by a hash of program, compiler and device. Of several connected processes only one writes. A
    damaged entry is recompiled.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(directory() / "jax"))
