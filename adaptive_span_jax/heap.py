"""The C library's heap of this process, told to keep memory that has been freed.

On a CPU a training step's temporaries, a gigabyte and more, come from malloc at its start and are freed at its end.
glibc hands blocks of that size back to the system at once, and gets them back empty, a page fault for every 4 KiB: a
quarter of a step, on a virtual machine whose host takes freed pages away. Accelerators have allocators of their own.
"""

import ctypes
import os

# Of <malloc.h>: everything from one heap that grows and never shrinks.
_SETTINGS = {-8: 1, -4: 0, -1: -1}  # M_ARENA_MAX, M_MMAP_MAX, M_TRIM_THRESHOLD


def keep_freed_memory() -> None:
    """Memory once used stays with the process. Settings of MALLOC_… in the environment decide where there are any."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library or system: its heap is its own affair
    if mallopt is not None:
        for name, value in _SETTINGS.items():
            mallopt(name, value)
