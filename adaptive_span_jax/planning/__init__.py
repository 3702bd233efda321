"""Estimates for hardware you do not have: does a run fit in memory, and how long does a step take?

In: a config and a topology (`v5e:2x4`, `a100:8`). Out: memory from the vendor's own compiler, and estimates. Start with
`fit.py`; `topology.py` makes compile-only devices, `roofline.py` estimates times. `cycles.py` counts the cycles of a
step on TPUs: `dump.py` compiles, `bundles.py` reads a schedule, `hlo.py` the program.
"""
