"""The user's cache: prepared data, and compiled programs, so that a second start need not compile again."""

import os
from pathlib import Path


def directory() -> Path:
    """`~/.cache/adaptive_span_jax`, or below `XDG_CACHE_HOME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "adaptive_span_jax"


def keep_compiled() -> None:
    """Lets JAX keep compiled programs here, unless it has been told of another place (`JAX_COMPILATION_CACHE_DIR`).

    Entries are named by a hash of program, compiler and device; of several processes that work together one writes. An
    entry that is damaged is compiled anew.
    """
    import jax

    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(directory() / "jax"))
