"""How a machine without accelerators is made the most of."""

import ctypes
import os
import platform

import jax
from jax.sharding import Mesh

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8


def use_cores(streams: int) -> None:
    """Makes one device of every core, as far as the streams go round evenly.

    XLA runs much of a program, batched small products above all, on one core per device. Call it before anything else.
    JAX_NUM_CPU_DEVICES in the environment decides where it is set.
    """
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jax.config.update("jax_num_cpu_devices", max(n for n in range(1, cores + 1) if streams % n == 0))


def keep_freed_memory(mesh: Mesh) -> None:
    """Lets this process keep the memory that a step frees, for the next step, if the devices are cores.

    XLA gets a step's temporaries from malloc and frees them at its end. glibc hands so large a piece back to the
    system, which clears every page of it again at the next step: a fourteenth of a training step's processor time here,
    up to a quarter beside another large process. Costs up to a third more memory.
    """
    if mesh.devices.flat[0].platform == "cpu" and platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)  # no piece is too large for the heap
        mallopt(_M_TRIM_THRESHOLD, -1)  # and the heap never shrinks
        mallopt(_M_ARENA_MAX, 1)  # only the first heap can grow that far
