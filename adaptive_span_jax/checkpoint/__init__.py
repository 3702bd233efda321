"""Named trees of arrays and their metadata, to disk and back.

In: trees of arrays, `metadata.CheckpointMetadata`. Out: the same, from the newest checkpoint that is whole. Knows
nothing of the training state. Start with `manager.py`; `policy.py` says how often checkpoints are written
(`training/loop.py` also saves after each evaluation, `commands/train.py` at the end or on a signal), `retention.py`
which are kept, `sealing.py` how a folder becomes a checkpoint, `workdir.py` what else a run's directory holds.
"""
