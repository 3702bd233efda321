"""`--mode=decompress`: restores a file that `--mode=compress` wrote."""

from pathlib import Path

from adaptive_span_jax.commands.compress import check_not_existing, read_input, write_output
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference import codec
from adaptive_span_jax.inference.loaded_model import load
from adaptive_span_jax.runtime import terminal


def decompress(directory: Path, which: str, source: Path, target: Path | None) -> int:
    """Restores a compressed file; returns the exit code."""
    if target is None and source.suffix != codec.SUFFIX:
        raise UserError(f"--input={source} does not end in {codec.SUFFIX}; choose the output file with --output")
    packed, target = read_input(source), target or source.with_suffix("")
    check_not_existing(target)
    codec.check(packed, str(source))
    model = load(directory, which)
    with terminal.share_done(f"decompressing {source.name}") as show:
        text = codec.unpack(model, packed, str(source), show)
    write_output(target, text)
    terminal.say(f"{target}: {terminal.counted(len(text), 'byte')}, checksum matches")
    return 0
