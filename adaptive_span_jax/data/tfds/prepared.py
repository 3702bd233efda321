"""Prepared corpora on disk: built once, whoever comes first, and read back in a fraction of a second."""

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

VERSION = "1.0.0"  # of the records of both corpora; a change of their content or layout needs a new one
SPLITS = ("train", "dev", "test")


def prepare(name: str, directory: Path, archive: str = "") -> None:
    """Builds the records of enwik8 or text8 below `directory`, from `archive` or else a download, if not there yet."""
    if is_prepared(name, directory):
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locking.hold(directory / f".{name}.lock", wait=True) as alone:
            if alone:
                _remove_leftovers(name, directory)
            _build(name, directory, archive)  # TFDS does nothing if somebody else did it while we waited
    except OSError as error:
        # Without a lock two processes may build at once; the second then cannot rename its result over the first's.
        if not is_prepared(name, directory):
            raise UserError(
                f"{name} could not be prepared in {directory}: {error}; "
                "choose another folder with --config.data.directory=PATH"
            ) from error


def is_prepared(name: str, directory: Path) -> bool:
    """Whether complete records are there: the folder gets its name only when they are."""
    return (folder(name, directory) / "dataset_info.json").exists()


def check_archive(name: str, archive: str) -> None:
    """Refuses a local copy whose text is not the published one."""
    checked_text(_builder(name).SOURCE, Path(archive).expanduser())


def read(name: str, directory: Path) -> tuple[bytearray, bytearray, bytearray]:
    """The prepared texts of train, dev and test.

    Read without TFDS, whose import takes longer than reading 100 MB; `tests/datasets/` holds it against TFDS.
    """
    place = folder(name, directory)
    try:
        train, dev, test = (_read_split(place, f"{name}-{split}.array_record") for split in SPLITS)
    except (OSError, ValueError, RuntimeError, IndexError) as error:
        raise UserError(
            f"The prepared {name} in {place} is damaged: {error}. Delete that folder; the next start prepares it anew"
        ) from error
    return train, dev, test


def folder(name: str, directory: Path) -> Path:
    """Where the records of a corpus are, once prepared."""
    return directory / name / VERSION


def _read_split(folder: Path, prefix: str) -> bytearray:
    from array_record.python import array_record_module  # here, so that only benchmark corpora need it

    shards = sorted(folder.glob(f"{prefix}-*-of-*"))
    if not shards or len(shards) != int(shards[0].name.rpartition("-")[2]):
        raise ValueError(f"found {counted(len(shards), 'file')} named {prefix}-…, not all of them")
    text = bytearray()
    for shard in shards:
        reader = array_record_module.ArrayRecordReader(str(shard))
        for index in range(reader.num_records()):  # one by one: half the time of all at once, which is memory traffic
            text += _text(reader.read([index])[0])
        reader.close()
    return text


def _text(record: bytes) -> memoryview:
    """The one feature in a serialized tf.train.Example: Example.features.feature["text"].bytes_list.value."""
    message = memoryview(record)
    for field in (1, 1, 2, 1, 1):
        message = _field(message, field)
    return message


def _field(message: memoryview, number: int) -> memoryview:
    """The first field with this number, in a protocol buffer all of whose fields have a length."""
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
            raise ValueError("a record ends early")
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
    with contextlib.redirect_stdout(io.StringIO()):  # TFDS announces a download of unknown size, even from a local file
        builder.download_and_prepare()


def _remove_leftovers(name: str, directory: Path) -> None:
    """Removes what a killed preparation left behind."""
    for folder in (directory / name).glob("incomplete.*"):
        shutil.rmtree(folder)
    for partial in (directory / "downloads").glob(f"{name}.zip.*.part"):
        partial.unlink()
