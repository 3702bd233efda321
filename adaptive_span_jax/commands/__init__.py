"""One file per `--mode`: the only code that combines the other packages.

In: a checked config, a workdir, flags. Out: an exit code. Start with `train.py`; `modes.py` is the table of modes and
the flags they take.
"""
