"""Folders to seal in tests."""

from pathlib import Path

from adaptive_span_jax.checkpoint import sealing

CONTENT = {"a": b"one", "deep/er/b": bytes(range(256)), "deep/c": b"three", "deep/empty": b""}


def make_sealed(directory: Path, step: int = 5) -> Path:
    folder = sealing.unfinished(directory, step)
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    sealing.seal(directory, step)
    return directory / str(step)
