"""`--mode=compress` and `--mode=decompress`: the model as a lossless compressor. A better model makes a smaller file.

An arithmetic coder (constriction's range coder) spends −log2 p bits on a byte that the model gives probability p. It
rounds p to 24 bits, at least 1 of them, so any symbol can be coded. The text is cut into streams that are read side by
side, one byte of each at a time:

    read the bytes before → logits → probabilities → code the next byte of every stream, into one file

Writing and reading run the identical compiled function on identical inputs, one position at a time, since the last bit
of a probability decides what the bytes after it mean. The numbers are the same in every run on the same machine;
elsewhere they may not be, and then the check sum refuses the result. A byte that the vocabulary lacks is an escape and
8 bits, and the model reads symbol 0 for it; the escape's probability follows how often it was needed.

    magic "ADSPAN", version, method │ hash of the model │ streams, length, CRC-32 of the text │ code │ CRC-32 of it all
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import constriction
import numpy as np

from adaptive_span_jax import display
from adaptive_span_jax.command_line import command
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.trained_model import TrainedModel, load

SUFFIX = ".adspan"
_MAGIC, _VERSION = b"ADSPAN", 1
_HEADER, _TRAILER = struct.Struct("<6sBB16sIQI"), struct.Struct("<I")
_STORED, _CODED = 0, 1

# A stream starts from empty memory, which costs something: it gets at least so many bytes, except if there is only one.
_BYTES_PER_STREAM, _MOST_STREAMS = 16_384, 64

_CATEGORICAL = constriction.stream.model.Categorical(perfect=False)
_BYTE = constriction.stream.model.Uniform(256)


class Header(NamedTuple):
    """What a compressed file says of itself."""

    magic: bytes
    version: int
    method: int
    model: bytes
    streams: int
    length: int
    crc: int


def compress(directory: Path, which: str, source: Path, target: Path | None) -> int:
    """Compresses a file; answers the exit code."""
    text, target = _read(source), target or source.with_name(source.name + SUFFIX)
    _refuse_to_overwrite(target)
    model = load(directory, which)
    with display.share_done(f"compressing {source.name}") as show:
        packed = pack(model, text, show)
    _write(target, packed)
    # The step by its number: it is this model that restores the file, also when training has moved on.
    restore = {"mode": "decompress", "step": model.step, "input": target}
    if target.suffix != SUFFIX:
        restore["output"] = source
    ratio = f", {8 * len(packed) / len(text):.3f} bits per byte" if text else ""
    display.show_block(
        f"Compressed by {directory}, step {model.step:,}",
        {
            "from": f"{source}, {display.counted(len(text), 'byte')}",
            "to": f"{target}, {display.counted(len(packed), 'byte')}{ratio}",
            "restore it": command(directory, **restore),
        },
    )
    return 0


def decompress(directory: Path, which: str, source: Path, target: Path | None) -> int:
    """Restores what `compress` made; answers the exit code."""
    if target is None and source.suffix != SUFFIX:
        raise UserError(f"--input={source} does not end in {SUFFIX}; name the file to write with --output")
    packed, target = _read(source), target or source.with_suffix("")
    _refuse_to_overwrite(target)
    check(packed, str(source))
    model = load(directory, which)
    with display.share_done(f"decompressing {source.name}") as show:
        text = unpack(model, packed, str(source), show)
    _write(target, text)
    display.say(f"{target}: {display.counted(len(text), 'byte')}, check sum right")
    return 0


def pack(model: TrainedModel, text: bytes, on_progress: Callable[[float], None] = lambda share: None) -> bytes:
    """The compressed file."""
    streams = max(1, min(len(text) // _BYTES_PER_STREAM, _MOST_STREAMS))
    encoder, predictor = constriction.stream.queue.RangeEncoder(), _Predictor(model, streams)
    byte_NB, active_N = _cut(text, streams), _active(len(text), streams)
    for number, active in enumerate(active_N):
        byte_B = byte_NB[number, :active].astype(np.int32)
        id_B = predictor.id_of_byte[byte_B]
        literal_B = id_B == predictor.escape
        if number:
            encoder.encode(id_B, _CATEGORICAL, predictor.probabilities(active))
        else:
            literal_B[:] = True
        if literal_B.any():
            encoder.encode(byte_B[literal_B], _BYTE)
        predictor.read(id_B)
        on_progress(number / len(active_N))
    code = encoder.get_compressed().astype("<u4").tobytes() if text else b""
    # What the model cannot predict at all is better left as it is.
    method, body = (_CODED, code) if len(code) < len(text) else (_STORED, text)
    header = Header(_MAGIC, _VERSION, method, bytes.fromhex(model.hash), streams, len(text), zlib.crc32(text))
    packed = _HEADER.pack(*header) + body
    return packed + _TRAILER.pack(zlib.crc32(packed))


def check(packed: bytes, name: str) -> Header:
    """The header of a compressed file that is what was written."""
    smallest = _HEADER.size + _TRAILER.size
    if len(packed) < smallest or packed[: len(_MAGIC)] != _MAGIC:
        raise UserError(f"{name} is not a file that --mode=compress has made")
    header = Header(*_HEADER.unpack(packed[: _HEADER.size]))
    if header.version != _VERSION:
        raise UserError(f"{name} has format {header.version}, this program reads format {_VERSION}; use a newer one")
    found, expected = zlib.crc32(packed[: -_TRAILER.size]), _TRAILER.unpack(packed[-_TRAILER.size :])[0]
    if found != expected:
        raise UserError(f"{name} is damaged: its check sum is {found:08x} instead of {expected:08x}; take another copy")
    return header


def unpack(
    model: TrainedModel, packed: bytes, name: str, on_progress: Callable[[float], None] = lambda share: None
) -> bytes:
    """The text in a compressed file; refuses one that is damaged or was made by another model."""
    header = check(packed, name)
    if header.model.hex() != model.hash:
        raise UserError(
            f"{name} was compressed by the model {header.model.hex()[:12]}, this one is {model.hash[:12]} (step "
            f"{model.step}); name its --workdir and --step"
        )
    body = packed[_HEADER.size : -_TRAILER.size]
    text = body if header.method == _STORED else _decode(model, header, body, on_progress)
    if zlib.crc32(text) != header.crc:
        raise UserError(
            f"{name} cannot be restored here: the model's probabilities differ from those it was compressed with. Use "
            "the machine and the versions of jax and of this program with which it was made"
        )
    return text


def _decode(model: TrainedModel, header: Header, body: bytes, on_progress: Callable[[float], None]) -> bytes:
    decoder = constriction.stream.queue.RangeDecoder(np.frombuffer(body, "<u4").astype(np.uint32))
    predictor, active_N = _Predictor(model, header.streams), _active(header.length, header.streams)
    byte_NB = np.zeros((len(active_N), header.streams), np.uint8)
    for number, active in enumerate(active_N):
        id_B = np.full(active, predictor.escape)
        if number:
            id_B = np.asarray(decoder.decode(_CATEGORICAL, predictor.probabilities(active)))
        literal_B = id_B == predictor.escape
        byte_B = predictor.byte_of_id[id_B]
        if literal_B.any():
            byte_B[literal_B] = decoder.decode(_BYTE, int(literal_B.sum()))
        byte_NB[number, :active] = byte_B
        predictor.read(predictor.id_of_byte[byte_B])
        on_progress(number / len(active_N))
    return b"".join(byte_NB[: (active_N > stream).sum(), stream].tobytes() for stream in range(header.streams))


class _Predictor:
    """The probabilities of every stream's next symbol; the last symbol is the escape."""

    def __init__(self, model: TrainedModel, streams: int):
        self.escape = len(model.vocabulary)
        self.byte_of_id = np.frombuffer(b"".join(model.vocabulary) + b"\0", np.uint8)
        self.id_of_byte = np.full(256, self.escape, np.int32)
        self.id_of_byte[self.byte_of_id[:-1]] = np.arange(self.escape)
        self._model, self._streams = model, streams
        self._reading = model.start(streams)
        self._read, self._escapes = 0, 0

    def read(self, id_B: np.ndarray) -> None:
        """The streams go on by these symbols; some may have ended, and go on by anything."""
        token_B1 = np.zeros((self._streams, 1), np.int32)
        token_B1[: len(id_B), 0] = np.where(id_B == self.escape, 0, id_B)
        self._reading = self._model.read_on(token_B1, self._reading)
        self._read += len(id_B)
        self._escapes += int((id_B == self.escape).sum())

    def probabilities(self, active: int) -> np.ndarray:
        """One row for each stream that has not ended."""
        logits_BV = np.asarray(self._reading.logits_BV[:active], np.float64)
        share_BV = np.exp(logits_BV - logits_BV.max(axis=1, keepdims=True))
        escape = (self._escapes + 1) / (self._read + 4096)
        share_BV *= (1 - escape) / share_BV.sum(axis=1, keepdims=True)
        return np.pad(share_BV, [(0, 0), (0, 1)], constant_values=escape)


def _active(length: int, streams: int) -> np.ndarray:
    """How many streams have a symbol number n; the first few may have one more than the others."""
    whole, more = divmod(length, streams)
    return np.array([streams] * whole + [more] * (more > 0), np.int64)


def _cut(text: bytes, streams: int) -> np.ndarray:
    """The text as columns, one per stream."""
    active_N = _active(len(text), streams)
    byte_NB, start = np.zeros((len(active_N), streams), np.uint8), 0
    for stream in range(streams):
        size = int((active_N > stream).sum())
        byte_NB[:size, stream] = np.frombuffer(text, np.uint8, size, start)
        start += size
    return byte_NB


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"--input={path} cannot be read ({error.strerror})") from error


def _refuse_to_overwrite(path: Path) -> None:
    if path.exists():
        raise UserError(f"{path} exists and is not overwritten; name another file with --output")


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    replacement = path.with_name(path.name + ".new")
    try:
        replacement.write_bytes(content)
        replacement.replace(path)
    except OSError as error:
        raise UserError(f"--output={path} cannot be written ({error.strerror})") from error
