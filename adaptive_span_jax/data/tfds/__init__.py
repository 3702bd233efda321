"""enwik8 and text8 as TFDS datasets that need no TensorFlow. Start with `builder.py`."""
