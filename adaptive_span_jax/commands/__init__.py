"""One file per `--mode`: the only place that knows the terminal and the other rooms at once.

In: a checked config, a workdir, flags. Out: an exit code. Start with `train.py`; `modes.py` is the table of modes and
the flags they take.
"""
