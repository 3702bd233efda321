"""Data is prepared once, even after a kill or by two processes at a time; and where it is stored."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import numpy.testing as npt
import pytest

from adaptive_span_jax.commands import prepare
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data import corpus
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime import locking
from tests.support.published_texts import data, enwik8_text, files_in

ROOT = Path(__file__).parents[3]


def test_preparing_twice_does_nothing_and_opening_needs_neither_archive_nor_tfds(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    corpus.prepare(config)
    before = {path: (tmp_path / "cache" / path).stat().st_mtime_ns for path in files_in(tmp_path / "cache")}
    (tmp_path / "enwik8.zip").unlink()
    corpus.prepare(config)
    program = f"""
import sys
from adaptive_span_jax.data import corpus
from adaptive_span_jax.runtime import locking as lock
from adaptive_span_jax.config import DataConfig
print(len(corpus.load({config!r}).train), sorted({{"jax", "tensorflow_datasets"}} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "18009 []"
    assert before == {path: (tmp_path / "cache" / path).stat().st_mtime_ns for path in files_in(tmp_path / "cache")}


SLOW_PREPARATION = """
import sys, time
from adaptive_span_jax.data import corpus
from adaptive_span_jax.runtime import locking as lock
from adaptive_span_jax.config import DataConfig
from adaptive_span_jax.data.tfds import builder
from adaptive_span_jax.data.tfds.enwik8 import Enwik8
from adaptive_span_jax.data.tfds.source import Source

def slowly(records, *_, **__):
    print("started", file=sys.stderr, flush=True)
    time.sleep({seconds})
    return records

builder.track = slowly
Enwik8.SOURCE = {facts!r}
corpus.prepare({config!r})
print("prepared", file=sys.stderr, flush=True)
"""


def start_preparation(config: DataConfig, seconds: float) -> subprocess.Popen:
    program = SLOW_PREPARATION.format(config=config, seconds=seconds, facts=Enwik8.SOURCE)
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def test_a_killed_preparation_starts_over_cleanly(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    (tmp_path / "cache" / "downloads").mkdir(parents=True)
    (tmp_path / "cache" / "downloads" / "enwik8.zip.abc.part").write_bytes(b"of a killed download")
    with start_preparation(config, seconds=60) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "started\n"
        process.send_signal(signal.SIGKILL)
    assert list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))
    loaded = corpus.load(config)
    assert loaded.decode(loaded.test) == enwik8_text()[19_010:]
    assert not list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))
    assert not list((tmp_path / "cache" / "downloads").glob("*.part"))


def test_of_two_preparations_at_once_one_waits_for_the_other(tmp_path):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    with start_preparation(config, seconds=0.3) as first, start_preparation(config, seconds=0.3) as second:
        outputs = sorted(process.communicate()[1].split() for process in (first, second))
    assert outputs == [["prepared"], ["started", "started", "started", "prepared"]]
    assert len(corpus.load(config).vocabulary) == 205


def test_without_locks_the_one_who_finishes_first_wins(tmp_path, monkeypatch):
    @contextlib.contextmanager
    def no_lock(path, wait):
        del path, wait
        yield False

    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    monkeypatch.setattr(locking, "hold", no_lock)
    generate = Enwik8._generate_examples

    def overtaken(self, split, text):
        monkeypatch.setattr(Enwik8, "_generate_examples", generate)
        corpus.prepare(config)
        return generate(self, split, text)

    monkeypatch.setattr(Enwik8, "_generate_examples", overtaken)
    corpus.prepare(config)
    assert len(corpus.load(config).vocabulary) == 205
    assert not list((tmp_path / "cache" / "enwik8").glob("incomplete.*"))


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"could not be prepared in .*file/cache.* --config.data.directory=PATH"):
        corpus.prepare(data(tmp_path / "file" / "cache", archive=tmp_path / "enwik8.zip"))


def test_prepared_data_goes_to_the_cache_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    corpus.prepare(DataConfig("enwik8", "", str(tmp_path / "enwik8.zip"), "", "keep", (0.9, 0.05, 0.05), 0))
    assert (tmp_path / "xdg" / "adaptive_span_jax" / "enwik8" / "1.0.0").is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    loaded = corpus.load(DataConfig("enwik8", "", str(tmp_path / "enwik8.zip"), "", "keep", (0.9, 0.05, 0.05), 0))
    assert (tmp_path / "home" / ".cache" / "adaptive_span_jax" / "enwik8" / "1.0.0").is_dir()
    npt.assert_array_equal(loaded.train[:3], [0, 1, 2])


@pytest.mark.parametrize("before", [False, True])
def test_the_mode_shows_what_it_made_and_what_was_there(tmp_path, capsys, before):
    config = data(tmp_path / "cache", archive=tmp_path / "enwik8.zip")
    if before:
        corpus.prepare(config)
    assert prepare.prepare(config) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"enwik8, {'already prepared' if before else 'prepared'}\n")
    for expected in (
        "train 18,009, dev 1,001, test 1,001",
        "205 symbols",
        corpus.load(config).fingerprint,
        str(tmp_path / "cache" / "enwik8" / "1.0.0"),
    ):
        assert expected in printed
