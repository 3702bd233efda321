"""Text → token ids: three splits, a vocabulary and a fingerprint. Every symbol is one byte."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data.text_files import files_under, read_text, stdlib_files, stdlib_folder
from adaptive_span_jax.data.tfds import prepared
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import user_cache
from adaptive_span_jax.runtime.terminal import counted

PUBLISHED_VOCABULARY_SIZES = {"enwik8": 205, "text8": 28}
PUBLISHED_SPLITS = (0.9, 0.05, 0.05)
TEXT8_END = b"\n"  # text8 contains no newline, and the end symbol is displayed as one


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """The ids of a text. `vocabulary[id]` is the symbol of an id; `unit` is byte or character, for bits per unit."""

    name: str
    unit: str
    train: np.ndarray
    dev: np.ndarray
    test: np.ndarray
    vocabulary: tuple[bytes, ...]
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of a text, all of whose symbols must be in the vocabulary."""
        return encode(text, self.vocabulary, self.name)

    def decode(self, ids: np.ndarray) -> bytes:
        """The text of the ids."""
        return decode(ids, self.vocabulary)


def encode(text: bytes, vocabulary: tuple[bytes, ...], name: str) -> np.ndarray:
    """The ids of a text, all of whose symbols must be in the vocabulary; `name` is the vocabulary's name in errors."""
    unseen = text.translate(None, delete=b"".join(vocabulary))
    if unseen:
        symbol = unseen[:1]
        raise UserError(
            f"The symbol {symbol!r} at byte {text.index(symbol)} is not among the {counted(len(vocabulary), 'symbol')} "
            f"of {name}; remove it, or train on text that contains it"
        )
    return _ids(text, vocabulary)


def decode(ids: np.ndarray, vocabulary: tuple[bytes, ...]) -> bytes:
    """The text of the ids."""
    return byte_of_id(vocabulary)[ids].tobytes()


def byte_of_id(vocabulary: tuple[bytes, ...]) -> np.ndarray:
    """The byte of every id: byte_V."""
    return np.frombuffer(b"".join(vocabulary), np.uint8)


def id_of_byte(vocabulary: tuple[bytes, ...], missing: int) -> np.ndarray:
    """The id of each of the 256 bytes; `missing` for bytes that are not in the vocabulary."""
    ids = np.full(256, missing, np.int32)
    ids[byte_of_id(vocabulary)] = np.arange(len(vocabulary))
    return ids


def symbols(vocabulary: str) -> tuple[bytes, ...]:
    """The vocabulary from a checkpoint's string, in which character i has the code of byte i of the vocabulary."""
    return tuple(bytes([symbol]) for symbol in vocabulary.encode("latin-1"))


def vocabulary_text(vocabulary: Sequence[bytes]) -> str:
    """A vocabulary as checkpoints store it: one latin-1 character per symbol. The inverse of `symbols`."""
    return b"".join(vocabulary).decode("latin-1")


def unit(data: DataConfig) -> str:
    """The unit of "bits per …"."""
    return "character" if data.source == "text8" else "byte"


def prepare(data: DataConfig) -> None:
    """Downloads, checks and stores what `load` reads, unless it exists. `files` and `stdlib` need no preparation.

    Two processes may call this at the same time on one file system: the second waits for the first.
    """
    _reject_unused_fields(data)
    if data.source in PUBLISHED_VOCABULARY_SIZES:
        prepared.prepare(data.source, _directory(data), data.archive)


def is_prepared(data: DataConfig) -> bool:
    """Whether `load` has nothing to prepare; always true for `files` and `stdlib`."""
    return data.source not in PUBLISHED_VOCABULARY_SIZES or prepared.is_prepared(data.source, _directory(data))


def place(data: DataConfig) -> Path:
    """Where the text is: the folder of prepared records, or the user's own file or folder."""
    if data.source in PUBLISHED_VOCABULARY_SIZES:
        return prepared.folder(data.source, _directory(data))
    return Path(data.path).expanduser() if data.source == "files" else stdlib_folder()


def check_archive(data: DataConfig) -> None:
    """Raises if `prepare` would reject the local archive; writes nothing."""
    _reject_unused_fields(data)
    if data.archive:
        prepared.check_archive(data.source, data.archive)


def load(data: DataConfig) -> Corpus:
    """The corpus of a config, prepared first if necessary."""
    _reject_unused_fields(data)
    texts: Sequence[bytes | bytearray]
    if data.source in PUBLISHED_VOCABULARY_SIZES:
        prepared.prepare(data.source, _directory(data), data.archive)
        texts = prepared.read(data.source, _directory(data))
    else:
        files = files_under(data.path) if data.source == "files" else stdlib_files()
        texts = split(read_text(files, data.max_bytes), data.splits)
    if data.newlines == "drop":
        texts = [text.replace(b"\n", b"") for text in texts]
    if data.source == "text8":  # literally as published
        texts = [text.strip(b" ") + TEXT8_END for text in texts]
    corpus = from_texts(data.source, unit(data), texts)
    _check_published_size(corpus, data)
    return corpus


def split(text: bytes, shares: Sequence[float]) -> list[bytes]:
    """Cuts a text into train, dev and test, in this order."""
    train_end, dev_end = round(len(text) * shares[0]), round(len(text) * (shares[0] + shares[1]))
    return [text[:train_end], text[train_end:dev_end], text[dev_end:]]


def from_texts(name: str, unit: str, texts: Sequence[bytes | bytearray]) -> Corpus:
    """Assigns ids in order of first appearance in train, as published; released checkpoints depend on this order.

    Symbols that occur only in dev or test get the following ids. The model never sees them in training and pays their
    full cost in evaluation; nothing fails.
    """
    for part, text in zip(prepared.SPLITS, texts, strict=True):
        if len(text) < 2:
            raise UserError(
                f"The {part} part of {name} has {counted(len(text), 'byte')}, but needs at least 2; "
                "use more text, or change config.data.splits"
            )
    vocabulary = _symbols_in_order(texts)
    train, dev, test = (_ids(text, vocabulary) for text in texts)
    fingerprint = hashlib.sha256(b"".join(vocabulary))
    for ids in (train, dev, test):
        fingerprint.update(b"%d:" % len(ids))  # so that the split boundaries count, too
        fingerprint.update(ids.data)
    return Corpus(name, unit, train, dev, test, vocabulary, fingerprint.hexdigest()[:12])


def _symbols_in_order(texts: Sequence[bytes | bytearray]) -> tuple[bytes, ...]:
    seen = b""
    for text in texts:
        for start in range(0, len(text), 2**16):  # nearly every piece has no new symbol, and `translate` runs at 2 GB/s
            unseen = text[start : start + 2**16].translate(None, delete=seen)
            seen += bytes(dict.fromkeys(unseen))
    return tuple(bytes([symbol]) for symbol in seen)


def _ids(text: bytes | bytearray, vocabulary: tuple[bytes, ...]) -> np.ndarray:
    table = id_of_byte(vocabulary, missing=0).astype(np.uint8).tobytes()
    ids = np.frombuffer(text.translate(table), np.uint8)
    ids.flags.writeable = False  # the fingerprint must stay valid
    return ids


def _directory(data: DataConfig) -> Path:
    return Path(data.directory).expanduser() if data.directory else user_cache.directory()


def _check_published_size(corpus: Corpus, data: DataConfig) -> None:
    expected = PUBLISHED_VOCABULARY_SIZES.get(data.source, len(corpus.vocabulary))
    if data.source == "enwik8" and data.newlines == "drop":
        expected -= 1
    if len(corpus.vocabulary) != expected:
        raise UserError(
            f"The prepared {data.source} in {_directory(data)} has {len(corpus.vocabulary)} symbols instead of the "
            f"published {expected}. Delete {_directory(data) / data.source} to prepare it again"
        )


def _reject_unused_fields(data: DataConfig) -> None:
    """Raises on fields that would have no effect: they are more likely a mistake."""
    published = data.source in PUBLISHED_VOCABULARY_SIZES
    for field, unused, instead in (
        ("path", data.path and data.source != "files", "set config.data.source=files to use it"),
        (
            "archive",
            data.archive and not published,
            "it is for enwik8 and text8; set config.data.path for your own text",
        ),
        ("max_bytes", data.max_bytes and published, "enwik8 and text8 are always used completely; set it to 0"),
        (
            "splits",
            data.splits != PUBLISHED_SPLITS and published,
            f"{data.source} has the fixed splits {PUBLISHED_SPLITS}",
        ),
    ):
        if unused:
            raise UserError(
                f"config.data.{field} is {getattr(data, field)!r}, but config.data.source is {data.source}: {instead}"
            )
