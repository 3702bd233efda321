"""enwik8 and text8 as TFDS datasets that need no TensorFlow.

`source.py` finds and checks the published archive, `builder.py` with `enwik8.py` and `text8.py` turns it into records,
`prepared.py` runs that once per machine and reads the records back. Importing a builder imports TFDS, which takes a
third of a second, so only `prepared.py` does it, and only when something has to be built.
"""
