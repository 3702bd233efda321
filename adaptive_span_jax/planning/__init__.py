"""Plans for hardware you do not have: does a run fit in memory, how long does a step take, and what limits it?

In: a config and a topology (`v5e:2x4`, `a100:8`). Out: memory from the vendor's own compiler, and counted times. Start
with `fit.py`; `topology.py` makes compile-only devices, `spans.py` has the spans at which a step is counted. On TPUs
`dump.py` compiles, `bundles.py` reads a schedule, `hlo.py` the program, and `cycles.py` counts the cycles of a step. On
GPUs `gpu_kernels.py` counts the kernels of the program.
"""
