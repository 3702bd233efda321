"""Prepared corpora on disk: built once, by whichever process is first, and read in a fraction of a second."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive_span_jax.data.tfds.source import checked_text
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import locking
from adaptive_span_jax.runtime.terminal import counted

if TYPE_CHECKING:
    from adaptive_span_jax.data.tfds.builder import TextBuilder

VERSION = "1.0.0"  # of the records of both corpora; increase it when their content or layout changes
SPLITS = ("train", "dev", "test")


def prepare(name: str, directory: Path, archive: str = "") -> None:
    """Builds the records of enwik8 or text8 below `directory` unless they exist, from `archive` or a download."""
    if is_prepared(name, directory):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locking.hold(directory / f".{name}.lock", wait=True) as alone:
            if alone:
                _remove_leftovers(name, directory)
            _build(name, directory, archive)  # TFDS does nothing if another process built it meanwhile
    except OSError as error:
        # Without a lock, two processes may build at once; the second then fails to rename its result over the first's.
        if not is_prepared(name, directory):
            raise UserError(
                f"{name} could not be prepared in {directory}: {error}; "
                "choose another folder with --config.data.directory=PATH"
            ) from error


def is_prepared(name: str, directory: Path) -> bool:
    """Whether complete records exist; the folder gets its name only when it is complete."""
    return (folder(name, directory) / "dataset_info.json").exists()


def check_archive(name: str, archive: str) -> None:
    """Raises if the text of a local archive is not the published one."""
    checked_text(_builder(name).SOURCE, Path(archive).expanduser())


def read(name: str, directory: Path) -> tuple[bytearray, bytearray, bytearray]:
    """The prepared texts of train, dev and test.

    Does not use TFDS, whose import takes longer than reading 100 MB; `tests/data/tfds/` compares the two.
    """
    place = folder(name, directory)
    try:
        train, dev, test = (_read_split(place, f"{name}-{split}.array_record") for split in SPLITS)
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(
            f"The prepared {name} in {place} is damaged: {error}. Delete that folder to prepare it again"
        ) from error
    return train, dev, test


def folder(name: str, directory: Path) -> Path:
    """The folder of a corpus's prepared records."""
    return directory / name / VERSION


def _read_split(folder: Path, prefix: str) -> bytearray:
    from array_record.python import array_record_module  # imported here, because only enwik8 and text8 need it

    shards = sorted(folder.glob(f"{prefix}-*-of-*"))
    if not shards or len(shards) != int(shards[0].name.rpartition("-")[2]):
        raise ValueError(f"incomplete: only {counted(len(shards), 'file')} named {prefix}-…")
    text = bytearray()
    for shard in shards:
        reader = array_record_module.ArrayRecordReader(str(shard))
        # One by one takes half the time of reading all at once, because of memory traffic.
        for index in range(reader.num_records()):
            text += _text(reader.read([index])[0])
        reader.close()
    return text


def _text(record: bytes) -> memoryview:
    """The only feature of a serialized tf.train.Example: Example.features.feature["text"].bytes_list.value."""
    message = memoryview(record)
    for field in (1, 1, 2, 1, 1):
        message = _field(message, field)
    return message


def _field(message: memoryview, number: int) -> memoryview:
    """The first field with this number, in a protocol buffer with only length-delimited fields."""
    position = 0
    while True:
        tag, position = message[position], position + 1
        length = shift = 0
        while True:
            byte, position = message[position], position + 1
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        end = position + length
        if end > len(message):
            raise ValueError("a record is truncated")
        if tag == number << 3 | 2:
            return message[position:end]
        position = end


def _builder(name: str) -> type["TextBuilder"]:
    from adaptive_span_jax.data.tfds.enwik8 import Enwik8  # imports TFDS, which takes seconds
    from adaptive_span_jax.data.tfds.text8 import Text8

    return {"enwik8": Enwik8, "text8": Text8}[name]


def _build(name: str, directory: Path, archive: str) -> None:
    import tensorflow_datasets as tfds

    builder = _builder(name)(data_dir=directory, archive=archive)
    tfds.disable_progress_bar()  # the builder shows its own
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS reports a download of unknown size, even for a local file
        builder.download_and_prepare()


def _remove_leftovers(name: str, directory: Path) -> None:
    """Removes the files of a killed preparation."""
    for folder in (directory / name).glob("incomplete.*"):
        shutil.rmtree(folder)
    for partial in (directory / "downloads").glob(f"{name}.zip.*.part"):
        partial.unlink()
