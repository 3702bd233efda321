"""Lossless compression with the model (`--mode=compress`, `--mode=decompress`). A better model gives a smaller file.

An arithmetic coder (constriction's range coder) spends −log2 p bits on a byte of probability p under the model. It
rounds p to a multiple of 2⁻²⁴, but not to 0, so any symbol can be coded. The text is cut into streams that are read in
parallel, one byte of each at a time:

    read the previous bytes → logits → probabilities → code the next byte of every stream, into one file

Packing and unpacking run the same compiled function on the same inputs, one position at a time, because the last bit of
a probability affects how all later bytes are decoded. Probabilities are bit-identical in every run on one machine. On
another machine they may differ; the checksum then rejects the result. A byte that is not in the vocabulary is coded as
an escape and 8 bits, and the model reads symbol 0 in its place. The escape's probability adapts to its frequency.

    magic "ADSPAN", version, method │ hash of the model │ streams, length, CRC-32 of the text │ code │ CRC-32 of it all
"""

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import constriction
import numpy as np

from adaptive_span_jax.data import corpus
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.inference.loaded_model import LoadedModel

SUFFIX = ".adspan"
_MAGIC, _VERSION = b"ADSPAN", 1
_HEADER, _TRAILER = struct.Struct("<6sBB16sIQI"), struct.Struct("<I")
_STORED, _CODED = 0, 1

# Every stream starts from empty memory, which costs bits, so each of several streams has at least this many bytes.
_BYTES_PER_STREAM, _MAX_STREAMS = 16_384, 64

_CATEGORICAL = constriction.stream.model.Categorical(perfect=False)
_BYTE = constriction.stream.model.Uniform(256)


class Header(NamedTuple):
    """The header of a compressed file."""

    magic: bytes
    version: int
    method: int
    model: bytes
    streams: int
    length: int
    crc: int


def pack(model: LoadedModel, text: bytes, on_progress: Callable[[float], None] = lambda share: None) -> bytes:
    """The compressed file of a text."""
    streams = max(1, min(len(text) // _BYTES_PER_STREAM, _MAX_STREAMS))
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
    # Incompressible text is stored as it is.
    method, body = (_CODED, code) if len(code) < len(text) else (_STORED, text)
    header = Header(_MAGIC, _VERSION, method, bytes.fromhex(model.hash), streams, len(text), zlib.crc32(text))
    packed = _HEADER.pack(*header) + body
    return packed + _TRAILER.pack(zlib.crc32(packed))


def check(packed: bytes, name: str) -> Header:
    """The header of a compressed file; raises if the file is damaged or not a compressed file."""
    smallest = _HEADER.size + _TRAILER.size
    if len(packed) < smallest or packed[: len(_MAGIC)] != _MAGIC:
        raise UserError(f"{name} was not written by --mode=compress")
    header = Header(*_HEADER.unpack(packed[: _HEADER.size]))
    if header.version != _VERSION:
        raise UserError(
            f"{name} has format {header.version}, but this program reads format {_VERSION}; use a newer version"
        )
    actual, expected = zlib.crc32(packed[: -_TRAILER.size]), _TRAILER.unpack(packed[-_TRAILER.size :])[0]
    if actual != expected:
        raise UserError(f"{name} is damaged: its checksum is {actual:08x} instead of {expected:08x}; use another copy")
    return header


def unpack(
    model: LoadedModel, packed: bytes, name: str, on_progress: Callable[[float], None] = lambda share: None
) -> bytes:
    """The text in a compressed file; raises if it is damaged or was compressed by another model."""
    header = check(packed, name)
    if header.model.hex() != model.hash:
        raise UserError(
            f"{name} was compressed by model {header.model.hex()[:12]}, but this is model {model.hash[:12]} (step "
            f"{model.step}); pass the --workdir and --step of the former"
        )
    body = packed[_HEADER.size : -_TRAILER.size]
    text = body if header.method == _STORED else _decode(model, header, body, on_progress)
    if zlib.crc32(text) != header.crc:
        raise UserError(
            f"{name} cannot be restored here: the model's probabilities differ from those at compression. Use the same "
            "machine and the same versions of jax and of this program"
        )
    return text


def _decode(model: LoadedModel, header: Header, body: bytes, on_progress: Callable[[float], None]) -> bytes:
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

    def __init__(self, model: LoadedModel, streams: int):
        self.escape = len(model.vocabulary)
        self.byte_of_id = np.append(corpus.byte_of_id(model.vocabulary), np.uint8(0))
        self.id_of_byte = corpus.id_of_byte(model.vocabulary, missing=self.escape)
        self._model, self._streams = model, streams
        self._state = model.start(streams)
        self._read, self._escapes = 0, 0

    def read(self, id_B: np.ndarray) -> None:
        """Extends the streams by these symbols, and finished streams by symbol 0."""
        token_B1 = np.zeros((self._streams, 1), np.int32)
        token_B1[: len(id_B), 0] = np.where(id_B == self.escape, 0, id_B)
        self._state = self._model.extend(token_B1, self._state)
        self._read += len(id_B)
        self._escapes += int((id_B == self.escape).sum())

    def probabilities(self, active: int) -> np.ndarray:
        """One row for each unfinished stream."""
        logits_BV = np.asarray(self._state.logits_BV[:active], np.float64)
        probability_BV = np.exp(logits_BV - logits_BV.max(axis=1, keepdims=True))
        escape = (self._escapes + 1) / (self._read + 4096)
        probability_BV *= (1 - escape) / probability_BV.sum(axis=1, keepdims=True)
        return np.pad(probability_BV, [(0, 0), (0, 1)], constant_values=escape)


def _active(length: int, streams: int) -> np.ndarray:
    """The number of streams that have an n-th symbol: active_N. The first few may be one symbol longer."""
    each, rest = divmod(length, streams)
    return np.array([streams] * each + [rest] * (rest > 0), np.int64)


def _cut(text: bytes, streams: int) -> np.ndarray:
    """The text cut into streams, one per column: byte_NB."""
    active_N = _active(len(text), streams)
    byte_NB, start = np.zeros((len(active_N), streams), np.uint8), 0
    for stream in range(streams):
        size = int((active_N > stream).sum())
        byte_NB[:size, stream] = np.frombuffer(text, np.uint8, size, start)
        start += size
    return byte_NB
