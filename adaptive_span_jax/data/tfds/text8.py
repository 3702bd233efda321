"""TFDS builder of text8."""

from adaptive_span_jax.data.tfds.builder import TextBuilder
from adaptive_span_jax.data.tfds.source import Source


class Text8(TextBuilder):
    """100,000,000 characters of cleaned English Wikipedia text: a to z and space."""

    SOURCE = Source(
        name="text8",
        url="http://mattmahoney.net/dc/text8.zip",
        zip_bytes=31_344_016,
        zip_sha256="a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232",
        text_bytes=100_000_000,
        text_sha256="6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
    )
    DESCRIPTION = (
        "100,000,000 characters of English Wikipedia text of 2006, without markup, in lower case, numbers spelled out "
        "and everything else turned into single spaces: the 27 symbols a to z and space. The first 90 million are "
        "train, the next 5 million dev, the last 5 million test. Results are in bits per character. Concatenating the "
        "records of a split in order gives its characters exactly, spaces at its ends included."
    )
    CITATION = """@misc{mahoney2006about,
  author = {Matt Mahoney},
  title = {About the Test Data},
  year = {2006},
  url = {http://mattmahoney.net/dc/textdata.html},
}"""
