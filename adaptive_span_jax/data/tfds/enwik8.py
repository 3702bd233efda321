"""TFDS builder of enwik8."""

from adaptive_span_jax.data.tfds.builder import TextBuilder
from adaptive_span_jax.data.tfds.source import Source


class Enwik8(TextBuilder):
    """The first 100,000,000 bytes of an English Wikipedia dump, as raw bytes."""

    SOURCE = Source(
        name="enwik8",
        url="http://mattmahoney.net/dc/enwik8.zip",
        zip_bytes=36_445_475,
        zip_sha256="547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc",
        text_bytes=100_000_000,
        text_sha256="2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
    )
    DESCRIPTION = (
        "The first 100,000,000 bytes of the English Wikipedia dump of 3 March 2006: XML with markup, UTF-8, 205 "
        "different byte values. The first 90 million bytes are train, the next 5 million dev, the last 5 million test. "
        "Results are in bits per byte, though often written as bits per character. Concatenating the records of a "
        "split in order gives its bytes exactly."
    )
    CITATION = """@misc{mahoney2006large,
  author = {Matt Mahoney},
  title = {Large Text Compression Benchmark},
  year = {2006},
  url = {http://mattmahoney.net/dc/text.html},
}"""
