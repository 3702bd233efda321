"""Machines that are not here: their chips' published numbers, and compile-only devices that stand for them.

A topology names a machine: `v5e:2x4` is a TPU slice of 2 × 4 chips, `a100:8` a host with 8 GPUs, `h100:2x8` two hosts
with 8 each. Its devices cannot run anything, but the vendor's own compiler compiles for them, on any CPU machine.
"""

import dataclasses
import importlib.util
import os
import re

import jax
from jax.experimental import topologies

from adaptive_span_jax.errors import UserError
from adaptive_span_jax.runtime.chips import PEAK
from adaptive_span_jax.runtime.command_line import install_command

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator. Speeds are the vendor's peak numbers, for dense products."""

    name: str
    platform: str  # tpu | cuda
    usable_bytes: int  # of its memory, by one program
    bfloat16_flops: float  # per second; a multiply-add is 2
    float32_flops: float  # the same for float32 inputs, in the precision that JAX multiplies them in by default
    bandwidth: float  # bytes per second, to its own memory
    target: str = ""  # a GPU as its compiler wants it described: a GpuTargetConfigProto in text form


def _nvidia(cores: int, units: int, shared: int, gigabytes: float, cache: int, clock: float, major: int) -> str:
    """The compiler's description of a data-centre GPU; limits that all of them share are written here.

    Without versions the compiler would never put loops into command buffers.
    """
    return f"""
        platform_name: "CUDA"
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} }}
          core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_core: {shared} shared_memory_per_block: {48 * 1024}
          shared_memory_per_block_optin: {shared - 1024}
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
          l2_cache_size: {cache * 2**20} memory_bandwidth: {int(gigabytes * 1e9)} device_memory_size: {80 * 10**9}
          driver_version: "12.9.0" runtime_version: "12.9.0" compile_time_toolkit_version: "12.9.0"
        }}
        dnn_version_info {{ major: 9 minor: 8 }}
    """


# TPU: cloud.google.com/tpu/docs/{v5e,v6e,v5p}; usable memory is what libtpu's compiler says is available. A TPU
# multiplies float32 in one pass of bfloat16 unless told otherwise.
# GPU: NVIDIA's data sheets of A100 80GB SXM and H100 SXM, without sparsity; float32 is multiplied as TF32. JAX takes
# three quarters of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
CHIPS = {
    "v5e": Chip("TPU v5e", "tpu", int(15.75 * GIB), *PEAK["TPU v5e"], 819e9),
    "v6e": Chip("TPU v6e", "tpu", int(31.25 * GIB), *PEAK["TPU v6e"], 1640e9),
    "v5p": Chip("TPU v5p", "tpu", int(95.74 * GIB), *PEAK["TPU v5p"], 2765e9),
    "a100": Chip(
        "A100 80GB",
        "cuda",
        60 * 10**9,
        *PEAK["NVIDIA A100-SXM4-80GB"],
        2039e9,
        _nvidia(108, 64, 164 * 1024, 2039, 40, 1.41, 8),
    ),
    "h100": Chip(
        "H100 80GB",
        "cuda",
        60 * 10**9,
        *PEAK["NVIDIA H100 80GB HBM3"],
        3350e9,
        _nvidia(132, 128, 228 * 1024, 3350, 50, 1.98, 9),
    ),
}

# What must be installed to compile for a platform: a module to look for, and how to get it.
_COMPILERS = {
    "tpu": ("libtpu", install_command("tpu")),
    "cuda": (
        "jax_plugins.xla_cuda12",
        f"pip install --no-deps jax-cuda12-pjrt=={jax.__version__} jax-cuda12-plugin=={jax.__version__}",
    ),
}

_FORM = re.compile(r"(?P<chip>[a-z0-9]+):(?P<shape>[1-9]\d*(x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True)
class Machine:
    """A topology, taken apart."""

    topology: str
    chip: Chip
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, topology: str) -> "Machine":
        """Reads e.g. `v5e:2x4`."""
        form = _FORM.fullmatch(topology)
        chip = CHIPS.get(form["chip"]) if form else None
        if form is None or chip is None:
            raise UserError(
                f"--topology={topology}: it must be one of {', '.join(CHIPS)}, a colon and a shape, "
                "e.g. v5e:2x4 (chips of a TPU slice), a100:8 (GPUs of a host) or h100:2x8 (hosts × GPUs)"
            )
        shape = tuple(int(size) for size in form["shape"].split("x"))
        if chip.platform == "cuda" and len(shape) > 2:
            raise UserError(f"--topology={topology}: GPUs are counted as GPUS or HOSTSxGPUS, e.g. h100:8 or h100:2x8")
        return cls(topology, chip, shape)

    def devices(self) -> list[jax.Device]:
        """Devices that programs can be compiled for, though not run on."""
        module, install = _COMPILERS[self.chip.platform]
        if not _installed(module):
            raise UserError(f"--topology={self.topology} needs {module}, which is not installed: {install}")
        # This machine's own devices are not asked for, and libtpu and the CUDA plugin must not look for theirs.
        jax.config.update("jax_platforms", "cpu")
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        try:
            if self.chip.platform == "tpu":
                found = topologies.get_topology_desc(self.topology, "tpu")
            else:
                hosts, gpus = (1, *self.shape)[-2:]
                found = topologies.get_topology_desc(
                    self.topology, "cuda", topology=f"1x{hosts}x{gpus}", target_config=self.chip.target
                )
        except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"--topology={self.topology}: the compiler knows no such machine ({reason})") from error
        return list(found.devices)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
