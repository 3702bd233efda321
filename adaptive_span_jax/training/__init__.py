"""The train step and the training loop.

In: a config, segments, a model. Out: the next `state.TrainState`, metrics, scores. Start with `loop.py`, then
`step.py` (one step, a pure function), `objective.py` (the loss), `optimizer.py` (Adagrad as published), `state.py`.
`evaluation.py` scores a text; `recorder.py` and `metrics.py` write the logs; `diagnostics.py` warns about suspicious
spans, `nonfinite_steps.py` counts skipped steps, `capacity.py` checks memory, `init_from.py` starts from another run's
weights. Set-up, resuming and the report are in `commands/train.py`.
"""
