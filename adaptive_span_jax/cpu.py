"""How a machine without accelerators is made the most of."""

import os

import jax


def use_cores(streams: int) -> None:
    """Makes one device of every core, as far as the streams go round evenly.

    XLA runs much of a program, batched small products above all, on one core per device. Call it before anything else.
    JAX_NUM_CPU_DEVICES in the environment decides where it is set.
    """
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", max(n for n in range(1, cores + 1) if streams % n == 0))
