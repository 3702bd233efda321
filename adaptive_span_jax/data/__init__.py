"""From bytes to segments.

In: a corpus by name, or files. Out: token ids of train, dev and test (`corpus.Corpus`), and segments of parallel
streams (`segments.Streams`). Numpy only: a text has nothing to do with devices. Start with `corpus.py`; `segments.py`
says what a step reads; `text_files.py` finds and unpacks files; `entropy.py` is the order-2 baseline; `tfds/`
downloads and prepares enwik8 and text8.
"""
