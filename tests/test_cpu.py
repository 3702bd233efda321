"""Memory that is freed stays with the process."""

import platform
import subprocess
import sys

import pytest

# Prints how many pages the system had to give for a large piece of memory: the first time, and after freeing it.
PROGRAM = """
import ctypes, resource, sys
import jax
from adaptive_span_jax import cpu, sharding

libc, size = ctypes.CDLL(None), 300 * 2**20
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    place = libc.malloc(size)
    libc.memset(place, 1, size)
    libc.free(place)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1] == "keep":
    cpu.keep_freed_memory(sharding.make_mesh())
print(pages(), pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no mallopt")
@pytest.mark.parametrize("how", ["keep", "give back"])
def test_memory_that_was_freed_is_not_asked_for_again(how):
    found = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    first, second = map(int, found.stdout.split())
    assert first > 100
    assert second < 20 if how == "keep" else second > first / 2
