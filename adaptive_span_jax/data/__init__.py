"""From bytes to segments.

In: a corpus by name, or files. Out: token ids of train, dev and test (`corpus.Corpus`), and segments of parallel
streams (`segments.Streams`). NumPy only, no JAX. Start with `corpus.py`; `segments.py` cuts the segments that a step
reads; `text_files.py` finds and decompresses files; `entropy.py` is the order-2 baseline; `tfds/` downloads and
prepares enwik8 and text8.
"""
