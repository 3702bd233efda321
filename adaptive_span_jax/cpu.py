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
    devices = max(n for n in range(1, cores + 1) if streams % n == 0)
    jax.config.update("jax_num_cpu_devices", devices)
    if devices == cores:
        # A device with one core has nothing to run side by side. XLA orders operations as if it had, which keeps more
        # arrays at a time: evaluation 1.20 → 1.12 s a segment without, training 2 to 3 % faster.
        schedule = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
        os.environ["XLA_FLAGS"] = f"{schedule} {os.environ.get('XLA_FLAGS', '')}"  # what the user says there wins
