"""Checkpoints of the published PyTorch code, to and from runs of this package.

In: a `torch.save` file, or a run. Out: the other. Start with `convert.py`; `published_checkpoint.py` reads and writes
the file, `published_weights.py` maps names and layouts.
"""
