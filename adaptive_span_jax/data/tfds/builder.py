"""The common part of the TFDS builders of enwik8 and text8: one text, cut at 90 % and 95 %, in records of 1 MB."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import tensorflow_datasets as tfds
from rich.console import Console
from rich.progress import track

from adaptive_span_jax.data.tfds.prepared import VERSION
from adaptive_span_jax.data.tfds.source import Source, checked_text, downloaded

RECORD_BYTES = 2**20


class TextBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A text in its original order, without shuffling, written as array_record, which needs no TensorFlow.

    `archive` is a local copy to use instead of downloading. The text is always checked against `SOURCE`; a download is
    also checked before it is decompressed. It does not use `dl_manager`, which neither retries an interrupted transfer
    nor checks the text inside.
    """

    VERSION = tfds.core.Version(VERSION)
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "First release: splits train, dev and test of 90, 5 and 5 %."}
    SOURCE: ClassVar[Source]
    DESCRIPTION: ClassVar[str]
    CITATION: ClassVar[str]
    HOMEPAGE = "http://mattmahoney.net/dc/textdata.html"

    def __init__(self, *, archive: str = "", **keywords: Any) -> None:
        super().__init__(file_format="array_record", **keywords)
        self.archive = archive

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.DESCRIPTION,
            features=tfds.features.FeaturesDict({"text": tfds.features.Text()}),
            homepage=self.HOMEPAGE,
            citation=self.CITATION,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        if self.archive:
            path = Path(self.archive).expanduser()
        else:
            path = downloaded(self.SOURCE, Path(dl_manager.download_dir))
        text = checked_text(self.SOURCE, path)
        train_end, dev_end = len(text) * 90 // 100, len(text) * 95 // 100
        return {
            "train": self._generate_examples("train", text[:train_end]),
            "dev": self._generate_examples("dev", text[train_end:dev_end]),
            "test": self._generate_examples("test", text[dev_end:]),
        }

    def _generate_examples(self, split: str, text: bytes) -> Iterator[tuple[int, dict[str, bytes]]]:
        starts = range(0, len(text), RECORD_BYTES)
        console = Console(stderr=True)
        for start in track(starts, f"Preparing {self.name}, {split}", console=console):
            yield start, {"text": text[start : start + RECORD_BYTES]}
