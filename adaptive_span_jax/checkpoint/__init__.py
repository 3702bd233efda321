"""Saves and restores named trees of arrays with their metadata.

In: trees of arrays, `metadata.CheckpointMetadata`. Out: the same, from the newest intact checkpoint. Does not know
`TrainState`. Start with `manager.py`. `policy.py` decides when to save (`training/loop.py` also saves after each
evaluation, `commands/train.py` at the end or on a signal), `retention.py` which checkpoints to keep; `sealing.py` turns
a folder into a checkpoint atomically; `workdir.py` checks and locks a run's directory.
"""
