"""Checkpoints of the published PyTorch code, to and from runs of this package.

Converts a `torch.save` file to a run, or a run to such a file. Start with `convert.py`; `published_checkpoint.py`
reads and writes the file, `published_weights.py` maps names and layouts.
"""
