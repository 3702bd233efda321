"""A step, and the loop around it.

In: a config, segments, a model. Out: the next `state.TrainState`, metrics, scores. Start with `loop.py`, then
`step.py` (one step, a pure function), `objective.py` (what it minimizes), `optimizer.py` (Adagrad as published),
`state.py`. `evaluation.py` scores a text; `recorder.py` and `metrics.py` write down what happens; `diagnostics.py`
warns, `nonfinite_steps.py` counts skipped steps, `capacity.py` checks memory, `init_from.py` starts from another run's
weights. Set-up, resuming and the report are `commands/train.py`.
"""
