"""`--mode=compress`: compresses a file with a run's model."""

from pathlib import Path

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference import codec
from adaptive_span_jax.inference.loaded_model import load
from adaptive_span_jax.runtime import storage, terminal
from adaptive_span_jax.runtime.command_line import command


def compress(directory: Path, which: str, source: Path, target: Path | None) -> int:
    """Compresses a file; returns the exit code."""
    text, target = read_input(source), target or source.with_name(source.name + codec.SUFFIX)
    check_not_existing(target)
    model = load(directory, which)
    with terminal.share_done(f"compressing {source.name}") as show:
        packed = codec.pack(model, text, show)
    write_output(target, packed)
    # By step number: only this checkpoint restores the file, even if training has continued.
    restore = {"mode": "decompress", "step": model.step, "input": target}
    if target.suffix != codec.SUFFIX:
        restore["output"] = source
    ratio = f", {8 * len(packed) / len(text):.3f} bits per byte" if text else ""
    terminal.show_block(
        f"Compressed by {directory}, step {model.step:,}",
        {
            "from": f"{source}, {terminal.counted(len(text), 'byte')}",
            "to": f"{target}, {terminal.counted(len(packed), 'byte')}{ratio}",
            "restore it": command(directory, **restore),
        },
    )
    return 0


def read_input(path: Path) -> bytes:
    """The file that --input names."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--input={path} cannot be read ({error.strerror})") from error


def check_not_existing(path: Path) -> None:
    """Raises if the file to write exists."""
    if path.exists():
        raise UserError(f"{path} already exists; choose another file with --output")


def write_output(path: Path, content: bytes) -> None:
    """Writes the file that --output names, atomically."""
    try:
        storage.write_bytes(path, content)
    except OSError as error:
        raise UserError(f"--output={path} cannot be written ({error.strerror})") from error
